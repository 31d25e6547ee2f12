"""On each rank: every attention of cp.py against plain attention over the whole sequence."""

import functools

import torch
import torch.distributed as dist

import cp
from common.launch import launch, start_process_group
from common.model import causal_attention

BOUND = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def main():
    start_process_group()
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    B, T, K = 2, 4 * n, 6
    for name in ("ring", "ulysses", "allgather"):
        for heads, kv_heads in [(2 * n, 2 * n), (3 * n, n)] + [(3, 1)] * (name != "ulysses"):
            for dtype in BOUND:
                torch.manual_seed(heads)
                whole = [torch.randn(B, h, T, K, dtype=dtype)
                         for h in (heads, kv_heads, kv_heads, heads)]
                shards = cp.shard_positions(T, n, zigzag=name != "ulysses")
                mine = [x[:, :, shards[rank]] for x in whole]
                attention = getattr(cp, f"{name}_attention")
                options = {"group": group}
                if name == "ulysses":
                    options["attention"] = causal_attention
                # In float64, to measure the error of one of the two only
                expected = results(causal_attention, *(x.double() for x in whole))
                got = results(functools.partial(attention, **options), *mine)
                for x, y in zip(got, expected):
                    assert x.dtype == dtype
                    error = ((x - y[:, :, shards[rank]]).abs()
                             / (1 + y[:, :, shards[rank]].abs())).max().item()
                    assert error < BOUND[dtype], (name, heads, kv_heads, dtype, error)
    print("all agree" if rank == 0 else "", flush=True)


def results(attention, q, k, v, weight):
    """The output, and the gradients of q, k and v, of a weighted sum of it."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs)
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


if __name__ == "__main__":
    launch(main)
