"""The options of the model: a preset or a config.json, and each of its dimensions."""

import argparse
import dataclasses
import os

from common.errors import refuse
from common.model import PRESETS, ModelConfig
from common.options import at_least, flag


def add_model_options(parser, config_class=ModelConfig):
    """Add the options of our model to a parser of common/options.py. The parsed options then have
    ``config``, a ``config_class``."""
    add = parser.add_argument_group("model", "A preset or a Hugging Face config.json; every "
                                    "dimension can be changed, by its name there.").add_argument
    add("--model", default="tiny", metavar="NAME",
        help=f"{', '.join(PRESETS)}, or the path of the config.json of a Llama, or its folder")
    for field in dataclasses.fields(config_class):
        if field.name == "rope_scaling":
            continue  # only a preset or a config.json has it
        kind = float if field.type is float else int
        add(flag(field.name), type=at_least(0, kind, above=field.name != "num_experts"),
            default=argparse.SUPPRESS, metavar="X" if kind is float else "N",
            help=field.metadata.get("help") or "overrides the preset; tiny has "
            f"{getattr(PRESETS['tiny'], field.name)}")

    def set_config(args):
        args.config = model_config(args, config_class)
        args.on_all_ranks |= {flag(name): value for name, value in vars(args.config).items()}

    parser.checks.append(set_config)


def model_config(args, config_class):
    """The preset or the config.json, with the dimensions that the command line changes.

    Raises:
        SettingError: there is no such preset or file, or the dimensions do not fit each other.
    """
    if args.model in PRESETS:
        config = PRESETS[args.model]
    else:
        refuse([(not os.path.exists(args.model),
                 f"--model {args.model}: no such preset or file: choose from "
                 f"{', '.join(PRESETS)}, or give a config.json or its folder")])
        try:
            from common.services.hf_config import read_config  # a service, needed only here
        except ImportError:
            refuse([(True, f"--model {args.model}: common/services/hf_config.py, which reads a "
                     f"config.json, is not here")])
        config = read_config(args.model, getattr(args, "seq_len", 0))
    names = {field.name for field in dataclasses.fields(config_class)}
    refuse([(vars(config).keys() - names,
             f"--model {args.model} is a mixture of experts: ep.py and hybrid_3d.py train these")])
    given = {name: getattr(args, name) for name in names if name in args}
    if {"hidden_size", "num_attention_heads"} & given.keys():
        given.setdefault("head_dim", None)  # follows from the two
    return config_class(**vars(config) | given)
