"""Fully sharded data parallel (ZeRO-3, FSDP2): no rank holds more of anything than its share.

Split: the batch; parameters, gradients and optimizer states, each parameter by its rows. A layer's
parameters are gathered while it computes and dropped after it. Use it when the model does not fit on
one device beside its gradients and optimizer states. (ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277)

    torchrun --nproc_per_node=2 fsdp.py
    torchrun --nproc_per_node=8 fsdp.py --model small --dtype bfloat16 --compile --lr 1e-3
    torchrun --nproc_per_node=8 fsdp.py --replicate 2       # hybrid: 2 replicas, each sharded over 4 ranks

Sent in a step: per layer an all-gather of the parameters before the forward pass and another before the
backward pass, and a reduce-scatter of the gradients after it: (2 G + P)(n-1)/n from each of n ranks, P the
bytes of the parameters, G of what is gathered: P, or with bfloat16 P/2. With --no-reshard-after-forward the
layers stay gathered until the backward pass: (G + P)(n-1)/n, for G bytes of memory. Each further micro-batch
gathers again, but gradients add up, whole, on each rank and are reduced once. With --replicate R a rank of the
s = n/R that share a replica sends (2 G + P)(s-1)/s, and reduces its share of the gradients over the replicas:
2 P/s (R-1)/R. Give R the number of machines, and all but the last stays within one.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from common.arguments import argument_parser, at_least, parse_arguments
from common.checkpoint import Checkpoints
from common.data import BatchSampler, TokenDataset, load_batches
from common.environment import rank_and_world_size
from common.errors import SettingError
from common.launch import launch, start_process_group
from common.metrics import Metrics
from common.model import Transformer, checkpoint_activations, compile_layers, init_weights, next_token_loss
from common.optimizer import decay_groups, learning_rate, set_learning_rate


def main(argv=None):
    # Arguments
    parser = argument_parser(__doc__)
    parser.add_argument("--reshard-after-forward", action=argparse.BooleanOptionalAction, default=True,
                        help="drop a layer's gathered parameters between forward and backward")
    parser.add_argument("--replicate", type=at_least(1), default=1, metavar="R",
                        help="replicas of the model, each sharded over world size / R ranks")
    parser.add_argument("--cpu-offload", action="store_true",
                        help="keep parameters, gradients and optimizer states in the host's memory")
    args = parse_arguments(parser, argv)

    # Start-up
    n, replicas = rank_and_world_size()[1], args.replicate
    if n % replicas:
        fitting = " or ".join(str(r) for r in range(1, n + 1) if n % r == 0)
        raise SettingError(f"--replicate {replicas} does not divide the world size {n}: use {fitting}")
    device = start_process_group(args)
    if args.cpu_offload and device.type == "cpu":
        raise SettingError("--cpu-offload means nothing on the CPU, where all is in its memory: leave it out")
    if replicas == 1:
        mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("shard",))
    else:  # ranks of a replica are adjacent: they talk most
        mesh = init_device_mesh(
            device.type, (replicas, n // replicas), mesh_dim_names=("replicate", "shard")
        )

    # Model: built without memory, then materialised, each parameter from a seed of its own
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    if args.compile:
        compile_layers(model)
    if args.activation_checkpointing:
        checkpoint_activations(model)
    # Each layer is gathered as one; the root has what remains: embedding, last norm and head.
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":  # cast_forward_inputs would round the rotary angles
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*model.model.layers.values(), model]:
        fully_shard(
            module, mesh=mesh, mp_policy=policy, reshard_after_forward=args.reshard_after_forward,
            offload_policy=CPUOffloadPolicy() if args.cpu_offload else OffloadPolicy(),
        )
    model.to_empty(device="cpu" if args.cpu_offload else device)  # this rank's rows only
    init_weights(model, args.seed, shard=lambda p, whole: distribute_tensor(
        whole, p.device_mesh, p.placements, src_data_rank=None
    ))
    parameters = dict(model.named_parameters())

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), betas=(args.beta1, args.beta2), fused=True
    )

    # Data
    dataset = TokenDataset(args.data, args.seq_len, args.token_dtype)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        rank=dist.get_rank(), world_size=n,
    )
    batches = load_batches(dataset, sampler, args.config.vocab_size, device, args.workers)

    # Resume: the step is all of the data's state
    checkpoints = Checkpoints(args, sampler, parameters, optimizer)
    sampler.start = checkpoints.resume()

    # Loop
    metrics = Metrics(args, device, model, sampler, optimizer, mesh)
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        lr = set_learning_rate(optimizer, learning_rate(step, args))
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # mean over this rank's share of the batch
        for micro_batch in range(args.grad_accum):
            inputs, targets = next(batches)  # (B/dp/accum, T)
            last = micro_batch == args.grad_accum - 1
            model.set_requires_gradient_sync(last)
            if not args.reshard_after_forward:  # gathered once is gathered for all micro-batches
                model.set_reshard_after_backward(last)
            micro_loss = next_token_loss(model(inputs), targets) / args.grad_accum
            micro_loss.backward()
            loss += micro_loss.detach()

        metrics.after_backward(step)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip).full_tensor()
        optimizer.step()
        optimizer.zero_grad()

        if metrics.due(step):
            dist.all_reduce(loss, dist.ReduceOp.AVG)  # of equal shares: the mean over the batch
            metrics.log(step, loss, grad_norm, lr)
        metrics.end_step(step)
        checkpoints.after_step(step)

    checkpoints.finish()
    P = sum(p.nbytes for p in model.parameters())
    G = P / 2 if args.dtype == "bfloat16" else P  # gathered in bfloat16, reduced in float32
    gathers = 2 * args.grad_accum if args.reshard_after_forward else 1
    s, R = n // replicas, replicas
    return metrics.close(
        parameters=("P/s", P / s), gradients=("P/s", P / s), optimizer_states=("2P/s", 2 * P / s),
        sent=(
            f"({gathers}G + P)(s-1)/s" + " + 2P/s (R-1)/R" * (R > 1),
            (gathers * G + P) * (s - 1) / s + 2 * P / s * (R - 1) / R,
        ),
    )


if __name__ == "__main__":
    launch(main)
