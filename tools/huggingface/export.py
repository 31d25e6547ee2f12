"""Write a checkpoint as a folder that Hugging Face's ``from_pretrained`` reads.

    bash run.sh export runs/fsdp exported
    bash run.sh export runs/fsdp/step-00000200 exported --dtype bfloat16

From a run folder it takes the newest checkpoint. Any script may have saved it, on any number of
ranks. It writes config.json, and model.safetensors or shards with an index. If the run began with
imported weights, config.json is the imported one, with what the run has changed, and
generation_config.json comes too. Checkpoints contain no tokenizer: copy one into the folder. One
process is enough, without a GPU. It needs one more package: ``pip install safetensors``.

It writes one file after the other: it needs memory for --max-shard-size and the largest tensor.
"""

import ast
import dataclasses
import itertools
import json
import pathlib
import shutil

import torch
import torch.distributed.checkpoint as dcp
from tqdm import tqdm

from common.experts import MixtureConfig
from common.model import ModelConfig
from common.options import at_least, refuse
from common.checkpoint import list_checkpoints, open_checkpoint
from tools.huggingface.config import config_from
from tools.huggingface.weights import check_shapes, parts_of, shapes_of
from tools.command import make_parser, new_folder, run

GENERATION = "generation_config.json"
ROPE = "rope_theta", "rope_scaling"


def find_checkpoint(path):
    """The checkpoint ``path``, or the newest one in the run folder ``path``."""
    found = [path] if (path / "run.json").exists() else list_checkpoints(path)
    refuse([(not found, f"{path} is neither a checkpoint nor a run folder with one: name a folder "
             f"such as runs/fsdp or runs/fsdp/step-00000200")])
    return found[-1]


def folder_of_import(checkpoint):
    """The folder of import_hf.py with the weights from which the run of ``checkpoint`` began, maybe
    through other runs; None: the run began without such weights. Raises SettingError if the folder
    is gone."""
    seen = set()
    while checkpoint not in seen and (checkpoint / "run.json").exists():
        if (checkpoint.parent / "config.json").exists():
            return checkpoint.parent
        seen.add(checkpoint)
        settings = json.loads((checkpoint / "run.json").read_text())
        checkpoint = pathlib.Path(settings["options"].get("--from", "None"))
    # No run saves step 0.
    refuse([(checkpoint.name == "step-00000000" and not checkpoint.exists(),
             f"the run began with {checkpoint}, which is not here: config.json and "
             f"{GENERATION} are taken from beside it; put it back, or start where it is")])
    return None


def model_config(saved):
    """The ModelConfig in the content of a run.json."""
    names = {field.name for field in dataclasses.fields(MixtureConfig)}
    values = {name: ast.literal_eval(value) for name, value in saved["fixed"].items()
              if name in names}
    return (MixtureConfig if "num_experts" in values else ModelConfig)(**values)


def huggingface_config(config, dtype, seq_len, imported=None):
    """The content of a config.json: that of the folder ``imported``, with what the run has changed.
    Names are from before transformers 5, which still reads them. Our data has no special tokens.
    ``seq_len``: that of the run, or None."""
    values, content = described(config), {"bos_token_id": None, "eos_token_id": None}
    length = seq_len or 2048  # imported weights have none: the default of transformers
    if scaling := config.rope_scaling:
        longest = scaling["factor"] * scaling["original_max_position_embeddings"]
        length = max(length, int(longest))
    if imported:
        path = imported / "config.json"
        content = json.loads(path.read_text())
        before = described(config_from(content, path))
        values = {name: value for name, value in values.items() if before.get(name) != value}
        length = max(content.get("max_position_embeddings") or length, seq_len or 0)
    values |= {name: getattr(config, name) for name in ROPE}
    content.pop("rope_parameters", None)  # transformers 4 does not read it, and takes 10,000
    types = {"dtype", "torch_dtype"} & content.keys() or {"torch_dtype"}
    return content | values | {"max_position_embeddings": length, "tie_word_embeddings": False} | (
        dict.fromkeys(types, str(dtype).removeprefix("torch.")))


def described(config):
    """What a config.json says of a ModelConfig."""
    values = dict(vars(config))
    experts, chosen, size = (values.pop(name, None) for name in (
        "num_experts", "experts_per_token", "expert_size"))
    kind = "Mixtral" if experts else "Llama"
    if experts:
        values |= {"num_local_experts": experts, "num_experts_per_tok": chosen,
                   "intermediate_size": size}
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, **values,
    }


class Tensors:
    """The tensors in a checkpoint of a model of ``config``. Raises SettingError unless it has all
    parameters of the model, and nothing more of it."""

    def __init__(self, checkpoint, reader, config):
        self.reader, metadata = reader, reader.read_metadata()
        reader.read_metadata = lambda *_, **__: metadata  # read it once, not for each tensor
        self.stored = metadata.state_dict_metadata
        shapes = {name.removeprefix("model."): tuple(entry.size)
                  for name, entry in self.stored.items() if name.startswith("model.")}
        # Copies, such as ema.lm_head.weight of an average of the weights, are not exported.
        shapes = {name: size for name, size in shapes.items()
                  if name.partition(".")[2] not in shapes}
        for name in [name for name in shapes if name.endswith(".mlp.bias")]:
            refuse([(self.read(name).any(), f"{checkpoint} has {name}, which chooses experts and "
                     f"is not 0; a Mixtral has no such bias: train with --balance-rate 0")])
            del shapes[name]
        check_shapes(shapes, shapes_of(config), checkpoint)

    def dtype(self, name):
        return self.stored[f"model.{name}"].properties.dtype

    def read(self, name):
        entry = self.stored[f"model.{name}"]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load({f"model.{name}": tensor}, storage_reader=self.reader, no_dist=True)
        return tensor


def split(sizes, most):
    """Split the names into lists, in their order. Each list has at most ``most`` bytes in all, or
    only one name. ``sizes``: bytes by name."""
    shards, room = [], 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


def export(checkpoint, folder, dtype=None, max_shard_size=5e9):
    """Write ``checkpoint`` into a new ``folder``: under another name, and renamed when all of it is
    on disk. Returns the names of the safetensors files.

    Args:
        dtype: the torch.dtype to write; None: the one in the checkpoint.
        max_shard_size: bytes in a file; a tensor that is larger has a file of its own.

    Raises:
        SettingError: the checkpoint is damaged or not of a Llama, or ``folder`` exists.
    """
    from safetensors.torch import save_file  # an optional package

    with new_folder(folder) as half:
        reader, saved = open_checkpoint(checkpoint)
        config = model_config(saved)
        tensors, parts = Tensors(checkpoint, reader, config), parts_of(config)
        dtype = dtype or tensors.dtype("model.embed_tokens.weight")
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize
                 for name, (_, _, shape) in parts.items()}
        shards = split(sizes, max_shard_size)
        files = ["model.safetensors"] if len(shards) == 1 else [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)]
        for path, names in zip(tqdm(files, "writing", leave=False), shards):
            content = {}
            for ours, group in itertools.groupby(names, lambda name: parts[name][0]):
                tensor = tensors.read(ours)  # of experts: all experts of a matrix
                for name in group:
                    expert = parts[name][1]
                    part = tensor if expert is None else tensor[expert].clone()
                    content[name] = part.to(dtype)
                    refuse([(not torch.stack(content[name].aminmax()).isfinite().all(),
                             f"{name} has numbers too large for {dtype}: take --dtype bfloat16")])
            save_file(content, half / path, metadata={"format": "pt"})
        if len(shards) > 1:
            write_json(half / "model.safetensors.index.json", {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {name: path for path, names in zip(files, shards) for name in names},
            })
        imported, seq_len = folder_of_import(checkpoint), saved["fixed"].get("--seq-len")
        write_json(half / "config.json", huggingface_config(
            config, dtype, seq_len and int(seq_len), imported))
        # It says when ``generate`` of transformers stops. A model may have none.
        if imported and (path := imported / GENERATION).exists():
            shutil.copy(path, half)
    return files


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(argv=None):
    parser = make_parser("export", __doc__)
    parser.add_argument("checkpoint", type=pathlib.Path, metavar="RUN_OR_CHECKPOINT",
                        help="a run folder, or a checkpoint in it")
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR",
                        help="the folder to create; it must not exist")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                        help="type of the numbers in the files (default: as trained)")
    parser.add_argument("--max-shard-size", type=at_least(0, float, above=True), default=5.0,
                        metavar="GB", help="largest file, in GB of 10^9 bytes (default: 5)")
    args = parser.parse_args(argv)
    checkpoint = find_checkpoint(args.checkpoint)
    files = export(checkpoint, args.folder, args.dtype and getattr(torch, args.dtype),
                   args.max_shard_size * 1e9)
    noun = "file" if len(files) == 1 else "files"
    print(f"{checkpoint} -> {args.folder}: config.json and {len(files)} safetensors {noun}")


if __name__ == "__main__":
    run(main)
