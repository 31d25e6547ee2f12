"""Trains scripts in each rank, one after the other, with edits of their text: faults. tools/parity
records their steps.

    parity_runs.py JOBS.json --data TEXT --out FOLDER

A job is [name, script, options, [[old, new], ...]]; it writes FOLDER/NAME.parity.
"""

import json
import pathlib
import sys
import types

from common.launch import launch
from tools.support.recorded import record

ROOT = pathlib.Path(__file__).parents[2]
OWN = {f"tests/support/{name}_trainer.py" for name in ("parity", "fsdp")}  # they record themselves


def main():
    jobs, *data, _, folder = sys.argv[1:]
    jobs, folder = pathlib.Path(jobs), pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, script, options, edits in json.loads(jobs.read_text()):
        text = (ROOT / script).read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{name}: {script} has {text.count(old)} times {old}"
            text = text.replace(old, new)
        module = types.ModuleType(script)
        module.__file__ = str(ROOT / script)
        exec(compile(text, script, "exec"), vars(module))
        options = [*options.split(), *data, "--out", str(folder / name)]
        if script in OWN:
            module.main(options)
        else:
            record(module, options, folder / f"{name}.parity")


if __name__ == "__main__":
    launch(main)
