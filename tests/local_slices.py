"""On each of 8 ranks: every way to shard a matrix gets its part of the same whole weight, and no
rank draws more blocks than it holds."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import common.model
from common.launch import launch, start_process_group
from common.model import ModelConfig, init_weights, materialise
from common.slices import local_slices

SHAPES = [(200, 48), (128, 64), (7, 24), (1, 8), (65, 16)]
drawn = []
randn = torch.randn


def count(rows, *rest, **options):
    drawn.append(rows)
    return randn(rows, *rest, **options)


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.config = ModelConfig()
        self.x = nn.Linear(shape[1], shape[0], bias=False, device="meta")

    def forward(self, inputs):
        return self.x(inputs)


def main():
    start_process_group()
    cases = 0
    for shape, (dp, tp), replicate, style in itertools.product(
        SHAPES, [(8, 1), (4, 2), (2, 4), (1, 8)], (1, 2), (ColwiseParallel, RowwiseParallel)
    ):
        if dp % replicate or (tp > 1 and (shape[0] % tp or shape[1] % tp)):
            continue
        whole = Model(shape)
        materialise(whole, "cpu")
        init_weights(whole, 3)
        mesh = init_device_mesh("cpu", (replicate, dp // replicate, tp),
                                mesh_dim_names=("replicate", "shard", "tp"))
        model = Model(shape)
        if tp > 1:
            parallelize_module(model, mesh["tp"], {"x": style()}, src_data_rank=None)
        fully_shard(model, mesh=mesh["shard"] if replicate == 1 else mesh["replicate", "shard"])
        materialise(model, "cpu")
        drawn.clear()
        common.model.torch.randn = count
        init_weights(model, 3, local_slices)
        common.model.torch.randn = randn
        rows, _ = local_slices(model.x.weight)
        assert sum(drawn) <= rows.stop - rows.start + 2 * 63, (shape, drawn, rows)
        assert torch.equal(model.x.weight.full_tensor(), whole.x.weight), (shape, dp, tp)
        cases += 1
    assert cases > 30
    print("all slices are right" if dist.get_rank() == 0 else "", flush=True)


launch(main)
