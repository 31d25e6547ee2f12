"""Context parallel: the sequence is split, so that attention over a long one fits.

Split: every sequence, and with it all activations; a rank computes its positions only. Replicated:
parameters, gradients, optimizer states, and the rows of the batch: all ranks read the same. Use it when one
sequence's activations do not fit on one device. Only attention looks across positions, so only there do
ranks meet:

- ring (arXiv:2310.01889, arXiv:2105.13120): K and V travel around the ring of ranks, and each rank attends to
  the block that it has while the next one arrives. Any number of heads; what is sent overlaps.
- ulysses (arXiv:2309.14509): an all-to-all turns shards of the sequence into shards of the heads, and back
  after plain attention. More ranks send less each; takes numbers of heads that the ranks divide.
- allgather (Llama 3, arXiv:2407.21783): K and V are gathered, each rank keeps its queries. The simplest, for
  any mask; holds K and V of the whole sequence, a layer's at a time.

    torchrun --nproc_per_node=2 cp.py
    torchrun --nproc_per_node=4 cp.py --attention ulysses --seq-len 4096 --batch-size 1
    torchrun --nproc_per_node=8 cp.py --model small --dtype bfloat16 --seq-len 32768 --batch-size 1

Sent in a step, from each of n ranks: the gradients, averaged as in ddp.py, 2 P (n-1)/n; and for each layer
and micro-batch, S being the bytes of one rank's K and V, 2 B KV (T/n) K elements, and G those of their
gradients (as many elements, in float32 at least):

    ring       forward n-1 sends of S;               backward n-1 sends of S and n-1 of G
    ulysses    forward 4 all-to-all (q, k, v, out);  backward 4; all 4 are (1 + H/KV) S (n-1)/n
    allgather  forward 1 all-gather, S (n-1);        backward 1 reduce-scatter, S (n-1)

Activation checkpointing runs the forward pass, and its transfers, twice. With FSDP: fully_shard over the
flattened dimensions mesh["dp", "cp"] instead of DDP, since to parameters cp is more data parallelism;
hybrid_3d.py does it. PyTorch's own context_parallel does not run on the CPU, where it could not be checked.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_single, all_to_all_single
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from common.arguments import argument_parser, parse_arguments
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
    parser.add_argument("--attention", choices=("ring", "ulysses", "allgather"), default="ring",
                        help="how queries meet the keys and values of other ranks")
    args = parse_arguments(parser, argv)
    _, n = rank_and_world_size()
    check_divisible(args, n)

    # Start-up
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("cp",))
    group, rank = mesh.get_group("cp"), mesh.get_local_rank("cp")
    shards = shard_positions(args.seq_len, n, zigzag=args.attention != "ulysses").to(device)  # (cp, T/cp)
    positions = shards[rank]

    # Model: built without memory, then materialised, each parameter from a seed of its own
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    if args.attention == "ring":
        attention = functools.partial(ring_attention, group=group)
    elif args.attention == "ulysses":
        attention = functools.partial(ulysses_attention, group=group)
    else:
        mask = positions[:, None] >= shards.flatten()  # (T/cp, T), the keys in the order of the ranks
        attention = functools.partial(allgather_attention, mask=mask, group=group)
    for layer in model.model.layers.values():
        layer.self_attn.attention = attention
    if args.compile:
        compile_layers(model)
    if args.activation_checkpointing:
        checkpoint_activations(model)
    model.to_empty(device=device)
    init_weights(model, args.seed)
    parameters = dict(model.named_parameters())
    # A group of its own: gradients are reduced beside the transfers of attention, not in one queue with them.
    replica = DistributedDataParallel(model, process_group=dist.new_group(), gradient_as_bucket_view=True)

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), betas=(args.beta1, args.beta2), fused=True
    )

    # Data
    dataset = TokenDataset(args.data, args.seq_len, args.token_dtype)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        rank=rank, world_size=n, replication=n,  # all ranks read the same rows
    )
    batches = load_batches(dataset, sampler, args.config.vocab_size, device, args.workers)

    # Resume: the step is all of the data's state
    checkpoints = Checkpoints(args, sampler, parameters, optimizer)
    sampler.start = checkpoints.resume()

    # Loop
    metrics = Metrics(args, device, model, sampler, optimizer, mesh)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    arrange_buckets(replica, args, positions, autocast)
    for step in range(sampler.start, args.steps):
        metrics.begin_step(step)
        lr = set_learning_rate(optimizer, learning_rate(step, args))
        loss = torch.zeros((), dtype=args.param_dtype, device=device)  # mean over this rank's share of the batch
        for micro_batch in range(args.grad_accum):
            inputs, targets = next(batches)  # (B/accum, T): targets are shifted before the sequence is split
            inputs, targets = inputs[:, positions], targets[:, positions]  # (B/accum, T/cp)
            last = micro_batch == args.grad_accum - 1
            # Gradients add up locally; the last backward averages the sums over the ranks.
            with contextlib.nullcontext() if last else replica.no_sync():
                with autocast:
                    micro_loss = next_token_loss(replica(inputs, positions), targets) / args.grad_accum
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
    P = sum(p.nbytes for p in model.parameters())
    return metrics.close(
        parameters=("P", P), gradients=("P", P), optimizer_states=("2P", 2 * P), sent=bytes_sent(args, P, n)
    )


def arrange_buckets(replica, args, positions, autocast):
    """One backward pass on zeros. By the first one DDP learns in which order the gradients come, and arranges
    its buckets anew; were that step 1, a resumed run's first sums would be rounded in another order."""
    tokens = torch.zeros(args.batch_size // args.grad_accum, len(positions), dtype=torch.int64, device=positions.device)
    with autocast:
        next_token_loss(replica(tokens, positions), tokens).backward()
    replica.zero_grad()


def check_divisible(args, n):
    """Refuse a sequence, or heads, of which n ranks cannot have equal shares."""
    chunks = n if args.attention == "ulysses" else 2 * n
    if args.seq_len % chunks:
        below, above = args.seq_len // chunks * chunks, -(-args.seq_len // chunks) * chunks
        raise SettingError(
            f"--seq-len {args.seq_len} cannot be cut into {chunks} equal chunks, {chunks // n} for each of "
            f"{n} ranks: use a multiple of {chunks}, such as {f'{below} or {above}' if below else above}"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(args.config, name)
        if args.attention == "ulysses" and heads % n:
            raise SettingError(
                f"--{name.replace('_', '-')} {heads} cannot be shared evenly by {n} ranks, as --attention ulysses does: start "
                f"a number of processes that divides it, or use --attention ring"
            )


def shard_positions(T, n, zigzag):
    """The positions in the sequence that each rank holds, (cp, T/cp).

    Under a causal mask late queries attend to more keys than early ones. Zig-zag gives all ranks the same
    work: the sequence is cut into 2n chunks, of which rank r holds chunks r and 2n-1-r.
    """
    if not zigzag:
        return torch.arange(T).view(n, -1)
    early, late = torch.arange(T).view(2 * n, -1).chunk(2)
    return torch.cat((early, late.flip(0)), dim=1)


def bytes_sent(args, P, n):
    """What a rank sends in a step of a micro-batches and L layers: the formula, as above, and its value."""
    config, a, L = args.config, args.grad_accum, args.config.num_hidden_layers
    H, KV = config.num_attention_heads, config.num_key_value_heads
    S = 2 * args.batch_size // a * KV * args.seq_len // n * config.head_dim  # elements, so far
    G = S * args.param_dtype.itemsize
    S *= 2 if args.dtype == "bfloat16" else args.param_dtype.itemsize
    passes = 3 if args.activation_checkpointing else 2  # forward, perhaps again, and backward
    formula, attention = {
        "ring": (f"aL({passes}S+G)(n-1)", (passes * S + G) * (n - 1)),
        "ulysses": (f"{passes}aL(1+H/KV)S(n-1)/n", passes * (1 + H // KV) * S * (n - 1) / n),
        "allgather": (f"{passes}aLS(n-1)", passes * S * (n - 1)),
    }[args.attention]
    return f"2P(n-1)/n + {formula}", 2 * P * (n - 1) / n + a * L * attention


# Attention, each from q (B, H, T/cp, K), k and v (B, KV, T/cp, K), this rank's positions, to (B, H, T/cp, K)


def allgather_attention(q, k, v, mask, group):
    """Llama 3's: the queries of this rank, the keys and values of all. ``mask`` (T/cp, T)."""
    k, v = all_gather_single(torch.stack((k, v)), 3, group)  # (2, B, KV, T, K); backward: a reduce-scatter
    return causal_attention(q, k, v, mask)


def ulysses_attention(q, k, v, group):
    """DeepSpeed Ulysses: all positions for a share of the heads. Here a rank's positions are contiguous."""
    q, k, v = (all_to_all(x, 1, 2, group) for x in (q, k, v))  # (B, H/cp, T, K), (B, KV/cp, T, K)
    return all_to_all(causal_attention(q, k, v), 2, 1, group)


def all_to_all(x, split_dim, cat_dim, group):
    """Give each rank its part of ``split_dim``, and put what comes together along ``cat_dim``."""
    parts = torch.cat(x.chunk(group.size(), split_dim))  # along the batch: part i is for rank i
    parts = all_to_all_single(parts, None, None, group)  # part i is from rank i
    return torch.cat(parts.chunk(group.size()), cat_dim)


@torch.compiler.disable  # sends and receives stay out of graphs: a layer's breaks here, and goes on after
def ring_attention(q, k, v, group):
    """Ring attention over zig-zag chunks."""
    if group.size() == 1:  # there is no ring, and all positions are here in order
        return causal_attention(q, k, v)
    return RingAttention.apply(q, k, v, group)


class RingAttention(torch.autograd.Function):
    """K and V travel; queries stay, and gather their output block by block.

    No rank ever has more of the sequence than its own shard, one block, and the one that comes next. In the
    backward pass K and V travel again, and a block's gradients with it, from the first rank it visits to home.

    Arithmetic is in float32 at least, in plain matrix products that run on every device; the scores of a
    block, H (T/cp)^2 for the own and half that for the others, are in memory one block at a time: with 32 heads
    and 16,384 positions on a rank that is 34 GB, so that more ranks, or a kernel, are needed. Where a kernel like
    FlashAttention returns the log-sum-exp, it can replace ``attend`` and ``attend_backward``.
    """

    @staticmethod
    def forward(ctx, q, k, v, group):
        ctx.group = group
        wide = grouped(q, k)
        for source, block in around_the_ring(torch.stack((k, v)), group):
            queries, keys = in_sight(source, group, q.shape[2])
            block_out, block_lse = attend(
                wide[..., queries, :], *block[..., keys, :].to(wide.dtype), causal=source == group.rank()
            )
            if source == group.rank():  # comes first
                out, lse = block_out, block_lse
            else:
                merge(out[..., queries, :], lse[..., queries, :], block_out, block_lse)
        out = out.flatten(1, 2).to(q.dtype)  # (B, H, T/cp, K)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        group = ctx.group
        wide, out, grad_out = (grouped(x, k) for x in (q, out, grad_out))
        delta = (grad_out * out).sum(-1, keepdim=True)  # a query's sum of probabilities x their gradients
        grad_q, arriving = torch.zeros_like(wide), None
        for source, block in around_the_ring(torch.stack((k, v)), group):
            queries, keys = in_sight(source, group, q.shape[2])
            block_grad_q, block_grad_kv = attend_backward(
                *(x[..., queries, :] for x in (wide, lse, delta, grad_out)),
                *block[..., keys, :].to(wide.dtype), causal=source == group.rank(),
            )
            grad_q[..., queries, :] += block_grad_q
            if source == group.rank():
                grad_kv = block_grad_kv  # stays here, until the other ranks' part comes home
            else:  # add to what the ranks that had this block before have found, and pass it on
                travelling = arriving() if arriving else torch.zeros_like(grad_kv)
                travelling[..., keys, :] += block_grad_kv
                arriving = pass_on(travelling, group)
        grad_kv += arriving()
        grad_k, grad_v = grad_kv.to(k.dtype)
        return grad_q.flatten(1, 2).to(q.dtype), grad_k, grad_v, None


def grouped(x, k):
    """x (B, H, T/cp, K) as (B, KV, H/KV, T/cp, K), in float32 at least: H/KV query heads share a K and V."""
    return x.unflatten(1, (k.shape[1], -1)).to(torch.promote_types(x.dtype, torch.float32))


def around_the_ring(block, group):
    """Yields (rank, its block) for all ranks, the own first: n-1 transfers, while the caller computes."""
    n, rank = group.size(), group.rank()
    for step in range(n):
        arriving = pass_on(block, group) if step < n - 1 else None
        yield (rank - step) % n, block
        if arriving:
            block = arriving()


def pass_on(tensor, group):
    """Start to send ``tensor`` to the next rank and to receive the previous rank's. Returns a function that
    waits for both and returns what came. Until then it keeps the tensors alive; leave them as they are."""
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


def in_sight(source, group, T):
    """Which of this rank's T queries attend to which of the keys of ``source``, as two slices.

    With chunks r and 2n-1-r on rank r, a block of another rank is never cut by the mask: always a half of it
    counts, whichever rank it is from.
    """
    if source == group.rank():
        return slice(None), slice(None)  # under the causal mask
    if source < group.rank():  # its early chunk is before both of mine, its late one after both
        return slice(None), slice(T // 2)
    return slice(T // 2, None), slice(None)  # both of its chunks are between my two


def scores(q, k, causal):
    """(B, KV, G, Q, S) for queries q (B, KV, G, Q, K) and keys k (B, KV, S, K)."""
    out = torch.einsum("bhgqd,bhsd->bhgqs", q, k) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(out.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        out.masked_fill_(future, -torch.inf)
    return out


def attend(q, k, v, causal):
    """Attention to one block alone: the output (B, KV, G, Q, K), and the scores' log-sum-exp (..., Q, 1)."""
    with torch.autocast(q.device.type, enabled=False):  # it would round what is wide
        score = scores(q, k, causal)
        lse = score.logsumexp(-1, keepdim=True)
        return torch.einsum("bhgqs,bhsd->bhgqd", (score - lse).exp(), v), lse


def merge(out, lse, block_out, block_lse):
    """Attention to two sets of keys from that to each, in place: weighted by their sums of exponentials."""
    both = torch.logaddexp(lse, block_lse)
    out.mul_((lse - both).exp()).add_(block_out * (block_lse - both).exp())
    lse.copy_(both)


def attend_backward(q, lse, delta, grad_out, k, v, causal):
    """The part of one block in the gradients: of q, and of k and v stacked.

    ``lse`` is over all keys, so these are the final probabilities (FlashAttention, arXiv:2205.14135).
    """
    with torch.autocast(q.device.type, enabled=False):
        probabilities = (scores(q, k, causal) - lse).exp()
        grad_v = torch.einsum("bhgqs,bhgqd->bhsd", probabilities, grad_out)  # over all heads that share it
        grad_scores = probabilities * (torch.einsum("bhgqd,bhsd->bhgqs", grad_out, v) - delta)
        grad_scores *= q.shape[-1] ** -0.5
        grad_q = torch.einsum("bhgqs,bhsd->bhgqd", grad_scores, k)
        grad_k = torch.einsum("bhgqs,bhgqd->bhsd", grad_scores, q)
        return grad_q, torch.stack((grad_k, grad_v))


if __name__ == "__main__":
    launch(main)
