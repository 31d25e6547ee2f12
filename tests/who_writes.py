"""On each of 4 ranks, three saves in the background: of equal tensors one rank writes each, all
ranks about as much; they are staged in memory that is allocated once; what is saved is the value at
the time of saving. One plan serves all saves, and old checkpoints are removed in another thread."""

import shutil
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from common import checkpoint
from common.launch import launch, start_process_group


def main():
    start_process_group()
    rank, folder = dist.get_rank(), sys.argv[sys.argv.index("--out") + 1]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    tensors = {f"copy{i}": nn.Parameter(torch.randn(8, 8)) for i in range(8)}
    for i in range(4):  # as in hybrid sharding: each half on two ranks
        whole = torch.randn(8, 8)
        tensors[f"half{i}"] = nn.Parameter(
            distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        )
    optimizer = torch.optim.AdamW(tensors.values(), foreach=False)
    checkpoints = checkpoint.Checkpoints(
        folder, {}, tensors, optimizer, stop=9, keep=1, in_background=True
    )
    checkpoints.resume()

    plans, make_plan = [], DefaultSavePlanner._create_global_plan
    DefaultSavePlanner._create_global_plan = lambda *args: plans.append(1) or make_plan(*args)
    removers, remove = [], shutil.rmtree
    checkpoint.shutil.rmtree = lambda path, **kwargs: (
        removers.append(threading.current_thread()), remove(path, **kwargs)
    )
    addresses = set()
    for step in (1, 2, 3):
        for parameter in tensors.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        checkpoints.save(step)
        staged = {name: checkpoint._local(tensor) for name, tensor in checkpoints.staged.items()}
        addresses.add(tuple(tensor.data_ptr() for tensor in staged.values()))
        saved = {name: tensor.clone() for name, tensor in staged.items()}
        for parameter in tensors.values():  # the next step begins while the save still runs
            parameter.detach().mul_(2)
    checkpoints.finish()

    assert len(addresses) == 1
    weights = {name for name in staged if name.startswith("model.")}
    of_all = [None] * 4
    dist.all_gather_object(of_all, weights)
    assert sorted(map(len, of_all)) == [4, 4, 4, 4], of_all  # 8 whole ones and 4 x 2 halves
    names = sorted(name for names in of_all for name in names)
    assert names == sorted(
        [f"model.copy{i}" for i in range(8)] + 2 * [f"model.half{i}" for i in range(4)]
    )
    # Each with its optimizer states
    assert len(staged) == 4 * 4, staged.keys()

    found = checkpoint.read(f"{folder}/step-00000003", prefix="")
    for name, tensor in saved.items():
        if "copy" in name:
            assert torch.equal(found[name], tensor), name
    if rank == 0:
        assert len(plans) == 1, plans
        assert len(removers) == 2 and threading.main_thread() not in removers
        assert [path.name for path in checkpoint.list_checkpoints(folder)] == ["step-00000003"]
        print("each is written once", flush=True)


launch(main)
