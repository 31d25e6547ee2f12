"""Fully sharded data parallel (ZeRO-3, FSDP2): each rank stores 1/n of everything.

Split: the batch; parameters, gradients and optimizer states, each parameter by its rows. The ranks
gather the parameters of one unit at a time, such as a layer, and free them after it. Use it if the
model does not fit on one device beside its gradients and optimizer states. (ZeRO, arXiv:1910.02054;
FSDP, arXiv:2304.11277)

    torchrun --nproc_per_node=2 fsdp.py
    torchrun --nproc_per_node=8 fsdp.py --model small --dtype bfloat16 --compile --lr 1e-3
    torchrun --nproc_per_node=8 fsdp.py --replicate 2    # hybrid: 2 replicas, each on 4 ranks

Each of n ranks sends for a micro-batch some 3P(n-1)/n in float32, and 2P(n-1)/n in bfloat16, where
P is the bytes of the parameters:

    all-gather of each unit's parameters before its forward pass      G(n-1)/n
    all-gather of all units but the last before the backward pass     (G-F)(n-1)/n
    reduce-scatter of each unit's gradients after its backward pass   P(n-1)/n

G: the bytes that are gathered: P, or with --dtype bfloat16 P/2. F: the part of G in the last unit,
norm and head, which stays gathered between its forward and its backward pass. Further:

- In each step the ranks also all-reduce one number, how many targets the global batch has: 8 bytes,
  of which each rank sends 16(n-1)/n.
- The rows of each parameter are padded to a multiple of n, and P, G and F count the padding. It
  grows with n if there are more ranks than rows, such as 1,024 of k_proj: use --replicate then.
- --no-reshard-after-forward gathers everything once in a step, and keeps G bytes gathered
  meanwhile. A rank then sends (G + aP)(n-1)/n, with a: micro-batches.
- --replicate R (hybrid sharding, HSDP) makes R replicas. s = n/R ranks share each of them, and s
  takes the place of n above. In each step a rank also all-reduces its shard of the gradients over
  the replicas, and sends (2P/s)(R-1)/R. Use the number of machines as R: then only this all-reduce
  crosses machines.

Overlap, on GPUs: while a unit computes, the next one is gathered. In the backward pass the
gradients of the previous unit are reduced at the same time. Long sequences hide most of it, since
they compute more with the same parameters. Exposed: the gather of the first unit and the last
reduce-scatter (both are the embedding's), the norm, and what no computation hides.
"""

import argparse
import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
)

from common.data import BatchSampler, load_steps
from common.errors import SettingError, refuse
from common.launch import (
    launch, rank_and_world_size, restores_process, set_timeout, start_process_group
)
from common.materialise import materialise
from common.model import Transformer, wrap_layers
from common.model_options import add_model_options
from common.options import at_least, option_parser, parse_options
from common.step import count_targets, decay_groups, seed_step, set_learning_rate
from common.tokens import add_text_options, open_dataset
from common.torch_versions import reduce_unused_parameters, reshard

# Services, optional: delete an import and every statement that uses it, but keep the loop
from common.services import theory
from common.services.checkpoint import Checkpoints
from common.services.report import Report
from common.services.same_calls import compare_calls
from common.services.settings import run_settings
from common.services.validation import Validation


@restores_process
def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser)
    add_text_options(parser)
    parser.add_argument("--reshard-after-forward", action=argparse.BooleanOptionalAction,
                        default=True, help="free the gathered parameters of a layer after its "
                        "forward pass, and gather them again for the backward pass")
    parser.add_argument("--replicate", type=at_least(1), default=1, metavar="R",
                        help="replicas of the model, each sharded over world size / R ranks")
    parser.add_argument("--cpu-offload", action="store_true",
                        help="keep parameters, gradients and optimizer states in host memory")
    Checkpoints.add_options(parser)
    Validation.add_options(parser)
    Report.add_options(parser)
    args = parse_options(parser, argv)
    _, n = rank_and_world_size()
    check(args, n)  # before the ranks connect
    device = start_process_group(args)
    mesh = init_device_mesh(  # the ranks of a replica are adjacent: they communicate most
        device.type, (args.replicate, n // args.replicate),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )
    set_timeout(mesh, args.timeout)

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()
    wrap_layers(layers, args.compile, args.activation_checkpointing, model.lm_head)
    # FSDP: what is gathered together; before the optimizer, which updates the shards
    units = [
        [model.model.embed_tokens], *([layer] for layer in layers),
        [model.model.norm, model.lm_head],
    ]
    # FSDP: a mesh of two dimensions adds an all-reduce for each unit, even over one replica
    shard(
        model, units, mesh if args.replicate > 1 else mesh["dp_shard"],
        dtype=torch.bfloat16 if args.bfloat16 else None,  # FSDP: instead of autocast
        reshard_after_forward=args.reshard_after_forward, cpu_offload=args.cpu_offload,
    )
    add_gradients_up(model)  # FSDP: each rank's loss is a part of the mean over all ranks
    materialise(model, "cpu" if args.cpu_offload else device, args.seed)  # the rows of this rank
    move_buffers(model, device)  # FSDP: parameters are offloaded, buffers are not
    compare_calls(model, dist.group.WORLD, passes=2 * args.grad_accum)  # FSDP: all alike

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=mesh,  # FSDP: each rank reads its own samples
    )
    validation = Validation(
        open_dataset(args, "--val-data"), sampler, device, args.val_every, args.val_batches,
        args.workers,
    )

    # Resume: the step number is the only state of the data
    checkpoints = Checkpoints(
        args.out, run_settings(args, dataset), model.state_dict(keep_vars=True), optimizer,
        stop=args.steps, every=args.save_every, keep=args.keep, in_background=args.async_save,
    )
    sampler.start = checkpoints.resume(args.source)  # steps done

    # Loop
    report = Report(args, model, optimizer, [sampler, dataset], device, mesh)
    for step, batch in report.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, sampler.rank)  # FSDP: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch, dist.group.WORLD)  # FSDP: of all ranks
        for i, (inputs, targets) in enumerate(batch):  # (B/dp/accum, T)
            # FSDP: each micro-batch adds to sharded gradients; replicas are reduced after the last.
            # set_requires_gradient_sync(last) sends less, but holds whole gradients on each rank.
            last = i == args.grad_accum - 1
            model.set_requires_all_reduce(last)
            if not args.reshard_after_forward:  # FSDP: gather once for all micro-batches
                model.set_reshard_after_backward(last)
            micro_loss = model(inputs, targets) / count
            micro_loss.backward()
            loss += micro_loss.detach()

        # FSDP: the norm is a DTensor; full_tensor() combines the norms of the ranks' shards.
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        report.log(step, loss, grad_norm)
        checkpoints.after_step(step, grad_norm)
        if validation.due(step):
            report.log_validation(step, validation.loss(model))
            reshard(model)  # FSDP: without a backward pass some parameters stay gathered
        if checkpoints.stopping:
            break
    checkpoints.finish()
    return report.close(theory.fsdp(args, n))


def shard(
    model, units, mesh, dtype=None, reshard_after_forward=True, cpu_offload=False,
    reduce_unused=False,
):
    """Shard ``model`` in place (FSDP2): over a one-dimensional ``mesh``, or over the second of two
    dimensions, with replicas along the first (hybrid sharding).

    ``units`` are lists of modules whose parameters are gathered together, in the order of their
    use, such as [embedding], [layer], ..., [norm, head]. The rest of ``model`` is one more unit.
    ``dtype``: compute in this type, and reduce gradients in float32. ``reshard_after_forward``:
    free gathered parameters between forward and backward; the last unit keeps them, since its
    backward pass comes at once. ``cpu_offload``: keep the shards in host memory. ``reduce_unused``:
    some samples do not use all of the model, such as the heads of other tasks; put such parts into
    one unit, of which every rank calls a module in each micro-batch. The gradient of what no rank
    has used is then 0, and AdamW updates it. Raises SettingError if two units share a parameter,
    or if torch cannot reduce what is unused.
    """
    parameters = [p for unit in units for p in nn.ModuleList(unit).parameters()]
    if len(parameters) > len(set(parameters)):
        raise SettingError("two units share a parameter: put modules with tied weights in one")
    policy = MixedPrecisionPolicy(dtype, dtype and torch.float32)
    # The root casts float inputs of the model. Units do not: rotary angles stay in float32.
    inner = dataclasses.replace(policy, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    options = {"mesh": mesh, "offload_policy": offload}
    for unit in units:
        frees = reshard_after_forward and unit is not units[-1]
        fully_shard(unit, reshard_after_forward=frees, mp_policy=inner, **options)
    fully_shard(model, mp_policy=policy, **options)
    if reduce_unused:
        reduce_unused_parameters(model)


def add_gradients_up(model):
    """Let FSDP add up gradients over the ranks, instead of averaging them. Call it after ``shard``,
    if the loss of each rank is its part of one mean: the sum over its targets / the number of all
    ranks' targets. Without it FSDP averages, as DDP does: for losses that are means themselves."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # neither setter reaches the modules below
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def move_buffers(model, device):
    """Put the buffers of ``model`` on ``device``, where its layers use them as they are."""
    moved = {}  # what has two names stays one buffer
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, moved.setdefault(buffer, buffer.to(device)))


def check(args, n):
    """Refuse what n ranks, or this machine, cannot do.

    Raises:
        SettingError: the message says what they can do.
    """
    fitting = " or ".join(str(r) for r in range(1, n + 1) if n % r == 0)
    refuse([
        (n % args.replicate,
         f"--replicate {args.replicate} does not divide the world size {n}: use {fitting}"),
        (args.cpu_offload and (args.device == "cpu" or not torch.cuda.is_available()),
         "--cpu-offload moves parameters from GPU to host memory, but this run is on the CPU: "
         "leave --cpu-offload out"),
    ])


if __name__ == "__main__":
    launch(main)
