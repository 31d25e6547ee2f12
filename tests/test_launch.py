"""Starting and stopping: run.sh on one machine, by hand on several, and as a Slurm job.

In the default sample Slurm's programs are pretended. With --all a real one runs, with two nodes on
this machine. It needs root and packages (see .ci/run); without these its test is skipped, and says
so.
"""

import concurrent.futures
import contextlib
import datetime
import importlib
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import ddp
from common import launch, torch_versions
from common.errors import SettingError
from common.options import option_parser, parse_options
from common.services.checkpoint_files import list_checkpoints
from tests.support.on_ranks import on_ranks
from tests.support.processes import BARE, PATIENCE, ROOT, SMALL, TOOLS, Result, edited, free_port
from tests.support.sample import sampled, thorough
from tests.test_refusals import in_order
from tests.test_same_run import furthest

OPTIONS = f"{SMALL} --steps 20 --log-every 1 --dtype float64 --save-every 0"
ENDLESS = f"{OPTIONS} --steps 100000 --save-every 50000"
RUN = ["bash", str(ROOT / "run.sh")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
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
    try:
        return process.communicate(timeout=PATIENCE)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def sh(line, **options):
    return subprocess.run(line, shell=True, check=True, capture_output=True, text=True,
                          timeout=PATIENCE, **options).stdout.strip()


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


def listeners(pids):
    """The addresses at which these processes listen, in the hexadecimal form of /proc/net/tcp."""
    sockets = {os.readlink(link)
               for pid in pids for link in pathlib.Path(f"/proc/{pid}/fd").glob("*")
               if link.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6")
             for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]]
    return {line[1].split(":")[0] for line in lines
            if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


def start_endless(launcher, folder, corpus, restarts):
    """Start a run of ddp.py that does not end, and wait until it has logged a few steps."""
    words = [*launcher, ROOT / "ddp.py", *ENDLESS.split(), "--data", corpus]
    process = start(words, folder, NPROC="2", MAX_RESTARTS=restarts)
    wait_until(lambda: logged(folder / "runs" / "ddp") > 3)
    return process


def has_saved(folder):
    """Whether a run of ddp.py is over, and has left one checkpoint."""
    return len(list_checkpoints(folder / "runs" / "ddp")) == 1 and not left_over(folder)


# One machine


def write_program(path, text):
    """Of the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_restart_does_not_read_what_dead_processes_have_stored(monkeypatch):
    """torchrun's store outlives its processes."""
    shared = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(shared, 0, 1)]))
    for count in "01":
        monkeypatch.setattr(os, "environ", {
            "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": count})
        store = launch._meet(datetime.timedelta(seconds=1))
        assert not store.check(["address"])
        store.set("address", count)


@pytest.mark.parametrize("local, found", [("1", {"0100007F"}), ("0", {"0" * 32})])
def test_the_store_of_one_machine_listens_on_loopback(monkeypatch, local, found):
    """Also without run.sh, as in check. Of several machines (there LOCAL_WORLD_SIZE is smaller)
    others must reach it."""
    with free_port() as port:
        monkeypatch.setattr(os, "environ", {
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port)})
        before = listeners([os.getpid()])
        store = launch._meet(datetime.timedelta(seconds=5))
        store.set("a", "b")
        assert store.get("a") == b"b" and listeners([os.getpid()]) - before == found


PRETENDED = """case "$1 $2" in  # a Python: it has the requirements, and shows how it is called
  "-P -") echo yes;; "-P -c") echo 10.1.2.3;; -c*) echo yes 3.11.9;; *) echo $PYTHONPATH "$@";;
esac"""
SHOW = """import os, sys
names = "RANK", "WORLD_SIZE", "MASTER_ADDR", "PYTHONPATH"
os.write(1, f"{[*map(os.environ.get, names), *sys.argv[1:]]}\\n".encode())
sys.exit(3)
"""


def test_what_run_sh_starts(tmp_path):
    """Arguments arrive as they are, and the command that it shows can be typed. A script uses the
    common/ beside it, or that of this repository. Nothing imports from the working folder. Without
    GPUs and NPROC there are two processes. Here they fail."""
    for name in ("json", "re", "socket", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the working folder')\n")
    words = ["two words", "$HOME", "--max-restarts=9"]
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "show.py").write_text(SHOW)
    command = [*RUN, "code/show.py", *words]
    process = start(command, tmp_path, NPROC="", PYTHONPATH="mine")
    shown, *lines = finish(process).splitlines()
    assert process.returncode == 1
    assert sorted(lines) == [
        str([rank, "2", "127.0.0.1", f"{ROOT}:mine", *words]) for rank in "01"]
    assert shlex.split(shown)[-4:] == ["code/show.py", *words]
    (tmp_path / "code" / "common").mkdir()
    write_program(tmp_path / "python", PRETENDED)
    for words, path, expected in [
        (command[2:], "mine", f"-P {ROOT}/tools/support/torchrun.py --nproc-per-node=1 "),
        *[([tool, "--help"], f"{ROOT}:mine", f"-P -m {TOOLS[tool]} --help") for tool in TOOLS],
        (["single.py", "--lr", "1"], "mine", f"{ROOT}/single.py --lr 1"),
        (["test", "-k", "cp"], "mine", "-m pytest -k cp"),
    ]:
        output = finish(start([*RUN, *words], tmp_path, PYTHON=f"{tmp_path}/python",
                              PYTHONPATH="mine"))
        assert f"{output.splitlines()[-1]} ".startswith(f"{path} {expected}"), output


@pytest.mark.parametrize("requirement, enough", [
    ("numpy>=1.26,<3", True), ("numpy>=3,<4", False), ("numpy>=0.1,<{}", False),
    ("no-such>=1,<2", False),
])
def test_what_run_sh_requires(tmp_path, requirement, enough):
    """Of a Python, before it takes it; below the second version."""
    program = (ROOT / "run.sh").read_text().split("<<'PYTHON'\n")[1].split("\nPYTHON\n")[0]
    (tmp_path / "needs").write_text(requirement.format(".".join(np.__version__.split(".")[:2])))
    done = subprocess.run([sys.executable, "-P", "-", tmp_path / "needs", "test"], input=program,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert (done.stdout == "yes\n") == enough


def test_what_would_mislead_python_or_bash(tmp_path):
    """Folders by our names, installed elsewhere; variables; a colon, which PYTHONPATH cannot hold;
    line ends of Windows."""
    misleading = {"PYTHONSAFEPATH": "1", "PYTHONOPTIMIZE": "2", "PYTHONPATH": str(tmp_path),
                  "CDPATH": f"{tmp_path}:{tmp_path}/none"}
    for name in "tools", "common", ROOT.name, "code":
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    for name in "beside", "alone":
        script = tmp_path / "code" / name / "mine.py"
        script.parent.mkdir()
        script.write_text("import common.errors  # start_process(\nprint(common.__path__)")
    (tmp_path / "code" / "beside" / "common").symlink_to(ROOT / "common")
    (tmp_path / "linked.sh").symlink_to(ROOT / "run.sh")
    for words, expected in (
        ("prepare --help", "python -m tools.prepare"),
        (f"{tmp_path}/code/beside/mine.py", f"['{tmp_path}/code/beside/common']\n"),
        (f"{tmp_path}/code/alone/mine.py", f"['{ROOT}/common']\n"),
    ):
        for run_sh in (f"{ROOT.name}/run.sh", tmp_path / "linked.sh"):
            output = finish(start(["bash", run_sh, *words.split()], ROOT.parent, **misleading))
            assert expected in output, output
    (tmp_path / "a:b").mkdir()
    for name in "run.sh", "requirements.txt":
        shutil.copy(ROOT / name, tmp_path / "a:b")
    (line,) = finish(start(["bash", "a:b/run.sh", "prepare", "--help"], tmp_path)).splitlines()
    assert "a:b, has a colon" in line
    gone = 'mkdir gone; cd gone; rmdir ../gone; "$@"'
    *_, line = finish(start(["bash", "-c", gone, "", *RUN, "ddp.py"], tmp_path)).splitlines()
    assert line.startswith("run.sh: error: the working folder was removed")
    names = sh("git ls-files", cwd=ROOT)
    ends = sh("git check-attr eol --stdin", cwd=ROOT, input=names).splitlines()
    assert len(ends) > 100 and all(line.endswith(": eol: lf") for line in ends)


NODES = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("command, environment, words", [
    ("README.md", {}, "README.md is no Python script ... ddp.py"),
    ("ddp.py", {"NNODES": "0"}, "NNODES is '0' ... at least 1"),
    ("ddp.py", {"NPROC": "0"}, "NPROC is '0' ... at least 1"),
    ("ddp.py", NODES | {"NODE_RANK": ""}, "NNODES is 2: set NODE_RANK ... MASTER_ADDR"),
    ("ddp.py", NODES | {"NODE_RANK": "2"}, "NODE_RANK is 2 and NNODES is 2"),
    ("ddp.py", {"NODE_RANK": "1"}, "NODE_RANK is 1 ... NNODES"),
    ("ddp.py", {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
     "PET_NNODES PET_NODE_RANK: these are variables of torchrun ... start by torchrun in place of"),
    ("ddp.py", NODES | {"MASTER_ADDR": "no-such.invalid"}, "MASTER_ADDR is no-such.invalid"),
    ("other/fsdp.py", {}, "other/fsdp.py imports common.data of this ... is another one: copy"),
    ("other/single.py", {}, "other/single.py imports common.data of this ... docs/copying.md"),
    ("ddp.py", {"MAX_RESTARTS": "x"}, "MAX_RESTARTS is 'x' ... at least 0"),
    ("nothing.py", {}, "nothing.py: no such script"), ("", {}, "say what to run"),
    ("single.py", {"NPROC": "4"}, "single.py is one process: unset NPROC"),
    ("ddp.py", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_STEP_NUM_NODES": "2"}, "4 times on 2 machines ... --ntasks-per-node=1"),
])
def test_what_run_sh_refuses(tmp_path, command, environment, words):
    (tmp_path / "other" / "common").mkdir(parents=True)  # of somebody else
    for name in "fsdp.py", "single.py":
        shutil.copy(ROOT / name, tmp_path / "other")
    process = start([*RUN, *command.split()], tmp_path, **environment)
    (line,) = finish(process).splitlines()
    assert line.startswith("run.sh: error: ") and process.returncode == 1 and in_order(words, line)


@pytest.mark.parametrize("launcher, name", sampled(SIGNALS := [
    # run.sh ends with status 0 and one line. Ctrl-C goes to its processes too. Slurm sends SIGUSR1
    # before the time limit, a terminal that closes SIGHUP. Those of a second count as one.
    (RUN, "SIGUSR1 SIGINT SIGTERM SIGHUP"), (RUN, "SIGINT"), (RUN, "SIGTERM"), (RUN, "SIGHUP"),
    (RUN, "SIGKILL"), (TORCHRUN, "SIGTERM"),  # these launchers die, or fail
], SIGNALS[:1]))
def test_a_signal_to_a_launcher_lets_its_processes_save(tmp_path, corpus, launcher, name):
    process = start_endless(launcher, tmp_path, corpus, "3")
    listening = listeners([process.pid, *children(process.pid)])
    for each in name.split():
        for pid in [process.pid, *(children(process.pid) if each == "SIGINT" else [])]:
            os.kill(pid, getattr(signal, each))
    wait_until(lambda: not left_over(tmp_path))
    output = finish(process)
    assert "saved: the same command" in output and has_saved(tmp_path), output
    assert launcher == TORCHRUN or listening == {"0100007F"}  # nothing beyond 127.0.0.1
    if launcher == RUN and name != "SIGKILL":
        lines = [line for line in output.splitlines() if "steps/s" not in line and line.strip()]
        assert len(lines) == 6, output  # the command, four lines of the start, and the last one
        assert process.returncode == 0 and lines[-1].startswith("stopped after step")


@thorough
def test_a_killed_process_is_named(tmp_path, corpus):
    """And what that did to the other one."""
    process = start_endless(RUN, tmp_path, corpus, "0")
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    output = finish(process)
    first, second = [line for line in output.splitlines() if "error: " in line]
    assert "another process has ended" in first and "rank 1 was ended by SIGKILL" in second, output
    assert process.returncode == 1 and "Traceback" not in output and not left_over(tmp_path)


@thorough
def test_a_run_that_began_from_a_checkpoint_restarts(server, tmp_path, corpus):
    """Killed before its first save, it begins there again: started by torchrun, and by hand."""
    server.run("ddp.py", 2, f"{OPTIONS} --save-every 2 --steps 2 --data {corpus}", folder=tmp_path,
               out="first")
    words = [*RUN, ROOT / "ddp.py", *ENDLESS.split(), "--data", corpus, "--out", "second",
             "--from", "first/step-00000002"]
    out, starts = tmp_path / "second", []

    def started_again():
        """It has logged two steps since run-id was written, and was not seen before."""
        files = [out / name for name in ("run-id", "metrics.jsonl")]
        if all(path.exists() for path in files) and logged(out) > 1:
            began, last = (path.stat().st_mtime_ns for path in files)
            text = files[0].read_text()
            if last > began and text not in starts:
                starts.append(text)
                return True

    for restarts in "10":
        process = start(words, tmp_path, NPROC="2", MAX_RESTARTS=restarts)
        wait_until(started_again)
        if restarts == "1":
            os.kill(children(process.pid)[-1], signal.SIGKILL)
            wait_until(started_again)
            for pid in [process.pid, *children(process.pid)]:
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not left_over(tmp_path))
            finish(process)
            assert not list_checkpoints(out)
    process.terminate()
    output = finish(process)
    assert process.returncode == 0 and "starting from" in output, output
    assert Result([0], "", out).history[0]["step"] == 3 and len(list_checkpoints(out)) == 1


@thorough
def test_killed_tests_leave_no_rank(tmp_path):
    """Also a rank that stands still: it would hold its GPU."""
    code = ("from tests.support.processes import ProcessServer; server = ProcessServer(); "
            "server.start(); server.run('ddp.py', 2, sys.argv[1], folder=sys.argv[2], "
            "inject='at(3, signal_self, \"SIGSTOP\", on=1)')")
    tests = start([sys.executable, "-c", f"import sys; {code}", ENDLESS, tmp_path], ROOT)
    wait_until(lambda: logged(tmp_path / "out") >= 2)
    assert len(left_over(tmp_path)) >= 2
    tests.kill()
    wait_until(lambda: not left_over(tmp_path))


@thorough
def test_an_error_is_one_line(tmp_path):
    """Also if the rank that finds it is much faster than rank 0, which torchrun then ends, and
    after restarts."""
    copy = edited(tmp_path, "ddp.py", ("import torch\n", "import os, time, torch\n"
                                       "time.sleep(20 * (os.environ['RANK'] == '0'))\n"))
    process = start([*RUN, copy, "--lr", "fast"], tmp_path, NPROC="2", MAX_RESTARTS="1")
    _, line = [line for line in finish(process).splitlines() if line.strip()]
    assert process.returncode == 1 and "ddp.py: error: " in line
    assert "--lr" in line and "'fast'" in line


# In a process that goes on, such as a notebook


def process_state():
    """What a run might change in its process."""
    return (
        dict(os.environ), [*map(signal.getsignal, sorted(signal.valid_signals()))],
        torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled(),
        torch._dynamo.config.optimize_ddp, distributed_c10d.default_pg_timeout,
        distributed_c10d.default_pg_nccl_timeout, warnings.filters[:], dist.is_initialized(),
        resource.getrlimit(resource.RLIMIT_NOFILE), torch.UntypedStorage.resize_,
        is_in_torch_dispatch_mode(), [*torch.nn.modules.module._global_forward_hooks],
    )


def test_what_a_run_changes_in_its_process_it_puts_back(tmp_path, corpus, monkeypatch, capsys):
    """Whether a signal stops it, an error in the counted step ends it, or it ends by itself. The
    next run trains all of its steps; in another thread, where Python allows no handlers, too.
    While DDP runs torch.compile cuts no graphs.
    """
    forward, cuts = DistributedDataParallel.forward, []
    monkeypatch.setattr(DistributedDataParallel, "forward", lambda *args: cuts.append(
        torch._dynamo.config.optimize_ddp) or forward(*args))
    options = f"{SMALL} --steps 4 --log-every 1 --deterministic --profile --data {corpus} --out"
    handler = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGUSR1, handler)
    before, seed_step = process_state(), ddp.seed_step
    undone = []
    launch.undo.callback(undone.append, 1)  # of another who changed something: it stays

    def steps(out, do=lambda step: None):
        monkeypatch.setattr(
            ddp, "seed_step", lambda seed, step, rank: do(step) or seed_step(seed, step, rank))
        done = [record["step"] for record in ddp.main([*options.split(), f"{tmp_path}/{out}"])]
        assert process_state() == before
        return done

    assert steps("a", lambda step: step == 1 and os.kill(os.getpid(), signal.SIGTERM)) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        steps("b", lambda step: 1 / (2 - step))
    assert process_state() == before
    assert steps("a") == [4]
    capsys.readouterr()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(steps, "c").result() == [1, 2, 3, 4]
    assert "not in the main thread of its process: no signal lets" in capsys.readouterr().out
    assert cuts and not any(cuts) and not undone
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


# Several machines, by hand: here one machine plays both


HOST0 = {"MASTER_ADDR": "host0"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "host[0-1]"}


@pytest.mark.parametrize("variables, words", [
    (HOST0 | {"NNODES": "2", "NODE_RANK": "0", "MAX_RESTARTS": "3"},
     "--rdzv-conf=is_host=1 --local-addr=host0 --max-restarts=3"),
    (HOST0 | {"NNODES": "2", "NODE_RANK": "1"},
     "--nnodes=2 --rdzv-endpoint=host0:29500 --rdzv-conf=is_host=0 --local-addr=~00001 "
     "--max-restarts=0 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 GLOO_SOCKET_IFNAME=wire"),
    (HOST0 | {"NNODES": "10:12", "NODE_RANK": "1"}, "--nnodes=10:12"),
    (HOST0 | {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "[::1]", "PET_NNODES": "9"},
     "--nnodes=2 --rdzv-endpoint=[::1]:29500 --local-addr=::1"),
    (STEP, "--rdzv-endpoint=host0:10007 --rdzv-conf=is_host=0 GLOO_SOCKET_IFNAME=wire"),
    (STEP | {"MASTER_PORT": "1234", "MASTER_ADDR": "host9", "GLOO_SOCKET_IFNAME": "mine"},
     "--rdzv-endpoint=host9:1234"),
    (STEP | HOST0 | {"NNODES": "3", "NODE_RANK": "2"}, "--nnodes=3 --local-addr=~00002"),
    (STEP | {"OMP_NUM_THREADS": "8", "NPROC": "2"}, "OMP_NUM_THREADS=8"),
    (STEP | {"OMP_NUM_THREADS": "", "NPROC": "999"}, "OMP_NUM_THREADS=1"),
])
def test_one_machine_of_two(tmp_path, variables, words):
    """They meet at machine 0, through the interface that leads there: of this machine's own name
    gloo would take the address 127.0.1.1 on many systems."""
    write_program(tmp_path / "python", PRETENDED)
    write_program(tmp_path / "ip", '[ "$*" = "route show match 10.1.2.3" ] && printf '
                  '"default via 10.9.9.9 dev far\\n10.0.0.0/8 dev wire proto kernel\\n"')
    write_program(tmp_path / "scontrol", 'printf "host0\\nhost1\\nhost2\\n"')
    output = finish(start([*RUN, "ddp.py"], tmp_path, PYTHON=f"{tmp_path}/python",
                          PATH=f"{tmp_path}:{os.environ['PATH']}", **variables))
    for word in words.split():
        assert f" {word}" in output, output
    assert ("GLOO_SOCKET_IFNAME=wire" in output) == ("GLOO_SOCKET_IFNAME" not in variables)


def loopback():
    """The IPv6 address of this machine for itself, if it has one."""
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return "::1"
    return "127.0.0.1"


@thorough
def test_all_machines_start_again_after_a_kill(tmp_path, once, corpus):
    """A process of the second machine is killed: both resume, and end as if undisturbed."""
    options = [*OPTIONS.split(), "--save-every", "2", "--data", corpus]
    out = tmp_path / "runs" / "ddp"
    with free_port() as port:
        processes = [start([*RUN, "ddp.py", *options], tmp_path, NNODES="2", NODE_RANK=str(rank),
                           MASTER_ADDR=loopback(), MASTER_PORT=str(port), MAX_RESTARTS="1")
                     for rank in (0, 1)]
        wait_until(lambda: out.exists() and list_checkpoints(out))
        os.kill(children(processes[1].pid)[-1], signal.SIGKILL)
        outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "resuming after step" in outputs[0]
    assert furthest(Result([0], "", out).curve(), once("ddp.py", 2, OPTIONS).curve()) < 1e-10
    # The machines keep their order.
    assert "final loss" in outputs[0] and "final loss" not in outputs[1]


@thorough
def test_a_signal_ends_what_waits_for_another_machine(tmp_path):
    with free_port() as port:
        process = start([*RUN, "ddp.py"], tmp_path, **NODES, MASTER_PORT=str(port))
        wait_until(lambda: listeners([process.pid]))
        process.terminate()
        finish(process)
    assert process.returncode == 128 + signal.SIGTERM


# As a Slurm job


def test_a_batch_job(tmp_path):
    """sbatch runs a copy of run.sh, which starts run.sh once on each machine."""
    write_program(tmp_path / "srun", 'echo "$@"')
    copy = shutil.copy(ROOT / "run.sh", tmp_path / "slurm_script")
    output = finish(start(["bash", copy, "ddp.py", "--lr", "1"], tmp_path, SLURM_JOB_ID="7",
                          SLURM_SUBMIT_DIR=str(ROOT), SLURM_STEP_ID="4294967291", SLURM_NNODES="2",
                          PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert output.splitlines()[-1] == (
        "--ntasks-per-node=1 --ntasks=2 --cpu-bind=none --kill-on-bad-exit=1 "
        f"bash {ROOT}/run.sh {ROOT}/ddp.py --lr 1")


SLURM = """ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName={host}-b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.fixture
def slurm(tmp_path):
    """A Slurm of two nodes, both on this machine. Gives the variables of its commands."""
    folder, host = tmp_path / "slurm", socket.gethostname().partition(".")[0]
    environment = ENVIRONMENT | {
        "SLURM_CONF": f"{folder}/conf", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    if os.getuid() != 0 or not all(
        shutil.which(name, path=environment["PATH"]) for name in ("munged", "slurmd", "sbatch")
    ):
        pytest.skip("needs root, munge and Slurm")
    folder.mkdir()
    with free_port() as one, free_port() as two, free_port() as three:
        (folder / "conf").write_text(
            SLURM.format(host=host, folder=folder, ports=(one, two, three)))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    with contextlib.ExitStack() as stack:
        for command in (
            f"munged --foreground --force --key-file={folder}/key --socket={folder}/munge.socket "
            f"--pid-file={folder}/munged.pid --seed-file={folder}/seed",
            "slurmctld -D", f"slurmd -D -N {host}", f"slurmd -D -N {host}-b",
        ):
            daemon = stack.enter_context(subprocess.Popen(
                command.split(), env=environment, stderr=subprocess.DEVNULL))
            stack.callback(daemon.terminate)
        wait_until(lambda: sh("sinfo --noheader --format=%D --states=idle || true",
                              env=environment) == "2")
        yield environment


@thorough
def test_a_batch_job_of_a_real_slurm(slurm, tmp_path, corpus):
    """Slurm's signal before the time limit lets all ranks save."""
    job = start(["sbatch", "--wait", "--nodes=2", f"--output={tmp_path}/log", "run.sh", "ddp.py",
                 *ENDLESS.split(), "--data", corpus, "--out", tmp_path / "out"], ROOT, **slurm)
    wait_until(lambda: logged(tmp_path / "out") > 3)
    sh("scancel --signal=USR1 --batch 1", env=slurm)  # as --signal=B:USR1@120 sends it
    finish(job)
    output = (tmp_path / "log").read_text()
    assert job.returncode == 0 and "saved: the same command" in output, output
    assert output.startswith("+ srun --ntasks-per-node=1 ") and "2 data-parallel ranks" in output


# Variables of other launchers


def test_code_that_is_not_installed_is_compared(monkeypatch, tmp_path):
    """Beside the script, also if common/ is somewhere else, and anywhere on PYTHONPATH."""
    for folder in ("script", "path", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"in_{folder[:4]}.py").touch()
        monkeypatch.syspath_prepend(tmp_path / folder)
        importlib.import_module(f"in_{folder[:4]}")
    compiled = types.ModuleType("compiled")  # as torch.compile makes them
    compiled.__file__ = str(tmp_path / "path" / "in_path.py")
    monkeypatch.setitem(sys.modules, "compiled", compiled)
    monkeypatch.setattr(sys, "argv", [f"{tmp_path}/script/train.py", "--lr"])
    before = launch.source_files()
    for file in tmp_path.glob("*/*.py"):
        file.write_text("# edited")
    after = launch.source_files()
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"the hash of in_scri.py", "the hash of the module in_path"}
    assert "the hash of common/launch.py" in after and "the hash of the module torch" not in after


def test_a_process_whose_torchrun_has_just_died_ends(monkeypatch):
    """It has asked for a signal too late. Without torchrun it asks for none."""
    asked = []
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda _: types.SimpleNamespace(
        prctl=lambda *words: asked.append(words)))
    for environment in {"TORCHRUN_PID": "1"}, {"TORCHELASTIC_RUN_ID": "one"}:
        monkeypatch.setattr(os, "environ", environment)
        launch._end_with_torchrun()
    assert asked == [(1, signal.SIGTERM)]
    os.environ["TORCHRUN_PID"] = "1"
    with pytest.raises(SettingError, match="torchrun has ended"):
        launch._end_with_torchrun()


def test_the_gpu_of_a_process(monkeypatch):
    """From LOCAL_RANK; never the first one for all."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # NVML counts GPUs that the CUDA runtime of an old driver cannot use: no run on the CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match="has 2 GPUs, but torch .* cannot use them"):
        launch.pick_device("auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert launch.pick_device("cpu").type == "cpu"
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for environment, found in (
        ({}, 0), ({"RANK": "5", "LOCAL_RANK": "1"}, 1), (shares(3, 4), 1),
        (shares(0, 3), 0), (shares(2, 3), "has 2: start at most 2 .* multiple of 2 may share"),
        (shares(2, 4) | {"WORLD_SIZE": "8"}, "has 2: start"),
        ({"LOCAL_RANK": "2"}, "has 2: start"), ({"RANK": "5"}, "RANK is set but not LOCAL_RANK"),
    ):
        monkeypatch.setattr(os, "environ", environment)
        if isinstance(found, int):
            assert launch.pick_device("auto").index == chosen.pop() == found
        else:
            with pytest.raises(SettingError, match=found):
                launch.pick_device("auto")


def shares(rank, ranks):
    """The variables of a rank, all of which are on one machine."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks)}


@pytest.mark.parametrize("environment, others, found", [
    ({"LOCAL_RANK": "1"}, "", {}),
    (shares(1, 2), "ab", {}),
    (shares(3, 4), "aba", {"NCCL_HOSTID": "this-1", "NCCL_SOCKET_IFNAME": "lo",
                           "NCCL_IB_DISABLE": "1"}),
    (shares(0, 4) | {"NCCL_HOSTID": "own", "NCCL_IB_DISABLE": "0"}, "bab", {
        "NCCL_HOSTID": "own", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "0"}),
    (shares(0, 4), "cde", "each process sees only 2 of 4 GPUs, its own: .* show all GPUs"),
])
def test_processes_share_gpus(monkeypatch, capsys, environment, others, found):
    """``others``: the UUIDs of the GPUs of the other ranks; this one has b. NCCL would refuse two
    ranks on one GPU of the same host."""
    args, given, store = parse_options(option_parser(""), ["--timeout", "7"]), {}, dist.HashStore()
    monkeypatch.setattr(launch, "_meet", lambda _: store)
    monkeypatch.setattr(launch, "find_difference", lambda *_: "")
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(launch.distributed_c10d, name, None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.update(
        more, backend=backend, environ=dict(os.environ)))
    monkeypatch.setattr(socket, "gethostname", lambda: "this")
    monkeypatch.setattr(os, "environ", BARE | environment)
    for name, value in (("is_available", True), ("device_count", 2), ("set_device", None),
                        ("get_device_properties", types.SimpleNamespace(uuid="b"))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    ranks = [rank for rank in range(4) if str(rank) != environment.get("RANK")]
    for rank, uuid in zip(ranks, others):
        store.set(f"GPU of rank {rank}", uuid)
    args.backend = "gloo"
    with pytest.raises(SettingError, match="--backend gloo does not fit: .* on GPUs, use nccl"):
        launch.start_process_group(args)
    args.backend = "auto"
    device = launch.start_process_group(args)
    assert given["backend"] == "cpu:gloo,cuda:nccl" and given["timeout"].seconds == 7
    assert given["device_id"] == device and device.index == int(environment["LOCAL_RANK"]) % 2
    set_here = {name: value for name, value in given["environ"].items()
                if name in ("NCCL_HOSTID", "NCCL_IB_DISABLE")}
    said = capsys.readouterr().out
    if isinstance(found, str):
        assert re.search(found, said) and not set_here
        assert launch.gpus_shared() == 0
    else:
        assert given["environ"].items() >= found.items() and not said
        assert set_here.keys() == found.keys() - {"NCCL_SOCKET_IFNAME"}
        assert launch.gpus_shared() == (2 if found else 0)


@on_ranks(4)
def test_groups_of_a_mesh_wait_as_long_as_they_are_told(rank):
    """Of each pair one rank is silent: the other one does not wait 30 minutes, torch's default.
    (A pair of two ranks in all would have the group of all, which must live on.)"""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group = mesh.get_group("cp")
    dist.all_reduce(torch.ones(1), group=group)  # they are connected
    launch.set_timeout(mesh, 1)
    if rank % 2 == 0:
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(1), group=group)
        assert torch_versions.is_lost_peer(error.value) and "1000ms" in str(error.value)


@on_ranks(4)
def test_deterministic_sets_what_gpus_need():
    """A run with it: test_same_run.py."""
    args = types.SimpleNamespace(device="cpu", backend="gloo", deterministic=True, timeout=9)
    os.environ.update(RANK="0", WORLD_SIZE="1")
    for start_as in (launch.start_process, launch.start_process_group):
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        torch.use_deterministic_algorithms(False)
        start_as(args)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_an_error_of_the_code_has_its_traceback():
    """And advice, where it needs some: a weight of FSDP was used without its module."""
    for words, advice in ("oops", "oops"), ("got mixed torch.Tensor and DTensor", "its module"):
        try:
            raise RuntimeError(words)
        except RuntimeError as error:
            *trace, last = launch._describe(error).splitlines()
        assert trace[0].startswith("Traceback") and words in "".join(trace + [last])
        assert advice in last
    for error in (MemoryError("all"), torch.OutOfMemoryError("CUDA out of memory"),
                  RuntimeError("unable to allocate shared memory(shm) for file </torch_1>"),
                  RuntimeError("InvalidCxxCompiler: No working C++ compiler found")):  # a setting
        assert f": error: {type(error).__name__}: {error}" in launch._describe(error)
    assert torch_versions.is_lost_peer(dist.DistBackendError("NCCL error"))
