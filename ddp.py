"""Data parallel: every rank holds the whole model and trains it on its share of each batch.

Split: the batch. Replicated: parameters, gradients, optimizer states. Use it while all of those fit
on one device: it is the simplest, and the least is sent. (DDP, arXiv:2006.15704)

    torchrun --nproc_per_node=2 ddp.py
    torchrun --nproc_per_node=8 ddp.py --model small --dtype bfloat16 --compile --steps 1000 --lr 1e-3
    torchrun --nproc_per_node=8 ddp.py --data my_tokens.bin --vocab-size 50304 --out runs/mine

Sent in a step: one all-reduce of the gradients, in buckets, while the backward pass of the last
micro-batch is still computing the next ones. A ring sends 2 P (n-1)/n from each of n ranks, P the
bytes of the gradients, whatever the batch.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from common.arguments import argument_parser, parse_arguments
from common.checkpoint import Checkpoints
from common.data import BatchSampler, TokenDataset, load_batches
from common.launch import launch, start_process_group
from common.metrics import Metrics
from common.model import Transformer, checkpoint_activations, compile_layers, init_weights, next_token_loss
from common.optimizer import decay_groups, learning_rate, set_learning_rate


def main(argv=None):
    # Arguments
    args = parse_arguments(argument_parser(__doc__), argv)

    # Start-up
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))

    # Model: built without memory, then materialised, each parameter from a seed of its own
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    if args.compile:
        compile_layers(model)
    if args.activation_checkpointing:
        checkpoint_activations(model)
    model.to_empty(device=device)
    init_weights(model, args.seed)
    parameters = dict(model.named_parameters())
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), betas=(args.beta1, args.beta2), fused=True
    )

    # Data
    dataset = TokenDataset(args.data, args.seq_len, args.token_dtype)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps, mesh=mesh
    )
    batches = load_batches(dataset, sampler, args.config.vocab_size, device, args.workers)

    # Resume: the step is all of the data's state
    checkpoints = Checkpoints(args, sampler, parameters, optimizer)
    sampler.start = checkpoints.resume()

    # Loop
    metrics = Metrics(args, device, model, sampler, optimizer, mesh)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    arrange_buckets(replica, args, device, autocast)
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        lr = set_learning_rate(optimizer, learning_rate(step, args))
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # mean over this rank's share of the batch
        for micro_batch in range(args.grad_accum):
            inputs, targets = next(batches)  # (B/dp/accum, T)
            last = micro_batch == args.grad_accum - 1
            # Gradients add up locally; the last backward averages the sums over the ranks.
            with contextlib.nullcontext() if last else replica.no_sync():
                with autocast:
                    micro_loss = next_token_loss(replica(inputs), targets) / args.grad_accum
                micro_loss.backward()
            loss += micro_loss.detach()

        metrics.after_backward(step)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

        if metrics.due(step):
            dist.all_reduce(loss, dist.ReduceOp.AVG)  # of equal shares: the mean over the batch
            metrics.log(step, loss, grad_norm, lr)
        metrics.end_step(step)
        checkpoints.after_step(step)

    checkpoints.finish()
    P, n = sum(p.nbytes for p in model.parameters()), mesh.size()
    return metrics.close(
        parameters=("P", P), gradients=("P", P), optimizer_states=("2P", 2 * P),
        sent=("2P(n-1)/n", 2 * P * (n - 1) / n),
    )


def arrange_buckets(replica, args, device, autocast):
    """One backward pass on zeros. By the first one DDP learns in which order the gradients come, and arranges
    its buckets anew; were that step 1, a resumed run's first sums would be rounded in another order."""
    micro_batch = args.batch_size // (dist.get_world_size() * args.grad_accum)
    tokens = torch.zeros(micro_batch, args.seq_len, dtype=torch.int64, device=device)
    with autocast:
        next_token_loss(replica(tokens), tokens).backward()
    replica.zero_grad()


if __name__ == "__main__":
    launch(main)
