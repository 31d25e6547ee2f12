"""Data parallel: every rank holds the whole model and trains it on its share of each batch.

Split: the batch. Replicated: parameters, gradients, optimizer states. Use it if all of these fit on
one device: it is the simplest strategy. (DDP, arXiv:2006.15704)

    torchrun --nproc_per_node=2 ddp.py
    torchrun --nproc_per_node=8 ddp.py --model small --dtype bfloat16 --compile --lr 1e-3
    torchrun --nproc_per_node=8 ddp.py --data my_tokens.bin --vocab-size 50304 --out runs/mine

Sent in a step: one all-reduce of the gradients, in buckets. It runs during the backward pass of the
last micro-batch: a bucket is sent while the gradients of the next one are computed. In a ring, each
of n ranks sends 2P(n-1)/n, where P is the bytes of the gradients, whatever the batch size. And one
number is all-reduced: how many targets the global batch has (8 bytes).
Exposed, as nothing is left to compute meanwhile: the last bucket, with the gradients of the first
layers.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from common.arguments import all_options, argument_parser, describe, parse_arguments, run_settings
from common.checkpoint import Checkpoints
from common.data import BatchSampler, TokenDataset, fingerprint, load_batches
from common.huggingface import load_weights
from common.launch import launch, start_process_group
from common.metrics import Metrics
from common.model import (
    Transformer, checkpoint_activations, compile_layers, init_weights, materialise
)
from common.optimizer import (
    decay_groups, learning_rate, set_learning_rate, skip_if_not_finite
)
from common.seed import seed_step
from common.validation import Validation


def main(argv=None):
    # Arguments
    args = parse_arguments(argument_parser(__doc__), argv)

    # Start-up
    device = start_process_group(
        args.device, args.backend, args.timeout, args.out, all_options(args)
    )
    n = dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("dp",))

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed
    # Your own model: torch.manual_seed(args.seed), then MyModel().to(device), in place of the meta
    # device, materialise and init_weights; its initial values, buffers and ties stay as they are.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()
    if args.compile:
        torch._dynamo.config.optimize_ddp = False  # it would cut the graph of a layer at 25 MB
        compile_layers(layers)
    if args.activation_checkpointing:
        checkpoint_activations(layers)
    materialise(model, device)
    init_weights(model, args.seed)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)  # DDP: call this

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), betas=(args.beta1, args.beta2),
        fused=True,
    )

    # Data
    dataset = TokenDataset(args.data, args.seq_len, args.token_dtype, args.config.vocab_size)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps, mesh=mesh
    )
    batches = load_batches(dataset, sampler, device, args.workers)
    held_out = args.val_data and TokenDataset(
        args.val_data, args.seq_len, args.token_dtype, args.config.vocab_size, "--val-data"
    )
    validation = Validation(
        held_out, sampler, device, args.val_every, args.val_batches, args.workers
    )

    # Resume: the step number is the only state of the data
    run, may_change = run_settings(args, vars(args.config), fingerprint(dataset))
    checkpoints = Checkpoints(
        args.out, run, model.state_dict(keep_vars=True), optimizer,
        stop=args.steps, may_change=may_change, every=args.save_every, keep=args.keep,
        resume=args.resume, in_background=args.async_save, check_replicas=args.check_replicas,
    )
    sampler.start = checkpoints.resume()
    if args.init_from and not sampler.start:  # a resumed run has the weights of its checkpoint
        load_weights(model, args.init_from)

    # Loop
    loggers = []
    if args.wandb or args.tensorboard:
        from common.loggers import start_loggers
        loggers = start_loggers(args.out, vars(args), sampler.start, args.wandb, args.tensorboard)
    metrics = Metrics(
        args.out, optimizer, [model, *layers], [describe(args, model), sampler, dataset],
        start=sampler.start, stop=args.steps, tokens_per_step=args.batch_size * args.seq_len,
        device=device, mesh=mesh, log_every=args.log_every, profile=args.profile, loggers=loggers,
        flops_per_token=args.config.flops_per_token(args.seq_len), peak_tflops=args.peak_tflops,
    )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    zeros = torch.zeros(
        args.batch_size // (n * args.grad_accum), args.seq_len, dtype=torch.int64, device=device
    )
    with autocast:
        arrange_buckets(replica, lambda: replica(zeros, zeros))
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        seed_step(args.seed, step, sampler.rank)  # DDP: each rank has its own dropout
        lr = learning_rate(step, args.lr, args.steps, args.warmup_steps, args.min_lr)
        set_learning_rate(optimizer, lr)
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # averaged over ranks
        batch = [next(batches) for _ in range(args.grad_accum)]
        count = count_targets(batch, dist.group.WORLD)  # DDP: of all ranks
        for micro_batch, (inputs, targets) in enumerate(batch):  # (B/dp/accum, T)
            # DDP: gradients add up on each rank; the last backward pass averages them over ranks.
            last = micro_batch == args.grad_accum - 1
            with contextlib.nullcontext() if last else replica.no_sync():
                with autocast:  # DDP: times n, since gradients are averaged over n ranks
                    micro_loss = replica(inputs, targets) * n / count
                micro_loss.backward()
            loss += micro_loss.detach()

        metrics.after_backward(step)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        skip_if_not_finite(optimizer, grad_norm, step)
        optimizer.step()
        optimizer.zero_grad()

        if metrics.due(step) or checkpoints.due(step):
            # DDP: every rank's loss has the factor n, so that their average is the mean.
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            metrics.log(step, loss, grad_norm, lr)
        metrics.end_step(step)
        if validation.due(step):
            with metrics.pause(), autocast:
                metrics.log_validation(step, validation.loss(model))
        if checkpoints.after_step(step):
            break

    checkpoints.finish()
    return metrics.close(**theory(sum(p.nbytes for p in model.parameters()), n))


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
