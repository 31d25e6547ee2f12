"""The folder of a run, --out: its lock, and what of an earlier run moves aside."""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import socket
import stat
import sys
import time

from common.errors import SettingError
from common.options import not_empty

LOCK = re.compile(r"process \d+ on \S+(, run (?P<run>[0-9a-f]{16}))?")  # the text of a lock
TEMPORARY = re.compile(r"step-\d{8,}\.(?P<run>[0-9a-f]{16})\.(tmp|old)")  # half a checkpoint
# What a run writes beside its checkpoints; a new run moves it aside.
RUN_FILES = (
    "metrics.jsonl", "summary.json", "trace-rank*.json", "flight-record-rank*",
)


def add_out(parser):
    """Add --out, for the first service that needs it."""
    if parser.get_default("out") is None:
        parser.add_argument_group("run folder").add_argument(
            "--out", type=lambda text: pathlib.Path(not_empty(text)), metavar="FOLDER",
            default=pathlib.Path("runs", pathlib.Path(sys.argv[0]).stem), help="run folder, for "
            "checkpoints and metrics.jsonl; with several machines, a folder that they share",
        )


def lock_folder(folder):
    """Lock the run folder until this process ends, however it ends. Returns the open file, which
    must stay open, and its text: who has locked it last. The lock is a record lock: children do not
    inherit it, and NFS has it too.

    Raises:
        SettingError: another run uses the folder, or its file ``lock`` is not of a run.
    """
    foreign = SettingError(
        f"--out {folder} has a file named lock that no run has made: choose another folder"
    )
    if os.path.lexists(folder / "lock") and not stat.S_ISREG(os.lstat(folder / "lock").st_mode):
        raise foreign
    file = open(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
    try:
        for _ in range(50):  # the run before may just be ending
            with contextlib.suppress(BlockingIOError, PermissionError):  # another process holds it
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        else:
            raise SettingError(
                f"--out {folder} is in use by {file.read(200).strip()}: wait until that run has "
                f"ended, or choose another folder"
            )
    except OSError as error:
        print(f"{folder} cannot be locked ({error.strerror}): make sure that no other run uses it",
              file=sys.stderr)
    text = file.read(300)
    if text and not LOCK.fullmatch(text):
        raise foreign
    return file, text


def write_lock(file, run):
    """Write into a lock which process has it, and of which run it last had the files. Returns this
    text."""
    text = f"process {os.getpid()} on {socket.gethostname()}"
    if run:
        text += f", run {run}"
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()
    os.fsync(file.fileno())  # for the other machines
    return text


def remove(path):
    """Remove a checkpoint, or a link to one; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)
    if path.is_symlink():
        path.unlink(missing_ok=True)


def run_files(folder):
    """All that has the name of a run's file, except checkpoints and the lock."""
    return [path for kind in RUN_FILES for path in folder.glob(kind)]


def move_aside(folder, paths):
    """Move what this run has not made into the first free ``previous-N`` of the folder."""
    if paths:
        number = 1
        while (aside := folder / f"previous-{number}").exists():
            number += 1
        aside.mkdir()
        for path in paths:
            path.rename(aside / path.name)
