"""Do all ranks call the same modules? Otherwise the gradients of different parameters may meet in
one reduction: training goes wrong without a message, or hangs."""

import hashlib

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from common.errors import SettingError


def compare_calls(model, group, passes):
    """In the first ``passes`` training calls of ``model`` compare which of its modules the ranks of
    ``group`` call: before each unit of FSDP, which gathers, and at the end. Call it when the model
    is parallelised. The scripts compare two steps: a part that only some samples use may be used by
    all ranks in one of them. What is inside a compiled or checkpointed layer is not seen, nor
    whether the loss uses what a module returns.

    Raises:
        SettingError: on all ranks, if one calls another module than rank 0.
    """
    units_only = getattr(model, "reduces_unused", False)  # see ``shard`` of fsdp.py
    calls, hooks, units = [], [], {}

    def compare():
        digest = hashlib.sha256("\n".join(calls).encode()).digest()
        # All ranks have the same number if the lowest is the highest.
        lowest, highest = (torch.tensor(int.from_bytes(digest[:7])) for _ in range(2))
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        if lowest != highest:
            everyone = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, calls, group=group)
            raise SettingError(name_difference(everyone))

    def before(name, unit):
        if units_only and name in calls:
            return  # the unit is gathered already
        calls.append(name)
        if unit:
            compare()

    def end():
        nonlocal passes
        calls.append("no further module")
        compare()
        calls.clear()
        passes -= torch.is_grad_enabled()
        if passes <= 0:
            while hooks:
                hooks.pop().remove()

    for name, module in seen(model):
        unit = isinstance(module, FSDPModule)
        if unit and units_only:  # by the name of its first module; nothing public tells the unit
            name = units.setdefault(module._get_fsdp_state(), name)
        if unit or not units_only:
            hooks.append(module.register_forward_pre_hook(
                lambda *_, name=name, unit=unit: before(name, unit),
                prepend=True,  # before FSDP gathers
            ))
    hooks.append(model.register_forward_hook(lambda *_: end()))


def seen(module, prefix=""):
    """(name, module) of what is inside a module, but not inside a layer whose forward is replaced:
    see ``wrap_layers``."""
    for name, child in module.named_children():
        yield prefix + name, child
        if "forward" not in vars(child):
            yield from seen(child, f"{prefix}{name}.")


def name_difference(everyone):
    first = everyone[0]
    rank, other = next((rank, calls) for rank, calls in enumerate(everyone) if calls != first)
    i = next(i for i, (a, b) in enumerate(zip(first, other)) if a != b)
    return (
        f"rank {rank} calls {other[i]} where rank 0 calls {first[i]}: gradients of different "
        f"parameters would be added. Let every rank call the same modules in each micro-batch, and "
        f"add 0 times the output that its samples do not need; or read of parts that some samples "
        f"do not use in docs/copying.md"
    )
