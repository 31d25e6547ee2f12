"""Compares replicas over ranks: one checksum for each tensor, one collective for all tensors."""

import torch
import torch.distributed as dist

NOT_HELD = torch.iinfo(torch.int64).min


def first_difference(sums, group=None):
    """The first place at which ranks hold different sums: (place, lists of ranks with equal sums).
    None if there is no such place.

    Args:
        sums: int64 (places,), of equal length on all ranks: see ``sum_of_bits``; ``NOT_HELD`` where
            this rank holds nothing.
        group: the ranks that compare, with a backend for tensors on the CPU.
    """
    # One MAX gives the largest sum s, and the smallest one as ~max(~s): -s would overflow.
    both = torch.stack([sums, torch.where(sums == NOT_HELD, NOT_HELD, ~sums)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    different = (both[0] != ~both[1]).logical_and(both[0] != NOT_HELD).nonzero()
    if not len(different):
        return None
    place = different[0].item()
    of_ranks = [torch.empty((), dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, sums[place].clone(), group=group)
    ranks = {}
    for rank, number in enumerate(of_ranks):
        if number != NOT_HELD:
            ranks.setdefault(number.item(), []).append(rank)
    return place, list(ranks.values())


def sum_of_bits(tensors):
    """A checksum of tensors, on their device: int64 (). It adds up their bits, read as whole
    numbers, modulo 2^64. One bit that flips changes it."""
    total = torch.zeros((), dtype=torch.int64)
    for number, tensor in enumerate(tensors):
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.itemsize, torch.int64)
        total = total.to(tensor.device)
        total += (2 * number + 1) * tensor.detach().contiguous().view(kind).sum(dtype=torch.int64)
    return total
