"""single.py or ddp.py, killed while it saves step 15: --when writing, renaming, removing."""

import os
import pathlib
import shutil
import signal
import sys

import ddp
import single
from common.launch import launch

when = sys.argv.index("--when")
place = sys.argv[when + 1]
del sys.argv[when : when + 2]
fsync, rename, rmtree = os.fsync, pathlib.Path.rename, shutil.rmtree


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def saving():
    return list(pathlib.Path.cwd().glob("out/step-00000015.tmp"))


def fsync_or_die(descriptor):
    if place == "writing" and saving() and os.environ.get("RANK", "0") == "0":
        os.ftruncate(descriptor, 1000)
        kill()
    fsync(descriptor)


def rename_or_die(path, target):
    if place == "renaming" and path.name == "step-00000015.tmp":
        kill()
    return rename(path, target)


def rmtree_or_die(path, *args, **kwargs):
    if place == "removing" and pathlib.Path(path).name == "step-00000005.old":
        next(pathlib.Path(path).glob("*.distcp")).unlink()
        kill()
    rmtree(path, *args, **kwargs)


os.fsync, pathlib.Path.rename, shutil.rmtree = fsync_or_die, rename_or_die, rmtree_or_die
launch(ddp.main if "RANK" in os.environ else single.main)
