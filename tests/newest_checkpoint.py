"""On each of 2 ranks: rank 1 sees another newest checkpoint than rank 0, as on a network file
system, and both load what rank 0 sees; what rank 1 does not see yet it waits for."""

import pathlib
import sys
import threading
import time

import torch
import torch.distributed as dist

from common import checkpoint
from common.launch import launch, start_process_group


def main():
    start_process_group()
    rank = dist.get_rank()
    folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight])

    def checkpoints():
        return checkpoint.Checkpoints(folder, {}, {"weight": weight}, optimizer, stop=9, keep=9)

    first = checkpoints()
    first.resume()
    for step in (1, 2, 3):
        with torch.no_grad():
            weight.fill_(step)
        first.save(step)
    listed = checkpoint.list_checkpoints
    if rank == 1:
        checkpoint.list_checkpoints = lambda folder: listed(folder)[:-1]
    assert checkpoints().resume() == 3 and (weight == 3).all()

    if rank == 0:
        (folder / "step-00000003").rename(folder / "hidden")
        checkpoint.list_checkpoints = lambda folder: [folder / "step-00000003"]
        appear = threading.Thread(target=lambda: (
            time.sleep(1), (folder / "hidden").rename(folder / "step-00000003")
        ))
        appear.start()
    dist.barrier()
    with torch.no_grad():
        weight.fill_(0)
    assert checkpoints().resume() == 3 and (weight == 3).all()
    print("rank 0 decides" if rank == 0 else "", flush=True)


launch(main)
