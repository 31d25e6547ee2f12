"""Expert parallel: each rank holds some experts of every layer, and tokens travel to their experts.

Split: the batch, over all n ranks. The experts of each layer, over --ep ranks; the n/ep ranks that
hold the same experts share them by FSDP. The rest of the model by FSDP over all ranks, as in
fsdp.py. So parameters, gradients and optimizer states are held 1/n each. Use it for a mixture of
experts whose layers are too large to be gathered on every rank, as fsdp.py does: most parameters
then stay where they are, and tokens, which are less, travel. Keep --ep within a machine if you can.
(GShard, arXiv:2006.16668; DeepSeek-V3, arXiv:2412.19437)

    torchrun --nproc_per_node=2 ep.py --num-experts 8
    torchrun --nproc_per_node=8 ep.py --num-experts 8 --ep 4 --balance-rate 1e-3 --model small
    torchrun --nproc_per_node=8 ep.py --num-experts 64 --experts-per-token 8 --expert-size 512

A router in each layer chooses k of E experts for each token. In each layer the ranks first tell
each other how many tokens they will send (an all-to-all of counts). A second all-to-all takes each
token to the ranks of its experts (dispatch); these compute, and a third one brings the results back
(combine). No token is dropped, so the result equals the result of one process.

Sent in a step by each rank, beside what fsdp.py sends for the parameters outside the experts. X:
bytes of the hidden states (B, T, D), in the type of the matrix products. W: bytes of the weights of
all experts in all layers. L: number of layers.

    tokens    4k X/n (ep-1)/ep for each layer: dispatch and combine, forward and backward; 6k
              instead of 4k with --activation-checkpointing. This is so if all experts get equally
              many tokens; otherwise it depends on the data.
    counts    8E (ep-1)/ep for each layer and forward pass
    experts   3W/ep (1-ep/n) for each micro-batch; with bfloat16 2W/ep (1-ep/n), since
              they are gathered in it. Nothing if ep is n.
    balance   16LE (n-1)/n: how many tokens each expert of each layer got in the step

Overlap, on GPUs: FSDP's all-gathers and reduce-scatters, as in fsdp.py; the next layer and its
experts are gathered while a layer computes. Exposed: all three all-to-alls, and in each layer and
forward pass one wait of the CPU for the device, which has the counts, because the CPU must know how
many rows to receive. In the backward pass it knows.

To copy it, take fsdp.py too, whose ``shard`` and ``add_gradients_up`` it uses.
"""

import argparse
import functools
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from common.data import BatchSampler, load_steps
from common.errors import refuse
from common.experts import (
    MixtureConfig, Permute, balance_experts, busiest_share, inverse, read_counts, use_experts
)
from common.launch import (
    launch, rank_and_world_size, restores_process, set_timeout, start_process_group
)
from common.materialise import materialise
from common.model import Transformer, wrap_layers
from common.model_options import add_model_options
from common.options import at_least, option_parser, parse_options
from common.step import count_targets, decay_groups, seed_step, set_learning_rate
from common.tokens import add_text_options, open_dataset
from common.torch_versions import not_compiled, reshard
from fsdp import add_gradients_up, shard

# Services, optional: delete an import and every statement that uses it, but keep the loop
from common.services.checkpoint import Checkpoints
from common.services.report import Report
from common.services.same_calls import compare_calls
from common.services.settings import run_settings
from common.services.validation import Validation


@restores_process
def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser, MixtureConfig)
    add_text_options(parser)
    parser.add_argument("--ep", type=at_least(1), metavar="N", help="ranks over which the experts "
                        "of each layer are spread; None: all ranks")
    parser.add_argument("--balance-rate", type=at_least(0, float), default=0.0, metavar="X",
                        help="how much each step changes the biases that balance the load of "
                        "experts; 0: not at all")
    parser.add_argument("--reshard-after-forward", action=argparse.BooleanOptionalAction,
                        default=True, help="free the gathered parameters of a layer after its "
                        "forward pass, and gather them again for the backward pass")
    Checkpoints.add_options(parser)
    Validation.add_options(parser)
    Report.add_options(parser)
    args = parse_options(parser, argv)
    _, n = rank_and_world_size()
    ep = args.ep or n
    check(args, n, ep)
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("dp",))
    expert_mesh = init_device_mesh(  # the ranks that exchange tokens are adjacent
        device.type, (n // ep, ep), mesh_dim_names=("expert_dp", "ep")
    )
    set_timeout(expert_mesh, args.timeout)

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed.
    with torch.device("meta"):
        model = use_experts(Transformer(args.config)).to(args.param_dtype)  # EP: for each MLP
    layers = model.model.layers.values()
    wrap_layers(layers, args.compile, args.activation_checkpointing, model.lm_head)
    dtype = torch.bfloat16 if args.bfloat16 else None  # FSDP: instead of autocast
    # EP: first the experts of each layer, then FSDP for the rest of it
    for layer in layers:
        shard_experts(
            layer.mlp.experts, expert_mesh["ep"], expert_mesh["expert_dp"], dtype,
            args.reshard_after_forward,
        )
        layer.mlp.dispatch = functools.partial(
            to_experts_and_back, group=expert_mesh.get_group("ep")
        )
    units = [
        [model.model.embed_tokens], *([layer] for layer in layers),
        [model.model.norm, model.lm_head],
    ]
    shard(model, units, mesh, dtype, args.reshard_after_forward)
    prefetch(units, backward=args.activation_checkpointing)  # EP: ahead of the wait for the counts
    # EP: an average would have no one divisor: experts are reduced over n/ep ranks, the rest over n
    add_gradients_up(model)
    materialise(model, device, args.seed)  # the experts and rows of this rank
    compare_calls(model, dist.group.WORLD, passes=2 * args.grad_accum)  # FSDP: all alike

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=mesh,  # EP: each rank reads its own samples
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
    report = Report(args, model, optimizer, [sampler, dataset], device, expert_mesh)
    for step, batch in report.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, sampler.rank)  # EP: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch, dist.group.WORLD)  # EP: of all ranks
        for i, (inputs, targets) in enumerate(batch):  # (B/n/accum, T)
            if not args.reshard_after_forward:  # FSDP: gather once for all micro-batches
                model.set_reshard_after_backward(i == args.grad_accum - 1)
            micro_loss = model(inputs, targets) / count
            micro_loss.backward()
            loss += micro_loss.detach()

        grad_norm = clip_over_meshes(model.parameters(), args.max_norm)  # EP: of all ranks' experts
        optimizer.step()
        balance_experts(model, args.balance_rate, dist.group.WORLD)  # EP: of all ranks
        optimizer.zero_grad()
        report.log(  # EP: how uneven the load of the experts is
            step, loss, grad_norm, busiest_expert=lambda: busiest_share([model], device)
        )
        checkpoints.after_step(step, grad_norm)
        if validation.due(step):
            report.log_validation(step, validation.loss(model))
            reshard(model)  # FSDP: without a backward pass some parameters stay gathered
        if checkpoints.stopping:
            break
    checkpoints.finish()
    return report.close()


def shard_experts(experts, ep_mesh, shard_mesh, dtype=None, reshard_after_forward=True):
    """Shard the weights of ``experts`` in place; dimension 0 of each is the experts. They are
    spread over ``ep_mesh``: rank r gets the experts from rE/ep to (r+1)E/ep, which ep must divide.
    Then FSDP shards these over ``shard_mesh``, the ranks that hold the same experts: whole experts
    if they can be shared evenly, otherwise dimension 1 of each matrix. Both are slices of one mesh.

    ``shard_mesh`` of two dimensions, ``dtype`` and ``reshard_after_forward``: see ``shard`` in
    fsdp.py.
    """
    for name, parameter in list(experts.named_parameters()):
        spread = distribute_tensor(parameter.detach(), ep_mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(spread, parameter.requires_grad))
        local_experts = len(spread.to_local())
    dim = 0 if local_experts % shard_mesh.size(-1) == 0 else 1
    fully_shard(
        experts, mesh=shard_mesh, reshard_after_forward=reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(dtype, dtype and torch.float32, cast_forward_inputs=False),
        shard_placement_fn=lambda parameter: Shard(dim),
    )


def prefetch(units, backward):
    """Let FSDP gather each unit while the unit before it computes. By itself it starts when the CPU
    comes to the unit: too late, since in each layer the CPU waits for the counts of the tokens.
    In the backward pass it waits only if layers are computed again: then set ``backward``.

    ``units``: the lists of modules that ``shard`` took, in the order of their use. What is an FSDP
    unit within them, as experts are, is gathered with them.
    """
    inner = [[m for module in unit for m in module.modules() if isinstance(m, FSDPModule)]
             for unit in units]
    for unit, following in itertools.pairwise(inner):
        unit[0].set_modules_to_forward_prefetch(following)
        if backward:
            following[0].set_modules_to_backward_prefetch(unit)


@not_compiled
def to_experts_and_back(rows, counts, experts, group):
    """Send each row to the rank that holds its expert, compute there, and send the result back.

    Args:
        rows: (rows, D), the rows of this rank, sorted by expert, so also by the rank to send to.
        counts: (E,), how many of them each expert gets. Of the E experts the first E/ep are on rank
            0 of ``group``, the next ones on rank 1, and so on.
        experts: the experts of this rank. ``experts(rows, counts, sizes)`` takes the rows that have
            come to them, sorted by expert, and how many each has, as a tensor (E/ep,) and as a
            list. It returns as many rows.
        group: the ProcessGroup of the ep ranks that hold different experts. All must call this.

    Returns the outputs (rows, D), in the order of ``rows``.
    """
    ep = group.size()
    # [r, e]: the number of rows from here to expert e of rank r, and from rank r to expert e here
    leaving = counts.view(ep, -1)  # (ep, E/ep)
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=group)
    # The CPU waits for the device here, and nowhere else: now they are lists, [r][e].
    leaving_from, coming_from = read_counts(torch.stack((leaving, coming)), len(rows))
    sent, received = ([sum(sizes) for sizes in lists] for lists in (leaving_from, coming_from))

    rows = SendRows.apply(rows, sent, received, group)  # by source, then by expert
    expert = torch.arange(coming.shape[1], device=rows.device).repeat(ep)  # (E,): e of each [r, e]
    expert = expert.repeat_interleave(coming.flatten(), output_size=len(rows))  # of each row
    order = expert.argsort(stable=True)
    rows = Permute.apply(rows, order)  # by expert, then by source
    rows = experts(rows, coming.sum(0), [sum(sizes) for sizes in zip(*coming_from)])
    rows = Permute.apply(rows, inverse(order))  # by source, then by expert
    return SendRows.apply(rows, received, sent, group)  # (rows, D)


class SendRows(torch.autograd.Function):
    """Of ``rows`` the first ``sent[0]`` go to rank 0, the next ``sent[1]`` to rank 1, and so on.
    Returns the rows from rank 0, which are ``received[0]``, from rank 1, and so on. In the backward
    pass the gradients go back; torch's own all-to-all would lose them without an error."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        grad_rows = SendRows.apply(grad_out, ctx.received, ctx.sent, ctx.group)
        return grad_rows, None, None, None


def clip_over_meshes(parameters, max_norm):
    """``torch.nn.utils.clip_grad_norm_`` for DTensors on several meshes, which it refuses. Each
    rank must hold a part of the gradients that no other rank holds: then the global norm is the
    root of the sum of the squares of the ranks' norms. Returns it. With replicas, which hold the
    same, take ``clip_over_stages`` of pp.py."""
    parameters = [p for p in parameters if p.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad.to_local() for p in parameters]).square()
    dist.all_reduce(total)
    norm = total.sqrt()
    for mesh in {p.device_mesh for p in parameters}:
        of_mesh = [p for p in parameters if p.device_mesh == mesh]
        torch.nn.utils.clip_grads_with_norm_(of_mesh, max_norm, norm)
    return norm


def cannot_share(config, n, ep):
    """The reasons for which n ranks cannot share the experts of a layer evenly, each ep of them
    different experts: rows for ``refuse``. Each proposes the values of --ep with which they can."""
    E, D, I = config.num_experts, config.hidden_size, config.expert_size or 0  # noqa: E741

    def even(ep):  # over the ranks that hold the same experts: these, or dimension 1 of each matrix
        sharers = max(1, n // ep)
        return E // ep % sharers == 0 or D % sharers == I % sharers == 0

    fitting = [str(r) for r in range(1, n + 1) if n % r == 0 and E % r == 0 and even(r)]
    use = f"use {' or '.join(fitting)}"
    if not fitting:
        use = f"use a multiple of {n} as --num-experts, and an --ep that divides {n}"
    return [
        (n % ep, f"--ep {ep} does not divide the {n} ranks that share the experts: {use}"),
        (E % ep, f"--ep {ep} does not divide --num-experts {E}: {use}"),
        (not even(ep),
         f"--ep {ep} leaves {n // ep} ranks with the same {E // ep} experts, and neither these nor "
         f"--hidden-size {D} and --expert-size {I} can be cut into {n // ep} equal parts: {use}"),
    ]


def check(args, n, ep):
    """Refuse experts that n ranks cannot share evenly.

    Raises:
        SettingError: the message says how they can be shared.
    """
    refuse([
        (not args.config.num_experts,
         "ep.py trains a mixture of experts: give --num-experts, or use fsdp.py"),
        (args.activation_checkpointing == "selective",
         "--activation-checkpointing selective with --num-experts: FSDP gathers experts within a "
         "layer, and torch cannot compute a part of such a layer again; use full"),
        *cannot_share(args.config, n, ep),
    ])


if __name__ == "__main__":
    launch(main)
