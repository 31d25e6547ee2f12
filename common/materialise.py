"""Initial weights: allocates a model that was built on the meta device, and draws what this rank
holds of it."""

import hashlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor
# Nothing public says which part of a DTensor a rank holds.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from common.errors import SettingError


@torch.no_grad()
def materialise(model, device, seed):
    """Allocate a model that was built on the meta device, and fill its parameters, one at a time:
    weights of linear layers and embeddings by ``draw_weight``, weights of norms with ones, biases
    with zeros. Of a DTensor only this rank's part is drawn. Tied parameters stay tied.

    Raises:
        SettingError: it does not know how to fill a parameter or a buffer.
    """
    for name, _ in model.named_buffers():
        raise SettingError(
            f"materialise does not know the buffer {name}, and would leave it uninitialised: fill "
            f"it in materialise, in common/materialise.py"
        )
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    model.to_empty(device=device)  # unties tied parameters
    for first, *others in names.values():
        owner, _, kind = first.rpartition(".")
        module, parameter = model.get_submodule(owner), model.get_parameter(first)
        if kind == "weight" and isinstance(module, (nn.Linear, nn.Embedding)):
            part = draw_weight(first, local_slices(parameter), parameter.shape, model.config, seed)
            local_part(parameter).copy_(part)
        elif kind == "weight" and isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            parameter.fill_(1)
        elif kind == "bias" and isinstance(module, (nn.Linear, nn.LayerNorm)):
            parameter.fill_(0)
        else:
            raise SettingError(
                f"materialise does not know the parameter {first} of a {type(module).__name__}: "
                f"add how to fill it to materialise, in common/materialise.py"
            )
        for other in others:
            owner, _, kind = other.rpartition(".")
            setattr(model.get_submodule(owner), kind, parameter)


def draw_weight(name, slices, shape, config, seed):
    """The part ``slices`` of the initial value of a weight of ``shape``, in float32 on the CPU.

    Each block of 64 rows has a generator of its own, seeded by (seed, name, block), and only the
    blocks that ``slices`` touches are drawn. So the values do not depend on how the weight is
    sharded, on the device or on the number of ranks, and the time falls with the number of ranks.
    Weights are normal with the standard deviation ``initializer_range``; the two projections into
    the residual stream of each layer are scaled down by sqrt(2 x layers) (GPT-2).
    """
    std = config.initializer_range
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= (2 * config.num_hidden_layers) ** 0.5
    rows, *columns = slices
    blocks = []
    for block in range(rows.start // 64, -(-rows.stop // 64) if rows.stop > rows.start else 0):
        digest = hashlib.sha256(f"{seed} {name} {block}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
        first, last = 64 * block, min(64 * (block + 1), shape[0])
        drawn = torch.randn(last - first, *shape[1:], generator=generator, device="cpu")
        own = slice(max(rows.start - first, 0), rows.stop - first)
        blocks.append(drawn[own, *columns])
    whole = torch.cat(blocks) if blocks else torch.empty(0, *shape[1:], device="cpu")[:, *columns]
    return whole * std


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


def local_part(tensor):
    """What this rank holds of a tensor, which may be a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
