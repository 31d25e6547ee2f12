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
from torch.utils.data import TensorDataset

import cp
import ddp
import ep
import fsdp
import pp
import tp
import zero
from common.checkpoint import Checkpoints
from common.counting import StepCounter
from common.data import BatchSampler
from common.experts import MixtureOfExperts
from common.launch import launch
from common.model import ModelConfig, causal_attention
from common.validation import Validation

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
    ep.shard_experts(model[1].experts, expert_mesh)
    group = expert_mesh.get_group("ep")
    model[1].dispatch = functools.partial(ep.to_experts_and_back, group=group)
    fsdp.shard(model, [[part] for part in model], mesh)
    ep.add_gradients_up(model)
    inputs, targets = own_part(mesh, inputs, targets)
    (mean_loss(model(inputs), targets) / n).backward()  # a part of the mean
    for own, parameter in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), parameter.grad, rtol=0, atol=1e-12)


def use_attention(mesh):
    """Each kind of attention: output and gradients of the positions of this rank."""
    q, k, v, weight = (torch.randn(2, heads, 16, 8, dtype=torch.double) for heads in (4, 2, 2, 4))
    whole = [x.requires_grad_() for x in (q, k, v)]
    out = causal_attention(*whole)
    expected = [out, *torch.autograd.grad((out * weight).sum(), whole)]
    for attention, more in (
        (cp.ring_attention, {}), (cp.allgather_attention, {}),
        (cp.ulysses_attention, {"attention": causal_attention}),
    ):
        positions = cp.shard_positions(16, mesh.size(), zigzag=not more)[mesh.get_rank()]
        own = [x.detach()[:, :, positions].requires_grad_() for x in whole]
        out = attention(*own, **more, group=mesh.get_group())
        found = [out, *torch.autograd.grad((out * weight[:, :, positions]).sum(), own)]
        for part, all_of_it in zip(found, expected):
            torch.testing.assert_close(part, all_of_it[:, :, positions], rtol=0, atol=1e-12)


def use_services(model, inputs, targets, mesh):
    """What common/ has, taken alone: it needs no options, and no launcher of ours."""
    dataset, rank, n = TensorDataset(inputs, targets), mesh.get_rank(), mesh.size()
    fsdp.shard(model, [[part] for part in model], mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def checkpoints_of(model, optimizer, stop):
        return Checkpoints("run", ({"seed": 0}, {}), model.state_dict(keep_vars=True), optimizer,
                           stop=stop, every=1)

    sampler = BatchSampler(len(dataset), 4, rank=rank, world_size=n, stop=2)
    validation = Validation(dataset, sampler, CPU, 1, 2)
    checkpoints = checkpoints_of(model, optimizer, stop=2)
    assert checkpoints.resume(False) == 0
    for step, indices in enumerate(sampler):
        with StepCounter(optimizer, [model, *model], mesh) as counter:
            x, y = dataset[indices]
            mean_loss(model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.after_step(step, norm)
    checkpoints.finish()
    P = sum(p.nbytes for p in model.parameters())
    assert counter.failed is None and counter.held["parameters"] == P / n
    sent = 3 * P * (n - 1) / n  # without the gathers of groups that stay gathered
    assert 0.8 * sent < sum(counter.sent.values()) < 1.1 * sent

    other = make_model()  # on one rank or many, sharded or whole
    resumed = checkpoints_of(other, torch.optim.SGD(other.parameters(), 0.1), stop=3)
    assert resumed.resume() == 2
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).full_tensor())

    def summed_loss(micro_batch):
        x, y = micro_batch
        return F.cross_entropy(other(x).flatten(0, 1), y.flatten(), reduction="sum"), y.numel()

    assert validation.due(0)
    expected = mean_loss(other(inputs), targets).item()
    assert abs(validation.loss(other, summed_loss) - expected) < 1e-12


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
    use_attention(mesh)
    use_services(make_model(), inputs, targets, mesh)
    print(f"rank {dist.get_rank()}: all is right", flush=True)


if __name__ == "__main__":
    launch(main)
