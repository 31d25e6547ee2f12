"""Write a checkpoint as a folder that Hugging Face's ``from_pretrained`` reads.

    bash run.sh export runs/fsdp exported
    bash run.sh export runs/fsdp/step-00000200 exported --dtype bfloat16

From a run folder it takes the newest checkpoint. Any script may have saved it, on any number of
ranks. It writes config.json, and a safetensors file for each layer, with their index. If the run
began with imported weights, config.json is the imported one, with what the run has changed, and
generation_config.json comes too. Checkpoints contain no tokenizer: copy one into the folder. One
process is enough, without a GPU, with memory for a layer. It needs one more package: ``pip install
safetensors``.
"""

import ast
import dataclasses
import itertools
import json
import pathlib
import re
import shutil

import torch
import torch.distributed.checkpoint as dcp
from tqdm import tqdm

from common.experts import MixtureConfig
from common.model import ModelConfig
from common.checkpoint import list_checkpoints, open_checkpoint
from tools.command import fail, make_parser, new_folder, run
from tools.huggingface.config import config_from, read_json
from tools.huggingface.weights import check_shapes, parts_of, shapes_of

GENERATION = "generation_config.json"


def find_checkpoint(path):
    """The checkpoint ``path``, or the newest one in the run folder ``path``."""
    found = [path] if (path / "run.json").exists() else list_checkpoints(path)
    if not found:
        fail(f"{path} is neither a checkpoint nor a run folder with one: name a folder such as "
             f"runs/fsdp or runs/fsdp/step-00000200")
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
        settings = read_json(checkpoint / "run.json")
        checkpoint = pathlib.Path(settings["options"].get("--from", "None"))
    # No run saves step 0.
    if checkpoint.name == "step-00000000" and not checkpoint.exists():
        fail(f"the run began with {checkpoint}, which is not here: config.json and {GENERATION} "
             f"are taken from beside it; put it back, or start where it is")
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
        content = read_json(path)
        before = described(config_from(content, path))
        values = {name: value for name, value in values.items() if before.get(name) != value}
        length = max(content.get("max_position_embeddings") or length, seq_len or 0)
    content.pop("rope_parameters", None)  # transformers 4 does not read it, and takes 10,000
    for name in {"dtype", "torch_dtype"} & content.keys() or ["torch_dtype"]:
        content[name] = str(dtype).removeprefix("torch.")
    return content | values | {
        "rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling,
        "max_position_embeddings": length, "tie_word_embeddings": False}


def described(config):
    """What a config.json says of a ModelConfig."""
    values, kind = dict(vars(config)), "Llama"
    experts = values.pop("num_experts", 0)
    chosen, size = (values.pop(name, None) for name in ("experts_per_token", "expert_size"))
    if experts:
        kind = "Mixtral"
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
            if self.read(name).any():
                fail(f"{checkpoint} has {name}, which chooses experts and is not 0; a Mixtral has "
                     f"no such bias: train with --balance-rate 0")
            del shapes[name]
        check_shapes(shapes, shapes_of(config), checkpoint)

    def dtype(self, name):
        return self.stored[f"model.{name}"].properties.dtype

    def read(self, name):
        entry = self.stored[f"model.{name}"]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load({f"model.{name}": tensor}, storage_reader=self.reader, no_dist=True)
        return tensor


def export(checkpoint, folder, dtype=None):
    """Write ``checkpoint`` into a new ``folder``: under another name, and renamed when all of it is
    on disk. ``dtype``: the torch.dtype to write; None: the one in the checkpoint.

    Raises:
        SettingError: the checkpoint is damaged or not of a Llama, or ``folder`` exists.
    """
    with new_folder(folder) as half:
        reader, saved = open_checkpoint(checkpoint)
        config = model_config(saved)
        tensors = Tensors(checkpoint, reader, config)
        dtype = dtype or tensors.dtype("model.embed_tokens.weight")
        write_weights(half, tensors, parts_of(config), dtype)
        imported, seq_len = folder_of_import(checkpoint), saved["fixed"].get("--seq-len")
        write_json(half / "config.json", huggingface_config(
            config, dtype, seq_len and int(seq_len), imported))
        # It says when ``generate`` of transformers stops. A model may have none.
        if imported and (imported / GENERATION).exists():
            shutil.copy(imported / GENERATION, half)


def write_weights(folder, tensors, parts, dtype):
    """Write a file for each layer, and one for what is before and behind them. ``parts``: those of
    ``parts_of``."""
    from safetensors.torch import save_file  # an optional package

    def layer(name):
        return re.findall(r"layers\.\d+", name)

    files = [list(names) for _, names in itertools.groupby(parts, layer)]
    index = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, names in enumerate(tqdm(files, "writing", leave=False), 1):
        path, content = f"model-{number:05d}-of-{len(files):05d}.safetensors", {}
        for ours, group in itertools.groupby(names, lambda name: parts[name][0]):
            tensor = tensors.read(ours).to(dtype)  # of experts: all experts of a matrix
            if not torch.stack(tensor.aminmax()).isfinite().all():
                fail(f"{ours} has numbers too large for {dtype}: take --dtype bfloat16")
            for name in group:
                expert = parts[name][1]
                content[name] = tensor if expert is None else tensor[expert].clone()
        save_file(content, folder / path, metadata={"format": "pt"})
        index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in content.values())
        index["weight_map"] |= dict.fromkeys(content, path)
    write_json(folder / "model.safetensors.index.json", index)


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
    args = parser.parse_args(argv)
    checkpoint = find_checkpoint(args.checkpoint)
    export(checkpoint, args.folder, args.dtype and getattr(torch, args.dtype))
    print(f"{checkpoint} -> {args.folder}: config.json and safetensors files")


if __name__ == "__main__":
    run(main)
