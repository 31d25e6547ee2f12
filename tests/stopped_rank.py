"""Runs the script that comes first among the arguments; rank 1 stops in the third step."""

import atexit
import importlib
import os
import pathlib
import signal
import sys

from common.launch import launch
from common.report import Report

log = Report.log


def stop(self, step, *args):
    if step == 2 and os.environ["RANK"] == "1":
        pathlib.Path("stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    log(self, step, *args)


def kill():
    """Rank 0, when it has ended: the stopped rank would stay."""
    if os.environ["RANK"] == "0":
        os.kill(int(pathlib.Path("stopped").read_text()), signal.SIGKILL)


Report.log = stop
atexit.register(kill)
launch(importlib.import_module(sys.argv.pop(1).removesuffix(".py")).main)
