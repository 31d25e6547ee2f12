"""Write a checkpoint as a folder that Hugging Face's ``from_pretrained`` reads.

    bash run.sh export runs/fsdp exported
    bash run.sh export runs/mine/step-00000200 exported --like llama --dtype bfloat16

From a run folder it takes the newest checkpoint. Any script may have saved it, on any number of
ranks. It writes config.json and model.safetensors. ``--like`` names the folder of the model from
which the run began: what its config.json and generation_config.json say beyond dimensions, such as
which token ends a text, is taken over. Copy the tokenizer yourself. One process is enough, without
a GPU, with memory for the weights. It needs one more package: ``pip install safetensors``.
"""

import ast
import dataclasses
import json
import pathlib
import shutil

import torch
import torch.distributed.checkpoint as dcp

from common.checkpoint import list_checkpoints, open_checkpoint
from common.experts import MixtureConfig
from common.model import ModelConfig
from tools.command import fail, make_parser, new_folder, run
from tools.huggingface.config import described, read_json
from tools.huggingface.weights import empty_state, is_bias, their_names


GENERATION = "generation_config.json"  # when ``generate`` of transformers stops


def find_checkpoint(path):
    """The checkpoint ``path``, or the newest one in the run folder ``path``."""
    found = [path] if (path / "run.json").exists() else list_checkpoints(path)
    if not found:
        fail(f"{path} is neither a checkpoint nor a run folder with one: name a folder such as "
             f"runs/fsdp or runs/fsdp/step-00000200")
    return found[-1]


def model_config(saved):
    """The ModelConfig in the content of a run.json."""
    names = {field.name for field in dataclasses.fields(MixtureConfig)}
    values = {name: ast.literal_eval(value) for name, value in saved["fixed"].items()
              if name in names}
    return (MixtureConfig if "num_experts" in values else ModelConfig)(**values)


def read_weights(checkpoint, reader, config, dtype):
    """The state dict of our model of ``config`` in a checkpoint. Raises SettingError: it is of
    another model. ``dtype``: to read them in; None: as they are."""
    stored, state, weights = {}, empty_state(config), {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if key.startswith("model."):
            stored[key.removeprefix("model.")] = entry
    for name in state | stored:
        if name.partition(".")[2] in state:  # ema.NAME, of an average of the weights
            continue
        if name not in stored or name not in state or stored[name].size != state[name].shape:
            fail(f"{checkpoint} is of no Llama or Mixtral of its dimensions: see {name}")
        weights[name] = torch.empty(
            state[name].shape, dtype=dtype or stored[name].properties.dtype)
    named = {f"model.{name}": x for name, x in weights.items()}
    dcp.load(named, storage_reader=reader, no_dist=True)
    return weights


def write_weights(path, weights):
    """Write the state dict of our model to a safetensors file."""
    from safetensors.torch import save_file  # an optional package

    theirs = {}
    for name, x in weights.items():
        if is_bias(name):
            if x.any():
                fail(f"{name}, which chooses experts, is not 0; a Mixtral has no such bias: train "
                     f"with --balance-rate 0")
            continue
        names = their_names(name, x.shape)
        parts = [x]
        if len(names) > 1:
            parts = [part.clone() for part in x]
        theirs.update(zip(names, parts))
    save_file(theirs, path, metadata={"format": "pt"})


def export(checkpoint, folder, dtype=None, like=None):
    """Write ``checkpoint`` into a new ``folder``, in the torch.dtype ``dtype`` or as it is.
    ``like``: see the docstring above. Raises SettingError: the checkpoint is damaged or of another
    model, or ``folder`` exists."""
    content = {"bos_token_id": None, "eos_token_id": None}  # our data has none
    if like:
        content = read_json(like / "config.json")
    with new_folder(folder) as half:
        reader, saved = open_checkpoint(checkpoint)
        config = model_config(saved)
        weights = read_weights(checkpoint, reader, config, dtype)
        write_weights(half / "model.safetensors", weights)
        content.pop("rope_parameters", None)  # transformers 4 does not read it, and takes 10,000
        content.pop("dtype", None)  # which transformers 4 names otherwise, and 5 reads both
        lengths = content.get("max_position_embeddings"), saved["fixed"].get("--seq-len")
        content |= described(config) | {
            "torch_dtype": str(weights["lm_head.weight"].dtype).removeprefix("torch."),
            "max_position_embeddings": max(int(length or 1) for length in lengths)}
        (half / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        if like and (like / GENERATION).exists():
            shutil.copy(like / GENERATION, half)


def main(argv=None):
    parser = make_parser("export", __doc__)
    parser.add_argument("checkpoint", type=pathlib.Path, metavar="RUN_OR_CHECKPOINT",
                        help="a run folder, or a checkpoint in it")
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR",
                        help="the folder to create; it must not exist")
    parser.add_argument("--like", type=pathlib.Path, metavar="FOLDER",
                        help="the Hugging Face folder from which the run began")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"),
                        help="type of the numbers in the file (default: as trained)")
    args = parser.parse_args(argv)
    checkpoint = find_checkpoint(args.checkpoint)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    export(checkpoint, args.folder, dtype, args.like)
    print(f"{checkpoint} -> {args.folder}: config.json and model.safetensors")
    if not args.like:
        print("without --like: config.json names no token that ends a text")


if __name__ == "__main__":
    run(main)
