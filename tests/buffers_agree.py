"""On each of 4 ranks: buffers that differ are saved as the first rank that holds them has them.
Ranks 0 and 1 hold other buffers than ranks 2 and 3, as stages of a pipeline do."""

import sys

import torch
import torch.distributed as dist

from common import checkpoint
from common.launch import launch, start_process_group


def main():
    start_process_group()
    rank = dist.get_rank()
    stage = rank // 2
    tensors = {f"stage{stage}.buffer{i}": torch.full((3,), 10.0 * rank + i) for i in range(6)}
    tensors["everywhere"] = torch.full((), float(rank))
    folder = sys.argv[sys.argv.index("--out") + 1]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    checkpoints = checkpoint.Checkpoints(folder, {}, tensors, optimizer, stop=9)
    checkpoints.resume()
    checkpoints.save(1)
    found = checkpoint.read(f"{folder}/step-00000001")
    assert len(found) == 13 and found["everywhere"] == 0
    for first in (0, 2):
        for i in range(6):
            assert (found[f"stage{first // 2}.buffer{i}"] == 10 * first + i).all(), found
    print("buffers agree" if rank == 0 else "", flush=True)


launch(main)
