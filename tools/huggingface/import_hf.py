"""Start a run from a Hugging Face folder: write its weights as a checkpoint of step 0.

    bash run.sh import_hf llama runs/mine
    torchrun --nproc_per_node=8 fsdp.py --model runs/mine --out runs/mine

llama is a folder of a Llama or Mixtral that ``save_pretrained`` wrote: config.json, and safetensors
files. The tool writes runs/mine/step-00000000, the weights alone, runs/mine/config.json, the
dimensions for --model, and generation_config.json if there is one. Any script resumes from them, on
any number of ranks, with a fresh optimizer. The numbers keep their types until a script reads them.
One process is enough, without a GPU. It needs one more package: ``pip install safetensors``.

It reads and writes one tensor after the other. So it does not need memory for the model, but for
about twice the largest tensor. In a Mixtral one tensor holds a matrix of all experts of a layer.
"""

import pathlib
import shlex

import torch
import torch.distributed.checkpoint as dcp
from tqdm import tqdm

from common.errors import SettingError
from common.experts import use_experts
from common.materialise import local_slices
from common.model import Transformer
from common.services.checkpoint_files import IMPORTED, HashingWriter, complete, reason
from common.services.hf_config import read_config, read_json
from common.services.new_files import new_folder, refuse_existing
from common.services.run_folder import Claim, new_id
from common.services.settings import config_settings
from tools.huggingface.export import copy_generation_config, write_json
from tools.huggingface.weights import Weights
from tools.support.command import make_parser, run


class ReadingPlanner(dcp.DefaultSavePlanner):
    """Saves tensors of the meta device, which have no numbers. When DCP is about to write a tensor,
    ``read(name)`` returns the same with its numbers."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def lookup_object(self, index):
        return self.read(index.fqn.removeprefix("model."))


def import_weights(folder, out):
    """Write the weights in ``folder`` as the first checkpoint of a new run folder ``out``: under
    another name, and renamed when all of it is on disk. Returns the ModelConfig.

    Raises:
        SettingError: ``folder`` is damaged or not of a Llama or Mixtral, or ``out`` exists.
    """
    refuse_existing(out)
    config = read_config(folder)
    weights = Weights(folder, config)
    with torch.device("meta"):
        tensors = use_experts(Transformer(config)).state_dict()
    tensors |= {name: tensors[name].to(weights.dtype(name)) for name in weights.stored}
    total = sum(tensor.nbytes for tensor in tensors.values())
    bar = tqdm(desc="writing", total=total, unit="B", unit_scale=True, leave=False)

    def read(name):
        bar.update(tensors[name].nbytes)
        if name not in weights.stored:  # a buffer: the biases that choose experts
            return torch.zeros_like(tensors[name], device="cpu")
        tensor = weights.read(name, local_slices(tensors[name]))
        if not torch.stack(tensor.aminmax()).isfinite().all():
            raise SettingError(f"{folder} has {name} with numbers that are not finite")
        return tensor

    with bar, new_folder(out) as temporary:
        checkpoint = temporary / f"step-{IMPORTED:08d}"
        # A file for each tensor: DCP keeps all tensors of a file until the file is complete.
        writer = HashingWriter(checkpoint, single_file_per_rank=False)
        try:
            dcp.save({f"model.{name}": tensor for name, tensor in tensors.items()},
                     storage_writer=writer, planner=ReadingPlanner(read), no_dist=True)
        except dcp.CheckpointException as error:
            raise SettingError(f"{out} could not be written {reason(error)}") from None
        complete(checkpoint, writer.sums, step=IMPORTED, fixed=config_settings(vars(config)),
                 changeable={})
        Claim(temporary, None, new_id()).take()
        content = read_json(folder / "config.json")
        write_json(temporary / "config.json", content | {"tie_word_embeddings": False})
        copy_generation_config(folder, temporary)
    return config


def main(argv=None):
    parser = make_parser("huggingface.import_hf", __doc__)
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER",
                        help="a Hugging Face folder: config.json, and .safetensors files")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT",
                        help="the run folder to create; it must not exist")
    args = parser.parse_args(argv)
    config = import_weights(args.folder, args.out)
    print(f"{args.folder} -> {args.out}: config.json and step-{IMPORTED:08d}")
    scripts, first = "any script", "fsdp.py"
    if getattr(config, "num_experts", 0):
        scripts, first = "ep.py or hybrid_3d.py", "ep.py"
    out = shlex.quote(str(args.out))
    print(f"train from it with {scripts}, such as: bash run.sh {first} --model {out} --out {out}")


if __name__ == "__main__":
    run(main)
