"""A trainer of somebody else, with a model of its own and an ordinary mean loss. The functions
below ``main`` of the scripts are lifted into it, one strategy after the other. docs/copying.md
shows these lines, and tests/test_porting.py compares each with one process."""

import collections
import contextlib
import functools
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import cp
import ep
import fsdp
import pp
import tp
from common.data import BatchSampler, add_text_options
from common.experts import MixtureConfig, MixtureOfExperts
from common.options import option_parser, parse_options
from common.run import Run
from common.usage import Usage

CPU = torch.device("cpu")
# A table has hundreds of trainers in one process: with groups of their own, threads of gloo would
# fill the machine.
init_device_mesh, new_group = map(functools.cache, (device_mesh.init_device_mesh, dist.new_group))
B, T, D, MAX_NORM = 8, 8, 4, 0.01  # below the norms of all steps


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class Choice(nn.Module):
    """``use`` says which of the parts a and b samples use: "a", "b", "c" (both), or "-". In
    capitals both are computed, and the loss takes one. ``zeros``: what is not used gets a gradient
    of 0."""

    def __init__(self, zeros=False, **parts):
        super().__init__()
        self.zeros = zeros
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x, use):
        taken = {"c": "ab", "-": ""}.get(use, use.lower())
        for name, part in self.named_children():
            if name in taken:
                x = x + part(x)
            elif use.isupper():
                part(x)
        return x + 0 * sum(p.sum() for p in self.parameters()) if self.zeros else x


class Parts(Choice):
    def __init__(self, zeros=False):
        super().__init__(first=Part(), choice=Choice(zeros, a=Part(), b=Part()), out=Part())

    def forward(self, x, use):
        for name, part in self.named_children():
            x = part(x, use) if name == "choice" else x + part(x)
        return x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.attention = nn.Linear(D, 3 * D), F.scaled_dot_product_attention

    def forward(self, x):  # (B, T, D), one head
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        return self.attention(q, k, v, is_causal=True)[:, 0]


class Sequences(Parts):
    def __init__(self):
        super().__init__()
        self.first, self.choice.a = Attention(), Attention()


class Mixture(Parts):
    """``use``: of the four experts the first two, the last two, or all. ``rests``: parts too."""

    def __init__(self, rests=False, zeros=False):
        super().__init__(zeros)
        self.rests = rests
        self.out = MixtureOfExperts(MixtureConfig(
            hidden_size=D, num_attention_heads=1, num_key_value_heads=1, num_experts=4,
            expert_size=8))
        for p in self.out.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, x, use):
        high = {"a": [9, 9, 0, 0], "b": [0, 0, 9, 9]}
        self.out.bias.copy_(torch.tensor(high.get(use, [0] * 4)))
        return super().forward(x, use if self.rests else "c")


def mean_loss(x, _=None):
    return x.square().mean()


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def clip(parameters):
    return whole(clip_grad_norm_(parameters, MAX_NORM))


# What a strategy makes of a model: its parameters by name; what computes the gradients of a
# micro-batch, and returns this rank's part of its loss; the norm; what ``shard`` has returned
Trainer = collections.namedtuple("Trainer", "parameters backward clip usage", defaults=[clip, None])


def arguments(words):
    """As of a script that has the options of all, of text and of a run."""
    parser = option_parser("")
    add_text_options(parser)
    Run.add_options(parser)
    return parse_options(parser, words.split())


def train(make, strategy, steps):
    """``steps``: each has micro-batches, words: the first letter is what the first half of the
    samples uses, the second what the second half does. Returns the loss and the norm of each step,
    and the parameters in the end."""
    torch.manual_seed(0)
    model = make().double()
    trainer = strategy(model)
    optimizer = torch.optim.AdamW(  # eps: of some numbers the gradient is 0, but for rounding
        trainer.parameters.values(), 0.01, eps=1e-5, weight_decay=0.5)
    args = arguments("--steps 9 --batch-size 8 --log-every 1")
    with mock.patch.object(dist, "new_group", new_group):
        run = Run(args, nn.Module(), optimizer, BatchSampler(99, 8, stop=9), range(99), CPU,
                  tensors=trainer.parameters, usage=trainer.usage)
    generator = torch.Generator().manual_seed(1)
    for step, words in run.steps(enumerate(map(str.split, steps))):
        loss = 0.0
        for i, word in enumerate(words):
            x = torch.randn(B, T, D, generator=generator, dtype=torch.double)
            loss += trainer.backward(x, word, i == len(words) - 1)
        norm = trainer.clip(trainer.parameters.values())
        optimizer.step()
        optimizer.zero_grad()
        run.after_step(step, loss, norm)
    return ([(record["loss"], record["grad_norm"]) for record in run.history],
            {name: whole(p.detach()) for name, p in trainer.parameters.items()})


def plain(model):
    """On every rank, of the samples of all."""
    def backward(x, word, last):
        loss = sum(mean_loss(model(half, use)) for half, use in zip(x.chunk(2), word)) / 2
        loss.backward()
        return loss.detach() / dist.get_world_size()

    return Trainer(dict(model.named_parameters()), backward)


# The trainer with one strategy each


def own(x, word):
    """The samples of this rank, and what they use."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return x.chunk(n)[rank], word[2 * rank // n]


def ddp(model, part=own, **options):
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)

    def backward(x, word, last):
        with contextlib.nullcontext() if last else replica.no_sync():
            loss = mean_loss(replica(*part(x, word)))  # DDP averages the gradients of the ranks
            loss.backward()
        if last:
            replica._check_reducer_finalized()
        return loss.detach() / dist.get_world_size()

    return Trainer(dict(model.named_parameters()), backward)


def context(model, attention=cp.ring_attention, **options):
    """All samples use the same parts: of ranks that do not, see ``ddp``."""
    group, n = dist.group.WORLD, dist.get_world_size()
    cp.set_attention(model, attention, group, replaces=F.scaled_dot_product_attention)
    positions = cp.shard_positions(T, n)[dist.get_rank()]
    return ddp(model, lambda x, word: (x[:, positions], word[0]), **options)


def flat(replicas=1):
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, n // replicas), mesh_dim_names=("r", "s"))
    return mesh if replicas > 1 else mesh["s"]


def units_of(model, together):
    """``together``: the parts are one unit, a module that all ranks call."""
    choice = [model.choice] if together else model.choice.children()
    return [[model.first], *([part] for part in choice), [model.out]]


def fully_sharded(model, replicas=1, together=False, reshard=True, stage=2):
    fsdp.shard(model, units_of(model, together), flat(replicas), reshard_after_forward=reshard)
    fsdp.reduce_by_sum(model)

    def backward(x, word, last):
        model.set_requires_all_reduce(last)
        model.set_requires_gradient_sync(last or stage == 2)
        model.set_reshard_after_backward(last or reshard)
        loss = mean_loss(model(*own(x, word))) / dist.get_world_size()
        loss.backward()
        return loss.detach()

    return Trainer(dict(model.named_parameters()), backward, usage=Usage(model))


zero = functools.partial(fully_sharded, reshard=False)


def split(model, mesh, whole=None):
    tp.parallelize(model, mesh, {
        "*.norm": tp.Replicated(), "*.up": ColwiseParallel(), "*.down": RowwiseParallel(),
        "choice.*.norm": tp.Replicated(), "choice.*.up": ColwiseParallel(),
        "choice.*.down": RowwiseParallel(),
    }, whole)


def tensor(model):
    mesh = flat()
    split(model, mesh)

    def clip_after(parameters):
        tp.redistribute_gradients(model, mesh.get_group())
        return clip(parameters)

    return plain(model)._replace(clip=clip_after)


class Stage(Choice):
    """``uses``: of the micro-batches that are to come."""

    def __init__(self, model, names):
        super().__init__()
        self.uses = collections.deque()
        for name in names:
            if name in "ab":
                self.choice = Choice(model.choice.zeros, **{name: getattr(model.choice, name)})
            else:
                self.add_module(name, getattr(model, name))

    def forward(self, x):
        return Parts.forward(self, x, self.uses.popleft())


def pipeline(model, name, prepare=lambda part: None, group=None, replicas=1):
    """Each letter of a word is two or four micro-batches of the pipeline."""
    group, M = group or dist.group.WORLD, 4
    v = 1 if name in pp.ONE_STAGE else 2
    numbers = pp.stages_of(group.rank(), group.size(), v, name)
    names = ["first", "a", "b", "out"]
    size = len(names) // (group.size() * v)
    parts = [Stage(model, names[i * size : (i + 1) * size]) for i in numbers]
    usages = [prepare(part) for part in parts]
    hidden = torch.empty(B // replicas // M, T, D, dtype=torch.double, device="meta")
    schedule = pp.make_schedule(
        name, parts, numbers, group.size() * v, M, hidden.clone(), hidden, hidden.clone(),
        lambda x, targets: mean_loss(x) / M / replicas, group, CPU,
    )

    def backward(x, word, last):
        for part in parts:
            part.uses.extend(use for use in word for _ in range(M // len(word)))
        losses = []
        schedule.step(x, target=x, losses=losses, return_outputs=False)
        return torch.stack([*losses, torch.zeros((), dtype=torch.double)]).sum().detach()

    return Trainer(dict(named for part in parts for named in part.named_parameters()), backward,
                   functools.partial(pp.clip_over_stages, max_norm=MAX_NORM, group=group),
                   usages[0])


def expert(model, ep_ranks, replicas=1, together=False):
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, n // replicas // ep_ranks, ep_ranks),
                            mesh_dim_names=("r", "expert_dp", "ep"))
    ep.shard_experts(model.out.experts, mesh["ep"],
                     mesh["r", "expert_dp"] if replicas > 1 else mesh["expert_dp"])
    model.out.dispatch = functools.partial(ep.to_experts_and_back, group=mesh.get_group("ep"))
    trainer = fully_sharded(model, replicas, together)
    norm = functools.partial(ep.clip_over_meshes, max_norm=MAX_NORM)
    if replicas > 1:  # they hold the same
        alone = init_device_mesh("cpu", (n, 1), mesh_dim_names=("pp", "stage"))["stage"]
        norm = functools.partial(pp.clip_over_stages, max_norm=MAX_NORM, group=alone.get_group())
    return trainer._replace(clip=norm)


def hybrid_in_stages(model, together=True):
    """Two replicas of two stages."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "r", "s"))

    def prepare(part):
        parts = part.children() if together else [m for m in part.modules() if type(m) is Part]
        fsdp.shard(part, [[module] for module in parts], mesh["r", "s"],
                   reshard_after_forward=False)  # for all micro-batches of a step
        fsdp.reduce_by_sum(part)
        return Usage(part, mesh.get_local_rank("pp"), 2)

    trainer = pipeline(model, "1f1b", prepare, mesh.get_group("pp"), replicas=2)

    def backward(x, word, last):
        r, uses = mesh.get_local_rank("r"), len(word) // 2
        return trainer.backward(x.chunk(2)[r], word[r * uses : (r + 1) * uses], last)

    return trainer._replace(backward=backward)
