"""Data x tensor x context x pipeline parallel: every axis at once.

Split: the layers over --pp stages; each layer's matrices over --tp ranks; each sequence over --cp
ranks; the batch over --dp ranks; and, as in fsdp.py, the parameters, gradients and optimizer states
over the dp x cp ranks that would otherwise hold copies (with --replicate R in R replicas). Use it
if one axis alone has reached its limit. Start with fsdp.py. Add --tp within a machine if a layer is
too large, or if the batch per rank is too small to hide FSDP's all-gathers. Add --cp for long
sequences. Add --pp between machines if gathering the parameters takes longer than computing.
(Llama 3, arXiv:2407.21783)

    torchrun --nproc_per_node=8 hybrid_3d.py --dp 2 --tp 2 --cp 2
    torchrun --nproc_per_node=8 hybrid_3d.py --tp 2 --pp 2 --microbatches 4     # dp is the rest: 2
    DP_SIZE=2 CP_SIZE=2 TP_SIZE=2 PP_SIZE=2 torchrun --nproc_per_node=16 hybrid_3d.py --replicate 2

Ranks are numbered so that those that communicate most are nearest. tp is innermost: its ranks wait
for each other in every layer, so they share the fast links of a machine. Then cp, which
communicates once in each attention. Then dp, whose all-gathers run ahead of their use. pp is
outermost: it only sends hidden states from one stage to the next, and their gradients back.

Sent in a step: in each layer what tp.py and cp.py (--attention allgather) send for this rank's
share of the batch; what fsdp.py sends for the parameters of this rank's stage, divided by tp; and
between stages the hidden states forward and their gradients backward.

Overlap: as in fsdp.py; what tp and cp send is exposed. With --pp the gradients are reduced after
the last micro-batch: nothing hides this.

The order of composition: tensor parallel first, because it changes what a layer computes; then the
attention of context parallel; then FSDP, which shards what the rank now holds; then the pipeline
around all of it.
"""

import argparse
import fnmatch
import functools
import itertools
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel,
    loss_parallel, parallelize_module,
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
    MAX_LOGITS, Transformer, checkpoint_activations, compile_layers, init_weights, materialise
)
from common.optimizer import (
    decay_groups, learning_rate, set_learning_rate, skip_if_not_finite
)
from common.seed import seed_step
from common.slices import local_slices
from common.validation import Validation

aten = torch.ops.aten
# torch 2.11 has only the old names of these functions.
all_gather_single = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
reduce_scatter_single = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single")
    else dist.reduce_scatter_tensor
)


def main(argv=None):
    # Arguments
    parser = argument_parser(__doc__)
    group = parser.add_argument_group("grid", "The product of the four is the world size.")
    for name, what in (
        ("dp", "data-parallel ranks; None: what the other three leave"),
        ("cp", "context-parallel ranks, shards of each sequence"),
        ("tp", "tensor-parallel ranks"),
        ("pp", "pipeline stages"),
    ):
        variable = f"{name.upper()}_SIZE"
        group.add_argument(f"--{name}", type=at_least(1), metavar="N",
                           help=f"{what}; taken from {variable} if that is set",
                           default=os.environ.get(variable, None if name == "dp" else "1"))
    group.add_argument("--replicate", type=at_least(1), default=1, metavar="R",
                       help="replicas of the parameters, each sharded over dp / R x cp ranks")
    group.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True,
                       help="with --tp: split the norms and the residual stream along the sequence")
    group.add_argument("--microbatches", type=at_least(1), metavar="M",
                       help="micro-batches into which the pipeline cuts each of the --grad-accum "
                       "micro-batches; None: as many as stages")
    args = parse_arguments(parser, argv)
    _, n = rank_and_world_size()
    fill_grid(args, n)
    check(args, n)
    dp, cp, tp, pp = args.dp, args.cp, args.tp, args.pp

    # Start-up: one mesh. Ranks of one `dp` coordinate read the same samples; parameters are sharded
    # over `dp_shard` and `cp` together, since for them cp is more data parallelism
    device = start_process_group(
        args.device, args.backend, args.timeout, args.out, all_options(args)
    )
    mesh = init_device_mesh(
        device.type, (pp, args.replicate, dp // args.replicate, cp, tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    )
    dp_mesh = mesh["dp_replicate", "dp_shard"]._flatten("dp")
    shard_mesh = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    if args.replicate > 1:
        shard_mesh = DeviceMesh._concatenate([mesh["dp_replicate"], shard_mesh])
    stage = mesh.get_local_rank("pp")
    shards = shard_positions(args.seq_len, cp).to(device)  # (cp, T/cp)
    cp_rank = mesh.get_local_rank("cp")
    tp_rank = mesh.get_local_rank("tp") if args.sequence_parallel else 0  # of the residual stream
    positions = shards[cp_rank]
    # DTensor warns, at length and on every rank, that a flattened mesh would be faster for the
    # gradient norm.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

    # Model: this rank's stage, built on the meta device
    # Your own model: torch.manual_seed(args.seed), then MyModel().to(device), in place of the meta
    # device, materialise and init_weights; its initial values, buffers and ties stay as they are.
    with torch.device("meta"):
        whole, model = (Transformer(args.config).to(args.param_dtype) for _ in range(2))
    head, layer = (  # in parameters, as which they compute
        sum(p.numel() for p in module.parameters())
        for module in (whole.lm_head, whole.model.layers["0"])
    )
    stage_layers = split_layers(args.config.num_hidden_layers, pp, head / layer)
    keep_stage(model, stage_layers, stage)
    layers = model.model.layers.values()
    # 1. TP
    if tp > 1:
        parallelize(model, mesh["tp"], plan(args.sequence_parallel))
        for module in (model.model.embed_tokens, model.lm_head):
            wait_for_output(module)
    # 2. CP
    if cp > 1:
        for layer in layers:
            layer.self_attn.attention = functools.partial(
                allgather_attention, group=mesh.get_group("cp")
            )
    if args.compile:
        compile_layers(layers)
    if args.activation_checkpointing:
        checkpoint_activations(layers)
    # 3. FSDP: in a pipeline a stage keeps its parameters gathered for all micro-batches
    groups = [[model.model.embed_tokens], *([layer] for layer in layers)]
    groups.append([model.model.norm, model.lm_head])
    groups = [group for group in groups if list(nn.ModuleList(group).parameters())]  # of this stage
    last_group = sum(
        (p.to_local() if tp > 1 else p).nbytes for p in nn.ModuleList(groups[-1]).parameters()
    )
    shard(
        model, groups, shard_mesh, reshard_after_forward=pp == 1,
        dtype=torch.bfloat16 if args.dtype == "bfloat16" else None,
    )
    # Materialised; each parameter is drawn from its own seed
    materialise(model, device)
    init_weights(model, args.seed, local_slices)
    # 4. PP
    model.forward = functools.partial(model.forward, positions=positions)
    micro_batch_size = args.batch_size // (dp * args.grad_accum * args.microbatches)
    with torch.device("meta"):
        tokens = torch.empty(micro_batch_size, len(positions), dtype=torch.int64)
        length = len(positions) // tp if args.sequence_parallel else len(positions)
        hidden = torch.empty(
            micro_batch_size, length, args.config.hidden_size, dtype=args.compute_dtype
        )

    def loss_fn(micro_loss, targets):  # a mean over the batch: FSDP averages over dp x cp ranks
        return micro_loss * dp * cp / count

    if pp > 1:
        schedule = make_1f1b_schedule(
            model, stage, pp, args.microbatches, tokens, hidden,
            torch.empty((), dtype=args.param_dtype, device="meta"),  # the loss, of the last stage
            loss_fn, mesh.get_group("pp"), device,
        )
        forward_backward = schedule.step
    else:
        forward_backward = functools.partial(one_stage, model, args.microbatches, loss_fn)

    def loss_of_part(inputs, targets):  # CP, PP: of this rank's positions and stage, for validation
        return forward_only(
            {stage: model}, range(pp), range(args.microbatches), inputs[:, positions],
            targets[:, positions], hidden, mesh.get_group("pp"),
        )

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), betas=(args.beta1, args.beta2),
        fused=True,
    )

    # Data
    dataset = TokenDataset(args.data, args.seq_len, args.token_dtype, args.config.vocab_size)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=dp_mesh,  # the tp, cp and pp ranks read the same samples
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
    diagram = describe_grid(mesh.mesh.view(pp, dp, cp, tp).tolist(), stage_layers)
    metrics = Metrics(
        args.out, optimizer, [model, *layers],
        [describe(args, whole), sampler, dataset, *diagram],
        start=sampler.start, stop=args.steps, tokens_per_step=args.batch_size * args.seq_len,
        device=device, mesh=mesh, log_every=args.log_every, profile=args.profile, loggers=loggers,
        flops_per_token=args.config.flops_per_token(args.seq_len), peak_tflops=args.peak_tflops,
    )
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        # FSDP, CP, TP: dropout is equal where activations are equal, and nowhere else.
        seed_step(args.seed, step, sampler.rank, cp_rank, tp_rank)
        lr = learning_rate(step, args.lr, args.steps, args.warmup_steps, args.min_lr)
        set_learning_rate(optimizer, lr)
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # mean over this rank's share
        batch = [next(batches) for _ in range(args.grad_accum)]
        count = count_targets(batch, dp_mesh.get_group())  # FSDP: of all samples
        for inputs, targets in batch:  # (B/dp/accum, T)
            # CP: the targets are shifted already, so both are split alike: (B/dp/accum, T/cp).
            inputs, targets = inputs[:, positions], targets[:, positions]
            # PP: forward and backward; the first stage uses the inputs, the last the targets.
            losses = []
            with loss_parallel():  # TP: the logits are (B/dp/accum/M, T/cp, V/tp)
                forward_backward(
                    inputs, targets=targets, target=targets, losses=losses, return_outputs=False
                )
            loss += sum(micro_loss.detach() for micro_loss in losses)  # PP: on the last stage

        metrics.after_backward(step)
        # PP: the norm of the gradients of all stages.
        grad_norm = clip_grad_norm(model.parameters(), args.grad_clip, mesh.get_group("pp"))
        skip_if_not_finite(optimizer, grad_norm, step)
        optimizer.step()
        optimizer.zero_grad()

        if metrics.due(step) or checkpoints.due(step):
            # PP: the ranks of the last stage have the loss, all others 0. TP: they have the same
            # loss tp times. DP, CP: the mean over the batch is the mean of their equal shares.
            dist.all_reduce(loss)
            metrics.log(step, loss / (dp * cp * tp), grad_norm, lr)
        metrics.end_step(step)
        if validation.due(step):
            with metrics.pause(), loss_parallel():  # CP, PP: the part of the loss on this rank
                metrics.log_validation(step, validation.loss(model, loss_of_part))
            reshard(model)  # FSDP: without a backward pass some parameters stay gathered
        if checkpoints.after_step(step):
            break

    checkpoints.finish()
    return metrics.close(**theory(
        sum(p.nbytes for p in model.parameters()),
        sum(p.nbytes for p in model.parameters() if p.ndim == 1), last_group,
        args.batch_size, args.seq_len, args.config.hidden_size,
        args.config.num_key_value_heads, args.config.head_dim, len(layers),
        args.param_dtype.itemsize, args.compute_dtype.itemsize, dp, cp, tp, stage, pp,
        args.replicate, args.grad_accum, args.microbatches, args.sequence_parallel,
        args.activation_checkpointing, tokens.numel() * args.config.vocab_size > MAX_LOGITS,
    ))


def count_targets(batch, group):
    """The number of targets in the micro-batches of a step, without targets of -100. ``group``: the
    ranks that read different samples, over which it is summed. At least 1."""
    count = sum((targets != -100).sum() for _, targets in batch)
    dist.all_reduce(count, group=group)
    return count.clamp(min=1)


def plan(sequence_parallel):
    """How the weights of each module are split, and which layouts its inputs and outputs have.

    A linear layer multiplies by the transpose of its weight (out, in). ColwiseParallel splits
    ``out``: each rank has some of the heads or columns. RowwiseParallel splits ``in``: each rank
    computes partial sums, and the all-reduce or reduce-scatter that follows adds them up. Returns a
    dict for ``parallelize``, from patterns of module names to a ParallelStyle.
    """
    # The residual stream between the layers: (B, T/tp, D) or (B, T, D)
    stream = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else Replicated()
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.self_attn": PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        "model.layers.*.post_attention_layernorm": norm,
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=stream, desired_input_layouts=Replicate()
        ),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=stream),
        "model.norm": norm,
        # Its output is the loss, a replicated scalar. Without targets it would gather the logits.
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }


class Replicated(ParallelStyle):
    """Replicated weights, but as DTensors: clip_grad_norm_ and fused AdamW refuse a mix of Tensor
    and DTensor."""

    def _apply(self, module, mesh):
        return distribute_module(
            module, mesh,
            input_fn=lambda _, inputs, mesh: DTensor.from_local(
                inputs[0], mesh, [Replicate()], run_check=False
            ),
            output_fn=lambda _, output, mesh: output.to_local(),
        )


def parallelize(model, mesh, plan):
    """Split ``model`` in place over ``mesh``, a DeviceMesh of one dimension, as ``plan`` says. A
    pipeline stage may lack modules that the plan names. Every rank must hold the same weights
    before the call: nothing is sent.

    Raises:
        SettingError: the plan splits tied parameters in different ways.
    """
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ties.setdefault(parameter, []).append(name)
    names = [name for name, module in model.named_modules() if not isinstance(module, nn.Identity)]
    own = {pattern: style for pattern, style in plan.items() if fnmatch.filter(names, pattern)}
    parallelize_module(model, mesh, own, src_data_rank=None)
    for first, *others in ties.values():  # parallelize_module has untied them
        tied = model.get_parameter(first)
        for other in others:
            owner, _, attribute = other.rpartition(".")
            if getattr(tied, "placements", None) != getattr(
                model.get_parameter(other), "placements", None
            ):
                raise SettingError(f"{first} and {other} are tied: the plan must split both alike")
            setattr(model.get_submodule(owner), attribute, tied)


def wait_for_output(module):
    """Let the output of ``module`` arrive before it is used: ``+ 0`` waits for the collective.
    torch.compile cannot take an AsyncCollectiveTensor as input: its gradient would be lost. And
    FSDP warns if a module returns a view, such as the local part of a DTensor."""
    module.register_forward_hook(lambda module, inputs, output: output + 0)


def shard_positions(T, n, zigzag=True):
    """The positions in a sequence of T tokens that each of n ranks holds: int64, (n, T/n).

    Under a causal mask late queries attend to more keys than early ones. Zig-zag gives all ranks
    the same work: the sequence is cut into 2n chunks, and rank r holds chunks r and 2n-1-r.

    Raises:
        SettingError: T is no multiple of 2n, or without zig-zag of n.
    """
    chunks = 2 * n if zigzag and n > 1 else n
    if T % chunks:
        raise SettingError(f"{T} positions cannot be cut into {chunks} equal chunks")
    if n == 1 or not zigzag:
        return torch.arange(T).view(n, -1)
    early, late = torch.arange(T).view(2 * n, -1).chunk(2)
    return torch.cat((early, late.flip(0)), dim=1)


@torch.compiler.disable  # compiled by torch 2.11, it would lose its gradients without an error
def allgather_attention(q, k, v, group):
    """The attention of Llama 3: queries of this rank, keys and values of all ranks of ``group``, a
    ProcessGroup. The positions of a rank are zig-zag chunks; see ``shard_positions``. Causal, with
    scores scaled by 1/sqrt(K), without dropout."""
    return AllGatherAttention.apply(q, k, v, group)


class AllGatherAttention(torch.autograd.Function):
    """All-gathers keys and values, and does so again in the backward pass: in between each rank
    keeps only its own.

    All ranks have used this rank's keys and values. A reduce-scatter adds up their gradients from
    all ranks, in float32 at least.
    """

    @staticmethod
    def forward(ctx, q, k, v, group):
        ctx.group = group
        blocks = all_gather_blocks(torch.stack((k, v)), group)
        out, lse = attend_to_blocks(q, own_first(blocks, group), group)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        group = ctx.group
        blocks = all_gather_blocks(torch.stack((k, v)), group)
        grad_q = torch.zeros_like(q, dtype=wide(q))
        grad_blocks = torch.zeros_like(blocks, dtype=wide(k))
        for source, block in own_first(blocks, group):
            queries, keys = in_sight(source, group, q.shape[2])
            block_grad_q, block_grad_kv = attend_backward(
                *(x[..., queries, :] for x in (grad_out, q)), block[..., keys, :],
                out[..., queries, :], lse[..., queries], causal=source == group.rank(),
            )
            grad_q[..., queries, :] += block_grad_q
            grad_blocks[source][..., keys, :] += block_grad_kv
        grad_kv = torch.empty_like(grad_blocks[0])
        reduce_scatter_single(grad_kv, grad_blocks.flatten(0, 1), group=group)
        grad_k, grad_v = grad_kv.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def all_gather_blocks(block, group):
    """The blocks of all n ranks, in the order of the ranks: (n, ...)."""
    blocks = block.new_empty(group.size() * len(block), *block.shape[1:])
    all_gather_single(blocks, block, group)
    return blocks.unflatten(0, (group.size(), -1))


def own_first(blocks, group):
    """Yields (source, block) for all ranks, this rank first."""
    n, rank = group.size(), group.rank()
    for source in ((rank - step) % n for step in range(n)):
        yield source, blocks[source]


def in_sight(source, group, length):
    """Which of this rank's queries attend to which of the keys of rank ``source``: two slices of
    ``length`` positions.

    With chunks r and 2n-1-r on rank r, the causal mask never cuts through a block of another rank:
    exactly half of the block is visible, whichever rank it is from.
    """
    if source == group.rank():
        return slice(None), slice(None)  # under the causal mask
    if source < group.rank():  # its early chunk is before both of mine, its late one after both
        return slice(None), slice(length // 2)
    return slice(length // 2, None), slice(None)  # both of its chunks are between my two


def attend_to_blocks(q, blocks, group):
    """Attention to the keys and values of all ranks. ``blocks`` yields (source, block), this rank's
    own block first: the keys and values of rank ``source``, stacked, (2, B, KV, T/cp, K). Returns
    the output and the log-sum-exp of all scores, as ``attend`` does."""
    for source, block in blocks:
        queries, keys = in_sight(source, group, q.shape[2])
        block_out, block_lse = attend(
            q[..., queries, :], block[..., keys, :], causal=source == group.rank()
        )
        if source == group.rank():
            out, lse = block_out.to(wide(q)), block_lse
        else:
            merge(out[..., queries, :], lse[..., queries], block_out, block_lse)
    return out.to(q.dtype), lse


def wide(x):
    """The type in which partial results are added up: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def attend(q, kv, causal):
    """Attention of Q queries, q (B, H, Q, K), to S keys and values, kv (2, B, KV, S, K): the output
    (B, H, Q, K), and the log-sum-exp of the scores, (B, H, Q), in float32 at least. With ``causal``
    there must be as many queries as keys.

    The kernels are those of F.scaled_dot_product_attention, which does not return the log-sum-exp.
    They keep no scores: memory is proportional to Q and S (FlashAttention, arXiv:2205.14135).

    Raises:
        SettingError: there is no such kernel for float64 on a GPU.
    """
    k, v = kv
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    if q.dtype == torch.float64:
        raise SettingError("float64 on a GPU has no fused attention: use float32, or the CPU")
    if q.dtype != torch.float32 and q.shape[-1] % 8 == 0:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
        return out, lse
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]  # the kernel pads it to a multiple of 32


def attend_backward(grad_out, q, kv, out, lse, causal):
    """The contribution of S keys and values to the gradients: of q, (B, H, Q, K), and of kv,
    (2, B, KV, S, K).

    ``out`` and ``lse`` are over the keys of all blocks, so that the probabilities are the final
    ones. Shapes as in ``attend``.
    """
    k, v = kv
    out, lse = out.to(q.dtype), lse.contiguous()
    if q.device.type == "cpu":
        grad_q, *grad_kv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal
        )
        return grad_q, torch.stack(grad_kv)
    seed = offset = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout: not used
    if q.dtype != torch.float32 and q.shape[-1] % 8 == 0:
        grad_q, *grad_kv = aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed,
            offset,
        )
        return grad_q, torch.stack(grad_kv)
    shared = q.shape[1] // k.shape[1]  # query heads that share keys and values
    k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    grad_q, *grad_kv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, k, v, None, out, padded, seed, offset, 0.0, (True, True, True, False), causal
    )
    return grad_q, torch.stack(grad_kv).unflatten(2, (-1, shared)).sum(3)


def merge(out, lse, block_out, block_lse):
    """Merge the attention to another block into ``out`` and ``lse``, in place: a mean, weighted by
    the sums of exponentials. Shapes as ``attend`` returns them."""
    both = torch.logaddexp(lse, block_lse)
    out.mul_((lse - both).exp()[..., None]).add_(block_out * (block_lse - both).exp()[..., None])
    lse.copy_(both)


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


def split_layers(num_layers, num_stages, head):
    """The layers of each stage, as ranges, such that the slowest stage has as little to compute as
    possible. The last stage also has the head, which costs as much as ``head`` layers (2.4 in an 8B
    Llama 3); the embedding of the first stage costs nothing. If the others cannot have equally many
    layers, later stages get one layer more, because earlier stages keep more activations.
    """
    if num_stages == 1:
        return [range(num_layers)]
    others = num_stages - 1
    last = min(  # the number of layers of the last stage; each stage in between gets at least one
        range(num_layers - others + 1, -1, -1),
        key=lambda layers: max(-(-(num_layers - layers) // others), layers + head),
    )
    each, remainder = divmod(num_layers - last, others)
    sizes = [each + (stage >= others - remainder) for stage in range(others)] + [last]
    borders = [0, *itertools.accumulate(sizes)]
    return [range(first, end) for first, end in itertools.pairwise(borders)]


def keep_stage(model, layers, stage):
    """Delete everything from ``model`` that is not of ``stage``; the rest keeps its names. Returns
    the model."""
    for name in list(model.model.layers):
        if int(name) not in layers[stage]:
            del model.model.layers[name]
    if stage > 0:
        model.model.embed_tokens = nn.Identity()
    if stage < len(layers) - 1:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
    return model


def make_1f1b_schedule(
    part, stage, num_stages, M, tokens, hidden, output, loss_fn, group, device
):
    """Connect this rank's stage to the pipeline; pp.py's ``make_schedule`` explains the arguments,
    and has further schedules. Returns the schedule."""
    hidden = hidden.requires_grad_()
    stage = pipelining.PipelineStage(
        part, stage, num_stages, device, group=group,
        input_args=hidden if stage else tokens,
        output_args=hidden if stage < num_stages - 1 else output,
    )
    return pipelining.Schedule1F1B(stage, M, loss_fn=loss_fn, scale_grads=False)


def one_stage(model, M, loss_fn, inputs, targets, target, losses, return_outputs=False):
    """``schedule.step`` for a single stage. Under PipelineStage FSDP would keep the parameters and
    gradients of the whole model; here it frees them group by group, as in fsdp.py."""
    for micro_batch, (x, y) in enumerate(zip(inputs.chunk(M), targets.chunk(M))):
        model.set_requires_all_reduce(micro_batch == M - 1)
        loss = loss_fn(model(x, targets=y), y)
        loss.backward()
        losses.append(loss)


def forward_only(parts, rank_of, starts, inputs, targets, hidden, group):
    """The forward pass of a batch through all stages, for validation. Each rank sends what it has
    computed, and receives what it computes next, at the same time.

    PyTorch's ``schedule.eval`` would do it too, but not with stages in a V (torch 2.11 to 2.15).

    Args:
        parts: {stage: module} of this rank.
        rank_of: the rank of each stage.
        starts: for each micro-batch, the time at which the first stage computes it; stage s follows
            s units of time later. No rank may have two stages to compute at the same time.
        inputs, targets: (B, T), the same on all ranks.
        hidden: a meta tensor like the hidden states of a micro-batch.
        group: the process group of the pipeline.

    Returns the summed loss and the targets, on the rank of the last stage; others have a loss of 0
    and no targets.
    """
    M, last = len(starts), len(rank_of) - 1
    x, loss = None, torch.zeros((), dtype=torch.float64, device=inputs.device)
    inputs_of, targets_of = inputs.chunk(M), targets.chunk(M)
    todo = {start + stage: (stage, m) for stage in parts for m, start in enumerate(starts)}
    for time in range(max(todo) + 1):
        ops = []
        if time in todo:
            stage, m = todo[time]
            x = parts[stage](x if stage else inputs_of[m], targets_of[m])
            if stage == last:
                loss += x
            elif stage + 1 not in parts:
                ops.append(dist.P2POp(dist.isend, x, group=group, group_peer=rank_of[stage + 1]))
        if time + 1 in todo and (stage := todo[time + 1][0]) and stage - 1 not in parts:
            x = torch.empty_like(hidden, device=inputs.device)
            ops.append(dist.P2POp(dist.irecv, x, group=group, group_peer=rank_of[stage - 1]))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
    return loss, targets if last in parts else targets[:0]


def clip_grad_norm(parameters, max_norm, group):
    """``torch.nn.utils.clip_grad_norm_`` for parameters that are spread over pipeline stages: the
    global norm is the root of the sum of the squares of the stages' norms. Returns it."""
    parameters = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):  # the stage itself is sharded
        norm = norm.full_tensor()
    dist.all_reduce(norm.square_(), group=group)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.sqrt_())
    return norm


def describe_grid(grid, layers):
    """Lines that say where each rank is; ``grid[pp][dp][cp][tp]`` is a rank."""
    for p, stage in enumerate(grid):
        held = f"layers {layers[p][0]}-{layers[p][-1]}" if layers[p] else "no layers"
        for d, replica in enumerate(stage):
            shards = "   ".join(
                f"cp {c}: {' '.join(map(str, ranks))}" for c, ranks in enumerate(replica)
            )
            yield f"pp {p} dp {d} | {shards} | {held}"


def fill_grid(args, n):
    """Fill in what follows from the rest of the grid: --dp and --microbatches."""
    args.dp = args.dp or max(1, n // (args.cp * args.tp * args.pp))
    args.microbatches = args.microbatches or args.pp


def check(args, n):
    """Refuse a grid that n ranks do not fill, and sizes that it cannot split.

    Raises:
        SettingError: the message says what to change.
    """
    dp, cp, tp, pp, config = args.dp, args.cp, args.tp, args.pp, args.config
    product = dp * cp * tp * pp
    if product != n:
        raise SettingError(
            f"World size ({n}) must equal dp ({dp}) x tp ({tp}) x cp ({cp}) x pp ({pp}) = "
            f"{product}: change one of them, or start {product} processes"
        )
    if args.microbatches < pp:
        raise SettingError(
            f"--microbatches {args.microbatches} leaves stages without work: use at least --pp {pp}"
        )
    if pp > config.num_hidden_layers:
        raise SettingError(
            f"--pp {pp} stages are more than the {config.num_hidden_layers} layers: use fewer "
            f"stages, or raise --num-hidden-layers"
        )
    if dp % args.replicate:
        raise SettingError(f"--replicate {args.replicate} does not divide dp ({dp}): use a divisor")
    pieces = dp * args.grad_accum * args.microbatches
    parts = {
        "--num-attention-heads": (config.num_attention_heads, tp, "--tp"),
        "--num-key-value-heads": (config.num_key_value_heads, tp, "--tp"),
        "--intermediate-size": (config.intermediate_size, tp, "--tp"),
        "--vocab-size": (config.vocab_size, tp, "--tp"),
        "--batch-size": (args.batch_size, pieces, "dp x --grad-accum x --microbatches"),
        "--seq-len": (args.seq_len, 2 * cp if cp > 1 else 1, "2 x --cp"),
    }
    for name, (size, divisor, what) in parts.items():
        if size % divisor:
            raise SettingError(
                f"{name} {size} cannot be cut into {divisor} equal parts ({what}): use a multiple "
                f"of {divisor}"
            )
    if args.sequence_parallel and args.seq_len // cp % tp:
        raise SettingError(
            f"--seq-len {args.seq_len} over --cp {cp} is {args.seq_len // cp} positions, which "
            f"cannot be cut into --tp {tp} equal parts: use a multiple of {2 * cp * tp}, or "
            f"--no-sequence-parallel"
        )


def theory(P, N, last_group, B, T, D, KV, K, L, size, matrix_size, dp, cp, tp, stage, pp, R, a, M,
           sequence_parallel, activation_checkpointing, loss_in_chunks):
    """Bytes that a rank holds, and sends in a step; the numbers of loss and norm are left out.

    P bytes of parameters in its stage, N of them in norms; ``last_group`` bytes of what FSDP shards
    are in the last group; (B, T, D) the shape of all hidden states; KV heads of K numbers; L
    layers in its stage; ``size`` bytes of a number in parameters, ``matrix_size`` in matrix
    products; dp x cp ranks in R replicas; ``a`` accumulation steps of M micro-batches.
    """
    s, half = dp * cp // R, matrix_size / size
    U = (P - N) / tp + N  # bytes that FSDP shards
    if pp == 1:  # for each micro-batch, as in fsdp.py
        gathered = a * M * (2 * U - last_group) * half + a * M * U
    else:  # once for all micro-batches of the pipeline
        gathered = a * U * half + a * U
    fsdp = gathered * (s - 1) / s + a * 2 * U / s * (R - 1) / R
    tokens = B // dp * (T // cp)  # of this rank
    t, x = tokens * size, tokens * D * matrix_size  # one number per token; hidden states
    again = activation_checkpointing
    if sequence_parallel:
        # The gradients of norms are reduced in each micro-batch, in a pipeline after adding up.
        in_layers, norms = (8 + 3 * again) * x, 2 * N * (a * M * half if pp == 1 else a)
    else:
        in_layers, norms = (8 + 2 * again) * x, 0
    ends = 2 * x * ((stage == 0) + (stage == pp - 1))  # embedding and head
    loss = (12 if loss_in_chunks else 6) * t * (stage == pp - 1)
    tensor = (L * in_layers + ends + loss + norms) * (tp - 1) / tp
    # Keys and values are gathered in each pass, and their gradients reduced.
    context = L * 2 * tokens * (KV // tp) * K * ((2 + again) * matrix_size + size) * (cp - 1)
    targets = 16 * (dp - 1) / dp  # the number of targets in the global batch, all-reduced over dp
    borders = (stage > 0) + (stage < pp - 1)
    pipeline = borders * x / (tp if sequence_parallel else 1)
    return {
        "parameters": ("U/s" + ", at the peak U" * (pp > 1), U / s),
        "gradients": ("U/s" + ", at the peak U" * (pp > 1), U / s),
        "optimizer_states": ("2U/s", 2 * U / s),
        "sent": (
            f"fsdp {fsdp:,.0f} + tp {tensor:,.0f} + cp {context:,.0f} + pp {pipeline:,.0f} + "
            f"{targets:,.0f}", fsdp + tensor + context + pipeline + targets,
        ),
    }


if __name__ == "__main__":
    launch(main)
