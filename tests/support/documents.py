"""On each rank, both attentions of examples/cp_documents.py. ``agree``: each document has the
output and the gradients that it has alone, and ranks compute no block that they need not."""

import functools
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from common.launch import launch
from examples import cp_documents as cp

H, KV, K, CHUNK = 8, 2, 6, 3  # CHUNK: positions in a chunk of the zig-zag, the half of a rank's


def sequences(n):
    """Sequences of T positions, (1, T) each: True where a document ends."""
    T = 2 * n * CHUNK
    torch.manual_seed(1)
    ends = {f"random {p}": torch.rand(1, T) < p for p in (0.05, 0.2, 0.5)}
    position = torch.arange(T)[None]
    return ends | {
        "one document": position < 0,
        "its end is the last token": position == T - 1,
        "documents are tokens": position >= 0,
        "documents are chunks": position % CHUNK == CHUNK - 1,
        "documents are in two chunks": position % CHUNK == 1,
    }


def one_by_one(q, k, v, ends):
    """Attention to each document as if there were no other."""
    out = []
    for row, row_ends in enumerate(ends):
        borders = [0, *(row_ends.nonzero().flatten() + 1).tolist(), len(row_ends)]
        parts = [
            F.scaled_dot_product_attention(
                *(x[row:row + 1, :, a:b] for x in (q, k, v)), is_causal=True, enable_gqa=True
            )
            for a, b in zip(borders, borders[1:]) if a < b
        ]
        out.append(torch.cat(parts, dim=2))
    return torch.cat(out)


def results(attention, q, k, v, weight):
    """The output, and the gradients of q, k and v, of a weighted sum of it."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs)
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


def blocks_in_sight(ends, shards, rank):
    """The number of ranks of whose keys a query of ``rank`` sees any, found pair by pair."""
    numbers = ends.long().cumsum(1) - ends.long()
    seen = torch.ones(ends.shape[1], ends.shape[1], dtype=torch.bool).tril()
    seen = (seen & (numbers[:, :, None] == numbers[:, None, :])).any(0)
    return sum(seen[shards[rank]][:, shard].any().item() for shard in shards)


def check(name, ends, group, alone, columns=False):
    """``columns``: the numbers of a row of q, k, v and of the gradient are not side by side."""
    n, rank, T = group.size(), group.rank(), ends.shape[1]
    ring_of_one = functools.partial(cp.ring_attention, group=alone)
    attention, ring = {
        "ring": (cp.ring_attention, group),
        "ulysses": (functools.partial(cp.ulysses_attention, attention=ring_of_one), alone),
    }[name]
    positions = cp.shard_positions(T, n, zigzag=name == "ring")[rank]
    shards = cp.shard_positions(T, ring.size())
    torch.manual_seed(2)
    whole = [torch.randn(len(ends), heads, T, K, dtype=torch.float64) for heads in (H, KV, KV, H)]
    mine = [x[:, :, positions] for x in whole]
    if columns:
        mine = [x.mT.contiguous().mT for x in mine]
    calls = {"attend_where_visible": 0, "attend_where_visible_backward": 0}

    def count(function):
        def counted(*args):
            calls[function.__name__] += 1
            return function(*args)
        return counted

    within = functools.partial(
        attention, group=group, is_causal=True,
        documents=cp.documents_in_sight(ends.long(), 1, shards, ring),
    )
    with mock.patch.multiple(cp, **{kernel: count(getattr(cp, kernel)) for kernel in calls}):
        found = results(within, *mine)
    expected = results(functools.partial(one_by_one, ends=ends), *whole)
    blocks = blocks_in_sight(ends, shards, ring.rank())
    assert set(calls.values()) == {blocks}, (name, ends, calls, blocks)
    with torch.no_grad():
        assert torch.equal(within(*mine[:3]), found[0])
    for x, y in zip(found, expected):
        error = (x - y[:, :, positions]).abs().max().item()
        assert error < 1e-12, (name, ends, error)  # also where it is NaN
    return blocks


def main():
    dist.init_process_group("gloo")
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, n), mesh_dim_names=("dp", "cp"))
    groups = mesh.get_group("cp"), mesh.get_group("dp")
    rows = sequences(n)
    for name in ("ring", "ulysses"):
        for columns in (False, True):
            check(name, torch.cat(tuple(rows.values())), *groups, columns)
        blocks = {row: check(name, ends, *groups) for row, ends in rows.items()}
        if name == "ring":
            assert blocks["one document"] == n and blocks["documents are in two chunks"] <= 3
            assert blocks["documents are tokens"] == blocks["documents are chunks"] == 1
    print("all agree" if dist.get_rank() == 0 else "", flush=True)


if __name__ == "__main__":
    launch(main)
