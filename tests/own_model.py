"""On two ranks, what the scripts' functions do with other models."""

import copy
import pathlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import fsdp
import tp
from common.errors import SettingError
from common.launch import launch


class Patches(nn.Module):
    """Images (B, 1, 4, 4) and float angles; the angles go into the layer."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Conv2d(1, 8, 2, 2), Turn()
        self.cls_token = nn.Parameter(torch.zeros(8))

    def forward(self, images):
        angles = torch.arange(4, dtype=torch.float32) + 256.5  # bfloat16 has no such numbers
        return self.layer(self.first(images).flatten(2).mT + self.cls_token, angles)


class Turn(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.types = set()

    def forward(self, x, angles):
        self.types.add((x.dtype, angles.dtype))
        return super().forward(x) * angles.cos()[:, None].to(x.dtype)


def fsdp_casts_images_once(mesh):
    """The images of a user are float32. Angles that the model gives to its layer stay float32."""
    torch.manual_seed(0)
    model = Patches()
    fsdp.shard(model, [[model.layer]], mesh, dtype=torch.bfloat16)
    images = torch.randn(2, 1, 4, 4)
    out = model(images)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and images.dtype == torch.float32
    assert model.layer.types == {(torch.bfloat16, torch.float32)}
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in "ab")

    def forward(self, x):
        x = self.embed(x)
        for up, down in self.blocks:
            x = x + down(up(x))
        return x


def a_plan_reaches_all_of_the_model(mesh):
    good = {"embed": tp.Replicated(), "blocks.*.0": ColwiseParallel(),
            "blocks.*.1": RowwiseParallel()}

    def refused(match, plan, model=None, whole=None):
        with pytest.raises(SettingError, match=match):
            tp.parallelize(model or Net(), mesh, plan, whole)

    tp.parallelize(Net(), mesh, good)
    stage = Net()
    del stage.blocks[0]
    stage.embed = nn.Identity()  # as pp.keep_stage leaves a stage
    tp.parallelize(stage, mesh, good, Net())
    refused("the plan names block.1.0, but the model has no such", good | {"block.1.0": None})
    refused(r"the plan names b\*0.1, but the model has", good | {"b*0.1": None})  # * is no dot
    refused("the plan does not reach embed.weight: add its module", {
        pattern: style for pattern, style in good.items() if pattern != "embed"
    })
    model = Net()
    model.blocks[1].gate = nn.Parameter(torch.ones(4))
    refused("the plan does not reach blocks.1.gate: add its module", good, model)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def forward(self, *inputs):  # tensors, and a number that is none
        return self.weight if not inputs else inputs[0] * self.weight + inputs[1] * inputs[2]


def replicated_modules_take_all_inputs(mesh):
    model = nn.Sequential(Shift())
    tp.parallelize(model, mesh, {"0": tp.Replicated()})
    x = torch.tensor([1.0, 2.0])
    assert model[0](x, x, 10).tolist() == [13, 26] and model[0]().tolist() == [3, 3]


def replicated_modules_take_dtensors(mesh):
    """Whatever their layout: all ranks compute the same."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 6, 4)
    expected = model(x)
    tp.parallelize(model, mesh, {"0": tp.Replicated()})
    for placement in (Replicate(), Shard(1), Shard(2)):
        torch.testing.assert_close(model(distribute_tensor(x, mesh, [placement])), expected)


def a_mean_over_positions_that_are_split(mesh):
    """Each rank computes the loss from all positions, so its part of the loss is 1/n."""
    torch.manual_seed(0)
    whole, x, n = nn.Linear(4, 4).double(), torch.randn(2, 12, 4).double(), mesh.size()
    model = copy.deepcopy(whole)
    whole(x).mean(1).square().sum().backward()
    part = x.chunk(n, dim=1)[mesh.get_local_rank()]
    sums = DTensor.from_local(model(part).sum(1), mesh, [Partial()])
    mean = sums.full_tensor(grad_placements=[Partial()]) / x.shape[1]
    (mean.square().sum() / n).backward()
    dist.all_reduce(model.weight.grad)  # as cp.py does
    torch.testing.assert_close(model.weight.grad, whole.weight.grad)


class Scaled(nn.Linear):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


def inputs_that_a_style_would_drop_are_refused(mesh):
    """PyTorch's styles pass on the first positional input only, and all keywords."""
    for style in (ColwiseParallel(), RowwiseParallel(),
                  SequenceParallel(sequence_dim=0, use_local_output=True)):
        model = nn.Sequential(Scaled(4, 4))
        tp.parallelize(model, mesh, {"0": style})
        x = torch.ones(6, 2 if isinstance(style, RowwiseParallel) else 4)
        torch.testing.assert_close(model[0](x, scale=3.0), 3 * model[0](x))
        with pytest.raises(SettingError, match="Scaled was called with 2 inputs by position"):
            model[0](x, 3.0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.norm = nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.norm(self.middle(x))
        return F.linear(x, self.embed.weight)


def what_torch_says_is_in_the_table(mesh):
    """docs/when-it-fails.md has these messages, and what to do. Then the gradients are right."""
    tokens = torch.arange(8).view(2, 4)
    table = pathlib.Path(__file__).parents[1].joinpath("docs/when-it-fails.md").read_text()

    def refused(kind, words, do):
        assert f"`{words}`" in table, words
        with pytest.raises(kind, match=words):
            do()

    model = Tied()
    fsdp.shard(model, [[model.embed], [model.middle, model.norm]], mesh)
    refused(RuntimeError, "got mixed torch.Tensor and DTensor", lambda: model(tokens))
    whole = Tied()
    model = copy.deepcopy(whole)
    fsdp.shard(model, [[model.middle, model.norm]], mesh)  # the rest stays gathered
    model(tokens).square().sum().backward()
    whole(tokens).square().sum().backward()
    torch.testing.assert_close(model.embed.weight.grad.full_tensor(), whole.embed.weight.grad)

    refused(RuntimeError, "local_tensor argument only accepts torch.Tensor but got",
            lambda: DTensor.from_local(model.embed.weight, mesh))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    refused(NotImplementedError, "does not have a sharding strategy", optimizer.step)

    class PostNorm(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    whole, x = PostNorm(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)), torch.randn(2, 4, 4)
    for norm in (SequenceParallel(), SequenceParallel(use_local_output=True)):
        model = copy.deepcopy(whole)
        tp.parallelize(model, mesh, {
            "0": ColwiseParallel(input_layouts=Shard(1)),
            "1": RowwiseParallel(output_layouts=Shard(1)), "2": norm,
        })
        part = x.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
        if not norm.use_local_output:
            refused(RuntimeError, "got mixed torch.Tensor and DTensor", lambda: model(part))
    model(part).square().sum().backward()
    tp.redistribute_gradients(model, mesh.get_group())
    whole(x).square().sum().backward()
    for parameter, expected in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


def positions_that_cannot_be_split_are_refused(mesh):
    for pattern, style in (
        ("embed", RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))),
        ("blocks.*.1", RowwiseParallel(output_layouts=Shard(1))),
    ):
        model = Net()
        tp.parallelize(model, mesh, {
            "embed": tp.Replicated(), "blocks.*.0": ColwiseParallel(),
            "blocks.*.1": RowwiseParallel(), pattern: style,
        })
        module = model.embed if pattern == "embed" else model.blocks[1]
        inputs = (lambda T: torch.zeros(2, T, dtype=torch.int64)) if pattern == "embed" else (
            lambda T: torch.zeros(2, T, 4))
        assert module(inputs(16)).shape[1] == 8
        with pytest.raises(SettingError, match="15 positions cannot be split over 2 tensor-para"):
            module(inputs(15))


def main():
    dist.init_process_group("gloo")
    for claim in (fsdp_casts_images_once, a_plan_reaches_all_of_the_model,
                  replicated_modules_take_all_inputs, replicated_modules_take_dtensors,
                  inputs_that_a_style_would_drop_are_refused, a_mean_over_positions_that_are_split,
                  what_torch_says_is_in_the_table, positions_that_cannot_be_split_are_refused):
        claim(init_device_mesh("cpu", (dist.get_world_size(),)))
    print("all claims hold", flush=True)


if __name__ == "__main__":
    launch(main)
