"""Print the table "Which one" of README.md: what each script splits, holds, sends and adds.

    python -m tools.table

Bytes are from docs/data/8b.json (python -m tools.pictures --measure 8b), lines from the scripts.
"""

import ast
import difflib
import json
import pathlib

from tools.command import make_parser, run
from tools.plan import gb

ROOT = pathlib.Path(__file__).parent.parent

SPLIT = {
    "single.py": "nothing",
    "ddp.py": "the batch",
    "zero.py": "the batch, gradients and optimizer states",
    "zero.py --stage 1": "the batch and the optimizer states",
    "zero.py --stage 2": "the batch, the optimizer states and the gradients",
    "fsdp.py": "the batch, the optimizer states, the gradients and the parameters",
    "fsdp.py --no-reshard-after-forward": "the same, but in a step all parameters stay gathered",
    "tp.py": "the matrices of each layer, the vocabulary, and activations by position",
    "cp.py": "every sequence",
    "pp.py": "the layers, into stages",
    "hybrid_3d.py": "all that fsdp.py splits, and matrices; `--cp`: sequences; `--pp`: layers",
}
USE = {
    "single.py": "the model fits on one GPU; the reference for all other scripts",
    "ddp.py": "everything fits on each GPU",
    "zero.py --stage 1": "the optimizer states do not fit on each GPU",
    "zero.py --stage 2": "with `--grad-accum` the whole gradients do not fit either",
    "fsdp.py": "the parameters do not fit on each GPU",
    "fsdp.py --no-reshard-after-forward": "all parameters fit in bfloat16, the rest does not",
    "tp.py": "one layer is too large; within one machine",
    "cp.py": "the activations of one sequence do not fit on a GPU",
    "pp.py": "links between machines are slow",
    "hybrid_3d.py": "hundreds of GPUs; one strategy alone has reached its limit",
}


def main_lines(script):
    """The source lines of ``main``."""
    source = (ROOT / script).read_text()
    (main,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == "main"]
    return source.splitlines()[main.lineno - 1:main.end_lineno]


def added(before, after):
    """How many lines ``after`` adds to ``before``, both lists; blank lines do not count."""
    difference = difflib.ndiff(before, after)
    return sum(line.startswith("+ ") and bool(line[2:].strip()) for line in difference)


def rows():
    """The lines of the table, in Markdown."""
    yield (
        "| script | what is split | GB on a GPU: parameters, gradients, optimizer states | GB on a "
        "GPU: everything, at the peak | GB that a GPU sends in a step | when to use it | lines "
        "that it adds to single.py's `main` |"
    )
    yield "|---|---|---|---|---|---|---|"
    counted = json.loads((ROOT / "docs" / "data" / "8b.json").read_text())
    for command, row in counted.items():
        script, _, options = command.partition(" ")
        strategy = command if command in USE else script
        held = sum(row["held"][kind] for kind in ("parameters", "gradients", "optimizer states"))
        cells = [
            f'<img src="docs/pictures/{script.removesuffix(".py")}.svg" alt=""><br>'
            f"[`{script}`]({script})" + f"<br>`{options}`" * bool(options),
            SPLIT[strategy], gb(held), gb(row["peak"]["in all"]), gb(row["sent"]), USE[strategy],
            str(added(main_lines("single.py"), main_lines(script))),
        ]
        yield f"| {' | '.join(cells)} |"


def main(argv=None):
    make_parser("table", __doc__).parse_args(argv)
    print("\n".join(rows()))


if __name__ == "__main__":
    run(main)
