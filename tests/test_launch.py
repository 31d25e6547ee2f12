"""Starting and stopping: run.sh on one machine, by hand on several, over ssh and as a Slurm job.

The hosts are two network namespaces with an sshd in each, and Slurm is the real one with two nodes.
Both need root and packages (see .ci/run); without these their tests are skipped, and say so.
"""

import concurrent.futures
import fcntl
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from common import launch
from common.errors import SettingError
from common.services.checkpoint_files import list_checkpoints
from tests.support.on_ranks import on_ranks
from tests.support.processes import PATIENCE, ROOT, Result, free_port
from tests.support.sample import sampled, thorough
from tests.test_same_run import furthest

OPTIONS = ("--hidden-size 32 --num-hidden-layers 2 --seq-len 32 --batch-size 8 --steps 20 "
           "--log-every 1 --dtype float64 --save-every 0")
ENDLESS = f"{OPTIONS} --steps 100000 --save-every 50000"
RUN = ["bash", str(ROOT / "run.sh")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
    "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NPROC": "1",
}


def start(command, cwd, terminal=None, **environment):
    def prepare():
        # A shell lets its background jobs ignore Ctrl-C, and nohup SIGHUP: undo that.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if terminal:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    return subprocess.Popen(
        [str(word) for word in command], cwd=cwd, env={**ENVIRONMENT, **environment}, text=True,
        stdin=terminal or subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=prepare,
    )


def finish(process, timeout=PATIENCE):
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def history(out):
    return Result([0], "", out).history


def is_near(out, expected):
    return furthest(Result([0], "", out).curve(), expected) < 1e-10


def has_logged(out):
    """Whether a run has logged a few steps."""
    log = out / "metrics.jsonl"
    return log.exists() and len(log.read_text().splitlines()) > 3


def left_over(folder):
    """The processes that work in ``folder`` or below: none may be left of a run that is over."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cwd"):
        try:
            if pathlib.Path(os.readlink(path)).is_relative_to(folder):
                found.append((path.parent / "cmdline").read_text())
        except OSError:  # it has just ended
            pass
    return found


def children(pid):
    """The processes that ``pid`` has started, oldest first."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except OSError:
            pass
    return sorted(found)


def listeners(pids):
    """The addresses at which these processes listen, in the hexadecimal form of /proc/net/tcp."""
    sockets = set()
    for pid in pids:
        for link in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(link))
            except OSError:
                pass
    lines = [line.split() for name in ("tcp", "tcp6")
             for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]]
    return {line[1].split(":")[0] for line in lines
            if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


@pytest.fixture
def endless(tmp_path, corpus):
    """Start a run of ddp.py that does not end, and wait until it has logged a few steps."""
    def endless(*command, **environment):
        process = start([*command, *ENDLESS.split(), "--data", corpus], tmp_path,
                        **{"NPROC": "2", **environment})
        wait_until(lambda: has_logged(tmp_path / "runs" / "ddp"))
        return process

    return endless


def has_saved(folder):
    """Whether a run of ddp.py is over, and has left one checkpoint."""
    return len(list_checkpoints(folder / "runs" / "ddp")) == 1 and not left_over(folder)


@pytest.fixture(scope="module")
def expected(once):
    """The curve of one machine with two processes."""
    return once("ddp.py", 2, OPTIONS).curve()


# One machine


SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", *sys.argv[1].split())
words = [os.environ.get(name) for name in names]
os.write(1, f"{json.dumps(words + sys.argv[2:])}\\n".encode())
"""


def shown(output):
    return sorted(json.loads(line) for line in output.splitlines() if line.startswith('["'))


def test_a_python_that_is_named_has_its_own_environment(tmp_path):
    """And the environment of this very run is of the Python in its name."""
    version = platform.python_version()
    assert re.search(r"\.venv-python-([\d.]+)|$", sys.prefix)[1] in (None, version)
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in (".venv", f".venv-python-{version}"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\n[ "$2" = - ] && echo yes || echo "$0"\n')
        python.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = tmp_path / "bare" / "bin"
    for words, name in (
        ([f"PYTHON={bare}/python3"], f".venv-python-{version}"),
        (["-u", "PYTHON", f"PATH={bare}:{os.environ['PATH']}"], ".venv"),
    ):
        output = finish(start(["env", *words, "bash", tmp_path / "run.sh", "plan"], tmp_path))
        assert output.split() == [f"{tmp_path}/{name}/bin/python"]


class CountingStore:
    """A store that counts what is read."""

    def __init__(self):
        self.store, self.reads = dist.HashStore(), []

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get(self, key):
        value = self.store.get(key)
        self.reads.append(len(value))
        return value


@pytest.mark.parametrize("ranks", [8, 16, 32])
@pytest.mark.parametrize("other", [None, 0, 5])
def test_ranks_compare_settings_before_they_connect(ranks, other):
    """A rank reads the hash of rank 0, and whether all are equal; if not, all say the same."""
    store = CountingStore()
    settings = [{"--seed": 1, "text": "x" * 9999} | ({"--seed": 2} if rank == other else {})
                for rank in range(ranks)]
    with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
        found = set(pool.map(lambda rank: launch.find_difference(
            store, rank, ranks, settings[rank]), range(ranks)))
    (sentence,) = found
    if other is None:
        assert sentence == "" and len(store.reads) == 2 * ranks - 1
        assert sum(store.reads) == 64 * (ranks - 1) + len("found ") * ranks
    else:
        assert re.fullmatch(r"--seed is \d on rank 0 and \d on rank \d+: .*", sentence)


def test_the_command_that_run_sh_shows(tmp_path):
    """It runs as it stands; arguments arrive as they are."""
    (tmp_path / "show.py").write_text(SHOW)
    words = ["PYTHONPATH", "two words", "$HOME", "--max-restarts=9"]
    output = finish(start([*RUN, "show.py", *words], tmp_path, NPROC="2", PYTHONPATH="mine"))
    expected = [[rank, "2", "127.0.0.1", f"{ROOT}:mine", *words[1:]] for rank in "01"]
    assert shown(output) == expected, output
    command = output.splitlines()[0].removeprefix("+ ")
    assert len(output.splitlines()) == 3
    again = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True,
                           timeout=PATIENCE)
    assert shown(again.stdout) == expected


@pytest.mark.parametrize("launcher", sampled(["python", "torchrun", "run.sh"], ["run.sh"]))
def test_a_copied_script_uses_the_common_beside_it(tmp_path, launcher):
    """Started from another folder, and also where this repository's is on the path."""
    (tmp_path / "copy" / "common").mkdir(parents=True)
    (tmp_path / "copy" / "common" / "__init__.py").touch()
    (tmp_path / "copy" / "common" / "own.py").write_text("print('its own')\n")
    (tmp_path / "copy" / "script.py").write_text("import common.own\n")
    (tmp_path / "work").mkdir()
    command = {"python": [sys.executable], "torchrun": TORCHRUN, "run.sh": RUN}[launcher]
    process = start([*command, tmp_path / "copy" / "script.py"], tmp_path / "work",
                    PYTHONPATH=str(ROOT))
    assert "its own\n" in finish(process) and process.returncode == 0


def test_nothing_imports_from_the_working_folder(tmp_path):
    for name in ("json", "re", "socket", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the working folder')\n")
    (tmp_path / "show.py").write_text("print('started')\n")
    output = finish(start([*RUN, "prepare", "--help"], tmp_path))
    assert output.startswith("usage: python -m tools.prepare "), output
    output = finish(start([*RUN, "show.py"], tmp_path, NNODES="1"))
    assert output.endswith("started\n"), output


@thorough
def test_on_one_machine_nothing_listens_beyond_loopback(tmp_path, corpus):
    process = start([*RUN, "ddp.py", *ENDLESS.split(), "--data", corpus], tmp_path, NPROC="2")
    found = set()
    while not has_logged(tmp_path / "runs" / "ddp"):  # from the first moment to the loop
        assert process.poll() is None
        found |= listeners([process.pid, *children(process.pid)])
        time.sleep(0.02)
    process.terminate()
    finish(process)
    assert found == {"0100007F"}  # 127.0.0.1


@pytest.mark.parametrize("name, to", sampled(
    [("SIGTERM", "run.sh"), ("SIGHUP", "run.sh"), ("SIGUSR1", "all"), ("SIGINT", "all")],
    [("SIGINT", "all")],
))
def test_a_signal_lets_run_sh_save(tmp_path, endless, name, to):
    """To run.sh alone, or also to its processes at once: all end with status 0 and one line."""
    process = endless(*RUN, "ddp.py", MAX_RESTARTS="3")
    for pid in [process.pid, *(children(process.pid) if to == "all" else [])]:
        os.kill(pid, getattr(signal, name))
    output = finish(process)
    assert process.returncode == 0, output
    lines = [line for line in output.splitlines() if "steps/s" not in line and line.strip()]
    assert lines[-1].startswith("stopped after step") and "saved" in lines[-1]
    assert len(lines) == 6, output  # the command, four lines of the start, and the last one
    assert has_saved(tmp_path)


@thorough
def test_a_terminal_that_closes_lets_run_sh_save(tmp_path, corpus):
    """As when ssh ends: all get SIGHUP, and what they print can go nowhere."""
    terminal, end = os.openpty()
    command = shlex.join([*RUN, "ddp.py", *ENDLESS.split(), "--data", corpus])
    process = start(["bash", "-c", f"exec {command} >/dev/tty 2>&1"], tmp_path, end, NPROC="2",
                    MAX_RESTARTS="3")
    os.close(end)
    wait_until(lambda: has_logged(tmp_path / "runs" / "ddp"))
    os.close(terminal)
    finish(process)
    assert process.returncode == 0 and has_saved(tmp_path)


@thorough
def test_a_second_signal_ends_run_sh_at_once(tmp_path, endless):
    """Also if a rank has stopped, so that the others cannot save."""
    process = endless(*RUN, "ddp.py", MAX_RESTARTS="3")
    os.kill(children(process.pid)[-1], signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    finish(process)
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not left_over(tmp_path))


@thorough
@pytest.mark.parametrize("launcher, name", [
    ("run.sh", "SIGKILL"), ("torchrun", "SIGUSR1"), ("torchrun", "SIGTERM"),
])
def test_processes_that_lose_their_launcher_save_and_end(tmp_path, endless, launcher, name):
    process = endless(*{"run.sh": RUN, "torchrun": TORCHRUN}[launcher], ROOT / "ddp.py")
    os.kill(process.pid, getattr(signal, name))
    wait_until(lambda: not left_over(tmp_path))
    assert "saved: the same command" in finish(process) and has_saved(tmp_path)


@thorough
def test_a_script_without_torchrun_outlives_its_parent(tmp_path, corpus):
    command = shlex.join([sys.executable, f"{ROOT}/single.py", *OPTIONS.split(), "--data", corpus])
    finish(start(["bash", "-c", f"{command} >log 2>&1 & sleep 1"], tmp_path))
    wait_until(lambda: "final loss" in (tmp_path / "log").read_text())


@thorough
def test_a_killed_process(tmp_path, corpus):
    """All start again and resume. When no restart is left, one line says which process was killed,
    and one what that did to the other."""
    options = [*ENDLESS.split(), "--save-every", "2", "--data", corpus]
    process = start([*RUN, "ddp.py", *options], tmp_path, NPROC="2", MAX_RESTARTS="1")
    out, dead, logged = tmp_path / "runs" / "ddp", [], 0
    for _ in range(2):
        wait_until(lambda: has_logged(out) and len(history(out)) > logged
                   and len(set(children(process.pid)) - {*dead}) == 2)
        dead, logged = children(process.pid), len(history(out)) + 4
        os.kill(dead[-1], signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1 and "resuming after step" in output, output
    first, *others = [line for line in output.splitlines() if "error: " in line][-2:]
    assert "a collective of rank 0 failed, since another process has ended" in first, output
    assert others == ["run.sh: error: rank 1 was ended by SIGKILL"], output
    assert "Traceback" not in output and not left_over(tmp_path)


FAST = ("ddp.py --lr fast", "slow(0, 20)", "argument --lr: invalid number value: 'fast'")


@pytest.mark.parametrize("launcher, script, inject, message", sampled([
    ("run.sh", *FAST), ("torchrun", *FAST),
    ("run.sh", "ddp.py --backend nccl", "", "--backend nccl needs a GPU for each process"),
], [("run.sh", *FAST)]))
def test_an_error_is_one_line(tmp_path, launcher, script, inject, message):
    """Also if the rank that finds it is much faster than rank 0, which torchrun then ends."""
    command = {"run.sh": RUN, "torchrun": TORCHRUN}[launcher]
    process = start([*command, ROOT / "tests" / "support" / "inject.py", *script.split()], tmp_path,
                    NPROC="2", PYTHONPATH=str(ROOT), INJECT=inject)
    lines = finish(process).splitlines()
    assert process.returncode == 1
    (line,) = [line for line in lines if ".py: error: " in line]
    assert message in line
    if launcher == "run.sh":
        assert [line for line in lines[1:] if line.strip()] == [line], lines


@pytest.mark.parametrize("environment, message", [
    ({"NODE_RANK": "1"}, "NODE_RANK is 1 but NNODES is not set"),
    *[({"NNODES": "2", **more}, "NNODES is 2: set NODE_RANK, the number of this machine ")
      for more in ({}, {"NODE_RANK": "0"}, {"MASTER_ADDR": "127.0.0.1"})],
    ({"NNODES": "2", "NODE_RANK": "x", "MASTER_ADDR": "127.0.0.1"}, "NODE_RANK is 'x': it must be"),
    ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "no..host"},
     "MASTER_ADDR is no..host: this machine cannot resolve that name"),
])
def test_settings_that_cannot_be(tmp_path, environment, message):
    process = start([*RUN, "ddp.py"], tmp_path, **environment)
    (line,) = [line for line in finish(process).splitlines() if not line.startswith("+ ")]
    assert process.returncode == 1 and line.startswith("run.sh: error: ") and message in line


# Processes that somebody starts without a launcher


@pytest.fixture
def two_ranks(tmp_path, corpus):
    """Start the two ranks of ddp.py with their options, one ``late`` seconds later. Returns the
    statuses and the outputs."""
    def two_ranks(*options, first=0, late=0):
        with free_port() as port:
            processes = {}
            for rank in (first, 1 - first):
                processes[rank] = start(
                    [sys.executable, ROOT / "ddp.py", *OPTIONS.split(), "--data", corpus,
                     *options[rank].split()], tmp_path, RANK=str(rank), LOCAL_RANK=str(rank),
                    WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                time.sleep(late)
            outputs = [finish(processes[rank]) for rank in (0, 1)]
        return [processes[rank].returncode for rank in (0, 1)], outputs

    return two_ranks


@pytest.mark.parametrize("first", sampled([0, 1], [0]))
def test_a_rank_that_starts_late(two_ranks, tmp_path, expected, first):
    statuses, outputs = two_ranks("", "", first=first, late=4)
    assert statuses == [0, 0], outputs
    assert is_near(tmp_path / "runs" / "ddp", expected)


@pytest.mark.parametrize("wrong", sampled([0, 1], [1]))
def test_a_rank_that_fails_before_it_connects(two_ranks, wrong):
    """It says why; the other one waits for it, and then says so too."""
    options = ["--timeout 3", "--timeout 3"]
    options[wrong] += " --lr fast"
    statuses, outputs = two_ranks(*options)
    assert statuses == [1, 1] and "Traceback" not in "".join(outputs), outputs
    (line,) = outputs[wrong].splitlines()[wrong:]  # of a rank that is not 0 an empty line is first
    assert line == "ddp.py: error: argument --lr: invalid number value: 'fast'"
    line = outputs[1 - wrong].splitlines()[-1]
    assert line.startswith(f"ddp.py: error: rank {1 - wrong} cannot connect to the others through ")
    assert "all ranks must start within --timeout seconds" in line


# Several machines, by hand: here one machine plays both


@thorough
def test_all_machines_start_again_after_a_kill(tmp_path, corpus, expected):
    """A process of the second machine is killed: both resume, and end as if undisturbed."""
    options = [*OPTIONS.split(), "--save-every", "2", "--data", corpus]
    out = tmp_path / "runs" / "ddp"
    with free_port() as port:
        processes = [start([*RUN, "ddp.py", *options], tmp_path, NNODES="2", NODE_RANK=str(rank),
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), MAX_RESTARTS="1")
                     for rank in (0, 1)]
        wait_until(lambda: out.exists() and list_checkpoints(out))
        os.kill(children(processes[1].pid)[-1], signal.SIGKILL)
        outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "resuming after step" in outputs[0] and is_near(out, expected)
    # The machines keep their order.
    assert "final loss" in outputs[0] and "final loss" not in outputs[1]


# Over ssh


SSHD = """Port 22
HostKey {0}/key
AuthorizedKeysFile {0}/key.pub
PidFile none
StrictModes no
UsePAM no
SetEnv PYTHON={1} NPROC=1 OMP_NUM_THREADS=1
"""


def sh(line, **options):
    return subprocess.run(line, shell=True, check=True, capture_output=True, text=True,
                          timeout=PATIENCE, **options).stdout.strip()


def needs_root_and(*commands):
    """Returns the paths of the commands; skips the test without them."""
    paths = [shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") for name in commands]
    if os.getuid() != 0 or not all(paths):
        pytest.skip(f"needs root, and {', '.join(commands)}")
    return paths


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two hosts, 10.77.0.10 and 10.77.0.11. Returns the prefix of a command on the first one, and
    the folder of an ``ssh`` that leads to both."""
    _, sshd, ssh, _ = needs_root_and("ip", "sshd", "ssh", "ssh-keygen")
    folder = tmp_path_factory.mktemp("machines")
    names, hosts = [f"host{rank}-{os.getpid()}" for rank in (0, 1)], ["10.77.0.10", "10.77.0.11"]
    daemons = []
    try:
        try:
            for name in names:
                sh(f"ip netns add {name} && ip -n {name} link set lo up")
            sh(f"ip -n {names[0]} link add wire type veth peer name wire netns {names[1]}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        sh(f"ssh-keygen -q -t ed25519 -N '' -f {folder}/key && mkdir -p /run/sshd")
        (folder / "sshd_config").write_text(SSHD.format(folder, sys.executable))
        for name, host in zip(names, hosts):
            sh(f"ip -n {name} addr add {host}/24 dev wire && ip -n {name} link set wire up")
            daemons.append(subprocess.Popen(["ip", "netns", "exec", name, sshd, "-D", "-f",
                                             folder / "sshd_config", "-E", folder / "log"]))
        key = (folder / "key.pub").read_text()
        (folder / "known").write_text("".join(f"{host} {key}" for host in hosts))
        (folder / "ssh").write_text(f"#!/bin/sh\nexec {ssh} -F none -o BatchMode=yes "
                                    f'-i {folder}/key -o UserKnownHostsFile={folder}/known "$@"\n')
        (folder / "ssh").chmod(0o755)
        prefix = ["ip", "netns", "exec", names[0]]
        for host in hosts:
            wait_until(lambda: not subprocess.call([*prefix, folder / "ssh", host, "true"],
                                                   stderr=subprocess.DEVNULL))
        yield types.SimpleNamespace(prefix=prefix, folder=folder)
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        for name in names:
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True,
                                      text=True).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.call(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


@pytest.fixture
def typed(machines, tmp_path, corpus):
    """Type the loop of docs/launching.md into a shell of the first host, with the names of the
    hosts here and the options of a short run. Returns the shell, and what one types into it."""
    page = (ROOT / "docs" / "launching.md").read_text()
    lines = re.search(r"\*\*Over ssh\*\*(?s:.*?)\n\n((?:    .*\n)+)", page)[1]
    assert len(lines.splitlines()) == 4

    def typed(options, **changes):
        terminal, end = os.openpty()
        changes = {"host": "10.77.0.1", "run.sh fsdp.py --steps 1000 --out /shared/run":
                   f"{ROOT}/run.sh ddp.py {options} --data {corpus}", **changes}
        path = f"{machines.folder}:{os.environ['PATH']}"
        shell = start([*machines.prefix, "bash", "--norc", "--noediting", "-i"], tmp_path, end,
                      PATH=path)
        os.close(end)
        text = lines
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        os.write(terminal, text.encode())
        return shell, lambda text: os.write(terminal, text.encode())

    return typed


@thorough
def test_two_hosts_over_ssh(typed, tmp_path, expected):
    shell, write = typed(OPTIONS)
    write("exit\n")
    output = finish(shell)
    assert shell.returncode == 0, output
    assert is_near(tmp_path / "runs" / "ddp", expected)
    assert output.count("tools/support/torchrun.py --nnodes=2") == 2 and not left_over(tmp_path)
    # This machine's own name does not lead from one host to the other.
    assert output.count(" GLOO_SOCKET_IFNAME=wire ") == 2


@thorough
def test_ctrl_c_saves_and_ends_the_runs_of_all_hosts(typed, tmp_path):
    shell, write = typed(ENDLESS)
    wait_until(lambda: has_logged(tmp_path / "runs" / "ddp"))
    write("\x03")
    wait_until(lambda: left_over(tmp_path) == ["bash\0--norc\0--noediting\0-i\0"])
    write("exit\n")
    output = finish(shell)
    assert shell.returncode == 130 and "Traceback" not in output, output
    assert has_saved(tmp_path)


@thorough
def test_a_host_that_fails_ends_the_runs_of_all_hosts(typed, tmp_path):
    shell, write = typed(ENDLESS, **{"0 1": "0 9"})
    write("exit\n")
    output = finish(shell)
    assert shell.returncode == 255 and "10.77.0.19" in output, output
    wait_until(lambda: not left_over(tmp_path))


# As a Slurm job


SLURM = """ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName={host}-b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES
"""


SRUN = ["srun", "--nodes=2"]


@pytest.fixture(scope="module")
def ports():
    with free_port() as one, free_port() as two, free_port() as three:
        yield one, two, three


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, ports):
    """A Slurm of two nodes, both on this machine. Gives the variable by which commands find it."""
    munged, slurmctld, slurmd, _ = needs_root_and("munged", "slurmctld", "slurmd", "sbatch")
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname().partition(".")[0]
    conf, nodes = folder / "slurm.conf", [host, f"{host}-b"]
    conf.write_text(SLURM.format(host=host, folder=folder, ports=ports))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir()
    environment = {"SLURM_CONF": str(conf)}
    try:
        sh(f"{munged} --force --key-file={folder}/munge.key --socket={folder}/munge.socket "
           f"--pid-file={folder}/munged.pid --log-file={folder}/munged.log "
           f"--seed-file={folder}/seed")
        sh(f"{slurmctld} -f {conf}")
        for node in nodes:
            sh(f"{slurmd} -f {conf} -N {node}")
        wait_until(lambda: sh("sinfo --noheader --format=%D --states=idle",
                              env=os.environ | environment) == "2")
        yield environment
    finally:
        pids = [int(path.read_text()) for path in folder.glob("*.pid")]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.fixture
def job(slurm, tmp_path, corpus):
    """Submit a job, wait for its end, and return what it has printed. ``meanwhile`` gets its number
    when it has logged a few steps."""
    environment = ENVIRONMENT | slurm

    def job(command, options, meanwhile=None):
        words = [*command, *options.split(), "--data", corpus, "--out", str(tmp_path / "out")]
        number = sh(shlex.join(["sbatch", "--parsable", "--nodes=2", f"--output={tmp_path}/log",
                                *words]), cwd=ROOT, env=environment)
        if meanwhile:
            wait_until(lambda: has_logged(tmp_path / "out"))
            sh(meanwhile.format(number), env=environment)

        def state():
            shown = sh(f"scontrol show job {number}", env=environment)
            return shown.split("JobState=")[1].split()[0]

        wait_until(lambda: state() not in ("PENDING", "RUNNING", "COMPLETING"))
        output = (tmp_path / "log").read_text()
        assert state() == "COMPLETED", output
        return output

    return job


@thorough
def test_a_batch_job(job, tmp_path, expected):
    output = job(["run.sh", "ddp.py"], OPTIONS)
    assert is_near(tmp_path / "out", expected)
    assert output.startswith("+ srun --ntasks-per-node=1 ")


@thorough
def test_a_signal_of_slurm_lets_all_save(job):
    scancel = "scancel --signal=USR1 --batch {}"  # as --signal=B:USR1@120 sends it
    assert "saved: the same command" in job(["run.sh", "ddp.py"], ENDLESS, scancel)


@thorough
def test_srun_starts_torchrun(slurm, tmp_path, corpus, expected):
    """Once on each machine. What would train alone, or twice on a machine, is refused."""
    options = [*OPTIONS.split(), "--data", corpus, "--out", tmp_path / "out"]
    with free_port() as port:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                    "--nproc-per-node=1", "--rdzv-backend=c10d",
                    f"--rdzv-endpoint=localhost:{port}"]
        process = start([*SRUN, "--ntasks=2", *torchrun, ROOT / "ddp.py", *options], tmp_path,
                        GLOO_SOCKET_IFNAME="lo", **slurm)
        output = finish(process)
    assert process.returncode == 0, output
    assert is_near(tmp_path / "out", expected)
    for tasks, command, words in [
        (2, [sys.executable, ROOT / "ddp.py"], "SLURM_STEP_NUM_TASKS is 2 but RANK is not set"),
        (2, [sys.executable, ROOT / "single.py"], "each process would train alone; start"),
        (4, [*RUN, "ddp.py"], "srun starts this 4 times on 2 machines: start it once on each"),
    ]:
        process = start([*SRUN, f"--ntasks={tasks}", *command, *options], tmp_path, **slurm)
        assert words in finish(process) and process.returncode


# Variables of other launchers


def test_the_gpu_of_a_process(monkeypatch):
    """From LOCAL_RANK; never the first one for all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)

    def number(share=False, **environment):
        monkeypatch.setattr(os, "environ", environment)
        return launch.pick_device("auto", share).index

    assert number() == 0 and number(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1") == 1
    with pytest.raises(SettingError, match="RANK is set but not LOCAL_RANK"):
        number(RANK="5", WORLD_SIZE="8")
    with pytest.raises(SettingError, match="LOCAL_RANK 3 has no GPU, this machine has 2"):
        number(RANK="3", WORLD_SIZE="4", LOCAL_RANK="3")
    assert number(True, RANK="3", WORLD_SIZE="4", LOCAL_RANK="3") == 1


def test_gpus_that_an_old_driver_hides(monkeypatch):
    """NVML counts them, the CUDA runtime cannot use them: it must not become a run on the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(SettingError, match="has 8 GPUs, but torch .* cannot use them"):
        launch.pick_device("auto")
    assert launch.pick_device("cpu").type == "cpu"


@on_ranks(4)
def test_groups_of_a_mesh_wait_as_long_as_they_are_told(rank):
    """Of each pair one rank is silent: the other one does not wait 30 minutes, torch's default.
    (A pair of two ranks in all would have the group of all, which must live on.)"""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group = mesh.get_group("cp")
    dist.all_reduce(torch.ones(1), group=group)  # they are connected
    launch.set_timeout(mesh, 1)
    try:
        if rank % 2 == 0:
            dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        assert "imed out" in str(error) or "timeout" in str(error), error
    else:
        assert rank % 2, f"rank {rank} went on alone"
        time.sleep(5)


def test_deterministic_sets_what_gpus_need(monkeypatch):
    """A run with it: test_same_run.py."""
    monkeypatch.setattr(os, "environ", {})
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        launch.make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert os.environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_the_variables_of_accelerate(run, corpus, expected):
    """It sets those of torchrun; ACCELERATE_* beside them change nothing."""
    env = {"LOCAL_WORLD_SIZE": None, "ACCELERATE_USE_CPU": "true"}
    assert run("ddp.py", 2, f"{OPTIONS} --data {corpus}", env=env).curve() == expected
