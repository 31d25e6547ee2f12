"""On several ranks, claims about checkpoints and initial weights: ranks.py CLAIMS --out FOLDER."""

import itertools
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import common.materialise
from common.errors import SettingError
from common.launch import launch
from common.materialise import local_slices, materialise
from common.model import ModelConfig
from common.services import checkpoint, stored


def checkpoints_of(folder, tensors, **options):
    trained = [tensor for tensor in tensors.values() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    return checkpoint.Checkpoints(folder, ({}, {}), tensors, optimizer, stop=9, **options)


def buffers_agree(folder, rank):
    """Buffers that differ are saved as the first rank that holds them has them, whatever their
    type. Ranks 0 and 1 hold other buffers than ranks 2 and 3, as stages of a pipeline do."""
    types = [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.float32]
    tensors = {
        f"stage{rank // 2}.buffer{i}": torch.full((2, 3), 10 * (rank % 2) + i).to(dtype).T
        for i, dtype in enumerate(types)
    }
    tensors["everywhere"] = torch.full((), float(rank))
    tensors["weight"] = nn.Parameter(torch.zeros(2))
    checkpoints = checkpoints_of(folder, tensors)
    checkpoints.resume()
    checkpoints.save(1)
    assert tensors["everywhere"] == 0  # this run goes on with what a resumed run starts from
    found = stored.read(folder / "step-00000001")
    assert len(found) == 14 and found["everywhere"] == 0
    for stage, (i, dtype) in itertools.product((0, 1), enumerate(types)):
        assert torch.equal(found[f"stage{stage}.buffer{i}"], torch.full((3, 2), i).to(dtype))


def rank_0_decides(folder, rank):
    """Rank 1 sees another newest checkpoint than rank 0, as on a network file system: both load
    what rank 0 sees."""
    weight = nn.Parameter(torch.zeros(2))
    first = checkpoints_of(folder, {"weight": weight}, keep=9)
    first.resume()
    for step in (1, 2, 3):
        with torch.no_grad():
            weight.fill_(step)
        first.save(step)
    listed = checkpoint.list_checkpoints
    if rank == 1:
        checkpoint.list_checkpoints = lambda folder: listed(folder)[:-1]
    assert checkpoints_of(folder, {"weight": weight}).resume() == 3 and (weight == 3).all()


def two_folders_are_noticed(folder, rank):
    """Each rank has a folder of its own, with a checkpoint of the same step."""
    own = folder / str(rank)
    weight = nn.Parameter(torch.full((2,), float(rank)))
    alone, dist.is_initialized = dist.is_initialized, lambda: False
    checkpoints = checkpoints_of(own, {"weight": weight})
    checkpoints.resume()
    checkpoints.save(3)
    checkpoints.lock.close()
    dist.is_initialized = alone
    try:
        checkpoints_of(own, {"weight": weight}).resume()
    except SettingError as error:
        assert "is not one folder for all machines" in str(error), error
    else:
        raise AssertionError("the ranks mix two checkpoints")


def a_failure_reaches_all_ranks(folder, rank):
    """What only one rank can know is an error on all, and leaves the checkpoint before it."""
    weight = nn.Parameter(torch.zeros(2))
    checkpoints = checkpoints_of(folder, {"weight": weight}, every=1)
    checkpoints.resume()
    checkpoints.after_step(0, torch.tensor(1.0))
    for norm, value in ((1.0, float("inf")), (float("nan"), 0.0)):
        with torch.no_grad():
            weight.fill_(value if rank == 1 else 0.0)
        try:
            checkpoints.after_step(1, torch.tensor(norm if rank == 1 else 1.0))
        except SettingError as error:
            name = "model.weight" if value else "a gradient norm"
            assert f"step 2 is not saved, since {name} is not finite" in str(error), error
        else:
            raise AssertionError("the step was saved")
    checkpoints.finish()
    assert [path.name for path in folder.glob("step-*")] == ["step-00000001"]


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.config = ModelConfig()
        self.x = nn.Linear(shape[1], shape[0], bias=False, device="meta")

    def forward(self, inputs):
        return self.x(inputs)


def initial_weights_are_parts_of_the_same(folder, rank):
    """Every way to shard a matrix gives its part of the same whole weight, and no rank draws more
    blocks of rows than it holds."""
    drawn, randn = [], torch.randn

    def count(rows, *rest, **options):
        drawn.append(rows)
        return randn(rows, *rest, **options)

    common.materialise.torch.randn = count
    shapes, cases = [(200, 48), (128, 64), (7, 24), (1, 8), (65, 16)], 0
    for shape, (dp, tp), replicate, style in itertools.product(
        shapes, [(4, 1), (2, 2), (1, 4)], (1, 2), (ColwiseParallel, RowwiseParallel)
    ):
        if dp % replicate or (tp > 1 and (shape[0] % tp or shape[1] % tp)):
            continue
        whole, model = Model(shape), Model(shape)
        materialise(whole, "cpu", 3)
        mesh = init_device_mesh("cpu", (replicate, dp // replicate, tp),
                                mesh_dim_names=("replicate", "shard", "tp"))
        if tp > 1:
            parallelize_module(model, mesh["tp"], {"x": style()}, src_data_rank=None)
        fully_shard(model, mesh=mesh["shard"] if replicate == 1 else mesh["replicate", "shard"])
        drawn.clear()
        materialise(model, "cpu", 3)
        rows, _ = local_slices(model.x.weight)
        assert sum(drawn) <= rows.stop - rows.start + 2 * 63, (shape, drawn, rows)
        assert torch.equal(model.x.weight.full_tensor(), whole.x.weight), (shape, dp, tp)
        cases += 1
    assert cases > 30


def main():
    dist.init_process_group("gloo")
    *claims, _, folder = sys.argv[1:]
    for claim in claims:
        globals()[claim](pathlib.Path(folder, claim), dist.get_rank())
        if dist.get_rank() == 0:
            print(f"{claim} holds", flush=True)


launch(main)
