"""Runs the script that comes first among the arguments; rank 1 stops in the third step."""

import atexit
import importlib
import os
import pathlib
import signal
import sys

from common.launch import launch
from common.metrics import Metrics

begin_step = Metrics.begin_step


def stop(self, step):
    if step == 2 and os.environ["RANK"] == "1":
        pathlib.Path("stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    begin_step(self, step)


def kill():
    """Rank 0, when it has ended: the stopped rank would stay."""
    if os.environ["RANK"] == "0":
        os.kill(int(pathlib.Path("stopped").read_text()), signal.SIGKILL)


Metrics.begin_step = stop
atexit.register(kill)
launch(importlib.import_module(sys.argv.pop(1).removesuffix(".py")).main)
