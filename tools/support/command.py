"""The command line of the tools. This file does not import torch, which would take seconds."""

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import pathlib
import pkgutil
import sys

from common.errors import SettingError, printable
from common.files import read_text
from common.services.new_files import new_file

ROOT = pathlib.Path(__file__).parent.parent.parent


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


def find(script):
    """The path of a script, which may be one of this repository, from another folder."""
    path = pathlib.Path(script)
    return path if path.exists() else ROOT / script


def package_of(script):
    """The name of the copy of common/ beside a script from which it imports ``launch``; None: there
    is none."""
    path = find(script)
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        for node in ast.walk(ast.parse(path.read_text())):
            package, _, last = (getattr(node, "module", None) or "").rpartition(".")
            folder = path.parent.joinpath(*package.split("."))
            if last == "launch" and package and (folder / "launch.py").exists():
                return package


def forget_modules():
    """Let the next import of a module of this repository import it again, or another one of that
    name."""
    own = {path.stem for path in ROOT.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]


def load(script, needed):
    """Import a script by its path. ``needed``: names that it must have.

    Raises:
        SettingError: it cannot be imported, or lacks a name.
    """
    path = find(script)
    if path.suffix != ".py" or not path.is_file():
        raise SettingError(f"{script} is no script: give the path of a .py file, such as fsdp.py")
    beside, rest = path.parent.resolve(), [entry for entry in sys.path if entry != str(ROOT)]
    another = (any((beside / name).exists() for name in ("common", "common.py"))
               and not (beside / "common" / "launch.py").exists())  # which ours would hide
    sys.path[:] = [str(beside), *([] if another else [str(ROOT)]), *rest]
    if "tools" in sys.modules:  # the script may import from a tools/ beside it
        sys.modules["tools"].__path__ = pkgutil.extend_path([], "tools")
    spec = importlib.util.spec_from_file_location("script_" + path.stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        if another and str(getattr(error, "name", "")).partition(".")[0] == "common":
            raise SettingError(
                f"{script} imports {error.name} of this project, and what is beside it by the name "
                f"of common is another one: copy common/ under another name (docs/copying.md has "
                f"the command)"
            ) from None
        raise SettingError(
            f"{script} cannot be imported: {type(error).__name__}: {error}"
        ) from None
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        raise SettingError(
            f"{script} has no {', '.join(missing)}: this tool needs a script like fsdp.py, whose "
            f"main(argv) takes these from common/"
        )
    return module


def check_json(path, tool):
    """Raise SettingError if something is at ``path``, which the user has named, that ``tool`` has
    not written. Call it before the work."""
    try:
        own = not os.path.lexists(path) or json.loads(read_text(path))["written by"] == tool
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        own = False
    if not own:
        refuse(f"{path} exists, and {tool} has not written it: give another name")


def write_json(path, tool, content):
    """Write a dict to ``path``, for which ``check_json`` was called."""
    with new_file(path, "w") as file:
        json.dump({"written by": tool, **content}, file, indent=1)
        file.write("\n")


def run(main, argv=None):
    """Run ``main(argv)``. A SettingError, an OSError or Ctrl-C becomes one line on stderr and
    status 1."""
    try:
        if "" in (sys.argv[1:] if argv is None else argv):
            refuse("an argument is empty: a path would then be the working folder")
        main(argv)
    except (SettingError, OSError, KeyboardInterrupt) as error:
        name = pathlib.Path(main.__code__.co_filename).name
        words = "stopped" if isinstance(error, KeyboardInterrupt) else str(error)
        sys.exit(f"{name}: error: {printable(words)}")
