"""ddp.py with a ConvNet: images, BatchNorm, SGD with a scheduler, the accuracy on a held-out set.

    torchrun --nproc_per_node=2 examples/ddp_convnet.py --steps 150 --lr 0.05
"""

import contextlib
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

sys.path.insert(1, str(pathlib.Path(__file__).parents[1]))  # where common/ is
from common.data import BatchSampler, load_steps
from common.launch import launch, start_process_group
from common.model import compute_in_bfloat16
from common.options import option_parser, parse_options
from common.run import Run  # optional: delete it, and every statement that uses it or ``run``
from common.step import count_targets, evaluating, seed_step


def main(argv=None):
    parser = option_parser(__doc__)
    Run.add_options(parser)
    args = parse_options(parser, argv)
    device = start_process_group(args)
    n = dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("dp",))

    # Model: built whole on every rank, with the same seed
    torch.manual_seed(args.seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 4)
    ).to(device, args.param_dtype)
    if args.bfloat16:
        compute_in_bfloat16(model, device)
    # DDP: train by calling replica, not model: otherwise nothing averages the gradients
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)

    # Optimizer
    # Under FSDP or TP use fused=False: torch has no fused SGD for DTensors.
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)

    # Data
    dataset = bars(2000, args.seed, args.param_dtype)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=mesh,  # DDP: each rank reads its own samples
    )

    # Resume: the step number is the only state of the data
    run = Run(args, model, optimizer, sampler, dataset, device, mesh)
    sampler.start = run.resume()
    scheduler = LambdaLR(optimizer, lambda done: 1 - (sampler.start + done) / args.steps)

    # Loop
    # DDP: the first backward pass arranges the buckets: now, so that a resume has the same bits
    with evaluating(model):
        replica(torch.zeros(1, 1, 8, 8, dtype=args.param_dtype, device=device)).sum().backward()
    replica.zero_grad()
    for step, batch in run.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, sampler.rank)  # DDP: each rank has its own dropout
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch, dist.group.WORLD)  # DDP: of all ranks
        for i, (inputs, targets) in enumerate(batch):  # (B/dp/accum, 1, 8, 8)
            # DDP: gradients add up on each rank; the last backward pass averages them over ranks.
            last = i == args.grad_accum - 1
            with contextlib.nullcontext() if last else replica.no_sync():
                # As .float(), but --dtype float64 stays: a loss in bfloat16 has 3 digits.
                logits = replica(inputs).to(args.param_dtype)
                micro_loss = F.cross_entropy(logits, targets, reduction="sum") / count
                (micro_loss * n).backward()  # DDP: times n, since gradients are averaged over ranks
            loss += micro_loss.detach()

        # DDP: refuse a step that left out a parameter. Nothing public does before the next step.
        replica._check_reducer_finalized()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        for statistics in model.buffers():
            dist.broadcast(statistics, 0)  # DDP: BatchNorm keeps those of rank 0
        run.after_step(step, loss, grad_norm)
        scheduler.step()
    images, labels = bars(400, args.seed + 1, args.param_dtype)[sampler.rank :: n]
    right = (model.eval()(images.to(device)).argmax(-1) == labels.to(device)).sum()
    dist.all_reduce(right)
    if sampler.rank == 0:
        print(f"accuracy on the held-out set: {right.item() / 400:.3f}")
    return run.history


def bars(number, seed, dtype):
    """Images (1, 8, 8) of a line in noise; the class is its direction, one of 4."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    labels, places = torch.randint(8, (2, number), generator=generator)
    lines = (torch.stack([y, x, y + x, y - x]) % 8)[labels % 4] == places[:, None, None]
    images = 2 * lines + torch.randn(lines.shape, generator=generator)
    return TensorDataset(images[:, None].to(dtype), labels % 4)


if __name__ == "__main__":
    launch(main)
