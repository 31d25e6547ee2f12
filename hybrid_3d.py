"""Data x tensor x context x pipeline parallel: all of it on one mesh.

Split: the layers over --pp stages; each layer's matrices over --tp ranks; each sequence over --cp; the batch over
--dp; and what is left of the parameters, gradients and optimizer states, as in fsdp.py, over the dp x cp ranks
that would else hold the same (with --replicate R in R replicas). Use it when one of these alone has reached its
limit: start with fsdp.py, add --tp within a machine when layers or batches get too small per rank, --cp for long
sequences, --pp between machines when gathering parameters takes longer than computing. (Llama 3, arXiv:2407.21783)

    torchrun --nproc_per_node=8 hybrid_3d.py --dp 2 --tp 2 --cp 2
    torchrun --nproc_per_node=8 hybrid_3d.py --tp 2 --pp 2 --microbatches 4      # dp fills what is left: 2
    DP_SIZE=2 CP_SIZE=2 TP_SIZE=2 PP_SIZE=2 torchrun --nproc_per_node=16 hybrid_3d.py --replicate 2

Ranks are numbered so that those that talk most are nearest: tp innermost, since its ranks wait for each other
in every layer, so that they share a machine's fast links; then cp, which talks once per attention; then dp, whose
gathers run ahead of their use; pp outermost, which sends hidden states of one stage to the next only.

Sent: per layer, what tp.py's and cp.py's docstrings say, of this rank's share of the batch; fsdp.py's of the
rank's part U of the parameters; and between stages the hidden states forward and their gradients backward.

The order of composition: tensor parallel first, as it changes what a layer computes; then the attention of context
parallel; then FSDP, which shards what the rank now holds; then the pipeline around it all.
"""

import argparse
import functools
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed._functional_collectives import all_gather_single
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel,
    parallelize_module,
)

from common.arguments import argument_parser, at_least, parse_arguments
from common.checkpoint import Checkpoints
from common.data import BatchSampler, TokenDataset, load_batches
from common.environment import rank_and_world_size
from common.errors import SettingError
from common.launch import launch, start_process_group
from common.metrics import Metrics
from common.model import (
    Transformer, causal_attention, checkpoint_activations, compile_layers, init_weights, next_token_loss
)
from common.optimizer import decay_groups, learning_rate, set_learning_rate


def main(argv=None):
    # Arguments
    parser = argument_parser(__doc__)
    group = parser.add_argument_group("grid", "Their product is the world size.")
    for name, what in (("dp", "data-parallel ranks; None: what the others leave"), ("cp", "shards of each sequence"),
                       ("tp", "tensor-parallel ranks"), ("pp", "pipeline stages")):
        variable = f"{name.upper()}_SIZE"
        group.add_argument(f"--{name}", type=at_least(1), metavar="N", help=f"{what}; from {variable}, if that is set",
                           default=os.environ.get(variable, None if name == "dp" else "1"))
    group.add_argument("--replicate", type=at_least(1), default=1, metavar="R",
                       help="replicas of the parameters, each sharded over dp x cp / R ranks")
    group.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True,
                       help="with --tp: split norms and residual stream along the sequence")
    group.add_argument("--microbatches", type=at_least(1), metavar="M",
                       help="what the pipeline cuts each of the --grad-accum micro-batches into; None: pp of them")
    args = parse_arguments(parser, argv)

    # Start-up: one mesh says who reads and computes what, another, of the same ranks, where parameters live
    check_grid(args, rank_and_world_size()[1])
    device = start_process_group(args)
    # It would rather have the norm of the gradients reduced over a flattened mesh, at length, on each rank.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dp, cp, tp, pp = args.dp, args.cp, args.tp, args.pp
    mesh = init_device_mesh(device.type, (pp, dp, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    home = init_device_mesh(
        device.type, (pp, args.replicate, dp * cp // args.replicate, tp),
        mesh_dim_names=("pp", "replicate", "shard", "tp"),
    )
    stage = mesh.get_local_rank("pp")
    shards = zigzag_positions(args.seq_len, cp).to(device)  # (cp, T/cp)
    positions = shards[mesh.get_local_rank("cp")]

    # Model: built without memory, this rank's stage of it
    with torch.device("meta"):
        whole, model = (Transformer(args.config).to(args.param_dtype) for _ in range(2))
    layers = split_layers(args.config.num_hidden_layers, pp)
    keep_stage(model, layers, stage)
    # 1. tensor parallel
    if tp > 1:
        parallelize_module(model, home["tp"], plan(model, args.sequence_parallel), src_data_rank=None)
    # 2. context parallel
    if cp > 1:
        mask = positions[:, None] >= shards.flatten()  # (T/cp, T), the keys in the order of the ranks
        for layer in model.model.layers.values():
            layer.self_attn.attention = functools.partial(allgather_attention, mask=mask, group=mesh.get_group("cp"))
    if args.compile:
        compile_layers(model)
        # A compiled layer takes no tensor that is still arriving, or loses its gradient: + 0 waits for it.
        model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output + 0)
    if args.activation_checkpointing:
        checkpoint_activations(model)
    # 3. FSDP: a stage with several micro-batches keeps its parameters, rather than gather them for each
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":  # cast_forward_inputs would round the rotary angles
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*model.model.layers.values(), model]:
        fully_shard(
            module, mesh=home["shard"] if args.replicate == 1 else home["replicate", "shard"], mp_policy=policy,
            reshard_after_forward=args.microbatches == 1,
        )
    # materialised, each parameter from a seed of its own
    model.to_empty(device=device)
    init_weights(model, args.seed, shard=lambda p, whole: distribute_tensor(
        whole, p.device_mesh, p.placements, src_data_rank=None
    ))
    parameters = dict(model.named_parameters())
    # 4. the pipeline around it; of one stage, it is a loop over the micro-batches
    b = args.batch_size // (dp * args.grad_accum * args.microbatches)
    T = args.seq_len // cp
    stream = T // tp if args.sequence_parallel else T  # positions of the hidden states that travel
    with torch.device("meta"):
        tokens = torch.empty(b, T, dtype=torch.long)
        hidden = torch.empty(
            b, stream, args.config.hidden_size, requires_grad=True,
            dtype=torch.bfloat16 if args.dtype == "bfloat16" else args.param_dtype,
        )
    model.forward = functools.partial(model.forward, positions=positions)
    schedule = pipelining.Schedule1F1B(
        pipelining.PipelineStage(
            model, stage, pp, device, group=mesh.get_group("pp"),
            input_args=hidden if stage else tokens, output_args=hidden,  # of the last stage it is not used
        ),
        args.microbatches, scale_grads=False,
        loss_fn=lambda logits, targets: local(next_token_loss(logits, targets)) / args.microbatches / args.grad_accum,
    )

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), betas=(args.beta1, args.beta2), fused=True
    )

    # Data: all ranks with the same place in dp read the same rows
    dataset = TokenDataset(args.data, args.seq_len, args.token_dtype)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps, mesh=mesh["dp"]
    )
    batches = load_batches(dataset, sampler, args.config.vocab_size, device, args.workers)

    # Resume: the step is all of the data's state
    checkpoints = Checkpoints(args, sampler, parameters, optimizer)
    sampler.start = checkpoints.resume()

    # Loop
    metrics = Metrics(args, device, whole, sampler, optimizer, home, picture=picture(mesh, layers))
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        lr = set_learning_rate(optimizer, learning_rate(step, args))
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # of this rank's share, on the last stage
        for micro_batch in range(args.grad_accum):
            inputs, targets = next(batches)  # (B/dp/accum, T): targets are shifted before the sequence is split
            inputs, targets = inputs[:, positions], targets[:, positions]  # (B/dp/accum, T/cp)
            losses = []
            with loss_parallel():  # with tp, logits are (b, T/cp, V/tp)
                schedule.step(inputs, target=targets, losses=losses, return_outputs=False)
            loss += sum(micro_loss.detach() for micro_loss in losses)

        metrics.after_backward(step)
        # The norm of this stage, over all ranks that share it; then over the stages: the root of the sum of squares.
        grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
        dist.all_reduce(grad_norm.square_(), group=mesh.get_group("pp"))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.grad_clip, grad_norm.sqrt_())
        optimizer.step()
        optimizer.zero_grad()

        if metrics.due(step):
            dist.all_reduce(loss)  # it is there dp x cp x tp times, and zero on the other stages
            metrics.log(step, loss / (dp * cp * tp), grad_norm, lr)
        metrics.end_step(step)
        checkpoints.after_step(step)

    checkpoints.finish()
    return metrics.close(**theory(args, model, stage))


def check_grid(args, world_size):
    """Fill in what follows from the rest of the grid, and refuse what does not fit it."""
    others = args.cp * args.tp * args.pp
    args.dp = args.dp or max(1, world_size // others)
    if args.dp * others != world_size:
        raise SettingError(
            f"World size ({world_size}) must equal dp ({args.dp}) x tp ({args.tp}) x cp ({args.cp}) x pp ({args.pp}) "
            f"= {args.dp * others}: change one of them, or start {args.dp * others} processes"
        )
    args.microbatches = args.microbatches or args.pp
    if args.microbatches < args.pp:
        raise SettingError(f"--microbatches {args.microbatches} leaves stages without work: use at least --pp {args.pp}")
    if args.pp > args.config.num_hidden_layers:
        raise SettingError(
            f"--pp {args.pp} stages are more than the {args.config.num_hidden_layers} layers: use fewer stages, or "
            f"raise --num-hidden-layers"
        )
    if args.dp * args.cp % args.replicate:
        raise SettingError(f"--replicate {args.replicate} does not divide dp ({args.dp}) x cp ({args.cp})")
    parts = {
        "--num-attention-heads": (args.config.num_attention_heads, args.tp, "--tp"),
        "--num-key-value-heads": (args.config.num_key_value_heads, args.tp, "--tp"),
        "--intermediate-size": (args.config.intermediate_size, args.tp, "--tp"),
        "--vocab-size": (args.config.vocab_size, args.tp, "--tp"),
        "--batch-size": (
            args.batch_size, args.dp * args.grad_accum * args.microbatches, "dp x --grad-accum x --microbatches"
        ),
        "--seq-len": (args.seq_len, 2 * args.cp if args.cp > 1 else 1, "2 x --cp"),
    }
    for name, (size, divisor, what) in parts.items():
        if size % divisor:
            raise SettingError(f"{name} {size} cannot be cut into {divisor} equal parts ({what}): use a multiple of {divisor}")
    if args.sequence_parallel and args.seq_len // args.cp % args.tp:
        raise SettingError(
            f"--seq-len {args.seq_len} over --cp {args.cp} is {args.seq_len // args.cp} positions, which cannot be cut into "
            f"--tp {args.tp} equal parts: use a multiple of {2 * args.cp * args.tp}, or --no-sequence-parallel"
        )


def picture(mesh, layers):
    """Lines that say which rank is where, and which layers it has."""
    for p, stage in enumerate(mesh.mesh.tolist()):
        held = f"layers {layers[p][0]}-{layers[p][-1]}" if layers[p] else "no layers"
        for d, replica in enumerate(stage):
            shards = "   ".join(f"cp {c}: {' '.join(map(str, ranks))}" for c, ranks in enumerate(replica))
            yield f"pp {p} dp {d} | {shards} | {held}"


def split_layers(num_layers, num_stages):
    """The layers of each stage, as ranges, as even as they go; embedding and head count as a layer each."""
    each, over = divmod(num_layers + 2, num_stages)
    firsts = [stage * each + min(stage, over) - 1 for stage in range(num_stages + 1)]  # -1: the embedding
    return [range(max(first, 0), min(last, num_layers)) for first, last in zip(firsts, firsts[1:])]


def keep_stage(model, layers, stage):
    """Take out of ``model`` what is not of ``stage``; what remains keeps its names."""
    for name in list(model.model.layers):
        if int(name) not in layers[stage]:
            del model.model.layers[name]
    if stage > 0:
        model.model.embed_tokens = nn.Identity()
    if stage < len(layers) - 1:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()


def plan(model, sequence_parallel):
    """How each module's weights are split, and between which layouts its inputs and outputs change.

    Columns of a weight (out, in) are its rows here, since a linear layer multiplies by the transpose: split
    ``out``, and each rank has some of the heads; split ``in``, and each rank has a part of every sum.
    """
    # The residual stream between the layers: (B, T/tp, D) or (B, T, D)
    stream = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()
    styles = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.self_attn": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        "model.layers.*.post_attention_layernorm": norm,
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate()),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=stream),
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=stream, use_local_output=False),
    }
    # of which this stage may lack the first or the last
    own = {name for name, module in model.named_modules() if not isinstance(module, nn.Identity)}
    return {name: style for name, style in styles.items() if name in own or name.startswith("model.layers.")}


class Replicated(ParallelStyle):
    """Weights that every rank holds, as DTensors like all others: clipping and AdamW take no mixture."""

    def _apply(self, module, mesh):
        return distribute_module(
            module, mesh,
            input_fn=lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),
            output_fn=lambda _, output, mesh: output.to_local(),
        )


def zigzag_positions(T, n):
    """The positions that each cp rank holds, (cp, T/cp): chunks r and 2n-1-r of 2n, equal work under a causal mask."""
    if n == 1:
        return torch.arange(T)[None]
    early, late = torch.arange(T).view(2 * n, -1).chunk(2)
    return torch.cat((early, late.flip(0)), dim=1)


def allgather_attention(q, k, v, mask, group):
    """Llama 3's: q (B, H, T/cp, K) of this rank, keys and values of all, ``mask`` (T/cp, T). cp.py has the ring."""
    k, v = all_gather_single(torch.stack((k, v)), 3, group)  # (2, B, KV, T, K); backward: a reduce-scatter
    return causal_attention(q, k, v, mask)


def local(loss):
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def theory(args, model, stage):
    """What this rank holds and sends in a step, numbers for loss and norm left out. See the other scripts' docstrings."""
    dp, cp, tp, pp, a, R = args.dp, args.cp, args.tp, args.pp, args.grad_accum, args.replicate
    s, config, layers = dp * cp // R, args.config, len(model.model.layers)
    N = sum(p.nbytes for p in model.parameters() if p.ndim == 1)  # norms
    U = (sum(p.nbytes for p in model.parameters()) - N) / tp + N  # what FSDP shards
    half = 0.5 if args.dtype == "bfloat16" else 1  # what is computed with, beside what is kept
    gathers = 2 * a if args.microbatches == 1 else a
    fsdp = (gathers * half * U + a * U) * (s - 1) / s + a * 2 * U / s * (R - 1) / R
    t = args.batch_size // dp * args.seq_len // cp * args.param_dtype.itemsize  # a number for each token
    X = t * config.hidden_size * half  # hidden states
    again = args.activation_checkpointing
    if args.sequence_parallel:
        in_layers, norms = (8 + 3 * again) * X, 2 * N * a * half
    else:
        in_layers, norms = (8 + 2 * again) * X, 0
    ends = 2 * X * ((stage == 0) + (stage == pp - 1)) + 6 * t * (stage == pp - 1)  # embedding, head and loss
    tensor = (layers * in_layers + ends + norms) * (tp - 1) / tp
    S = 2 * t * half * config.num_key_value_heads // tp * config.head_dim
    context = layers * (2 + again) * S * (cp - 1)
    pipeline = X / (tp if args.sequence_parallel else 1) * ((stage > 0) + (stage < pp - 1))
    return {
        "parameters": ("U/s", U / s), "gradients": ("U/s", U / s), "optimizer_states": ("2U/s", 2 * U / s),
        "sent": (
            f"fsdp {fsdp:,.0f} + tp {tensor:,.0f} + cp {context:,.0f} + pp {pipeline:,.0f}",
            fsdp + tensor + context + pipeline,
        ),
    }


if __name__ == "__main__":
    launch(main)
