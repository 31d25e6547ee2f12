"""On each rank: which tensors attention makes, forward and backward, and which it keeps."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cp
from common.launch import launch, start_process_group

# No product of the others is T, or T/n^2: whatever has such a size comes from the sequence.
B, H, KV, T, K = 1, 6, 2, 88, 10


class Shapes(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen.update(tuple(leaf.shape) for leaf in tree_leaves(out)
                         if isinstance(leaf, torch.Tensor))
        return out


def shapes(attention, n, group):
    """All shapes that were seen, and those kept from the forward to the backward pass."""
    q, k, v = (torch.randn(B, heads, T // n, K, requires_grad=True) for heads in (H, KV, KV))
    mode, kept = Shapes(), set()
    mode.seen = set()
    with mode:
        def keep(tensor):
            kept.add(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = attention(q, k, v, group)
        out.sum().backward()
    return mode.seen, kept


def main():
    start_process_group()
    group, n = dist.group.WORLD, dist.get_world_size()
    ring, kept = shapes(cp.ring_attention, n, group)
    assert (B, H, T // n) in kept, "the log-sum-exp should be kept"
    most = 2 * B * H * T // n * K  # elements of two queries
    for shape in ring:
        assert all(size < T for size in shape), f"{shape} has a whole sequence"
        assert torch.Size(shape).numel() <= most, f"{shape} has scores"
    # The same eyes see whole sequences where there are some; but none is kept.
    gathered, kept_gathered = shapes(cp.allgather_attention, n, group)
    assert (n, 2, B, KV, T // n, K) in gathered
    assert kept_gathered == kept == {(B, H, T // n, K), (B, KV, T // n, K), (B, H, T // n)}
    print("no whole sequence in the ring" if dist.get_rank() == 0 else "", flush=True)


if __name__ == "__main__":
    launch(main)
