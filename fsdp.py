"""Fully sharded data parallel (ZeRO-3, FSDP2): each rank stores 1/n of everything.

Split: the batch; parameters, gradients and optimizer states, each parameter by its rows. The ranks
gather the parameters of one group at a time, such as a layer, and free them after it. Use it if the
model does not fit on one device beside its gradients and optimizer states. (ZeRO, arXiv:1910.02054;
FSDP, arXiv:2304.11277)

    torchrun --nproc_per_node=2 fsdp.py
    torchrun --nproc_per_node=8 fsdp.py --model small --dtype bfloat16 --compile --lr 1e-3
    torchrun --nproc_per_node=8 fsdp.py --replicate 2    # hybrid: 2 replicas, each on 4 ranks

Sent for a micro-batch: for each group an all-gather of the parameters before the forward pass,
another one before the backward pass, and a reduce-scatter of the gradients after it. The last group
(norm and head) stays gathered in between. Each of n ranks sends (2G - E + P)(n-1)/n. P: bytes of
the parameters. G: bytes that are gathered, P or with bfloat16 P/2; E: those of the last group. With
--no-reshard-after-forward everything is gathered once in a step: (G + aP)(n-1)/n for a
micro-batches, for G bytes of memory. With --replicate R (hybrid sharding, HSDP), s = n/R ranks
share a replica: s takes the place of n, and in each step a rank all-reduces its shard of the
gradients over the R replicas, 2P/s (R-1)/R. Use the number of machines as R: then only this
all-reduce crosses machines. One number more is all-reduced in a step: how many targets the global
batch has (8 bytes, 16(n-1)/n sent).

Overlap, on GPUs: while a group computes, the next one is gathered, and backward the gradients of
the one before are reduced. Exposed: the gather of the first group, the reduce-scatter of the last
one in the backward pass (both the embedding's), the norm, and what a group's computing does not
hide: long sequences hide most, since they compute more with the same parameters.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
)

from common.arguments import (
    all_options, argument_parser, at_least, describe, parse_arguments, run_settings
)
from common.checkpoint import Checkpoints
from common.data import BatchSampler, TokenDataset, fingerprint, load_batches
from common.environment import rank_and_world_size
from common.errors import SettingError
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
from common.slices import local_slices
from common.validation import Validation


def main(argv=None):
    # Arguments
    parser = argument_parser(__doc__)
    parser.add_argument("--reshard-after-forward", action=argparse.BooleanOptionalAction,
                        default=True, help="free the gathered parameters of a layer after its "
                        "forward pass, and gather them again for the backward pass")
    parser.add_argument("--replicate", type=at_least(1), default=1, metavar="R",
                        help="replicas of the model, each sharded over world size / R ranks")
    parser.add_argument("--cpu-offload", action="store_true",
                        help="keep parameters, gradients and optimizer states in host memory")
    args = parse_arguments(parser, argv)
    _, n = rank_and_world_size()
    check(args, n)

    # Start-up
    device = start_process_group(
        args.device, args.backend, args.timeout, args.out, all_options(args)
    )
    mesh = init_device_mesh(  # the ranks of a replica are adjacent: they communicate most
        device.type, (args.replicate, n // args.replicate),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed
    # Your own model: torch.manual_seed(args.seed), then MyModel().to(device), in place of the meta
    # device, materialise and init_weights; its initial values, buffers and ties stay as they are.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()
    if args.compile:
        compile_layers(layers)
    if args.activation_checkpointing:
        checkpoint_activations(layers)
    # FSDP: what is gathered together; before the optimizer, which updates the shards
    groups = [
        [model.model.embed_tokens], *([layer] for layer in layers),
        [model.model.norm, model.lm_head],
    ]
    last_group = sum(p.nbytes for p in nn.ModuleList(groups[-1]).parameters())
    shard(
        model, groups, mesh if args.replicate > 1 else mesh["dp_shard"],
        dtype=torch.bfloat16 if args.dtype == "bfloat16" else None,
        reshard_after_forward=args.reshard_after_forward, cpu_offload=args.cpu_offload,
    )
    materialise(model, "cpu" if args.cpu_offload else device)  # only the rows of this rank
    init_weights(model, args.seed, local_slices)

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
        load_weights(model, args.init_from, local_slices)

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
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        seed_step(args.seed, step, sampler.rank)  # FSDP: each rank has its own dropout
        lr = learning_rate(step, args.lr, args.steps, args.warmup_steps, args.min_lr)
        set_learning_rate(optimizer, lr)
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # averaged over ranks
        batch = [next(batches) for _ in range(args.grad_accum)]
        count = count_targets(batch, dist.group.WORLD)  # FSDP: of all ranks
        for micro_batch, (inputs, targets) in enumerate(batch):  # (B/dp/accum, T)
            # FSDP: each micro-batch adds to sharded gradients; replicas are reduced after the last.
            # set_requires_gradient_sync(last) sends less, but holds whole gradients on each rank.
            last = micro_batch == args.grad_accum - 1
            model.set_requires_all_reduce(last)
            if not args.reshard_after_forward:  # FSDP: gather once for all micro-batches
                model.set_reshard_after_backward(last)
            # FSDP: times n, since gradients are averaged over n ranks.
            micro_loss = model(inputs, targets) * n / count
            micro_loss.backward()
            loss += micro_loss.detach()

        metrics.after_backward(step)
        # FSDP: the norm is a DTensor; full_tensor() combines the norms of the ranks' shards.
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip).full_tensor()
        skip_if_not_finite(optimizer, grad_norm, step)
        optimizer.step()
        optimizer.zero_grad()

        if metrics.due(step) or checkpoints.due(step):
            # FSDP: every rank's loss has the factor n, so that their average is the mean.
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            metrics.log(step, loss, grad_norm, lr)
        metrics.end_step(step)
        if validation.due(step):
            with metrics.pause():
                metrics.log_validation(step, validation.loss(model))
            reshard(model)  # FSDP: without a backward pass some parameters stay gathered
        if checkpoints.after_step(step):
            break

    checkpoints.finish()
    return metrics.close(**theory(
        sum(p.nbytes for p in model.parameters()), last_group, args.param_dtype.itemsize,
        args.compute_dtype.itemsize, n, args.replicate, args.grad_accum,
        args.reshard_after_forward,
    ))


def count_targets(batch, group):
    """The number of targets in the micro-batches of a step, without targets of -100. ``group``: the
    ranks that read different samples, over which it is summed. At least 1."""
    count = sum((targets != -100).sum() for _, targets in batch)
    dist.all_reduce(count, group=group)
    return count.clamp(min=1)


def shard(model, groups, mesh, dtype=None, reshard_after_forward=True, cpu_offload=False):
    """Shard ``model`` in place (FSDP2): over a one-dimensional ``mesh``, or over the second of two
    dimensions, with replicas along the first (hybrid sharding).

    ``groups`` are lists of modules whose parameters are gathered together, in the order of their
    use, such as [embedding], [layer], ..., [norm, head]. The rest of ``model`` is one more group.
    ``dtype``: compute in this type, and reduce gradients in float32. ``reshard_after_forward``:
    free gathered parameters between forward and backward; the last group keeps them, since its
    backward pass comes at once. ``cpu_offload``: keep the shards in host memory. Raises
    SettingError if two groups share a parameter.
    """
    parameters = [p for group in groups for p in nn.ModuleList(group).parameters()]
    if len(parameters) > len(set(parameters)):
        raise SettingError("two groups share a parameter: put modules with tied weights in one")
    policy = MixedPrecisionPolicy()
    if dtype is not None:  # cast_forward_inputs would round the rotary angles
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    options = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    for group in groups:
        reshard = reshard_after_forward and group is not groups[-1]
        fully_shard(group, reshard_after_forward=reshard, **options)
    fully_shard(model, **options)


def reshard(model):
    """Free the gathered parameters that a forward pass without a backward pass leaves. Otherwise
    the next forward pass uses them again, even if the shards have changed."""
    if hasattr(model, "reset_iter_state"):
        return model.reset_iter_state()
    for module in model.modules():  # torch 2.11: the next backward pass gathers one group too many
        if isinstance(module, FSDPModule):
            module.reshard()


def check(args, n):
    """Refuse what n ranks, or this machine, cannot do.

    Raises:
        SettingError: the message says what they can do.
    """
    if n % args.replicate:
        fitting = " or ".join(str(r) for r in range(1, n + 1) if n % r == 0)
        raise SettingError(
            f"--replicate {args.replicate} does not divide the world size {n}: use {fitting}"
        )
    if args.cpu_offload and (args.device == "cpu" or not torch.cuda.is_available()):
        raise SettingError(
            "--cpu-offload moves parameters from GPU to host memory, but this run is on the CPU: "
            "leave --cpu-offload out"
        )


def theory(P, last_group, size, compute_size, n, R, a, reshard_after_forward):
    """Bytes that each of n ranks holds, and sends in a step of ``a`` micro-batches, in R replicas
    of s = n/R ranks: P bytes of parameters, ``last_group`` of them in the last group; ``size``
    bytes of a number in parameters, ``compute_size`` in what is gathered."""
    s, G, E = n // R, P * compute_size / size, last_group * compute_size / size
    if reshard_after_forward:
        formula, sent = "a(2G-E+P)(s-1)/s", a * (2 * G - E + P) * (s - 1) / s
    else:
        formula, sent = "(G+aP)(s-1)/s", (G + a * P) * (s - 1) / s
    if R > 1:
        formula, sent = f"{formula} + 2P/s(R-1)/R", sent + 2 * P / s * (R - 1) / R
    formula, sent = f"{formula} + 16(n-1)/n", sent + 16 * (n - 1) / n
    return {
        "parameters": ("P/s", P / s), "gradients": ("P/s", P / s),
        "optimizer_states": ("2P/s", 2 * P / s), "sent": (formula, sent),
    }


if __name__ == "__main__":
    launch(main)
