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
  numbers of heads must be multiples of the number of ranks.
- allgather (Llama 3, arXiv:2407.21783): every rank gathers all keys and values, and keeps its own
  queries. It is the simplest, and holds the keys and values of the whole sequence for one layer.

    torchrun --nproc_per_node=2 cp.py
    torchrun --nproc_per_node=4 cp.py --attention ulysses --seq-len 4096 --batch-size 1
    torchrun --nproc_per_node=8 cp.py --model small --dtype bfloat16 --seq-len 32768 --batch-size 1

Sent in a step by each of n ranks: 2P(n-1)/n for the gradients, as in ddp.py; and for each layer and
micro-batch the following. kv: bytes of one rank's keys and values in a micro-batch. grad_kv: bytes
of their gradients, in float32 at least. H, KV: numbers of query heads and of key/value heads. L:
number of layers. a: micro-batches.

    ring       forward n-1 sends of kv;              backward n-1 sends of kv and n-1 of grad_kv
    ulysses    forward 4 all-to-all (queries, keys, values, output); backward 4;
               each pass (1+H/KV) kv (n-1)/n
    allgather  forward 1 all-gather, kv (n-1);       backward the same, and 1 reduce-scatter,
                                                     grad_kv (n-1)

Activation checkpointing repeats the forward pass and what it sends. Overlap: in the ring a block
travels while the rank computes attention to the previous block. A long block hides its transfer,
since computing grows with the square of its length. The collectives of ulysses and allgather are
exposed. The gradients' all-reduce overlaps with the backward pass, as in ddp.py.

To combine context parallelism with FSDP, use fully_shard over the flattened dimensions mesh["dp",
"cp"] instead of DDP: for parameters, cp is more data parallelism; hybrid_3d.py does this. PyTorch's
own context_parallel is not used, because it does not run on the CPU and could not be checked here.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from common.arguments import all_options, argument_parser, describe, parse_arguments, run_settings
from common.checkpoint import Checkpoints
from common.data import BatchSampler, TokenDataset, fingerprint, load_batches
from common.environment import rank_and_world_size
from common.errors import SettingError
from common.huggingface import load_weights
from common.launch import launch, start_process_group
from common.metrics import Metrics
from common.model import (
    Transformer, causal_attention, checkpoint_activations, compile_layers, init_weights,
    materialise,
)
from common.optimizer import (
    decay_groups, learning_rate, set_learning_rate, skip_if_not_finite
)
from common.seed import seed_step
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
    parser.add_argument("--attention", choices=("ring", "ulysses", "allgather"), default="ring",
                        help="how attention exchanges keys and values between ranks")
    args = parse_arguments(parser, argv)
    _, n = rank_and_world_size()
    check(args, n)

    # Start-up
    device = start_process_group(
        args.device, args.backend, args.timeout, args.out, all_options(args)
    )
    mesh = init_device_mesh(device.type, (1, n), mesh_dim_names=("dp", "cp"))
    group = mesh.get_group("cp")
    # CP: the positions in each sequence that this rank computes
    shards = shard_positions(args.seq_len, n, zigzag=args.attention != "ulysses").to(device)
    positions = shards[mesh.get_local_rank("cp")]  # (T/cp,)

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed
    # Your own model: torch.manual_seed(args.seed), then MyModel().to(device), in place of the meta
    # device, materialise and init_weights; its initial values, buffers and ties stay as they are.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()
    attention = {  # CP: replaces attention(q, k, v) of each layer
        "ring": functools.partial(ring_attention, group=group),
        "ulysses": functools.partial(ulysses_attention, group=group, attention=causal_attention),
        "allgather": functools.partial(allgather_attention, group=group),
    }[args.attention]
    for layer in layers:
        if n > 1:  # otherwise this rank has the whole sequence: plain attention is all
            layer.self_attn.attention = attention
    if args.compile:
        torch._dynamo.config.optimize_ddp = False  # it would cut the graph of a layer at 25 MB
        compile_layers(layers)
    if args.activation_checkpointing:
        checkpoint_activations(layers)
    materialise(model, device)
    init_weights(model, args.seed)
    # DDP: a group of its own, since gradients are reduced while attention communicates.
    replica = DistributedDataParallel(
        model, process_group=dist.new_group(), gradient_as_bucket_view=True
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
        mesh=mesh["dp"],  # CP: of one rank, so that all ranks read the same samples
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
        args.batch_size // args.grad_accum, len(positions), dtype=torch.int64, device=device
    )
    with autocast:
        arrange_buckets(replica, lambda: replica(zeros, zeros, positions))

    def loss_of_part(inputs, targets):  # CP: of the positions of this rank, for validation
        targets = targets[:, positions]
        return model(inputs[:, positions], targets, positions), targets

    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        seed_step(args.seed, step, mesh.get_local_rank("cp"))  # CP: each rank has its own dropout
        lr = learning_rate(step, args.lr, args.steps, args.warmup_steps, args.min_lr)
        set_learning_rate(optimizer, lr)
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # averaged over ranks
        batch = [next(batches) for _ in range(args.grad_accum)]
        count = count_targets(batch)
        for micro_batch, (inputs, targets) in enumerate(batch):  # (B/accum, T)
            # CP: the targets are shifted already, so both are split alike: (B/accum, T/cp).
            inputs, targets = inputs[:, positions], targets[:, positions]
            # DDP: gradients add up on each rank; the last backward pass averages them over ranks.
            last = micro_batch == args.grad_accum - 1
            with contextlib.nullcontext() if last else replica.no_sync():
                with autocast:  # DDP: times n, since gradients are averaged over n ranks
                    # CP: positions in the whole sequence
                    micro_loss = replica(inputs, targets, positions) * n / count
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
            with metrics.pause(), autocast:  # CP: each rank has the loss of its positions
                metrics.log_validation(step, validation.loss(model, loss_of_part))
        if checkpoints.after_step(step):
            break

    checkpoints.finish()
    return metrics.close(**theory(
        sum(p.nbytes for p in model.parameters()), args.batch_size, args.seq_len,
        args.config.num_attention_heads, args.config.num_key_value_heads, args.config.head_dim,
        args.config.num_hidden_layers, n, args.grad_accum, args.compute_dtype.itemsize,
        args.param_dtype.itemsize, args.attention, args.activation_checkpointing,
    ))


def count_targets(batch):
    """The number of targets in the micro-batches of a step, without targets of -100. At least 1."""
    return sum((targets != -100).sum() for _, targets in batch).clamp(min=1)


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


# Each attention takes q (B, H, T/cp, K), k and v (B, KV, T/cp, K) of this rank's positions and
# returns (B, H, T/cp, K).


@torch.compiler.disable  # collectives are not compiled: the graph of a layer breaks here
def ring_attention(q, k, v, group):
    """Ring attention over a ProcessGroup: the positions of a rank are zig-zag chunks; see
    ``shard_positions``. Causal, with scores scaled by 1/sqrt(K), without dropout."""
    return RingAttention.apply(q, k, v, group)


class RingAttention(torch.autograd.Function):
    """Keys and values travel around the ring. Queries stay, and add up their output block by block.

    No rank ever has more of the sequence than its own shard, one block, and the block that arrives
    next. In the backward pass the blocks travel again. Each block's gradient travels with it, in
    float32 at least, and ends at the block's owner.
    """

    @staticmethod
    def forward(ctx, q, k, v, group):
        ctx.group = group
        out, lse = attend_to_blocks(q, around_the_ring(torch.stack((k, v)), group), group)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        group = ctx.group
        grad_q, arriving = torch.zeros_like(q, dtype=wide(q)), None
        for source, block in around_the_ring(torch.stack((k, v)), group):
            queries, keys = in_sight(source, group, q.shape[2])
            block_grad_q, block_grad_kv = attend_backward(
                *(x[..., queries, :] for x in (grad_out, q)), block[..., keys, :],
                out[..., queries, :], lse[..., queries], causal=source == group.rank(),
            )
            grad_q[..., queries, :] += block_grad_q
            if source == group.rank():
                grad_kv = block_grad_kv.to(wide(k))  # the other ranks' part is added at the end
            else:  # add to the gradient that travels with this block, and pass it on
                travelling = arriving() if arriving else torch.zeros_like(grad_kv)
                travelling[..., keys, :] += block_grad_kv
                arriving = pass_on(travelling, group)
        if arriving:
            grad_kv += arriving()
        grad_k, grad_v = grad_kv.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def around_the_ring(block, group):
    """Yields (source, block) for all ranks: ``block`` belongs to rank ``source``. The first block
    is this rank's own. While the caller computes, the next block arrives: n-1 transfers in all."""
    n, rank = group.size(), group.rank()
    for step in range(n):
        arriving = pass_on(block, group) if step < n - 1 else None
        yield (rank - step) % n, block
        if arriving:
            block = arriving()


def pass_on(tensor, group):
    """Start to send ``tensor`` to the next rank, and to receive a tensor from the previous one.

    Returns a function that waits for both and returns what was received. Until then it keeps both
    tensors alive, and the caller must not change them.
    """
    n, rank = group.size(), group.rank()
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


@torch.compiler.disable
def ulysses_attention(q, k, v, attention, group):
    """DeepSpeed Ulysses: each rank computes attention of all positions, for 1/cp of the heads.

    ``attention(q, k, v)`` is plain causal attention; ``group`` a ProcessGroup. The positions of a
    rank are contiguous: see ``shard_positions`` with ``zigzag=False``.

    Raises:
        SettingError: the ranks cannot share the heads evenly.
    """
    n = group.size()
    if q.shape[1] % n or k.shape[1] % n:
        raise SettingError(
            f"{q.shape[1]} query and {k.shape[1]} key/value heads cannot be shared evenly by {n} "
            f"ranks: use a number of ranks that divides both"
        )
    # (B, H/cp, T, K) and (B, KV/cp, T, K)
    q, k, v = (AllToAll.apply(x, 1, 2, group) for x in (q, k, v))
    return AllToAll.apply(attention(q, k, v), 2, 1, group)


class AllToAll(torch.autograd.Function):
    """Send each rank its part of ``split_dim``; concatenate the received parts on ``cat_dim``. The
    backward pass does the reverse."""

    @staticmethod
    def forward(ctx, x, split_dim, cat_dim, group):
        ctx.split_dim, ctx.cat_dim, ctx.group = split_dim, cat_dim, group
        parts = torch.stack(x.chunk(group.size(), split_dim))  # part i is for rank i
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)  # part i is from rank i
        return torch.cat(tuple(received), cat_dim)

    @staticmethod
    def backward(ctx, grad_out):
        grad_x = AllToAll.apply(grad_out, ctx.cat_dim, ctx.split_dim, ctx.group)
        return grad_x, None, None, None


def check(args, n):
    """Refuse a sequence, or heads, that n ranks cannot share evenly.

    Raises:
        SettingError: the message says what they can share.
    """
    chunks = n if args.attention == "ulysses" else 2 * n if n > 1 else 1
    if args.seq_len % chunks:
        below, above = args.seq_len // chunks * chunks, -(-args.seq_len // chunks) * chunks
        raise SettingError(
            f"--seq-len {args.seq_len} cannot be cut into {chunks} equal chunks, {chunks // n} for "
            f"each of {n} ranks: use a multiple of {chunks}, such as "
            f"{f'{below} or {above}' if below else above}"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(args.config, name)
        if args.attention == "ulysses" and heads % n:
            raise SettingError(
                f"--{name.replace('_', '-')} {heads} cannot be shared evenly by {n} ranks, which "
                f"--attention ulysses needs: use a number of ranks that divides it, or "
                f"--attention ring"
            )


def theory(P, B, T, H, KV, K, L, n, a, size, grad_size, attention, activation_checkpointing):
    """Bytes that each of n ranks holds, and sends in a step of ``a`` micro-batches: P bytes of
    parameters, L layers, H and KV heads of K numbers, of ``size`` bytes each in attention and of
    ``grad_size`` bytes in the gradients. Returns (formula, bytes) for each kind."""
    numbers = 2 * (B // a) * KV * (T // n) * K
    kv, grad_kv = numbers * size, numbers * grad_size
    passes = 3 if activation_checkpointing else 2  # forward, perhaps again, and backward
    formula, sent = f"aL({passes} kv + grad_kv)(n-1)", (passes * kv + grad_kv) * (n - 1)
    if attention == "ulysses":
        formula = f"{passes}aL(1+H/KV) kv (n-1)/n"
        sent = passes * (1 + H // KV) * kv * (n - 1) / n
    return {
        "parameters": ("P", P), "gradients": ("P", P), "optimizer_states": ("2P", 2 * P),
        "sent": (f"2P(n-1)/n + {formula}", 2 * P * (n - 1) / n + a * L * sent),
    }


if __name__ == "__main__":
    launch(main)
