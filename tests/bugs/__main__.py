"""Runs all bugs, and writes what parity says into the patches, their loss curves into
docs/data/bugs.json, and both into docs/bugs.md and its pictures: python -m tests.bugs. With names,
such as 02-own-token-count, it runs these alone. With --page it runs nothing, and writes the page
and the pictures again."""

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


def record(server, folder, ranks, jobs):
    """{name: its lines} of jobs of tests/support/parity_runs.py."""
    folder.mkdir()
    (folder / "corpus.txt").write_text(corpus_text())
    (folder / "jobs.json").write_text(json.dumps(jobs))
    server.run(f"tests/support/parity_runs.py {folder}/jobs.json --data {folder}/corpus.txt", ranks,
               folder=folder, inject="ignored()")
    return {path.stem: read(path) for path in folder.glob("out/*.parity")}


def loss_of(line):
    """The loss of the global batch, as the ranks have recorded it."""
    losses = [sum(rank["losses"]) for rank in line["ranks"] if rank["losses"]]
    return sum(losses) / (len(losses) if line["loss"] == "mean" else 1)


def run(found):
    with tempfile.TemporaryDirectory() as folder, ProcessServer() as server:
        recorded = []
        for options in bugs.FEW, CURVE:
            alone, _, spoiled = bugs.jobs(found, options)
            for ranks, jobs in (0, alone), (bugs.RANKS, spoiled):
                own = pathlib.Path(folder, str(len(recorded)))
                recorded.append(record(server, own, ranks, jobs))
    sound, with_bugs, *curves = recorded
    for bug in found:
        path = bugs.FOLDER / f"{bug.name}.diff"
        says = compare(sound[bugs.file_name(bug.against)], with_bugs[bug.name])
        path.write_text(re.sub("(?m)^Parity: .*", lambda _: f"Parity: {says}", path.read_text()))
    sound, with_bugs = ({name: [round(loss_of(line), 4) for line in lines]
                         for name, lines in runs.items()} for runs in curves)
    curves = {run["name"]: run for run in draw.read("bugs")} | {
        bug.name: {"name": bug.name, "sound": sound[bugs.file_name(bug.against)],
                   "loss": with_bugs[bug.name]}
        for bug in found
    }
    rows = [curves[bug.name] for bug in bugs.read()]
    (draw.DATA / "bugs.json").write_text(json.dumps(rows) + "\n")


def main():
    named = sys.argv[1:]
    if named != ["--page"]:
        run([bug for bug in bugs.read() if not named or bug.name in named])
    bugs.PAGE.write_text(bugs.page(bugs.read()))
    draw.draw()


if __name__ == "__main__":
    main()
