"""Opens files to read. Every file that this project reads is opened by these functions.

A path may be anything: a FIFO into which nobody writes, a device without an end, a sparse file of a
terabyte. So what is read is a regular file, of at most so many bytes.
"""

import contextlib
import os
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
