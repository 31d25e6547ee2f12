"""Bugs that were published, as patches of the scripts: tests/bugs/*.diff, for ``git apply``. Above
each patch stand a title, what to run, the sound run in one process to compare with, and what parity
says. docs/bugs.md tells of each what happened in the field.

In each rank this trains the scripts of some bugs, one after the other, and records their steps by
parity: in one process what each bug is compared with; on several ranks each script with the bug,
and without. The losses in docs/data/bugs.json are those of --steps 50 --lr 0.003.

    parity_runs.py NAME NAME ... --steps 3 --lr 0.01 --data TEXT --out FOLDER
"""

import argparse
import collections
import os
import pathlib
import re
import types

from common.launch import launch
from tests.support.processes import ROOT, with_edits
from tools.checking.recorded import train_recorded

OPTIONS = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 3 --num-attention-heads 8 "
           "--num-key-value-heads 4 --seq-len 16 --batch-size 24 --warmup-steps 1 --grad-clip 0.5 "
           "--dtype float32")
TRAINER = "tests/support/parity_trainer.py"  # it has options of its own
RANKS = 2  # of all bugs; what they are compared with is one process


class Bug(collections.namedtuple("Bug", "name title run against says diff")):
    @property
    def hunks(self):
        """The lines of each hunk of the patch."""
        return [hunk.splitlines() for hunk in re.split(r"(?m)^@@ .*\n", self.diff)[1:]]

    @property
    def edits(self):
        """[(old text, new text), ...] of the script."""
        return [["".join(f"{line[1:]}\n" for line in hunk if line[0] in signs)
                 for signs in (" -", " +")] for hunk in self.hunks]

    @property
    def runs(self):
        """{name of the recording: (ranks, command, edits)}: one process; ranks without the bug;
        ranks with it."""
        sound = [(1, self.against, []), (RANKS, self.run, [])]
        named = {re.sub(r"[^\w.]+", "-", f"{run[0]} {run[1]}"): run for run in sound}
        return named | {self.name: (RANKS, self.run, self.edits)}


def read():
    """All bugs, in the order of the page."""
    for path in sorted((ROOT / "tests/bugs").glob("*.diff")):
        head, _, diff = path.read_text().partition("\n--- a/")
        title, *fields = re.findall(r"(?m)^(?:Run: |Against: |Parity: )?(.+)", head)
        yield Bug(path.stem, title, *fields, diff)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--data")
    parser.add_argument("--out", type=pathlib.Path)
    args, more = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = {}  # the same script once
    for bug in read():
        runs |= bug.runs if bug.name in args.names else {}
    for name, (ranks, command, edits) in runs.items():
        if ranks != int(os.environ.get("WORLD_SIZE", 1)):
            continue
        script, *options = command.split()
        text = with_edits((ROOT / script).read_text(), edits)
        module = types.ModuleType(script)
        module.__file__ = str(ROOT / script)
        exec(compile(text, script, "exec"), vars(module))
        path = args.out / f"{name}.parity"
        if script == TRAINER:  # it records itself, and draws its data
            module.main([*more, *options, "--out", str(path)])
        else:
            train_recorded(module, [*OPTIONS.split(), *more, *options, "--data", args.data],
                           path)


if __name__ == "__main__":
    launch(main)
