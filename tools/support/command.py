"""The command line of the tools. This file does not import torch, which would take seconds."""

import argparse
import importlib
import pathlib
import sys

from common.errors import SettingError, printable


def make_parser(name, doc):
    """An argparse parser for ``python -m tools.NAME``. A wrong option raises SettingError."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.{name}", description=doc, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = refuse
    return parser


def refuse(message):
    raise SettingError(message)


def need(module):
    """Import a module of a package that only one tool needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        refuse(f"this tool needs the package {package}, which cannot be imported ({error}): "
               f"python -m pip install {package}")


def run(main, argv=None):
    """Run ``main(argv)``. A SettingError, an OSError or Ctrl-C becomes one line on stderr and
    status 1."""
    try:
        main(argv)
    except (SettingError, OSError, KeyboardInterrupt) as error:
        name = pathlib.Path(main.__code__.co_filename).name
        words = "stopped" if isinstance(error, KeyboardInterrupt) else str(error)
        sys.exit(f"{name}: error: {printable(words)}")
