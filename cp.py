"""Context parallel: the sequence is split, so that attention over a long one fits.

Split: every sequence, and with it all activations; a rank computes its positions only. Replicated:
parameters, gradients, optimizer states, and the batch: all ranks read the same samples. Use it if
the activations of one sequence do not fit on one device. Only attention looks across positions, so
only attention communicates:

- ring (arXiv:2310.01889, arXiv:2105.13120): keys and values travel around the ring of ranks.
  Each rank attends to the block that it has while the next block arrives. Works with any number of
  heads; communication overlaps with computation.
- ulysses (arXiv:2309.14509): an all-to-all turns shards of the sequence into shards of the heads;
  after plain attention another all-to-all turns them back. The more ranks, the less each sends. The
  number of query heads must be a multiple of the number of ranks. The number of key/value heads
  must be one too, or divide it: then each of these heads is sent to several ranks.
- allgather (Llama 3, arXiv:2407.21783): every rank gathers all keys and values, and keeps its own
  queries. It is the simplest, and holds the keys and values of the whole sequence for one layer.

    torchrun --nproc_per_node=2 cp.py
    torchrun --nproc_per_node=4 cp.py --attention ulysses --seq-len 4096 --batch-size 1
    torchrun --nproc_per_node=8 cp.py --model small --dtype bfloat16 --seq-len 32768 --batch-size 1

Sent in a step by each of n ranks: 2P(n-1)/n for the gradients, where P is their bytes; and for each
layer and micro-batch the following. kv: bytes of one rank's keys and values in a micro-batch.
grad_kv: bytes of their gradients, in float32 at least. H, KV: numbers of query heads and of
key/value heads. L: number of layers. a: micro-batches.

    ring       forward n-1 sends of kv;              backward n-1 sends of kv and n-1 of grad_kv
    ulysses    forward 4 all-to-all (queries, keys, values, output); backward 4;
               each pass (1+H/KV) kv (n-1)/n, or if n is more than KV (n/KV+H/KV) kv (n-1)/n
    allgather  forward 1 all-gather, kv (n-1);       backward the same, and 1 reduce-scatter,
                                                     grad_kv (n-1)

Activation checkpointing repeats the forward pass and what it sends. Ring and allgather compute one
block of attention for each rank; "selective" keeps the output of each block, so with some 40 ranks
it saves nothing.

Overlap: in the ring a block travels while the rank computes attention to the previous block. A long
block hides its transfer, since computing grows with the square of its length. Each gradient is
all-reduced while the last backward pass goes on; its bytes do not grow with the sequence. Exposed:
the collectives of ulysses and allgather, and the all-reduce of the last gradient, the embedding's.

To combine context parallelism with FSDP, use fully_shard over the flattened dimensions mesh["dp",
"cp"] in place of the all-reduce: for parameters, cp is more data parallelism; hybrid_3d.py does so.
PyTorch's own context_parallel is not used, because it does not run on the CPU.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from common.attention import attend, attend_backward, merge, wide
from common.data import BatchSampler, load_steps
from common.errors import SettingError, refuse
from common.launch import launch, rank_and_world_size, restores_process, start_process_group
from common.materialise import materialise
from common.model import Transformer, plain_attention, wrap_layers
from common.model_options import add_model_options
from common.options import option_parser, parse_options
from common.step import count_targets, decay_groups, seed_step, set_learning_rate
from common.tokens import add_text_options, open_dataset
from common.torch_versions import (
    all_gather_single, not_compiled, reduce_scatter_single
)

# Services, optional: delete an import and every statement that uses it, but keep the loop
from common.services import theory
from common.services.checkpoint import Checkpoints
from common.services.report import Report
from common.services.settings import run_settings
from common.services.validation import Validation


@restores_process
def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser)
    add_text_options(parser)
    parser.add_argument("--attention", choices=("ring", "ulysses", "allgather"), default="ring",
                        help="how attention exchanges keys and values between ranks")
    Checkpoints.add_options(parser)
    Validation.add_options(parser)
    Report.add_options(parser)
    args = parse_options(parser, argv)
    _, n = rank_and_world_size()
    check(args, n)
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (1, n), mesh_dim_names=("dp", "cp"))
    cp_rank, group = mesh.get_local_rank("cp"), mesh.get_group("cp")

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()
    # CP: an attention for each layer, and whether the positions must be, or may be, zig-zag
    attention, zigzag = {
        "ring": (ring_attention, True),
        "ulysses": (functools.partial(ulysses_attention, attention=plain_attention), False),
        "allgather": (allgather_attention, True),
    }[args.attention]
    if n > 1:  # otherwise this rank has the whole sequence: plain attention is all
        set_attention(model, attention, group, replaces=plain_attention)
    # CP: the positions in each sequence that this rank computes, (T/cp,)
    positions = shard_positions(args.seq_len, n, zigzag).to(device)[cp_rank]
    wrap_layers(layers, args.compile, args.activation_checkpointing, model.lm_head)
    materialise(model, device, args.seed)
    autocast = torch.autocast(  # without a cache, which would keep every weight in bfloat16
        device.type, torch.bfloat16, enabled=args.bfloat16, cache_enabled=False
    )
    model.forward = autocast(model.forward)
    # CP: each rank has the gradient of its positions; they are added up during the backward pass
    # A group of its own: with NCCL, blocks of the ring would wait behind gradients in one queue.
    gradients = dist.new_group()
    begin_reducing, finish_reducing = all_reduce_in_backward(model.parameters(), gradients)

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=mesh["dp"],  # CP: dp has one rank, so all ranks read the same samples
    )
    validation = Validation(
        open_dataset(args, "--val-data"), sampler, device, args.val_every, args.val_batches,
        args.workers,
    )

    def loss_of_shard(micro_batch):  # CP: of the positions of this rank, for validation
        inputs, targets = (x[:, positions] for x in micro_batch)
        return model(inputs, targets, positions), (targets != -100).sum()

    # Resume: the step number is the only state of the data
    checkpoints = Checkpoints(
        args.out, run_settings(args, dataset), model.state_dict(keep_vars=True), optimizer,
        stop=args.steps, every=args.save_every, keep=args.keep, in_background=args.async_save,
    )
    sampler.start = checkpoints.resume(args.source)  # steps done

    # Loop
    report = Report(args, model, optimizer, [sampler, dataset], device, mesh)
    for step, batch in report.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, cp_rank)  # CP: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch)
        for i, (inputs, targets) in enumerate(batch):  # (B/accum, T)
            # CP: the targets are shifted already, so both are split alike: (B/accum, T/cp).
            inputs, targets = inputs[:, positions], targets[:, positions]
            micro_loss = model(inputs, targets, positions) / count  # CP: a part of the mean
            if i == args.grad_accum - 1:
                begin_reducing()  # CP: now the gradients become complete
            micro_loss.backward()
            loss += micro_loss.detach()

        finish_reducing()  # CP: before anything uses the gradients
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        report.log(step, loss, grad_norm)
        checkpoints.after_step(step, grad_norm)
        if validation.due(step):
            report.log_validation(step, validation.loss(model, loss_of_shard))
        if checkpoints.stopping:
            break
    checkpoints.finish()
    return report.close(theory.cp(args, n))


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


def all_reduce_in_backward(parameters, group):
    """Add up the gradients of ``parameters`` over ``group``, a ProcessGroup, during the last
    backward pass of a step: each is all-reduced as soon as it is there, while the pass goes on.

    Returns two functions. Call the first one before that backward pass, the second one after it: it
    also reduces the gradients that this pass did not reach, and waits for all.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    awaited, works = set(), []

    def reduce(parameter):
        if parameter in awaited:
            awaited.remove(parameter)
            works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))

    def begin():
        awaited.update(trained)

    def finish():
        for parameter in trained:
            if parameter.grad is not None:
                reduce(parameter)
        awaited.clear()
        while works:
            works.pop().wait()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(reduce)
    return begin, finish


# Modules of torch.nn that look at other positions than their own: none of them asks other ranks.
MIXING = (
    nn.Conv1d, nn.ConvTranspose1d, nn.RNNBase, nn.MultiheadAttention, nn.AvgPool1d, nn.MaxPool1d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d, nn.LPPool1d,
)


def set_attention(model, attention, group, replaces, without=()):
    """Let every module of ``model`` whose attribute ``attention`` is the function ``replaces``
    compute its attention by ``attention``, one of those below, over ``group``, a ProcessGroup. It
    must call it as ``self.attention(q, k, v, is_causal=...)``. ``without``: names of modules that
    stay as they are, with all in them, since you have taken care of them.

    Raises:
        SettingError: no module has that attribute: attention is computed elsewhere, and each rank
            would attend to its own positions only. Or a module has another function there, whose
            window or soft cap would be lost. Or a module of torch.nn looks at other positions.
    """
    replaced = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{handled}.") for handled in without):
            continue
        kind, function = type(module).__name__, getattr(module, "attention", None)
        if isinstance(module, MIXING) and getattr(module, "kernel_size", None) not in (1, (1,)):
            raise SettingError(
                f"{name} ({kind}) looks at other positions, and this rank has a part of them: "
                f"exchange what it needs, and say so by without=['{name}']"
            )
        if function is replaces:
            replaced.append(module)
        elif callable(function) and not isinstance(function, nn.Module):
            other = getattr(function, "__name__", type(function).__name__)
            raise SettingError(
                f"{name} ({kind}) computes attention by {other}, which would be lost: use "
                f"ulysses_attention with attention={other}, and tell set_attention that it "
                f"replaces {other}; if that computes causal or full attention and no more, only "
                f"tell it so; if it needs no other positions, name it in without"
            )
    if not replaced:
        raise SettingError(
            f"no module of {type(model).__name__} has {replaces.__name__} as its attribute "
            f"attention: let those that compute attention call self.attention(q, k, v, "
            f"is_causal=...), and set it to {replaces.__name__}"
        )
    for module in replaced:
        module.attention = functools.partial(attention, group=group)


# Each attention takes q (B, H, T/cp, K), k and v (B, KV, T/cp, K) of this rank's positions and
# returns (B, H, T/cp, K). Keywords have the names and the meaning that they have in
# F.scaled_dot_product_attention, but is_causal must be said.


@torch.compiler.disable  # collectives are not compiled: the graph of a layer breaks here
def ring_attention(q, k, v, *, group, is_causal, scale=None, **others):
    """Ring attention over a ProcessGroup, causal or full. If causal, the positions of a rank must
    be zig-zag chunks: see ``shard_positions``.

    Raises:
        SettingError: it is asked for a mask, for dropout, or for anything else.
    """
    refuse_others("ring_attention", **others)
    return RingAttention.apply(q, k, v, group, is_causal, scale)


def refuse_others(name, attn_mask=None, dropout_p=0.0, enable_gqa=True, **unknown):
    """Refuse what ring and all-gather attention do not compute. Heads are shared in any case."""
    asked = list(unknown)
    if attn_mask is not None:
        asked.append("attn_mask")
    if dropout_p:
        asked.append("dropout_p")
    if asked:
        raise SettingError(
            f"{name} computes causal or full attention with a scale, and no {', '.join(asked)}: "
            f"leave that out, or use ulysses_attention around your own attention"
        )


class RingAttention(torch.autograd.Function):
    """Keys and values travel around the ring. Queries stay, and add up their output block by block.

    No rank ever has more of the sequence than its own shard, one block, and the block that arrives
    next. In the backward pass the blocks travel again. Each block's gradient travels with it, in
    float32 at least, and ends at the block's owner.
    """

    @staticmethod
    def forward(ctx, q, k, v, group, is_causal, scale):
        ctx.group, ctx.is_causal, ctx.scale = group, is_causal, scale
        blocks = around_the_ring(torch.stack((k, v)), group)
        out, lse = attend_to_blocks(q, blocks, group, is_causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        group = ctx.group
        grad_q, wait_for_gradient = torch.zeros_like(q, dtype=wide(q)), None
        for source, block in around_the_ring(torch.stack((k, v)), group):
            queries, keys, mask = in_sight(source, group, q.shape[2], ctx.is_causal)
            block_grad_q, block_grad_kv = attend_backward(
                *(x[..., queries, :] for x in (grad_out, q)), block[..., keys, :],
                out[..., queries, :], lse[..., queries], mask, ctx.scale,
            )
            grad_q[..., queries, :] += block_grad_q
            if source == group.rank():
                grad_kv = block_grad_kv.to(wide(k))  # the other ranks' part is added at the end
            else:  # add to the gradient that travels with this block, and pass it on
                travelling = (
                    wait_for_gradient() if wait_for_gradient else torch.zeros_like(grad_kv)
                )
                travelling[..., keys, :] += block_grad_kv
                wait_for_gradient = pass_on(travelling, group)
        if wait_for_gradient:
            grad_kv += wait_for_gradient()
        grad_k, grad_v = grad_kv.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def around_the_ring(block, group):
    """Yields (source, block) for all ranks: ``block`` belongs to rank ``source``. The first block
    is this rank's own. While the caller computes, the next block arrives: n-1 transfers in all."""
    n, rank = group.size(), group.rank()
    for step in range(n):
        wait_for_block = pass_on(block, group) if step < n - 1 else None
        yield (rank - step) % n, block
        if wait_for_block:
            block = wait_for_block()


def pass_on(tensor, group):
    """Start to send ``tensor`` to the next rank, and to receive a tensor from the previous one.

    Returns a function that waits for both and returns what was received. Until then it keeps both
    tensors alive, and the caller must not change them.
    """
    n, rank = group.size(), group.rank()
    tensor = tensor.contiguous()  # torch.stack keeps the order of strides, as of channels_last
    ops = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % n),
        dist.P2POp(dist.irecv, torch.empty_like(tensor), group=group, group_peer=(rank - 1) % n),
    ]
    works = dist.batch_isend_irecv(ops)

    def received():
        for work in works:
            work.wait()
        return ops[1].tensor

    return received


@not_compiled
def allgather_attention(q, k, v, *, group, is_causal, scale=None, **others):
    """The attention of Llama 3, causal or full: queries of this rank, keys and values of all ranks
    of ``group``, a ProcessGroup. If causal, the positions of a rank must be zig-zag chunks: see
    ``shard_positions``.

    Raises:
        SettingError: it is asked for a mask, for dropout, or for anything else.
    """
    refuse_others("allgather_attention", **others)
    return AllGatherAttention.apply(q, k, v, group, is_causal, scale)


class AllGatherAttention(torch.autograd.Function):
    """All-gathers keys and values, and does so again in the backward pass: in between each rank
    keeps only its own.

    All ranks have used this rank's keys and values. A reduce-scatter adds up their gradients from
    all ranks, in float32 at least.
    """

    @staticmethod
    def forward(ctx, q, k, v, group, is_causal, scale):
        ctx.group, ctx.is_causal, ctx.scale = group, is_causal, scale
        blocks = all_gather_blocks(torch.stack((k, v)), group)
        out, lse = attend_to_blocks(q, own_first(blocks, group), group, is_causal, scale)
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
            queries, keys, mask = in_sight(source, group, q.shape[2], ctx.is_causal)
            block_grad_q, block_grad_kv = attend_backward(
                *(x[..., queries, :] for x in (grad_out, q)), block[..., keys, :],
                out[..., queries, :], lse[..., queries], mask, ctx.scale,
            )
            grad_q[..., queries, :] += block_grad_q
            grad_blocks[source][..., keys, :] += block_grad_kv
        grad_kv = torch.empty_like(grad_blocks[0])
        reduce_scatter_single(grad_kv, grad_blocks.flatten(0, 1), group=group)
        grad_k, grad_v = grad_kv.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def all_gather_blocks(block, group):
    """The blocks of all n ranks, in the order of the ranks: (n, ...)."""
    blocks = block.new_empty(group.size() * len(block), *block.shape[1:])
    all_gather_single(blocks, block.contiguous(), group)
    return blocks.unflatten(0, (group.size(), -1))


def own_first(blocks, group):
    """Yields (source, block) for all ranks, this rank first."""
    n, rank = group.size(), group.rank()
    for source in ((rank - step) % n for step in range(n)):
        yield source, blocks[source]


def in_sight(source, group, length, is_causal):
    """Which of this rank's queries attend to which of the keys of rank ``source``: two slices of
    ``length`` positions, and whether a causal mask lies over them. In full attention, all to all.

    With chunks r and 2n-1-r on rank r, the causal mask never cuts through a block of another rank:
    exactly half of the block is visible, whichever rank it is from.
    """
    if not is_causal or source == group.rank():
        return slice(None), slice(None), is_causal
    if source < group.rank():  # its early chunk is before both of mine, its late one after both
        return slice(None), slice(length // 2), False
    return slice(length // 2, None), slice(None), False  # both of its chunks are between my two


def attend_to_blocks(q, blocks, group, is_causal, scale):
    """Attention to the keys and values of all ranks. ``blocks`` yields (source, block), this rank's
    own block first: the keys and values of rank ``source``, stacked, (2, B, KV, T/cp, K). Returns
    the output and the log-sum-exp of all scores, as ``attend`` does."""
    for source, block in blocks:
        queries, keys, mask = in_sight(source, group, q.shape[2], is_causal)
        block_out, block_lse = attend(q[..., queries, :], block[..., keys, :], mask, scale)
        if source == group.rank():
            # Copies: merging overwrites them, and selective checkpointing keeps what it is given.
            out, lse = block_out.to(wide(q), copy=True), block_lse.clone()
        else:
            merge(out[..., queries, :], lse[..., queries], block_out, block_lse)
    return out.to(q.dtype), lse


@not_compiled
def ulysses_attention(q, k, v, *, attention, group, **keywords):
    """DeepSpeed Ulysses: each rank computes attention of all positions, for 1/cp of the heads.

    ``attention(q, k, v, **keywords)`` is any attention to whole sequences, with any mask; ``group``
    a ProcessGroup. The positions of a rank must be contiguous: see ``shard_positions`` with
    ``zigzag=False``. If there are more ranks than key/value heads, each of these is sent to the
    several ranks whose queries share it, and its gradients add up.

    Raises:
        SettingError: the ranks cannot share the heads evenly.
    """
    n, heads, kv_heads = group.size(), q.shape[1], k.shape[1]
    if not can_share_heads(n, heads, kv_heads):
        raise SettingError(
            f"{heads} query and {kv_heads} key/value heads cannot be shared evenly by {n} ranks: "
            f"use a number of ranks that divides both, or one that divides the query heads and is "
            f"a multiple of the key/value heads"
        )
    if kv_heads < n:
        k, v = (x.repeat_interleave(n // kv_heads, dim=1) for x in (k, v))
    # (B, H/cp, T, K) and (B, KV/cp, T, K)
    q, k, v = (Resplit.apply(x, 1, 2, group) for x in (q, k, v))
    return Resplit.apply(attention(q, k, v, **keywords), 2, 1, group)


def can_share_heads(n, heads, kv_heads):
    return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)


class Resplit(torch.autograd.Function):
    """Send each rank its part of ``split_dim``; concatenate the received parts on ``cat_dim``. The
    backward pass does the reverse."""

    @staticmethod
    def forward(ctx, x, split_dim, cat_dim, group):
        ctx.split_dim, ctx.cat_dim, ctx.group = split_dim, cat_dim, group
        parts = torch.stack(x.chunk(group.size(), split_dim)).contiguous()  # part i is for rank i
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)  # part i is from rank i
        return torch.cat(tuple(received), cat_dim)

    @staticmethod
    def backward(ctx, grad_out):
        grad_x = Resplit.apply(grad_out, ctx.cat_dim, ctx.split_dim, ctx.group)
        return grad_x, None, None, None


def check(args, n):
    """Refuse a sequence, or heads, that n ranks cannot share evenly.

    Raises:
        SettingError: the message says what they can share.
    """
    ulysses, config = args.attention == "ulysses", args.config
    chunks = 1 if n == 1 else n if ulysses else 2 * n
    below, above = args.seq_len // chunks * chunks, -(-args.seq_len // chunks) * chunks
    refuse([
        (args.seq_len % chunks,
         f"--seq-len {args.seq_len} cannot be cut into {chunks} equal chunks, {chunks // n} for "
         f"each of {n} ranks: use a multiple of {chunks}, such as "
         f"{f'{below} or {above}' if below else above}"),
        (ulysses and not can_share_heads(n, config.num_attention_heads, config.num_key_value_heads),
         f"--num-attention-heads {config.num_attention_heads} and --num-key-value-heads "
         f"{config.num_key_value_heads} cannot be shared evenly by {n} ranks, which --attention "
         f"ulysses needs: use a number of ranks that divides both, or one that divides the first "
         f"and is a multiple of the second, or --attention ring"),
        (args.compile and args.activation_checkpointing == "selective",
         "--activation-checkpointing selective with --compile: the collectives of attention break "
         "the graph of a layer, so torch would compile none of it; leave out one, or use "
         "--activation-checkpointing full"),
    ])


if __name__ == "__main__":
    launch(main)
