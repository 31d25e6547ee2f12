"""The folder of a run, --out: its lock, and what of an earlier run moves aside."""

import contextlib
import fcntl
import os
import pathlib
import shutil
import socket
import sys
import time

from common.errors import SettingError
from common.options import not_empty

# What a run writes beside its checkpoints; a new run moves it aside.
RUN_FILES = (
    "metrics.jsonl", "summary.json", "wandb.json", "trace-rank*.json", "flight-record-rank*",
    "events.out.*",  # TensorBoard's
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
    must stay open. The lock is a record lock: children do not inherit it, and NFS has it too."""
    file = open(folder / "lock", "a+")
    try:
        for _ in range(50):  # the run before may just be ending
            with contextlib.suppress(BlockingIOError, PermissionError):  # another process holds it
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        else:
            file.seek(0)
            raise SettingError(
                f"--out {folder} is in use by {file.read(200).strip()}: wait until that run has "
                f"ended, or choose another folder"
            )
    except OSError as error:
        print(f"{folder} cannot be locked ({error.strerror}): make sure that no other run uses it",
              file=sys.stderr)
    file.truncate(0)
    file.write(this_process())
    file.flush()
    os.fsync(file.fileno())  # for the other machines
    return file


def this_process():
    return f"process {os.getpid()} on {socket.gethostname()}"


def remove(path):
    """Remove a checkpoint, or a link to one; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)
    if path.is_symlink():
        path.unlink(missing_ok=True)


def move_aside(folder, paths):
    """Move files of an earlier run into the first free ``previous-N`` of the folder."""
    if paths:
        number = 1
        while (aside := folder / f"previous-{number}").exists():
            number += 1
        aside.mkdir()
        for path in paths:
            path.rename(aside / path.name)
