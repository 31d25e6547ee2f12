"""parity/: sound runs are equal, and faults are found and named. Whole scripts are compared in
test_check.py, and published bugs in test_bugs.py."""

import ast
import dataclasses  # noqa: F401  for rows of the tables
import functools
import importlib
import itertools
import math  # noqa: F401  for rows of the tables
import operator
import os
import re
import runpy
import sys
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from parity import main, recording
from parity.compare import compare, read
from tests.support.commands import finish, start
from tests.support.processes import ROOT
from tests.support.sample import needs, rows, table


def nothing(*_):
    pass


def network(width=6):
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def square(model, x):
    return model(x).square().mean()


def train(path, make=network, data=lambda: [torch.randn(8, 4)], accumulate=1, dtype=torch.float64,
          loss_of=square, optimizer=torch.optim.SGD, lr=0.1, steps=4, every=1, clear=True,
          start=nothing, spoil=nothing, change=nothing, of=lambda model: model,
          parts=lambda model: [model], batch_of=None, take=slice(None), edit=nothing,
          gather=lambda own: [own], nudge=0, where=None, late_loss=False):
    """Record a training, each batch in ``accumulate`` parts, with ``spoil(model)`` before each
    record and ``change(model)`` before each update. ``gather`` makes what several ranks record of
    what one does. Returns what is recorded, after ``edit(lines)``."""
    torch.manual_seed(0)
    model = make().to(dtype)
    start(model)
    optimizers = [optimizer(part.parameters(), lr) for part in parts(model)]
    recorded = recording.Parity(path, of(model), optimizers, nudge=nudge, where=where)
    for step in range(steps):
        batch = [x.to(dtype) if x.is_floating_point() else x for x in data()]
        batches = [*zip(*(x.chunk(accumulate) for x in batch))]
        losses = [loss_of(model, *micro_batch) / accumulate for micro_batch in batches]
        sum(losses).backward()
        spoil(model)
        if step % every == 0:
            with mock.patch.object(recording, "gather", gather):
                recorded.record(step, None if late_loss else losses,
                                batch_of(*(x[take] for x in batch)) if batch_of else batches)
        change(model)
        for each in optimizers:
            each.step()
            if clear:
                each.zero_grad()
        if late_loss:
            recorded.add_loss(step, losses)
    lines = read(path)
    edit(lines)
    return lines


def policy(model, x, advantages):
    """Its first value is 0, but for rounding: advantages are normalised."""
    log_p = model(x).log_softmax(-1)[:, 0]
    return -(advantages * (log_p - log_p.detach()).exp()).mean()


def advantages(size=1000.0):
    """They cancel up to rounding of the type that a training computes in."""
    x = torch.randn(64, dtype=torch.float64)
    return torch.randn(64, 6), size * (x - x.mean()) / x.std()


def flipped(size=1000.0):
    return [x.flip(0) for x in advantages(size)]


class Scaled(nn.Linear):
    """It returns its scale too, once for each micro-batch."""

    def __init__(self):
        super().__init__(4, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return super().forward(x).tanh() * self.scale, self.scale.exp()


class Residual(nn.Module):
    """It has a weight beside a module with the name that wrappers give to theirs."""

    def __init__(self):
        super().__init__()
        self.weight, self.module = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.module(x) + x * self.weight


# What makes runs differ. Most are functions of the model, for ``spoil`` or ``change``.


def scale(by, *names):
    """Gradients times a number: of all parameters, or of some."""
    def spoil(model):
        for name, p in model.named_parameters():
            if not names or name in names:
                p.grad *= by
    return spoil


def without(name):
    def spoil(model):
        model.get_parameter(name).grad = None
    return spoil


def clip(norm):
    def spoil(model):
        total = sum(p.grad.square().sum() for p in model.parameters()) ** 0.5
        scale((norm / total).clamp(max=1.0))(model)
    return spoil


def rolled(by, growth=1):
    """Each of the 4 gradients is spoiled ``growth`` times as much as the one before."""
    def spoil(model):
        for i, p in enumerate(model.parameters()):
            p.grad += by * growth**i * p.grad.roll(1, 0)
    return spoil


def one_rolled(model):
    grad = model[2].weight.grad
    grad += 1e-6 * grad.roll(1, 0)


def in_turn(*spoils):
    def spoil(model):
        for each in spoils:
            each(model)
    return spoil


def in_steps(numbers, spoil):
    """Do it in some steps of 4 alone."""
    steps = itertools.count()

    def now_and_then(model):
        if next(steps) % 4 in numbers:
            return spoil(model)
    return now_and_then


def later(name="0.weight"):
    """The gradient of a parameter comes after the record."""
    hold = []

    def take(model):
        p = model.get_parameter(name)
        hold.append(p.grad)
        p.grad = None

    def give_back(model):
        model.get_parameter(name).grad = hold.pop()
    return {"spoil": take, "change": give_back}


def module(i, change):
    """The output of module i is another."""
    def start(model):
        model[i].register_forward_hook(lambda *args: change(args[-1]))
    return start


def wrapped(model):
    model[0] = checkpoint_wrapper(model[0])
    model[2] = torch.compile(model[2], backend="eager")


def with_lengths(model):
    """A module returns texts of several lengths, as TransformerEncoder's do in an evaluation."""
    model[1].texts = nn.Identity()
    model[1].texts.forward = lambda x: torch.nested.nested_tensor([*x])

    def call(_, inputs):
        model[1].texts(*inputs)
    model[1].register_forward_pre_hook(call)


def with_phase(model):
    model.phase = nn.Parameter(torch.randn(2, dtype=torch.complex64))


def with_more_tensors(model):
    """A buffer, and whole numbers."""
    model.mean = nn.Buffer(torch.zeros(3))
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), False)


def mixed(x):
    """A mask, ids and floats."""
    return [{"a": x > 0, "ids": (x * 1e6).long(), "z": x[:, :1]}]


def updated_early():
    """Weights are updated before they are recorded, too."""
    made = []
    return {"optimizer": lambda *args: made.append(torch.optim.SGD(*args)) or made[-1],
            "spoil": lambda _: made[-1].step()}


def in_texts(parts, labels=True):
    """Texts in micro-batches, each padded to its own longest: its last token is no input."""
    def batch_of(ids):
        batch = []
        for x in ids.chunk(parts):
            x = x[:, : (x != 0).sum(1).max()]
            batch.append({"tokens": x[:, :-1]})
            if labels:
                batch[-1]["labels"] = targets_of(x)
        return batch
    return {"accumulate": parts, "batch_of": batch_of}


def epochs(seed_of):
    """A function that returns batches of 8 of 16 samples, the order of an epoch drawn by a seed."""
    samples = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
    steps = itertools.count()

    def batch():
        step = next(steps)
        drawn = torch.Generator().manual_seed(seed_of(step // 2))
        return [samples[torch.randperm(16, generator=drawn).chunk(2)[step % 2]]]
    return batch


def texts():
    lengths = torch.tensor([7, 5, 3, 6, 4, 2, 3, 4])
    return [torch.randint(1, 9, (8, 7)).masked_fill(torch.arange(7) >= lengths[:, None], 0)]


def targets_of(ids):
    return ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100)


def loss_of_texts(count=None):
    """The mean over the targets of a micro-batch, or over as many as it is said."""
    def loss_of(model, ids):
        loss = F.cross_entropy(
            model(ids[:, :-1]).mT, targets_of(ids), reduction="sum")
        return loss / (count or (targets_of(ids) != -100).sum())
    return loss_of


# Edits of what is recorded


def shares(kind, step, name, *numbers):
    """Ranks that hold the same part of a parameter have these shares of it in a step."""
    steps = itertools.count()

    def gather(own):
        (*part, sums), = own[kind][name]
        ranks = [own.copy() for _ in numbers]
        if next(steps) == step:
            for rank, by in zip(ranks, numbers):
                square, little, *sketch = by * torch.tensor(sums, dtype=torch.float64)
                scaled = [float(x) for x in (by * square, little / by, *sketch)]
                rank[kind] = own[kind] | {name: [(*part, scaled)]}
        return ranks
    return gather


def added_up(**factors):
    """Two ranks hold halves of the rows of these gradients: the same numbers, or of the second rank
    times a factor."""
    def gather(own):
        ranks = [own["gradients"].copy() for _ in range(2)]
        for name, factor in factors.items():
            (((shape, (_, *zeros), (rows, *more)), sums),) = own["gradients"][name]
            for rank, gradients in enumerate(ranks):
                region = shape, (rank * rows // 2, *zeros), (rows // 2, *more)
                gradients[name] = [(region, [x * factor**rank for x in sums])]
        return [own | {"gradients": gradients} for gradients in ranks]
    return gather


def edit_rank(step=0, **values):
    """Of the first rank, in one step."""
    def edit(lines):
        own, *_ = lines[step]["ranks"]
        own.update(values)
    return edit


def on_ranks(*shares, parts=(slice(4), slice(4, 8)), loss="sum", **more):
    """One rank's recording as one of several that have these shares of the loss and samples. Of
    ``more`` each rank has one value."""
    def edit(lines):
        for line in lines:
            (rank,), line["loss"], line["ranks"] = line["ranks"], loss, []
            (samples,), total = rank["samples"].values(), sum(rank["losses"])
            for i, (share, part) in enumerate(zip(shares, parts)):
                own = {key: values[i] for key, values in more.items()}
                line["ranks"].append(
                    rank | {"losses": [share * total], "samples": {"0": samples[part]}} | own)
    return edit


def loss_off(lines):
    """The loss of the first micro-batch, by 1e-4."""
    own, *_ = lines[0]["ranks"]
    own["losses"][0] *= 1.0001


def late(lines):
    lines[1]["gradients"] = lines[0]["gradients"]


def masked(*more):
    """Texts with a mask, padded by any id, to other lengths on both sides."""
    def batch_of(ids):
        batch = {"input_ids": ids, "position_ids": ids, "attention_mask": torch.ones_like(ids),
                 "labels": ids}
        return [{key: F.pad(x, more, value=value)
                 for (key, x), value in zip(batch.items(), (7, 7, 0, -100))}]
    return batch_of


def in_parts(name, x):
    """A vector in parts is summed in other pieces."""
    ends = 0, 1, 2**20 + 9, len(x)
    return x.shape, [(x[a:b], [a]) for a, b in itertools.pairwise(ends)]


# Trainings


def settings(*several, **more):
    return functools.reduce(operator.or_, several, {}) | more


def long_network():
    """Its gradients are short."""
    layers = ((nn.Linear(6, 6), nn.Tanh()) for _ in range(6))
    return nn.Sequential(*itertools.chain(*layers))


def wide():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


def cast(model, x):
    """As FSDP2 does, where autocast casts what goes into a product."""
    weights = {name: p.bfloat16() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, weights, x.bfloat16()).square().mean()


def draw(model, generator=torch.Generator()):
    """Gradients that are other ones in each run."""
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).bfloat16()


def means(*targets):
    """The loss is the mean of two, with the targets that each has in step 0, 1, ..."""
    def edit(lines):
        for line, counts in zip(lines, targets):
            (loss,) = line["ranks"][0]["losses"]
            line["ranks"][0] |= {"losses": [0.8 * loss, 0.4 * loss], "targets": counts,
                                 "shifted": counts}
    return edit


def gan(model, z, real, turn):
    """The loss of the discriminator and of the generator, in turn: the other one is frozen."""
    generator, discriminator = model
    discriminator.requires_grad_(not turn[0]), generator.requires_grad_(bool(turn[0]))
    fake = discriminator(generator(z))
    if turn[0]:
        return F.softplus(-fake).mean()
    return F.softplus(torch.cat([-discriminator(real), fake])).mean()


def generator_and_discriminator():
    torch.manual_seed(10)
    return nn.Sequential(*(nn.Sequential(
        nn.Linear(a, 16), nn.Tanh(), nn.Linear(16, b))
        for a, b in ((4, 8), (8, 1))))


def mixture(model, x, ranks=1):
    """Rows of samples go to the expert that the router chooses, and back: an all-to-all, in which
    they are sorted by rank. A nudge sends some to another expert."""
    router, *experts = model
    share, chosen = router(x).softmax(1).max(1)
    by_rank, out = torch.arange(len(x)).view(-1, ranks).T.flatten(), 0
    for i, expert in enumerate(experts):
        rows = by_rank[chosen[by_rank] == i]
        out = out + torch.zeros_like(x[:, :8]).index_add(
            0, rows, expert(x[rows]) * share[rows, None])
    return out.square().mean()


def cancelling(model, x, z):
    """The gradient of the bias is 0, and nothing but rounding in parts."""
    return model(z).mean() - model(x).mean()


TURNS, zero_grad = itertools.count(), nn.Module.zero_grad
REPEATED = [0, 0, *range(2, 8)]  # of 8 samples one is lost, and one is read twice
HALVES = {"0": [1.0, 48], "1": [1.0, 48]}  # outputs of modules; those of `0` add up
ALL = 2 * [slice(8)]  # two ranks read all samples
TWICE = [slice(4), slice(4), slice(4, 8), slice(4, 8)]  # two ranks read the same
TEXTS = settings(
    in_texts(1), data=texts, loss_of=loss_of_texts(),
    make=lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)))
ADAM, FLOAT32 = {"optimizer": torch.optim.Adam, "lr": 0.01}, {"dtype": torch.float32}
ABSOLUTE = {"loss_of": lambda model, x: model(x).abs().mean()}
# The softmax makes the gradient of the keys' bias, a third of in_proj_bias, only rounding. The
# large loss keeps Adam's eps from damping it.
NOISE = settings(
    ADAM, data=lambda: [torch.randn(8, 12, 16)],
    make=lambda: nn.MultiheadAttention(16, 1, batch_first=True),
    loss_of=lambda model, x: 1e6 * model(x, x, x)[0].square().mean())
POLICY = {"data": advantages, "loss_of": policy, "lr": 1e-4, "make": long_network}


# A gradient that is sparse, and a complex parameter
COMPLEX = settings(
    make=lambda: nn.Embedding(7, 2, sparse=True), start=with_phase, steps=1,
    data=lambda: [torch.tensor([1, 2, 2])],
    loss_of=lambda model, x: (model(x) * model.phase).abs().sum())
PIXELS = torch.randn(8, 3, 48, 48, generator=torch.Generator().manual_seed(0))
# Sums run over many more numbers than there are targets.
IMAGES = settings(
    FLOAT32, data=lambda: (PIXELS, torch.arange(8) % 4),
    loss_of=lambda model, x, y: F.cross_entropy(model(x), y),
    make=lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.GELU(),
        nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
# The gradient of the last bias is a sum of terms that cancel; it rounds alike in nudged runs.
GAN = {"make": generator_and_discriminator, "loss_of": gan, "parts": lambda model: [*model],
       "data": lambda: [torch.randn(16, 4), torch.randn(16, 8), torch.full([16], next(TURNS) % 2)],
       "lr": 0.05}
MIXTURE = {"make": lambda: nn.Sequential(nn.Linear(16, 3), wide(), wide(), wide()),
           "loss_of": mixture}
AUTOCAST = {"dtype": torch.float32, "loss_of": torch.autocast("cpu", torch.bfloat16)(square)}
IN_BFLOAT16 = {"make": wide, "data": lambda: [torch.randn(16, 16)], "lr": 0.5,
               "dtype": torch.bfloat16}

# Faults that no bug in tests/bugs shows. What parity says of them; the settings that the run has of
# its own; those that both runs have; options of parity
FAULTS = r"""
# The same steps, parameters, types and samples
steps: .* next one is 2 in the run and 1 in the reference | every=2
steps: .* next one is none in the run and 1 in .*: record the same | steps=1
step 0: names: only the reference has 0.weight to 2.bias .4 of 6 parameters. .see `model`
  | of=lambda model: model[0]
step 0: shapes: ranks hold 12 numbers of 0.weight, which has 24
  | edit=lambda lines: lines[0]["values"]["0.weight"].update(held=12)
step 0: shapes: 0.weight is .5, 4., not .6, 4. | make=lambda: network(5)
step 1: types: optimizer states are kept in float16, and in the reference in float64
  | edit=edit_rank(1, **{"optimizer states are kept": {"float16": 4}}) | ADAM
step 1: not finite: in the run alone, .* 0.bias | spoil=in_steps([1], scale(math.nan, "0.bias"))
step 1: not finite: in the reference alone | spoil=nothing
  | spoil=in_steps([1], scale(math.nan, "0.bias"))
# Weights are small, and the reference was resumed.
step 0: initial weights: other values of 0.weight | edit=edit_rank(updates=3),
  start=lambda model: model[0].weight.data.copy_(1e-9 * model[0].weight.data.roll(2, 0))
  | start=lambda model: model[0].weight.data.mul_(1e-9)
step 0: samples: 8 of 8 are missing, and 8 other | batch_of=lambda x: mixed(x.flip(1))
  | batch_of=mixed
step 0: samples: `a`, `ids`: 1 of 8 .* 2 times
  | batch_of=lambda x: [dict(*mixed(x[REPEATED]), z=x[:, :1])] | batch_of=mixed
step 0: samples: other samples are read, or some are repeated | take=REPEATED
  | batch_of=lambda x: [x]
step 2: samples: the second epoch is read as the first: is the order seeded by the epoch
  | data=epochs(lambda epoch: 0)
  | data=epochs(lambda epoch: epoch)
# In any structure. There is one name for what is in a list.
step 0: samples: other | take=REPEATED | batch_of=lambda x: [{"inputs": {"x": x}, "name": "text"}]
step 0: samples: other | take=REPEATED | batch_of=lambda x: [(x.numpy(), x[:, 0].numpy())]
step 0: samples: other | take=REPEATED
  | batch_of=lambda x: [dataclasses.make_dataclass("Batch", ["x", "y"])(x, x[:, 0])]
step 0: samples: `items.x`: other | take=REPEATED
  | batch_of=lambda x: [{"items": [{"x": x, "n": 3}, "text"], "y": torch.ones(1)}]
step 0: samples: other | take=REPEATED | batch_of=lambda x: [{"more": [x[:2], x[2:]]}]
step 0: updates since the last record: 1, and in the reference 0: does each micro-batch
  | updated_early()
# Weights, and what is reduced
step 0: initial weights: ranks \[0, 2\] and \[1\] hold different values of 0.weight
  | gather=shares("values", 0, "0.weight", 1, 1.00001, 1)
step 1: update: learning rate, .*: weights of every .* moved differently, .*times 2 | lr=0.2
step 1: update: what matrices or vectors alone have, as decay: weights of 0.weight and
  | optimizer=lambda own, lr: torch.optim.SGD(
  [{"params": p, "weight_decay": 0.1 * (p.ndim > 1)} for p in own], lr)
step 1: updates since the last record: 0, and in the reference 1: is a step skipped
  | lr=0.2, edit=edit_rank(1, updates=0)
step 1: update: ranks .0. and .1. hold different weights of 0.weight
  | gather=shares("values", 1, "0.weight", 1, 1.00001)
step 0: reduction: ranks .0. and .1. .* of 0.bias: they must be averaged
  | gather=shares("gradients", 0, "0.bias", 0.999, 1.001)
# Two parts, each on two ranks, as of norms under data and tensor parallelism
step 0: reduction: ranks \[0, 2\] and \[1, 3\] .* of 0.bias: they must be added up
  | gather=shares("gradients", 0, "0.bias", 0.3, 0.7, 0.3, 0.7)
step 0: gradients: an all-reduce of shards: as their own parts of 0.weight ranks hold the
  | gather=added_up(**{"0.weight": 1})
step 0: gradients: (?!an all-reduce) | gather=added_up(**{"0.weight": 1, "0.bias": 2})
# Each rank gives its own mean. The first label of a row does not count.
step 0: loss: a mean of means, times 2, as many as the ranks
  | edit=on_ranks(0, 0, targets=2 * [[5, 5]], shifted=[[1, 1], [4, 2]],
  losses=[[1.0, 2.0], [2.0, 0.5]]) | edit=edit_rank(losses=[(2 * 3.0 + 6 * 2.5) / 8])
# Samples whose ends differ hide nothing, and what is not recorded cannot be told.
step 0: loss: a mean of means: .*right | in_texts(2) | TEXTS
step 0: gradients: .*, and record the labels, .* no mean of means is seen
  | in_texts(2, labels=False) | TEXTS, in_texts(1, labels=False)
# Gradients
step 0: gradients: all: times 2 | spoil=scale(2) | dtype=torch.bfloat16
step 0: gradients: all: times -1; the loss is right | spoil=scale(-1)
step 0: gradients: all: times 1\.0002; the loss is right.*; is a loss scale not undone
  | spoil=scale(1.0002)
step 0: gradients: all: times 1\.99; the loss | spoil=scale(1.99), edit=on_ranks(0.5, 0.5)
step 0: gradients: all: divided by 6, as many as ranks x micro-batches
  | spoil=scale(1 / 6), edit=on_ranks(0.5, 0.5, targets=2 * [[7, 7, 7]])
step 0: gradients: all: divided by 3, as many as the micro-batches of a pipeline
  | spoil=scale(1 / 3), edit=on_ranks(0.5, 0.5, targets=[[7], [7, 7, 7]])
step 0: .*those of 0.bias to 2.bias .3 of 4 .*times 0.5: .*the scale of an adapter
  | spoil=in_turn(scale(0.5), scale(0, "0.weight")) | spoil=scale(0, "0.weight")
step 0: gradients: only the run has those of 0.bias | spoil=nothing | spoil=without("0.bias")
step 0: gradients: missing: those of 0.bias; the loss is right | spoil=without("0.bias")
step 0: gradients: missing: the run has none: .*zero_grad | spoil=zero_grad
step 1: gradients: not cleared: all hold 1 of | clear=False
# But for a small part of the loss
step 1: gradients: all: nearly times 2[.0-9]*, as of some micro-batches alone,
  | spoil=in_steps([1], in_turn(scale(2), rolled(1e-2)))
step 1: gradients: late: all are those of the step before | edit=late
step 0: .*rounding: .*--float32-inside | spoil=rolled(5e-8)
step 0: .*rounding: .*bfloat16 | spoil=rolled(2e-3 / 1.5**3, 1.5)
step 0: gradients: part of the batch, .*: samples or micro-batches are lost .* is right
  | spoil=rolled(0.5)
# A wrong eps
(?!.*float32.inside) | spoil=rolled(5e-5) | | float32_inside=True
# No softmax in float32 changes one tensor alone, or all by one factor: as of a second term
step 0: gradients: (?!.*float32.inside) | spoil=scale(1 + 1e-6) | | float32_inside=True
step 0: gradients: (?!.*float32.inside) | spoil=scale(1 + 1e-6, "2.weight") | | float32_inside=True
step 0: gradients: (?!.*float32.inside) | spoil=one_rolled | | float32_inside=True
step 0: gradients: those of phase differ, by 0
  | spoil=lambda model: model.phase.grad.imag.mul_(2) | COMPLEX
# The forward pass
step 0: gradients: forward pass: the first module .* is `1`.* the loss hardly
  | spoil=rolled(1e-3, 10), edit=edit_rank(outputs={"0": [1.0, 48], "1": [9.0, 48]})
  | edit=edit_rank(outputs={"0": [1.0, 48], "1": [1.0, 48]})
step 0: .*the outputs of all modules agree: look at the loss: .* has 5 targets, the .* 32
  | ABSOLUTE, edit=edit_rank(targets=[5])
# It is no module, or ranks hold parts of it.
step 0: .*outputs of modules are not compared
  | ABSOLUTE, of=lambda model: dict(model.named_parameters())
step 0: .*the outputs of all modules agree
  | ABSOLUTE, edit=on_ranks(1, 1, parts=ALL, outputs=[HALVES, dict(HALVES, **{"0": [2.0, 48]})])
  | edit=on_ranks(1, 1, parts=ALL, outputs=2 * [HALVES])
step 0: .*the model has seen one of 2 micro-batches: clipping, an update or what is recorded is in
  | loss_of=lambda model, x: square(model, x[:2]) | accumulate=2
step 0: .*the model returns 0.875 times as many numbers .*: samples are lost
  | loss_of=lambda model, x: square(model, x[1:])
step 0: .*returns 0.8333 times as many numbers .* positions are lost, as where labels
  | loss_of=lambda model, ids: loss_of_texts()(model, ids[:, 1:]) | TEXTS
step 0: .*each rank's model has seen a part of its own: do ranks that must read the same samples
  | ABSOLUTE, edit=on_ranks(1, 1, outputs=2 * [{"0": [2.0, 12], "": [2.0, 6]}], numbers=[16, 16])
# Of two outputs one is a parameter.
step 0: .*the outputs of all modules agree
  | accumulate=2, loss_of=lambda model, x: model(x)[0].abs().mean()
  | make=Scaled, loss_of=lambda model, x: model(x)[0].square().mean()
step 0: .* is `0`, the first of all .are its inputs those of the batch, or drawn otherwise..;
  | spoil=rolled(0.1), edit=edit_rank(outputs={"0": [1.5, 24], "": [1.0, 24]})
  | edit=edit_rank(outputs={"0": [1.0, 48], "": [1.0, 24]})
# Each has a stage.
step 0: .*the first module whose output differs is `2` | spoil=rolled(0.1),
  edit=on_ranks(1, 1, parts=ALL, outputs=[{"0": [1.0, 48]}, {"2": [9.0, 24]}])
  | edit=edit_rank(outputs={"0": [1.0, 48], "2": [1.0, 24]})
step 0: .* output differs is `the model itself.1.`, after `the model itself`;
  | start=module(0, lambda y: (y[0], y[1].sin()))
  | make=lambda: nn.Sequential(nn.RNN(4, 3)),
  loss_of=lambda model, x: model(x)[1].square().mean()
step 2: .* output differs is `2`, after `1`; it was right in the step before
  | start=module(1, in_steps([2], torch.sin))
# Not with outputs of a step that is not recorded
step 2: .* output differs is `2`, after `1`; it was right in the step before
  | start=module(1, in_steps([2], torch.sin)) | every=2
step 0: gradients: .*; dropout is on, so .*: 3.p = 0.1
  | start=lambda model: model.append(nn.Dropout(0.1))
step 0: gradients: .*; dropout is on, so .*dropout = 0.1
  | start=lambda model: setattr(model, "dropout", 0.1) | NOISE
# The loss alone
step 0: loss: it is .* .times 3, as many as ranks that read different samples: .*averaged, or 2
  ranks read the same samples, such as .0, 1., which is right under
  | edit=on_ranks(*6 * [1], parts=2 * [slice(2)] + 2 * [slice(2, 4)] + 2 * [slice(4, 8)])
step 0: loss: it is inf | edit=edit_rank(losses=[math.inf])
step 0: loss: it is | accumulate=4, edit=loss_off | FLOAT32, POLICY
step 0: loss: .* .times 1\.0001 | edit=loss_off
  | FLOAT32, loss_of=lambda model, x: 1e-4 * square(model, x)
# Clipping
step 0: gradients: missing: those of 0.weight.* are they complete when | later()
step 0: gradients: all: times .*; or clipped by hand, .* in each micro-batch$
  | spoil=clip(0.02), change=nothing | change=clip(0.01)
step 0: gradients: clipped by hand, .* in each micro-batch. all: nearly times 0
  | spoil=in_turn(rolled(1e-2), clip(0.02)), change=nothing | change=clip(0.01)
step 0: reduction: .*neither their sum .*. Later they change, by several factors
  | gather=shares("gradients", 0, "0.bias", 2, 3), change=scale(0.5, "2.weight")
step 0: clipping: .* scaled by 1, elsewhere by 0.5, as .* of each tensor, or on one rank
  | change=scale(0.5, "2.weight"), parts=lambda model: [model[0], model[2]]
step 0: clipping: not active, .* scaled by 1, not by 0\.501 .times 1\.996\)$
  | change=nothing, edit=on_ranks(0.5, 0.5) | change=scale(0.501)
step 0: clipping: .* scaled by 0.5 | change=scale(0.50005) | change=scale(0.5)
step 0: clipping | change=scale(0.25) | ADAM, every=2, change=scale(0.5)
# Gradients may be further apart than they are, for they are sums of many numbers.
step 1: clipping: .* scaled by 1.01, not by 1 | change=in_steps([1, 2, 3], scale(1.01))
  | FLOAT32, make=lambda: nn.Sequential(nn.Linear(2**14, 6)),
  data=lambda: [torch.randn(8, 2**14)]
"""
# The same of runs that are equal
SOUND = r"""
# One of them clips by hand, before it is recorded: also in the last step.
EQUAL.* 3 updates.*Not compared: one factor of (?!.*never active).*Note: clipped: the run
  | spoil=clip(0.01), change=nothing | change=clip(0.01)
EQUAL.* 3 updates.*Note: clipped: the reference clips | spoil=nothing, change=clip(0.01)
  | spoil=clip(0.01)
EQUAL.*: one factor of all gradients .they are clipped, or normalised, before | | spoil=clip(0.01)
EQUAL: 1 rank against 1, 4 parameters, 3 updates, float64 .*: clipping .it is never active.; the
  update after the last step$ |
EQUAL.* 0 updates, .*: updates and clipping .one step | | steps=1
EQUAL.*: updates of 4 parameters .0, or too small | | change=scale(0)
EQUAL | | change=scale(0.5, "2.weight")
EQUAL.*Note: samples of `tokens` differ in their last number alone$
  | in_texts(2), loss_of=loss_of_texts(26 / 2) | TEXTS
EQUAL.*: gradients of 3 parameters .0 or None | | spoil=scale(0, "0.weight", "0.bias", "2.weight")
EQUAL.*, 4 parameters, .*; buffers .1.; parameters of whole numbers .1.; tensors of the optimizer
  .* .1.$ | | start=with_more_tensors
EQUAL.*: `mask` .in one batch alone | batch_of=lambda x: [{"x": x, "mask": x > 0}]
  | batch_of=lambda x: [{"x": x}]
NOTHING TO COMPARE: all gradients are 0 or missing | | spoil=zero_grad
NOTHING TO COMPARE: step 2: here and in the last step .* not finite |
  | spoil=in_steps([2, 3], scale(math.inf)), change=in_steps([2, 3], zero_grad)
# As a loss scaler does
EQUAL.* 2 updates, .*: steps 0 .not finite in both |
  | spoil=in_steps([0], scale(math.inf, "0.weight")), change=in_steps([0], zero_grad)
NOTHING PROVEN: 1 rank against 1, .*, bfloat16 | accumulate=4 | ADAM, dtype=torch.bfloat16
# In step 1, which is not recorded, gradients are scaled otherwise than in step 2.
EQUAL | | every=2, change=in_turn(in_steps([1, 3], scale(0.25)), in_steps([0, 2], scale(0.5)))
# Two layers are tied; shards have the first name of a tensor alone.
EQUAL.*, 2 parameters | of=lambda model: dict(model.named_parameters())
  | make=lambda: nn.Sequential(*2 * [nn.Linear(4, 4)])
EQUAL | batch_of=masked(0, 3) | TEXTS, batch_of=masked(0, 0)
EQUAL | batch_of=masked(2, 1) | TEXTS, batch_of=masked(0, 0)
EQUAL | late_loss=True
EQUAL.* 1 parameters | where=in_parts | make=lambda: nn.PReLU(2**20 + 70), steps=1,
  data=lambda: [torch.randn(1, 2**20 + 70)]
# All parts of the loss add up, those of tensor-parallel ranks, too.
EQUAL: 4 ranks against 1 | edit=on_ranks(*4 * [0.25], parts=TWICE, loss="parts")
# Ranks that read the same samples and have the same loss count once, as under tensor parallelism.
# Losses of context-parallel ranks are not the same.
EQUAL: 4 ranks against 1.*Note: 2 ranks read the same
  | edit=on_ranks(0.25, 0.25, 0.75, 0.75, parts=TWICE)
EQUAL: 4 ranks against 1 | edit=on_ranks(0.125, 0.25, 0.25, 0.375, parts=TWICE)
# The gradient of a bias before a normalisation is only rounding, which Adam moves by whole
# steps, otherwise with other micro-batches.
EQUAL.* float64 | accumulate=4
  | NOISE, make=lambda: nn.MultiheadAttention(32, 1, batch_first=True),
  data=lambda: [torch.randn(8, 12, 32)]
EQUAL | accumulate=4 | IMAGES
# A loss of terms that cancel: of each micro-batch, before they are recorded, of large gradients
EQUAL | accumulate=4 | FLOAT32, POLICY
EQUAL | data=lambda: flipped(1.0)
  | POLICY, data=lambda: advantages(1.0)
EQUAL | data=flipped | FLOAT32, POLICY, make=lambda: nn.Sequential(
  nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 6))
EQUAL | accumulate=3 | FLOAT32, loss_of=cancelling, optimizer=torch.optim.Adam,
  make=lambda: nn.Linear(6, 1),
  data=lambda: (torch.randn(33, 6), torch.randn(24, 6))
EQUAL.*gradients and updates from step .* on .rounding | accumulate=4
  | NOISE, FLOAT32, lr=1.0, steps=14
# It becomes as large as a fault at once.
NOTHING TO COMPARE: step .*, which training has amplified | accumulate=4 | NOISE, lr=4.0, steps=14
EQUAL.*, float32 | accumulate=4 | loss_of=lambda model, x: model(x).float().square().mean()
EQUAL.* float64 with float32 inside | spoil=rolled(1e-5) | | float32_inside=True
# Names of what wraps a layer do not count, and a module that has one of them is none.
EQUAL.*, 4 parameters | start=wrapped
EQUAL.*, 4 parameters | start=with_lengths
EQUAL.*, 3 parameters | of=lambda model: nn.ModuleDict({"module": model}) | make=Residual
"""
# In 16 bits nudged runs show what rounding does, and what is more is a fault.
NOISY = r"""
DIFFERENT: step 0: types: weights are used in bfloat16, and in the reference in float32
  | loss_of=cast | AUTOCAST
EQUAL within rounding | accumulate=2 | AUTOCAST
EQUAL within rounding | accumulate=2 | GAN
EQUAL within rounding | accumulate=2, loss_of=lambda model, x: mixture(model, x, 2) | MIXTURE
# It may explain one step by chance.
DIFFERENT: step 0: loss: it is | edit=means((1, 3), *3 * [(3, 1)])
EQUAL within rounding: 1 rank against 1, 4 parameters, 3 updates, bfloat16 | accumulate=2
# Losses of nudged runs all round to the same number.
EQUAL within rounding | accumulate=2 | loss_of=lambda model, x: square(model, x) + 1
NOTHING TO COMPARE: 1 rank against 1, .* Rounding hides most gradients | | spoil=draw
DIFFERENT: step 0: gradients: those of 2.weight: times 1.5 | spoil=scale(1.5, "2.weight")
DIFFERENT: step 0: gradients: all: times 1.02 | spoil=scale(1.02)
DIFFERENT: step 2: gradients: all: | spoil=in_steps([2], scale(0.5))
DIFFERENT: step 0: | loss_of=lambda model, x: model(x)[1:].square().mean()
DIFFERENT: step 1: gradients: not cleared: all hold 1 | clear=False
DIFFERENT: step 1: update: .*: weights of 0.weight and 2.weight have moved differently, by up to
  0.5 of their way .times 1.9 | optimizer=lambda own, lr: torch.optim.SGD(own, 2 * lr)
DIFFERENT: step 1: gradients: | lr=0.55
"""


def judged(text):
    """A line that begins with # is a comment."""
    found = [row.values for row in table(re.sub("(?m)^# .*\n", "", text))]
    return pytest.mark.parametrize("row", found, ids=operator.itemgetter(0))


@pytest.fixture(scope="session")
def reworded(tmp_path_factory):
    """``compare`` of a copy of parity in which all words are others: in capitals."""
    folder = tmp_path_factory.mktemp("loud", numbered=False)
    for path in (ROOT / "parity").glob("*.py"):
        tree = Reword().visit(ast.parse(path.read_text()))
        (folder / path.name).write_text(ast.unparse(tree))
    with mock.patch.object(sys, "path", [str(folder.parent), *sys.path]):
        return importlib.import_module("loud.compare").compare


class Reword(ast.NodeTransformer):
    def visit_Assign(self, node):  # the kinds of a verdict, and keys of a recording
        return node if node.col_offset == 0 else self.generic_visit(node)

    def visit_JoinedStr(self, node):
        for part in node.values:
            if isinstance(part, ast.Constant):
                part.value = part.value.upper()
            else:
                part.value = self.visit(part.value)  # its format stays
        return node

    def visit_Constant(self, node):
        if isinstance(node.value, str) and " " in node.value and node.value not in KEYS:
            node.value = node.value.upper()
        return node


KEYS = {*recording.TYPES, "loss of"}


def judge(folder, reworded, row, prefix="", of_all={}, nudges=()):
    """A row says what ``compare`` says. And nothing reads what it says: with other words each
    verdict is the same."""
    says, *cells = *row, "", "", ""
    own, both, options = (eval(f"settings({cell})") for cell in cells[:3])
    both = of_all | both
    one, two = train(folder / "one", **both), train(folder / "two", **both | own)
    nudged = [train(folder / f"{nudge}", **both, nudge=nudge) for nudge in nudges]
    verdict, loud = (words(one, two, **options, nudged=nudged) for words in (compare, reworded))
    said = str(verdict).replace("\n", " ")
    assert re.match(prefix + says, said), said
    assert (verdict.kind, verdict.step, verdict.fault) == (loud.kind, loud.step, loud.fault)
    assert loud.words != verdict.words and str(loud).lower() == str(verdict).lower()


@judged(FAULTS)
def test_what_it_says_of_a_fault(tmp_path, reworded, row):
    judge(tmp_path, reworded, row, "DIFFERENT: ")


@judged(SOUND)
def test_what_it_says_of_sound_runs(tmp_path, reworded, row):
    judge(tmp_path, reworded, row)


@judged(NOISY)
def test_what_it_says_beside_noise(tmp_path, reworded, row):
    judge(tmp_path, reworded, row, of_all=IN_BFLOAT16, nudges=(1, 2))


def test_it_must_see_a_forward_pass(tmp_path):
    model, path = nn.Linear(2, 2), tmp_path / "one"
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="before the first forward pass, or give `dtype`"):
        recording.Parity(path, model).record(0, 1.0)
    wrapped = types.SimpleNamespace(optimizer=torch.optim.SGD(model.parameters()))  # by accelerate
    recording.Parity(path, model, wrapped, dtype=torch.float32).record(0, 1.0)
    assert ", float32" in str(compare(read(path), read(path)))
    bare = recording.Parity(path, model, dtype=torch.float32)
    bare.hook.remove(), model(torch.ones(1, 2))
    assert not bare.outputs  # nothing is measured after that
    bare.record(0), bare.record(1)
    says = str(compare(read(path), read(path)))
    assert "the loss (it is not" in says and "what the optimizer is given (" in says, says


# As a user starts it


def test_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    train("one"), train("same"), train("two", spoil=in_steps([2], scale(2)))
    monkeypatch.setattr(sys, "argv", ["parity", "one", "two"])
    with pytest.raises(SystemExit, match="1"):
        runpy.run_module("parity", run_name="__main__")
    assert "DIFFERENT: step 2: gradients: all" in capsys.readouterr().out
    assert main(["one", "same"]) == 0
    assert capsys.readouterr().out.startswith("EQUAL: 1 rank against 1, 4 parameters, 3 updates")
    train("two", spoil=rolled(1e-5))  # it replaces the earlier recording
    assert main(["one", "two"]) == 1 and main(["one", "two", "--float32-inside"]) == 0
    train("one", spoil=zero_grad), train("two", spoil=zero_grad)
    assert main(["one", "two"]) == 1 and "NOTHING TO COMPARE" in capsys.readouterr().out


# What is no nudged run of the reference is refused: it would hide faults, or invent them.
NO_NOISE = table("""
one two --noise nudged | two recordings or more
one two --noise nudged nudged | recording 2 are not nudged
one two --noise same nudged | recording 1 are not nudged: give Parity nudge=1
one two --noise nudged short | recording 2 has 2 steps, the reference 4
one two --noise faulty1 faulty2 | are further from the reference than from each other
wide1 wide2 --noise wide1 wide2 | compute in float64: compare them without it
""")


def test_noise_that_is_none(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for path in "one", "two", "same":
        train(path, **IN_BFLOAT16)
    train("nudged", **IN_BFLOAT16, nudge=1), train("short", **IN_BFLOAT16, nudge=2, steps=2)
    for nudge in 1, 2:
        train(f"faulty{nudge}", **IN_BFLOAT16, nudge=nudge, spoil=scale(1.2))
        train(f"once{nudge}", **IN_BFLOAT16, nudge=nudge, spoil=in_steps([3], scale(1.2)))
    train("wide1"), train("wide2")
    for words, expected in (row.values for row in NO_NOISE):
        with pytest.raises(SystemExit):
            main(words.split())
        assert expected in " ".join(capsys.readouterr().err.split())
    # In one step: a ReLU may flip in both.
    assert main("one two --noise once1 once2".split()) == 0


FIRST = f"{recording.HEAD}{recording.FORMAT}}}\n"


@rows("name, text, expected", """
no-such-file | | No such file
./one | | are the same file
cut | FIRST{"st | line 2 is cut
keys | FIRST{"step": 0} | is damaged
damaged | FIRST{"step": 0, "ranks": 0, "loss": 0, "values": {}, "gradients": {}} | is damaged
notes.md | # Notes | record it again
older | OLDER | record it again
late | FIRST{"loss of": 1, "ranks": []} | add_loss names step 1, which is not recorded
crashed | FIRST | did the run crash before its first record
/dev/zero | | record it again
""")
def test_files_that_cannot_be_compared(tmp_path, capsys, name, text, expected):
    train(tmp_path / "one")
    text = text.replace("OLDER", FIRST.replace(str(recording.FORMAT), "0")).replace("FIRST", FIRST)
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "one"), os.path.join(tmp_path, name)])
    assert end.value.code == 2 and expected in " ".join(capsys.readouterr().err.split())
    if name == "notes.md":  # nor is it replaced
        with pytest.raises(ValueError, match="notes.md exists, and is no recording: name another"):
            train(tmp_path / name)
        assert (tmp_path / name).read_text() == text


TRAINER = """
import torch
{}
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
{}
for step in range(5):
    batch = torch.randn(8, 4)
    loss = model(batch).square().mean()
    loss.backward()
    {}
    parity.add_loss(step, loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.thorough
def test_the_folder_alone_works_in_another_project(tmp_path):
    """Copied by the command of its README.md, with the lines that this adds to a trainer."""
    page = (ROOT / "parity/README.md").read_text()
    (copy,) = re.findall("(?m)^    (cp .*)", page)
    code = re.search(r"(?s)```python\n(.*?)```", page)[1]
    lines = [line for line in code.splitlines() if line]
    for name in "one", "two":
        text = TRAINER.format(*lines).replace("two.parity", f"{name}.parity")
        (tmp_path / f"{name}.py").write_text(text)
    for command in (copy.replace("parity YOUR_PROJECT/", f"{ROOT}/parity ."), "python one.py",
                    "python two.py", "python -m parity one.parity two.parity"):
        command = re.sub("^python", f"{sys.executable} -W error", command)
        process = start(command.split(), tmp_path, PYTHONPATH="")
        said = finish(process)
        assert process.returncode == 0, said
    assert said.startswith("EQUAL: 1 rank against 1, 2 parameters, 4 updates")


TRAINED = """
import sys, torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from parity import Parity


class Texts(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        ids = torch.randint(32, (8,), generator=torch.Generator().manual_seed(i))
        return {{"input_ids": ids, "labels": ids.masked_fill(torch.arange(8) < i % 5, -100)}}


{}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2))
accumulate = int(sys.argv[1])
Recorded(model, TrainingArguments(
    sys.argv[2], use_cpu=True, max_steps=3, report_to="none", save_strategy="no",
    per_device_train_batch_size=8 // accumulate // int(sys.argv[3]), max_grad_norm=0.1,
    gradient_accumulation_steps=accumulate), train_dataset=Texts()).train()
if torch.distributed.is_initialized():  # otherwise a thread of gloo may abort the process at exit
    torch.distributed.destroy_process_group()
"""


@pytest.mark.thorough
def test_the_trainer_of_transformers(run, tmp_path):
    """The block of README.md: two micro-batches and two ranks, beside one process."""
    needs("transformers", "accelerate")
    page = (ROOT / "parity/README.md").read_text()
    code = page.partition("## The Trainer of transformers")[2].partition("```python")[2]
    recorded = []
    for name, accumulate, ranks in ("one", 1, 1), ("two", 2, 1), ("ranks", 2, 2):
        path = tmp_path / f"{name}.py"
        path.write_text(TRAINED.format(code.partition("```")[0].replace("two.", f"{name}.")))
        run(f"{path}", ranks - ranks % 2, f"{accumulate} out {ranks}", pass_out=False)
        recorded.append(read(tmp_path / f"{name}.parity"))
    one, *others = recorded
    for lines in others:
        assert compare(one, lines).kind == "EQUAL"
