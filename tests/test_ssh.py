"""The loop over ssh of docs/launching.md, typed into a shell. An sshd on this machine plays both
hosts. Skipped without an sshd (see .ci/run), and says so."""

import fcntl
import os
import pathlib
import re
import shutil
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

SSHD = """ListenAddress 127.0.0.1:{port}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
SetEnv PYTHON={python} NPROC=1 OMP_NUM_THREADS=1 MASTER_PORT={master}
"""


def take_terminal():
    """Before a shell starts: Ctrl-C in the terminal at its stdin is for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def typed(tmp_path, corpus):
    """Type the loop, with the options of a run that does not end. Returns the shell, and a function
    that types more into it."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if not sshd:
        pytest.skip("needs an sshd")
    folder = tmp_path / "ssh"
    folder.mkdir()
    if os.getuid() == 0:  # an sshd of root needs it
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    page = (ROOT / "docs" / "launching.md").read_text()
    lines = re.search(r"\*\*Over ssh\*\*(?s:.*?)\n\n((?:    .*\n)+)", page)[1]
    options = f"{SMALL} --steps 100000 --save-every 50000 --log-every 1 --data {corpus}"
    shells = []

    def typed():
        text = lines.replace("MASTER_ADDR=host0", "MASTER_ADDR=127.0.0.1")
        text = text.replace("run.sh fsdp.py --steps 1000 --out /shared/run",
                            f"{ROOT}/run.sh ddp.py {options}")
        assert text.count(options) == 1
        terminal, end = os.openpty()
        shells.append(subprocess.Popen(
            ["bash", "--norc", "--noediting", "-i"], cwd=tmp_path, text=True, stdin=end,
            env=ENVIRONMENT | {"PATH": f"{folder}:{os.environ['PATH']}"}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=take_terminal,
        ))
        os.close(end)
        os.write(terminal, text.encode())
        return shells[0], lambda more: os.write(terminal, more.encode())

    with free_port() as port, free_port() as master:
        (folder / "config").write_text(
            SSHD.format(port=port, master=master, folder=folder, python=sys.executable)
        )
        known = f"[127.0.0.1]:{port} {key.with_suffix('.pub').read_text()}"
        (folder / "known").write_text(known)
        (folder / "client").write_text(
            f"Host host0 host1\nHostName 127.0.0.1\nPort {port}\nIdentityFile {key}\n"
            f"UserKnownHostsFile {folder}/known\nHostKeyAlias [127.0.0.1]:{port}\nBatchMode yes\n"
        )
        (folder / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/client "$@"\n')
        (folder / "ssh").chmod(0o755)
        command = [sshd, "-D", "-f", folder / "config", "-E", folder / "log"]
        with subprocess.Popen(command) as daemon:
            wait_until(lambda: not subprocess.call([folder / "ssh", "host0", "true"],
                                                   stderr=subprocess.DEVNULL))
            yield typed
            for shell in shells:
                if shell.poll() is None:
                    os.killpg(shell.pid, signal.SIGKILL)
            daemon.kill()


@thorough
def test_ctrl_c_saves_and_ends_the_runs_of_all_hosts(typed, tmp_path):
    shell, write = typed()
    wait_until(lambda: has_logged(tmp_path / "runs" / "ddp"))
    write("\x03")
    write("exit\n")
    output = finish(shell)
    assert shell.returncode == 130 and "Traceback" not in output, output
    wait_until(lambda: not left_over(tmp_path))
    assert has_saved(tmp_path)
