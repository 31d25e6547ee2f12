"""cp.py with packed documents: each token attends within its document only, by Ulysses.

    torchrun --nproc_per_node=2 -m examples.cp_documents
    bash run.sh examples/cp_documents.py --data FOLDER --separator 0
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from common.data import BatchSampler, load_steps, open_dataset
from common.errors import SettingError, refuse
from common.launch import launch, rank_and_world_size, start_process_group
from common.materialise import materialise
from common.model import Transformer, plain_attention, wrap_layers
from common.options import at_least, option_parser, parse_options
from common.step import count_targets, decay_groups, seed_step, set_learning_rate

# Services: each comes off with the lines that name it
from common.services.checkpoint import Checkpoints
from common.services.report import Report
from common.services.settings import run_settings
from common.services.validation import Validation


def main(argv=None):
    parser = option_parser(__doc__)
    parser.add_argument("--separator", type=at_least(0), default=ord("\n"), metavar="TOKEN",
                        help="the token that ends a document")
    Checkpoints.add_options(parser)
    Validation.add_options(parser)
    Report.add_options(parser)
    args = parse_options(parser, argv)
    _, n = rank_and_world_size()
    check(args, n)
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (1, n), mesh_dim_names=("dp", "cp"))
    cp_rank, group = mesh.get_local_rank("cp"), mesh.get_group("cp")
    # CP: the positions in each sequence that this rank computes, (T/cp,)
    shards = shard_positions(args.seq_len, n, zigzag=False).to(device)
    positions = shards[cp_rank]
    mask = None  # of the micro-batch: which tokens attend to which

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed.
    # Your own model: torch.manual_seed(args.seed), then MyModel().to(device, args.param_dtype), in
    # place of the meta device and materialise; its values, buffers and ties stay as they are.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()

    def attention(q, k, v, is_causal):  # to whole sequences, for 1/cp of the heads
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    # CP: also with one rank: the mask, which is causal, takes the place of plain attention
    set_attention(
        [layer.self_attn for layer in layers],
        functools.partial(ulysses_attention, attention=attention), group, replaces=plain_attention,
    )
    wrap_layers(layers, args.compile, args.activation_checkpointing)
    materialise(model, device, args.seed)
    autocast = torch.autocast(  # without a cache, which would keep every weight in bfloat16
        device.type, torch.bfloat16, enabled=args.bfloat16, cache_enabled=False
    )
    model.forward = autocast(model.forward)

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=mesh["dp"],  # CP: of one rank, so that all ranks read the same samples
    )
    validation = Validation(
        open_dataset(args, "--val-data"), sampler, device, args.val_every, args.val_batches,
        args.workers,
    )

    def loss_of_shard(micro_batch):  # CP: of the positions of this rank
        nonlocal mask  # each rank has the tokens of the whole sequence, and so the whole mask
        mask = document_mask(micro_batch[0], args.separator)
        inputs, targets = (x[:, positions] for x in micro_batch)
        return model(inputs, targets, positions), (targets != -100).sum()

    # Resume: the step number is the only state of the data
    checkpoints = Checkpoints(
        args.out, run_settings(args, dataset), model.state_dict(keep_vars=True), optimizer,
        stop=args.steps, every=args.save_every, keep=args.keep, in_background=args.async_save,
    )
    sampler.start = checkpoints.resume(newest=args.resume, step=args.resume_from)  # steps done

    # Loop
    report = Report(args, model, optimizer, [sampler, dataset], device, mesh)
    for step, batch in report.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, cp_rank)  # CP: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch)
        for micro_batch in batch:  # (B/accum, T)
            micro_loss = loss_of_shard(micro_batch)[0] / count  # CP: a part of the mean
            micro_loss.backward()
            loss += micro_loss.detach()

        for parameter in model.parameters():  # CP: each rank has the gradient of its part
            if parameter.grad is not None:  # a frozen parameter has none
                dist.all_reduce(parameter.grad, group=group)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        report.log(step, loss, grad_norm)
        if validation.due(step):
            report.log_validation(step, validation.loss(model, loss_of_shard))
        if checkpoints.after_step(step, grad_norm):
            break
    checkpoints.finish()
    return report.close()


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


def document_mask(tokens, separator):
    """Which tokens attend to which: those before them in their document, and themselves. A document
    ends with ``separator``. tokens (B, T) -> (B, 1, T, T)."""
    ends = tokens == separator
    documents = ends.cumsum(1) - ends.long()  # the number of the document that a token is in
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def set_attention(modules, attention, group, replaces):
    """Let each of ``modules`` compute its attention by ``attention``, one of those below, over
    ``group``, a ProcessGroup: its attribute ``attention`` is replaced, which it must call as
    ``self.attention(q, k, v, is_causal=...)``. ``replaces``: the function that it must be now.

    Raises:
        SettingError: a module has no such attribute: it computes attention elsewhere, and each rank
            would attend to its own positions only. Or the attribute is another function, whose
            window or soft cap would be lost.
    """
    for module in modules:
        kind, found = type(module).__name__, getattr(module, "attention", None)
        if not callable(found):
            raise SettingError(
                f"{kind} has no attribute attention that could be replaced: let it call "
                f"self.attention(q, k, v, is_causal=...)"
            )
        if found is not replaces:
            name = getattr(found, "__name__", type(found).__name__)
            raise SettingError(
                f"{kind} computes attention by {name}, which would be lost: use ulysses_attention "
                f"with attention={name}, and tell set_attention that it replaces {name}; if that "
                f"computes causal or full attention and no more, only tell it so"
            )
        module.attention = functools.partial(attention, group=group)


@torch.compiler.disable
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
        parts = torch.stack(x.chunk(group.size(), split_dim))  # part i is for rank i
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
    refuse([
        (size % n, f"{name} {size} cannot be shared evenly by {n} ranks: use a multiple of {n}")
        for name, size in (
            ("--seq-len", args.seq_len),
            ("--num-attention-heads", args.config.num_attention_heads),
            ("--num-key-value-heads", args.config.num_key_value_heads),
        )
    ])


if __name__ == "__main__":
    launch(main)
