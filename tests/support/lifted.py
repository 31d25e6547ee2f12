"""A trainer of somebody else, with models of its own and an ordinary mean loss. The functions below
``main`` of the scripts are lifted into it, one strategy after the other: on every rank the gradient
norms of a few steps are those of one process. docs/copying.md shows these loops."""

import collections
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import cp
import ep
import fsdp
import pp
import tp
import zero

CPU = torch.device("cpu")
MAX_NORM = 0.1  # below the norms of all steps


def make_model():
    blocks = [nn.Sequential(collections.OrderedDict(
        up=nn.Linear(16, 32), gelu=nn.GELU(), down=nn.Linear(32, 16), norm=nn.LayerNorm(16)
    )) for _ in range(2)]
    return nn.Sequential(nn.Embedding(64, 16), *blocks, nn.Linear(16, 64))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16))  # dimension 0: the experts

    def forward(self, rows, counts, sizes=None):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        parts = rows.split(sizes or counts.tolist())
        return torch.cat([part @ matrix for part, matrix in zip(parts, weight)])


class Mixture(nn.Module):
    """Each token goes to one of four experts."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), Experts()
        self.dispatch = lambda rows, counts, experts: experts(rows, counts)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        score, chosen = self.router(tokens).softmax(1).max(1)
        expert, order = chosen.sort(stable=True)
        rows = self.dispatch(tokens[order], expert.bincount(minlength=4), self.experts)
        out = torch.empty_like(rows).index_copy(0, order, rows)
        return x + (score[:, None] * out).view_as(x)


def make_mixture():
    return nn.Sequential(nn.Embedding(64, 16), Mixture(), nn.Linear(16, 64))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.attention = F.scaled_dot_product_attention

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)  # (B, heads, T, 4)
        return x + self.out(self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 16), nn.Embedding(8, 16)
        self.first, self.second, self.head = Attention(), Attention(), nn.Linear(16, 64)

    def forward(self, x, positions=slice(None)):
        return self.head(self.second(self.first(self.tokens(x) + self.places.weight[positions])))


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def own_part(mesh, *tensors):
    return [tensor.chunk(mesh.size())[mesh.get_rank()] for tensor in tensors]


# The trainer, and then the trainer with one strategy each: they yield the norm of each step


def plain(model, batches, mesh):
    optimizer = AdamW(model.parameters())
    for inputs, targets in batches:
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield norm


def use_zero(model, batches, mesh):
    buckets, shards = zero.make_buckets(model, [[part] for part in model], mesh)
    optimizer = AdamW(shards.values())
    for inputs, targets in batches:
        inputs, targets = own_part(mesh, inputs, targets)
        zero.reduce_in_backward(buckets, True)
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        zero.reduce_gradients(buckets)
        norm = clip_grad_norm_(shards.values(), MAX_NORM).full_tensor()
        optimizer.step()
        zero.start_gathering(buckets)
        optimizer.zero_grad()
        yield norm
    zero.wait_for_parameters(buckets)


def use_tp(model, batches, mesh):
    tp.parallelize(model, mesh, {
        "[03]": tp.Replicated(), "[12].norm": tp.Replicated(),
        "[12].up": ColwiseParallel(), "[12].down": RowwiseParallel(),
    })
    optimizer = AdamW(model.parameters())
    for inputs, targets in batches:  # the same on all ranks
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        tp.redistribute_gradients(model, mesh.get_group())
        norm = clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        yield norm


def use_cp(model, batches, mesh):
    group, n = mesh.get_group(), mesh.size()
    cp.set_attention(
        model, cp.ring_attention, group, replaces=F.scaled_dot_product_attention
    )
    positions = cp.shard_positions(8, n)[mesh.get_rank()]
    begin_reducing, finish_reducing = cp.all_reduce_in_backward(model.parameters(), group)
    optimizer = AdamW(model.parameters())
    for inputs, targets in batches:  # the same on all ranks
        logits = model(inputs[:, positions], positions)
        loss = mean_loss(logits, targets[:, positions]) / n  # a part of the mean over all ranks
        begin_reducing()
        loss.backward()
        finish_reducing()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield norm


def use_pp(model, batches, mesh, name="zbv"):
    """Four stages on two ranks: the first and the last one on rank 0."""
    group, n, M = mesh.get_group(), mesh.size(), 4
    numbers = pp.stages_of(mesh.get_rank(), n, 2, name)
    parts = [model[stage] for stage in numbers]
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")  # a micro-batch
    hidden, logits = (torch.empty(2, 8, size, dtype=torch.double, device="meta")
                      for size in (16, 64))
    schedule = pp.make_schedule(
        name, parts, numbers, len(model), M, tokens, hidden, logits,
        lambda logits, targets: mean_loss(logits, targets) / M, group, CPU,
    )
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = AdamW(parameters)
    for inputs, targets in batches:  # the same on all ranks
        losses = []
        schedule.step(inputs, target=targets, losses=losses, return_outputs=False)
        norm = pp.clip_over_stages(parameters, MAX_NORM, group)
        optimizer.step()
        optimizer.zero_grad()
        assert len(losses) == (M if mesh.get_rank() == 0 else 0)
        yield norm
    schedule.eval(inputs, target=targets, losses=losses, return_outputs=False)


use_dualpipe = functools.partial(use_pp, name="dualpipev")


def use_ep(model, batches, mesh):
    n = mesh.size()
    expert_mesh = init_device_mesh("cpu", (1, n), mesh_dim_names=("expert_dp", "ep"))
    ep.shard_experts(model[1].experts, expert_mesh["ep"], expert_mesh["expert_dp"])
    model[1].dispatch = functools.partial(
        ep.to_experts_and_back, group=expert_mesh.get_group("ep")
    )
    fsdp.shard(model, [[part] for part in model], mesh)
    fsdp.add_gradients_up(model)
    optimizer = AdamW(model.parameters())
    for inputs, targets in batches:
        inputs, targets = own_part(mesh, inputs, targets)
        loss = mean_loss(model(inputs), targets) / n  # a part of the mean over all ranks
        loss.backward()
        norm = ep.clip_over_meshes(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield norm


def compare(mesh):
    torch.manual_seed(1)
    batches = [(rows[:, :-1], rows[:, 1:]) for rows in torch.randint(64, (3, 8, 9))]
    for make, strategies in (
        (make_model, (plain, use_zero, use_tp, use_pp, use_dualpipe)),
        (make_mixture, (plain, use_ep)), (Sequences, (plain, use_cp)),
    ):
        norms = []
        for strategy in strategies:
            torch.manual_seed(0)
            norms.append(torch.stack([*strategy(make().double(), batches, mesh)]))
            torch.testing.assert_close(norms[-1], norms[0], rtol=0, atol=1e-12)
        assert norms[0].min() > MAX_NORM
