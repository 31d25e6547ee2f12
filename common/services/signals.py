"""Signals that ask a run to stop."""

import ctypes
import os
import signal
import time

from common.errors import SettingError

_first_signal = None  # its time


def catch_stop_signals():
    """From now on SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) ask this process to stop:
    ``stop_requested()``. A second signal ends it at once. Call it in the main thread.

    Also ask the kernel for SIGTERM when torchrun dies, even by SIGKILL. Otherwise its processes
    train on, and write into the folder from which a new start reads."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # an ignored signal stays so (nohup)
            signal.signal(number, _note)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.environ.get("TORCHRUN_PID", str(os.getppid())) != str(os.getppid()):
            raise SettingError("torchrun has ended")  # before prctl was called


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
