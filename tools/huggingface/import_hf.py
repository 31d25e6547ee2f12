"""Start a run from a Hugging Face folder: write its weights as a checkpoint of step 0.

    bash run.sh import_hf llama runs/llama
    torchrun --nproc_per_node=8 fsdp.py --model runs/llama/model.json \\
        --from runs/llama/step-00000000 --out runs/mine --lr 1e-5 --warmup-steps 20

llama is a folder of a Llama or Mixtral that ``save_pretrained`` wrote: config.json, and safetensors
files. The tool writes runs/llama/step-00000000, the weights alone, and runs/llama/model.json, the
dimensions for --model. Any script begins from them, on any number of ranks, with a fresh optimizer.
It copies config.json, and generation_config.json if there is one: ``export`` looks there for what
our model does not know. The numbers keep their types until a script reads them. One process is
enough, without a GPU. It needs one more package: ``pip install safetensors``.

It reads and writes one tensor after the other. So it does not need memory for the model, but for
about twice the largest tensor. In a Mixtral one tensor holds a matrix of all experts of a layer.
"""

import json
import pathlib
import shlex
import shutil

import torch
import torch.distributed.checkpoint as dcp
from tqdm import tqdm

from common.experts import use_experts
from common.materialise import local_slices
from common.model import Transformer
from common.checkpoint import HashingWriter, complete
from tools.command import fail, make_parser, new_folder, run
from tools.huggingface.config import config_file, read_config
from tools.huggingface.weights import Weights

NOTES = {  # what a config.json may say that is otherwise here
    "tie_word_embeddings": "here the head is a weight of its own, and trained apart from the "
                           "embedding",
    "output_router_logits": "here no auxiliary loss balances the experts: see --balance-rate",
}


class ReadingPlanner(dcp.DefaultSavePlanner):
    """Saves tensors of the meta device, which have no numbers. When DCP is about to write a tensor,
    ``read(name)`` returns the same with its numbers."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def lookup_object(self, index):
        return self.read(index.fqn.removeprefix("model."))


def import_weights(folder, config, checkpoint):
    """Write the weights in ``folder``, of a model of ``config``, as a ``checkpoint``. Raises
    SettingError if they are damaged or not of this model."""
    weights = Weights(folder, config)
    with torch.device("meta"):
        tensors = use_experts(Transformer(config)).state_dict()
    tensors |= {name: tensors[name].to(weights.dtype(name)) for name in weights.stored}
    total = sum(tensor.nbytes for tensor in tensors.values())

    def read(name):
        bar.update(tensors[name].nbytes)
        if name not in weights.stored:  # a buffer: the biases that choose experts
            return torch.zeros_like(tensors[name], device="cpu")
        return weights.read(name, local_slices(tensors[name]))

    # A file for each tensor: DCP keeps all tensors of a file until the file is complete.
    writer = HashingWriter(checkpoint, single_file_per_rank=False)
    with tqdm(desc="writing", total=total, unit="B", unit_scale=True, leave=False) as bar:
        dcp.save({f"model.{name}": tensor for name, tensor in tensors.items()},
                 storage_writer=writer, planner=ReadingPlanner(read), no_dist=True)
    settings = {name: str(value) for name, value in vars(config).items() if value}
    complete(checkpoint, [writer.sums], {"step": 0, "fixed": settings, "options": {}})


def main(argv=None):
    parser = make_parser("import_hf", __doc__)
    parser.add_argument("folder", metavar="FOLDER",
                        help="a Hugging Face folder: config.json, and .safetensors files")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT",
                        help="the folder to create; it must not exist")
    parser.add_argument("--config-only", action="store_true",
                        help="write model.json, without weights; FOLDER may be a config.json")
    args = parser.parse_args(argv)
    file, config = config_file(args.folder), read_config(args.folder)
    if not args.config_only and file == pathlib.Path(args.folder):
        fail(f"{file} is no folder with weights: name the folder, or add --config-only")
    with new_folder(args.out) as half:
        if not args.config_only:
            import_weights(file.parent, config, half / "step-00000000")
        (half / "model.json").write_text(json.dumps(vars(config), indent=1) + "\n")
        for copied in file, file.with_name("generation_config.json"):
            if copied.exists():
                shutil.copy(copied, half / copied.name)
    for name, words in NOTES.items():
        if json.loads(file.read_text()).get(name):
            print(f"{file} has {name}: {words}")
    script = "ep.py" if getattr(config, "num_experts", 0) else "fsdp.py"
    words = ["bash", "run.sh", script, "--model", args.out / "model.json"]
    if not args.config_only:
        words += ["--from", args.out / "step-00000000", "--out", "runs/mine",
                  "--lr", "1e-5", "--warmup-steps", "20"]  # a larger --lr makes it forget
    print(f"{args.folder} -> {args.out}; for example: {shlex.join(map(str, words))}")


if __name__ == "__main__":
    run(main)
