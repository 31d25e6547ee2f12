"""The folder of a run, --out.

A folder is a run's if it has the file ``run-id``. Then what bears a name of ``NAMES`` there is the
run's, and everything else is somebody's: no run reads, moves or removes it. In a folder without a
run, something with such a name is a reason to refuse.

``lock`` is an empty file, which the process of rank 0 locks. ``run-id`` holds the id of the run,
which its resumes keep, and of its last start.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import secrets
import socket
import sys
import time

from common.errors import SettingError
from common.files import read_text, reading
from common.options import not_empty
from common.services.new_files import new_file

CHECKPOINT = r"step-[0-9]{8,}"
OUTPUT = r"metrics\.jsonl|summary\.json|trace-rank.*|flight-record-rank.*|tensorboard|wandb.*"
NAMES = re.compile(rf"lock|run-id|{CHECKPOINT}(\..*)?|{OUTPUT}")
RUN_ID = re.compile(r"run ([0-9a-f]{16}), start ([0-9a-f]{16}), process (\d+ on \S+)\n")


def add_out(parser):
    """Add --out, for the first service that needs it."""
    if parser.get_default("out") is None:
        parser.add_argument_group("run folder").add_argument(
            "--out", type=lambda text: pathlib.Path(not_empty(text)), metavar="FOLDER",
            default=pathlib.Path("runs", pathlib.Path(sys.argv[0]).stem), help="run folder, for "
            "checkpoints and metrics.jsonl; with several machines, a folder that they share",
        )


def new_id():
    return secrets.token_hex(8)


def read_run_id(folder):
    """The id of the run of a folder, and the text of its file run-id; (None, "") without one.

    Raises:
        SettingError: the file is not what a run writes.
    """
    path = folder / "run-id"
    if not os.path.lexists(path):
        return None, ""
    with reading(path):
        text = read_text(path, 1000)
    if not (found := RUN_ID.fullmatch(text)):
        raise SettingError(f"{path} is not what a run writes: choose another --out")
    return found[1], text


def write_run_id(folder, run):
    """Make ``folder`` that of ``run``, at a start of it. Returns the text of run-id."""
    text = f"run {run}, start {new_id()}, process {os.getpid()} on {socket.gethostname()}\n"
    with new_file(folder / "run-id", "w", run) as file:
        file.write(text)
    return text


def refuse_foreign(folder):
    """Raise SettingError if a folder without a run has something with the name of a run's file.

    An empty lock is harmless: a run that was killed at its first start leaves one."""
    for path in sorted(folder.iterdir()):
        empty = path.name == "lock" and path.is_file() and not path.stat().st_size
        if NAMES.fullmatch(path.name) and not empty and not os.path.lexists(folder / "run-id"):
            raise SettingError(
                f"--out {folder} has {path.name}, a name that a run writes, and no run-id: choose "
                f"another folder, move it away, or copy run-id too if it is from a run"
            )


def lock_folder(folder):
    """Lock a run folder until this process ends, however it ends. Returns the open file, which must
    stay open, and the id of the run that the folder belongs to, or None. The lock is a record lock:
    children do not inherit it, and NFS has it too.

    Raises:
        SettingError: another process uses the folder, or it has foreign files.
    """
    path = folder / "lock"
    run, _ = read_run_id(folder)
    if not run and (path.is_symlink() or not path.is_file()):
        refuse_foreign(folder)  # before anything is made here
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    file = open(descriptor, "r+")
    try:
        for _ in range(50):  # the run before may just be ending
            with contextlib.suppress(BlockingIOError, PermissionError):  # another process holds it
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        else:
            user = RUN_ID.fullmatch(read_run_id(folder)[1])
            raise SettingError(
                f"--out {folder} is in use{f' by process {user[3]}' if user else ''}: wait until "
                f"that run has ended, or choose another folder"
            )
    except OSError as error:
        print(f"{folder} cannot be locked ({error.strerror}): make sure that no other run uses it",
              file=sys.stderr)
    run, _ = read_run_id(folder)
    if not run:
        refuse_foreign(folder)
    return file, run


def own_output(folder):
    """What a run has written beside its checkpoints."""
    return [path for path in folder.iterdir() if re.fullmatch(OUTPUT, path.name)]


def move_to_previous(folder, paths):
    """Move ``paths`` into the first free ``previous-N`` of the folder."""
    if paths:
        number = 1
        while os.path.lexists(previous := folder / f"previous-{number}"):
            number += 1
        previous.mkdir()
        for path in paths:
            path.rename(previous / path.name)
