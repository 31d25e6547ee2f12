"""The folder of a run, --out.

A folder with the file ``run-id`` has a run, and a start continues it. A folder that is empty, or
not there, becomes that of a new run. Anything else is refused. A run removes only its own older
checkpoints, and what a kill has left of its own. It moves nothing, and writes only while ``run-id``
is what its last start wrote: if another start has taken the folder's name, it ends.

``lock`` is an empty file, which the process of rank 0 locks. ``run-id`` holds the id of the run,
which its resumes keep, and of its last start; and the checkpoint of another run from which it
began.
"""

import dataclasses
import fcntl
import io
import json
import os
import pathlib
import re
import secrets
import socket
import sys
import time

from common.errors import SettingError
from common.files import read_text, reading
from common.launch import undo
from common.options import not_empty
from common.services.new_files import new_file

CHECKPOINT = r"step-[0-9]{8,}"
RUN_ID = re.compile(r"run ([0-9a-f]{16}), start ([0-9a-f]{16}), process (\d+ on \S+)\n"
                    r"(?:from (\".+\")\n)?")
ANOTHER = "take another --out, or remove the folder"  # to begin a new run


def add_out(parser):
    """Add --out, for the first service that needs it."""
    if parser.get_default("out") is None:
        parser.add_argument_group("run folder").add_argument(
            "--out", type=lambda text: pathlib.Path(not_empty(text)), metavar="FOLDER",
            default=pathlib.Path("runs", pathlib.Path(sys.argv[0]).stem), help="run folder, for "
            "checkpoints and metrics.jsonl; if it has a run, that run continues; with several "
            "machines, a folder that they share",
        )


def new_id():
    return secrets.token_hex(8)


@dataclasses.dataclass
class Claim:
    """A run folder that this process has locked: ``lock``, the open file, which must stay open;
    ``run``, the id of the run; ``source``, the absolute path of the checkpoint from which the run
    began, or None; ``text``, that of run-id, "" until ``take`` has written it."""

    folder: pathlib.Path
    lock: io.IOBase
    run: str
    source: str | None = None
    text: str = ""

    def take(self):
        """Make the folder that of this start."""
        text = f"run {self.run}, start {new_id()}, process {this_process()}\n"
        if self.source:
            text += f"from {json.dumps(self.source)}\n"
        with new_file(self.folder / "run-id", "w", self.run) as file:
            file.write(text)
        self.text = text

    def check(self):
        """Raise SettingError unless the folder still is that of this start: run-id is there, and as
        ``take`` has written it. Of a disk that fails, what is written next says so."""
        try:
            text = read_text(self.folder / "run-id", 10_000)
        except (FileNotFoundError, NotADirectoryError, SettingError, ValueError):
            text = None  # it is missing, or something else
        except OSError:
            return
        if text != self.text:
            raise SettingError(
                f"--out {self.folder} is no longer the folder of this run: it was moved or "
                f"removed, or another start has taken it; nothing more is written there"
            )


def this_process():
    return f"{os.getpid()} on {socket.gethostname()}"


def read_run_id(folder):
    """The id of the run of a folder, the text of its file run-id, and the checkpoint from which the
    run began or None; (None, "", None) without a run.

    Raises:
        SettingError: the file is not what a run writes.
    """
    path = folder / "run-id"
    if not os.path.lexists(path):
        return None, "", None
    with reading(path):
        text = read_text(path, 10_000)
    if not (match := RUN_ID.fullmatch(text)):
        raise SettingError(f"{path} is not what a run writes: choose another --out")
    return match[1], text, json.loads(match[4]) if match[4] else None


def refuse_foreign(folder):
    """Raise SettingError if something is in a folder that has no run. Names that begin with a dot
    do not count, nor an empty lock: a run that was killed at its first start leaves one."""
    for path in sorted(folder.iterdir()):
        empty = path.name == "lock" and not path.is_symlink() and path.is_file() and (
            not path.stat().st_size)
        if not (empty or path.name.startswith(".") or path.name == "lost+found"):
            raise SettingError(
                f"--out {folder} has {path.name} and no run: choose a folder that is empty or not "
                f"there, such as {folder / 'run'}"
            )


def claim_folder(folder, source=None):
    """Lock a run folder until this process ends, however it ends. ``source``: the absolute path of
    a checkpoint from which a new run is to begin. Returns a Claim.

    Raises:
        SettingError: another process uses the folder; it holds something, but no run; or a run that
            did not begin from ``source``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not read_run_id(folder)[0]:  # before anything is made here
        refuse_foreign(folder)
    lock = lock_folder(folder)
    run, _, began = read_run_id(folder)
    if run and source and source != began:
        raise SettingError(
            f"--out {folder} holds a run that began from {began or 'no other'}, and --from is "
            f"{source}: give the same --from, or {ANOTHER}"
        )
    return Claim(folder, lock, run or new_id(), began or source)


def lock_folder(folder):
    """The open file ``lock``, locked. It is a record lock: children do not inherit it, and NFS has
    it too. On a file system without locks ``Claim.check`` alone guards the run. ``undo`` of
    common/launch.py closes it: if a later run of this process has the folder, a file that is closed
    late would release its lock too."""
    file = open(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
    for _ in range(50):  # the run before may just be ending
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            undo.callback(file.close)
            return file
        except (BlockingIOError, PermissionError):  # another process holds it
            time.sleep(0.1)
        except OSError:
            return file
    user = RUN_ID.fullmatch(read_run_id(folder)[1])
    raise SettingError(
        f"--out {folder} is in use{f' by process {user[3]}' if user else ''}: wait until that run "
        f"has ended, or choose another folder"
    )


def claim_for_log(folder):
    """The Claim that ``Checkpoints`` of this process has taken. If that service has come off: a new
    one, of a run that begins, or begins again.

    Raises:
        SettingError: see ``claim_folder``; or a run with checkpoints is in the folder.
    """
    run, text, source = read_run_id(folder)
    if run and RUN_ID.fullmatch(text)[3] == this_process():
        return Claim(folder, None, run, source, text)
    claim = claim_folder(folder)
    if any(re.fullmatch(CHECKPOINT, path.name) for path in folder.iterdir()):
        raise SettingError(
            f"--out {folder} has checkpoints, and this script reads none: take another --out"
        )
    claim.take()
    return claim
