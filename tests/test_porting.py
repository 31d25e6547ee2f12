"""Promises 1 and 8: a model of one's own, in a copy of a script or with its functions in another
trainer, is trained as by one process, or refused in words."""

import functools
import importlib
from unittest import mock

import pytest
import torch
from torch import nn

import cp
import pp
from common.data import load_steps
from common.model import Attention, plain_attention
from common.options import SettingError
from tests.support.compare import assert_near, furthest, saved
from tests.support.lifted import (
    MAX_NORM, Mixture, Parts, Sequences, context, ddp, expert, fully_sharded, hybrid_in_one_stage,
    hybrid_in_stages, pipeline, plain, tensor, train, zero
)
from tests.support.on_ranks import on_ranks
from tests.support.processes import ROOT, edited
from tests.support.sample import sampled, table

OPTIONS = ("--hidden-size 48 --intermediate-size 80 --num-hidden-layers 2 --num-attention-heads 4 "
           "--num-key-value-heads 2 --seq-len 32 --batch-size 12 --steps 3 --log-every 1 "
           "--warmup-steps 3 --save-every 2 --dtype float64")


def with_model(new):
    """The edits that put the model ``new``, of tests/support/ported.py, in place of ours."""
    return [("\nimport torch\n", "\nimport torch\nfrom tests.support.ported import *\n"),
            ("Transformer(args.config)", new)]


TIE = [("        model = Transformer(args.config).to(args.param_dtype)\n",
        "        model = Transformer(args.config).to(args.param_dtype)\n"
        "        model.lm_head.weight = model.model.embed_tokens.weight\n")]
TIED_UNITS = [("        [model.model.embed_tokens], *([layer]", "        *([layer]"),
              ("[model.model.norm, model.lm_head],",
               "[model.model.embed_tokens, model.model.norm, model.lm_head],")]

# Attention of one's own: a sliding window, a soft cap, and ALiBi's slopes of a rank's own heads
WINDOWS = with_model("with_own_attention(Transformer(args.config))")
OWN_HEADS = [
    ("replaces=plain_attention", "replaces=own_attention"),
    (" attention=plain_attention)", " attention=functools.partial(own_attention, first_head="
     "cp_rank * args.config.num_attention_heads // n))"),
]

# Parts that some samples do not use: a micro-batch of one sample uses one of the heads. They are
# compared with one process in test_check.py
HEADS = with_model("with_heads(Transformer(args.config))")
UNITS = "        [model.model.norm, model.lm_head],\n"
DATA_PARALLEL = {
    "ddp.py": [("gradient_as_bucket_view=True",
                "gradient_as_bucket_view=True, find_unused_parameters=True")],
    **{f"{name.lower()}.py": [(f"        # {name}: the norm",
                               f"        usage.drop_unused()\n        # {name}: the norm")]
       for name in ("ZeRO", "FSDP")},
}

# A condition: in a pipeline it is the first token of what travels. Under tensor parallelism every
# rank computes it, and adds it to a part of the sequence
CONDITIONED = with_model("Conditioned(args.config)")
CONDITION = "inputs[:, 0] % 4"
IN_ONE = [("model(inputs, targets)", f"model(inputs, {CONDITION}, targets)")]
IN_STAGES = [
    ("    check_stages(whole,", "    for stage, part in zip(stages, parts):\n        if stage:\n"
     "            del part.model.classes\n    check_stages(whole,"),
    ("        hidden = torch.empty(*tokens.shape, args",
     "        classes = torch.empty(len(tokens), dtype=torch.int64)\n"
     "        hidden = torch.empty(len(tokens), 1 + args.seq_len, args"),
    ("len(stage_layers), M, tokens, hidden", "len(stage_layers), M, (tokens, classes), hidden"),
    ("schedule.eval(inputs, ", f"schedule.eval(inputs, {CONDITION}, "),
    ("                inputs, targets=", f"                inputs, {CONDITION}, targets="),
]
TP_OF_CONDITION = [
    ('    return {\n        "model.embed', """    return {
        "model.classes": Replicated(),
        "model.layers.*.shift": Replicated(partial_gradients=sequence_parallel),
        "model.embed"""), *IN_ONE,
]

# Norms of queries and keys. Of (B, T, heads, K) a rank has its own heads
NORMS = with_model("with_norms(Transformer(args.config))")
TP_OF_NORMS = [('        "model.layers.*.self_attn.o_proj"', """\
        "model.layers.*.self_attn.[qk]_norm": SequenceParallel(
            sequence_dim=2, use_local_output=True),
        "model.layers.*.self_attn.o_proj\"""")]

# A plain head: the loop computes the loss of its logits, under tensor parallelism in shards
PLAIN_HEAD = with_model("with_plain_head(Transformer(args.config))") + [
    ("model(inputs, targets)", 'torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), '
     'targets.flatten(), reduction="sum")'), (", head=model.lm_head)\n", ")\n")]
TP_OF_HEAD = [
    ('torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), '
     'targets.flatten(), reduction="sum")', "loss_of_split_logits(model(inputs), targets)"),
    ("    model.lm_head.loss = loss_of_split_logits  # TP: the logits are (B/accum, T, V/tp)\n",
     ""),
    ("output_layouts=Replicate()),\n    }", "output_layouts=Shard(-1),\n"
     "                                   use_local_output=False),\n    }"),
    ("loss += micro_loss.detach()", "loss += micro_loss.detach().full_tensor()")]

# A recurrence: each rank adds what comes from the parts of the sequence before its own
RECURRENCE = with_model("with_recurrence(Transformer(args.config))")
CP_OF_RECURRENCE = [("    # CP: the positions in", """    for layer in layers if n > 1 else []:
        layer.mesh = mesh["cp"]
    # CP: the positions in""")]

# LoRA: A and B are split as their base is
LORA = with_model("with_lora(Transformer(args.config))") + [
    ("decay_groups(model.parameters(),", "decay_groups(filter(lambda p: p.requires_grad, "
     "model.parameters()),")]
TP_OF_LORA = [
    ('        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=stream),\n', """\
        "model.layers.*.self_attn.o_proj.base": RowwiseParallel(output_layouts=stream),
        "model.layers.*.self_attn.o_proj.A": RowwiseParallel(output_layouts=Replicate()),
        "model.layers.*.self_attn.o_proj.B": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=stream),
        "model.layers.*.mlp.up_proj.base": ColwiseParallel(),
        "model.layers.*.mlp.up_proj.A": ColwiseParallel(output_layouts=Replicate()),
        "model.layers.*.mlp.up_proj.B": ColwiseParallel(),
"""),
    ('        "model.layers.*.mlp.up_proj": ColwiseParallel(),\n', "")]

# A model of one's own in a pipeline: six places name its parts
OWN = with_model("Own(args.config)")
OWN_IN_ONE = [("model.model.layers.values()", "model.blocks.values()"),
              (", head=model.lm_head)", ")")]
OWN_STAGES = [
    ("len(whole.model.layers), n * v", "len(whole.blocks), n * v"),
    ("layers = part.model.layers.values()", "layers = part.blocks.values()"),
    (", head=part.lm_head)", ")"),
    ("(model.lm_head, model.model.layers[\"0\"])", "(model.head, model.blocks[\"0\"])"),
    ("""    for name in list(model.model.layers):
        if int(name) not in layers[stage]:
            del model.model.layers[name]
    if stage > 0:
        model.model.embed_tokens = nn.Identity()
    if stage < len(layers) - 1:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
""", """    for name in list(model.blocks):
        if int(name) not in layers[stage]:
            del model.blocks[name]
    if stage > 0:
        model.embed, model.places = nn.Identity(), nn.Identity()
    if stage < len(layers) - 1:
        model.norm, model.head = nn.Identity(), nn.Identity()
"""),
]


# Optimizers
def optimizers(new, parameters="model.parameters()"):
    """The edits that put the list ``new`` in place of AdamW; P stands for the parameters."""
    return [
        (f"""    optimizer = torch.optim.AdamW(
        decay_groups({parameters}, args.weight_decay), args.lr, args.betas, fused=True
    )
""", f"    optimizer = {new}\n".replace("P", parameters)),
        ("        optimizer.step()\n", "        [each.step() for each in optimizer]\n"),
        ("        optimizer.zero_grad()\n", "        [each.zero_grad() for each in optimizer]\n"),
    ]


TWO = ("[torch.optim.SGD([p for p in P if p.ndim == 2], 0.05, 0.9, nesterov=True), "
       "torch.optim.AdamW([p for p in P if p.ndim < 2], args.lr)]")

TRAINED_IF = ("after(common.model.Transformer, '__init__', lambda _, model, config: ["
              "p.requires_grad_({}) for name, p in model.named_parameters()])")

KINDS = {  # edits of all scripts; more of single.py and others; what is injected
    "frozen": ([], {}, TRAINED_IF.format("p.ndim == 2 and not {'1', 'embed_tokens'} & "
                                         "set(name.split('.'))")),
    "tied": (TIE, {"zero.py": TIED_UNITS}, ""),
    "only layer 1": ([], {}, TRAINED_IF.format("'layers.1.' in name")),
    "windows": (WINDOWS, {"cp.py": OWN_HEADS}, ""),
    "condition": (CONDITIONED,
                  {"single.py": IN_ONE, "pp.py": IN_STAGES, "tp.py": TP_OF_CONDITION}, ""),
    "lora": (LORA, {"tp.py": TP_OF_LORA}, ""),
    "norms": (NORMS, {"tp.py": TP_OF_NORMS}, ""),
    "plain head": (PLAIN_HEAD, {"tp.py": TP_OF_HEAD}, ""),
    "recurrence": (RECURRENCE, {"cp.py": CP_OF_RECURRENCE}, ""),
    "own stages": (OWN, {"single.py": OWN_IN_ONE, "pp.py": OWN_STAGES}, ""),
    "two optimizers": ([], {
        "single.py": optimizers(TWO), "zero.py": optimizers(TWO),
    }, ""),
}


# test_check.py has ties, and heads that some samples do not use
@pytest.mark.parametrize("kind, command, world", table("""
* frozen | zero.py | 2
* only layer 1 | pp.py | 2
* windows | cp.py --attention ulysses | 2
* condition | pp.py | 2
* condition | tp.py | 2
* two optimizers | single.py | 0
* norms | tp.py | 2
* own stages | pp.py | 2
frozen | tp.py | 2
tied | tp.py | 2
tied | zero.py | 2
only layer 1 | hybrid_3d.py --pp 2 | 2
condition | tp.py --no-sequence-parallel | 2
two optimizers | zero.py | 2
lora | tp.py | 2
lora | tp.py --no-sequence-parallel | 2
norms | tp.py --no-sequence-parallel | 2
plain head | tp.py | 2
plain head | tp.py --no-sequence-parallel | 2
recurrence | cp.py --attention ulysses | 2
own stages | pp.py --schedule zbv | 2
"""))
def test_it_is_trained_as_by_one_process(once, tmp_path_factory, kind, command, world):
    """Losses, norms and weights; those of the plain model differ. Then it resumes its own
    checkpoint and that of one process."""
    script, _, more = command.partition(" ")
    edits, own_edits, inject = KINDS[kind]
    folder = tmp_path_factory.getbasetemp() / kind.replace(" ", "-")
    single, copy = (edited(folder, name, *edits, *own_edits.get(name, []))
                    for name in ("single.py", script))
    expected = once(single, 0, OPTIONS, inject=inject)
    found = once(copy, world, f"{OPTIONS} {more}",
                 inject=f"{inject}; resumed(['{expected.out}'])".strip("; "))
    plain = once("single.py", 0, OPTIONS).curve()
    assert furthest(expected.curve(), plain) > 1e-3
    assert furthest(found.curve(), expected.curve()) < 1e-10
    assert_near(saved(found), saved(expected))
    if kind == "two optimizers":
        assert expected.history[2]["lr"] == 0.05  # of the first group, at its peak
    own, of_one = (found.again(i).curve() for i in (0, 1))
    assert own == found.curve()[2:]  # bit for bit
    assert furthest(of_one, expected.curve()[2:]) < 1e-10


NESTED = [("\nimport torch\n", "\nimport torch\nfrom tests.support.ported import *\n"),
          ("dataset = open_dataset(args)", "dataset = Nested(open_dataset(args))")]
UNPACKED = [("        seed_step(", "        batch = [(x['text']['tokens'], x['targets']) "
             "for x in batch]\n        seed_step(")]
FIRST = [("in dataset[0])", "in (dataset[0]['text']['tokens'], dataset[0]['targets']))")]
KEYWORDS = [("Transformer(args.config)", "TakesText(args.config)"),
            ("(batch, dist", "([(None, x['targets']) for x in batch], dist"),
            ("(inputs, targets) in enum", "micro_batch in enum"),
            ("x, y = (row.expand(samples, -1).to(device) for row in dataset[0])",
             "sample = default_collate([dataset[0]] * samples)"),
            ("replica.eval()(x, y)", "replica.eval()(**sample)"),
            ("replica(inputs, targets)", "replica(**micro_batch)")]
OF_SCRIPTS = {"single.py": 0, **dict.fromkeys(
    "ddp.py zero.py fsdp.py tp.py cp.py pp.py hybrid_3d.py ep.py".split(), 2)}


@pytest.mark.parametrize("script", sampled([*OF_SCRIPTS], ["ddp.py"]))
def test_samples_may_be_dicts_in_dicts(once, tmp_path, script):
    """In ddp.py the model takes them as keywords, elsewhere the loop takes out what it needs."""
    more = " --num-experts 4" if script == "ep.py" else ""
    edits = {"ddp.py": KEYWORDS, "cp.py": UNPACKED + FIRST}.get(script, UNPACKED)
    copy = edited(tmp_path / "copy", script, *NESTED, *edits)
    found = once(copy, OF_SCRIPTS[script], OPTIONS + more)
    single = once("ep.py" if more else "single.py", 0, OPTIONS + more)
    assert furthest(found.curve(), single.curve()) < 1e-10


@on_ranks(2)
def test_a_step_that_leaves_out_a_part_is_refused():
    """In the last step no rank uses attention: the script ends in it, not in a next one."""
    left_out = "in step 3 a rank left out parameters: call usage.drop_unused"
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

# What the samples of the micro-batches of each step use: see ``train`` and ``Choice`` of lifted.py
NOBODY = ("cc cc", "cc cc")  # leaves out a part
SOME_MICRO_BATCHES = ("aa bb", "bb aa", "aa bb")
SOME_RANKS = ("ab bb", "bb ba", "aa ab")
TAKEN = ("AB bb", "bb BA", "cc AB")  # all parts are computed, and each rank's loss takes one
MORE = ("ac bb", "c- ca", "-b")  # other numbers of parts, or none
NO_RANK = ("aa bb", "bb bb", "AA", "bb", "--")
COLUMNS = [SOME_MICRO_BATCHES], [SOME_RANKS, TAKEN, MORE], [NO_RANK]

EQUAL, CANNOT_BE = "equal", "cannot be"
TORCH = "refused in the same step, in torch's words"
DROPPED = "equal with `drop_unused`, otherwise refused in the same step"
OTHER_ORDER = "refused at the end of the step, if it ends: see below"
OTHER_UNITS = "ranks used other units of FSDP"
# What is refused: in the words, what is refused in the last of these steps
REFUSED = {
    TORCH: ("find_unused_parameters=True", [("ab",), ("cc", "aa"), ("cc cc", "cc ab")]),
    DROPPED: ("in step {} a rank left out parameters: call usage.drop_unused",
              [("aa",), ("cc", "bb bb"), ("cc", "AA")]),
    OTHER_ORDER: (f"in step {{}} {OTHER_UNITS}", [("ab",), ("cc", "ba")]),
}


def variants(function, make=Parts, **options):
    """[(function with one of the values of the option, model)]"""
    ((name, values),) = options.items()
    return [(functools.partial(function, **{name: value}), make) for value in values]


FIND = functools.partial(ddp, find_unused_parameters=True)
TOGETHER = functools.partial(fully_sharded, together=True)
GATHERED_ONCE = functools.partial(zero, together=True)
PARTS_AND_EXPERTS = functools.partial(Mixture, rests=True)
# The table in docs/strategies.md: its cells; what computes them on 2 ranks by default; what else;
# what on 4 ranks.
TABLE = {
    "`ddp.py`, `cp.py`": (
        [TORCH, TORCH, TORCH], [(ddp, Parts), (context, Sequences)],
        variants(context, Sequences, attention=[cp.allgather_attention]), [(ddp, Parts)]),
    "`ddp.py`, `cp.py` with `find_unused_parameters=True`": (
        [EQUAL, EQUAL, EQUAL], [(FIND, Parts)],
        variants(context, Sequences, find_unused_parameters=[True]), [(FIND, Parts)]),
    "`zero.py`, `fsdp.py`, `ep.py`, `hybrid_3d.py`, each part a unit": (
        [EQUAL, OTHER_ORDER, DROPPED],
        variants(fully_sharded, replicas=[1]) + variants(zero, stage=[2]),
        variants(functools.partial(fully_sharded, reshard=False), replicas=[2, 1])
        + variants(fully_sharded, replicas=[2]) + variants(zero, stage=[1]),
        variants(fully_sharded, replicas=[1, 2, 4])
        + [(hybrid_in_one_stage, Parts)]),
    "the parts in a module that is a unit": (
        [EQUAL, DROPPED, DROPPED],
        variants(TOGETHER, replicas=[1, 2]),
        variants(functools.partial(TOGETHER, reshard=False), replicas=[1, 2])
        + variants(GATHERED_ONCE, stage=[1, 2])
        + variants(functools.partial(expert, together=True), PARTS_AND_EXPERTS, ep_ranks=[1, 2]),
        variants(TOGETHER, replicas=[1, 2, 4]) + [(hybrid_in_stages, Parts)]),
    "experts of `ep.py` that get no token": (
        [EQUAL, EQUAL, EQUAL],
        variants(expert, Mixture, ep_ranks=[2]), variants(expert, Mixture, ep_ranks=[1]),
        variants(functools.partial(expert, replicas=2), Mixture, ep_ranks=[2, 1])),
    "`tp.py`, `pp.py`": (
        [EQUAL, CANNOT_BE, EQUAL], [(tensor, Parts)] + variants(pipeline, name=["zbv"]),
        variants(pipeline, name=pp.SCHEDULES), []),
}


@functools.cache
def expected(steps, make):
    return train(make, plain, steps)


def equal_steps(cells, make):
    """What a row trains as one process does, and whether with ``drop_unused``."""
    yield NOBODY, False
    for cell, all_steps in zip(cells, COLUMNS):
        # The samples of ``context`` are alike: ranks with other positions are as those of ddp.
        if cell in (EQUAL, DROPPED) and (make is not Sequences or all_steps is not COLUMNS[1]):
            for steps in all_steps:
                yield steps, cell == DROPPED


def compare(column):
    for name, row in TABLE.items():
        for strategy, make in row[column]:
            for steps, dropped in equal_steps(row[0], make):
                print(name, strategy, steps)
                history, parameters = train(make, strategy, steps, dropped)
                right, whole = expected(steps, make)
                assert min(norm for _, norm in right) > MAX_NORM
                torch.testing.assert_close(history, right, rtol=0, atol=1e-12)
                for key, value in parameters.items():
                    torch.testing.assert_close(value, whole[key], rtol=0, atol=1e-12)
            for cell in dict.fromkeys(row[0]):
                words, all_steps = REFUSED.get(cell, ("", []))
                for steps in all_steps:
                    print(name, strategy, cell, steps)
                    match = words.format(len(steps))
                    with pytest.raises((SettingError, RuntimeError), match=match):
                        train(make, strategy, steps)


@on_ranks(2)
def test_a_sample_of_the_table():
    compare(1)
    # The calls are the same, and each rank's loss takes another part.
    with pytest.raises(SettingError, match=f"in step 2 {OTHER_UNITS}"):
        train(Parts, zero, ("cc", "AB"))


@on_ranks(2, thorough=True)
def test_the_rest_of_the_table():
    compare(2)


@on_ranks(4, thorough=True)
def test_on_four_ranks():
    compare(3)
    # Stages have other units; ranks of one stage have not.
    with pytest.raises(SettingError, match=f"in step 2 {OTHER_UNITS}"):
        train(Parts, functools.partial(hybrid_in_stages, together=False), ("cc", "abba"))
    with pytest.raises(SettingError, match="drop_unused needs the group of the ranks of this"):
        train(Parts, lambda model: hybrid_in_stages(model)._replace(group=None), ("aa",), True)


def test_the_table():
    page = (ROOT / "docs" / "strategies.md").read_text()
    for name, (cells, *_) in TABLE.items():
        assert f"| {' | '.join([name, *cells])} |" in page


# What cp.py refuses


@pytest.mark.parametrize("attention", [cp.ring_attention, cp.allgather_attention])
def test_what_an_attention_does_not_compute_is_refused(attention):
    q, k, v = torch.zeros(3, 1, 2, 4, 8)
    for keyword, value in {"attn_mask": torch.ones(4, 4).tril(), "dropout_p": 0.1,
                           "window_size": 7}.items():
        words = f"{attention.__name__} computes causal or full .*{keyword}.* ulysses_attention"
        with pytest.raises(SettingError, match=words):
            attention(q, k, v, group=None, is_causal=True, **{keyword: value})


class Own(nn.Module):
    def __init__(self, attention=plain_attention, inner=None):
        super().__init__()
        self.attention, self.inner = attention, inner


def test_attention_is_set_wherever_it_is_read():
    """In the whole model: nothing that needs other positions is forgotten."""
    for words, model in {
        "no module of Sequential has plain_attention as": nn.Sequential(nn.Linear(2, 2)),
        r"ab \(Own\) computes attention by sum": nn.ModuleDict({"aa": Own(), "ab": Own(torch.sum)}),
        "1 .* looks at other pos": nn.Sequential(Own(), nn.Conv1d(2, 2, 3)),
        "0 .* looks at other pos": nn.Sequential(nn.GRU(2, 2), Own()),
    }.items():
        with pytest.raises(SettingError, match=words):
            cp.set_attention(model, cp.ring_attention, None, plain_attention, without=["a"])
    model = nn.Sequential(Own(inner=Own()), nn.Conv1d(2, 2, 1), nn.ModuleDict({"a": nn.GRU(2, 2)}),
                          Own(inner=Own(torch.sum)))
    cp.set_attention(model, cp.ring_attention, "group", replaces=plain_attention,
                     without=["2.a", "3.inner"])
    for module in (model[0], model[0].inner, model[3]):
        assert module.attention.func is cp.ring_attention
    assert model[3].inner.attention is torch.sum
