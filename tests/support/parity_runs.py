"""Trains the scripts of published bugs in each rank, one after the other, and records their steps
by tools/parity: in one process what each bug is compared with; on several ranks each script with
the bug, and without.

    parity_runs.py NAME NAME ... --steps 3 --lr 0.01 --data TEXT --out FOLDER
"""

import argparse
import os
import pathlib
import types

from common.launch import launch
from tests import bugs
from tools.support.recorded import record


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--data")
    parser.add_argument("--out", type=pathlib.Path)
    args, more = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = {}  # the same script once
    for bug in bugs.read(args.names):
        runs |= bug.runs
    for name, (ranks, command, edits) in runs.items():
        if ranks != int(os.environ.get("WORLD_SIZE", 1)):
            continue
        script, *options = command.split()
        text = (bugs.ROOT / script).read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{name}: {script} has {text.count(old)} times {old}"
            text = text.replace(old, new)
        module = types.ModuleType(script)
        module.__file__ = str(bugs.ROOT / script)
        exec(compile(text, script, "exec"), vars(module))
        path = args.out / f"{name}.parity"
        if script == bugs.TRAINER:  # it records itself, and draws its data
            module.main([*more, *options, "--out", str(path)])
        else:
            record(module, [*bugs.OPTIONS.split(), *more, *options, "--data", args.data,
                            "--out", str(args.out / name)], path)


if __name__ == "__main__":
    launch(main)
