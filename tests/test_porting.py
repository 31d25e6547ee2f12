"""Promises 1 and 8: a model of one's own, in a copy of a script or with its functions in another
trainer, is trained as by one process, or refused in words."""

import functools
import importlib
import re
from unittest import mock

import pytest
import torch
from torch import nn

import cp
from common.data import load_steps
from common.model import Attention, plain_attention
from common.options import SettingError
from tests.support import lifted
from tests.support.compare import assert_same_run, furthest
from tests.support.lifted import MAX_NORM, Parts, hybrid_in_stages, plain, train, zero
from tests.support.on_ranks import on_ranks
from tests.support.processes import ROOT, edited
from tests.support.sample import table

OPTIONS = ("--hidden-size 48 --intermediate-size 80 --num-hidden-layers 2 --num-attention-heads 4 "
           "--num-key-value-heads 2 --seq-len 32 --batch-size 8 --grad-accum 2 --steps 3 "
           "--log-every 1 --warmup-steps 3 --save-every 2 --dtype float64")
PORTED = "\nimport torch\n", "\nimport torch\nfrom tests.support.ported import *\n"
HEADINGS = re.findall(r"(?m)^## \w+: ([^;\n]*)(?:; (.*))?((?:\n[^#\n].*|\n)*)",
                      (ROOT / "tests" / "ports.md").read_text())


def pairs_in(block):
    """The edits of a block: pairs (text that a script has once, new)."""
    return [[re.sub(r"(?m)^[-+]", "", text)[:-1] for text in pair]
            for pair in re.findall(r"(?m)((?:^-.*\n)+)((?:^\+.*\n)*)", block)]


def port(kinds, script=""):
    """The edits of ports.md that bring some kinds to a script."""
    edits = [PORTED]
    for own, scripts, block in HEADINGS:
        if {*kinds.split(", ")} & {*own.split(", ")} and script in (scripts.split() or [script]):
            edits += pairs_in(block)
    return edits


EVALUATED = " --val-data {val} --val-batches 1 --val-every 1"
OPTIONS_OF = {"a metric that is no mean": EVALUATED, "an average": EVALUATED}
INFINITE = "gradients_times(float('inf'), 2)"
INJECT = {"a step that is skipped": INFINITE, "a scaler": INFINITE,
          "only layer 1": "loss_in_chunks()"}  # its head is frozen
AS_BEFORE = "returns a dict", "dicts in dicts", "a metric that is no mean", "an average"


@pytest.mark.parametrize("kind, command, world", table("""
* frozen | zero.py | 2
* only layer 1 | pp.py | 2
* windows | cp.py --attention ulysses | 2
* condition | pp.py | 2
* condition | tp.py | 2
* norms | tp.py | 2
* own stages | pp.py | 2
data that draws | single.py --grad-accum 4 | 0
* data that draws | fsdp.py --workers 2 | 2
* dicts in dicts | ddp.py | 2
* z-loss | tp.py | 2
class weights | fsdp.py | 2
penalty | ddp.py | 2
* penalty | zero.py | 2
router | ep.py | 2
* two optimizers | single.py | 0
* state in many places | fsdp.py | 2
* a step that is skipped | fsdp.py | 2
* a scaler | fsdp.py | 2
* a metric that is no mean | fsdp.py | 2
* a scheduler with a state | fsdp.py | 2
* an average | fsdp.py | 2
noise and a norm | fsdp.py | 2
a gradient that is changed | fsdp.py | 2
* thawed after the save | fsdp.py | 2
frozen | tp.py | 2
tied | tp.py | 2
tied | zero.py | 2
only layer 1 | hybrid_3d.py --pp 2 | 2
condition | tp.py --no-sequence-parallel | 2
lora | tp.py | 2
lora | tp.py --no-sequence-parallel | 2
norms | tp.py --no-sequence-parallel | 2
plain head | tp.py | 2
plain head | tp.py --no-sequence-parallel | 2
recurrence | cp.py --attention ulysses | 2
own stages | pp.py --schedule zbv | 2
data that draws | zero.py | 4
data that draws | tp.py --workers 1 | 2
data that draws | cp.py | 2
data that draws | pp.py --workers 1 | 2
dicts in dicts | single.py | 0
dicts in dicts | zero.py | 2
dicts in dicts | fsdp.py | 2
dicts in dicts | tp.py | 2
dicts in dicts | cp.py | 2
dicts in dicts | pp.py | 2
dicts in dicts | hybrid_3d.py | 2
dicts in dicts | ep.py | 2
z-loss | ddp.py | 2
z-loss | zero.py | 2
z-loss | fsdp.py --replicate 2 | 4
z-loss | cp.py | 2
z-loss | pp.py | 2
z-loss | hybrid_3d.py --tp 2 --pp 2 | 4
class weights | ddp.py | 2
class weights | cp.py | 2
class weights | pp.py | 2
penalty | fsdp.py --replicate 2 | 4
penalty | fsdp.py --no-reshard-after-forward | 2
penalty | tp.py | 2
penalty | cp.py | 2
penalty | pp.py | 2
penalty | hybrid_3d.py --tp 2 --pp 2 | 4
penalty | hybrid_3d.py --cp 2 --tp 2 | 4
returns a dict | fsdp.py | 2
returns a dict | tp.py | 2
returns a dict | pp.py | 2
returns a dict | hybrid_3d.py --tp 2 --pp 2 | 4
returns a dict | hybrid_3d.py --cp 2 | 2
router | ep.py --ep 2 | 4
router | ep.py --ep 1 --activation-checkpointing | 2
two optimizers | zero.py | 2
state in many places | ddp.py | 2
state in many places | zero.py | 2
state in many places | tp.py | 2
state in many places | hybrid_3d.py | 2
a step that is skipped | ddp.py | 2
a step that is skipped | zero.py | 2
a step that is skipped | pp.py | 2
a scaler | zero.py | 2
a metric that is no mean | ddp.py | 2
a metric that is no mean | zero.py | 2
a scheduler with a state | ddp.py | 2
a scheduler with a state | zero.py | 2
a scheduler with a state | tp.py | 2
an average | ddp.py | 2
an average | zero.py | 2
an average | tp.py | 2
noise and a norm | ddp.py | 2
noise and a norm | zero.py | 2
a gradient that is changed | ddp.py | 2
a gradient that is changed | zero.py | 2
a gradient that is changed | tp.py | 2
thawed before the save | ddp.py | 2
thawed before the save | zero.py | 2
thawed before the save | fsdp.py | 2
thawed before the save | tp.py | 2
thawed after the save | ddp.py | 2
thawed after the save | zero.py | 2
thawed after the save | tp.py | 2
"""))
def test_it_is_trained_as_by_one_process(once, tmp_path_factory, kind, command, world):
    """All that is logged, weights and optimizer states; those of the plain model differ. Then it
    resumes its own checkpoint of step 2, in the same bits, and that of one process."""
    script, _, more = command.partition(" ")
    one, experts = ("ep.py", " --num-experts 4") if script == "ep.py" else ("single.py", "")
    options, inject = OPTIONS + experts + OPTIONS_OF.get(kind, ""), INJECT.get(kind, "")
    folder = tmp_path_factory.getbasetemp() / kind.replace(" ", "-")
    single, copy = (edited(folder, name, *port(kind, name)) for name in (one, script))
    expected = once(single, 0, options, inject=inject)
    found = once(copy, world, f"{options} {more}",
                 inject=f"{inject}; resumed(['{expected.out}'])".strip("; "))
    plain = once(one, 0, options)
    assert kind in AS_BEFORE or furthest(expected.curve(), plain.curve()) > 1e-4
    assert_same_run(found, expected)
    assert found.again().curve() == found.curve()[2:]  # bit for bit
    assert furthest(found.again(1).curve(), expected.curve()[2:]) < 1e-10


def test_zero_with_muon(once, tmp_path):
    """Of examples/fsdp_muon.py, beside torch's, whose states have other names."""
    one, found = (once(edited(tmp_path / "copies", script, *port("Muon", script)), world, OPTIONS,
                       inject="unrounded_muon()").curve()
                  for script, world in (("single.py", 0), ("zero.py", 2)))
    assert furthest(one, found) < 1e-10


@on_ranks(2)
def test_a_step_that_leaves_out_a_part_is_refused():
    """In the last step no rank uses attention: the script ends in it, not in a next one."""
    left_out = "in step 3 a rank left out parameters of its model: add 0"
    attention = mock.patch.object(Attention, "forward", Attention.forward)

    def skip_in_the_last(*args):
        for step, batch in load_steps(*args):
            if step == 2:
                Attention.forward = lambda layer, x, *_: x
            yield step, batch

    for command, words in {
        **dict.fromkeys(("ddp.py", "cp.py"), "find_unused_parameters=True"),
        **dict.fromkeys(("zero.py", "fsdp.py", "ep.py --num-experts 4", "hybrid_3d.py"), left_out),
    }.items():
        script, *options = f"{command} {OPTIONS} --data {__file__}".split()
        module = importlib.import_module(script.removesuffix(".py"))
        with (attention, mock.patch.object(module, "load_steps", skip_in_the_last),
              pytest.raises((SettingError, RuntimeError), match=words)):
            module.main(options)


# Functions of the scripts in a trainer that is not ours, tests/support/lifted.py: losses, norms and
# parameters of one process, also if a part of the model rests. Or the step is refused, as the table
# in docs/strategies.md says.

# What the samples of the micro-batches of each step use: see ``train`` and ``Choice`` of lifted.py.
# By the columns of the table: some micro-batches do not use a part; some ranks do not (in capitals:
# all parts are computed, and each rank's loss takes one), also other numbers of parts or none; no
# rank does.
COLUMNS = [
    ["aa bb, bb aa, aa bb"], ["ab bb, bb ba, aa ab", "AB bb, bb BA, cc AB", "ac bb, c- ca, -b"],
    ["aa bb, bb bb, AA, bb, --"]]
OTHER_UNITS = "ranks used other units of FSDP"
# What is refused: in the words, what is refused in the last of these steps
REFUSED = {
    "refused in the same step, in torch's words": (
        "find_unused_parameters=True", ["ab", "cc, aa", "cc cc, cc ab"]),
    "refused in the same step": (
        "in step {} a rank left out parameters of its model", ["aa", "cc, bb bb", "cc, AA"]),
    "refused at the end of the step, if it ends: see below": (
        f"in step {{}} {OTHER_UNITS}", ["ab", "cc, ba"]),
    "equal": ("", []), "cannot be": ("", []),
}
# The number of a row of the table; where this runs; a strategy, and a model
STRATEGIES = """
1 | sample | ddp(model) | Parts()
1 | sample | context(model) | Sequences()
1 | 2 ranks | context(model, cp.allgather_attention) | Sequences()
1 | 4 ranks | ddp(model) | Parts()
2 | sample | ddp(model, find_unused_parameters=True) | Parts()
2 | 2 ranks | context(model, find_unused_parameters=True) | Sequences()
2 | 4 ranks | ddp(model, find_unused_parameters=True) | Parts()
3 | sample | fully_sharded(model) | Parts()
3 | sample | zero(model) | Parts()
3 | 2 ranks | zero(model, 2) | Parts()
3 | sample | fully_sharded(model, 2) | Parts()
3 | 2 ranks | zero(model, stage=1) | Parts()
3 | 4 ranks | fully_sharded(model) | Parts()
3 | 4 ranks | fully_sharded(model, 2) | Parts()
3 | 4 ranks | fully_sharded(model, 4) | Parts()
4 | sample | fully_sharded(model, together=True) | Parts()
4 | 2 ranks | zero(model, 2, together=True) | Parts()
4 | 2 ranks | expert(model, 2, together=True) | Mixture(rests=True)
4 | 4 ranks | fully_sharded(model, 2, together=True) | Parts()
4 | 4 ranks | hybrid_in_stages(model) | Parts()
5 | sample | fully_sharded(model, together=True) | Parts(zeros=True)
5 | 2 ranks | fully_sharded(model, 2, together=True) | Parts(zeros=True)
5 | 2 ranks | zero(model, together=True) | Parts(zeros=True)
5 | 2 ranks | zero(model, 2, together=True) | Parts(zeros=True)
5 | 2 ranks | zero(model, stage=1, together=True) | Parts(zeros=True)
5 | 2 ranks | expert(model, 1, together=True) | Mixture(rests=True, zeros=True)
5 | 2 ranks | expert(model, 2, together=True) | Mixture(rests=True, zeros=True)
5 | 4 ranks | fully_sharded(model, together=True) | Parts(zeros=True)
5 | 4 ranks | fully_sharded(model, 2, together=True) | Parts(zeros=True)
5 | 4 ranks | fully_sharded(model, 4, together=True) | Parts(zeros=True)
5 | 4 ranks | hybrid_in_stages(model) | Parts(zeros=True)
6 | sample | expert(model, 2) | Mixture()
6 | 2 ranks | expert(model, 1) | Mixture()
6 | 4 ranks | expert(model, 2, replicas=2) | Mixture()
6 | 4 ranks | expert(model, 1, replicas=2) | Mixture()
7 | sample | tensor(model) | Parts()
7 | sample | pipeline(model, "zbv") | Parts()
7 | 2 ranks | pipeline(model, "gpipe") | Parts()
7 | 2 ranks | pipeline(model, "1f1b") | Parts()
7 | 2 ranks | pipeline(model, "interleaved1f1b") | Parts()
7 | 2 ranks | pipeline(model, "loopedbfs") | Parts()
7 | 2 ranks | pipeline(model, "zerobubble") | Parts()
7 | 2 ranks | pipeline(model, "dualpipev") | Parts()
"""


@functools.cache
def expected(steps, model):
    return train(eval(f"lambda: {model}", vars(lifted)), plain, steps.split(", "))


def equal_steps(cells, model):
    """What a row trains as one process does."""
    yield "cc cc, cc cc"  # leaves out nothing
    for number, cell in enumerate(cells):
        # The samples of ``context`` are alike: ranks with other positions are as those of ddp.
        if cell == "equal" and (model, number) != ("Sequences()", 1):
            yield from COLUMNS[number]


def compare(where):
    page = (ROOT / "docs" / "strategies.md").read_text().partition("\n## Parts that rest\n")[2]
    lines = re.findall(r"(?m)^\| .* \| (.*) \| (.*) \| (.*) \|$", page)
    for number, on, code, model in (row.values for row in table(STRATEGIES)):
        if on != where:
            continue
        print(code, model)
        make, strategy = (eval(text, vars(lifted)) for text in (f"lambda: {model}",
                                                                f"lambda model: {code}"))
        cells = lines[number]
        for steps in equal_steps(cells, model):
            history, parameters = train(make, strategy, steps.split(", "))
            right, whole = expected(steps, model)
            assert min(norm for _, norm in right) > MAX_NORM
            torch.testing.assert_close(history, right, rtol=0, atol=1e-12)
            for key, value in parameters.items():
                torch.testing.assert_close(value, whole[key], rtol=0, atol=1e-12)
        for cell in {*cells}:
            words, refused = REFUSED[cell]
            for steps in refused:
                match = words.format(1 + steps.count(","))
                with pytest.raises((SettingError, RuntimeError), match=match):
                    train(make, strategy, steps.split(", "))


class PartsFirst(Parts):
    """Its first units are a and b, but they are not called first."""

    def __init__(self):
        super().__init__()
        self.add_module("first", self._modules.pop("first"))

    def forward(self, x, use):
        x = self.choice(x + self.first(x), use)
        return x + self.out(x)


@on_ranks(2)
def test_a_sample_of_the_table():
    compare("sample")
    # The calls are the same, and each rank's loss takes another part.
    with pytest.raises(SettingError, match=f"in step 2 {OTHER_UNITS}"):
        train(Parts, zero, ("cc", "AB"))
    with pytest.raises(SettingError, match="in step 2 a rank left out parameters"):
        train(Parts, functools.partial(zero, together=True), ("cc", "ab AB"))
    # All parts are used, in another order: of units 1 and 2 too.
    for make in Parts, PartsFirst:
        with pytest.raises(SettingError, match=f"in step 2 {OTHER_UNITS}"):
            train(make, zero, ("cc", "AB BA"))


@on_ranks(2, thorough=True)
def test_the_rest_of_the_table():
    compare("2 ranks")


@on_ranks(4, thorough=True)
def test_on_four_ranks():
    compare("4 ranks")
    # Stages have other units; ranks of one stage have not.
    with pytest.raises(SettingError, match=f"in step 2 {OTHER_UNITS}"):
        train(Parts, functools.partial(hybrid_in_stages, together=False), ("cc", "abba"))


# What cp.py refuses


@pytest.mark.parametrize("name, keyword, value", table("""
ring_attention | attn_mask | torch.ones(4, 4).tril()
ring_attention | dropout_p | 0.1
ring_attention | window_size | 7
allgather_attention | attn_mask | torch.ones(4, 4).tril()
allgather_attention | dropout_p | 0.1
allgather_attention | window_size | 7
"""))
def test_what_an_attention_does_not_compute_is_refused(name, keyword, value):
    q, more = torch.zeros(1, 2, 4, 8), {keyword: eval(str(value))}
    words = f"ring and all-gather attention take is_causal .*{keyword}.* ulysses_attention"
    with pytest.raises(SettingError, match=words):
        getattr(cp, name)(q, q, q, group=None, is_causal=True, **more)


class Own(nn.Module):
    def __init__(self, attention=plain_attention, inner=None):
        super().__init__()
        self.attention, self.inner = attention, inner


@pytest.mark.parametrize("words, model", table(r"""
no module of Sequential has plain_attention as | nn.Sequential(nn.Linear(2, 2))
ab \(Own\) computes attention by sum | nn.ModuleDict({"aa": Own(), "ab": Own(torch.sum)})
1 .* looks at other pos | nn.Sequential(Own(), nn.Conv1d(2, 2, 3))
0 .* looks at other pos | nn.Sequential(nn.GRU(2, 2), Own())
"""))
def test_attention_that_would_be_forgotten_is_refused(words, model):
    """And whatever else needs other positions."""
    with pytest.raises(SettingError, match=words):
        cp.set_attention(eval(model), cp.ring_attention, None, plain_attention, without=["a"])


def test_attention_is_set_wherever_it_is_read():
    model = nn.Sequential(Own(inner=Own()), nn.Conv1d(2, 2, 1), nn.ModuleDict({"a": nn.GRU(2, 2)}),
                          Own(inner=Own(torch.sum)))
    cp.set_attention(model, cp.ring_attention, "group", replaces=plain_attention,
                     without=["2.a", "3.inner"])
    for module in (model[0], model[0].inner, model[3]):
        assert module.attention.func is cp.ring_attention
    assert model[3].inner.attention is torch.sum
