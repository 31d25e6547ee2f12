"""Which part of a parameter this rank holds."""

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_slices(parameter):
    """The slices of the whole tensor that are this rank's part of ``parameter``, one for each of
    its dimensions. A plain tensor is whole. A DTensor may be split along several dimensions, and
    one dimension over several mesh dimensions, for example by tensor parallelism and FSDP."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(slice(first, first + size) for first, size in zip(offset, shape))
