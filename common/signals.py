"""Signals that ask a run to stop: the first one lets it save, a second one ends it at once."""

import os
import signal
import time

SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
# Launchers may deliver one signal twice, to the process and to its group.
ONE_SIGNAL = 1.0  # seconds

_first = None  # time and name of the first signal


def listen():
    """From now on ``asked()`` returns the first of SIGTERM, SIGUSR1 and SIGINT (Ctrl-C). A second
    signal, at least ``ONE_SIGNAL`` seconds later, ends the process. Call it in the main thread."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # an ignored signal stays so (nohup)
            signal.signal(number, _note)


def asked():
    """The name of the signal that has asked this process to stop, or None."""
    return _first and _first[1]


def _note(number, _):
    global _first
    if _first is None:
        _first = time.monotonic(), signal.Signals(number).name
    elif time.monotonic() - _first[0] >= ONE_SIGNAL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
