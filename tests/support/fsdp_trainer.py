"""A trainer of somebody else: plain FSDP2, with an encoder for each of two kinds of samples. A
micro-batch has one kind. It records itself by tools/parity."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from tools.parity import Parity

D, LAYERS, VOCAB, T, MICRO_BATCHES = 16, 3, 32, 8, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.encoders = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(D, 4, 2 * D, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.register_buffer("mask", torch.ones(T, T, dtype=torch.bool).triu(1))

    def forward(self, tokens, kind):  # (B, T)
        x = self.embed(tokens)
        x = x + sum((kind == i) * encoder(x) for i, encoder in enumerate(self.encoders))
        for block in self.blocks:
            x = block(x, self.mask, is_causal=True)
        return self.head(x)


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--data")  # it draws its own
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args(argv)
    n, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if n > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model().double()
    if n > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    parity = Parity(f"{args.out}.parity", model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(args.steps):
        rows = torch.randint(VOCAB, (MICRO_BATCHES, 4, T + 1), generator=generator)
        batch = [(rows[i], i % 2) for i in range(rank, MICRO_BATCHES, n)]
        losses = []
        for tokens, kind in batch:
            logits = model(tokens[:, :-1], kind)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / len(batch)
            loss.backward()
            losses.append(loss.detach())
        parity.record(step, losses, [tokens for tokens, _ in batch])
        optimizer.step()
        optimizer.zero_grad()
