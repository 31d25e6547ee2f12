"""Weights in the format of Hugging Face, of a Llama or Mixtral: how they fill our model.

They lie in a folder that ``save_pretrained`` wrote: config.json, and safetensors files, which the
package safetensors reads: ``pip install safetensors``.

import_hf.py makes a checkpoint of such weights, from which every script trains.
``load_weights`` is for a script that loads a base model at every start.
"""

import functools
import pathlib

import torch
from torch.distributed.tensor import DTensor

from common.experts import use_experts
from common.materialise import local_slices
from common.model import Transformer
from common.options import SettingError
from tools.huggingface.config import read_json

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# The names of a Mixtral's matrices, which are not stacked, under block_sparse_moe.experts.N
EXPERT_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# The types of safetensors that are read; integers are quantized weights
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@torch.no_grad()
def load_weights(model, folder, added=()):
    """Fill the parameters of a materialised ``model``, a Transformer or a stage of one, from
    ``folder``: each parameter in its own type, whatever the type in the file. A rank reads only the
    part of each parameter that it holds. It waits for no other rank. Parameters whose names are in
    ``added``, such as adapters, are not in ``folder``, and stay as they are. Raises SettingError:
    see ``Weights``.
    """
    weights = Weights(folder, model.config)
    for name, parameter in model.named_parameters():
        own = local_part(parameter)
        if own.numel() and name not in added:
            own.copy_(weights.read(name, local_slices(parameter)))


def local_part(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Weights:
    """The weights in ``folder``, by the names of our parameters. ``config`` is its ModelConfig.
    If embedding and head share one parameter there, the folder has no head: in our model they are
    two, the head gets the values of the embedding, and the two are trained apart. Raises
    SettingError: a file is damaged, or the names and shapes of the tensors in all files do not
    follow from ``config``.
    """

    def __init__(self, folder, config):
        folder = pathlib.Path(folder)
        stored = find_tensors(folder)
        ties = read_json(folder / "config.json").get("tie_word_embeddings")
        if ties and HEAD not in stored and EMBEDDING in stored:
            stored[HEAD] = stored[EMBEDDING]
        parts = parts_of(config)
        check_shapes({name: tuple(part.get_shape()) for name, part in stored.items()},
                     {name: shape for name, (_, _, shape) in parts.items()}, folder)
        self.stored = {}  # lists, by the name of our parameter: it stacks the weights of experts
        for name, (ours, _, _) in parts.items():
            self.stored.setdefault(ours, []).append(stored[name])

    def dtype(self, name):
        """The type in which a parameter is stored."""
        dtypes = [DTYPES[part.get_dtype()] for part in self.stored[name]]
        return functools.reduce(torch.promote_types, dtypes)

    def read(self, name, slices):
        """The part ``slices`` of a parameter, a slice for each dimension, in the type in which it
        is stored. Nothing else of it is read."""
        if ".mlp.experts." in name:
            experts, *slices = slices
            return torch.stack([part[*slices] for part in self.stored[name][experts]])
        (part,) = self.stored[name]
        return part[*slices]


def find_tensors(folder):
    """The tensors of all safetensors files of ``folder`` by their names there, each to be read by
    slices. If there is an index, only the files that it names count."""
    from safetensors import SafetensorError, safe_open  # an optional package

    stored, index = {}, folder / "model.safetensors.index.json"
    paths = sorted(folder.glob("*.safetensors"))
    if index.exists():
        named = read_json(index).get("weight_map", {}).values()
        paths = [path for path in paths if path.name in named]
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}
        except SafetensorError as error:
            raise SettingError(f"{path} is damaged ({error}): download or save it again") from None
        for name, part in parts.items():
            if name.endswith(".rotary_emb.inv_freq"):  # in older files; our model computes its own
                continue
            if part.get_dtype() not in DTYPES:
                raise SettingError(
                    f"{path}: {name} is in {part.get_dtype()}: only {', '.join(DTYPES)} are "
                    f"supported; save the weights in one of them, without quantization")
            if name in stored:
                raise SettingError(f"{name} is in {path} and in another file: remove one of them")
            stored[name] = part
    if not stored:
        raise SettingError(f"{folder} has no .safetensors file with weights, which save_pretrained "
                           f"of transformers writes")
    return stored


def shapes_of(config):
    """The shape of each parameter of the whole model, by its name."""
    with torch.device("meta"):
        model = use_experts(Transformer(config))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def parts_of(config):
    """{name in a Hugging Face folder: (name of our parameter, number of the expert whose part of
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


def check_shapes(shapes, expected, where):
    """Compare two dicts of shapes by name. Raises SettingError with the first tensor that is
    missing, unexpected or of another shape."""
    if any(name.endswith(".mlp.experts.gate_up_proj") for name in shapes):
        raise SettingError(  # a loaded model keeps its file's format
            f"{where} has all experts of a layer in one tensor: with transformers set "
            f"new = MixtralForCausalLM(model.config), new.load_state_dict(model.state_dict()), "
            f"and save that by new.save_pretrained")
    for name in expected | shapes:
        there, needed = shapes.get(name), expected.get(name)
        if there is None and name == HEAD:
            raise SettingError(f"{where} lacks the tensor {name}: if the head is the embedding, "
                               f"set tie_word_embeddings to true in its config.json")
        if there is None:
            raise SettingError(f"{where} lacks the tensor {name}: is a file of it missing?")
        if needed is None:
            raise SettingError(f"{where} has the tensor {name}, unlike a Llama of its config: is "
                               f"the config.json that of these files?")
        if there != needed:
            raise SettingError(f"{where} has {name} of shape {there}, and its config needs "
                               f"{needed}")
