"""Writes files. Every file that this project writes is written by these functions.

What is written is a new file, which takes its name when it is complete. Nothing of a user's is
overwritten, and no link is followed.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil

from common.errors import SettingError


@contextlib.contextmanager
def new_file(path, mode="wb", run="", replace=True):
    """Yields a new file, which takes the place of ``path`` at the end of the block, when it is on
    disk. After an error nothing is left of it. A link at ``path`` is replaced, not followed.

    ``run``: the id of the run that writes. What a killed process leaves has it in its name, so that
    the next start of the run can remove it: see ``remove_left_over``.

    Raises SettingError if not ``replace``, and ``path`` exists at the end of the block.
    """
    temporary = path.with_name(f".{path.name}.{run}.{secrets.token_hex(4)}.tmp")
    encoding = None if "b" in mode else "utf-8"
    # x: O_EXCL, which follows no link
    with open(temporary, mode.replace("w", "x"), encoding=encoding) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            (os.replace if replace else link)(temporary, path)
        except BaseException:  # Ctrl-C too
            temporary.unlink(missing_ok=True)
            raise


def link(temporary, path):
    """Give a file its name, unless something has that name meanwhile."""
    try:
        os.link(temporary, path)
    except OSError:  # some file systems have no links
        refuse_existing(path)
        os.replace(temporary, path)
    temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path):
    """Yields a new folder, which gets the name ``path`` at the end of the block. After an error
    nothing is left of it.

    Raises:
        SettingError: ``path`` exists.
    """
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        refuse_existing(path)  # rename would replace an empty folder
        temporary.rename(path)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remedy(error):
    """What helps if a file cannot be read or written because of ``error``."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "make room"
    if number == errno.EFBIG:
        return "raise the limit of a file's size (ulimit -f)"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "let this user read and write there"
    if number in (errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT):
        return "see to what is at that path"
    return "see to its disk"


def refuse_existing(path):
    """Raise SettingError if ``path`` exists, be it a link to nowhere."""
    if os.path.lexists(path):
        raise SettingError(f"{path} exists: give another name, or remove it")


def append(path, text):
    """Add ``text`` to a file that ``new_file`` has made, or anew if somebody has moved it, as
    logrotate does. No link is followed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags, 0o666), "w", encoding="utf-8") as file:
        file.write(text)


def remove_left_over(folder, run):
    """Remove what killed processes of a run have left in ``folder``: see ``new_file``."""
    for path in folder.iterdir():
        if re.fullmatch(rf"\..+\.{run}\.[0-9a-f]{{8}}\.tmp", path.name):
            path.unlink(missing_ok=True)
