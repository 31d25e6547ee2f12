"""fsdp.py with LoRA: a frozen base of Hugging Face in bfloat16, and trained adapters in float32.

    pip install -r examples/requirements.txt
    bash run.sh import_hf FOLDER runs/llama
    bash run.sh examples/fsdp_lora.py --model runs/llama/model.json \\
        --base runs/llama/step-00000000 --lr 2e-4 --export ADAPTERS

FOLDER is a Llama that ``save_pretrained`` wrote; but any checkpoint can be the base. Every start
loads it, also a resume: checkpoints hold the adapters only. PEFT reads what --export writes:
PeftModel.from_pretrained(base, ADAPTERS). With --dtype float32 or float64 the base has that type
too.

A layer and its adapters are one unit of FSDP, which may hold two types. In a micro-batch each layer
costs 2 all-gathers and 1 reduce-scatter: 4 and 2 for two layers. The common advice to wrap the
adapters apart costs 8 and 2. P: bytes of all parameters; A: of the adapters; G: of all as they are
gathered; F: of embedding, norm and head, which are gathered once. Each of n ranks holds P/n of
parameters, A/n of gradients and 2A/n of optimizer states, and sends (2G - F + A)(n-1)/n for a
micro-batch. With more ranks than --lora-rank, A is sent with padding.
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(1, str(pathlib.Path(__file__).parents[1]))  # where common/ and fsdp.py are
from common.checkpoint import hash_of, load, open_checkpoint
from common.data import BatchSampler, add_text_options, load_steps, open_dataset, open_held_out
from common.launch import launch, start_process_group, world_size
from common.materialise import materialise
from common.model import Transformer, add_model_options, model_config, wrap_layers
from common.options import SettingError, at_least, option_parser, parse_options
from common.run import Run
from common.step import count_targets, decay_groups, seed_step, set_learning_rate
from common.usage import Usage
from fsdp import reduce_by_sum, shard


def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser)
    add_text_options(parser)
    parser.add_argument("--base", required=True, type=pathlib.Path, metavar="CHECKPOINT",
                        help="a checkpoint of the base")
    parser.add_argument("--lora-rank", type=at_least(1), default=16, help="rank r of the adapters")
    parser.add_argument("--lora-alpha", type=at_least(1), default=32,
                        help="the output of an adapter is multiplied by alpha / r")
    parser.add_argument("--export", type=pathlib.Path, metavar="FOLDER",
                        help="write the trained adapters to this folder, for PEFT")
    Run.add_options(parser)
    args = parse_options(parser, argv)
    args.config = model_config(args)
    if args.export and args.export.exists():
        raise SettingError(f"--export {args.export} exists: name a new folder")
    device = start_process_group(args)
    mesh = init_device_mesh(device.type, (world_size(),), mesh_dim_names=("dp_shard",))

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.compute_dtype)  # LoRA: it is not trained
    layers = model.model.layers.values()
    add_adapters(model, layers, args.lora_rank, args.lora_alpha, args.param_dtype)
    wrap_layers(layers, args.compile, args.activation_checkpointing, head=model.lm_head)
    # FSDP: what is gathered together; before the optimizer, which updates the shards
    units = [
        [model.model.embed_tokens], *([layer] for layer in layers),
        [model.model.norm, model.lm_head],
    ]
    shard(
        model, units, mesh, dtype=torch.bfloat16 if args.bfloat16 else None,  # FSDP: no autocast
    )
    reduce_by_sum(model)  # FSDP: each rank's loss is a part of the mean over all ranks
    # LoRA: no gradient reaches the embedding; FSDP would gather it again ahead of its turn.
    first, *_ = layers
    first.set_modules_to_backward_prefetch([first])
    materialise(model, device, args.seed)  # the rows of this rank
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    base = {name: p for name, p in model.state_dict().items() if name not in adapters}
    hash_of_base = load_base(base, args.base)
    for name, parameter in adapters.items():
        if name.endswith("lora_B.weight"):  # drawn too, but training starts from the base
            nn.init.zeros_(parameter)

    # Optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(adapters.values(), args.weight_decay), args.lr, args.betas, fused=True
    )

    # Data
    dataset = open_dataset(args)
    sampler = BatchSampler(
        len(dataset), args.batch_size, args.grad_accum, seed=args.seed, stop=args.steps,
        mesh=mesh,  # FSDP: each rank reads its own samples
    )

    # Resume: the step number is the only state of the data
    # LoRA: no checkpoint has the base, nor alpha: a resume needs the same
    vars(args.config).update(lora_alpha=args.lora_alpha, hash_of_base=hash_of_base)
    run = Run(
        args, model, optimizer, sampler, dataset, device, mesh, held_out=open_held_out(args),
        tensors=adapters,  # LoRA: what a checkpoint holds
        after_evaluation=model.reset_iter_state,  # FSDP: the last unit would stay gathered
        usage=Usage(model),  # FSDP: all ranks must use the same units
    )
    sampler.start = run.resume()

    # Loop
    for step, batch in run.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, sampler.rank)  # FSDP: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch, dist.group.WORLD)  # FSDP: of all ranks
        for inputs, targets in batch:  # (B/dp/accum, T)
            micro_loss = model(inputs, targets) / count
            micro_loss.backward()
            loss += micro_loss.detach()

        # FSDP: the norm, of all ranks' shards, is a DTensor; full_tensor() makes a tensor of it.
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        run.after_step(step, loss, grad_norm)
    if args.export and not (run.stopping and run.done < args.steps):  # LoRA: not if it was stopped
        save_for_peft(adapters, args.export, args.lora_rank, args.lora_alpha)
    return run.history


class LoraLinear(nn.Linear):
    """A frozen linear layer and a trained change of low rank: x W^T + alpha/r x A^T B^T, with x
    (..., in), W (out, in), A (r, in) and B (out, r). (LoRA, arXiv:2106.09685) W keeps its name, and
    A and B have the names that PEFT gives them."""

    def __init__(self, base, r, alpha, dtype):
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias, self.scale = base.weight, base.bias, alpha / r
        options = {"bias": False, "device": base.weight.device, "dtype": dtype}
        self.lora_A = nn.Linear(base.in_features, r, **options)
        self.lora_B = nn.Linear(r, base.out_features, **options)
        nn.init.zeros_(self.lora_B.weight)  # training starts from the base

    def forward(self, x):
        return super().forward(x) + self.scale * self.lora_B(self.lora_A(x))


def add_adapters(model, layers, r, alpha, dtype):
    """Freeze ``model``, and give every nn.Linear within ``layers`` an adapter of rank ``r`` and of
    type ``dtype``, which is trained. Call it before ``shard``."""
    model.requires_grad_(False)
    for layer in layers:
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                layer.set_submodule(name, LoraLinear(linear, r, alpha, dtype))


def save_for_peft(adapters, folder, r, alpha):
    """Write the adapters, {name: parameter}, into a new ``folder``, from which PEFT reads them.
    All ranks call it, and hold all adapters for a moment."""
    tensors = {f"base_model.model.{name}": parameter.detach().full_tensor().cpu()
               for name, parameter in adapters.items()}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": alpha,
        "target_modules": sorted({name.split(".")[-3] for name in adapters}),
    }
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def load_base(tensors, checkpoint):
    """Load ``tensors``, by their names, from a checkpoint. Returns its hash: machines might see
    different ones, of which each would load some rows."""
    reader, _ = open_checkpoint(checkpoint)
    load(reader, tensors, {})
    return hash_of(checkpoint / "SHA256SUMS")


WITHOUT_VALUES = {"load_base": lambda tensors, checkpoint: ""}  # tools/dry_run.py reads no weights


if __name__ == "__main__":
    launch(main)
