"""ddp.py with a ConvNet: images, BatchNorm, SGD with a scheduler, the accuracy on a held-out set.

    bash run.sh examples/ddp_convnet.py --steps 150 --lr 0.05
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from common.arguments import all_options, argument_parser, describe, parse_arguments, run_settings
from common.checkpoint import Checkpoints
from common.data import BatchSampler, fingerprint, load_batches
from common.launch import launch, start_process_group
from common.metrics import Metrics
from common.optimizer import skip_if_not_finite
from common.seed import seed_step


def main(argv=None):
    # Arguments
    args = parse_arguments(argument_parser(__doc__, model=False, text=False), argv)

    # Start-up
    device = start_process_group(
        args.device, args.backend, args.timeout, args.out, all_options(args)
    )
    n = dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("dp",))

    # Model: built whole on every rank, with the same seed
    torch.manual_seed(args.seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 4)
    ).to(device, args.param_dtype)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)  # DDP: call this

    # Optimizer
    parameters = [{"params": model.parameters(), "initial_lr": args.lr}]  # for the scheduler
    optimizer = torch.optim.SGD(parameters, args.lr, momentum=0.9, fused=True)

    # Data
    dataset = bars(2000, args.seed, args.param_dtype)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps, mesh=mesh
    )
    batches = load_batches(dataset, sampler, device, args.workers)

    # Resume: the step number is the only state of the data
    run, may_change = run_settings(args, {}, fingerprint(dataset))
    checkpoints = Checkpoints(
        args.out, run, model.state_dict(keep_vars=True), optimizer,
        stop=args.steps, may_change=may_change, every=args.save_every, keep=args.keep,
        resume=args.resume, in_background=args.async_save, check_replicas=args.check_replicas,
    )
    sampler.start = checkpoints.resume()
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / args.steps, sampler.start - 1)

    # Loop
    loggers = []
    if args.wandb or args.tensorboard:
        from common.loggers import start_loggers
        loggers = start_loggers(args.out, vars(args), sampler.start, args.wandb, args.tensorboard)
    metrics = Metrics(
        args.out, optimizer, [model], [describe(args, model), sampler],
        start=sampler.start, stop=args.steps, tokens_per_step=args.batch_size, unit="images",
        device=device, mesh=mesh, log_every=args.log_every, profile=args.profile, loggers=loggers,
    )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    zeros = torch.zeros(
        args.batch_size // (n * args.grad_accum), 1, 8, 8, dtype=args.param_dtype, device=device
    )
    with autocast:
        arrange_buckets(replica, lambda: replica(zeros).sum())
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        seed_step(args.seed, step, sampler.rank)  # DDP: each rank has its own dropout
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # averaged over ranks
        batch = [next(batches) for _ in range(args.grad_accum)]
        count = count_targets(batch, dist.group.WORLD)  # DDP: of all ranks
        for micro_batch, (inputs, targets) in enumerate(batch):  # (B/dp/accum, 1, 8, 8)
            # DDP: gradients add up on each rank; the last backward pass averages them over ranks.
            last = micro_batch == args.grad_accum - 1
            with contextlib.nullcontext() if last else replica.no_sync():
                with autocast:  # DDP: times n, since gradients are averaged over n ranks
                    loss_fn = nn.CrossEntropyLoss(reduction="sum")
                    micro_loss = loss_fn(replica(inputs), targets) * n / count
                micro_loss.backward()
            loss += micro_loss.detach()

        metrics.after_backward(step)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        skip_if_not_finite(optimizer, grad_norm, step)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        if metrics.due(step) or checkpoints.due(step):
            # DDP: every rank's loss has the factor n, so that their average is the mean.
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            metrics.log(step, loss, grad_norm, scheduler.get_last_lr()[0])
        metrics.end_step(step)
        if checkpoints.after_step(step):
            break

    images, labels = bars(400, args.seed + 1, args.param_dtype)[dist.get_rank() :: n]
    right = (model.eval()(images.to(device)).argmax(-1) == labels.to(device)).sum()
    dist.all_reduce(right)
    if dist.get_rank() == 0:
        print(f"accuracy on the held-out set: {right.item() / 400:.3f}")
    checkpoints.finish()
    P = sum(p.nbytes for p in model.parameters())
    return metrics.close(**theory(P, n) | {"optimizer_states": ("P", P)})  # SGD has one state


def bars(number, seed, dtype):
    """Images (1, 8, 8) of a line in noise; the class is its direction, one of 4."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    labels, places = torch.randint(8, (2, number), generator=generator)
    lines = (torch.stack([y, x, y + x, y - x]) % 8)[labels % 4] == places[:, None, None]
    images = 2 * lines + torch.randn(lines.shape, generator=generator)
    return TensorDataset(images[:, None].to(dtype), labels % 4)


def count_targets(batch, group):
    """The number of targets in the micro-batches of a step, without targets of -100. ``group``: the
    ranks that read different samples, over which it is summed. At least 1."""
    count = sum((targets != -100).sum() for _, targets in batch)
    dist.all_reduce(count, group=group)
    return count.clamp(min=1)


def arrange_buckets(replica, compute_loss):
    """Run one forward and backward pass, and drop the gradients.

    DDP rebuilds its buckets after its first backward pass, in the order in which gradients arrived.
    Doing that here, on zeros, gives all steps the same buckets. Otherwise the first step after a
    resume would add gradients in another order than the same step of an uninterrupted run.
    ``compute_loss()`` calls ``replica``, a DistributedDataParallel. Buffers and the random state
    are afterwards as they were before.
    """
    before = [buffer.clone() for buffer in replica.buffers()]
    gpus = {parameter.device for parameter in replica.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(gpus):
        compute_loss().backward()
    replica.zero_grad()
    with torch.no_grad():
        for buffer, value in zip(replica.buffers(), before):
            buffer.copy_(value)


def theory(P, n):
    """Bytes that each of n ranks holds, and sends in a step, for P bytes of parameters: (formula,
    bytes) by kind."""
    return {
        "parameters": ("P", P), "gradients": ("P", P), "optimizer_states": ("2P", 2 * P),
        "sent": ("2(P+8)(n-1)/n", 2 * (P + 8) * (n - 1) / n),
    }


if __name__ == "__main__":
    launch(main)
