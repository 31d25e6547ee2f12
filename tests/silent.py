"""On two ranks: rank 1 is silent, and rank 0 waits for it in a group of a mesh whose timeout was
torch's default until ``set_timeout`` changed it."""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from common.launch import launch, set_timeout


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    group = mesh.get_group("cp")
    dist.all_reduce(torch.ones(1), group=group)  # they are connected
    set_timeout(mesh, 1)
    began = time.monotonic()
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        assert "imed out" in str(error) or "timeout" in str(error), error
        print(f"gave up after {time.monotonic() - began:.0f} seconds", flush=True)
    else:
        assert dist.get_rank() == 1, "rank 0 went on alone"
        time.sleep(5)


launch(main)
