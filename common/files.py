"""How this project opens files and writes them: nothing else does.

A path may be anything: a FIFO into which nobody writes, a device without an end, a sparse file of a
terabyte, a link to somebody's file. So what is read is a regular file, of at most so many bytes;
and what is written is a new file, which takes its name when it is complete.
"""

import contextlib
import os
import re
import secrets
import shutil
import stat

from common.errors import SettingError

SMALL = 2**26  # bytes: more than any file that is parsed as a whole, such as settings, should have


@contextlib.contextmanager
def reading(path, advice=""):
    """Around what opens or parses ``path``: whatever that raises becomes one SettingError, which
    names the file. ``advice``: what to do then."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:  # parsers raise many: RecursionError, OverflowError, AttributeError
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise SettingError(f"{path} cannot be read ({reason:.200}){advice}") from None


def open_regular(path, most=None):
    """Open a regular file of at most ``most`` bytes, to read bytes. Links are followed.

    Raises:
        SettingError: it is something else, such as a FIFO, or larger.
        OSError: it does not exist, or may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (most is None or status.st_size <= most):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise SettingError(f"{path} has {status.st_size:,} bytes, and at most {most:,} are read")
    raise SettingError(f"{path} is no regular file")


def read_text(path, most=SMALL):
    """The text of a regular file, in UTF-8. Raises as ``open_regular`` does, and ValueError."""
    with open_regular(path, most) as file:
        return file.read().decode()


@contextlib.contextmanager
def new_file(path, mode="wb", run=""):
    """Yields a new file, which takes the place of ``path`` at the end of the block, when it is on
    disk. After an error nothing is left of it. A link at ``path`` is replaced, not followed.

    ``run``: the id of the run that writes. What a killed process leaves has it in its name, so that
    the next start of the run can remove it: see ``remove_left_over``.
    """
    temporary = path.with_name(f".{path.name}.{run}.{secrets.token_hex(4)}.tmp")
    encoding = None if "b" in mode else "utf-8"
    # x: O_EXCL, which follows no link
    with open(temporary, mode.replace("w", "x"), encoding=encoding) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:  # Ctrl-C too
            temporary.unlink(missing_ok=True)
            raise


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


def refuse_existing(path):
    """Raise SettingError if ``path`` exists, be it a link to nowhere."""
    if os.path.lexists(path):
        raise SettingError(f"{path} exists: give another name, or remove it")


def append(path, text):
    """Add ``text`` to a file that ``new_file`` has made."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags), "w", encoding="utf-8") as file:
        file.write(text)


def remove_left_over(folder, run):
    """Remove what killed processes of a run have left in ``folder``: see ``new_file``."""
    for path in folder.iterdir():
        if re.fullmatch(rf"\..+\.{run}\.[0-9a-f]{{8}}\.tmp", path.name):
            path.unlink(missing_ok=True)
