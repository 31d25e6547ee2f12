"""On each rank: which tensors attention makes, forward and backward."""

import functools

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cp
from common.launch import launch, start_process_group
from common.model import causal_attention

# No product of the others is T, or T/n^2: whatever has such a size comes from the sequence.
B, H, KV, T, K = 1, 6, 2, 88, 10


class Shapes(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen.update(tuple(leaf.shape) for leaf in tree_leaves(out)
                         if isinstance(leaf, torch.Tensor))
        return out


def shapes(attention, n, **options):
    q, k, v = (torch.randn(B, heads, T // n, K, requires_grad=True) for heads in (H, KV, KV))
    mode = Shapes()
    mode.seen = set()
    with mode:
        attention(q, k, v, **options).sum().backward()
    return mode.seen


def main():
    start_process_group()
    group, n = dist.group.WORLD, dist.get_world_size()
    ring = shapes(cp.ring_attention, n, group=group)
    assert (B, KV, H // KV, T // n, T // n) in ring, "the scores of the own block should be seen"
    for shape in ring:
        assert all(size < T for size in shape), f"{shape} has a whole sequence"
        assert torch.Size(shape).numel() <= B * H * (T // n) ** 2, (
            f"{shape} is larger than a block of scores"
        )
    # The same eyes see whole sequences where there are some.
    mask = torch.ones(T // n, T, dtype=torch.bool)
    gathered = functools.partial(cp.allgather_attention, attention=causal_attention, mask=mask)
    assert any(T in shape for shape in shapes(gathered, n, group=group))
    print("no whole sequence in the ring" if dist.get_rank() == 0 else "", flush=True)


if __name__ == "__main__":
    launch(main)
