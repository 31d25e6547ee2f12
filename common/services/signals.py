"""Signals that ask a run to stop."""

import os
import signal
import time

_first_signal = None  # its time


def catch_stop_signals():
    """From now on SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) ask this process to stop:
    ``stop_requested()``. A second signal ends it at once. Call it in the main thread."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # an ignored signal stays so (nohup)
            signal.signal(number, _note)


def _note(number, _):
    global _first_signal
    if _first_signal is None:
        _first_signal = time.monotonic()
    elif time.monotonic() - _first_signal > 1:  # launchers may deliver one signal twice
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def stop_requested():
    """Whether a signal has asked this process to stop."""
    return _first_signal is not None
