"""Writes docs/bugs.md and the pictures. It first runs the bugs that are named, and writes their loss
curves into docs/data/bugs.json. (What parity says of them tests/test_bugs.py tells.)

    python -m tests.bugs tests/bugs/02-*.diff
"""

import json
import pathlib
import sys
import tempfile

from docs import draw
from tests import bugs
from tests.conftest import corpus_text
from tests.support.processes import ProcessServer
from tools.parity.compare import read

CURVE = "--steps 50 --lr 0.003"


def losses(lines):
    """The loss of the global batch in each step, as the ranks have recorded it."""
    for line in lines:
        own = [sum(rank["losses"]) for rank in line["ranks"] if rank["losses"]]
        yield round(sum(own) / (len(own) if line["loss"] == "mean" else 1), 4)


def run(names):
    with tempfile.TemporaryDirectory() as folder, ProcessServer() as server:
        data = pathlib.Path(folder, "corpus.txt")
        data.write_text(corpus_text())
        for ranks in 0, bugs.RANKS:
            server.run("tests/support/parity_runs.py", ranks, [
                *names, *CURVE.split(), "--data", data], folder=folder, inject="ignored()")
        found = {path.stem: [*losses(read(path))]
                 for path in pathlib.Path(folder).glob("out/*.parity")}
    curves = {run["name"]: run for run in draw.read("bugs")}
    for bug in bugs.read(names):
        alone, *_, spoiled = bug.runs
        curves[bug.name] = {"name": bug.name, "sound": found[alone], "loss": found[spoiled]}
    rows = [curves[bug.name] for bug in bugs.read()]
    (draw.DATA / "bugs.json").write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    if named := [pathlib.Path(argument).stem for argument in sys.argv[1:]]:
        run(named)
    bugs.PAGE.write_text(bugs.page(bugs.read()))
    draw.draw()
