"""Commands as a user types them, each in a session of its own, and what they have started."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

from tests.support.processes import PATIENCE, ROOT

RUN = ["bash", str(ROOT / "run.sh")]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
    "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NPROC": "1",
}


def start(command, cwd, stdin=subprocess.DEVNULL, **environment):
    def prepare():
        # A shell lets its background jobs ignore Ctrl-C, and nohup SIGHUP: undo that.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    return subprocess.Popen(
        [str(word) for word in command], cwd=cwd, env={**ENVIRONMENT, **environment}, text=True,
        stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=prepare,
    )


def finish(process):
    """What it has printed, when it has ended."""
    try:
        return process.communicate(timeout=PATIENCE)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def logged(out):
    """How many steps a run has logged, with --log-every 1."""
    log = out / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def left_over(folder):
    """The processes that work in ``folder`` or below: none may be left of a run that is over."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has just ended
            if pathlib.Path(os.readlink(path)).is_relative_to(folder):
                found.append((path.parent / "cmdline").read_text())
    return found


def children(pid):
    """The processes that ``pid`` has started, oldest first."""
    return [int(word) for word in
            pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
