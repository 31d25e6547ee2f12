"""Counts what a step computes, and what it sends to other machines."""

import collections
import functools

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from common.services.counting import StepCounter, group_of


class OperationCounter(StepCounter):
    """Also counts ``operations``, the floating-point operations of matrix products, convolutions
    and attention, and ``crossing``, the part of ``sent`` that goes to another machine.

    Half of a causal attention is counted: its kernels skip the rest. In the backward pass they
    compute the scores again. A collective is a ring over the ranks in their order, with
    ``nproc_per_node`` ranks on each machine. Some edges of the ring lead to another machine: their
    share of the edges is the share of the bytes in ``crossing``.
    """

    def __init__(self, nproc_per_node, *args):
        super().__init__(*args)
        self.nproc_per_node = nproc_per_node
        self.operations, self.crossing = 0, collections.Counter()

    def is_elsewhere(self, tensor):
        if hasattr(tensor.untyped_storage(), "in_host_memory"):
            return True
        return super().is_elsewhere(tensor)

    def to_host(self, tensor):
        """Count ``tensor`` no more, as if it had moved from the GPU to host memory."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()
        storage.in_host_memory = True
        if entry := self.alive.get(storage._cdata):
            self.add(entry[1], -entry[2])
            entry[2] = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = super().__torch_dispatch__(function, kinds, args, kwargs)
        if out is not NotImplemented:
            self.operations += operations(function._overloadpacket, args, kwargs or {}, out)
        return out

    def collective(self, name, args, out):
        before = self.sent.copy()
        super().collective(name, args, out)
        for key, size in (self.sent - before).items():
            self.crossing[key] += size * crossing_share(name, args, self.nproc_per_node)


def operations(packet, args, kwargs, out):
    """The floating-point operations of one call, by torch's formulas. torch has none for attention
    on the CPU: its products of Q queries and S keys are counted, 2 forward, 5 backward."""
    name = packet.__name__
    if name == "_grouped_mm":  # of experts, forward or backward
        return 2 * args[0].numel() * args[1].shape[-1]
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        products = 5 if name.endswith("backward") else 2
        q, k = args[1:3] if products == 5 else args[:2]  # (B, H, Q, K), (B, KV, S, K)
        causal = kwargs.get("is_causal", any(arg is True for arg in args))
        return products * 2 * q.numel() * k.shape[2] // (2 if causal else 1)
    formula = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=out) if formula else 0


def crossing_share(name, args, nproc_per_node):
    """The share of what a collective sends that goes to another machine."""
    group = group_of(args)
    if name == "send":
        receiver = next(arg for arg in args if isinstance(arg, int))
        machines = _machines(group, nproc_per_node)
        return float(machines[receiver] != machines[group.rank()])
    return _crossing(group, nproc_per_node, name.startswith(("alltoall", "all_to_all")))


@functools.cache
def _machines(group, nproc_per_node):
    return [rank // nproc_per_node for rank in dist.get_process_group_ranks(group)]


@functools.cache
def _crossing(group, nproc_per_node, to_all):
    machines = _machines(group, nproc_per_node)
    if to_all:  # of all pairs of ranks
        n = len(machines)
        here = sum(m * (m - 1) for m in collections.Counter(machines).values())
        return 1 - here / max(1, n * (n - 1))
    edges = zip(machines, machines[1:] + machines[:1])
    return sum(a != b for a, b in edges) / len(machines)
