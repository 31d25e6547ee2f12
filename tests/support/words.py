"""What is refused, and what a message says."""

import pytest

from common.options import SettingError


def refused(words):
    """``with refused(words):`` this is refused, in words that the pattern ``words`` fits."""
    return pytest.raises(SettingError, match=words)


def in_order(words, line):
    """Whether ``line`` has what stands between the " ... " in ``words``, in this order."""
    for part in words.split(" ... "):
        _, found, line = line.partition(part)
        if not found:
            return False
    return True
