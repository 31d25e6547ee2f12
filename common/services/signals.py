"""Signals that ask a run to stop."""

import os
import signal
import threading
import time

from common.launch import undo

_first_signal = None  # its time


def catch_stop_signals():
    """From now on SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) ask this process to stop:
    ``stop_requested()``. A second signal ends it at once. When ``main`` ends, its decorator
    ``restores_process`` puts back the handlers."""
    global _first_signal
    _first_signal = None  # one that has ended an earlier run is over
    if threading.current_thread() is not threading.main_thread():  # Python refuses handlers there
        if os.environ.get("RANK", "0") == "0":
            print("this run is not in the main thread of its process: no signal lets it save and "
                  "stop", flush=True)
        return
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        handler = signal.getsignal(number)
        # An ignored signal stays so (nohup); None: C has set a handler, which cannot be put back.
        if handler not in (signal.SIG_IGN, None):
            undo.callback(signal.signal, number, handler)
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
