"""torchrun, as run.sh starts it. It differs from plain torchrun when a signal stops it, and in the
port of the processes' store.

Plain torchrun ends with a traceback and status 1, and after 30 seconds kills processes that still
save. This one passes SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 on to its processes. They finish a step,
save and end with status 0, and then torchrun ends with status 0 too. A second signal kills all
processes at once. So does torchrun itself, ``PATIENCE`` seconds after the first signal.
"""

import os
import pathlib
import random
import signal
import socket
import sys
import tempfile
import time

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import api

PATIENCE = 300  # seconds in which processes can save; NCCL may wait for a dead process for ever
ONE_SIGNAL = 1.0  # seconds: launchers may deliver one signal twice
FILE = "--rdzv-conf=store_type=file"

asked = None  # the first signal and its time
restart_workers, get_free_port = SimpleElasticAgent._restart_workers, api.get_free_port


def processes():
    """The ids of the processes that this one has started."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has just ended
            continue
        if int(parent) == os.getpid():
            found.append(int(stat.parent.name))
    return found


def stop(number, _):
    global asked
    if asked and time.monotonic() - asked[1] < ONE_SIGNAL:
        return
    started = processes()
    for pid in started:
        try:
            if asked:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)
        except ProcessLookupError:
            pass
    if asked or not started:
        os._exit(128 + number)
    asked = number, time.monotonic()
    signal.alarm(PATIENCE)


def restart_unless_stopped(self, *args, **kwargs):
    if asked:
        sys.exit(128 + asked[0])
    return restart_workers(self, *args, **kwargs)


def free_port():
    """A port that rank 0 can listen on when it has imported torch, seconds later. It is below those
    that the kernel gives to whoever asks for any port: by then it might have given it away."""
    first = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    ports = range(10_000, int(first))
    for port in random.sample(ports, min(100, len(ports))):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:  # it is in use
                continue
    return get_free_port()


def main():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGALRM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # an ignored signal stays so (nohup)
            signal.signal(number, stop)
    SimpleElasticAgent._restart_workers = restart_unless_stopped
    api.get_free_port = free_port
    os.environ["TORCHRUN_PID"] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="rendezvous-") as folder:
        # On one machine the rendezvous is a file, not a port that other machines can reach
        endpoint = [f"--rdzv-endpoint={folder}/store"] if FILE in sys.argv else []
        try:
            run.main(["--signals-to-handle=SIGQUIT", *endpoint, *sys.argv[1:]])
        except BaseException:
            if not asked:
                raise
            name = signal.Signals(asked[0]).name
            sys.exit(f"run.sh: error: {name} came before all processes could save")


main()
