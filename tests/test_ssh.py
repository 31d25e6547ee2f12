"""The loop over ssh of docs/launching.md, typed into a shell. An ssh that is pretended plays both
hosts: it runs a command in a terminal of its own, which ends when that ssh is killed."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios

import pytest

from tests.support.processes import ROOT, SMALL, free_port
from tests.support.sample import thorough
from tests.test_launch import (
    ENVIRONMENT, finish, has_logged, has_saved, left_over, wait_until
)

SSH = f"""#!{sys.executable}
import pty, sys
_, _, host, command = sys.argv
if host not in ("host0", "host1"):
    sys.exit(255)
pty.spawn(["bash", "-c", command])
"""


def take_terminal():
    """Before a shell starts: Ctrl-C in the terminal at its stdin is for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def the_loop(hosts, corpus):
    """As the page shows it, with the options of a run that does not end."""
    page = (ROOT / "docs" / "launching.md").read_text()
    lines = re.search(r"\*\*Over ssh\*\*(?s:.*?)\n\n((?:    .*\n)+)", page)[1]
    options = f"{SMALL} --steps 100000 --save-every 50000 --log-every 1 --data {corpus}"
    text = lines.replace("0 1", hosts).replace("MASTER_ADDR=host0", "MASTER_ADDR=127.0.0.1")
    text = text.replace("run.sh fsdp.py --steps 1000 --out /shared/run",
                        f"{ROOT}/run.sh ddp.py {options}")
    assert text.count(options) == 1
    return text


@thorough
@pytest.mark.parametrize("hosts, status", [("0 1", 130), ("0 9", 255)])
def test_the_loop_ends_the_runs_of_all_hosts(tmp_path, corpus, hosts, status):
    """When Ctrl-C is typed, which lets them save; or when a host fails."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    terminal, end = os.openpty()
    with free_port() as port:
        shell = subprocess.Popen(
            ["bash", "--norc", "--noediting", "-i"], cwd=tmp_path, text=True, stdin=end,
            env=ENVIRONMENT | {"PATH": f"{tmp_path}:{os.environ['PATH']}",
                               "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(end)
        os.write(terminal, the_loop(hosts, corpus).encode())
        if status == 130:
            wait_until(lambda: has_logged(tmp_path / "runs" / "ddp"))
            os.write(terminal, b"\x03")
        os.write(terminal, b"exit\n")
        output = finish(shell)
    assert shell.returncode == status and "Traceback" not in output, output
    wait_until(lambda: not left_over(tmp_path))
    assert status == 255 or has_saved(tmp_path)
