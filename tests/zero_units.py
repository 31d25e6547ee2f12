"""On each rank: zero.py's shards carry the names of their parameters, in any order of the units; a
parameter in no unit, or in two, is refused."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero
from common.errors import SettingError
from common.launch import launch
from common.services.counting import StepCounter


def refused(model, units, mesh):
    try:
        zero.make_buckets(model, units, mesh)
    except SettingError as error:
        return str(error)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abc"})
    a, b, c = model["a"], model["b"], model["c"]
    _, shards = zero.make_buckets(model, [[c], [a, b]], mesh)
    for name, parameter in model.named_parameters():
        assert shards[name].full_tensor().equal(parameter.detach()), name
    assert "c.weight is in 0 of the units" in refused(model, [[a, b]], mesh)
    assert "b.weight is in 2 of the units" in refused(model, [[a, b], [b, c]], mesh)
    a.weight = b.weight
    assert "a.weight is in 2 of the units" in refused(model, [[a], [b], [c]], mesh)
    _, shards = zero.make_buckets(model, [[a, b], [c]], mesh)
    assert list(shards) == ["a.weight", "a.bias", "b.bias", "c.weight", "c.bias"]
    a.weight = nn.Parameter(a.weight.detach().clone())
    b.requires_grad_(False)
    units = [[a], [b], [nn.Dropout(), c.weight], [c.bias]]  # frozen ones, and none, and parameters
    _, shards = zero.make_buckets(model, units, mesh)
    assert list(shards) == ["a.weight", "a.bias", "c.weight", "c.bias"]
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    assert "scale has no rows to split, its shape is ()" in refused(
        model, [*units, [model.scale]], mesh)

    # At most two buckets are on their way: while one is used, the next two.
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    buckets, _ = zero.make_buckets(model, [[layer] for layer in model], mesh)
    zero.start_gathering(buckets)
    moving = []
    for layer in model:
        layer.register_forward_hook(
            lambda *_: moving.append([i for i, bucket in enumerate(buckets) if bucket.all_gather])
        )
    model(torch.ones(1, 6))
    assert moving == [[1, 2], [2, 3], [3, 4], [4, 5], [5], []], moving

    # A module of the unit must be called: otherwise its parameters would be used as they were.
    model = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abc"})
    layers = nn.ModuleList([model["a"], model["b"]])  # a container, which is never called
    buckets, _ = zero.make_buckets(model, [[layers], [model["c"]]], mesh)
    zero.start_gathering(buckets)
    x = torch.ones(1, 6)
    try:
        (model["b"](model["a"](x)) + x @ model["c"].weight + model["c"].bias).sum().backward()
    except SettingError as error:
        assert "were used without a call" in str(error)
    else:
        raise AssertionError("stale parameters were used")
    # A bucket's gradients exist twice while they are copied. Over one rank they are not averaged.
    n = dist.get_world_size()
    model, called, reduce_scatter = nn.Linear(64, 64), [], zero.reduce_scatter_single
    (bucket,), _ = zero.make_buckets(model, [[model]], mesh)
    zero.reduce_in_backward([bucket], False)
    counter = StepCounter(torch.optim.SGD(model.parameters()), [model])
    with counter:
        model(torch.ones(1, 64)).sum().backward()
        counter.peak.clear()
        whole = zero.take_gradients(bucket)
    assert counter.peak["in all"] == 3 * 4 * (64 * 64 + 64) and whole.shape == (n, 4160 // n)
    assert model.weight.grad is None and counter.now["gradients"] == 0
    zero.reduce_scatter_single = lambda own, whole, op, *args, **kwargs: (
        called.append(op), reduce_scatter(own, whole, op, *args, **kwargs)
    )[1]
    zero.reduce_in_backward([bucket], True)
    model(torch.ones(1, 64)).sum().backward()
    assert called == [dist.ReduceOp.AVG if n > 1 else dist.ReduceOp.SUM], called
    print("all units are right" if dist.get_rank() == 0 else "", flush=True)


launch(main)
