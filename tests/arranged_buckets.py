"""On each rank: arrange_buckets of ddp.py leaves buffers and random state as they were."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp
from common.launch import launch, start_process_group


def main():
    start_process_group()
    replica = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    )
    torch.manual_seed(3)
    before = torch.get_rng_state()
    zeros = torch.zeros(8, 4)
    ddp.arrange_buckets(replica, lambda: replica(zeros + 1).square().mean())
    assert torch.equal(before, torch.get_rng_state())
    norm = replica.module[1]
    assert (norm.running_mean == 0).all() and (norm.running_var == 1).all()
    assert norm.num_batches_tracked == 0
    assert all(p.grad is None for p in replica.parameters())
    print("no trace" if dist.get_rank() == 0 else "", flush=True)


launch(main)
