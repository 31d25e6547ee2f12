"""The command line that all scripts share."""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import sys

import torch

from common.data import STANDARD_LIBRARY
from common.environment import rank_and_world_size
from common.errors import SettingError
from common.huggingface import fingerprint, is_tied, read_config
from common.model import PRESETS, ModelConfig, check_rope_scaling


# When a run is resumed
MUST = "seed", "batch_size", "seq_len"
MAY = (
    "steps", "lr", "min_lr", "warmup_steps", "weight_decay", "beta1", "beta2", "grad_clip", "dtype",
)


def at_least(minimum, kind=int, above=False, most=2**31 - 1):
    """An argparse type: a finite number >= ``minimum``, or > ``minimum`` with ``above``, and for
    whole numbers <= ``most``."""
    allowed = f"{'greater than' if above else 'at least'} {minimum}"

    def parse(text):
        value = kind(text)
        if kind is int and value > most:
            raise argparse.ArgumentTypeError(
                f"{text:.40} is not allowed: it must be at most {most}"
            )
        if not math.isfinite(value) or value < minimum or (above and value == minimum):
            raise argparse.ArgumentTypeError(f"{text} is not allowed: it must be {allowed}")
        return value

    parse.__name__ = {int: "whole number", float: "number"}[kind]  # for argparse's own message
    return parse


def _folder(text):
    """An argparse type: a path, but not an empty one, which would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a folder")
    return pathlib.Path(text)


def _path(text):
    """An argparse type: text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file or a folder")
    return text


def _json(text):
    """An argparse type: JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(f"{text:.80} is no JSON") from None


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints the docstring as it stands, and the default of every option that takes a value."""

    def _get_help_string(self, action):
        return action.help if action.nargs == 0 else super()._get_help_string(action)


def argument_parser(doc, model=True, text=True):
    """A parser with the options of every script; a script adds its own options to it.

    ``model=False`` leaves out the options of the Llama of common/model.py, ``text=False`` those of
    the text that it is trained on: for a script with a model, or data, of its own.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description=doc, formatter_class=_Help, allow_abbrev=False
    )
    parser.error = _refuse
    if rank_and_world_size()[0] != 0:
        parser.print_help = lambda: None  # rank 0 prints it

    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=at_least(1), default=200, metavar="N",
                       help="optimizer steps in the whole run; the cosine decay ends there")
    group.add_argument("--batch-size", type=at_least(1, most=2**24), default=16, metavar="B",
                       help="sequences in the global batch, over all ranks and micro-batches")
    group.add_argument("--grad-accum", type=at_least(1), default=1, metavar="N",
                       help="gradient-accumulation steps: micro-batches into which each rank cuts "
                       "its share of the batch")
    group.add_argument("--lr", type=at_least(0, float), default=2e-3, metavar="LR",
                       help="peak learning rate")
    group.add_argument("--min-lr", type=at_least(0, float), default=0.0, metavar="LR",
                       help="learning rate at the end of the cosine decay")
    group.add_argument("--warmup-steps", type=at_least(0), default=10, metavar="N",
                       help="steps of linear warm-up to --lr")
    group.add_argument("--weight-decay", type=at_least(0, float), default=0.1, metavar="X",
                       help="weight decay of AdamW, for matrices; norms have none")
    group.add_argument("--beta1", type=at_least(0, float), default=0.9, metavar="X",
                       help="first beta of AdamW")
    group.add_argument("--beta2", type=at_least(0, float), default=0.95, metavar="X",
                       help="second beta of AdamW")
    group.add_argument("--grad-clip", type=at_least(0, float), default=1.0, metavar="NORM",
                       help="gradients with a larger global norm are scaled down to this norm; "
                       "0: no clipping")
    group.add_argument("--seed", type=at_least(0), default=0, metavar="N",
                       help="seed of the initial weights and of the order of the data")

    group = parser.add_argument_group("data")
    if text:
        _add_text_options(group)
    group.add_argument("--workers", type=at_least(0, most=1024), default=0, metavar="N",
                       help="processes per rank that read ahead; 0: the training process reads")

    if model:
        _add_model_options(parser)

    group = parser.add_argument_group("device and arithmetic")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                       help="auto: CUDA if there is a GPU, otherwise the CPU")
    group.add_argument("--backend", choices=("auto", "nccl", "gloo", "mpi"), default="auto",
                       help="what carries the collectives; auto: NCCL on GPUs, gloo on CPUs; under "
                       "gloo several ranks may share a GPU; mpi needs a torch that is built with "
                       "it, and RANK and WORLD_SIZE as MPI numbers them")
    group.add_argument("--timeout", type=at_least(1), default=600, metavar="SECONDS",
                       help="fail if a rank does not take part in a collective for this long")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32",
                       help="float32: without TF32; bfloat16: matrix products in bfloat16 (in "
                       "fsdp.py and hybrid_3d.py hidden states too), weights and optimizer states "
                       "in float32; float64: to compare curves exactly")
    group.add_argument("--compile", action="store_true", help="torch.compile each layer")
    group.add_argument("--activation-checkpointing", action="store_true",
                       help="keep only the input of each layer, and compute the layer again in the "
                       "backward pass")

    group = parser.add_argument_group("run folder")
    script = pathlib.Path(sys.argv[0]).stem
    group.add_argument("--out", type=_folder, default=pathlib.Path("runs", script),
                       metavar="FOLDER", help="run folder, for checkpoints and metrics.jsonl; with "
                       "several machines, a folder that they share")
    group.add_argument("--save-every", type=at_least(0), default=100, metavar="N",
                       help="steps between checkpoints; the last step saves one too; 0: save none")
    group.add_argument("--keep", type=at_least(1), default=2, metavar="N",
                       help="how many of the newest checkpoints to keep")
    group.add_argument("--async-save", action="store_true",
                       help="write checkpoints in the background, while training continues")
    group.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True,
                       help="resume from the newest checkpoint in --out; --no-resume moves the "
                       "earlier run of the folder aside and starts anew")
    group.add_argument("--resume-from", type=at_least(1), metavar="STEP",
                       help="resume from the checkpoint of this step; the newer ones move aside")
    group.add_argument("--check-replicas", type=at_least(0), default=0, metavar="N",
                       help="every N steps compare what ranks hold in common, and end if it "
                       "differs; 0: never")
    group.add_argument("--log-every", type=at_least(1), default=10, metavar="N",
                       help="steps between lines of metrics.jsonl; the first step, the last step "
                       "and each saved step have a line too")
    group.add_argument("--wandb", metavar="PROJECT",
                       help="log the lines of metrics.jsonl into this project of Weights & Biases, "
                       "offline if there is no API key; needs the package wandb")
    group.add_argument("--tensorboard", action="store_true",
                       help="log the lines of metrics.jsonl for TensorBoard, in --out; needs the "
                       "package tensorboard")
    group.add_argument("--peak-tflops", type=at_least(0, float, above=True), metavar="X",
                       help="what one device can compute in bfloat16, in 10^12 operations per "
                       "second, for the model FLOPs utilisation (MFU); None: by the GPU's name")
    group.add_argument("--profile", action="store_true",
                       help="write a Chrome trace of a few steps to --out, for each rank")
    return parser


def _add_text_options(group):
    group.add_argument("--data", default=STANDARD_LIBRARY, metavar="PATH",
                       help="a .bin file of token ids, a text file, or a folder of either; text is "
                       f"read as bytes; '{STANDARD_LIBRARY}': the source text of Python's standard "
                       "library")
    group.add_argument("--val-data", type=_path, metavar="PATH",
                       help="held-out data, of the kinds that --data takes: evaluate the model on "
                       "it; None: no validation")
    group.add_argument("--val-every", type=at_least(1), default=100, metavar="N",
                       help="with --val-data: steps between evaluations; the last step has one too")
    group.add_argument("--val-batches", type=at_least(1), default=10, metavar="N",
                       help="with --val-data: batches of --batch-size sequences in each "
                       "evaluation, always the same ones; fewer if the data has fewer")
    group.add_argument("--token-dtype", choices=("auto", "uint16", "uint32"), default="auto",
                       help="type of the ids in .bin files; auto: uint16 if the vocabulary fits, "
                       "otherwise uint32")
    group.add_argument("--seq-len", type=at_least(1), default=128, metavar="T",
                       help="tokens in a sequence")


def _add_model_options(parser):
    group = parser.add_argument_group(
        "model", "A preset; every dimension can be changed, by its name in Hugging Face's config."
    )
    group.add_argument("--model", default=argparse.SUPPRESS, metavar="PRESET",
                       help=f"{', '.join(PRESETS)} (default: tiny, without --init-from)")
    group.add_argument("--init-from", type=_folder, metavar="FOLDER",
                       help="start from the weights of a Llama of Hugging Face, in a folder with "
                       "config.json, which gives the dimensions, and safetensors files; needs the "
                       "package safetensors; None: start from weights drawn by --seed")
    group.add_argument("--rope-scaling", type=_json, default=argparse.SUPPRESS, metavar="JSON",
                       help="the scaled rotary angles of Llama 3.1, as its config.json has them; "
                       "overrides the preset; null: none are scaled")
    for field in dataclasses.fields(ModelConfig):
        if field.name == "rope_scaling":
            continue
        kind = float if field.type is float else int
        most = 10**4 if field.name == "num_hidden_layers" else 2**31 - 1
        group.add_argument(_flag(field.name), type=at_least(0, kind, above=True, most=most),
                           default=argparse.SUPPRESS, metavar="X" if kind is float else "N",
                           help="overrides the preset; tiny has "
                           f"{getattr(PRESETS['tiny'], field.name)}")


def parse_arguments(parser, argv=None):
    """Parse, and add what follows from the arguments: ``param_dtype`` (the torch.dtype of weights
    and optimizer states), ``compute_dtype`` (of matrix products) and, with the options of the
    Llama, ``config`` (ModelConfig).

    Raises:
        SettingError: an argument is wrong.
    """
    args = parser.parse_args(argv)
    if "init_from" in args:
        args.config = _model_config(args)
    for name in ("beta1", "beta2"):
        if getattr(args, name) >= 1:
            _refuse(f"--{name} {getattr(args, name)} is not allowed: it must be less than 1")
    if args.profile and args.steps < 4:
        _refuse(f"--profile with --steps {args.steps}: it traces from the fourth step, use at "
                f"least 4")
    if not int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
        args.resume = args.resume and (args.resume_from or True)
    else:  # torchrun has restarted this process: resume from the newest checkpoint
        args.resume = True
    args.grad_clip = args.grad_clip or math.inf
    args.param_dtype = torch.float64 if args.dtype == "float64" else torch.float32
    args.compute_dtype = getattr(torch, args.dtype)
    return args


def _model_config(args):
    """The preset, with the dimensions that the command line changes; or the config of --init-from,
    which the command line may repeat and not change. Sets ``args.model`` if it was not given."""
    preset = getattr(args, "model", "tiny")
    if preset not in PRESETS:
        _refuse(f"--model {preset}: no such preset, choose from {', '.join(PRESETS)}")
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if args.init_from:
        config = read_config(args.init_from)
        if "rope_scaling" in given:
            given["rope_scaling"] = check_rope_scaling(given["rope_scaling"])
        asked = vars(PRESETS[preset]) | given if "model" in args else given
        for name, value in asked.items():
            if (there := getattr(config, name)) != value:
                option = _flag(name) if name in given else f"--model {preset} with {name}"
                _refuse(
                    f"{option} {value} contradicts --init-from {args.init_from}, whose config.json "
                    f"has {there}: leave out the option, or change the file"
                )
        tied = ", its head trained apart from its embedding" * is_tied(args.init_from)
        args.model = f"of {args.init_from}{tied}"
        return config
    args.model = preset
    if "head_dim" not in given and {"hidden_size", "num_attention_heads"} & given.keys():
        given["head_dim"] = None  # follows from the two
    return ModelConfig(**vars(PRESETS[preset]) | given)


def all_options(args):
    """All options and their values, as a dict, without what ``parse_arguments`` has added. With
    --init-from also a hash of the files there: each machine may have a folder of its own."""
    added = ("config", "param_dtype", "compute_dtype", "resume")
    options = {_flag(name): value for name, value in vars(args).items() if name not in added}
    if getattr(args, "init_from", None):
        options["the hash of some weights in --init-from"] = fingerprint(args.init_from)
    return options


def run_settings(args, config, data):
    """Two dicts. The settings that must stay the same when a run is resumed: ``config``, a dict of
    the model's, ``data``, a dict that tells one dataset from another, and what orders the data.
    With these the step number is the state of the data. And the settings that may change, but
    change what is trained."""
    must = {_flag(name): value for name, value in config.items()}
    must |= {_flag(name): getattr(args, name) for name in MUST if name in args} | data
    return must, {_flag(name): getattr(args, name) for name in MAY if name in args}


def _flag(name):
    return f"--{name.replace('_', '-')}"


def describe(args, model):
    """One line on what is trained. ``model`` is whole: unsharded, sharded or on the meta device."""
    name = args.model if "model" in args else type(model).__name__.removeprefix("FSDP")
    parameters = sum(p.numel() for p in model.parameters())
    return f"model {name}: {parameters:,} parameters, {args.dtype}"


def _refuse(message):
    raise SettingError(message)
