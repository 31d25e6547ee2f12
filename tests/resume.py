"""Resumes many checkpoints in one launch: SCRIPT OPTIONS... --for STEPS --from FOLDER FOLDER ...

Each FOLDER holds a checkpoint; the script goes on from it, for so many steps, and writes into the folder.
"""

import importlib
import sys

from common.checkpoint import Checkpoints
from common.launch import launch


class Enough(Exception):
    pass


def main():
    script, *options = sys.argv[1 : sys.argv.index("--for")]
    steps = int(sys.argv[sys.argv.index("--for") + 1])
    module = importlib.import_module(script.removesuffix(".py"))
    after_step = Checkpoints.after_step

    def stop_early(self, step):
        after_step(self, step)
        if step + 1 == 10 + steps:
            raise Enough

    Checkpoints.after_step = stop_early
    for folder in sys.argv[sys.argv.index("--from") + 1 :]:
        try:
            module.main([*options, "--out", folder])
        except Enough:
            pass


launch(main)
