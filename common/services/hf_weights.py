"""Reads the dimensions and weights of a Hugging Face Llama or Mixtral from a folder that
``save_pretrained`` wrote: config.json, and safetensors files.

``load_weights`` needs one more package: ``pip install safetensors``.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from common.errors import SettingError
from common.materialise import local_part, local_slices
from common.model import ROPE_SCALING, ModelConfig, Transformer

# The names of a Mixtral's matrices, which are not stacked, under block_sparse_moe.experts.N
EXPERT_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
DTYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP, without a group


def is_tied(folder):
    """Whether embedding and head share one parameter in ``folder``. In our model they are two."""
    return read_json(pathlib.Path(folder) / "config.json").get("tie_word_embeddings") is True


@torch.no_grad()
def load_weights(model, folder):
    """Fill the parameters of a materialised ``model``, a Transformer or a stage of one, from all
    safetensors files of ``folder``: each parameter in its own type, whatever the type in the file.
    A rank reads only the part of each parameter that it holds. It waits for no other rank.

    If the folder has no head, and its config.json says that embedding and head are tied, the head
    gets the embedding's values. The two are then trained apart.

    Raises:
        SettingError: safetensors is not installed; a file is missing or damaged; or the names and
            shapes of the tensors, not only this rank's, do not follow from ``model.config``.
    """
    folder = pathlib.Path(folder)
    _check_files(folder)
    reader = dcp.HuggingFaceStorageReader(str(folder))
    stored = {
        name: entry for name, entry in reader.read_metadata().state_dict_metadata.items()
        # Older files also hold a table of rotary angles; our model computes its own.
        if not name.endswith(".rotary_emb.inv_freq")
    }
    tied = is_tied(folder) and HEAD not in stored and EMBEDDING in stored
    if tied:
        stored[HEAD] = stored[EMBEDDING]
    parts = parts_of(model.config)
    check_shapes(
        {name: tuple(entry.size) for name, entry in stored.items()},
        {name: shape for name, (_, _, shape) in parts.items()}, folder,
    )
    for name, entry in stored.items():
        if len(entry.chunks) > 1:
            raise SettingError(f"{folder} has {name} in two files")
        if entry.properties.dtype not in DTYPES:  # integers are quantized weights
            raise SettingError(
                f"{folder} has {name} in {entry.properties.dtype}: only "
                f"{', '.join(map(str, DTYPES))} are supported"
            )
    parameters = dict(model.named_parameters())
    own = {there: own_part(parameters[name].detach(), expert)
           for there, (name, expert, _) in parts.items() if name in parameters}
    own = {name: part for name, part in own.items() if part is not None}
    head = {EMBEDDING: own.pop(HEAD)} if tied and HEAD in own else {}
    for tensors in (own, head):
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def _check_files(folder):
    """Refuse a folder without safetensors files, or with one that is damaged."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise SettingError(
            "weights are read with the package safetensors: pip install safetensors"
        ) from None
    if not (paths := sorted(folder.glob("*.safetensors"))):
        raise SettingError(
            f"{folder} has no .safetensors file: only weights in safetensors are read, which "
            f"save_pretrained of transformers writes"
        )
    for path in paths:
        try:
            if not path.is_file():  # opening a FIFO might never return
                raise OSError("it is not a regular file")
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise SettingError(
                f"{path} cannot be read ({error}): download or save the model again"
            ) from None


def fingerprint(folder):
    """A hash of the names and sizes of a folder's safetensors files, and of some of their bytes. It
    is equal on all machines that see the same weights."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        if not path.is_file():
            continue
        with contextlib.suppress(OSError):  # load_weights says why a file cannot be read
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with open(path, "rb") as file:
                for part in range(8):
                    file.seek(size * part // 8)
                    digest.update(file.read(4096))
    return digest.hexdigest()[:16]


def shapes_of(config):
    """The shape of each parameter of the whole model, by its name."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def parts_of(config):
    """{name in a folder of Hugging Face: (name of our parameter, number of the expert whose part of
    it this is or None, shape)} of the whole model."""
    parts = {}
    for name, shape in shapes_of(config).items():
        owner, _, kind = name.replace(".mlp.experts.", ".block_sparse_moe.experts.").rpartition(".")
        if owner.endswith(".block_sparse_moe.experts"):
            for expert in range(shape[0]):
                there = f"{owner}.{expert}.{EXPERT_MATRICES[kind]}.weight"
                parts[there] = name, expert, shape[1:]
        else:
            parts[name.replace(".mlp.router.", ".block_sparse_moe.gate.")] = name, None, shape
    return parts


def own_part(parameter, expert):
    """What this rank holds of an expert's matrix in a stacked ``parameter``, or None. A DTensor, if
    ranks share the matrix. If ``expert`` is None, the parameter itself."""
    if expert is None:
        return parameter
    experts = local_slices(parameter)[0]
    if not experts.start <= expert < experts.stop:
        return None
    part = local_part(parameter)[expert - experts.start]
    if part.shape == parameter.shape[1:]:
        return part
    dim = parameter.placements.index(Shard(1))
    mesh = parameter.device_mesh[parameter.device_mesh.mesh_dim_names[dim]]
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False)


def check_shapes(found, expected, where):
    """Compare two dicts of shapes by name.

    Raises:
        SettingError: a tensor is missing, unexpected or of another shape; it names the first one.
    """
    for name in expected | found:
        if name not in found:
            raise SettingError(f"{where} lacks the tensor {name}")
        if name not in expected:
            raise SettingError(f"{where} has the tensor {name}, unlike a Llama of its config")
        if found[name] != expected[name]:
            raise SettingError(
                f"{where} has {name} of shape {found[name]}, and its config needs {expected[name]}"
            )
