"""The command line that all scripts share."""

import argparse
import dataclasses
import math
import pathlib
import sys

import torch

from common.data import STANDARD_LIBRARY
from common.environment import rank_and_world_size
from common.errors import SettingError
from common.model import PRESETS, ModelConfig


def at_least(minimum, kind=int, above=False):
    """An argparse type: a finite number >= ``minimum``, or > it with ``above``."""

    def parse(text):
        value = kind(text)
        if not math.isfinite(value) or value < minimum or (above and value == minimum):
            raise argparse.ArgumentTypeError(
                f"{text} is not allowed: it must be {'greater than' if above else 'at least'} {minimum}"
            )
        return value

    parse.__name__ = {int: "whole number", float: "number"}[kind]  # for argparse's own message
    return parse


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands; a default behind every option that takes a value."""

    def _get_help_string(self, action):
        return action.help if action.nargs == 0 else super()._get_help_string(action)


def argument_parser(doc):
    """The options of every script; a script adds its own to what this returns."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description=doc, formatter_class=_Help, allow_abbrev=False
    )
    parser.error = _refuse
    if rank_and_world_size()[0] != 0:
        parser.print_help = lambda: None  # once is enough

    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=at_least(1), default=200, metavar="N", help="optimizer steps in all; the cosine decay ends there")
    group.add_argument("--batch-size", type=at_least(1), default=16, metavar="G",
                       help="sequences in the global batch, over all ranks and micro-batches")
    group.add_argument("--grad-accum", type=at_least(1), default=1, metavar="N",
                       help="micro-batches that a rank makes of its share of the batch")
    group.add_argument("--seq-len", type=at_least(1), default=128, metavar="T",
                       help="tokens in a sequence")
    group.add_argument("--lr", type=at_least(0, float), default=2e-3, metavar="LR",
                       help="peak learning rate")
    group.add_argument("--min-lr", type=at_least(0, float), default=0.0, metavar="LR",
                       help="learning rate at the end of the cosine decay")
    group.add_argument("--warmup-steps", type=at_least(0), default=10, metavar="N",
                       help="steps of linear warm-up to --lr")
    group.add_argument("--weight-decay", type=at_least(0, float), default=0.1, metavar="X",
                       help="AdamW's, on matrices; never on norms")
    group.add_argument("--beta1", type=at_least(0, float), default=0.9, metavar="X",
                       help="AdamW's first beta")
    group.add_argument("--beta2", type=at_least(0, float), default=0.95, metavar="X",
                       help="AdamW's second beta")
    group.add_argument("--grad-clip", type=at_least(0, float), default=1.0, metavar="NORM",
                       help="largest global norm of the gradients, larger ones are scaled to it; 0: any")
    group.add_argument("--seed", type=at_least(0), default=0, metavar="N",
                       help="of the weights and the data's order")

    group = parser.add_argument_group("data")
    group.add_argument("--data", default=STANDARD_LIBRARY, metavar="PATH",
                       help="a .bin file of token ids, a text file, or a folder of either; text is "
                       f"read as bytes; '{STANDARD_LIBRARY}': the source of Python's standard library")
    group.add_argument("--token-dtype", choices=("auto", "uint16", "uint32"), default="auto",
                       help="of a .bin file; auto: uint16 if the vocabulary fits, else uint32")
    group.add_argument("--workers", type=at_least(0), default=0, metavar="N",
                       help="processes that read data ahead, per rank")

    group = parser.add_argument_group(
        "model", "A preset; each dimension may be overridden under Hugging Face's name for it."
    )
    group.add_argument("--model", default="tiny", metavar="PRESET", help=", ".join(PRESETS))
    for field in dataclasses.fields(ModelConfig):
        kind = float if field.type is float else int
        group.add_argument("--" + field.name.replace("_", "-"), type=at_least(0, kind, above=True),
                           default=argparse.SUPPRESS, metavar="X" if kind is float else "N",
                           help=f"{getattr(PRESETS['tiny'], field.name)} in tiny")

    group = parser.add_argument_group("device and arithmetic")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                       help="auto: CUDA if there is a GPU")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32",
                       help="float32: without TF32; bfloat16: matrix products in it, weights and optimizer in float32; "
                       "float64: for proofs")
    group.add_argument("--compile", action="store_true", help="torch.compile, per layer")
    group.add_argument("--activation-checkpointing", action="store_true",
                       help="keep each layer's input only and recompute the rest in the backward pass")

    group = parser.add_argument_group("run folder")
    script = pathlib.Path(sys.argv[0]).stem
    group.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs", script), metavar="FOLDER",
                       help="for checkpoints and metrics.jsonl; with several machines, one they share")
    group.add_argument("--save-every", type=at_least(0), default=100, metavar="N",
                       help="steps between checkpoints, one more at the end; 0: none at all")
    group.add_argument("--keep", type=at_least(1), default=2, metavar="N",
                       help="newest checkpoints to keep")
    group.add_argument("--async-save", action="store_true", help="write checkpoints while training goes on")
    group.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True,
                       help="go on from the newest checkpoint in --out; --no-resume moves what "
                       "is there aside and starts anew")
    group.add_argument("--log-every", type=at_least(1), default=10, metavar="N",
                       help="steps between lines of metrics.jsonl; the first, the last and the saved steps have one too")
    group.add_argument("--profile", action="store_true",
                       help="write a chrome trace of a few steps to --out, per rank")
    return parser


def parse_arguments(parser, argv=None):
    """Parse, and add what follows from the arguments: ``config`` (ModelConfig), ``param_dtype``
    (of weights and optimizer states) and ``script`` (the name of the script).

    Raises:
        SettingError: an argument is wrong.
    """
    args = parser.parse_args(argv)
    if args.model not in PRESETS:
        _refuse(f"--model {args.model}: no such preset, choose from {', '.join(PRESETS)}")
    preset = dataclasses.asdict(PRESETS[args.model])
    given = {name: getattr(args, name) for name in preset if hasattr(args, name)}
    if "head_dim" not in given and {"hidden_size", "num_attention_heads"} & given.keys():
        given["head_dim"] = None  # follows from the two
    args.config = ModelConfig(**preset | given)
    if args.token_dtype == "auto":
        args.token_dtype = "uint16" if args.config.vocab_size <= 2**16 else "uint32"
    for name in ("beta1", "beta2"):
        if getattr(args, name) >= 1:
            _refuse(f"--{name} {getattr(args, name)} is not allowed: it must be less than 1")
    if args.profile and args.steps < 4:
        _refuse(f"--profile with --steps {args.steps}: it traces the fourth step on, use at least 4")
    args.grad_clip = args.grad_clip or math.inf
    args.param_dtype = torch.float64 if args.dtype == "float64" else torch.float32
    args.script = parser.prog
    return args


def _refuse(message):
    raise SettingError(message)
