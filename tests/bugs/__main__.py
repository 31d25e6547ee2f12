"""Writes docs/bugs.md and the pictures. It first runs the bugs that are named, and writes what
parity says of them into their patches, and their loss curves into docs/data/bugs.json:

    python -m tests.bugs tests/bugs/02-*.diff
"""

import json
import pathlib
import re
import sys
import tempfile

from docs import draw
from tests import bugs
from tests.conftest import corpus_text
from tests.support.processes import ProcessServer
from tools.parity.compare import compare, read

CURVE = "--steps 50 --lr 0.003"


def record(server, names, options):
    """{name: recorded lines} of all runs of some bugs."""
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder, "corpus.txt")
        data.write_text(corpus_text())
        for ranks in 0, bugs.RANKS:
            server.run("tests/support/parity_runs.py", ranks, [
                *names, *options.split(), "--data", data], folder=folder, inject="ignored()")
        return {path.stem: read(path) for path in pathlib.Path(folder).glob("out/*.parity")}


def losses(lines):
    """The loss of the global batch in each step, as the ranks have recorded it."""
    for line in lines:
        own = [sum(rank["losses"]) for rank in line["ranks"] if rank["losses"]]
        yield round(sum(own) / (len(own) if line["loss"] == "mean" else 1), 4)


def run(names):
    with ProcessServer() as server:
        few, long = (record(server, names, options) for options in (bugs.FEW, CURVE))
    curves = {run["name"]: run for run in draw.read("bugs")}
    for bug in bugs.read(names):
        path, (alone, *_) = bugs.FOLDER / f"{bug.name}.diff", bug.files
        says = f"Parity: {compare(few[alone], few[bug.name])}"
        path.write_text(re.sub("(?m)^Parity: .*", lambda _: says, path.read_text()))
        curves[bug.name] = {"name": bug.name, "sound": [*losses(long[alone])],
                            "loss": [*losses(long[bug.name])]}
    rows = [curves[bug.name] for bug in bugs.read()]
    (draw.DATA / "bugs.json").write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    if named := [pathlib.Path(argument).stem for argument in sys.argv[1:]]:
        run(named)
    bugs.PAGE.write_text(bugs.page(bugs.read()))
    draw.draw()
