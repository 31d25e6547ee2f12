"""A trainer of somebody else: tensor parallelism by hand, with plain tensors. Each rank has a part
of the heads, of q, k and v in one fused matrix. With --query-norm a norm normalises the queries of
each head, all heads with the same weights. With --fsdp it is plain FSDP2, with an encoder for each
of two kinds of samples; a micro-batch has one kind. With --hsdp each rank is a replica, and
samples of the second kind skip the first layer. It records itself by parity."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from parity import Parity

D, HEADS, LAYERS, VOCAB, T = 16, 4, 3, 32, 8


def all_reduce(x, n):
    x = x.contiguous().clone()
    if n > 1:
        dist.all_reduce(x)
    return x


def copy(x, n):
    """Megatron's f: every rank reads x; the gradients of the ranks are parts, which add up."""
    x = x.view_as(x)
    x.register_hook(lambda grad: all_reduce(grad, n))
    return x


class Add(torch.autograd.Function):
    """Megatron's g: the outputs of the ranks are parts, which add up."""

    @staticmethod
    def forward(ctx, x, n):
        return all_reduce(x, n)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    """Part ``rank`` of ``n``: it draws the whole, and keeps its own rows and columns."""

    def __init__(self, rank, n):
        super().__init__()
        self.n, self.norm, self.q_norm = n, nn.LayerNorm(D), None
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        for p in self.qkv.weight, self.qkv.bias:
            p.data = p.data.unflatten(0, (3, n, -1))[:, rank].flatten(0, 1)
        self.out.weight.data = self.out.weight.data.chunk(n, 1)[rank]

    def forward(self, x):
        h = copy(self.norm(x), self.n)
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS // self.n, -1)).permute(2, 0, 3, 1, 4)
        if self.q_norm:
            q = F.rms_norm(q, q.shape[-1:], copy(self.q_norm.weight, self.n))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + Add.apply(F.linear(h, self.out.weight), self.n) + self.out.bias


class Model(nn.Module):
    def __init__(self, rank, n, encoders, skip):
        super().__init__()
        self.skip = skip
        self.embed = nn.Embedding(VOCAB, D)
        self.encoders = nn.ModuleList(nn.Linear(D, D) for _ in range(encoders))
        self.blocks = nn.ModuleList(Block(rank, n) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, tokens, kind):  # (B, T)
        x = self.embed(tokens)
        x = x + sum((kind == i) * encoder(x) for i, encoder in enumerate(self.encoders))
        for block in self.blocks[kind * self.skip:]:
            x = block(x)
        return self.head(self.norm(x))


def slices(name, tensor, rank, n):
    """Which rows and columns of the whole this rank has: what Parity asks of ``where``."""
    if "qkv" in name:
        shape = (3 * D, *tensor.shape[1:])
        parts = tensor.chunk(3)
        return shape, [(part, (i * D + rank * len(part), *[0] * (tensor.ndim - 1)))
                       for i, part in enumerate(parts)]
    if name.endswith("out.weight"):
        return (D, D), [(tensor, (0, rank * D // n))]
    return None


def make_model(args, rank, n, replicas):
    torch.manual_seed(0)
    model = Model(rank, n, 2 * args.fsdp, skip=int(args.hsdp)).double()
    if args.query_norm:
        for block in model.blocks:
            block.q_norm = nn.RMSNorm(D // HEADS).double()
    if args.tied:
        model.head.weight = model.embed.weight
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, 1), mesh_dim_names=("replicate", "shard"))
        mesh = mesh if args.hsdp else mesh["replicate"]
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.01)
    for name in "tied", "query-norm", "fsdp", "hsdp":  # tied: embedding and head
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args(argv)
    n, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if n > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    replicas, replica = 1, 0
    if args.fsdp or args.hsdp:  # ranks cut the batch, and no layer
        n, rank, replicas, replica = 1, 0, n, rank
    model = make_model(args, rank, n, replicas)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    parity = Parity(args.out, model, optimizer,
                    where=lambda name, tensor: slices(name, tensor, rank, n))
    generator = torch.Generator().manual_seed(1)
    for step in range(args.steps):
        tokens = torch.randint(VOCAB, (8, T + 1), generator=generator)
        batch = [{"tokens": rows[:, :-1],  # some rows have no targets
                  "targets": rows[:, 1:].masked_fill(rows[:, :1] < VOCAB // 4, -100)}
                 for rows in tokens.chunk(2)]
        count = sum((micro_batch["targets"] != -100).sum() for micro_batch in batch)
        count = count / replicas  # FSDP averages gradients
        if args.hsdp:
            batch = [{name: rows[replica::replicas] for name, rows in micro_batch.items()}
                     for micro_batch in batch]
        own, losses = [*enumerate(batch)], []
        if args.fsdp:
            own = own[replica::replicas]
        for kind, micro_batch in own:
            logits = model(micro_batch["tokens"], kind)
            targets = micro_batch["targets"].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / count
            loss.backward()
            losses.append(loss.detach())
        parity.record(step, losses, [micro_batch for _, micro_batch in own])
        optimizer.step()
        optimizer.zero_grad()
