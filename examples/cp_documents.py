"""cp.py with packed documents: each token attends within its own document only.

Read it beside cp.py: `diff cp.py examples/cp_documents.py`. A document ends with ``--separator``;
it may begin on one rank and end on another. A mask by document comes on top of the causal one:

- ring: blocks of keys travel past every rank, and a bias of -1e30 hides the keys of other
  documents. A query may then see no key of a block. Its log-sum-exp there is about -1e30, so it
  weighs nothing when the block is merged: the rank's own block comes first, and there each query
  sees itself.
- ulysses: after the all-to-all a rank has whole sequences, for its heads. That is a ring of one
  rank, so the same function attends to them. With more ranks than key/value heads, each of these
  heads is sent to several ranks, as in cp.py.

allgather is left out: it would need the same lines as the ring.

    torchrun --nproc_per_node=2 examples/cp_documents.py
    bash run.sh examples/cp_documents.py --attention ulysses --data FOLDER --separator 0

Sent and computed: what cp.py sends and computes, however short the documents are.

Masks on a GPU (torch's sources, aten/src/ATen/native/transformers): the flash-attention kernel has
no argument for a mask (sdp_utils_cpp.h, check_for_attn_mask). The memory-efficient kernel adds a
bias to the scores: in the type of the queries, of shape (B, H, Q, S), its rows aligned to 16 bytes
(mem_eff_attention/kernel_forward.h). It computes the scores that the bias hides, too. So a block
with a mask costs as much as one without, and its bias is of B (T/n)^2 numbers in the ring, of B T^2
in ulysses; no layer keeps one, since the backward pass makes it anew. varlen_attn, flash attention
that takes the borders of documents (https://docs.pytorch.org/docs/stable/nn.attention.varlen.html),
computes nothing between documents. It has no kernel for the CPU, so it is not used here; in ulysses
it can take the place of the ring of one rank.

Rotary positions count on from document to document: attention sees only their differences.
"""

import contextlib
import functools
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(1, str(pathlib.Path(__file__).parents[1]))  # where common/ and cp.py are
from common.data import BatchSampler, add_text_options, load_steps, open_dataset, open_held_out
from common.launch import launch, start_process_group, world_size
from common.materialise import materialise
from common.model import (
    Transformer, add_model_options, compute_in_bfloat16, model_config, plain_attention,
    wrap_layers
)
from common.options import at_least, option_parser, parse_options
from common.run import Run  # optional: delete it, and every statement that uses it or ``run``
from common.step import count_targets, decay_groups, evaluating, seed_step, set_learning_rate
from cp import (
    RingAttention, check, set_attention, shard_positions, mask_of, ulysses_attention
)

HIDDEN = -1e30  # added to a score, its weight is 0. -inf in all scores of a query would give NaN.


def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser)
    add_text_options(parser)
    parser.add_argument("--attention", choices=("ring", "ulysses"), default="ring",
                        help="how attention exchanges keys and values between ranks")
    parser.add_argument("--separator", type=at_least(0), default=ord("\n"), metavar="TOKEN",
                        help="the token that ends a document")
    Run.add_options(parser)
    args = parse_options(parser, argv)
    args.config = model_config(args)
    n = world_size()
    check(args, n)
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (1, n), mesh_dim_names=("dp", "cp"))
    cp_rank, group = mesh.get_local_rank("cp"), mesh.get_group("cp")

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.param_dtype)
    layers = model.model.layers.values()
    # CP: an attention for each layer, whether the positions must be, or may be, zig-zag, and the
    # ring's group. In ulysses a rank has whole sequences: its ring is of itself alone.
    alone = mesh.get_group("dp")
    ring_of_one = functools.partial(ring_attention, group=alone)
    attention, zigzag, ring = {
        "ring": (ring_attention, True, group),
        "ulysses": (functools.partial(ulysses_attention, attention=ring_of_one), False, alone),
    }[args.attention]
    documents = None  # of the micro-batch: see documents_of

    @torch.compiler.disable  # since documents change
    def within_documents(q, k, v, **keywords):
        return attention(q, k, v, documents=documents, **keywords)

    # CP: also with one rank: plain attention would see other documents
    set_attention(model, within_documents, group, replaces=plain_attention)
    # CP: the positions in each sequence that this rank computes, (T/cp,)
    positions = shard_positions(args.seq_len, n, zigzag).to(device)[cp_rank]
    shards = shard_positions(args.seq_len, ring.size(), zigzag).to(device)  # of all in the ring
    wrap_layers(layers, args.compile, args.activation_checkpointing, head=model.lm_head)
    materialise(model, device, args.seed)
    if args.bfloat16:
        compute_in_bfloat16(model, device)
    # CP: for gradients, ranks with other positions are as ranks with other samples: see ddp.py. A
    # group of its own: with NCCL, blocks of the ring would wait behind gradients in one queue.
    replica = DistributedDataParallel(
        model, process_group=dist.new_group(), gradient_as_bucket_view=True)
    # CP: torch.compile would cut the graph of a layer at every 25 MB of gradients
    replica.forward = torch._dynamo.config.patch(optimize_ddp=False)(replica.forward)

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model.parameters(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(  # CP: without a mesh, so all ranks read the same samples
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps
    )

    def find_documents(tokens):  # CP: each rank has the tokens of whole sequences, (B/accum, T)
        nonlocal documents
        documents = documents_of(tokens, args.separator, shards)

    def loss_of_shard(micro_batch):  # CP: of the positions of this rank, for validation
        find_documents(micro_batch[0])
        inputs, targets = (x[:, positions] for x in micro_batch)
        return model(inputs, targets, positions), (targets != -100).sum()

    # Resume: the step number is the only state of the data
    run = Run(
        args, model, optimizer, sampler, dataset, device, mesh, held_out=open_held_out(args),
        loss_of=loss_of_shard,
    )
    sampler.start = run.resume()

    # Loop
    # CP: the first backward pass arranges the buckets: now, so that a resume has the same bits
    samples = args.batch_size // args.grad_accum
    tokens = torch.zeros(samples, args.seq_len, dtype=torch.int64, device=device)
    find_documents(tokens)
    with evaluating(model):
        replica(tokens[:, positions], tokens[:, positions], positions).backward()
    replica.zero_grad()
    for step, batch in run.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, cp_rank)  # CP: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch)
        for i, (inputs, targets) in enumerate(batch):  # (B/accum, T)
            find_documents(inputs)
            # CP: the targets are shifted already, so both are split alike: (B/accum, T/cp).
            inputs, targets = inputs[:, positions], targets[:, positions]
            # CP: gradients add up on each rank; the last backward pass averages them over ranks.
            last = i == args.grad_accum - 1
            with contextlib.nullcontext() if last else replica.no_sync():
                micro_loss = replica(inputs, targets, positions) / count
                (micro_loss * n).backward()  # CP: times n, since gradients are averaged over ranks
            loss += micro_loss.detach()

        # CP: refuse a step that left out a parameter. Nothing public does before the next step.
        replica._check_reducer_finalized()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        run.after_step(step, loss, grad_norm)
    return run.history


def documents_of(tokens, separator, shards):
    """For each of the n ranks the number of the document that each of its tokens is in, (B, T/n).

    tokens: (B, T). ``separator``: the token that is the last one of a document. ``shards``: the
    positions of each rank, (n, T/n).
    """
    ends = (tokens == separator).long()
    return (ends.cumsum(1) - ends)[:, shards].unbind(1)


@torch.compiler.disable  # collectives are not compiled: the graph of a layer breaks here
def ring_attention(q, k, v, *, group, is_causal, documents, scale=None, **others):
    """``ring_attention`` of cp.py within ``documents_of``. Raises SettingError: see ``mask_of``.
    """
    mask = mask_of(q, group, is_causal, **others)
    mask = functools.partial(same_document, mask, group.rank(), documents, q)
    return RingAttention.apply(q, k, v, group, mask, scale)


def same_document(mask, rank, documents, q, source):
    """``mask(source)``, and a bias (B, H, Q, S) that hides the keys of other documents."""
    queries, keys, causal = mask(source)
    ours, theirs = documents[rank][:, queries], documents[source][:, keys]
    visible = ours[:, None, :, None] == theirs[:, None, None, :]  # (B, 1, Q, S)
    *shape, S = visible.shape
    bias = torch.full((*shape, S + -S % 8), HIDDEN, dtype=q.dtype, device=q.device)
    bias = bias[..., :S].masked_fill_(visible, 0)  # its rows start at multiples of 16 bytes
    return queries, keys, causal, bias.expand(-1, q.shape[1], -1, -1)


if __name__ == "__main__":
    launch(main)
