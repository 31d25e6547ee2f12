"""The command line that all scripts share."""

import argparse
import dataclasses
import importlib.util
import math
import os
import pathlib
import sys

import torch

from common.data import STANDARD_LIBRARY, open_datasets
from common.data import fingerprint as fingerprint_of_data
from common.errors import SettingError, refuse
from common.launch import pick_device, rank_and_world_size
from common.model import PRESETS, ModelConfig
from common.weights import fingerprint, is_tied, read_config

# When a run is resumed, these must stay the same, and those may change.
MUST = "seed", "batch_size", "seq_len"
# Checkpoints adds the settings of the optimizer, such as its betas.
MAY = "steps", "lr", "min_lr", "warmup_steps", "grad_clip", "dtype"
EXPERTS = {  # what the options of a mixture of experts are
    "num_experts": "experts in each layer, in place of its MLP; 0: the MLP (default: 0)",
    "experts_per_token": "experts that compute a token (default: 2, if there are experts)",
    "expert_size": "width of an expert (default: that of the MLP, --intermediate-size)",
}


def at_least(minimum, kind=int, above=False, most=2**31 - 1):
    """An argparse type: a finite number >= ``minimum``, or > ``minimum`` with ``above``, and <=
    ``most``."""

    def parse(text):
        value = kind(text)
        if value > most:
            raise argparse.ArgumentTypeError(
                f"{text:.40} is not allowed: it must be at most {most}"
            )
        if not (minimum < value if above else minimum <= value):
            least = "greater than" if above else "at least"
            raise argparse.ArgumentTypeError(f"{text} is not allowed: it must be {least} {minimum}")
        return value

    parse.__name__ = {int: "whole number", float: "number"}[kind]  # for argparse's own message
    return parse


def _folder(text):
    return pathlib.Path(_path(text))


def _path(text):
    """An argparse type: an empty path would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file or a folder")
    return text


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints the docstring as it stands, and the default of every option."""


def option_parser(doc, model=True, text=True):
    """A parser with the options of every script; a script adds its own to it.

    ``model=False`` leaves out the options of the Llama of common/model.py, ``text=False`` those of
    the text that it is trained on: for a script with a model, or data, of its own.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description=doc, formatter_class=_Help, allow_abbrev=False
    )
    parser.error = lambda message: refuse([(True, message)])
    if rank_and_world_size()[0] != 0:
        parser.print_help = lambda: None  # rank 0 prints it
    whole, number = at_least(1), at_least(0, float, most=sys.float_info.max)

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=whole, default=200, metavar="N",
        help="optimizer steps in the whole run; the cosine decay ends there")
    add("--batch-size", type=at_least(1, most=2**24), default=16, metavar="B",
        help="sequences in the global batch, over all ranks and micro-batches")
    add("--grad-accum", type=whole, default=1, metavar="N", help="gradient-accumulation steps: "
        "micro-batches into which each rank cuts its share of the batch")
    add("--lr", type=number, default=2e-3, metavar="LR", help="peak learning rate")
    add("--min-lr", type=number, default=0.0, metavar="LR",
        help="learning rate at the end of the cosine decay")
    add("--warmup-steps", type=at_least(0), default=10, metavar="N",
        help="steps of linear warm-up to --lr")
    add("--weight-decay", type=number, default=0.1, metavar="X",
        help="weight decay of AdamW, for matrices; norms have none")
    for name, beta in (("--beta1", 0.9), ("--beta2", 0.95)):
        add(name, type=at_least(0, float, most=1 - 1e-9), default=beta, metavar="X",
            help="beta of AdamW")
    add("--grad-clip", type=number, default=1.0, metavar="NORM", help="gradients with a larger "
        "global norm are scaled down to this norm; 0: no clipping")
    add("--seed", type=at_least(0), default=0, metavar="N",
        help="seed of the initial weights and of the order of the data")

    add = parser.add_argument_group("data").add_argument
    if text:
        add("--data", default=STANDARD_LIBRARY, metavar="PATH", help="a .bin file of token ids, a "
            "text file, or a folder of either; text is read as bytes; "
            f"'{STANDARD_LIBRARY}': the source text of Python's standard library")
        add("--val-data", type=_path, metavar="PATH", help="held-out data, of the kinds that "
            "--data takes: evaluate the model on it; None: no validation")
        add("--val-every", type=whole, default=100, metavar="N",
            help="steps between evaluations; the last step has one too")
        add("--val-batches", type=whole, default=10, metavar="N", help="batches of --batch-size "
            "sequences in each evaluation, always the same; fewer if the data has fewer")
        add("--token-dtype", choices=("auto", "uint16", "uint32"), default="auto", help="type of "
            "the ids in .bin files; auto: uint16 if the vocabulary fits, otherwise uint32")
        add("--seq-len", type=whole, default=128, metavar="T", help="tokens in a sequence")
    add("--workers", type=at_least(0, most=1024), default=0, metavar="N",
        help="processes per rank that read ahead; 0: the training process reads")

    if model:
        add = parser.add_argument_group("model", "A preset; every dimension can be changed, by its "
                                        "name in Hugging Face's config.").add_argument
        add("--model", default=argparse.SUPPRESS, metavar="PRESET",
            help=f"{', '.join(PRESETS)} (default: tiny, without --init-from)")
        add("--init-from", type=_folder, metavar="FOLDER", help="start from the weights of a Llama "
            "or Mixtral of Hugging Face, in a folder with config.json, which gives the dimensions, "
            "and safetensors files; needs the package safetensors; None: start from weights drawn "
            "by --seed")
        for field in dataclasses.fields(ModelConfig):
            if field.name != "rope_scaling":  # presets and a config.json have it
                kind = float if field.type is float else int
                above = field.name != "num_experts"
                add(_flag(field.name), type=at_least(0, kind, above),
                    default=argparse.SUPPRESS, metavar="X" if kind is float else "N",
                    help=EXPERTS.get(field.name) or "overrides the preset; tiny has "
                    f"{getattr(PRESETS['tiny'], field.name)}")
        add("--balance-rate", type=number, default=0.0, metavar="X", help="with experts: how much "
            "each step changes the biases that balance their load; 0: not at all")

    add = parser.add_argument_group("device and arithmetic").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: CUDA if there is a GPU, otherwise the CPU")
    add("--backend", choices=("auto", "nccl", "gloo", "mpi"), default="auto", help="what carries "
        "the collectives; auto: NCCL on GPUs, gloo on CPUs; under gloo ranks may share a GPU")
    add("--timeout", type=whole, default=600, metavar="SECONDS",
        help="fail if a rank does not take part in a collective for this long")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float64"), default="auto", help="auto: "
        "bfloat16 on GPUs that have it, otherwise float32; bfloat16: hidden states and matrix "
        "products in bfloat16, and what is sent of them; weights, optimizer states, sums of "
        "gradients and the loss in float32; float64: to compare curves exactly")
    add("--compile", action="store_true", help="torch.compile each layer")
    add("--activation-checkpointing", action="store_true", help="keep only the input of each "
        "layer, and compute the layer again in the backward pass")

    add = parser.add_argument_group("run folder").add_argument
    add("--out", type=_folder, default=pathlib.Path("runs", pathlib.Path(sys.argv[0]).stem),
        metavar="FOLDER", help="run folder, for checkpoints and metrics.jsonl; with several "
        "machines, a folder that they share")
    add("--save-every", type=at_least(0), default=100, metavar="N",
        help="steps between checkpoints; the last step saves one too; 0: save none")
    add("--keep", type=whole, default=2, metavar="N",
        help="how many of the newest checkpoints to keep")
    add("--async-save", action="store_true", help="write checkpoints while training continues")
    add("--resume", action=argparse.BooleanOptionalAction, default=True, help="resume from the "
        "newest checkpoint in --out; --no-resume moves the earlier run aside and starts anew")
    add("--resume-from", type=whole, metavar="STEP", help="resume from the checkpoint of this step")
    add("--count", action=argparse.BooleanOptionalAction, default=True, help="count the bytes that "
        "one step holds and sends")
    add("--log-every", type=whole, default=10, metavar="N", help="steps between lines of "
        "metrics.jsonl; the first and the last step have a line too")
    add("--wandb", metavar="PROJECT", help="log into this project of Weights & Biases, offline if "
        "there is no API key; needs the package wandb")
    add("--tensorboard", action="store_true",
        help="log for TensorBoard, in --out; needs the package tensorboard")
    add("--profile", action="store_true",
        help="write a Chrome trace of a few steps to --out, for each rank")
    return parser


def parse_options(parser, argv=None):
    """Parse, and add what follows: ``param_dtype`` (the torch.dtype of weights and optimizer
    states), ``compute_dtype`` (of matrix products), ``betas`` and, with the options of
    common/model.py, ``config`` (ModelConfig). ``resume`` becomes what Checkpoints.resume takes.

    Raises:
        SettingError: an option is wrong.
    """
    args = parser.parse_args(argv)
    missing = "--{0} needs the package {0}: python -m pip install {0}"
    refuse([
        (args.profile and args.steps < 4,
         f"--profile with --steps {args.steps}: it traces from the fourth step, use at least 4"),
        (args.resume_from and not args.resume, f"--no-resume with --resume-from "
         f"{args.resume_from}: the one starts anew, the other does not; give one of them"),
        (args.wandb == "", "--wandb: it is empty: name a project"),
        (args.wandb and not _is_installed("wandb"), missing.format("wandb")),
        (args.tensorboard and not _is_installed("tensorboard"), missing.format("tensorboard")),
    ])
    if "init_from" in args:
        args.config = _model_config(args)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
        args.resume = True  # torchrun has restarted this process: from the newest checkpoint
    else:
        args.resume = args.resume and (args.resume_from or True)
    args.grad_clip = args.grad_clip or math.inf
    args.betas = args.beta1, args.beta2
    if args.dtype == "auto":
        args.dtype = default_dtype(pick_device(args.device, share=True))
    args.param_dtype = torch.float64 if args.dtype == "float64" else torch.float32
    args.compute_dtype = getattr(torch, args.dtype)
    return args


def _is_installed(package):
    """A mere folder wandb/, which W&B itself makes in the working folder, has no origin."""
    return bool(getattr(importlib.util.find_spec(package), "origin", None))


def default_dtype(device):
    """--dtype auto: bfloat16, if the hardware of ``device`` has it."""
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_it else "float32"


def _model_config(args):
    """The preset, with the dimensions that the command line changes; or the config of --init-from,
    which the command line may repeat and not change. Sets ``args.model``, a name for people."""
    chosen = getattr(args, "model", "tiny")
    refuse([(chosen not in PRESETS,
             f"--model {chosen}: no such preset, choose from {', '.join(PRESETS)}")])
    fields = [field.name for field in dataclasses.fields(ModelConfig)]
    given = {name: getattr(args, name) for name in fields if name in args}
    preset = vars(PRESETS[chosen])
    if args.init_from:
        there, out = os.path.realpath(args.init_from), os.path.realpath(args.out)
        if pathlib.Path(there).is_relative_to(out):  # a run moves and removes files in its folder
            raise SettingError(
                f"--init-from {args.init_from} lies in --out {args.out}: choose another --out"
            )
        config = read_config(args.init_from)
        for name, value in ((preset if "model" in args else {}) | given).items():
            if value != getattr(config, name):
                option = _flag(name) if name in given else f"--model {chosen} with {name}"
                raise SettingError(
                    f"{option} {value} contradicts --init-from {args.init_from}, whose config.json "
                    f"has {getattr(config, name)}: leave out the option, or change the file"
                )
        tied = ", its head trained apart from its embedding" * is_tied(args.init_from)
        # With a hash of the weights: each machine may have a folder of its own.
        args.model = f"of {args.init_from} ({fingerprint(args.init_from)}){tied}"
        return config
    args.model = chosen
    if {"hidden_size", "num_attention_heads"} & given.keys():
        given.setdefault("head_dim", None)  # follows from the two
    return ModelConfig(**preset | given)


def run_settings(args, dataset, config=None):
    """Two dicts. The settings that must stay the same when a run is resumed: those of the model
    (``config``, a dict; None: ``args.config``), and those that decide which samples a step reads.
    And the settings that may change, but change what is trained."""
    config = vars(args.config) if config is None else config
    # None for 0, the number of experts: earlier checkpoints do not have it.
    must = {_flag(name): value or None for name, value in config.items()}
    must |= {_flag(name): getattr(args, name) for name in MUST if name in args}
    may = {_flag(name): getattr(args, name) for name in MAY if name in args}
    if config.get("num_experts"):
        may["--balance-rate"] = args.balance_rate
    if getattr(args, "val_data", None):
        may |= fingerprint_of_data(open_datasets(args)[1], "--val-data")
    return must | fingerprint_of_data(dataset), may


def _flag(name):
    return f"--{name.replace('_', '-')}"
