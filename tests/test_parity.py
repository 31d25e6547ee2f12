"""tools/parity: sound runs are equal, and faults are found and named."""

import hashlib
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

from tests.support.processes import ROOT
from tests.support.sample import thorough
from tools.parity import checks, record as recording
from tools.parity.compare import Run, compare, main, read

OPTIONS = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 3 --num-attention-heads 8 "
           "--num-key-value-heads 4 --seq-len 16 --batch-size 24 --steps 3 --warmup-steps 2 "
           "--lr 0.01 --grad-clip 0.5 --save-every 0 --no-resume")


def answer(one, two, **options):
    """The whole answer of parity, in one line."""
    return compare(one, two, **options).replace("\n", " ")


# Scripts on ranks


def record(once, shared, world, jobs):
    """Run jobs of parity_runs.py, once for all tests. Returns the folder of recordings."""
    text = json.dumps(jobs)
    path = shared / f"parity-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    path.write_text(text)
    return once(f"tests/support/parity_runs.py {path}", world, "", inject="ignored()").out


SCRIPTS = {
    2: ["ddp.py --grad-accum 4", "zero.py --stage 1 --grad-accum 4", "zero.py --stage 2",
        "fsdp.py --grad-accum 4", "tp.py --grad-accum 4", "tp.py --no-sequence-parallel",
        "cp.py --grad-accum 4", "cp.py --attention ulysses",
        "pp.py --microbatches 3 --grad-accum 4", "pp.py --schedule zbv --microbatches 3",
        "hybrid_3d.py --cp 2 --grad-accum 4"],
    4: ["ddp.py --grad-accum 2", "zero.py --grad-accum 2", "fsdp.py --replicate 2 --grad-accum 2",
        "tp.py --grad-accum 2", "cp.py --grad-accum 2", "pp.py --microbatches 4",
        "hybrid_3d.py --dp 2 --tp 2 --grad-accum 2", "hybrid_3d.py --cp 2 --pp 2"],
}
CASES = [(2, "float64"), (2, "float32"), (2, "bfloat16"), (4, "float64")]


@thorough
@pytest.mark.parametrize("world, dtype", CASES)
def test_scripts_are_equal_to_one_process(once, shared, world, dtype):
    def jobs(commands):
        return [[command.replace(" ", ""), *command.split()[:1],
                 f"{OPTIONS} --dtype {dtype} {' '.join(command.split()[1:])}", []]
                for command in commands]

    references = ["single.py", "single.py --grad-accum 4"][:1 + (dtype == "float64")]
    alone = record(once, shared, 0, jobs(references))
    ranks = record(once, shared, world, jobs(SCRIPTS[world]))
    expected = (rf"NOTHING PROVEN: {world} ranks" if dtype == "bfloat16" else
                rf"EQUAL: {world} ranks against 1, \d+ parameters, 2 updates, {dtype} ")
    for one, two in itertools.product(references, SCRIPTS[world]):
        says = answer(*(read(folder / f"{name.replace(' ', '')}.parity")
                        for folder, name in ((alone, one), (ranks, two))))
        assert re.match(expected, says), (one, two, says)


# Small models in this process


REPEATED = [0, 0, *range(2, 8)]  # of 8 samples one is lost, and one is read twice


def tiny():
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))


def train(path, make=tiny, data=lambda: [torch.randn(8, 4)], accumulate=1, dtype=torch.float64,
          loss_of=lambda model, x: model(x).square().mean(), optimizer=torch.optim.SGD, lr=0.1,
          steps=4, every=1, split=False, clear=True, start=lambda _: None, spoil=lambda _: None,
          change=lambda *_: None, of=lambda model: model, where=None, batch_of=None,
          edit=lambda _: None):
    """Record a training, each batch in ``accumulate`` parts, with ``spoil(model)`` before each
    record and ``change(step, model)`` before each update. Returns what is recorded, after
    ``edit(lines)``."""
    torch.manual_seed(0)
    model = make().to(dtype)
    start(model)
    groups = [model[0], model[2]] if split else [model]
    optimizers = [optimizer(group.parameters(), lr) for group in groups]
    recorded = recording.Parity(path, of(model), optimizers, where)
    for step in range(steps):
        batch = [x.to(dtype) if x.is_floating_point() else x for x in data()]
        batches = [*zip(*(x.chunk(accumulate) for x in batch))]
        losses = [loss_of(model, *micro_batch) / accumulate for micro_batch in batches]
        sum(losses).backward()
        spoil(model)
        if step % every == 0:
            recorded.record(step, losses, batch_of(*batch) if batch_of else batches)
        change(step, model)
        for each in optimizers:
            each.step()
            if clear:
                each.zero_grad()
    lines = read(path)
    edit(lines)
    return lines


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


class Twice(torch.nn.Linear):
    """It returns two tensors."""

    def forward(self, x):
        return super().forward(x), 2 * super().forward(x)


class Adapter(torch.nn.Module):
    """As in LoRA, the first gradient of ``down`` is 0."""

    def __init__(self):
        super().__init__()
        self.down, self.up = (torch.nn.Linear(6, 6, bias=False) for _ in range(2))
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + self.up(self.down(x))


# What makes runs differ


def scale(by, *names):
    """Gradients times a number: of all parameters, or of some."""
    def spoil(model):
        for name, p in model.named_parameters():
            if not names or name in names:
                p.grad *= by
    return spoil


def in_steps(numbers, spoil):
    """Do it in some steps of 4 alone."""
    steps = itertools.count()
    return lambda model: spoil(model) if next(steps) % 4 in numbers else None


def late(model):
    """The gradients of the step before."""
    new = [p.grad.clone() for p in model.parameters()]
    for p, grad in zip(model.parameters(), getattr(model, "old", [])):
        p.grad.copy_(grad)
    model.old = new


def in_float32(model):
    for p in model.parameters():
        p.grad.copy_(p.grad.float())


def rolled(by, growth=1):
    """Each of the 4 gradients is spoiled ``growth`` times as much as the one before."""
    def spoil(model):
        for i, p in enumerate(model.parameters()):
            p.grad += by * growth**i * p.grad.roll(1, 0)
    return spoil


def clear(model):
    model.zero_grad()


def skip(step, model):
    """As a loss scaler does."""
    if not model[0].weight.grad.isfinite().all():
        model.zero_grad()


def module(i, change):
    """The output of module i is another."""
    return {"start": lambda model: model[i].register_forward_hook(lambda *args: change(args[-1]))}


def more_left_out(model):
    model.register_buffer("mean", torch.zeros(3))
    model.register_parameter("codes", torch.nn.Parameter(torch.zeros(
        3, dtype=torch.int8), requires_grad=False))


def shards(model):
    """The first name of a tied tensor alone."""
    return dict(model.named_parameters())


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# Edits of what is recorded


def apart(kind, step, name):
    """Two ranks hold different copies of a parameter."""
    def edit(lines):
        lines[step][kind][name]["sums"][0] = 1.0
        lines[step][kind][name]["ranks"] = "[0] and [1]"
    return edit


def edit_rank(**values):
    return lambda lines: lines[0]["ranks"][0].update(values)


def on_ranks(*shares, parts=(slice(4), slice(4, 8)), **more):
    """One rank's recording as one of several that have these shares of the loss and samples."""
    def edit(lines):
        for line in lines:
            rank, line["loss"] = line["ranks"][0], "sum"
            line["ranks"] = [rank | {"losses": [share * sum(rank["losses"])],
                                     "samples": {"0": rank["samples"]["0"][part]}} | more
                             for share, part in zip(shares, parts)]
    return edit


def means_of_shifted_labels(lines):
    """Each of two ranks gives its own mean. The first label of a row does not count."""
    on_ranks(0, 0, targets=[5, 5])(lines)
    lines[0]["loss"] = "mean"
    for rank, counts, losses in zip(lines[0]["ranks"], ([1, 1], [4, 2]), ([1.0, 2.0], [2.0, 0.5])):
        rank.update(shifted=counts, losses=losses)


def partial_sums(lines):
    """Two ranks read the same samples, and hold parts of the first module's output that add up."""
    on_ranks(1, 1, parts=ALL)(lines)
    outputs = lines[0]["ranks"][0]["outputs"]
    lines[0]["ranks"][1]["outputs"] = outputs | {"0": [2 * outputs["0"][0], outputs["0"][1]]}


def other_output(lines):
    lines[0]["ranks"][0]["outputs"]["1"][0] *= 1.01


def mixed(x):
    """A mask, ids and floats."""
    return [{"a": x > 0, "ids": (x * 1e6).long(), "z": x[:, :1]}]


def tokens(model, x, y):
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) * 1e6


def ids():
    return torch.randint(11, (2, 8, 12))


def tied():
    model = Attention()
    model.out.weight = model.embed.weight
    model.qkv.bias.requires_grad_(False)
    return model


def phase(model):
    """A complex parameter, and a gradient that is sparse."""
    model[0].sparse = True
    model.phase = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))


ALL = 2 * [slice(8)]  # two ranks read all samples
TWICE = [slice(4), slice(4), slice(4, 8), slice(4, 8)]  # two ranks read the same
DIVERGED = {"spoil": in_steps([1], scale(math.nan, "0.bias"))}
ADAM = {"optimizer": torch.optim.Adam, "lr": 0.01}
TIED = ADAM | {"make": tied, "data": ids, "loss_of": tokens}
COMPLEX = {"make": lambda: torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 2)),
           "start": phase, "data": lambda: [torch.tensor([1, 2, 2])],
           "loss_of": lambda model, x: (model(x) * model.phase).abs().sum(), "steps": 1}

# Faults that no bug in tests/bugs shows. check: (what it says, how the run differs, how both do)
FAULTS = {
    "steps": [
        ("steps: .* next one is 2 in the run and 1 in the reference", {"every": 2}),
        ("steps: .* next one is none in the run and 1 in", {"steps": 1})],
    "parameter_names": [
        ("step 0: names: only the reference has qkv.bias .see `model`", {"of": trained}, TIED)],
    "shapes": [("step 0: shapes: ranks hold 12 numbers of 0.weight, which has 24", {
        "edit": lambda lines: lines[0]["values"]["0.weight"].update(held=12)})],
    "types": [("step 1: types: optimizer states are kept in float16", {
        "edit": lambda lines: lines[1]["ranks"][0]["types"].update(
            {"optimizer states are kept": {"float16": 4}})}, ADAM)],
    "not_finite": [
        ("step 1: not finite: in the run alone, .* 0.bias", DIVERGED),
        ("step 1: not finite: in the reference alone", {"spoil": lambda _: None}, DIVERGED)],
    "initial_weights": [("step 0: initial weights: other values of 0.weight", {
        "start": lambda model: model[0].weight.data.copy_(model[0].weight.data.roll(2, 0))})],
    "samples": [
        ("step 0: samples: 8 of 8 are missing, and 8 other", {
            "batch_of": lambda x: mixed(x + 1)}, {"batch_of": mixed}),
        ("step 0: samples: `a`, `ids`: 1 of 8 .* 2 times, by ranks .0.", {
            "batch_of": lambda x: [mixed(x[REPEATED])[0] | {"z": x[:, :1]}]},
         {"batch_of": mixed})],
    "update": [("step 1: update: weights of every .* moved differently, .*times 2", {"lr": 0.2})],
    "copies_of_weights": [("step 1: update: ranks .0. and .1. hold different weights of 0.weight", {
        "edit": apart("values", 1, "0.weight")})],
    "reduction": [
        ("step 0: reduction: ranks .0. and .1. .* of 0.bias: neither their sum nor their mean", {
            "spoil": scale(0.1), "edit": apart("gradients", 0, "0.bias")})],
    "mean_of_means": [
        ("step 0: loss: a mean of means, times 2, as many as the ranks", {
            "edit": means_of_shifted_labels}, {
                "edit": edit_rank(losses=[(2 * 3.0 + 6 * 2.5) / 16])})],
    "scaled": [
        ("step 0: gradients: all: times 2", {"spoil": scale(2)}, {"dtype": torch.bfloat16}),
        (r"step 0: gradients: all: times 1\.0002; the loss is right", {"spoil": scale(1.0002)}),
        ("step 0: gradients: all: divided by 6, as many as ranks x micro-batches", {
            "spoil": scale(1 / 6), "edit": on_ranks(0.5, 0.5, targets=[7, 7, 7])}),
        ("step 0: .*those of 0.bias to 2.bias .3 of 4 .*times 0.5: .*the scale of an adapter", {
            "spoil": lambda model: scale(0.5)(model) or scale(0, "0.weight")(model)}, {
                "spoil": scale(0, "0.weight")})],
    "missing": [
        ("step 0: gradients: only the run has those of 0.bias", {"spoil": lambda _: None}, {
            "spoil": lambda model: setattr(model[0].bias, "grad", None)}),
        ("step 0: gradients: missing: the run has none: .*zero_grad", {"spoil": clear})],
    "not_cleared": [
        ("step 1: gradients: not cleared: all hold 1 of", {"clear": False}),
        ("step 1: gradients: late: all are those of the step before", {"spoil": late})],
    "rounding": [
        ("step 0: .*rounding: .*--float32-inside", {"spoil": in_float32}),
        ("step 0: .*rounding: .*bfloat16", {"spoil": rolled(2e-3 / 1.5**3, 1.5)})],
    "unexplained": [
        ("step 0: gradients: those of 0.weight differ, by up to ", {
            "spoil": lambda model: model[0].weight.grad.copy_(model[0].weight.grad.roll(1, 0))}),
        ("step 0: gradients: those of phase differ", {
            "spoil": lambda model: model.phase.grad.imag.mul_(2)}, COMPLEX),
        ("step 0: gradients: forward pass: .* the loss hardly: the first module .* is `1`", {
            "spoil": rolled(1e-3, 10), "edit": other_output}),
        ("step 0: gradients: forward pass: .* output differs is `2`, after `1`",
         module(1, torch.sin)),
        ("step 0: gradients: forward pass: .* output differs is `0`, the first", {
            "start": lambda model: setattr(model[0], "forward", lambda x: torch.nn.functional.
                                           linear(2 * x, model[0].weight, model[0].bias))}),
        ("step 0: .*the outputs of all modules agree: look at the loss", {
            "loss_of": lambda model, x: model(x).abs().mean()}),
        # It is no module, or ranks hold parts of it.
        ("step 0: .*outputs of modules are not compared", {
            "of": shards, "loss_of": lambda model, x: model(x).abs().mean()}),
        ("step 0: .*the outputs of all modules agree", {
            "loss_of": lambda model, x: model(x).abs().mean(), "edit": partial_sums}),
        ("step 0: .* output differs is `the model itself.1.`, after `the model itself`", module(
            0, lambda y: (y[0], y[1].sin())), {
                "make": lambda: torch.nn.Sequential(Twice(4, 3)),
                "loss_of": lambda model, x: model(x)[1].square().mean()}),
        ("step 2: .* output differs is `2`, after `1`; it was right in the step before", module(
            1, in_steps([2], torch.sin)))],
    "about_dropout": [("step 0: gradients: .*; dropout is on, so .*: 3.p = 0.1", {
        "start": lambda model: model.append(torch.nn.Dropout(0.1))})],
    "loss": [
        ("step 0: loss: it is .* .times 2, as many as ranks that read the same samples", {
            "edit": on_ranks(1, 1, 1, 1, parts=TWICE)}),
        ("step 0: loss: .*divided by 2, as .*: 2 ranks read the same samples, or .*averaged$", {
            "edit": on_ranks(0.5, 0.5, parts=ALL)}),
        ("step 0: loss: it is inf", {"edit": edit_rank(losses=[math.inf])})],
    "clipping": [
        ("step 0: clipping: .* scaled by 1, elsewhere by 0.5, as .* of each tensor$", {
            "change": lambda _, model: scale(0.5, "0.weight")(model), "split": True}),
        (r"step 0: clipping: not active, .* scaled by 1, not by 0\.501 .times 1\.996\)$", {
            "change": lambda *_: None, "edit": on_ranks(0.5, 0.5)}, {
                "change": lambda _, model: scale(0.501)(model)}),
        # Gradients may be further apart than they are, for they are sums of many numbers.
        ("step 1: clipping: .* scaled by 1.01, not by 1 ", {
            "change": lambda step, model: scale(1.01 if step else 1)(model)}, {
                "make": lambda: torch.nn.Sequential(
                    torch.nn.Linear(2**14, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)),
                "data": lambda: [torch.randn(8, 2**14)], "dtype": torch.float32})],
}


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{check}-{i}") for check, rows in
                                 FAULTS.items() for i, row in enumerate(rows)])
def test_a_fault(tmp_path, row):
    expected, fault, both, *_ = *row, {}
    one, two = train(tmp_path / "one", **both), train(tmp_path / "two", **both | fault)
    assert not compare(one, one).startswith("DIFFERENT")
    says = answer(one, two)
    assert re.match(f"DIFFERENT: {expected}", says), says


def test_no_check_is_left_out():
    listed = [*checks.ALWAYS, *checks.CHECKS, *checks.CAUSES]
    names = {check.__name__ for check in listed} - {"gradients"}  # it calls CAUSES
    assert names | {"steps", "about_dropout"} == {*FAULTS, "lost_tie"}  # which tests/bugs has
    assert all(check.__doc__ for check in listed)


# Sound runs


def pixels(model, x, y):
    return torch.nn.functional.cross_entropy(model(x).mean((2, 3)), y)


def policy(model, x, advantages):
    """Its first value is 0, but for rounding: advantages are normalised."""
    log_p = model(x).log_softmax(-1)[:, 0]
    return -(advantages * (log_p - log_p.detach()).exp()).mean()


def advantages():
    x = torch.randn(64)
    return torch.randn(64, 6), (x - x.mean()) / x.std()


IMAGES = torch.randn(8, 3, 48, 48, generator=torch.Generator().manual_seed(0))
NOISE = ADAM | {"make": Attention, "data": ids, "loss_of": tokens}
PARTS, FLOAT32 = {"accumulate": 4}, {"dtype": torch.float32}
# What parity says of two equal runs: (a pattern, how both are trained, how one of them is)
SOUND = {
    "the same": ("EQUAL: 1 rank against 1, 4 parameters, 3 updates, float64 .*: clipping .it is "
                 "never active.; the update after the last step$", {}),
    "one step": ("EQUAL.* 0 updates, .*: updates and clipping .one step", {"steps": 1}),
    "at rest": ("EQUAL.* 0 updates, .*: updates of 4 parameters", {
        "change": lambda _, model: scale(0)(model)}),
    "dead": ("EQUAL.*: gradients of 3 parameters .0 or None", {
        "spoil": scale(0, "0.weight", "0.bias", "2.weight")}),
    "left out": ("EQUAL.*, 4 parameters, .*; buffers .1.; parameters of whole numbers .1.; tensors "
                 "of the optimizer .* .1.$", {"start": more_left_out}),
    "a mask": ("EQUAL.*: `mask` .in one batch alone", {"batch_of": lambda x: [{"x": x}]}, {
        "batch_of": lambda x: [{"x": x, "mask": x > 0}]}),
    "no gradients": ("NOTHING TO COMPARE: all gradients are 0 or missing", {"spoil": clear}),
    "from then on": ("NOTHING TO COMPARE from step 2 on: .* not finite", {
        "spoil": in_steps([2, 3], scale(math.inf, "0.weight")), "change": skip}),
    "a step skipped": ("EQUAL.* 2 updates, .*: steps 0 .not finite in both", {
        "spoil": in_steps([0], scale(math.inf, "0.weight")), "change": skip}),
    "16 bits": ("NOTHING PROVEN: 1 rank against 1, .*, bfloat16 .*Note: weights are kept in "
                "bfloat16 .4 of 4.; optimizer states are kept in bfloat16 .8 of 8.", ADAM | {
                    "dtype": torch.bfloat16}, {"accumulate": 4}),
    # In step 1, which is not recorded, gradients are scaled otherwise than in step 2.
    "unrecorded steps": ("EQUAL", {"every": 2, "change": lambda step, model: scale(
        0.25 if step % 2 else 0.5)(model)}),
    "a tied tensor": ("EQUAL.*, 4 parameters", TIED, {"of": shards}),
    # Ranks that read the same samples and have the same loss count once, as under tensor
    # parallelism. Losses of context-parallel ranks are not the same.
    "the same losses": ("EQUAL: 4 ranks against 1.*Note: 2 ranks read the same", {}, {
        "edit": on_ranks(0.25, 0.25, 0.75, 0.75, parts=TWICE)}),
    "other losses": ("EQUAL: 4 ranks against 1", {}, {
        "edit": on_ranks(0.125, 0.25, 0.25, 0.375, parts=TWICE)}),
    # The gradient of a bias before a normalisation is nothing but noise, which Adam moves by whole
    # steps, otherwise with other micro-batches. The large loss keeps Adam's eps from damping it.
    "noise in float64": ("EQUAL.* float64 ", NOISE, PARTS),
    # Sums run over many more numbers than there are targets.
    "few targets": ("EQUAL", FLOAT32 | {
        "make": lambda: torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.InstanceNorm2d(8, affine=True), torch.nn.GELU(),
            torch.nn.Conv2d(8, 4, 3)),
        "data": lambda: (IMAGES, torch.arange(8) % 4), "loss_of": pixels}, PARTS),
    "a loss of 0": ("EQUAL", FLOAT32 | {
        "make": Adapter, "data": advantages, "loss_of": policy}, PARTS),
    # The gradient of the bias is 0, and nothing but rounding in parts.
    "a critic": ("EQUAL", FLOAT32 | {
        "make": lambda: torch.nn.Linear(6, 1), "optimizer": torch.optim.Adam,
        "data": lambda: (torch.randn(33, 6), torch.randn(24, 6)),
        "loss_of": lambda model, x, z: model(z).mean() - model(x).mean()}, {"accumulate": 3}),
    "rounding grows": ("EQUAL.*gradients and updates from step .* on .rounding", NOISE | FLOAT32 | {
        "lr": 0.25, "steps": 25}, PARTS),
    # It becomes as large as a fault at once.
    "rounding is amplified": ("NOTHING TO COMPARE from step .*, which training has amplified",
                              NOISE | {"lr": 1.0, "steps": 25}, PARTS),
    "a loss in float32": ("EQUAL.*, float32 ", {
        "loss_of": lambda model, x: model(x).float().square().mean()}, PARTS),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_not_different(tmp_path, name):
    expected, both, other, *_ = *SOUND[name], {}
    one, two = train(tmp_path / "one", **both), train(tmp_path / "two", **both | other)
    assert re.match(expected, answer(one, two)), answer(one, two)


@pytest.mark.parametrize("by", [1e-6, 5e-5])
def test_float32_inside(tmp_path, by):
    """A softmax in float32 is allowed by an option; a wrong eps of a norm is another formula."""
    one, two = (train(tmp_path / name, spoil=rolled(size))
                for name, size in (("one", 0), ("two", by)))
    small, allowed = by < 1e-5, compare(one, two, float32_inside=True)
    assert ("--float32-inside" in compare(one, two)) == small
    assert allowed.startswith("EQUAL" if small else "DIFFERENT")
    assert ("float64 with float32 inside" in allowed) == small


def test_full_precision(tmp_path):
    one = train(tmp_path / "one", dtype=torch.bfloat16)
    assert compare(one, one, full_precision=True).startswith(
        "DIFFERENT: types: weights are kept in bfloat16 (4 of 4)")


# What is recorded


BATCHES = {
    "inputs.x": lambda x: [{"inputs": {"x": x}, "name": "text"}],
    "0 1": lambda x: [(x.numpy(), x[:, 0].numpy())],
    # One name for a list of the same kind; in a list of several kinds each has its own.
    "items.1 items.3.x more": lambda x: [{"items": ["text", x, None, {"x": x[:, :1], "n": 3}],
                                          "more": [x[:4], x[4:]]}],
}


@pytest.mark.parametrize("names", BATCHES)
def test_samples_are_found_in_any_structure(names):
    x = torch.randn(8, 4)
    one, two = (recording.read(BATCHES[names](x)) for x in (x, x[REPEATED]))
    assert [*one[0]] == names.split() and one[0] != two[0]


def test_samples_that_are_padded_by_a_mask():
    """With any id, to other lengths."""
    ids = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    padded = {key: torch.nn.functional.pad(x, (0, 3), value=value)
              for (key, x), value in zip(batch.items(), (7, 0, -100))}
    assert recording.read([batch])[:3] == recording.read([padded])[:3]
    assert recording.read([batch])[1:3] == ([36], [4 * 8])


@pytest.mark.parametrize("shape, cuts", [([1000], [0, 7, 300, 1000]), ([70], [0, 1, 70])])
def test_parts_of_a_flat_tensor_add_up(monkeypatch, shape, cuts):
    """They are summed as rows of a matrix, wherever a part begins, and in blocks of any size."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = recording.sums(tensor, [0], shape)
    monkeypatch.setattr(recording, "BLOCK", 7)
    parts = [recording.sums(tensor[a:b], [a], shape) for a, b in zip(cuts, cuts[1:])]
    total = [sum(column) for column in zip(*parts)]
    assert total == pytest.approx(whole, rel=1e-12, abs=1e-12)
    assert recording.square(tensor) == pytest.approx(whole[0])


def test_replicas_of_a_partial_sum_count_once():
    """Two parts, each on two ranks, as of norms under data and tensor parallelism."""
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
    row = [{"gradients": {"w": [((2,), (0,), (2,), recording.sums(parts[rank % 2], [0], [2]))]}}
           for rank in range(4)]
    merged = recording.merge(row, "gradients")
    line = {"values": merged, "gradients": merged, "ranks": []}
    whole = recording.sums(sum(parts), [0], [2])[2:]
    assert Run(line, ["w"]).gradients.total.tolist()[0] == pytest.approx(whole)
    assert merged["w"]["ranks"] == "[0, 2] and [1, 3]"


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
    one = read(tmp_path / "one")
    assert ", float32" in compare(one, one)


# As a user starts it


def test_the_command(tmp_path, capsys):
    one, same, two = (str(tmp_path / name) for name in ("one", "same", "two"))
    train(one), train(same), train(two, spoil=in_steps([2], scale(2)))
    assert main([one, same]) == 0
    assert capsys.readouterr().out.startswith("EQUAL: 1 rank against 1, 4 parameters, 3 updates")
    assert main([one, two, "--table"]) == 1
    table, *rows, says = capsys.readouterr().out.splitlines()
    assert table.startswith("gradients of step 2 ") and "DIFFERENT: step 2: gradients: all" in says
    assert [row.split()[0] for row in rows] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(" 2.000000 " in row for row in rows)
    for name in one, two:
        train(name, spoil=clear)
    assert main([one, two]) == 1 and "NOTHING TO COMPARE" in capsys.readouterr().out


def make_file(kind, path, one):
    if kind == "crashed":  # it replaces what is left of an earlier run
        shutil.copy(one, path)
        recording.Parity(path, torch.nn.Linear(2, 2))
    elif kind in ("cut", "old"):
        path.write_text(one.read_text()[:-9] if kind == "cut" else '{"format": 2, "step": 0}\n')


@pytest.mark.parametrize("name, expected", [
    ("no-such-file", "No such file"), ("one", "are the same file"), ("cut", "line 5 is cut"),
    ("old", "record it again"), ("crashed", "did the run crash before its first record"),
    ("/dev/zero", "is no file of at most 1 GB")])
def test_files_that_cannot_be_compared(tmp_path, capsys, name, expected):
    train(tmp_path / "one")
    make_file(name, tmp_path / name, tmp_path / "one")
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "one"), str(tmp_path / name)])
    assert end.value.code == 2 and expected in " ".join(capsys.readouterr().err.split())


def test_another_file_is_not_replaced(tmp_path):
    notes = tmp_path / "notes.md"
    notes.write_text("# Notes\n")
    with pytest.raises(ValueError, match="notes.md exists, and is no recording: name another"):
        recording.Parity(notes, torch.nn.Linear(2, 2))
    assert notes.read_text() == "# Notes\n"


@thorough
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
