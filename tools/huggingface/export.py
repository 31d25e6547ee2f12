"""Write a checkpoint as a folder that Hugging Face's ``from_pretrained`` reads.

    bash run.sh export runs/fsdp exported
    bash run.sh export runs/fsdp/step-00000200 exported --dtype bfloat16

From a run folder it takes the newest checkpoint. Any script may have saved it, on any number of
ranks. It writes config.json, and model.safetensors or shards with an index. If the run began with
imported weights, config.json is the imported one, with what the run has changed, and
generation_config.json comes too. Checkpoints contain no tokenizer: copy one into the folder. One
process is enough, without a GPU or further packages.

It reads, converts and writes one tensor after the other. So it does not need memory for the model
or for a shard, but for some four times the largest tensor.
"""

import itertools
import json
import pathlib

import torch
from tqdm import tqdm

from common.errors import SettingError
from common.options import at_least
from common.services.checkpoint_files import FIXED, list_checkpoints, open_checkpoint
from common.services.hf_config import config_from, read_json
from common.services.new_files import new_file, new_folder, refuse_existing
from common.services.run_folder import read_run_id
from tools.huggingface.weights import DTYPES, check_shapes, parts_of, shapes_of
from tools.support.command import make_parser, run

NAMES = {dtype: name for name, dtype in DTYPES.items()}
ROPE = {"rope_theta", "rope_scaling"}


def find_checkpoint(path):
    """The checkpoint ``path``, or the newest one in the run folder ``path``.

    Raises:
        SettingError: there is none.
    """
    if (path / ".metadata").exists() or (path / "run.json").exists():
        return path
    if not (checkpoints := list_checkpoints(path)):
        raise SettingError(
            f"{path} is neither a checkpoint nor a run folder with one: name a folder such as "
            f"runs/fsdp or runs/fsdp/step-00000200"
        )
    return checkpoints[-1]


def folder_of_import(checkpoint):
    """The run folder into which import_hf.py has written the weights from which the run of
    ``checkpoint`` began, maybe through other runs; None: the run began without such weights."""
    folders = [checkpoint.absolute().parent]
    for folder in folders:
        run, _, source = read_run_id(folder)
        if run and (folder / "config.json").exists():
            return folder
        if source and (before := pathlib.Path(source).parent) not in folders:
            folders.append(before)
    return None


def huggingface_config(config, dtype, seq_len, imported=None):
    """The content of a config.json: that of the folder ``imported``, with what the run has changed.
    Without such a folder the names are from before transformers 5, which still reads them. Our data
    has no special tokens. ``seq_len``: that of the run, or None."""
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
    if ROPE & values.keys():  # the run has changed it
        values |= {name: getattr(config, name) for name in ROPE}
        content.pop("rope_parameters", None)  # where transformers 5 has both
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


def check_is_complete(checkpoint, config, reader, stored):
    """Raise SettingError unless the checkpoint has all parameters of the model that ``config``
    describes, and nothing more of it. A Mixtral has no biases that choose experts: they must be 0.
    """
    shapes = {name.removeprefix("model."): tuple(entry.size) for name, entry in stored.items()
              if name.startswith("model.")}
    # Copies, such as ema.lm_head.weight of an average of the weights, are not exported.
    shapes = {name: size for name, size in shapes.items() if name.partition(".")[2] not in shapes}
    for name in [name for name in shapes if name.endswith(".mlp.bias")]:
        if reader.read_tensor(f"model.{name}").any():
            raise SettingError(
                f"{checkpoint} has {name}, which chooses experts and is not 0; a Mixtral has no "
                f"such bias: train with --balance-rate 0"
            )
        del shapes[name]
    check_shapes(shapes, shapes_of(config), checkpoint)


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


def header(shapes, dtype):
    """The first bytes of a safetensors file with tensors of these shapes, in their order: the
    length of a JSON text, and the text, which says where each tensor lies behind it."""
    entries, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {
            "dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def write_parts(file, tensor, experts, dtype):
    """Write ``{name: number of the expert, or None for the whole tensor}``.

    Raises:
        SettingError: a number is too large for ``dtype``.
    """
    for name, expert in experts.items():
        part = (tensor if expert is None else tensor[expert]).to(dtype)
        if not torch.stack(part.aminmax()).isfinite().all():  # it makes no copy
            raise SettingError(f"{name} has numbers too large for {dtype}: take --dtype bfloat16")
        file.write(part.view(torch.uint8).numpy())


def export(checkpoint, folder, dtype=None, max_shard_size=5e9):
    """Write ``checkpoint`` into a new ``folder``: under another name, and renamed when all of it is
    on disk. Returns the names of the safetensors files.

    Args:
        dtype: the torch.dtype to write; None: the one in the checkpoint.
        max_shard_size: bytes in a file; a tensor that is larger has a file of its own.

    Raises:
        SettingError: the checkpoint is damaged or not of a Llama, or ``folder`` exists.
    """
    refuse_existing(folder)
    reader, stored, saved = open_checkpoint(checkpoint)
    settings = {key.removeprefix("--").replace("-", "_"): value
                for key, value in saved[FIXED].items()}
    config = config_from({"model_type": "llama"} | settings, checkpoint / "run.json")
    check_is_complete(checkpoint, config, reader, stored)
    parts = parts_of(config)
    shapes = {name: shape for name, (_, _, shape) in parts.items()}
    dtype = dtype or stored["model.model.embed_tokens.weight"].properties.dtype
    if dtype not in NAMES:
        raise SettingError(f"{checkpoint} holds {dtype}: choose a --dtype")
    imported = folder_of_import(checkpoint)
    config_json = huggingface_config(config, dtype, settings.get("seq_len"), imported)
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
    shards = split(sizes, max_shard_size)
    files = ["model.safetensors"] if len(shards) == 1 else [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    bar = tqdm(desc="writing", total=sum(sizes.values()), unit="B", unit_scale=True, leave=False)
    with bar, new_folder(folder) as temporary:
        for path, names in zip(files, shards):
            with new_file(temporary / path) as file:
                file.write(header({name: shapes[name] for name in names}, dtype))
                # All experts of a matrix are one tensor. It is freed before the next one is read.
                for ours, group in itertools.groupby(names, lambda name: parts[name][0]):
                    experts = {name: parts[name][1] for name in group}
                    write_parts(file, reader.read_tensor(f"model.{ours}"), experts, dtype)
                    bar.update(sum(sizes[name] for name in experts))
        if len(shards) > 1:
            write_json(temporary / "model.safetensors.index.json", {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {name: path for path, names in zip(files, shards) for name in names},
            })
        write_json(temporary / "config.json", config_json)
        copy_generation_config(imported, temporary)
    return files


def copy_generation_config(source, folder):
    """It says when ``generate`` of transformers stops. A model may have none."""
    if source and (path := source / "generation_config.json").exists():
        write_json(folder / path.name, read_json(path))


def write_json(path, content):
    with new_file(path, "w") as file:
        file.write(json.dumps(content, indent=2) + "\n")


def main(argv=None):
    parser = make_parser("huggingface.export", __doc__)
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
