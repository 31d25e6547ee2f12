"""Parts that only some micro-batches, only some ranks, or no rank of a step uses: each strategy
trains what one process trains, or does what the table in docs/strategies.md says. Ranks that use
parts in units of their own, which are not alike: test_check.py."""

import collections
import contextlib
import functools
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel

import cp
import ep
import fsdp
import hybrid_3d
import pp
import tp
import zero
from common.data import BatchSampler
from common.experts import MixtureConfig, MixtureOfExperts
from common.options import SettingError, option_parser, parse_options
from common.run import Run
from tests.support.on_ranks import on_ranks
from tests.support.processes import ROOT

D = 4
# Steps. A word is a micro-batch: the first half of its samples uses the part of its first letter.
SOME_MICRO_BATCHES = ("aa bb", "bb aa", "aa bb")
SOME_RANKS = ("ab bb", "bb ba", "aa ab"), ("ab", "ba", "ab")
NO_RANK = ("aa bb", "bb bb", "aa bb", "aa aa"), ("aa", "bb", "aa")


class Part(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.out = (Part() for _ in range(4))

    def forward(self, x, part):
        for name, module in self.named_children():
            if name in ("first", part, "out"):
                x = x + module(x)
        return x.square().sum()


# What a strategy makes of the model: its parameters by name; what computes the gradients of a
# micro-batch; what to do before and after the optimizer's step; the stages of this rank
Trainer = collections.namedtuple("Trainer", "parameters backward before after stages",
                                 defaults=[lambda: None, lambda: None, None])


def train(steps, strategy, make):
    """The parameters after ``steps``."""
    torch.manual_seed(0)
    model = make().double()
    trainer = strategy(model)
    optimizer = torch.optim.AdamW(  # eps: of some numbers the gradient is 0, but for rounding
        trainer.parameters.values(), 0.01, eps=1e-5, weight_decay=0.5)
    generator = torch.Generator().manual_seed(1)
    for words in map(str.split, steps):
        for i, word in enumerate(words):
            x = torch.randn(8, D, generator=generator, dtype=torch.double)
            trainer.backward(x, word, i == len(words) - 1)
        trainer.before()
        optimizer.step()
        trainer.after()
        optimizer.zero_grad()
    return {name: whole(p.detach()) for name, p in trainer.parameters.items()}


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def of_all(model, x, word, last):
    """Of one process, or of ranks that have the same samples."""
    for half, part in zip(x.chunk(2), word):
        model(half, part).backward()


def one_process(model):
    return Trainer(dict(model.named_parameters()), functools.partial(of_all, model))


def own(x, word):
    """The samples of this rank, and the part that they use."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return x.chunk(n)[rank], word[2 * rank // n]


def ddp(model, **options):
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)

    def backward(x, word, last):
        with contextlib.nullcontext() if last else replica.no_sync():
            (replica(*own(x, word)) * dist.get_world_size()).backward()

    return Trainer(dict(model.named_parameters()), backward)


def use_zero(model, stage):
    buckets, shards = zero.make_buckets(model, [[part] for part in model.children()], flat())
    zero.start_gathering(buckets)

    def backward(x, word, last):
        zero.reduce_in_backward(buckets, stage == 2 or last)
        (model(*own(x, word)) * dist.get_world_size()).backward()

    return Trainer(shards, backward, lambda: zero.reduce_gradients(buckets),
                   lambda: zero.start_gathering(buckets))


def use_fsdp(model, replicas=1, together=False, reshard=True):
    """``together``: a and b in one unit, whose gradients are 0 where no rank has used a part."""
    units = [[model.first], [model.a], [model.b], [model.out]]
    if together:
        units[1:3] = [[model.a, model.b]]
    fsdp.shard(model, units, flat(replicas), reshard_after_forward=reshard, reduce_unused=together)
    fsdp.add_gradients_up(model)
    used = torch.zeros(2)

    def backward(x, word, last):
        model.set_requires_all_reduce(last)
        if not reshard:
            model.set_reshard_after_backward(last)
        x, part = own(x, word)
        used["ab".index(part)] = 1
        model(x, part).backward()

    def before():
        dist.all_reduce(used, dist.ReduceOp.MAX)
        for by_any, part in zip(used.tolist(), (model.a, model.b)):
            for p in part.parameters() if together and not by_any else ():
                assert not p.grad.full_tensor().any()
                p.grad = None

    def after():
        used.zero_()
        with torch.no_grad():  # an evaluation, of all parts
            [model(torch.zeros(1, D, dtype=torch.double), part) for part in "ab"]
        model.reset_iter_state()

    return Trainer(dict(model.named_parameters()), backward, before, after)


def flat(replicas=1):
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, n // replicas), mesh_dim_names=("r", "s"))
    return mesh if replicas > 1 else mesh["s"]


PLAN = {"*.0": ColwiseParallel(), "*.2": RowwiseParallel()}


def use_tp(model):
    mesh = flat()
    tp.parallelize(model, mesh, PLAN)
    return Trainer(dict(model.named_parameters()), functools.partial(of_all, model),
                   lambda: tp.redistribute_gradients(model, mesh.get_group()))


def use_cp(model):
    """The samples stand for positions: each rank has its own."""
    begin, finish = cp.all_reduce_in_backward(model.parameters(), dist.group.WORLD)

    def backward(x, word, last):
        if last:
            begin()
        model(*own(x, word)).backward()

    return Trainer(dict(model.named_parameters()), backward, finish)


class Stage(nn.Module):
    """Some of the four parts. ``words`` is the micro-batches that are to come."""

    def __init__(self, model, names):
        super().__init__()
        self.words = collections.deque()
        for name in names:
            self.add_module(name, getattr(model, name))

    def forward(self, x, targets):
        part = self.words.popleft()
        for name, module in self.named_children():
            if name in ("first", part, "out"):
                x = x + module(x)
        return x


def use_pp(model, name, prepare=lambda part: None, group=None, samples=8):
    """Each letter of a word is two micro-batches of the pipeline."""
    group = group or dist.group.WORLD
    rank, n = group.rank(), group.size()
    v = 1 if name in pp.ONE_STAGE else 2
    numbers = pp.stages_of(rank, n, v, name)
    names = ["first", "a", "b", "out"]
    size = len(names) // (n * v)
    parts = [Stage(model, names[i * size : (i + 1) * size]) for i in numbers]
    for part in parts:
        prepare(part)
    like = torch.empty(samples // 4, D, dtype=torch.double, device="meta")
    schedule = pp.make_schedule(name, parts, numbers, n * v, 4, like, like.clone(), like,
                                lambda x, _: x.square().sum(), group, torch.device("cpu"))

    def backward(x, word, last):
        for part in parts:
            part.words.extend(letter for letter in word for _ in range(2))
        hybrid_3d.in_stages(schedule.step, x, x, last)

    return Trainer(dict(named for part in parts for named in part.named_parameters()), backward,
                   stages=parts)


class Mixture(nn.Module):
    """With experts in place of a and b: samples of a use the first two of four."""

    def __init__(self):
        super().__init__()
        self.first, self.out = Part(), Part()
        self.mixture = MixtureOfExperts(MixtureConfig(
            hidden_size=D, num_attention_heads=1, num_key_value_heads=1, num_experts=4,
            expert_size=8))
        self.mixture.bias.zero_()
        for p in self.mixture.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, x, part):
        self.mixture.bias[:2], self.mixture.bias[2:] = (9, 0) if part == "a" else (0, 9)
        x = x + self.first(x)
        x = x + self.mixture(x)
        return (x + self.out(x)).square().sum()


def use_ep(model, ep_ranks, replicas=1):
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, n // replicas // ep_ranks, ep_ranks),
                            mesh_dim_names=("r", "expert_dp", "ep"))
    ep.shard_experts(model.mixture.experts, mesh["ep"],
                     mesh["r", "expert_dp"] if replicas > 1 else mesh["expert_dp"])
    model.mixture.dispatch = functools.partial(ep.to_experts_and_back, group=mesh.get_group("ep"))
    fsdp.shard(model, [[part] for part in model.children()], flat(replicas))
    fsdp.add_gradients_up(model)

    def backward(x, word, last):
        model.set_requires_all_reduce(last)
        model(*own(x, word)).backward()

    return Trainer(dict(model.named_parameters()), backward)


def in_one_stage(model):
    """Of hybrid_3d.py: two replicas of two ranks with tensor parallelism. Each letter of a word is
    a micro-batch of the only stage."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("r", "s", "tp"))
    tp.parallelize(model, mesh["tp"], PLAN)
    fsdp.shard(model, [[part] for part in model.children()], mesh["r", "s"])
    fsdp.add_gradients_up(model)
    forward = model.forward
    model.forward = lambda x, targets: forward(x, targets.pop())

    def backward(x, word, last):
        x = x.view(2, 2, 2, D)[:, mesh.get_local_rank("r")].flatten(0, 1)  # of each half
        words = types.SimpleNamespace(chunk=lambda M: [[part] for part in word])
        hybrid_3d.in_one_stage(model, 2, lambda loss, _: loss, x, words, last)

    return Trainer(dict(model.named_parameters()), backward)


def in_stages(model):
    """Of hybrid_3d.py: two replicas of two stages."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "r", "s"))

    def prepare(part):
        fsdp.shard(part, [[child] for child in part.children()], mesh["r", "s"],
                   reshard_after_forward=False)
        fsdp.add_gradients_up(part)

    trainer = use_pp(model, "1f1b", prepare, mesh.get_group("pp"), samples=4)

    def backward(x, word, last):
        x = x.view(2, 2, 2, D)[:, mesh.get_local_rank("r")].flatten(0, 1)  # of each half
        trainer.backward(x, word, last)

    return trainer._replace(backward=backward)


def variants(function, make=Model, **options):
    """[(function with one of the values of the option, model)]"""
    ((name, values),) = options.items()
    return [(functools.partial(function, **{name: value}), make) for value in values]


EQUAL, IF_NONE = "equal", (
    "equal, if the loop, after an `all_reduce` of what was used, sets their gradients to None")
# The table in docs/strategies.md: its cells; what computes them on 2 ranks by default; what else;
# what on 4 ranks.
TOGETHER = functools.partial(use_fsdp, together=True)
TABLE = {
    "`ddp.py` with `find_unused_parameters=True` added, `zero.py`, `cp.py`, `ep.py`": (
        [EQUAL, EQUAL, EQUAL],
        variants(ddp, find_unused_parameters=[True]) + variants(use_zero, stage=[2])
        + [(use_cp, Model)] + variants(use_ep, Mixture, ep_ranks=[2]),
        variants(use_zero, stage=[1]) + variants(use_ep, Mixture, ep_ranks=[1]),
        variants(functools.partial(use_ep, replicas=2), Mixture, ep_ranks=[2, 1])),
    "`fsdp.py`, `hybrid_3d.py`, each part a unit": (
        [EQUAL, "refused in the same step: see the next line", EQUAL],
        variants(use_fsdp, replicas=[2]),
        variants(use_fsdp, replicas=[1])
        + variants(functools.partial(use_fsdp, reshard=False), replicas=[2, 1]),
        [*variants(use_fsdp, replicas=[2, 4]), (in_one_stage, Model), (in_stages, Model)]),
    "the parts in one unit, `reduce_unused`": (
        [EQUAL, EQUAL, IF_NONE], variants(TOGETHER, replicas=[2]), variants(TOGETHER, replicas=[1]),
        variants(TOGETHER, replicas=[2, 4])),
    "`tp.py`, `pp.py`": ([EQUAL, "cannot be", EQUAL], [(use_tp, Model)],
                       variants(use_pp, name=pp.SCHEDULES), []),
}


@functools.cache
def expected(steps, make):
    return train(steps, one_process, make)


def compare(column):
    for name, row in TABLE.items():
        for strategy, make in row[column]:
            for cell, variants in zip(row[0], ([SOME_MICRO_BATCHES], SOME_RANKS, NO_RANK)):
                for steps in variants if cell in (EQUAL, IF_NONE) else []:
                    print(name, strategy, cell, steps)
                    right = expected(steps, make)
                    for key, value in train(steps, strategy, make).items():
                        torch.testing.assert_close(value, right[key], rtol=0, atol=1e-12)


@on_ranks(2)
def test_a_sample_of_the_table():
    compare(1)


@on_ranks(2, thorough=True)
def test_the_rest_of_the_table():
    compare(2)


@on_ranks(4, thorough=True)
def test_on_four_ranks():
    compare(3)


def train_with_run(strategy, *steps, mesh=None):
    """Each of ``steps`` is the word of its micro-batch."""
    model = Model().double()
    trainer = strategy(model)
    parser = option_parser("")
    Run.add_options(parser)
    args = parse_options(parser, ["--steps", "9", "--batch-size", "8"])
    optimizer = torch.optim.SGD(trainer.parameters.values(), 0.01)
    run = Run(args, trainer.stages or model, optimizer, BatchSampler(99, 8, stop=9), range(99),
              torch.device("cpu"), mesh)
    for step, word in run.steps(enumerate(steps)):
        trainer.backward(torch.ones(8, D, dtype=torch.double), word, True)
        run.after_step(step, 1.0, 1.0)


OTHER_UNITS = "in step 2 ranks used other units of FSDP"


@on_ranks(2)
def test_other_units_are_refused():
    for replicas in 1, 2:
        with pytest.raises(SettingError, match=OTHER_UNITS):
            train_with_run(functools.partial(use_fsdp, replicas=replicas), "aa", "ab")
    train_with_run(TOGETHER, "aa", "ab", "ba")


@on_ranks(4, thorough=True)
def test_other_units_of_a_stage_are_refused():
    """Stages have other units; ranks of one stage have not."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "r", "s"))
    other = "ab" if mesh.get_local_rank("r") else "ba"
    train_with_run(in_stages, "aa", "ab", "ba", mesh=mesh)
    with pytest.raises(SettingError, match=OTHER_UNITS):
        train_with_run(in_stages, "aa", other, mesh=mesh)


def test_the_table():
    page = (ROOT / "docs" / "strategies.md").read_text()
    for name, (cells, *_) in TABLE.items():
        assert f"| {' | '.join([name, *cells])} |" in page


@on_ranks(2)
def test_ddp_refuses_what_it_was_not_told():
    """In the words of torch, in the next forward pass."""
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        train(["aa bb", "aa bb"], ddp, Model)
