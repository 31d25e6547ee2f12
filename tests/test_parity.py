"""tools/parity.py: sound runs are equal, and faults are found and named."""

import ast
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.support.processes import ROOT, ProcessServer
from tests.support.sample import sampled, thorough
from tools import parity, parity_checks

MODEL = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 3 --num-attention-heads 8 "
         "--num-key-value-heads 4")
OPTIONS = (f"{MODEL} --seq-len 16 --batch-size 24 --steps 3 --warmup-steps 2 --lr 0.01 "
           "--grad-clip 0.5 --save-every 0 --no-resume")
RECORD = "        grad_norm = "  # before it stands the line that records
TRAINER = "tests/parity_trainer.py"
TIED = "model.lm_head.weight = model.model.embed_tokens.weight"
BEFORE_AUTOCAST = "    autocast = torch.autocast("


def before(line, more):
    """An edit: more lines before one."""
    return [line, more + line]


# What tests/bugs does not have. name: script, its options, what it prints, edits. On 2 ranks, with
# 3 micro-batches, in float32.
FAULTS = {
    "mean-instead-of-sum": (
        "ddp.py", "", "gradients: all: divided by 2, such as the ranks; the loss is "
        "right .5.519434 and 5.519434.: look at the backward pass",
        ["(micro_loss * n).backward()", "micro_loss.backward()"]),
    "divided-by-n-and-a": (
        "fsdp.py", "", "gradients: all: divided by 6, such as ranks x micro-batches; the loss is "
        "right", ["    add_gradients_up(model)", "    #"],
        ["micro_loss.backward()", "(micro_loss / 3).backward()"]),
    "a-sample-repeated": (
        "ddp.py", "", "samples: [36] of 24 are missing, one is read [24] times, by ranks ....?",
        before("        count = count_targets", "        batch = [[x[[0, *range(len(x) - 1)]]"
               " for x in micro_batch] for micro_batch in batch]\n")),
    "other-samples": (
        "ddp.py", "", "samples: 2[34] of 24 are missing, and 2[34] other samples are read "
        "instead: another seed",
        ["args.grad_accum, seed=args.seed", "args.grad_accum, seed=args.seed + 1"]),
    "a-stage-without-gradients": (
        "pp.py", "--microbatches 2", "gradients: missing: those of layer 2, model.norm.weight, "
        "lm_head.weight; the loss is right",
        before(RECORD, "        if rank == 1:\n            optimizer.zero_grad()\n")),
    "clipped-and-not-reduced": (
        "cp.py", "", "reduction: .* each rank has clipped its own to 0.1",
        ["works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))", "pass"],
        before("        finish_reducing()",
               "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n")),
    "one-matrix-not-reduced": (
        "cp.py", "", "reduction: ranks .0. and .1. hold different gradients of "
        ".*embed_tokens.weight: they must be added up",
        ["all_reduce_in_backward(model.parameters(), group)",
         "all_reduce_in_backward(list(model.parameters())[1:], group)"]),
    "a-stages-own-norm": (
        "pp.py", "--microbatches 2", "step 0: clipping: .* elsewhere by .* the norm of a part",
        ["= clip_over_stages(parameters, args.max_norm, group)",
         "= torch.nn.utils.clip_grad_norm_(parameters, args.max_norm)"]),
    "ranks-clip-otherwise": (
        "cp.py", "", "step 0: clipping: .* scaled by .*, elsewhere by ",
        ["(model.parameters(), args.max_norm)", "(model.parameters(), 0.25 * (1 + cp_rank))"]),
    "no-mask-on-a-rank": (
        "ddp.py", "", "gradients: forward pass: the loss is",
        before("    replica = ", "    for layer in layers if dist.get_rank() else ():\n"
               "        layer.self_attn.attention = lambda q, k, v, **_: (\n"
               "            torch.nn.functional.scaled_dot_product_attention(q, k, v, "
               "enable_gqa=True))\n")),
    "not-cleared": ("ddp.py", "", "step 1: gradients: not cleared: all hold 0.25",
                    ["        optimizer.zero_grad()\n", ""]),
    "heads-permuted": (
        "cp.py", "", "initial weights: other values of .*layers.1.self_attn.q_proj.weight, of the "
        "same length: are parts in another order", before(
            BEFORE_AUTOCAST, "    q_proj = model.model.layers['1'].self_attn.q_proj\n"
            "    q_proj.weight.data = q_proj.weight.data.roll(4, 0)\n")),
    "a-rank-skips-a-step": (
        "cp.py", "", "step 2: update: ranks .0. and .1. hold different weights",
        ["        optimizer.step()", "        if (step, cp_rank) != (1, 0):\n"
         "            optimizer.step()"]),
    "loss-only": (
        "ddp.py", "", "loss: it is .*times 2, such as the ranks.*, and the gradients agree",
                  ["loss += micro_loss.detach()", "loss += 2 * micro_loss.detach()"]),
    "other-betas": ("ddp.py", "", "step 2: update: .* the optimizer",
                    ["args.lr, args.betas", "args.lr, (0.5, 0.5)"]),
    "dropout": ("ddp.py", "", "dropout is on, .*drop.p = 0.1",
                before("    replica = ", "    model.drop = torch.nn.Dropout(0.1)\n    model.model."
                       "embed_tokens.register_forward_hook(lambda *args: model.drop(args[-1]))\n")),
    "a-loss-scale": ("ddp.py", "", "times 1024, a power of two: a loss scale",
                     ["(micro_loss * n)", "(micro_loss * n * 1024)"]),
    "a-tie-kept-and-halved": (
        "ddp.py", "", "gradients: all: divided by 2, such as the ranks",
        before(BEFORE_AUTOCAST, f"    {TIED}\n"),
        ["(micro_loss * n).backward()", "micro_loss.backward()"]),
    # In a trainer with tensor parallelism by hand
    "a-sum-over-ranks-missing": (
        TRAINER, "", "reduction: .*; the loss is wrong too .*: look at the forward pass",
        ["self.out.weight), self.n)", "self.out.weight), 1 + (self.number != 1))"]),
    "not-finite": (
        TRAINER, "", "step 1: not finite: weights or gradients of embed.weight",
        before("        parity.record(", "        model.embed.weight.grad[0] /= step != 1\n")),
}


def record(once, shared, world, jobs):
    """Run jobs of tests/parity_runs.py, once for all tests. Returns the folder of recordings."""
    text = json.dumps(jobs)
    path = shared / f"parity-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    path.write_text(text)
    return once(f"tests/parity_runs.py {path}", world, "", inject="ignored()").out


def job(name, script, options="", *edits):
    return [name, script, options if script == TRAINER else f"{OPTIONS} {options}", edits]


TIE = before(BEFORE_AUTOCAST, f"    {TIED}\n")
FLOAT32_LOSS = ["cross_entropy(logits.", "cross_entropy(logits.float()."]
DRIFTING = "--dtype float32 --steps 25 --lr 0.3 --warmup-steps 1"
AMPLIFIED = "--dtype float64 --steps 10 --lr 0.3 --warmup-steps 1"


@pytest.fixture
def reference(once, shared):
    """The recordings of one process, by name."""
    jobs = [job(f"single-{dtype}", "single.py", f"--dtype {dtype}") for dtype in DTYPES]
    jobs += [job(f"trainer-{dtype}", TRAINER, f"--dtype {dtype}") for dtype in DTYPES[:2]]
    folder = record(once, shared, 0, [
        *jobs, job("single-accumulated", "single.py", "--dtype float64 --grad-accum 4"),
        job("tied", "single.py", "--dtype float32", TIE),
        job("drifting", "single.py", DRIFTING), job("amplified", "single.py", AMPLIFIED),
        job("float32-loss", TRAINER, "", FLOAT32_LOSS, ["tokens.chunk(2)", "tokens.chunk(1)"]),
    ])
    return lambda name: folder / f"{name}.parity"


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare(one, two):
    """What differs, or None; and how many steps were compared."""
    message = parity_checks.compare(read(one), read(two))
    equal = re.match(r"(?:EQUAL up to rounding|NOTHING FOUND), (\d+) of", message)
    return (None, int(equal[1])) if equal else (message.removeprefix("DIFFERENT: "), None)


DTYPES = "float64", "float32", "bfloat16"
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
    for name in commands:
        for one in ours:
            message, together = compare(reference(one), folder / f"{name}.parity")
            assert message is None, (name, one, message)
            assert together == (1 if dtype == "bfloat16" else 3)


def script_of(fault):
    return FAULTS[fault][0]


def record_faults(once, shared, script):
    own = {name: fault for name, fault in FAULTS.items() if fault[0] == script}
    more = "--dtype float32" if script == TRAINER else "--dtype float32 --grad-accum 3"
    folder = record(once, shared, 2, [
        job(name, script, f"{more} {options}", *edits)
        for name, (_, options, _, *edits) in own.items()
    ])
    return own, folder


@pytest.mark.parametrize("script", sampled(sorted({*map(script_of, FAULTS)}), [TRAINER]))
def test_faults_are_found_and_named(once, shared, reference, script):
    own, folder = record_faults(once, shared, script)
    one = "trainer-float32" if script == TRAINER else "single-float32"
    for name, (_, _, expected, *_) in own.items():
        message, _ = compare(reference("tied" if "tie" in name else one), folder / f"{name}.parity")
        assert message and re.search(expected, message), (name, expected, message)


@thorough
def test_a_factor_of_gradients_in_bfloat16(once, shared, reference):
    """Some gradients are too short there to prove anything: they are counted among the others."""
    _, folder = record_faults(once, shared, "ddp.py")
    message, _ = compare(reference("single-bfloat16"), folder / "mean-instead-of-sum.parity")
    assert message.startswith("step 0: gradients: all: divided by 2, such as the ranks")


# False accusations


@pytest.fixture
def others(once, shared):
    folder = record(once, shared, 2, [
        job("sound", TRAINER), job("drifting", "ddp.py", f"{DRIFTING} --grad-accum 3"),
        job("float32-loss", TRAINER, "", FLOAT32_LOSS),
        job("float32-number", TRAINER, "", FLOAT32_LOSS, ["loss.detach()", "loss.item()"]),
        job("amplified", "ddp.py", f"{AMPLIFIED} --grad-accum 3"),
    ])
    return lambda name: folder / f"{name}.parity"


def test_shards_of_a_fused_matrix(reference, others):
    message, together = compare(reference("trainer-float64"), others("sound"))
    assert message is None and together == 3


@pytest.mark.parametrize("name", ["float32-loss", "float32-number"])
def test_a_loss_in_float32_in_a_model_in_float64(reference, others, name):
    """The type of the loss decides how large rounding is, also if the loss is a number."""
    one, two = read(reference("float32-loss")), read(others(name))
    assert parity_checks.compare(one, two).startswith("EQUAL")
    for rank in one[0]["ranks"] + two[0]["ranks"]:
        rank["eps"] = [torch.finfo(torch.float64).eps]
    assert ", as if float32 was in between" in parity_checks.compare(one, two)


def test_noise_that_steps_amplify(reference, others):
    message, together = compare(reference("amplified"), others("amplified"))
    assert message is None and together > 5
    words = parity_checks.compare(read(reference("amplified")), read(others("amplified")))
    tolerance, largest = re.search(r"gradients up to (\S+), .* difference: (\S+)$", words).groups()
    assert float(largest) > 1000 * float(tolerance)


def test_clip_factors_once_runs_have_parted(reference, others):
    message, together = compare(reference("drifting"), others("drifting"))
    assert message is None and together < 25
    one, two = (max(read(path)[-1]["ranks"][0]["factors"])
                for path in (reference("drifting"), others("drifting")))
    assert abs(one / two - 1) > 1e-3


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
    ``change(step, model)`` before each update."""
    monkeypatch.setattr(parity, "BLOCK", 7)

    def small(file, change=lambda *_: None, spoil=lambda _: None, parts=False, split=False,
              every=1, steps=4, dtype=torch.float64, clear=True, start=lambda _: None, lr=0.1,
              batch_of=lambda x: [x]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
        model.to(dtype)
        start(model)
        groups = [model[0], model[2]] if split else [model]
        optimizers = [torch.optim.SGD(group.parameters(), lr) for group in groups]
        detached = {name: p.detach() for name, p in model.named_parameters()}
        recorded = parity.Parity(tmp_path / file, detached if parts else model, optimizers,
                                 where=cut if parts else None)
        for step in range(steps):
            x = torch.randn(8, 4).to(dtype)
            loss = model(x).square().mean()
            loss.backward()
            spoil(model)
            for name, p in model.named_parameters():
                detached[name].grad = p.grad
            if step % every == 0:
                recorded.record(step, loss, batch_of(x))
            change(step, model)
            for optimizer in optimizers:
                optimizer.step()
                if clear:
                    optimizer.zero_grad()
        return tmp_path / file

    return small


def test_parts_add_up_without_requires_grad(small):
    """Parts in blocks of 7 numbers, not contiguous, of tensors that are detached."""
    assert compare(small("one"), small("two", parts=True))[0] is None


def scale_first(step, model):
    model[0].weight.grad *= 0.5


def scale_all(model, by=0.5):
    for p in model.parameters():
        p.grad *= by


def answer(one, two):
    """The whole answer of parity to two files."""
    return parity_checks.compare(read(one), read(two))


# What would be called EQUAL, and is not


def test_step_numbers(small):
    """A run that crashed, one that goes on, and one that was recorded at other steps."""
    one, short = small("one"), small("short", steps=1)
    begin = "DIFFERENT: steps: the run has recorded 1 and the reference 4, and nothing differs"
    assert answer(one, short).startswith(begin)
    assert answer(short, one).startswith("DIFFERENT: steps: the run has recorded 4 and the ref")
    assert answer(one, small("two", every=2)).startswith(
        "DIFFERENT: step 1: steps: the run has recorded step 2 in place of step 1")


@torch.no_grad()
def fill(model, value):
    for p in model.parameters():
        p.fill_(value)


def test_models_that_do_not_learn(small):
    """All gradients, or all weights, are 0 in both runs: nothing is proved."""
    def nothing(model):
        return scale_all(model, 0)

    one = small("one", spoil=nothing)
    assert answer(one, one) == "NOTHING TO COMPARE: all gradients are 0 in both runs"
    assert parity.main([str(one), str(one)]) == 1
    none = small("none", spoil=lambda model: model.zero_grad())
    assert answer(none, none).startswith("NOTHING TO COMPARE: neither run has gradients: record")
    two = small("two", start=lambda model: fill(model, 0), change=lambda _, model: nothing(model),
                spoil=lambda model: model[2].bias.grad.fill_(1))
    assert answer(two, two) == "NOTHING TO COMPARE: all weights are 0 in both runs"
    three = small("three", change=lambda _, model: nothing(model))
    assert re.match("EQUAL .*Not compared: updates .no weight moves.$", answer(three, three))


def test_in_16_bits_nothing_is_found(small):
    """It is no proof. What is wrong by a factor of 2 is found there in later steps, too, and
    gradients that are never cleared also if clipping has shortened the old ones."""
    def small_16(name, **options):
        return small(name, dtype=torch.bfloat16, **{"lr": 0.5} | options)

    one = small_16("one")
    message = answer(one, one)
    assert re.match("NOTHING FOUND, 1 of 4 steps: .* in 3 of the steps only samples", message)
    assert parity.main([str(one), str(one)]) == 0
    faults = {
        "update: the weights have moved 0 times .* does the optimizer have them": {
            "change": lambda _, model: model.zero_grad()},
        "update: .* moved (1.9|2).* times as far": {"lr": 1.0},
        "update: .* moved 0.[45].* times": {"lr": 0.25},
        "update: weights of 0.bias do not move": {
            "change": lambda _, model: setattr(model[0].bias, "grad", None)},
        "gradients: not cleared": {"clear": False},
    }
    for i, (expected, options) in enumerate(faults.items()):
        message = answer(one, small_16(str(i), **options))
        assert re.match(f"DIFFERENT: step [123]: {expected}", message), (expected, message)
    clipped, uncleared = (small_16(
        name, clear=name == "clipped", change=lambda _, model: torch.nn.utils.clip_grad_norm_(
            model.parameters(), 0.2)) for name in ("clipped", "uncleared"))
    assert re.match("DIFFERENT: step [123]: gradients: not cleared", answer(clipped, uncleared))


@dataclasses.dataclass
class Images:
    pixels: torch.Tensor
    text: dict


BATCHES = {
    "a dict in a dict": lambda x: [{"inputs": {"x": x}, "name": "text"}],
    "NumPy": lambda x: [(x.numpy(), x[:, 0].numpy())],
    "a dataclass": lambda x: [Images(x, {"ids": x[:, :1].long()})],
    "a list of tensors": lambda x: [{"images": list(x)}],
    "integers": lambda x: [(x * 1000).long()],
}


@pytest.mark.parametrize("structure", BATCHES)
def test_samples(small, structure):
    """They are found in any structure."""
    own, steps = BATCHES[structure], itertools.count()
    one, two = small("one", batch_of=own), small("two", batch_of=lambda x: own(
        x if next(steps) != 2 else x[[0, 0, *range(2, 8)]]))
    assert "Not compared" not in answer(one, one)
    assert re.match("DIFFERENT: step 2: samples: .*1 of 8 are missing, one is read 2 times, by "
                    "ranks .0.|DIFFERENT: step 2: samples: 4 of 32 are missing", answer(one, two))


def test_samples_that_are_not_compared(small):
    """The answer says so."""
    one, two = small("one", batch_of=lambda x: [{"x": x}]), small("two", batch_of=lambda _: None)
    assert re.match("EQUAL .*Not compared: samples .no tensor has the same name", answer(one, two))
    two = small("two", batch_of=lambda x: [{"x": x, "mask": x > 0}])
    assert re.match("EQUAL .*Not compared: `mask` .in one batch alone.$", answer(one, two))


def test_which_tensor_of_a_batch_differs(small):
    one, two = (small(name, batch_of=lambda x: [{"ids": x, "mask": x > shift}])
                for name, shift in (("one", 0), ("two", 0.5)))
    assert answer(one, two).startswith(
        "DIFFERENT: step 0: samples: `mask` differs, `ids` agrees: ")
    # If several differ, what is said is of the one whose rows are the most distinct.
    one, two = (small(name, batch_of=lambda x: [{"a": x[rows] > 0, "ids": x[rows], "z": x[:, :1]}])
                for name, rows in (("one", [*range(8)]), ("two", [0, 0, *range(2, 8)])))
    assert answer(one, two).startswith("DIFFERENT: step 0: samples: `a`, `ids` differ, `z` agrees: "
                                       "1 of 8 are missing, one is read 2 times")


# What would be called DIFFERENT, and is not


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_that_are_computed(small, dtype):
    """They differ by rounding, as if another device had normalised them."""
    def rounded(x):
        x = x.to(dtype)
        return [x, torch.nextafter(x, 2 * x)]

    one, two = (small(name, batch_of=lambda x: [rounded(x)[i]])
                for i, name in enumerate(("one", "two")))
    assert answer(one, two).startswith("EQUAL")


def test_many_samples_that_are_computed(small):
    """Of 256 numbers in bfloat16 many are neighbours, and a third of them is rounded otherwise."""
    torch.manual_seed(1)
    x = torch.randn(256, 1).bfloat16()
    others = torch.where(torch.rand(256, 1) < 0.3, torch.nextafter(x, 2 * x), x)
    one, two = (small(name, batch_of=lambda _: [own]) for name, own in (("1", x), ("2", others)))
    assert answer(one, two).startswith("EQUAL")


def on_ranks(line, losses, samples):
    """A recording of one rank as one of several that have these losses and samples."""
    rank = line["ranks"][0]
    line["ranks"] = [rank | {"losses": [loss], "samples": {"0": rank["samples"]["0"][part]}}
                     for loss, part in zip(losses, samples)]
    return line


def test_ranks_with_the_same_loss_count_once(small):
    """Parts of two data-parallel ranks add up, and two tensor-parallel ranks hold the same part.
    Losses of context-parallel ranks are not the same."""
    half = [slice(4), slice(4), slice(4, 8), slice(4, 8)]
    for shares in (0.25, 0.25, 0.75, 0.75), (0.125, 0.25, 0.25, 0.375):
        one, two = read(small("one")), read(small("two"))
        for line in two:
            (loss,) = line["ranks"][0]["losses"]
            on_ranks(line, [share * loss for share in shares], half)["loss"] = "sum"
        assert parity_checks.compare(one, two).startswith("EQUAL")
    one, two = read(small("one")), read(small("two"))
    for line in two:
        on_ranks(line, line["ranks"][0]["losses"] * 4, half)["loss"] = "sum"
    assert re.match("DIFFERENT: step 0: loss: it is .* .times 2, such as ranks that read the same",
                    parity_checks.compare(one, two))


def test_the_type_of_a_loss_that_is_a_number():
    assert parity.few_bits(torch.rand(1).item()) and not parity.few_bits(math.pi)
    assert not parity.few_bits(2.0**-53)  # rounding of float64


def test_the_type_of_a_loss_that_is_a_tensor(tmp_path):
    """It is the tensor's, however few bits its value has."""
    for dtype in (torch.float32, torch.float64):
        recorded = parity.Parity(tmp_path / "one", torch.nn.Linear(2, 2).double())
        recorded.record(0, torch.tensor(0.5, dtype=dtype))
        (line,) = read(tmp_path / "one")
        assert max(line["ranks"][0]["eps"]) == torch.finfo(dtype).eps


def test_shards_without_frozen_and_tied_parameters(tmp_path):
    """A dict of shards has the first name of a tied tensor alone. What is frozen must be added."""
    def recorded(name, choose):
        torch.manual_seed(0)
        model = Attention()
        model.out.weight = model.embed.weight
        model.qkv.bias.requires_grad_(False)
        tokens(model, *torch.arange(8).view(2, 1, 4)).backward()
        parity.Parity(tmp_path / name, choose(model)).record(0, 1.0)
        return tmp_path / name

    one = recorded("one", lambda model: model)
    two = recorded("two", lambda model: dict(model.named_parameters()))
    assert answer(one, two).startswith("EQUAL") and answer(two, one).startswith("EQUAL")
    three = recorded("three", lambda model: {
        name: p for name, p in model.named_parameters() if p.requires_grad})
    assert answer(one, three).startswith(
        "DIFFERENT: step 0: names: only the reference has qkv.bias, which has no gradients of them")


# What is wrong has a name


def test_recorded_after_clipping(small):
    def clip(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    message = answer(small("one", change=lambda _, model: clip(model)), small("two", spoil=clip))
    assert re.match("DIFFERENT: step 0: gradients: all: times .*, recorded after clipping. The norm"
                    " of the run is 0.01 again", message)


def test_trained_in_one_run(small):
    def freeze(model):
        model[0].bias.grad = None

    one, two = small("one"), small("two", spoil=freeze)
    assert answer(two, one).startswith(
        "DIFFERENT: step 0: gradients: only the run has those of 0.bias: frozen in the reference?")
    assert re.match("DIFFERENT: step 0: gradients: missing: those of 0.bias; .*They are None: froz",
                    answer(one, two))
    assert answer(one, small("three", spoil=lambda model: model.zero_grad())).startswith(
        "DIFFERENT: step 0: gradients: missing: the run has none: record before zero_grad")


def test_dropout_is_named_with_any_fault_of_gradients(small):
    one, two = read(small("one")), read(small("two", spoil=scale_all))
    two[0]["ranks"][0]["dropout"] = ["drop.p = 0.1"]
    assert re.match("DIFFERENT: step 0: gradients: all: times 0.5; .*; dropout is on, .*drop.p = ",
                    parity_checks.compare(one, two))


@torch.no_grad()
def spoil_unevenly(model, by=1e-3, growth=10):
    """Each of the 4 parameters ``growth`` times as much as the one before."""
    for i, p in enumerate(model.parameters()):
        p.grad += by * growth**i * p.grad.roll(1, 0)


@pytest.mark.parametrize("growth, name", [(1.5, "rounding: .* bfloat16"), (2, "part of the batch"),
                                          (10, "part of the batch")])
def test_rounding_is_even(small, growth, name):
    """What changes one gradient 8 times as much as another is not the rounding of a type."""
    message = answer(small("one"), small(
        "two", spoil=lambda model: spoil_unevenly(model, 2e-3 / growth**3, growth)))
    assert re.match(f"DIFFERENT: step 0: gradients: {name}", message)


@pytest.mark.parametrize("by, equal", [(1e-6, True), (5e-5, False)])
def test_what_is_inside_a_model_in_float64(small, by, equal):
    """A softmax in float32 is; a wrong eps of a norm is another formula, however long the sums."""
    one, two = read(small("one")), read(small(
        "two", spoil=lambda model: spoil_unevenly(model, by, 1)))
    for line in (*one, *two):
        line["ranks"][0]["numbers"] = 65536
    message = parity_checks.compare(one, two)
    assert message.startswith("EQUAL") == equal and ("as if float32" in message or not equal)


def test_the_loss_is_right_with_its_figure(small):
    message = answer(small("one"), small("two", spoil=lambda model: spoil_unevenly(model, 0.1)))
    loss = read(small("one"))[0]["ranks"][0]["losses"][0]
    assert f"the loss is right ({loss:.7g} and {loss:.7g})" in message
    assert "label smoothing" in message and "backward of its own" in message


def test_a_tied_name_does_not_hide_where_it_begins(tmp_path):
    def recorded(name, by):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(5))).double()
        model[4].weight = model[0].weight
        model(torch.randn(8, 5).double()).square().mean().backward()
        for i in range(2):
            model[i].bias.grad += by * model[i].bias.grad.roll(1)
        model[0].weight.grad += by * model[0].weight.grad.roll(1, 0)
        model[1].weight.grad += by * model[1].weight.grad.roll(1, 0)
        parity.Parity(tmp_path / name, model).record(0, 1.0)
        return tmp_path / name

    assert "; wrong from 1.bias on down, right above it" in answer(
        recorded("one", 0), recorded("two", 0.1))


def apart(kind, step):
    """Two ranks hold different copies of 0.weight."""
    def edit(lines):
        lines[step][kind]["0.weight"]["sums"][0] = 1.0
        lines[step][kind]["0.weight"]["ranks"] = "[0] and [1]"
    return edit


def scaled_by(name, by):
    def spoil(model):
        model.get_parameter(name).grad *= by
    return spoil


# What each check says of a fault: how the run differs, or an edit of its recording.
SAYS = {
    "step_numbers": ("step 0: steps: ", lambda lines: lines[0].update(step=7)),
    "parameter_names": ("step 0: names: only the reference has 0.bias", lambda lines: [
        line[kind].pop("0.bias") for line in lines for kind in ("values", "gradients")]),
    "shapes": ("step 0: shapes: ranks hold 12 numbers of 0.weight, which has 24",
               lambda lines: lines[0]["values"]["0.weight"].update(held=12)),
    "not_finite": ("step 0: not finite: weights or gradients of 0.bias",
                   {"spoil": scaled_by("0.bias", math.nan)}),
    "initial_weights": ("step 0: initial weights: other values of 2.bias$", {
        "start": lambda model: model[2].bias.data.add_(1)}),
    "samples": ("step 0: samples: 8 of 8 are missing, and 8 other samples are read instead", {
        "batch_of": lambda x: [x + 1]}),
    "copies_of_weights": ("step 1: update: ranks .0. and .1. hold different weights of 0.weight",
                          apart("values", 1)),
    "update": ("step 1: update: weights of every parameter have moved differently, by up to 0.5 of "
               "their way .times 2.: learning rate", {"lr": 0.2}),
    "reduction": ("step 0: reduction: ranks .0. and .1. hold different gradients of 0.weight",
                  apart("gradients", 0)),
    "lost_tie": (),  # tests/bugs
    "trained_in_one_run": (),  # below
    "scaled": ("step 0: gradients: those of 0.weight: times 3; the loss is right",
               {"spoil": scaled_by("0.weight", 3)}),
    "missing": ("step 0: gradients: missing: those of 0.weight; the loss is right",
                {"spoil": scaled_by("0.weight", 0)}),
    "not_cleared": ("step 1: gradients: not cleared: all hold 1 of those of the step before", {
        "clear": False}),
    "rounding": ("step 0: gradients: rounding: they differ by .*, as if bfloat16", {
        "spoil": lambda model: [p.grad.copy_(p.grad.bfloat16()) for p in model.parameters()]}),
    "some_gradients": ("step 0: gradients: those of 0.weight differ, by up to ", {
        "spoil": lambda model: model[0].weight.grad.copy_(model[0].weight.grad.roll(1, 0))}),
    "mean_of_means": (),  # below
    "part_of_the_batch": ("step 0: gradients: part of the batch, or the backward", {
        "spoil": lambda model: [p.grad.copy_(p.grad.roll(1, 0)) for p in model.parameters()]}),
    "forward_pass": ("step 0: gradients: forward pass: the loss is ", {
        "start": lambda model: model.register_forward_hook(lambda *args: args[-1].sin())}),
    "loss": ("step 0: loss: it is .*, not .* .times 2.*and the gradients agree",
             lambda lines: lines[0]["ranks"][0]["losses"].append(
                 lines[0]["ranks"][0]["losses"][0])),
    "clipping": ("step 0: clipping: by a wrong norm .* scaled by 0.5, not by 1",
                 {"change": lambda _, model: scale_all(model)}),
    "crude_update": (),  # above, in 16 bits
    "crude_not_cleared": (),
}


@pytest.mark.parametrize("check", [name for name, says in SAYS.items() if says])
def test_each_check(small, check):
    expected, fault = SAYS[check]
    one, two = read(small("one")), read(small("two", **(fault if isinstance(fault, dict) else {})))
    if callable(fault):
        fault(two)
    assert parity_checks.compare(one, one).startswith("EQUAL")
    message = parity_checks.compare(one, two)
    assert re.match(f"DIFFERENT: {expected}", message), message


def test_no_check_is_left_out():
    checks = [*parity_checks.ALWAYS, *parity_checks.CHECKS, *parity_checks.CAUSES,
              *parity_checks.CRUDE]
    assert {check.__name__ for check in checks} - {"gradients"} == {*SAYS}
    assert all(check.__doc__ for check in checks)


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


def train(path, make, batch, loss_of, accumulate, steps=4, optimizer=torch.optim.SGD, lr=0.1,
          change=lambda *_: None):
    """Record a training in one process, each batch in ``accumulate`` parts."""
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer([p for p in model.parameters() if p.requires_grad], lr)
    recorded = parity.Parity(path, model, optimizer)
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


def tokens(model, x, y):
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) * 1e6


def deep(dtype):
    linear = [torch.nn.Linear(128, 128, bias=False) for _ in range(6)]
    return torch.nn.Sequential(*(m for x in linear for m in (x, torch.nn.ReLU()))).to(dtype)


ORTHOGONAL = torch.linalg.qr(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)))[0] * 8
IMAGES = torch.randn(8, 3, 48, 48, generator=torch.Generator().manual_seed(0))
HARD = {
    # The gradient of a bias before a normalisation is nothing but noise, which Adam moves by whole
    # steps, otherwise with other micro-batches. The large loss keeps Adam's eps from damping it.
    "noise-32": (Attention, lambda: torch.randint(11, (2, 8, 12)), tokens, 4,
                 {"optimizer": torch.optim.Adam, "lr": 0.01}),
    "noise-64": (lambda: Attention().double(), lambda: torch.randint(11, (2, 8, 12)), tokens, 4,
                 {"optimizer": torch.optim.Adam, "lr": 0.01}),
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
    "relu-in-bfloat16": (lambda: deep(torch.bfloat16), lambda: (
        torch.randn(64, 128).bfloat16(), torch.randn(64, 128).bfloat16()), squared_error, 4,
        {"lr": 1.0}),
}


@pytest.mark.parametrize("name", HARD)
def test_sound_runs_whose_gradients_are_hard(tmp_path, name):
    make, batch, loss_of, accumulate, options = HARD[name]
    for parts in 1, accumulate:
        train(tmp_path / str(parts), make, batch, loss_of, parts, **options)
    message, together = compare(tmp_path / "1", tmp_path / str(accumulate))
    assert message is None and together == (1 if "bfloat16" in name else 4)


def test_samples_that_are_padded_by_a_mask(tmp_path):
    """With any id, to other lengths."""
    for pad in 0, 3:
        torch.manual_seed(0)
        model = Attention()
        ids = torch.randint(11, (4, 9))
        mask, labels = torch.ones_like(ids), ids
        if pad:
            ids, mask, labels = (torch.nn.functional.pad(x, (0, pad), value=value)
                                 for x, value in ((ids, 7), (mask, 0), (ids, -100)))
        torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        recorded = parity.Parity(tmp_path / str(pad), model)
        recorded.record(0, None, [{"input_ids": ids, "attention_mask": mask, "labels": labels}])
    assert compare(tmp_path / "0", tmp_path / "3") == (None, 1)
    samples, *_ = parity.read([{"attention_mask": mask, "labels": ids}])  # of a decoder
    assert samples["labels"] == parity.read([ids])[0]["0"]


def test_gradients_that_overflow(small, tmp_path):
    """As in the first step with a loss scale, which is left out. If none is left, nothing is
    compared."""
    def overflow(step, model):
        model[0].weight.grad[0] /= float(step > 0)

    def skip(step, model):
        if step == 0:
            model.zero_grad()

    for name in "one", "two":
        steps = itertools.count()
        small(name, skip, lambda model: overflow(next(steps), model))
        small(f"{name}-always", spoil=lambda model: overflow(0, model))
    assert compare(*(tmp_path / name for name in ("one", "two"))) == (None, 3)
    message, _ = compare(*(tmp_path / f"{name}-always" for name in ("one", "two")))
    assert message == "NOTHING TO COMPARE: the reference is not finite"


def test_types_and_layouts_of_parameters(tmp_path):
    """A frozen parameter of whole numbers, and a gradient that is sparse."""
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4, sparse=True), torch.nn.Linear(4, 2))
    model.frozen = torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    recorded = parity.Parity(tmp_path / "one", model)
    loss = model(torch.tensor([1, 2, 2])).sum()
    loss.backward()
    recorded.record(0, loss, [torch.tensor([1, 2, 2])])
    assert compare(tmp_path / "one", tmp_path / "one") == (None, 1)
    assert {*read(tmp_path / "one")[0]["values"]} == {"0.weight", "1.weight", "1.bias"}


class Adapter(torch.nn.Module):
    """As in LoRA, the first gradient of ``down`` is 0."""

    def __init__(self):
        super().__init__()
        self.down, self.up = (torch.nn.Linear(6, 6, bias=False) for _ in range(2))
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + self.up(self.down(x))


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
    assert parity_checks.compare(one, two).startswith(
        "DIFFERENT: step 2: update: weights of down.weight")


def test_a_loss_of_zero_is_a_loss(small):
    one, two = read(small("one")), read(small("two"))
    two[0]["ranks"][0]["losses"] = [0.0]
    assert parity_checks.compare(one, two).startswith("DIFFERENT: step 0: loss: it is 0.0")
    two[0]["ranks"][0]["losses"] = [math.inf]
    assert parity_checks.compare(one, two).startswith("DIFFERENT: step 0: loss: it is inf")


def test_a_mean_of_ranks_means(small):
    """Each of two ranks gives the losses of two micro-batches, which add up to its own mean."""
    one, two = read(small("one")), read(small("two"))
    for step in two:
        step["ranks"] = [
            step["ranks"][0] | {"targets": targets, "counts": targets, "losses": losses,
                                "samples": {"0": step["ranks"][0]["samples"]["0"][part]}}
            for part, targets, losses in ((slice(4), [1, 1], [1.0, 2.0]),
                                          (slice(4, 8), [4, 2], [2.0, 0.5]))]
    one[0]["ranks"][0]["losses"] = [(2 * 3.0 + 6 * 2.5) / 8]
    assert parity_checks.compare(one, two).startswith("DIFFERENT: step 0: loss: a mean of means")


def test_a_type_that_one_run_alone_has_is_named(small):
    """A module in bfloat16 in a run in float64 makes its tolerance that of bfloat16."""
    one, two = read(small("one")), read(small("two"))
    assert "though" not in parity_checks.compare(one, two)
    two[0]["ranks"][0]["eps"] = [torch.finfo(torch.bfloat16).eps]
    assert re.match("EQUAL .* steps, though one computes in a coarser type: ",
                    parity_checks.compare(one, two))


def test_replicas_of_a_partial_sum_count_once():
    """Two parts, each on two ranks, as of norms under data and tensor parallelism."""
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
    row = [("w", [((2,), (0,), (2,), parity.sums(parts[rank % 2], [0], [2]))]) for rank in range(4)]
    merged = parity.merge([{"gradients": dict([own])} for own in row], "gradients")
    line = {"values": merged, "gradients": merged, "ranks": []}
    whole = parity.sums(sum(parts), [0], [2])[2:]
    assert parity_checks.run_of(line, ["w"]).gradients.total.tolist()[0] == pytest.approx(whole)
    assert merged["w"]["ranks"] == "[0, 2] and [1, 3]"


def test_only_recorded_steps_accuse(small):
    """In step 1, which is not recorded, gradients are scaled otherwise than in step 2."""
    def clip(step, model):
        for p in model.parameters():
            p.grad *= 0.25 if step % 2 else 0.5

    assert compare(small("one", clip, every=2), small("two", clip, every=2))[0] is None
    factors = [step["ranks"][0]["factors"] for step in read(small("three", clip, every=2))]
    assert factors == [[], pytest.approx([0.5] * 4)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gradients_in_a_type_in_between(small, dtype):
    """Something in float32 is often inside a model in float64, such as a softmax."""
    def spoil(model):
        for p in model.parameters():
            p.grad.copy_(p.grad.to(getattr(torch, dtype)))

    message = parity_checks.compare(read(small("one")), read(small("two", spoil=spoil)))
    if dtype == "float32":
        assert re.match("EQUAL .*, 4 of 4 steps, as if float32 was in between: ", message)
    else:
        assert message.startswith("DIFFERENT: step 0: gradients: rounding: ")
        assert f"if {dtype} was" in message


def test_several_optimizers(small):
    assert compare(small("one"), small("two", split=True))[0] is None
    message, _ = compare(small("one"), small("two", scale_first, split=True))
    assert re.match("step 0: clipping: .* scaled by 1, elsewhere by 0.5", message)


# As a user starts it


def test_the_command(small, capsys):
    one, two = small("one"), small("two", scale_first)
    assert parity.main([str(one), str(one)]) == 0
    assert capsys.readouterr().out.startswith("EQUAL up to rounding, 4 of 4 steps")
    assert parity.main([str(one), str(two), "--table"]) == 1
    out = capsys.readouterr().out
    assert "\nDIFFERENT: step 0: clipping: " in out
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == [
        "0.weight", "0.bias", "2.weight", "2.bias"]
    with pytest.raises(SystemExit) as end:
        parity.main([str(one), "no-such-file"])
    assert end.value.code == 2 and "no-such-file is no recording" in capsys.readouterr().err


def test_it_needs_torch_alone(tmp_path):
    """Both files are copied into another folder."""
    modules = set()
    for name in "parity.py", "parity_checks.py":
        source = (ROOT / "tools" / name).read_text()
        (tmp_path / name).write_text(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module.split(".")[0])
    assert modules - sys.stdlib_module_names == {"torch", "tools", "parity_checks"}
    code = """if True:
        import torch
        import parity
        model = torch.nn.Linear(2, 2)
        recorded = parity.Parity("one.parity", model)
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        recorded.record(0, loss, [torch.ones(1, 2)])
        parity.main(["one.parity", "one.parity"])"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True,
                            capture_output=True, env=os.environ | {"PYTHONPATH": ""})
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("EQUAL up to rounding, 1 of 1 steps")


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
        message, together = compare(tmp_path / "one", tmp_path / name)
        assert message is None and together == 5
