"""zero.py: its units and buckets. Curves, bytes, collectives, and how many buckets are whole at a
time: test_same_run.py."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero
from common.options import SettingError
from common.run import Run
from tests.support import inject
from tests.support.on_ranks import on_ranks


def three(names="abc"):
    model = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})
    return model, *model.values()


def refused(words, model, units, mesh):
    with pytest.raises(SettingError, match=words):
        zero.make_buckets(model, units, mesh)


@on_ranks(2)
def test_shards_carry_the_names_of_their_parameters(mesh):
    """In any order of the units. A parameter in no unit, or in two, is refused."""
    model, a, b, c = three()
    _, shards = zero.make_buckets(model, [[c], [a, b]], mesh)
    for name, parameter in model.named_parameters():
        assert shards[name].full_tensor().equal(parameter.detach()), name
    refused("c.weight is in 0 of the units", model, [[a, b]], mesh)
    a.weight = b.weight
    refused("a.weight is in 2 of the units", model, [[a], [b], [c]], mesh)
    _, shards = zero.make_buckets(model, [[a, b], [c]], mesh)
    assert list(shards) == ["a.weight", "a.bias", "b.bias", "c.weight", "c.bias"]
    a.weight = nn.Parameter(a.weight.detach().clone())
    b.requires_grad_(False)
    units = [[a], [b], [nn.Dropout(), c.weight], [c.bias]]  # frozen ones, and none, and parameters
    _, shards = zero.make_buckets(model, units, mesh)
    assert list(shards) == ["a.weight", "a.bias", "c.weight", "c.bias"]
    for shape in (), (0, 4):
        model.scale = nn.Parameter(torch.ones(shape))
        refused("scale has no rows to split, its shape is ", model, [*units, [model.scale]], mesh)


@on_ranks(2)
def test_a_module_of_the_unit_must_be_called(mesh):
    """Otherwise its parameters would be used as they were. For a container the model waits."""
    model, a, b, c = three()
    layers = nn.ModuleList([a, b])  # a container, which is never called
    buckets, _ = zero.make_buckets(model, [[layers], [c]], mesh)
    x, model.forward = torch.ones(1, 6), lambda x: c(b(a(x)))
    zero.start_gathering(buckets)
    zero.reduce_in_backward(buckets, True)
    model(x).sum().backward()
    zero.reduce_gradients(buckets)
    zero.start_gathering(buckets)
    with pytest.raises(SettingError, match="was used without a call"):
        (b(a(x)) + x @ c.weight + c.bias).sum().backward()


@on_ranks(2)
def test_what_no_rank_uses_in_a_step_gets_no_gradient(mesh, rank):
    """As in one process: AdamW leaves it as it is. What one rank uses gets one. A gradient that
    comes after its bucket is refused."""
    model, *modules = three("abcde")
    buckets, shards = zero.make_buckets(model, [[module] for module in modules], mesh)
    x = torch.ones(1, 6)
    for micro_batches, expected in (
        (["abcde"], dict.fromkeys("abcde", 1)), (["ae"[rank]], {"a": 0.5, "e": 0.5}),
        (["ab" + "c"[rank:], "abc"], {"a": 2, "b": 2, "c": 1.5}),
    ):
        zero.start_gathering(buckets)
        for used in micro_batches:
            zero.reduce_in_backward(buckets, enabled=True)
            sum(model[name](x).sum() for name in used).backward()
        zero.reduce_gradients(buckets)
        for name, shard in shards.items():
            gradient, shard.grad = shard.grad, None
            if name[0] in expected:
                assert (gradient.full_tensor() == expected[name[0]]).all(), name
            else:
                assert gradient is None, name
    model["a"](x).sum().backward()
    with pytest.raises(SettingError, match=r"\(6, 6\) arrived after its bucket was reduced"):
        zero.reduce_gradients(buckets)


@on_ranks(2)
def test_ranks_of_another_group_are_not_asked(rank):
    """A mesh of one rank, which uses other modules than its neighbour. A parameter is a unit."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))["shards"]
    model, a, b, c = three()
    buckets, shards = zero.make_buckets(model, [[a], [b], [c.weight, c.bias]], mesh)
    x, model.forward = torch.ones(1, 6), lambda used: sum(model[name](x).sum() for name in used)
    with mock.patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as sums:
        for used in "ab"[rank] + "c", "abc":
            zero.start_gathering(buckets)
            zero.reduce_in_backward(buckets, enabled=True)
            model(used).backward()
            zero.reduce_gradients(buckets)
            for name, shard in shards.items():
                found, shard.grad = shard.grad, None
                assert (found is None) == (name[0] not in used)
                expected = torch.ones_like(model.get_parameter(name))
                assert found is None or torch.equal(found.to_local(), expected)
    assert {call.args[2] for call in sums.call_args_list} == {dist.ReduceOp.SUM}


@on_ranks(2)
def test_the_next_two_buckets_are_on_their_way(mesh):
    model, *modules = three()
    buckets, _ = zero.make_buckets(model, [[module] for module in modules], mesh)
    zero.start_gathering(buckets)
    assert [bool(bucket.all_gather) for bucket in buckets] == [True, True, False]
    modules[0](torch.ones(1, 6))
    assert [bool(bucket.all_gather) for bucket in buckets] == [False, True, True]
    zero.wait_for_parameters(buckets)


@on_ranks(2)
def test_parameters_are_whole_after_the_loop():
    """On both ranks, for whoever reads them."""
    runs = []
    inject.before(Run, "steps", lambda run, _: runs.append(run))
    zero.main(f"--hidden-size 48 --steps 2 --batch-size 2 --data {__file__}".split())
    for parameter in runs[0].models[0].parameters():
        of_rank_0 = parameter.detach().clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(parameter, of_rank_0)
