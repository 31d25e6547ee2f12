"""Runs all bugs, and writes what parity says into the patches, their loss curves into
docs/data/bugs.json, and both into docs/bugs.md and its picture: python -m tests.bugs"""

import json
import pathlib
import re
import tempfile

from docs import draw
from tests import bugs
from tests.conftest import corpus_text
from tests.processes import ProcessServer
from tools import parity

CURVE = 60  # steps of a curve


def recordings(server, folder, steps):
    """{name: its lines} of all runs."""
    folder.mkdir()
    (folder / "corpus.txt").write_text(corpus_text())
    for ranks, jobs in bugs.jobs(bugs.read(), steps).items():
        (folder / "jobs.json").write_text(json.dumps(jobs))
        server.run(f"tests/parity_runs.py {folder}/jobs.json --data {folder}/corpus.txt", ranks,
                   folder=folder, out=str(ranks), inject="ignored()")
    return {f"{path.parent.name}/{path.stem}": bugs.lines(path)
            for path in folder.glob("*/*.parity")}


def main():
    with tempfile.TemporaryDirectory() as folder, ProcessServer() as server:
        few = recordings(server, pathlib.Path(folder, "few"), bugs.STEPS)
        many = recordings(server, pathlib.Path(folder, "many"), CURVE)
    for path, bug in zip(bugs.paths(), bugs.read()):
        says = parity.compare(few[f"0/{bugs.file_name(bug.against)}"],
                              few[f"{bugs.RANKS}/{bug.name}"])
        path.write_text(re.sub("(?m)^Parity: .*", lambda _: f"Parity: {says}", path.read_text()))
    found = bugs.read()
    curves = {name: [round(line["loss"], 4) for line in lines] for name, lines in many.items()}
    data = {
        "sound": {bug.against: curves[f"0/{bugs.file_name(bug.against)}"] for bug in found},
        "loss": {bug.name: {"against": bug.against, "losses": curves[f"{bugs.RANKS}/{bug.name}"]}
                 for bug in found},
    }
    (draw.DATA / "bugs.json").write_text(json.dumps(data) + "\n")
    bugs.PAGE.write_text(bugs.page(found))
    draw.draw()


if __name__ == "__main__":
    main()
