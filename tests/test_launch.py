"""Starting and stopping: run.sh on one machine, by hand on several, and as a Slurm job.

In the default sample Slurm's programs are pretended. With --all a real one runs, with two nodes on
this machine. It needs root and packages (see .ci/run); without these its test is skipped, and says
so.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from common.checkpoint import list_checkpoints
from tests.support.commands import (
    ENVIRONMENT, RUN, children, finish, left_over, logged, start, wait_until
)
from tests.support.compare import furthest
from tests.support.processes import ROOT, SMALL, TOOLS, Result, edited, free_port
from tests.support.sample import rows, table, thorough
from tests.support.words import in_order

OPTIONS = f"{SMALL} --steps 20 --log-every 1 --dtype float64 --save-every 0"
ENDLESS = f"{SMALL} --steps 100000 --log-every 1 --save-every 50000 --timeout 120"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
SAVED = "saved: the same command continues from there"


def write_program(path, text):
    """Of the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def values(variables):
    return dict(word.split("=") for word in variables.split())


def start_endless(command, folder, corpus, *options, **environment):
    """Start a run that does not end, and wait until it has logged a few steps."""
    process = start([*command, *ENDLESS.split(), "--data", corpus, "--out", "out", *options],
                    folder, **environment)
    wait_until(lambda: logged(folder / "out") > 3)
    return process


# One machine


PRETENDED = """case "$1 $2" in  # a Python: it has the requirements, and shows how it is called
  "-P -"|"-P -c") echo 2;; "-I -c") echo 3.11.9;; *) echo $PYTHONPATH "$@";;
esac"""
SHOW = """import os, sys
names = "RANK", "WORLD_SIZE", "MASTER_ADDR", "PYTHONPATH"
os.write(1, f"{[*map(os.environ.get, names), *sys.argv[1:]]}\\n".encode())
"""


def test_what_run_sh_starts(tmp_path):
    """Arguments arrive as they are, and the command that it shows can be typed. Nothing imports
    from the working folder. Without GPUs and NPROC there are two processes."""
    for name in ("json", "re", "socket", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the working folder')\n")
    words = ["two words", "$HOME", "--max-restarts=9"]
    (tmp_path / "code").mkdir()
    (tmp_path / "code/show.py").write_text(SHOW)
    process = start([*RUN, "code/show.py", *words], tmp_path, NPROC="", PYTHONPATH="mine")
    shown, *lines = finish(process).splitlines()
    assert process.returncode == 0
    assert sorted(lines) == [
        str([rank, "2", "127.0.0.1", f"mine:{ROOT}", *words]) for rank in "01"]
    assert shlex.split(shown)[-4:] == ["code/show.py", *words]


# Words for run.sh; PYTHONPATH, and how its Python is called
@pytest.mark.parametrize("words, called", [*table("""
ddp.py | mine:ROOT -P -m torch.distributed.run --standalone --local-addr=127.0.0.1
  --nproc-per-node=1 ... =600 ROOT/ddp.py$
share fsdp.py | mine:ROOT -P -m torch.distributed.run --standalone --local-addr=127.0.0.1
  --nproc-per-node=1 ... =600 ROOT/tools/share_gpu.py ROOT/fsdp.py$
single.py --lr 1 | mine:ROOT ROOT/single.py --lr 1$
test -k cp | mine -m pytest -k cp$
"""), *((f"{tool} --help", f"ROOT:mine -P -m {TOOLS[tool]} --help$") for tool in TOOLS)])
def test_how_run_sh_calls_python(tmp_path, words, called):
    write_program(tmp_path / "python", PRETENDED)
    output = finish(start([*RUN, *words.split()], tmp_path, PYTHON=f"{tmp_path}/python",
                          PYTHONPATH="mine"))
    assert in_order(f"^{called}".replace("ROOT", str(ROOT)), f"^{output.splitlines()[-1]}$"), output


def test_a_script_uses_the_common_beside_it(tmp_path):
    """Or that of this repository, as examples do. run.sh may be a link."""
    (tmp_path / "linked.sh").symlink_to(ROOT / "run.sh")
    for folder in "beside", "alone":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "single.py").write_text("import common\nprint(common.__path__)\n")
    shutil.copytree(ROOT / "common", tmp_path / "beside/common")
    for folder, root in ("beside", tmp_path / "beside"), ("alone", ROOT):
        output = finish(start(["bash", "linked.sh", f"{folder}/single.py"], tmp_path))
        assert output == f"['{root}/common']\n"


def test_nothing_is_read_that_does_not_run(run, corpus, tmp_path):
    """Beside a script: an editor's lock of a buffer that is not saved, which is a dead link, and a
    folder. What does not run may change."""
    (tmp_path / "code/folder.py").mkdir(parents=True)
    (tmp_path / "code/.#single.py").symlink_to("me@host.123:456")
    script = edited(tmp_path / "code", "single.py", ("import torch\n", "import mine, torch\n"))
    for steps, changed in enumerate(("mine", "other", "mine"), 1):
        (tmp_path / f"code/{changed}.py").write_text(f"number = {steps}")
        said = run(script, 0, f"{SMALL} --steps {steps} --data {corpus}").output
        assert ("the code was" in said) == (steps == 3), said


@rows("command, variables, words", """
README.md | | README.md is no Python script ... ddp.py
nothing.py | | nothing.py is no Python script here; there are ... ddp.py
ddp.py | NNODES=0 | NNODES is '0' ... at least 1
ddp.py | NPROC=x | NPROC is 'x' ... at least 1
ddp.py | MAX_RESTARTS=x | MAX_RESTARTS is 'x' ... at least 0
ddp.py | NNODES=2 MASTER_ADDR=127.0.0.1 NODE_RANK= | NNODES is 2: set NODE_RANK ... MASTER_ADDR
ddp.py | NNODES=2 MASTER_ADDR=127.0.0.1 NODE_RANK=2 | NODE_RANK is 2 and NNODES is 2
ddp.py | NODE_RANK=1 | NODE_RANK is 1 ... NNODES
ddp.py | PET_NNODES=2 | PET_NNODES: torchrun takes its options from these too
ddp.py | NNODES=2 NODE_RANK=0 MASTER_ADDR=no-such.invalid | MASTER_ADDR is no-such.invalid
test --torch 2.11.0 | | --torch '2.11.0': give a version from 2.13.0 to 2.15
share | | share: name a script
share ddp.py | NNODES=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 | share: ... unset NNODES
share ddp.py | CUDA_VISIBLE_DEVICES= | share: torch finds no GPU here
ddp.py | SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2
  | 4 times on 2 machines ... --ntasks-per-node=1
""")
def test_what_run_sh_refuses(tmp_path, command, variables, words):
    process = start([*RUN, *command.split()], tmp_path, **values(variables))
    (line,) = finish(process).splitlines()
    assert line.startswith("run.sh: error: ") and process.returncode == 1
    assert in_order(words, line), line


@rows("script, kills, name", """
* single.py | 0 | SIGTERM
* ddp.py | 1 | SIGUSR1
ddp.py | 0 | SIGINT
fsdp.py | 0 | SIGTERM
""")
def test_a_signal_to_a_launcher_lets_its_processes_save(tmp_path, corpus, script, kills, name):
    """Ctrl-C; what Slurm sends before the time limit; and to torchrun, which then says that it got
    a signal, and its status is 1. When a process has been killed, all have started again."""
    launcher = TORCHRUN if script == "fsdp.py" else RUN
    process = start_endless([*launcher, ROOT / script], tmp_path, corpus, MAX_RESTARTS="1",
                            NPROC="1" if script == "single.py" else "2")
    log = tmp_path / "out/metrics.jsonl"
    for _ in range(kills):
        before = log.stat().st_ino  # whoever starts writes the file anew
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        wait_until(lambda: process.poll() is not None or (  # it has failed
            log.stat().st_ino != before and logged(log.parent) > 1))
    process.send_signal(getattr(signal, name))
    output = finish(process)
    wait_until(lambda: not left_over(tmp_path))
    assert "stopped after step" in output and SAVED in output, output
    assert len(list_checkpoints(tmp_path / "out")) == 1
    assert process.returncode == 0 or script != "single.py"


# Several machines, by hand: here one machine plays both


STEP = ("SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 "
        "SLURM_NODEID=1 SLURM_STEP_NODELIST=host[0-1]")


@rows("variables, words", """
MASTER_ADDR=10.1.2.3 NNODES=2 NODE_RANK=0 MAX_RESTARTS=3
  | is_host=1,join_timeout=300,read_timeout=300 --local-addr=10.1.2.3 --max-restarts=3
MASTER_ADDR=10.1.2.3 NNODES=2 NODE_RANK=1 | --nnodes=2 --rdzv-endpoint=10.1.2.3:29500 is_host=0
  --local-addr=~00001 --max-restarts=0 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 GLOO_SOCKET_IFNAME=wire
MASTER_ADDR=10.1.2.3 NNODES=10:12 NODE_RANK=1 | --nnodes=10:12
MASTER_ADDR=::1 NNODES=2 NODE_RANK=0 | --nnodes=2 --rdzv-endpoint=[::1]:29500 --local-addr=::1
{STEP} | --rdzv-endpoint=10.1.2.3:10007 is_host=0 GLOO_SOCKET_IFNAME=wire
{STEP} MASTER_PORT=1234 MASTER_ADDR=10.1.2.9 GLOO_SOCKET_IFNAME=mine
  | --rdzv-endpoint=10.1.2.9:1234
{STEP} MASTER_ADDR=10.1.2.3 NNODES=3 NODE_RANK=2 | --nnodes=3 --local-addr=~00002
{STEP} OMP_NUM_THREADS=8 NPROC=2 | OMP_NUM_THREADS=8
{STEP} OMP_NUM_THREADS= NPROC=999 | OMP_NUM_THREADS=1
""", STEP=STEP)
def test_one_machine_of_two(tmp_path, variables, words):
    """They meet at machine 0, through the interface that leads there: of this machine's own name
    gloo would take the address 127.0.1.1 on many systems."""
    write_program(tmp_path / "python", PRETENDED)
    write_program(tmp_path / "ip", '[ "$*" = "route show match 10.1.2.3" ] && printf '
                  '"default via 10.9.9.9 dev far\\n10.0.0.0/8 dev wire proto kernel\\n"')
    write_program(tmp_path / "scontrol", 'printf "10.1.2.3\\n10.1.2.4\\n10.1.2.5\\n"')
    output = finish(start([*RUN, "ddp.py"], tmp_path, PYTHON=f"{tmp_path}/python",
                          PATH=f"{tmp_path}:{os.environ['PATH']}", **values(variables)))
    output = shlex.split(output.splitlines()[0])
    for word in words.split():
        assert any(word in each for each in output), (word, output)
    expected = "GLOO_SOCKET_IFNAME" not in variables and "::1" not in variables
    assert ("GLOO_SOCKET_IFNAME=wire" in output) == expected


@thorough
def test_all_machines_start_again_after_a_kill(tmp_path, once, corpus):
    """A process of the second machine is killed: both resume, and end as if undisturbed."""
    options = [*OPTIONS.split(), "--save-every", "2", "--data", corpus, "--out", "out"]
    out = tmp_path / "out"
    with free_port() as port:
        processes = [start([*RUN, "ddp.py", *options], tmp_path, NNODES="2", NODE_RANK=str(rank),
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), MAX_RESTARTS="1")
                     for rank in (0, 1)]
        wait_until(lambda: out.exists() and list_checkpoints(out))
        os.kill(children(processes[1].pid)[-1], signal.SIGKILL)
        outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "resuming out/step-" in outputs[0]
    assert furthest(Result([0], "", out).curve(), once("ddp.py", 2, OPTIONS).curve()) < 1e-10
    # The machines keep their order.
    assert "final loss" in outputs[0] and "final loss" not in outputs[1]


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
        idle = ["sinfo", "--noheader", "--format=%D", "--states=idle"]
        wait_until(lambda: subprocess.run(
            idle, env=environment, capture_output=True, text=True).stdout.strip() == "2")
        yield environment


@thorough
def test_a_batch_job_of_a_real_slurm(slurm, tmp_path, corpus):
    """Slurm's signal before the time limit lets all ranks save."""
    job = start(["sbatch", "--wait", "--nodes=2", f"--output={tmp_path}/log", "run.sh", "ddp.py",
                 *ENDLESS.split(), "--data", corpus, "--out", tmp_path / "out"], ROOT, **slurm)
    wait_until(lambda: logged(tmp_path / "out") > 3)
    cancel = ["scancel", "--signal=USR1", "--batch", "1"]  # as --signal=B:USR1@120 sends it
    subprocess.run(cancel, env=slurm, check=True)
    finish(job)
    output = (tmp_path / "log").read_text()
    assert SAVED in output and len(list_checkpoints(tmp_path / "out")) == 1, output
    assert output.startswith("+ srun --ntasks-per-node=1 ") and "2 data-parallel ranks" in output
