"""Data x tensor x context x pipeline parallel: every axis at once.

Split: the layers over --pp stages; each layer's matrices over --tp ranks; each sequence over --cp
ranks; the batch over --dp ranks; and, as in fsdp.py, the parameters, gradients and optimizer states
over the dp x cp ranks that would otherwise hold copies (with --replicate R in R replicas). With
--num-experts also the experts of each layer, over --ep of the dp x cp x tp ranks of a stage. Use it
if one axis alone has reached its limit. Start with fsdp.py. Add --tp within a machine if a layer is
too large, or if the batch per rank is too small to hide FSDP's all-gathers. Add --cp for long
sequences. Add --pp between machines if gathering the parameters takes longer than computing.
(Llama 3, arXiv:2407.21783)

    torchrun --nproc_per_node=8 hybrid_3d.py --dp 2 --tp 2 --cp 2
    torchrun --nproc_per_node=8 hybrid_3d.py --tp 2 --pp 2 --microbatches 4     # dp is the rest: 2
    DP_SIZE=2 CP_SIZE=2 TP_SIZE=2 PP_SIZE=2 torchrun --nproc_per_node=16 hybrid_3d.py --replicate 2
    torchrun --nproc_per_node=8 hybrid_3d.py --cp 2 --tp 2 --num-experts 8 --ep 4

Ranks are numbered so that those that communicate most are nearest. tp is innermost: its ranks wait
for each other in every layer, so they share the fast links of a machine. Then cp, which
communicates once in each attention. Then dp, whose all-gathers run ahead of their use. pp is
outermost: it only sends hidden states from one stage to the next, and their gradients back.

Experts have a second mesh over the same ranks: (pp, dp_replicate, expert_dp, ep). With sequence
parallelism each tp rank has tokens of its own in the residual stream, as each cp and dp rank has.
So to an expert all three axes are data parallelism: of the dp / R x cp x tp ranks of a replica, ep
adjacent ones hold different experts, and send tokens to each other. FSDP shards the same experts
over the expert_dp = (dp/R x cp x tp) / ep ranks that hold them. No expert is cut by tp.
(docs/strategies.md has both meshes of 8 ranks)

Sent in a step: in each layer what tp.py and cp.py (--attention allgather) send for this rank's
share of the batch; what fsdp.py sends for the parameters of this rank's stage, divided by tp; and
between stages the hidden states forward and their gradients backward. With --num-experts also what
ep.py sends for tokens and for the weights of experts, which are not divided by tp. With --pp, FSDP
gathers the parameters of a stage once for all micro-batches of the pipeline, and reduces their
gradients after the last one: in between a rank holds both whole, also those of its experts.

Overlap: as in fsdp.py; what tp and cp send is exposed, and so are the tokens on their way to
experts and back. With --pp nothing hides the reduction of the gradients.

Under bfloat16, torch 2.13 adds up the norms' partial gradients of the tp ranks in bfloat16,
2.15 in float32 (https://github.com/pytorch/pytorch/issues/190626).

This script composes functions of ep.py, tp.py, cp.py, fsdp.py and pp.py, which explain them.
``compose`` has the order: the stage is cut first,
so that a rank splits only its own layers; then experts, so that what follows leaves them alone;
then tensor parallel, because it changes what a layer computes; then the attention of context
parallel; then FSDP, which shards what the rank now holds. The pipeline's schedule goes around it.
"""

import argparse
import functools
import logging
import os
import types

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel

from common.data import BatchSampler, add_text_options, load_steps, open_dataset, open_held_out
from common.experts import MixtureConfig, balance_experts, busiest_share, use_experts
from common.launch import launch, start_process_group, world_size
from common.materialise import materialise
from common.model import (
    Transformer, add_model_options, model_config, plain_attention, wrap_layers
)
from common.options import at_least, option_parser, parse_options, refuse
from common.run import Run  # optional: delete it, and every statement that uses it or ``run``
from common.step import count_targets, decay_groups, seed_step, set_learning_rate
from common.usage import Usage
from cp import allgather_attention, check_sequence, set_attention, shard_positions
from ep import cannot_share_experts, prefetch, shard_experts, to_experts_and_back
from fsdp import reduce_by_sum, shard
from pp import (
    check_stages, clip_over_stages, cost_of_head, keep_stage, make_schedule, split_layers
)
from tp import (
    cannot_split, llama_plan, loss_of_split_logits, parallelize, wait_for_output
)


def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser, MixtureConfig)  # EP
    add_text_options(parser)
    add_grid_options(parser)
    Run.add_options(parser)
    args = parse_options(parser, argv)
    args.config = model_config(args, MixtureConfig)
    n = world_size()
    args.dp = args.dp or max(1, n // (args.cp * args.tp * args.pp))  # DP: what the others leave
    args.microbatches = args.microbatches or args.pp  # PP
    check(args, n)
    device = start_process_group(args)
    dp, cp, tp, pp = args.dp, args.cp, args.tp, args.pp
    M, E = args.microbatches, args.config.num_experts  # PP, EP
    meshes = make_meshes(args, device.type)
    mesh = meshes.all
    stage = mesh.get_local_rank("pp")  # PP
    cp_rank = mesh.get_local_rank("cp")  # CP
    positions = shard_positions(args.seq_len, cp).to(device)[cp_rank]  # CP: (T/cp,)
    tp_rank = mesh.get_local_rank("tp") if args.sequence_parallel else 0  # TP: of residual stream

    # Model: this rank's stage, built on the meta device, then split and materialised
    with torch.device("meta"):
        whole, model = (  # EP: experts for each MLP
            use_experts(Transformer(args.config)).to(args.param_dtype) for _ in range(2)
        )
    compose(args, whole, model, meshes, positions)
    materialise(model, device, args.seed)

    # PP: a schedule calls loss_fn, so each step writes the number of all targets here.
    count = torch.ones((), dtype=torch.int64, device=device)

    def loss_fn(micro_loss, targets):  # this rank's part of the mean over the batch of this step
        return micro_loss / count

    # PP: what travels between stages: tokens, hidden states, the loss. CP: of T/cp positions
    with torch.device("meta"):
        size = args.batch_size // (dp * args.grad_accum * M)  # DP: this rank's sequences
        length = args.seq_len // cp
        tokens = torch.empty(size, length, dtype=torch.int64)
        length //= tp if args.sequence_parallel else 1  # TP: of residual stream
        hidden = torch.empty(size, length, args.config.hidden_size, dtype=args.compute_dtype)
        output = torch.empty((), dtype=args.param_dtype)
    if pp > 1:  # PP: connect the stages
        schedule = make_schedule(
            "1f1b", [model], [stage], pp, M, tokens, hidden, output, loss_fn, mesh.get_group("pp"),
            device,
        )
        forward_backward = functools.partial(in_stages, schedule.step)
    else:
        forward_backward = functools.partial(in_one_stage, model, M, loss_fn)

    # PP: the loss of this stage, for validation
    def loss_of_part(micro_batch):
        inputs, targets = micro_batch
        inputs, targets = inputs[:, positions], targets[:, positions]  # CP
        count.fill_(1)  # the loss is a sum here
        if pp > 1:
            losses = in_stages(schedule.eval, inputs, targets)
        else:
            losses = [model(x, targets=y) for x, y in zip(inputs.chunk(M), targets.chunk(M))]
        return sum(losses), (targets != -100).sum() if losses else 0

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=meshes.dp,  # DP: the other ranks read the same samples
    )

    # Resume: the step number is the only state of the data
    run = Run(
        args, model, optimizer, sampler, dataset, device, mesh, held_out=open_held_out(args),
        loss_of=loss_of_part, size=sum(p.numel() for p in whole.parameters()),  # PP: not a stage
        after_evaluation=model.reset_iter_state,  # FSDP: the last unit would stay gathered
        usage=Usage(model, stage, pp),  # FSDP: all ranks of a stage must use the same units
    )
    sampler.start = run.resume()
    figures = {}
    if E:  # EP: how uneven the load of experts is
        figures["busiest_expert"] = functools.partial(busiest_share, [model], device)

    # Loop
    for step, batch in run.steps(load_steps(dataset, sampler, device, args.workers)):
        # DP, CP, TP, PP: dropout is equal where activations are equal, and nowhere else.
        seed_step(args.seed, step, sampler.rank, cp_rank, tp_rank, stage)
        set_learning_rate(optimizer, step, args)
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # PP: 0 but on the last stage
        count.copy_(count_targets(batch, meshes.dp.get_group()))  # DP: of all samples
        for i, (inputs, targets) in enumerate(batch):  # (B/dp/accum, T)
            # CP: the targets are shifted already, so both are split alike: (B/dp/accum, T/cp).
            inputs, targets = inputs[:, positions], targets[:, positions]
            losses = forward_backward(inputs, targets, last=i == args.grad_accum - 1)
            loss += sum(micro_loss.detach() for micro_loss in losses)

        # PP: the norm of the gradients of all stages.
        grad_norm = clip_over_stages(model.parameters(), args.max_norm, mesh.get_group("pp"))
        optimizer.step()
        # EP: of all tokens, which the ranks of a stage share
        if E:
            balance_experts(model, args.balance_rate, meshes.tokens.get_group())
        optimizer.zero_grad()
        # TP: all ranks of tp have the same loss
        run.after_step(step, loss / tp, grad_norm, **figures)
    return run.history


def make_meshes(args, device_type):
    """The DeviceMeshes of the grid in ``args``: ``all`` of it; ``dp``, the ranks that read other
    samples; ``shard``, those over which FSDP shards; and with experts ``experts``, a second grid of
    the same ranks, ``expert_shard``, over which FSDP shards them, and ``tokens``, the ranks of a
    stage, which share the tokens of the batch."""
    dp, cp, tp, pp, R = args.dp, args.cp, args.tp, args.pp, args.replicate  # R: DP, CP
    mesh = init_device_mesh(
        device_type, (pp, R, dp // R, cp, tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    )
    meshes = types.SimpleNamespace(all=mesh)
    meshes.dp = mesh["dp_replicate", "dp_shard"]._flatten("dp")  # DP
    # DP, CP: parameters are sharded over both, since for them CP is more data parallelism.
    meshes.shard = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    if R > 1:
        meshes.shard = DeviceMesh._concatenate([mesh["dp_replicate"], meshes.shard])
    # EP: a second mesh over the same ranks (PP: of each stage). DP, CP and TP split tokens alike
    if args.config.num_experts:
        expert_dp = dp // R * cp * tp // args.ep  # the ranks that hold the same experts
        meshes.experts = experts = init_device_mesh(
            device_type, (pp, R, expert_dp, args.ep),
            mesh_dim_names=("pp", "dp_replicate", "expert_dp", "ep"),
        )
        meshes.expert_shard = experts["expert_dp"]
        if R > 1:
            meshes.expert_shard = experts["dp_replicate", "expert_dp"]
        meshes.tokens = experts["dp_replicate", "expert_dp", "ep"]._flatten("tokens")
    # DTensor warns that a flattened mesh would be faster for the gradient norm.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return meshes


def compose(args, whole, model, meshes, positions):
    """Cut ``model``, a copy of ``whole`` on the meta device, to the stage of this rank, and apply
    each strategy to it in its turn, in place. ``positions`` (T/cp,): those of this rank."""
    mesh, E = meshes.all, args.config.num_experts
    cp, tp, pp = (mesh[name].size() for name in ("cp", "tp", "pp"))
    # PP: delete what other stages have
    stage_layers = split_layers(len(whole.model.layers), pp, cost_of_head(whole))
    keep_stage(model, stage_layers, mesh.get_local_rank("pp"))
    check_stages(whole, [model], mesh.get_group("pp"))
    layers = model.model.layers.values()
    dtype = torch.bfloat16 if args.bfloat16 else None  # FSDP: instead of autocast
    # EP: the experts of each layer, then FSDP for them
    if E:
        for layer in layers:
            shard_experts(
                layer.mlp.experts, meshes.experts["ep"], meshes.expert_shard, dtype,
                reshard_after_forward=pp == 1,  # PP: a stage keeps them for all micro-batches
            )
            layer.mlp.dispatch = functools.partial(
                to_experts_and_back, group=meshes.experts.get_group("ep")
            )
    # TP: the matrices of each layer are split. EP: but not those of experts
    if tp > 1:
        plan = llama_plan(args.sequence_parallel)
        parallelize(model, mesh["tp"], plan_with_experts(plan) if E else plan, whole)
        model.lm_head.loss = loss_of_split_logits  # its logits are (B/dp/accum/M, T/cp, V/tp)
        # TP: a compiled layer cannot take an output that is still on its way; FSDP warns of a view
        wait_for_output(model.model.embed_tokens, model.lm_head)
    # CP, TP, PP: hidden states (B, T/cp/tp, D), which a later stage gets, do not tell the positions
    model.forward = functools.partial(model.forward, positions=positions)
    # CP: attention reads the keys and values of all ranks of a sequence
    if cp > 1 and layers:  # the last stage may have none
        group = mesh.get_group("cp")
        set_attention(model, allgather_attention, group, replaces=plain_attention)
    wrap_layers(layers, args.compile, args.activation_checkpointing, head=model.lm_head)
    # FSDP: what is gathered together
    units = [
        [model.model.embed_tokens], *([layer] for layer in layers),
        [model.model.norm, model.lm_head],
    ]
    units = [unit for unit in units if list(nn.ModuleList(unit).parameters())]  # PP: of this stage
    # DP, CP: over both. PP: a stage keeps its parameters gathered for all of its micro-batches
    shard(model, units, meshes.shard, dtype, reshard_after_forward=pp == 1)
    # EP: gather what a layer needs ahead of the wait for the counts
    if E:
        prefetch(units, backward=args.activation_checkpointing)
    reduce_by_sum(model)  # DP, CP: each rank's loss is a part of the mean over all ranks


def plan_with_experts(plan):
    """``plan``, which is ``llama_plan(sequence_parallel=True)``, if experts take the place of each
    MLP. The experts are not split: each rank routes the tokens of its part of the sequence, rows
    (tokens/tp, D). Each rank has the whole router, and a part of its gradient, as of a norm's."""
    return {name: style for name, style in plan.items() if ".mlp" not in name} | {
        "model.layers.*.post_attention_layernorm": SequenceParallel(use_local_output=True),
        "model.layers.*.mlp.router": SequenceParallel(sequence_dim=0, use_local_output=True),
    }


def in_stages(step, inputs, targets, last=True):
    """Forward and backward passes of a batch through the stages of a pipeline, if ``step`` is
    ``schedule.step``; forward passes only, if it is ``schedule.eval``. The first stage uses the
    inputs, the last the targets. Returns the losses of the micro-batches, on the last stage.
    ``last``, whether nothing follows in this step, changes nothing: PipelineStage reduces gradients
    over replicas in each call. So use more --microbatches rather than more --grad-accum."""
    losses = []
    step(inputs, targets=targets, target=targets, losses=losses, return_outputs=False)
    return losses


def in_one_stage(model, M, loss_fn, inputs, targets, last):
    """The same in a single stage. Under PipelineStage FSDP would keep the parameters and gradients
    of the whole model; here it frees them unit by unit, and reduces over replicas once in a step,
    as in fsdp.py."""
    losses = []
    for i, (x, y) in enumerate(zip(inputs.chunk(M), targets.chunk(M))):
        model.set_requires_all_reduce(last and i == M - 1)
        losses.append(loss_fn(model(x, targets=y), y))
        losses[-1].backward()
    return losses


def add_grid_options(parser):
    """Add the sizes of the grid, and how its axes split."""
    grid = parser.add_argument_group("grid", "The product of the first four is the "
                                     "world size.")
    for name, what in (
        ("dp", "data-parallel ranks; None: what the other three leave"),  # DP
        ("cp", "context-parallel ranks, shards of each sequence"),  # CP
        ("tp", "tensor-parallel ranks"),  # TP
        ("pp", "pipeline stages"),  # PP
    ):
        variable = f"{name.upper()}_SIZE"
        grid.add_argument(f"--{name}", type=at_least(1), metavar="N",
                          help=f"{what}; taken from {variable} if that is set",
                          default=os.environ.get(variable, None if name == "dp" else "1"))  # DP
    grid.add_argument("--ep", type=at_least(1), default=1, metavar="N",  # EP: of DP, CP and TP
                      help="ranks over which the experts of each layer are spread, a divisor of "
                      "dp / R x cp x tp; 1: FSDP for experts")
    grid.add_argument("--balance-rate", type=at_least(0, float), default=0.0, metavar="X",  # EP
                      help="how much each step changes the biases that balance the load of "
                      "experts; 0: not at all")
    grid.add_argument("--replicate", type=at_least(1), default=1, metavar="R",  # DP, CP
                      help="replicas of the parameters, each sharded over dp / R x cp ranks")
    grid.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True,
                      help="with --tp: split the norms and the residual stream along the "  # TP
                      "sequence")
    grid.add_argument("--microbatches", type=at_least(1), metavar="M",  # PP
                      help="micro-batches into which the pipeline cuts each of the --grad-accum "
                      "micro-batches; None: as many as stages")


def check(args, n):
    """Refuse a grid that n ranks do not fill, and sizes that it cannot split.

    Raises:
        SettingError: the message says what to change.
    """
    dp, cp, tp, pp, M, config = args.dp, args.cp, args.tp, args.pp, args.microbatches, args.config
    product, pieces, experts = dp * cp * tp * pp, dp * args.grad_accum * M, config.num_experts
    refuse([
        (product != n,
         f"World size ({n}) must equal dp ({dp}) x tp ({tp}) x cp ({cp}) x pp ({pp}) = {product}: "
         f"change one of them, or start {product} processes"),
        (pp > config.num_hidden_layers,
         f"--pp {pp} stages are more than the {config.num_hidden_layers} layers: use fewer stages, "
         f"or raise --num-hidden-layers"),
        (dp % args.replicate,
         f"--replicate {args.replicate} does not divide dp ({dp}): use a divisor"),
        (args.batch_size % pieces,
         f"--batch-size {args.batch_size} cannot be cut into {pieces} equal parts (dp x "
         f"--grad-accum x --microbatches): use a multiple of {pieces}"),
        *cannot_split(args, tp),
        (args.sequence_parallel and args.seq_len // cp % tp,
         f"--seq-len {args.seq_len} over --cp {cp} is {args.seq_len // cp} positions, which cannot "
         f"be cut into --tp {tp} equal parts: use a multiple of {2 * cp * tp}"),
        ((args.balance_rate or args.ep > 1) and not experts,
         "--ep and --balance-rate are of a model with experts: give --num-experts too, or leave "
         "them out"),
        (experts and tp > 1 and not args.sequence_parallel,
         f"--no-sequence-parallel with --num-experts: each of the --tp {tp} ranks would send all "
         f"tokens to the experts; leave it out"),
    ])
    check_sequence(args, cp, zigzag=True)
    if experts:
        refuse(cannot_share_experts(args, dp // args.replicate * cp * tp))


if __name__ == "__main__":
    launch(main)
