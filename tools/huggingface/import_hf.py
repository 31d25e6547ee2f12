"""Start a run from a Hugging Face folder: write its weights as a checkpoint of step 0.

    bash run.sh import_hf llama runs/llama
    torchrun --nproc_per_node=8 fsdp.py --model runs/llama/model.json \\
        --from runs/llama/step-00000000 --out runs/mine --lr 1e-5 --warmup-steps 20

llama is a folder of a Llama or Mixtral that ``save_pretrained`` wrote: config.json, and safetensors
files. The tool writes runs/llama/step-00000000, the weights alone, and runs/llama/model.json, the
dimensions for --model. Any script begins from them, on any number of ranks, with a fresh optimizer.
The numbers keep their types until a script reads them. One process is enough, without a GPU, with
memory for the weights. It needs one more package: ``pip install safetensors``.
"""

import json
import pathlib

import torch

from common.checkpoint import complete, start_save
from tools.command import fail, make_parser, new_folder, run
from tools.huggingface.config import read_config, read_json
from tools.huggingface.weights import empty_state, is_bias, their_names

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_files(folder):
    """The tensors of the safetensors files that from_pretrained reads, by their names there."""
    from safetensors import SafetensorError  # an optional package
    from safetensors.torch import load_file

    names, stored = ["model.safetensors"], {}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    for name in names:
        try:
            stored |= load_file(folder / name)
        except SafetensorError as error:
            fail(f"{folder / name} is damaged ({error}): download or save it again")
    return {name: x for name, x in stored.items() if not name.endswith(".rotary_emb.inv_freq")}


def read_weights(folder, config):
    """The state dict of our model of ``config`` with the weights in ``folder``. Raises
    SettingError: a tensor is missing, of another shape, or not of such a model."""
    stored, weights = read_files(folder), {}
    if read_json(folder / "config.json").get("tie_word_embeddings") and EMBEDDING in stored:
        stored.setdefault(HEAD, stored[EMBEDDING])
    for name, empty in empty_state(config).items():
        if is_bias(name):
            weights[name] = torch.zeros_like(empty, device="cpu")
            continue
        parts = []
        for each in their_names(name, empty.shape):
            if each not in stored:
                fail(f"{folder} lacks the tensor {each}: is a file of it missing? If the head is "
                     f"the embedding, set tie_word_embeddings to true in config.json")
            parts.append(stored.pop(each))
        weights[name] = found = torch.stack(parts) if len(parts) > 1 else parts[0]
        if found.shape != empty.shape:
            fail(f"{folder} has {name} of shape {tuple(found.shape)}, and its config needs "
                 f"{tuple(empty.shape)}")
    for name in stored:
        fail(f"{folder} has the tensor {name}, unlike a Llama or Mixtral of its config: save the "
             f"model again by save_pretrained of transformers")
    return weights


def main(argv=None):
    parser = make_parser("import_hf", __doc__)
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER",
                        help="a Hugging Face folder: config.json, and .safetensors files")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT",
                        help="the folder to create; it must not exist")
    args = parser.parse_args(argv)
    config = read_config(args.folder)
    with new_folder(args.out) as half:
        weights = read_weights(args.folder, config)
        checkpoint = half / "step-00000000"
        writer, _ = start_save(checkpoint, {f"model.{name}": x for name, x in weights.items()})
        settings = {name: str(value) for name, value in vars(config).items() if value}
        complete(checkpoint, [writer.sums], {"step": 0, "fixed": settings, "options": {}})
        (half / "model.json").write_text(json.dumps(vars(config), indent=1) + "\n")
    if read_json(args.folder / "config.json").get("tie_word_embeddings"):
        print("tie_word_embeddings: here the head is trained apart from the embedding")
    script = "ep.py" if getattr(config, "num_experts", 0) else "fsdp.py"
    print(f"{args.folder} -> {args.out}; for example: bash run.sh {script} --model "
          f"{args.out}/model.json --from {args.out}/step-00000000 --out runs/mine --lr 1e-5 "
          f"--warmup-steps 20")  # a larger --lr makes it forget


if __name__ == "__main__":
    run(main)
