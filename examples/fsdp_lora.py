"""fsdp.py with LoRA: a frozen base of Hugging Face in bfloat16, and trained adapters in float32.

    pip install -r examples/requirements.txt
    torchrun --nproc_per_node=2 -m examples.fsdp_lora --model FOLDER --lr 2e-4
    bash run.sh examples/fsdp_lora.py --model FOLDER --lr 2e-4 --export ADAPTERS

FOLDER is a Llama that ``save_pretrained`` wrote. Every start loads it, also a resume: checkpoints
hold the adapters only. PEFT reads what --export writes: PeftModel.from_pretrained(base, ADAPTERS).
With --dtype float32 or float64 the base has that type too.

A layer and its adapters are one unit of FSDP, which may hold two types from torch 2.12 on. In a
micro-batch each layer costs 2 all-gathers and 1 reduce-scatter: 4 and 2 for two layers. The common
advice to wrap the adapters apart costs 8 and 2. P: bytes of all parameters; A: of the adapters; G:
of all as they are gathered; F: of embedding, norm and head, which are gathered once. Each of n
ranks holds P/n of parameters, A/n of gradients and 2A/n of optimizer states, and sends
(2G - F + A)(n-1)/n for a micro-batch. With more ranks than --lora-rank, A is sent with padding.
"""

import argparse
import dataclasses
import hashlib
import pathlib

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
)

from common.data import BatchSampler, load_steps
from common.errors import SettingError, refuse
from common.launch import (
    launch, rank_and_world_size, restores_process, set_timeout, start_process_group
)
from common.materialise import materialise
from common.model import Transformer, wrap_layers
from common.model_options import add_model_options
from common.options import at_least, option_parser, parse_options
from common.step import count_targets, decay_groups, seed_step, set_learning_rate
from common.tokens import add_text_options, open_dataset
from common.torch_versions import reshard

# Services, optional: delete an import and every statement that uses it, but keep the loop
from common.services import theory
from common.services.checkpoint import Checkpoints
from common.services.checkpoint_files import hash_of
from common.services.new_files import new_folder, refuse_existing
from common.services.report import Report
from common.services.settings import run_settings
from common.services.validation import Validation
from tools.huggingface.export import write_json
from tools.huggingface.weights import load_weights


@restores_process
def main(argv=None):
    parser = option_parser(__doc__)
    add_model_options(parser)
    add_text_options(parser)
    parser.add_argument("--lora-rank", type=at_least(1), default=16, help="rank r of the adapters")
    parser.add_argument("--lora-alpha", type=at_least(1), default=32,
                        help="the output of an adapter is multiplied by alpha / r")
    parser.add_argument("--export", type=pathlib.Path, metavar="FOLDER",
                        help="write the trained adapters to this folder, for PEFT")
    parser.add_argument("--reshard-after-forward", action=argparse.BooleanOptionalAction,
                        default=True, help="free the gathered parameters of a layer after its "
                        "forward pass, and gather them again for the backward pass")
    parser.add_argument("--replicate", type=at_least(1), default=1, metavar="R",
                        help="replicas of the model, each sharded over world size / R ranks")
    parser.add_argument("--cpu-offload", action="store_true",
                        help="keep parameters, gradients and optimizer states in host memory")
    Checkpoints.add_options(parser)
    Validation.add_options(parser)
    Report.add_options(parser)
    args = parse_options(parser, argv)
    _, n = rank_and_world_size()
    check(args, n)  # before the ranks connect
    if args.export:
        refuse_existing(args.export)  # before the training, not after it
    device = start_process_group(args)
    mesh = init_device_mesh(  # the ranks of a replica are adjacent: they communicate most
        device.type, (args.replicate, n // args.replicate),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )
    set_timeout(mesh, args.timeout)

    # Model: built on the meta device, then materialised; each parameter is drawn from its own seed.
    with torch.device("meta"):
        model = Transformer(args.config).to(args.compute_dtype)  # LoRA: it is not trained
    layers = model.model.layers.values()
    add_adapters(model, layers, args.lora_rank, args.lora_alpha, args.param_dtype)
    wrap_layers(layers, args.compile, args.activation_checkpointing, model.lm_head)
    # FSDP: what is gathered together; before the optimizer, which updates the shards
    units = [
        [model.model.embed_tokens], *([layer] for layer in layers),
        [model.model.norm, model.lm_head],
    ]
    # FSDP: a mesh of two dimensions adds an all-reduce for each unit, even over one replica
    shard(
        model, units, mesh if args.replicate > 1 else mesh["dp_shard"],
        dtype=torch.bfloat16 if args.bfloat16 else None,  # FSDP: instead of autocast
        reshard_after_forward=args.reshard_after_forward, cpu_offload=args.cpu_offload,
    )
    add_gradients_up(model)  # FSDP: each rank's loss is a part of the mean over all ranks
    # LoRA: no gradient reaches the embedding; FSDP would gather it again ahead of its turn.
    first, *_ = layers
    first.set_modules_to_backward_prefetch([first])
    materialise(model, "cpu" if args.cpu_offload else device, args.seed)  # the rows of this rank
    move_buffers(model, device)  # FSDP: parameters are offloaded, buffers are not
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    load_weights(model, args.model, added=adapters)
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
    validation = Validation(
        open_dataset(args, "--val-data"), sampler, device, args.val_every, args.val_batches,
        args.workers,
    )

    # Resume: the step number is the only state of the data
    lora = {"lora_rank": args.lora_rank, "lora_alpha": args.lora_alpha}
    fixed, changeable = run_settings(args, dataset, vars(args.config) | lora)
    fixed["the hash of the base"] = hash_of_base(args.model)  # LoRA: no checkpoint has the base
    checkpoints = Checkpoints(
        args.out, (fixed, changeable), adapters, optimizer,
        stop=args.steps, every=args.save_every, keep=args.keep, in_background=args.async_save,
    )
    sampler.start = checkpoints.resume(args.source)  # steps done

    # Loop
    export = args.export
    report = Report(args, model, optimizer, [sampler, dataset], device, mesh)
    for step, batch in report.steps(load_steps(dataset, sampler, device, args.workers)):
        seed_step(args.seed, step, sampler.rank)  # FSDP: each rank has its own dropout
        set_learning_rate(optimizer, step, args)
        loss = 0.0  # this rank's part of the mean
        count = count_targets(batch, dist.group.WORLD)  # FSDP: of all ranks
        for i, (inputs, targets) in enumerate(batch):  # (B/dp/accum, T)
            # FSDP: each micro-batch adds to sharded gradients; replicas are reduced after the last.
            # set_requires_gradient_sync(last) sends less, but holds whole gradients on each rank.
            last = i == args.grad_accum - 1
            model.set_requires_all_reduce(last)
            if not args.reshard_after_forward:  # FSDP: gather once for all micro-batches
                model.set_reshard_after_backward(last)
            micro_loss = model(inputs, targets) / count
            micro_loss.backward()
            loss += micro_loss.detach()

        # FSDP: the norm is a DTensor; full_tensor() combines the norms of the ranks' shards.
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        report.log(step, loss, grad_norm)
        checkpoints.after_step(step, grad_norm)
        if validation.due(step):
            report.log_validation(step, validation.loss(model))
            reshard(model)  # FSDP: without a backward pass some parameters stay gathered
        if checkpoints.stopping:
            if step + 1 < args.steps:  # LoRA: a signal has stopped the run before its end
                export = None
            break
    checkpoints.finish()
    if export:
        save_for_peft(adapters, export, args.model, args.lora_rank, args.lora_alpha)
    return report.close(formulas(args, n, model))


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


def shard(model, units, mesh, dtype=None, reshard_after_forward=True, cpu_offload=False):
    """Shard ``model`` in place (FSDP2): over a one-dimensional ``mesh``, or over the second of two
    dimensions, with replicas along the first (hybrid sharding).

    ``units`` are lists of modules whose parameters are gathered together, in the order of their
    use, such as [embedding], [layer], ..., [norm, head]. The rest of ``model`` is one more unit.
    ``dtype``: compute in this type, and reduce gradients in float32. ``reshard_after_forward``:
    free gathered parameters between forward and backward; the last unit keeps them, since its
    backward pass comes at once. ``cpu_offload``: keep the shards in host memory. Raises
    SettingError if two units share a parameter.
    """
    parameters = [p for unit in units for p in nn.ModuleList(unit).parameters()]
    if len(parameters) > len(set(parameters)):
        raise SettingError("two units share a parameter: put modules with tied weights in one")
    policy = MixedPrecisionPolicy(dtype, dtype and torch.float32)
    # The root casts float inputs of the model. Units do not: rotary angles stay in float32.
    inner = dataclasses.replace(policy, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    options = {"mesh": mesh, "offload_policy": offload}
    for unit in units:
        frees = reshard_after_forward and unit is not units[-1]
        fully_shard(unit, reshard_after_forward=frees, mp_policy=inner, **options)
    fully_shard(model, mp_policy=policy, **options)


def add_gradients_up(model):
    """Let FSDP add up gradients over the ranks, instead of averaging them. Call it after ``shard``,
    if the loss of each rank is its part of one mean: the sum over its targets / the number of all
    ranks' targets. Without it FSDP averages, as DDP does: for losses that are means themselves."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # neither setter reaches the modules below
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def move_buffers(model, device):
    """Put the buffers of ``model`` on ``device``, where its layers use them as they are."""
    moved = {}  # what has two names stays one buffer
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, moved.setdefault(buffer, buffer.to(device)))


def save_for_peft(adapters, folder, base, r, alpha):
    """Write the adapters, {name: parameter}, into a new ``folder``, from which PEFT reads them.
    ``base``: the folder of the base. All ranks call it, and hold all adapters for a moment."""
    tensors = {f"base_model.model.{name}": parameter.detach().full_tensor().cpu()
               for name, parameter in adapters.items()}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": alpha,
        "base_model_name_or_path": str(pathlib.Path(base).resolve()),
        "target_modules": sorted({name.split(".")[-3] for name in adapters}),
    }
    if dist.get_rank() == 0:
        with new_folder(folder) as temporary:
            save_file(tensors, temporary / "adapter_model.safetensors")
            write_json(temporary / "adapter_config.json", config)


def hash_of_base(folder):
    """The hash of all weights in ``folder``. Each rank reads its files whole: ranks on different
    machines might have different ones, of which each would load some rows."""
    hashes = [hash_of(path) for path in sorted(pathlib.Path(folder).glob("*.safetensors"))]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


WITHOUT_VALUES = {"hash_of_base": lambda folder: ""}  # tools/dry_run.py reads no weights


def formulas(args, n, model):
    """(formula, bytes) of what a rank holds and sends in a step. See the docstring above."""
    a, R, s = args.grad_accum, args.replicate, n // args.replicate
    P = theory.bytes_of(model)
    A = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    F = theory.bytes_of(model.model.embed_tokens, model.model.norm, model.lm_head)
    G = P - A + A * args.compute_dtype.itemsize / args.param_dtype.itemsize
    formula, sent = "a(2G-F+A)(s-1)/s", a * (2 * G - F + A) * (s - 1) / s
    if not args.reshard_after_forward:
        formula, sent = "(G+aA)(s-1)/s", (G + a * A) * (s - 1) / s
    if R > 1:
        formula, sent = f"{formula} + (2A/s)(R-1)/R", sent + 2 * A / s * (R - 1) / R
    sent += 16 * (n - 1) / n
    return theory.held("A/s", A / s) | {
        "parameters": ("P/s", P / s), "sent": (f"{formula} + 16(n-1)/n", sent),
    }


def check(args, n):
    """Refuse what n ranks, or this machine, cannot do.

    Raises:
        SettingError: the message says what they can do.
    """
    fitting = " or ".join(str(r) for r in range(1, n + 1) if n % r == 0)
    refuse([
        (n % args.replicate,
         f"--replicate {args.replicate} does not divide the world size {n}: use {fitting}"),
        (args.cpu_offload and (args.device == "cpu" or not torch.cuda.is_available()),
         "--cpu-offload moves parameters from GPU to host memory, but this run is on the CPU: "
         "leave --cpu-offload out"),
    ])


if __name__ == "__main__":
    launch(main)
