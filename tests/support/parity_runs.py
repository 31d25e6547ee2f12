"""Trains scripts in each rank, one after the other, with the two lines of tools/parity put into
their text, and with edits of their text: faults.

    parity_runs.py JOBS.json --data TEXT --out FOLDER

A job is [name, script, options, [[old, new], ...]]; it writes FOLDER/NAME.parity.
"""

import json
import pathlib
import sys

from common.launch import launch

ROOT = pathlib.Path(__file__).parents[2]
WHAT = {
    "zero.py": "shards, optimizer, loss='sum', dtype=args.compute_dtype",
    "tp.py": "model, optimizer",
    "pp.py": "{name: p for part in parts for name, p in part.named_parameters()}, optimizer, "
             "loss='sum', dtype=args.compute_dtype",
}
OWN = {"tests/support/parity_trainer.py"}  # it has the two lines


def with_parity(text, script, path):
    """What a user does: one line after the optimizer, one before clipping."""
    what = WHAT.get(script, "model, optimizer, loss='sum'")
    for before, line in (
        ("import torch\n", "from tools.parity import Parity\n"),
        ("\n    # Data\n", f"    parity = Parity({str(path)!r}, {what})\n"),
        ("        grad_norm = ", "        parity.record(step, loss, batch)\n"),
    ):
        text = text.replace(before, line + before, 1)
    return text


def main():
    jobs, *data, _, folder = sys.argv[1:]
    jobs, folder = pathlib.Path(jobs), pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, script, options, edits in json.loads(jobs.read_text()):
        text = (ROOT / script).read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{name}: {script} has {text.count(old)} times {old}"
            text = text.replace(old, new)
        if script not in OWN:
            text = with_parity(text, script, folder / f"{name}.parity")
        module = {"__name__": script, "__file__": str(ROOT / script)}
        exec(compile(text, script, "exec"), module)
        module["main"]([*options.split(), *data, "--out", str(folder / name)])


if __name__ == "__main__":
    launch(main)
