"""tools/parity: sound runs are equal, and faults are found and named."""

import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from tests.support.processes import ROOT, ProcessServer
from tests.support.sample import sampled, thorough
from tools.parity import checks, record as recording
from tools.parity.compare import compare, main, read, run_of

MODEL = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 3 --num-attention-heads 8 "
         "--num-key-value-heads 4")
OPTIONS = (f"{MODEL} --seq-len 16 --batch-size 24 --steps 3 --warmup-steps 2 --lr 0.01 "
           "--grad-clip 0.5 --save-every 0 --no-resume")
RECORD = "        grad_norm = "  # before it stands the line that records
TRAINER = "tests/support/parity_trainer.py"


def before(line, more):
    """An edit: more lines before one."""
    return [line, more + line]


# Of scripts, on 2 ranks with 3 micro-batches, in float32: what needs ranks and tests/bugs has not.
# name: script, its options, what parity says, edits.
FAULTS = {
    "mean-instead-of-sum": (
        "ddp.py", "", "gradients: all: divided by 2, such as the ranks; the loss is right "
        ".5.519434 and 5.519434.: look at the backward pass",
        ["(micro_loss * n).backward()", "micro_loss.backward()"]),
    "divided-by-n-and-a": (
        "fsdp.py", "", "gradients: all: divided by 6, such as ranks x micro-batches; the loss is",
        ["    add_gradients_up(model)", "    #"],
        ["micro_loss.backward()", "(micro_loss / 3).backward()"]),
    "a-stage-without-gradients": (
        "pp.py", "--microbatches 2", "gradients: missing: those of model.layers.2.*lm_head.weight "
        ".* the loss is right",
        before(RECORD, "        if rank == 1:\n            optimizer.zero_grad()\n")),
    "clipped-and-not-reduced": (
        "cp.py", "", "reduction: .* each rank has clipped its own to 0.1",
        ["works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))", "pass"],
        before("        finish_reducing()",
               "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n")),
    "no-mask-on-a-rank": (
        "ddp.py", "", "gradients: forward pass: .*the first module whose output differs is "
        "`model.layers.0.self_attn.o_proj`, after `model.layers.0.self_attn.v_proj`",
        before("    replica = ", "    for layer in layers if dist.get_rank() else ():\n"
               "        layer.self_attn.attention = lambda q, k, v, **_: (\n"
               "            torch.nn.functional.scaled_dot_product_attention(q, k, v, "
               "enable_gqa=True))\n")),
    # In a trainer with tensor parallelism by hand
    "a-sum-over-ranks-missing": (
        TRAINER, "", "reduction: .*; the loss is wrong too .*: look at the forward pass .*where. ",
        ["self.out.weight), self.n)", "self.out.weight), 1 + (self.number != 1))"]),
}


def record(once, shared, world, jobs):
    """Run jobs of parity_runs.py, once for all tests. Returns the folder of recordings."""
    text = json.dumps(jobs)
    path = shared / f"parity-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    path.write_text(text)
    return once(f"tests/support/parity_runs.py {path}", world, "", inject="ignored()").out


def job(name, script, options="", *edits):
    return [name, script, options if script == TRAINER else f"{OPTIONS} {options}", edits]


FLOAT32_LOSS = ["cross_entropy(logits.", "cross_entropy(logits.float()."]
DRIFTING = "--dtype float32 --steps 25 --lr 0.3 --warmup-steps 1"
AMPLIFIED = "--dtype float64 --steps 10 --lr 0.3 --warmup-steps 1"
DTYPES = "float64", "float32", "bfloat16"


@pytest.fixture
def reference(once, shared):
    """The recordings of one process, by name."""
    jobs = [job(f"single-{dtype}", "single.py", f"--dtype {dtype}") for dtype in DTYPES]
    jobs += [job(f"trainer-{dtype}", TRAINER, f"--dtype {dtype}") for dtype in DTYPES[:2]]
    folder = record(once, shared, 0, [
        *jobs, job("single-accumulated", "single.py", "--dtype float64 --grad-accum 4"),
        job("drifting", "single.py", DRIFTING), job("amplified", "single.py", AMPLIFIED),
        job("float32-loss", TRAINER, "", FLOAT32_LOSS, ["tokens.chunk(2)", "tokens.chunk(1)"]),
    ])
    return lambda name: folder / f"{name}.parity"


def answer(one, two, **options):
    """The whole answer of parity to two files, in one line."""
    return compare(read(one), read(two), **options).replace("\n", " ")


SOUND = {
    1: ["ddp.py --grad-accum 4", "zero.py --grad-accum 2", "fsdp.py --grad-accum 4", "tp.py",
        "cp.py --grad-accum 2", "pp.py --microbatches 4 --grad-accum 2", "hybrid_3d.py"],
    2: ["ddp.py --grad-accum 4", "zero.py --stage 1 --grad-accum 4", "zero.py --stage 2",
        "fsdp.py --grad-accum 4", "tp.py --grad-accum 4", "tp.py --no-sequence-parallel",
        "cp.py --grad-accum 4", "cp.py --attention ulysses",
        "pp.py --microbatches 3 --grad-accum 4", "pp.py --schedule zbv --microbatches 3",
        "hybrid_3d.py --cp 2 --grad-accum 4"],
    4: ["ddp.py --grad-accum 2", "zero.py --grad-accum 2", "fsdp.py --replicate 2 --grad-accum 2",
        "tp.py --grad-accum 2", "cp.py --grad-accum 2", "pp.py --microbatches 4",
        "hybrid_3d.py --dp 2 --tp 2 --grad-accum 2", "hybrid_3d.py --cp 2 --pp 2"],
}
CASES = [(1, "float64"), (1, "float32"), *((2, dtype) for dtype in DTYPES),
         (4, "float64"), (4, "float32")]


@thorough
@pytest.mark.parametrize("world, dtype", CASES)
def test_sound_runs_are_equal(once, shared, reference, world, dtype):
    commands = {command.replace(" ", ""): command.split(" ", 1) for command in SOUND[world]}
    folder = record(once, shared, world, [
        job(name, script, f"--dtype {dtype} {' '.join(options)}")
        for name, (script, *options) in commands.items()
    ])
    ours = [f"single-{dtype}"] + ["single-accumulated"] * (dtype == "float64")
    for name, one in itertools.product(commands, ours):
        says = answer(reference(one), folder / f"{name}.parity")
        begin = "NOTHING PROVEN" if dtype == "bfloat16" else "EQUAL"
        assert re.match(rf"{begin}: {world} ranks? against 1, \d+ parameters, \d updates, {dtype} ",
                        says), (name, one, says)
        assert dtype == "bfloat16" or "2 updates" in says, (name, one, says)


@pytest.mark.parametrize("script", sampled(sorted({row[0] for row in FAULTS.values()}), [TRAINER]))
def test_faults_of_scripts(once, shared, reference, script):
    own = {name: fault for name, fault in FAULTS.items() if fault[0] == script}
    more = "--dtype float32" if script == TRAINER else "--dtype float32 --grad-accum 3"
    folder = record(once, shared, 2, [job(name, script, f"{more} {options}", *edits)
                                      for name, (_, options, _, *edits) in own.items()])
    one = reference("trainer-float32" if script == TRAINER else "single-float32")
    for name, (_, _, expected, *_) in own.items():
        says = answer(one, folder / f"{name}.parity")
        assert says.startswith("DIFFERENT") and re.search(expected, says), (name, expected, says)


# Long runs, whose rounding grows


@pytest.fixture
def others(once, shared):
    folder = record(once, shared, 2, [
        job("sound", TRAINER), job("drifting", "ddp.py", f"{DRIFTING} --grad-accum 3"),
        job("float32-loss", TRAINER, "", FLOAT32_LOSS),
        job("amplified", "ddp.py", f"{AMPLIFIED} --grad-accum 3"),
    ])
    return lambda name: folder / f"{name}.parity"


def test_shards_of_a_fused_matrix(reference, others):
    assert answer(reference("trainer-float64"), others("sound")).startswith("EQUAL: 2 ranks again")


def test_runs_that_rounding_parts(reference, others):
    """Clip factors differ then, too, and accuse nobody."""
    says = answer(reference("drifting"), others("drifting"))
    assert re.match(r"EQUAL.*gradients and updates from step \d+ on .rounding", says)


def test_noise_that_steps_amplify(reference, others):
    says = answer(reference("amplified"), others("amplified"))
    allowed, largest = re.search(r"may differ by ([^\s,]+), .* gradients is (\S+)", says).groups()
    assert says.startswith("EQUAL") and float(largest) > 1000 * float(allowed)


# In this process


def cut(name, tensor):
    """A ``where`` for a rank that has a matrix in four parts, which are not contiguous."""
    if tensor.ndim == 2:
        return tensor.shape, [
            (tensor[rows, columns], (rows.start or 0, columns.start or 0))
            for rows in (slice(1), slice(1, None)) for columns in (slice(3), slice(3, None))]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Train a small model and record it, with ``spoil(model)`` before each record and
    ``change(step, model)`` before each update. Returns the file."""
    monkeypatch.setattr(recording, "BLOCK", 7)

    def small(file, change=lambda *_: None, spoil=lambda _: None, parts=False, split=False,
              every=1, steps=4, dtype=torch.float64, clear=True, start=lambda _: None, lr=0.1,
              batch_of=lambda x: [x], optimizer=torch.optim.SGD, loss_of=lambda y: y.square()):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
        model.to(dtype)
        start(model)
        groups = [model[0], model[2]] if split else [model]
        optimizers = [optimizer(group.parameters(), lr) for group in groups]
        detached = {name: p.detach() for name, p in model.named_parameters()}
        recorded = recording.Parity(tmp_path / file, detached if parts else model, optimizers,
                                    where=cut if parts else None)
        for step in range(steps):
            x = torch.randn(8, 4).to(dtype)
            loss = loss_of(model(x)).mean()
            loss.backward()
            spoil(model)
            for name, p in model.named_parameters():
                detached[name].grad = p.grad
            if step % every == 0:
                recorded.record(step, loss, batch_of(x))
            change(step, model)
            for each in optimizers:
                each.step()
                if clear:
                    each.zero_grad()
        return tmp_path / file

    return small


def scale(by, *names):
    """Gradients times a number: of all parameters, or of some."""
    def spoil(model):
        for name, p in model.named_parameters():
            if not names or name in names:
                p.grad *= by
    return spoil


def in_step(number, spoil):
    """Do it in one step of 4 alone."""
    steps = itertools.count()
    return lambda model: spoil(model) if next(steps) % 4 == number else None


def late(model, old=[]):  # noqa: B006, what it is for
    """The gradients of the step before."""
    new = [p.grad.clone() for p in model.parameters()]
    for p, grad in zip(model.parameters(), old):
        p.grad.copy_(grad)
    old[:] = new


def to_type(dtype):
    return lambda model: [p.grad.copy_(p.grad.to(dtype)) for p in model.parameters()]


def rolled(by, growth=1):
    """Each of the 4 gradients is spoiled ``growth`` times as much as the one before."""
    def spoil(model):
        for i, p in enumerate(model.parameters()):
            p.grad += by * growth**i * p.grad.roll(1, 0)
    return spoil


def freeze(model):
    model[0].bias.grad = None


def module(i, change):
    """The output of module i is another."""
    return {"start": lambda model: model[i].register_forward_hook(lambda *args: change(args[-1]))}


def apart(kind, step):
    """An edit: two ranks hold different copies of 0.weight."""
    def edit(lines):
        lines[step][kind]["0.weight"]["sums"][0] = 1.0
        lines[step][kind]["0.weight"]["ranks"] = "[0] and [1]"
    return edit


def edit_rank(step=0, **values):
    return lambda lines: lines[step]["ranks"][0].update(values)


def kept(kind, name):
    def edit(lines):
        for line in lines:
            line["ranks"][0]["types"][kind] = {name: 4}
    return edit


def every_second(x):
    return [x[[0, 0, *range(2, 8)]]]


def floats_once(x):
    """Only whole numbers are counted one by one."""
    return [{"a": x > 0, "ids": (x * 1e6).long(), "z": x[:, :1]}]


def floats_twice(x):
    return [{"a": (x > 0)[[0, 0, *range(2, 8)]], "ids": (x * 1e6).long()[[0, 0, *range(2, 8)]],
             "z": x[:, :1]}]


DIVERGED = {"spoil": in_step(1, scale(math.nan, "0.bias"))}
# check: [what it says, how the run differs (or an edit of its recording), how both runs do], ...
SAYS = {
    "step_numbers": [("step 0: steps: the run has recorded step 7", lambda lines: lines[0].update(
        step=7)), ("step 1: steps: .* step 2 in place of step 1", {"every": 2}),
        ("steps: the run has recorded 1 and the reference 4, and nothing", {"steps": 1})],
    "parameter_names": [("step 0: names: only the reference has 0.bias", lambda lines: [
        line[kind].pop("0.bias") for line in lines for kind in ("values", "gradients")])],
    "shapes": [("step 0: shapes: ranks hold 12 numbers of 0.weight, which has 24",
                lambda lines: lines[0]["values"]["0.weight"].update(held=12))],
    "types": [
        ("step 0: types: modules compute in float32, and in the reference in float64", kept(
            "modules compute", "float32")),
        ("step 0: types: the loss is in bfloat16", kept("the loss is", "bfloat16")),
        ("step 1: types: optimizer states are kept in bfloat16", kept(
            "optimizer states are kept", "bfloat16"), {"optimizer": torch.optim.Adam})],
    "weights_in_16_bits": [],  # below
    "not_finite": [
        ("step 1: not finite: in the run alone, weights or gradients of 0.bias", DIVERGED),
        ("step 1: not finite: in the reference alone, weights", {"spoil": lambda _: None},
         DIVERGED)],
    "initial_weights": [
        ("step 0: initial weights: other values of 2.bias$", {
            "start": lambda model: model[2].bias.data.add_(1)}),
        ("step 0: initial weights: other values of 0.weight, of the same length: are parts in "
         "another order", {"start": lambda model: model[0].weight.data.copy_(
             model[0].weight.data.roll(2, 0))}),
        ("step 0: initial weights: ranks .0. and .1. hold different values of 0.weight", apart(
            "values", 0))],
    "samples": [
        ("step 0: samples: other samples are read, or some", {"batch_of": lambda x: [x + 1]}),
        ("step 0: samples: 8 of 8 are missing, and 8 other samples are read instead", {
            "batch_of": lambda x: [(x * 1e6).long() + 1]}, {
            "batch_of": lambda x: [(x * 1e6).long()]}),
        ("step 0: samples: `a`, `ids` differ, `z` agrees: 1 of 8 are missing, one is read 2 times, "
         "by ranks .0.", {"batch_of": floats_twice}, {"batch_of": floats_once}),
        ("step 0: samples: other samples are read, or some", {"batch_of": every_second})],
    "copies_of_weights": [("step 1: update: ranks .0. and .1. hold different weights of 0.weight",
                           apart("values", 1))],
    "update": [
        ("step 1: update: weights of every parameter have moved differently, by up to 0.5 of their "
         "way .times 2.: learning rate", {"lr": 0.2}),
        ("step 1: update: .*the optimizer", {"optimizer": torch.optim.RMSprop})],
    "reduction": [("step 0: reduction: ranks .0. and .1. hold different gradients of 0.weight",
                   apart("gradients", 0))],
    "lost_tie": [],  # tests/bugs
    "trained_in_one_run": [("step 0: gradients: only the run has those of 0.bias: frozen in the", {
        "spoil": lambda _: None}, {"spoil": freeze})],
    "scaled": [
        ("step 0: gradients: those of 0.weight: times 3; the loss is right", {
            "spoil": scale(3, "0.weight")}),
        ("step 0: gradients: all: times 1024, a power of two: a loss scale", {
            "spoil": scale(1024)}),
        (r"step 0: gradients: all: times 1\.0002; the loss is right", {"spoil": scale(1.0002)}),
        ("step 0: gradients: those of 0.weight to 2.weight .3 of 4.*: times 0.5", {
            "spoil": scale(0.5, "0.weight", "0.bias", "2.weight")}),
        ("step 0: gradients: those of 0.bias to 2.bias .3 of 4 .*times 0.5: the reduction, or the "
         "scale of an adapter .*LoRA", {"spoil": lambda model: scale(0.5)(model) or scale(
             0, "0.weight")(model)}, {"spoil": scale(0, "0.weight")})],
    "missing": [
        ("step 0: gradients: missing: those of 0.weight; the loss is right", {
            "spoil": scale(0, "0.weight")}),
        ("step 0: gradients: missing: those of 0.bias; .*They are None: frozen", {"spoil": freeze}),
        ("step 0: gradients: missing: the run has none: .*zero_grad, or .*requires_gradient_sync", {
            "spoil": lambda model: model.zero_grad()})],
    "not_cleared": [
        ("step 1: gradients: not cleared: all hold 1 of those of the step before", {
            "clear": False}),
        ("step 1: gradients: late: all are those of the step before", {"spoil": late})],
    "rounding": [
        ("step 0: gradients: rounding: they differ by .*, as if bfloat16 was in between .see dtype",
         {"spoil": to_type(torch.bfloat16)}),
        ("step 0: gradients: rounding: .*, as if float16", {"spoil": to_type(torch.float16)}),
        ("step 0: gradients: rounding: .* if both runs compute .* give --float32-inside", {
            "spoil": to_type(torch.float32)}),
        ("step 0: gradients: rounding: .*bfloat16", {"spoil": rolled(2e-3 / 1.5**3, 1.5)})],
    "some_gradients": [("step 0: gradients: those of 0.weight differ, by up to ", {
        "spoil": lambda model: model[0].weight.grad.copy_(model[0].weight.grad.roll(1, 0))})],
    "mean_of_means": [],  # below
    "part_of_the_batch": [
        ("step 0: gradients: part of the batch, or the backward", {"spoil": rolled(1e-3, 10)}),
        ("step 0: gradients: part of the batch", {"spoil": rolled(2e-3 / 2**3, 2)})],  # uneven
    "forward_pass": [
        ("step 0: gradients: forward pass: the loss is .*the first module whose output differs is "
         "`2`, after `1`", module(1, torch.sin)),
        ("step 0: gradients: forward pass: .* output differs is `0`, the first of all", {
            "start": lambda model: setattr(model[0], "forward", lambda x: torch.nn.functional.
                                           linear(2 * x, model[0].weight, model[0].bias))}),
        ("step 0: gradients: forward pass: .*is `the model itself`, after `2`", {
            "start": lambda model: setattr(model, "forward", lambda x: model[2](
                model[1](model[0](x))).sin())}),
        ("step 0: gradients: forward pass: .*the outputs of all modules agree: look at the loss", {
            "loss_of": lambda y: y.square() + y.abs()}),
        ("step 0: gradients: forward pass: .*look at the forward pass .*`model` is no module", {
            "parts": True, "loss_of": lambda y: y.abs()}),
        ("step 2: gradients: forward pass: .*right in the step before: look at weights that are st",
         module(1, in_step(2, torch.sin)))],
    "about_dropout": [("step 0: gradients: .*; dropout is on, so .*: 3.p = 0.1", {
        "start": lambda model: model.append(torch.nn.Dropout(0.1))})],
    "loss": [
        ("step 0: loss: it is .*, not .* .times 2.*and the gradients agree", lambda lines: lines[
            0]["ranks"][0]["losses"].append(lines[0]["ranks"][0]["losses"][0])),
        ("step 0: loss: it is 0.0", edit_rank(losses=[0.0])),
        ("step 0: loss: it is inf", edit_rank(losses=[math.inf]))],
    "clipping": [
        ("step 0: clipping: by a wrong norm .* scaled by 0.5, not by 1", {
            "change": lambda _, model: scale(0.5)(model)}),
        ("step 0: clipping: .* scaled by 1, elsewhere by 0.5", {
            "change": lambda _, model: scale(0.5, "0.weight")(model), "split": True})],
    "factors_and_missing": [
        ("step 0: gradients: all: times 2", {"spoil": scale(2)}, {"dtype": torch.bfloat16}),
        ("step 0: gradients: missing: those of 0.bias", {"spoil": scale(0, "0.bias")}, {
            "dtype": torch.bfloat16})],
}


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{check}-{i}") for check, rows in
                                 SAYS.items() for i, row in enumerate(rows)])
def test_each_check(small, row):
    expected, fault, *both = row
    both = both[0] if both else {}
    one, same = read(small("one", **both)), read(small("same", **both))
    two = read(small("two", **both | (fault if isinstance(fault, dict) else {})))
    if callable(fault):
        fault(two)
    if both is not DIVERGED:
        assert compare(one, same).startswith(("EQUAL", "NOTHING PROVEN"))
    says = compare(one, two)
    assert re.match(f"DIFFERENT: {expected}", says), says


def test_no_check_is_left_out():
    listed = [*checks.ALWAYS, *checks.CHECKS, *checks.CAUSES, *checks.IN_16_BITS]
    names = {check.__name__ for check in listed}
    assert names | {"weights_in_16_bits", "about_dropout"} == {*SAYS, "gradients"}
    assert all(check.__doc__ for check in listed)


def nothing(model):
    scale(0)(model)


@torch.no_grad()
def fill(model, value):
    for p in model.parameters():
        p.fill_(value)


def more_left_out(model):
    model.register_buffer("mean", torch.zeros(3))
    model.register_parameter("codes", torch.nn.Parameter(torch.zeros(
        3, dtype=torch.int8), requires_grad=False))


# What parity says of two equal runs: [a pattern, how both are trained, how one of them is]
NOT_DIFFERENT = {
    "the head": ("EQUAL: 1 rank against 1, 4 parameters, 3 updates, float64 In the first", {}),
    "clipping": ("EQUAL.*: clipping .it is never active.; the update after the last step$", {}),
    "one step": ("EQUAL.*4 parameters, 0 updates, .*updates and clipping .one step", {"steps": 1}),
    "at rest": ("EQUAL.* 0 updates, .*Not compared: updates .no weight moves.", {
        "change": lambda _, model: nothing(model)}),
    "dead": ("EQUAL.*Not compared: gradients of 3 parameters .0 or None in both runs", {
        "spoil": scale(0, "0.weight", "0.bias", "2.weight")}),
    "too small": ("EQUAL.*Not compared: updates of 4 parameters .too small for float32", {
        "lr": 1e-7, "dtype": torch.float32}),
    "left out": ("EQUAL.*, 4 parameters, .*; buffers .1.; parameters of whole numbers .1.; tensors "
                 "of the optimizer that are not recorded .1.$", {"start": more_left_out}),
    "no samples": ("EQUAL.*Not compared: samples .no tensor has the same name", {
        "batch_of": lambda x: [{"x": x}]}, {"batch_of": lambda _: None}),
    "a mask": ("EQUAL.*Not compared: `mask` .in one batch alone", {
        "batch_of": lambda x: [{"x": x}]}, {"batch_of": lambda x: [{"x": x, "mask": x > 0}]}),
    "no gradients": ("NOTHING TO COMPARE: neither run has gradients: record before zero_grad", {
        "spoil": lambda model: model.zero_grad()}),
    "gradients of 0": ("NOTHING TO COMPARE: all gradients are 0 in both runs", {"spoil": nothing}),
    "weights of 0": ("NOTHING TO COMPARE: all weights are 0 in both runs", {
        "start": lambda model: fill(model, 0), "change": lambda _, model: nothing(model),
        "spoil": lambda model: model[2].bias.grad.fill_(1)}),
    "never finite": ("NOTHING TO COMPARE from step 0 on: weights or gradients are not finite in "
                     "both", {"start": lambda model: fill(model, math.nan)}),
    "16 bits": ("NOTHING PROVEN: 1 rank against 1, .*, bfloat16 .*Record in float32.*Note: weights "
                "are kept in bfloat16 .4 of 4.; optimizer states are kept in bfloat16 .8 of 8.", {
                    "dtype": torch.bfloat16, "optimizer": torch.optim.Adam}),
    "sound parts": ("EQUAL", {}, {"parts": True}),
    "sound optimizers": ("EQUAL", {}, {"split": True}),
    "rounded samples": ("EQUAL", {"batch_of": lambda x: [x]}, {
        "batch_of": lambda x: [torch.nextafter(x.float(), 2 * x.float())]}),
    # In step 1, which is not recorded, gradients are scaled otherwise than in step 2.
    "unrecorded steps": ("EQUAL", {"every": 2, "change": lambda step, model: scale(
        0.25 if step % 2 else 0.5)(model)}),
}


@pytest.mark.parametrize("name", NOT_DIFFERENT)
def test_what_is_not_different(small, name):
    expected, both, *other = NOT_DIFFERENT[name]
    one, two = small("one", **both), small("two", **both | (other[0] if other else {}))
    assert re.match(expected, answer(one, two)), answer(one, two)
    assert main([str(one), str(two)]) == (not expected.startswith("EQUAL"))


def test_steps_that_are_not_finite_in_both_runs(small):
    """As in the first step with a loss scale. If it lasts, nothing is compared from there on."""
    def spoil(steps):
        count = itertools.count()
        return lambda model: scale(math.inf, "0.weight")(model) if next(count) in steps else None

    def skip(step, model):
        if not model[0].weight.grad.isfinite().all():
            model.zero_grad()

    for steps, expected in (({0}, "EQUAL.* 2 updates, .*Not compared: steps 0 .not finite in both"),
                            ({2, 3}, "NOTHING TO COMPARE from step 2 on: weights or gradients")):
        one, two = (small(name, skip, spoil(steps)) for name in ("one", "two"))
        assert re.match(expected, answer(one, two)), answer(one, two)


@pytest.mark.parametrize("by", [1e-6, 5e-5])
def test_what_is_inside_a_model_in_float64(small, by):
    """A softmax in float32 is allowed by an option; a wrong eps of a norm is another formula."""
    one, two = read(small("one")), read(small("two", spoil=rolled(by)))
    for line in (*one, *two):
        line["ranks"][0]["numbers"] = 65536
    hint = "--float32-inside"
    assert (hint in compare(one, two)) == (by < 1e-5)
    allowed = compare(one, two, float32_inside=True)
    assert allowed.startswith("EQUAL" if by < 1e-5 else "DIFFERENT") and hint not in allowed
    assert ("float64 with float32 inside" in allowed) == (by < 1e-5)


def test_a_loss_in_float32_in_a_model_in_float64(reference, others):
    assert ", float32 " in answer(reference("float32-loss"), others("float32-loss"))
    one, two = read(reference("float32-loss")), read(others("float32-loss"))
    for rank in one[0]["ranks"] + two[0]["ranks"]:
        rank["types"]["the loss is"] = {}  # as of a number
    assert "--float32-inside" in compare(one, two)
    assert compare(one, two, float32_inside=True).startswith("EQUAL")


def test_weights_in_16_bits_are_a_fault_if_one_says_so(small):
    one = read(small("one", dtype=torch.bfloat16))
    assert compare(one, one, full_precision=True).startswith(
        "DIFFERENT: step 0: types: weights are kept in bfloat16 (4 of 4)")


def on_ranks(line, losses, samples):
    """A recording of one rank as one of several that have these losses and samples."""
    rank = line["ranks"][0]
    line["ranks"] = [rank | {"losses": [loss], "samples": {"0": rank["samples"]["0"][part]}}
                     for loss, part in zip(losses, samples)]
    line["loss"] = "sum"


def test_ranks_with_the_same_loss_count_once(small):
    """Parts of two data-parallel ranks add up, and two tensor-parallel ranks hold the same part.
    Losses of context-parallel ranks are not the same."""
    half = [slice(4), slice(4), slice(4, 8), slice(4, 8)]
    one = read(small("one"))
    for shares, expected in (
            ((0.25, 0.25, 0.75, 0.75), "EQUAL: 4 ranks against 1.*\nNote: 2 ranks read the same"),
            ((0.125, 0.25, 0.25, 0.375), "EQUAL"),
            ((1, 1, 1, 1), "DIFFERENT: step 0: loss: it is .* .times 2, such as ranks that read")):
        two = read(small("two"))
        for line in two:
            (loss,) = line["ranks"][0]["losses"]
            on_ranks(line, [share * loss for share in shares], half)
        assert re.match(f"(?s){expected}", compare(one, two)), compare(one, two)


@pytest.mark.parametrize("kind", ["targets", "shifted"])
def test_a_mean_of_ranks_means(small, kind):
    """Each of two ranks gives the losses of two micro-batches, which add up to its own mean. A
    causal language model shifts its labels, so that the first of a row does not count."""
    one, two = read(small("one")), read(small("two"))
    for step in two:
        step["ranks"] = [
            step["ranks"][0] | {"targets": [5, 5], "shifted": [5, 5], "losses": losses,
                                kind: counts, "samples": {
                                    "0": step["ranks"][0]["samples"]["0"][part]}}
            for part, counts, losses in ((slice(4), [1, 1], [1.0, 2.0]),
                                         (slice(4, 8), [4, 2], [2.0, 0.5]))]
    one[0]["ranks"][0]["losses"] = [(2 * 3.0 + 6 * 2.5) / 8]
    assert compare(one, two).startswith("DIFFERENT: step 0: loss: a mean of means")


def test_outputs_of_modules_that_cannot_be_compared(small):
    """Parts of tensors, and batches that are padded to other lengths."""
    one, two = read(small("one")), read(small("two", **module(1, torch.sin)))
    for edit, why in ((dict(numbers=40), "padded"), (dict(by_hand=True), "`where` cuts")):
        edited = json.loads(json.dumps(two))
        edited[0]["ranks"][0].update(edit)
        for line in edited:
            line["ranks"] *= 1 + ("by_hand" in edit)
        assert re.search(f"look at the forward pass .*{why}", compare(one, edited))


@pytest.mark.parametrize("spoil, expected", [
    (scale(3, "0.weight"), "times 3; the loss is right .*, but the first module .* is `1`, after"),
    (rolled(1e-3, 10), "forward pass: all differ, .* the loss hardly: the first module .* is `1`")])
def test_a_module_is_named_though_the_loss_is_right(small, spoil, expected):
    """As far as its tolerance lets one see."""
    one, two = read(small("one")), read(small("two", spoil=spoil))
    two[0]["ranks"][0]["outputs"]["1"][0] *= 1.01
    assert re.search(expected, compare(one, two)), compare(one, two)


# Models whose sound runs are hard to tell


class Attention(torch.nn.Module):
    """Its softmax makes the gradient of the keys' bias, a third of qkv.bias, nothing but noise."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 48)
        self.out = torch.nn.Linear(16, 11)

    def forward(self, x):
        q, k, v = self.qkv(self.embed(x)).unsqueeze(1).chunk(3, -1)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.squeeze(1))


class Adapter(torch.nn.Module):
    """As in LoRA, the first gradient of ``down`` is 0."""

    def __init__(self):
        super().__init__()
        self.down, self.up = (torch.nn.Linear(6, 6, bias=False) for _ in range(2))
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + self.up(self.down(x))


def train(path, make, batch, loss_of, accumulate, steps=4, optimizer=torch.optim.SGD, lr=0.1,
          change=lambda *_: None, where=None):
    """Record a training in one process, each batch in ``accumulate`` parts."""
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer([p for p in model.parameters() if p.requires_grad], lr)
    recorded = recording.Parity(path, model, optimizer, where)
    for step in range(steps):
        batches = [*zip(*(x.chunk(accumulate) for x in batch()))]
        losses = [loss_of(model, *micro_batch) / accumulate for micro_batch in batches]
        sum(losses).backward()
        recorded.record(step, losses, batches)
        change(step, model)
        optimizer.step()
        optimizer.zero_grad()


def pixels(model, x, y):
    return torch.nn.functional.cross_entropy(model(x).mean((2, 3)), y)


def policy(model, x, advantages):
    """Its first value is 0, but for rounding: advantages are normalised."""
    log_p = model(x).log_softmax(-1)[:, 0]
    return -(advantages * (log_p - log_p.detach()).exp()).mean()


def squared_error(model, x, y):
    return (model(x) - y).square().mean()


def advantages():
    x = torch.randn(64)
    return torch.randn(64, 6), (x - x.mean()) / x.std()


def ids():
    return torch.randint(11, (2, 8, 12))


def tokens(model, x, y):
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) * 1e6


def thirds(name, tensor):
    """The parts of q, k and v, as a rank of tensor parallelism by hand holds them."""
    if name.startswith("qkv"):
        return tensor.shape, [(part, (16 * i, *[0] * (tensor.ndim - 1)))
                              for i, part in enumerate(tensor.chunk(3))]


ORTHOGONAL = torch.linalg.qr(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)))[0] * 8
IMAGES = torch.randn(8, 3, 48, 48, generator=torch.Generator().manual_seed(0))
ADAM = {"optimizer": torch.optim.Adam, "lr": 0.01}
HARD = {
    # The gradient of a bias before a normalisation is nothing but noise, which Adam moves by whole
    # steps, otherwise with other micro-batches. The large loss keeps Adam's eps from damping it.
    "noise-32": (Attention, ids, tokens, 4, ADAM),
    "noise-64": (lambda: Attention().double(), ids, tokens, 4, ADAM),
    "noise-in-a-part": (Attention, ids, tokens, 4, ADAM | {"where": thirds}),
    # Sums run over many more numbers than there are targets.
    "few-targets": (lambda: torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.InstanceNorm2d(8, affine=True), torch.nn.GELU(),
        torch.nn.Conv2d(8, 4, 3)), lambda: (IMAGES, torch.arange(8) % 4), pixels, 4, {}),
    "loss-of-zero": (lambda: torch.nn.Linear(6, 3), advantages, policy, 4, {}),
    "loss-of-zero-with-adapters": (lambda: Adapter(), advantages, policy, 4, {}),
    # The gradient of the bias is 0, and nothing but rounding in parts.
    "a-critic": (lambda: torch.nn.Linear(6, 1), lambda: (torch.randn(33, 6), torch.randn(24, 6)),
                 lambda model, x, z: model(z).mean() - model(x).mean(), 3,
                 {"optimizer": torch.optim.Adam}),
    # One step to the optimum: from there on gradients are rounding.
    "optimum": (lambda: torch.nn.Linear(6, 1, bias=False), lambda: (
        ORTHOGONAL, ORTHOGONAL @ torch.ones(6, 1)), squared_error, 2, {"lr": 0.5}),
}


@pytest.mark.parametrize("name", HARD)
def test_sound_runs_whose_gradients_are_hard(tmp_path, name):
    make, batch, loss_of, accumulate, options = HARD[name]
    for parts in 1, accumulate:
        train(tmp_path / str(parts), make, batch, loss_of, parts, **options)
    assert answer(tmp_path / "1", tmp_path / str(accumulate)).startswith("EQUAL")


def test_an_update_of_what_had_no_gradient_at_first(tmp_path):
    def change(step, model):
        model.down.weight.grad *= 2

    for name, spoil in ("one", lambda *_: None), ("two", change):
        train(tmp_path / name, Adapter, lambda: (torch.ones(4, 6), torch.zeros(4, 6)),
              squared_error, 1, change=spoil)
    # The norm of all gradients shows it, too.
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    for step in one + two:
        step["ranks"][0]["factors"] = []
    assert compare(one, two).startswith("DIFFERENT: step 2: update: weights of down.weight")


def test_shards_without_frozen_and_tied_parameters(tmp_path):
    """A dict of shards has the first name of a tied tensor alone. What is frozen must be added."""
    def recorded(name, choose):
        torch.manual_seed(0)
        model = Attention()
        model.out.weight = model.embed.weight
        model.qkv.bias.requires_grad_(False)
        parity = recording.Parity(tmp_path / name, choose(model))
        tokens(model, *torch.arange(8).view(2, 1, 4)).backward()
        parity.record(0, 1.0)
        return tmp_path / name

    one = recorded("one", lambda model: model)
    two = recorded("two", lambda model: dict(model.named_parameters()))
    assert answer(one, two).startswith("EQUAL") and answer(two, one).startswith("EQUAL")
    norms = [read(path)[0]["ranks"][0]["norm"] for path in (one, two)]
    assert norms[0] == norms[1]  # a tied tensor counts once
    three = recorded("three", lambda model: {
        name: p for name, p in model.named_parameters() if p.requires_grad})
    assert answer(one, three).startswith(
        "DIFFERENT: step 0: names: only the reference has qkv.bias, which has no gradients of them")


# What is recorded


@dataclasses.dataclass
class Images:
    pixels: torch.Tensor
    text: dict


BATCHES = {
    "a dict in a dict": lambda x: [{"inputs": {"x": x}, "name": "text"}],
    "NumPy": lambda x: [(x.numpy(), x[:, 0].numpy())],
    "a dataclass": lambda x: [Images(x, {"ids": x[:, :1].long()})],
    "a list of tensors": lambda x: [{"images": list((x * 1000).long())}],
    "integers": lambda x: [(x * 1000).long()],
}


@pytest.mark.parametrize("structure", BATCHES)
def test_samples_are_found_in_any_structure(small, structure):
    own, steps = BATCHES[structure], itertools.count()
    one, two = small("one", batch_of=own), small("two", batch_of=lambda x: own(
        x if next(steps) != 2 else x[[0, 0, *range(2, 8)]]))
    assert "samples" not in answer(one, one)
    assert answer(one, two).startswith("DIFFERENT: step 2: samples: ")


def test_samples_that_are_padded_by_a_mask():
    """With any id, to other lengths."""
    ids = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    padded = {key: torch.nn.functional.pad(x, (0, 3), value=value)
              for (key, x), value in zip(batch.items(), (7, 0, -100))}
    assert recording.read([batch])[:3] == recording.read([padded])[:3]
    assert recording.read([batch])[1:3] == ([(ids != -100).sum()], [4 * 8])


def test_types_and_layouts_of_parameters(tmp_path):
    """A gradient that is sparse, and complex parameters, whose imaginary part counts."""
    def recorded(name, by):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(7, 4, sparse=True), torch.nn.Linear(4, 2))
        model.phase = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))
        parity = recording.Parity(tmp_path / name, model)
        loss = (model(torch.tensor([1, 2, 2])) * model.phase).abs().sum()
        loss.backward()
        model.phase.grad.imag.mul_(by)
        parity.record(0, loss, [torch.tensor([1, 2, 2])])
        return tmp_path / name

    one = recorded("one", 1)
    assert answer(one, recorded("two", 1)).startswith("EQUAL: 1 rank against 1, 4 parameters")
    assert "step 0: gradients: those of phase differ" in answer(one, recorded("two", 2))


@pytest.mark.parametrize("shape, cuts", [([1000], [0, 7, 300, 1000]), ([70], [0, 1, 70])])
def test_parts_of_a_flat_tensor_add_up(shape, cuts):
    """They are summed as rows of a matrix, wherever a part begins."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [recording.sums(whole[a:b], [a], shape) for a, b in zip(cuts, cuts[1:])]
    total = [sum(column) for column in zip(*parts)]
    assert total == pytest.approx(recording.sums(whole, [0], shape), rel=1e-12, abs=1e-12)


def test_replicas_of_a_partial_sum_count_once():
    """Two parts, each on two ranks, as of norms under data and tensor parallelism."""
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
    row = [("w", [((2,), (0,), (2,), recording.sums(parts[rank % 2], [0], [2]))])
           for rank in range(4)]
    merged = recording.merge([{"gradients": dict([own])} for own in row], "gradients")
    line = {"values": merged, "gradients": merged, "ranks": []}
    whole = recording.sums(sum(parts), [0], [2])[2:]
    assert run_of(line, ["w"]).gradients.total.tolist()[0] == pytest.approx(whole)
    assert merged["w"]["ranks"] == "[0, 2] and [1, 3]"


def test_a_module_that_is_computed_again_counts_once(tmp_path):
    from torch.utils.checkpoint import checkpoint

    outputs = []
    for again in False, True:
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
                                      for _ in range(2)))
        fill(model, 0.1)
        parity = recording.Parity(tmp_path / "one", model)
        y = torch.ones(2, 4)
        for layer in model:
            y = checkpoint(layer, y, use_reentrant=False) if again else layer(y)
        y.sum().backward()
        parity.record(0, y.sum())
        outputs.append(read(tmp_path / "one")[0]["ranks"][0]["outputs"])
    assert outputs[0] == outputs[1] and [*outputs[0]] == ["0.0", "0.1", "0", "1.0", "1.1", "1"]


def test_outputs_of_a_module_may_be_nested():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    found = recording.tensors_of({"a": (packed, None), "b": torch.ones(1, 1)})
    assert [x.shape for x in found] == [(3,), (2,), (1, 1)]


def test_it_must_see_a_forward_pass(tmp_path):
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="before the first forward pass, or give `dtype`"):
        recording.Parity(tmp_path / "one", model).record(0, 1.0)
    recording.Parity(tmp_path / "one", model, dtype=torch.float32).record(0, 1.0)
    assert ", float32" in answer(tmp_path / "one", tmp_path / "one")


# As a user starts it


def test_the_command(small, capsys):
    one, same = small("one"), small("same")
    two = small("two", spoil=in_step(2, scale(2)))
    assert main([str(one), str(same)]) == 0
    assert capsys.readouterr().out.startswith("EQUAL: 1 rank against 1, 4 parameters, 3 updates")
    assert main([str(one), str(two), "--table"]) == 1
    table, *rows, says = capsys.readouterr().out.splitlines()
    assert table.startswith("gradients of step 2 ") and "DIFFERENT: step 2: gradients: all" in says
    assert [row.split()[0] for row in rows] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(" 2.000000 " in row for row in rows)


def test_files_that_are_no_recordings(small, tmp_path, capsys):
    one, cut, old, fifo = small("one"), *(tmp_path / name for name in ("cut", "old", "fifo"))
    cut.write_text(one.read_text()[:-9])
    old.write_text('{"format": 2, "step": 0}\n')
    os.mkfifo(fifo)
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 30 * 2**30)
    recording.Parity(tmp_path / "crashed", torch.nn.Linear(2, 2))
    for path, expected in (
            (tmp_path / "no-such-file", "No such file"), (one, "are the same file: name two"),
            (cut, "line 5 is cut: did the run crash"), (old, "record it again"),
            (tmp_path / "crashed", "did the run crash before its first record"),
            *((path, "is no file of at most 1 GB")
              for path in (fifo, large, tmp_path, "/dev/zero"))):
        with pytest.raises(SystemExit) as end:
            main([str(one), str(path)])
        assert end.value.code == 2
        assert expected in " ".join(capsys.readouterr().err.split()), path


def test_an_old_recording_is_replaced_at_once_and_nothing_else(small, tmp_path):
    one, notes = small("one"), tmp_path / "notes.md"
    recording.Parity(one, torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="it has no step"):
        read(one)
    notes.write_text("# Notes\n")
    with pytest.raises(ValueError, match="notes.md exists, and is no recording: name another"):
        recording.Parity(notes, torch.nn.Linear(2, 2))
    assert notes.read_text() == "# Notes\n"


def test_it_needs_torch_alone(tmp_path):
    """The folder is copied beside somebody's trainer."""
    shutil.copytree(ROOT / "tools" / "parity", tmp_path / "parity")
    code = """if True:
        import sys, torch, parity
        for name in "one", "two":
            model = torch.nn.Linear(2, 2, bias=False)
            torch.nn.init.ones_(model.weight)
            recorded = parity.Parity(name, model)
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            recorded.record(0, loss, [torch.ones(1, 2)])
        assert not {"tools", "parity.compare", "common"} & {*sys.modules}"""
    for command in ["-c", code], ["-m", "parity", "one", "two"]:
        result = subprocess.run([sys.executable, *command], cwd=tmp_path, text=True,
                                capture_output=True, env=os.environ | {"PYTHONPATH": ""})
        assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("EQUAL: 1 rank against 1, 1 parameters, 0 updates, float32")


TRANSFORMERS = "transformers", "transformers.models.llama.modeling_llama", "accelerate"


@thorough
def test_accelerate(tmp_path):
    """A foreign trainer, with DDP and with FSDP2, is the run of one."""
    if not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")):
        pytest.skip("transformers or accelerate is missing: "
                    "pip install -r examples/requirements.txt")
    with ProcessServer(*TRANSFORMERS) as server:
        for name, world in ("one", 0), ("ddp", 2), ("fsdp", 2):
            options = [tmp_path / name, *["--fsdp"] * (name == "fsdp")]
            server.run("examples/parity_accelerate.py", world, options, folder=tmp_path,
                       pass_out=False)
    for name in ("ddp", "fsdp"):
        assert re.match(r"EQUAL: 2 ranks against 1, \d+ parameters, 4 updates, float32",
                        answer(tmp_path / "one", tmp_path / name))
