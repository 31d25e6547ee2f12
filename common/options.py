"""The command line that all scripts share. The model, the data and each service add their own."""

import argparse
import math
import sys

import torch

from common.errors import refuse
from common.launch import pick_device, rank_and_world_size


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


def not_empty(text):
    """An argparse type for paths: an empty one would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file or a folder")
    return text


def backend(text):
    """An argparse type for what carries the collectives."""
    if text not in ("auto", "nccl", "gloo"):
        raise argparse.ArgumentTypeError(
            f"{text:.40} is not allowed: take auto, which is nccl on GPUs and gloo on CPUs; "
            f"PyTorch's wheels have no MPI"
        )
    return text


def flag(name):
    """The option of a name in the parsed options."""
    return f"--{name.replace('_', '-')}"


class _Ignored(argparse.Action):
    """An option that changes nothing."""

    def __call__(self, *_):
        pass


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints the docstring as it stands, and the default of every option."""


def option_parser(doc):
    """A parser with the options of training and device. A script adds its own to it, and so do the
    model, the data and each service.

    Functions in the list ``parser.checks`` get the parsed options, to refuse what cannot be, and to
    add what follows from them.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description=doc, formatter_class=_Help, allow_abbrev=False
    )
    parser.checks = []
    parser.error = lambda message: refuse([(True, message)])
    if rank_and_world_size()[0] != 0:
        parser.print_help = lambda: None  # rank 0 prints it

    _add_training(parser)
    _add_device(parser)
    return parser


def _add_training(parser):
    add = parser.add_argument_group("training").add_argument
    whole, number = at_least(1), at_least(0, float, most=sys.float_info.max)
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
    add("--workers", type=at_least(0, most=1024), default=0, metavar="N",
        help="processes per rank that read ahead; 0: the training process reads")


def _add_device(parser):
    add = parser.add_argument_group("device and arithmetic").add_argument
    # Some launchers add it. They also set the variable LOCAL_RANK, which says the same.
    add("--local-rank", "--local_rank", type=at_least(0), action=_Ignored, metavar="N",
        default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: CUDA if there is a GPU, otherwise the CPU")
    add("--backend", type=backend, default="auto", metavar="NAME", help="what carries the "
        "collectives; auto: nccl on GPUs, gloo on CPUs, and no others fit")
    add("--timeout", type=at_least(1), default=600, metavar="SECONDS",
        help="fail if a rank does not start, or take part in a collective, for this long")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float64"), default="auto", help="auto: "
        "bfloat16 on GPUs that have it, otherwise float32; bfloat16: hidden states and matrix "
        "products in bfloat16, and what is sent of them; weights, optimizer states, sums of "
        "gradients and the loss in float32; float64: to compare curves exactly")
    add("--deterministic", action="store_true", help="on GPUs: add up in a fixed order, so that "
        "the same run on the same GPUs repeats bit for bit; slower")
    add("--compile", action="store_true", help="torch.compile each layer, and the loss")
    add("--activation-checkpointing", nargs="?", choices=("full", "selective"), const="full",
        help="full: keep only the input of each layer, and compute the layer again in the backward "
        "pass; selective: also keep the outputs of matrix products and attention, and compute only "
        "the rest again; without a value: full")


def parse_options(parser, argv=None):
    """Parse the options, and add what follows from them: ``param_dtype`` (the torch.dtype of
    weights and optimizer states), ``compute_dtype`` (of matrix products), ``bfloat16`` (whether
    that is bfloat16), ``betas``, ``max_norm`` (of gradients; infinite: no clipping) and
    ``on_all_ranks`` (a dict: what must be the same on all ranks).

    Raises:
        SettingError: an option is wrong.
    """
    args = parser.parse_args(argv)
    refuse([(args.min_lr > args.lr, f"--min-lr {args.min_lr} is above --lr {args.lr}: the rate "
             f"falls from --lr to --min-lr; give a smaller --min-lr")])
    args.on_all_ranks = {flag(name): value for name, value in vars(args).items()}
    for check in parser.checks:
        check(args)
    dtype = args.dtype
    if dtype == "auto":
        dtype = default_dtype(pick_device(args.device))
    args.param_dtype = torch.float64 if dtype == "float64" else torch.float32
    args.compute_dtype = getattr(torch, dtype)
    args.bfloat16 = dtype == "bfloat16"
    args.betas = args.beta1, args.beta2
    args.max_norm = args.grad_clip or math.inf
    return args


def default_dtype(device):
    """--dtype auto: bfloat16, if the hardware of ``device`` has it."""
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_it else "float32"
