"""A trainer of somebody else, with a model of its own and an ordinary mean loss. The functions
below ``main`` of the scripts are lifted into it, one strategy after the other: on every rank the
gradients are those of one process."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel

import ddp
import diloco
import ep
import fsdp
import pp
import tp
import zero
from common.experts import MixtureOfExperts
from common.launch import launch
from common.model import ModelConfig

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 16), Block(), Block(), nn.Linear(16, 64)).double()


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def own_part(mesh, *tensors):
    return [tensor.chunk(mesh.size())[mesh.get_rank()] for tensor in tensors]


def use_ddp(model, inputs, targets, mesh):
    """Its buckets are arranged; buffers, gradients and the random state are as before."""
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(lambda model, inputs, logits: logits + 0 * model.calls.add_(1))
    model[1].drop.p = 0.5
    replica = DistributedDataParallel(model)
    inputs, targets = own_part(mesh, inputs, targets)
    before = torch.get_rng_state()
    ddp.arrange_buckets(replica, torch.zeros_like(inputs))
    assert torch.equal(torch.get_rng_state(), before) and not model.calls
    model[1].drop.p = 0.0
    mean_loss(replica(inputs), targets).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def use_zero(model, inputs, targets, mesh):
    buckets, shards = zero.make_buckets(model, [[part] for part in model], mesh)
    zero.reduce_in_backward(buckets, True)
    inputs, targets = own_part(mesh, inputs, targets)
    mean_loss(model(inputs), targets).backward()
    zero.reduce_gradients(buckets)
    return {name: shard.grad.full_tensor() for name, shard in shards.items()}


def use_fsdp(model, inputs, targets, mesh):
    fsdp.shard(model, [[part] for part in model], mesh)
    inputs, targets = own_part(mesh, inputs, targets)
    mean_loss(model(inputs), targets).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def use_tp(model, inputs, targets, mesh):
    tp.parallelize(model, mesh, {
        "[03]": tp.Replicated(), "[12].norm": tp.Replicated(),
        "[12].up": ColwiseParallel(), "[12].down": RowwiseParallel(),
    })
    mean_loss(model(inputs), targets).backward()
    tp.redistribute_gradients(model, mesh.get_group())
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def use_pp(model, inputs, targets, mesh, name="zbv"):
    """Four stages on two ranks: the first and the last one on rank 0."""
    n, rank = mesh.size(), mesh.get_rank()
    own = pp.stages_of(rank, n, 2, name)
    assert len(model) == 2 * n
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    hidden, logits = (torch.empty(2, 8, size, dtype=torch.double, device="meta")
                      for size in (16, 64))
    schedule = pp.make_schedule(
        name, [model[stage] for stage in own], own, 2 * n, 4, tokens, hidden, logits,
        lambda logits, targets: mean_loss(logits, targets) / 4, mesh.get_group(), CPU,
    )
    schedule.step(inputs, target=targets, losses=[])
    return {name: p.grad for name, p in model.named_parameters() if int(name[0]) in own}


def use_ep(mesh, inputs, targets):
    """A layer of experts in a model of one's own."""
    def make_experts():
        torch.manual_seed(0)
        config = ModelConfig(hidden_size=16, num_experts=4, expert_size=8)
        model = nn.Sequential(
            nn.Embedding(64, 16), MixtureOfExperts(config), nn.Linear(16, 64)
        ).double()
        model[1].bias.zero_()
        for parameter in model[1].parameters():
            nn.init.normal_(parameter)
        return model

    whole, model, n = make_experts(), make_experts(), mesh.size()
    mean_loss(whole(inputs), targets).backward()
    expert_mesh = init_device_mesh("cpu", (1, n), mesh_dim_names=("expert_dp", "ep"))
    ep.shard_experts(model[1].experts, expert_mesh["ep"], expert_mesh["expert_dp"])
    group = expert_mesh.get_group("ep")
    model[1].dispatch = functools.partial(ep.to_experts_and_back, group=group)
    fsdp.shard(model, [[part] for part in model], mesh)
    ep.add_gradients_up(model)
    inputs, targets = own_part(mesh, inputs, targets)
    (mean_loss(model(inputs), targets) / n).backward()  # a part of the mean
    for own, parameter in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), parameter.grad, rtol=0, atol=1e-12)


def use_diloco(mesh):
    """Replicas of a plain model, with an ordinary training step between meetings: two meetings are
    two steps of SGD with Nesterov momentum, whose gradient is the mean of what they have moved."""
    model, whole = make_model(), make_model()
    common, outer = diloco.make_outer(model.parameters(), 0.7, 0.9)
    expected = torch.optim.SGD(whole.parameters(), 0.7, 0.9, nesterov=True)
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(1.0 + mesh.get_rank())  # of two ranks
        diloco.meet(common, outer, mesh.get_group())
        for p in whole.parameters():
            p.grad = torch.full_like(p, 1.5)
        expected.step()
        for own, parameter in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(own, parameter, rtol=0, atol=1e-12)
            assert torch.equal(own, common[own])


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(1)
    rows = torch.randint(64, (8, 9))
    inputs, targets = rows[:, :-1], rows[:, 1:]
    whole = make_model()
    mean_loss(whole(inputs), targets).backward()
    for strategy in (use_ddp, use_zero, use_fsdp, use_tp, use_pp):
        found = strategy(make_model(), inputs, targets, mesh)
        assert found
        for name, gradient in found.items():
            expected = whole.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    use_ep(mesh, inputs, targets)
    use_diloco(mesh)
    print(f"rank {dist.get_rank()}: all is right", flush=True)


if __name__ == "__main__":
    launch(main)
