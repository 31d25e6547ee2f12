"""Several machines: run.sh by hand, over ssh and as a Slurm job, and scripts under other launchers.

The machines are two network namespaces with an sshd in each, and Slurm is the real one with two
nodes, where this machine lets the tests have them: as root, with iproute2, openssh-server and
slurmd installed. Otherwise stand-ins take their place, on the loopback interface, and a warning
says so.
"""

import json
import os
import pathlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import warnings

import pytest

from tests.processes import PATIENCE, ROOT, free_port
from tests.sample import sampled, thorough
from tests.test_same_run import EXACT

RUN = ["bash", str(ROOT / "run.sh")]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
    "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NPROC": "1",
}


def start(command, cwd, **environment):
    return subprocess.Popen(
        [str(word) for word in command], cwd=cwd, env={**ENVIRONMENT, **environment}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
        # A shell lets its background jobs ignore Ctrl-C, and what they start: undo that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process, timeout=PATIENCE):
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def curve(folder):
    lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
    return [[json.loads(line)[name] for name in ("step", "loss", "grad_norm")] for line in lines]


def left_over(tmp_path):
    """The processes that name the folder of this test: none may be left of a run that is over."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(tmp_path) in words and "sshd" not in words:
            found.append(words)
    return found


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def expected(server, corpus, tmp_path_factory):
    """The curve of one machine with two processes."""
    folder = tmp_path_factory.mktemp("one-machine")
    server.run("ddp.py", 2, f"{EXACT} --data {corpus}", folder=folder)
    return curve(folder / "out")


# By hand


def two_machines(tmp_path, options, **environment):
    port = str(free_port())
    return [
        start([*RUN, "ddp.py", *options.split()], tmp_path, NNODES="2", NODE_RANK=str(rank),
              MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **environment)
        for rank in (0, 1)
    ]


@thorough
def test_all_machines_start_again_after_a_kill(tmp_path, corpus, expected):
    """A process of the second machine is killed: both resume, and end as if undisturbed."""
    options = f"{EXACT} --save-every 2 --data {corpus}"
    processes = two_machines(tmp_path, options, MAX_RESTARTS="1")
    out = tmp_path / "runs" / "ddp"
    wait_until(lambda: any(path.name[5:].isdigit() for path in out.glob("step-*")))
    os.kill(children(processes[1].pid)[-1], signal.SIGKILL)
    outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "resuming after step" in outputs[0]
    found = curve(out)
    assert [row[0] for row in found] == list(range(1, 21))
    assert max(abs(a - b) for row, other in zip(found, expected)
               for a, b in zip(row, other)) < 1e-10
    for rank, output in enumerate(outputs):
        shown = output.splitlines()[0]
        assert shown.startswith("+ OMP_NUM_THREADS=1 ")
        assert f" {sys.executable} -P {ROOT}/common/torchrun.py --nnodes=2 " in shown
        assert f"is_host={1 - rank}" in shown and shlex.split(shown)[-2:] == ["--data", corpus]
    # The machines keep their order.
    assert "final loss" in outputs[0] and "final loss" not in outputs[1]


def listeners(pids):
    """The addresses at which these processes listen, in the hexadecimal form of /proc/net/tcp."""
    sockets = set()
    for pid in pids:
        for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(link))
            except OSError:
                pass
    lines = [line.split() for name in ("tcp", "tcp6")
             for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]]
    return {line[1].split(":")[0] for line in lines
            if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


@thorough
def test_on_one_machine_nothing_listens_beyond_loopback(tmp_path, corpus):
    options = f"{EXACT} --data {corpus} --steps 100000"
    process = start([*RUN, "ddp.py", *options.split()], tmp_path, NPROC="2")
    log, found = tmp_path / "runs" / "ddp" / "metrics.jsonl", set()
    while not log.exists():  # from the first moment to the loop
        assert process.poll() is None
        found |= listeners([process.pid, *children(process.pid)])
        time.sleep(0.02)
    found |= listeners([process.pid, *children(process.pid)])
    process.terminate()
    finish(process)
    assert found == {"0100007F"}  # 127.0.0.1


def children(pid):
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except OSError:
            pass
    return sorted(found)


@thorough
def test_fewer_machines_go_on(run, tmp_path, corpus):
    """NNODES=1:2, and the second machine dies: the same curve, but for the order of sums."""
    options = f"{EXACT} --data {corpus} --steps 300 --save-every 20"
    expected = curve(run("single.py", 0, f"{options} --save-every 0", out="whole").out)
    port = str(free_port())
    first, second = [
        start([*RUN, "ddp.py", *options.split()], tmp_path, NNODES="1:2", NODE_RANK=str(rank),
              MASTER_ADDR="127.0.0.1", MASTER_PORT=port, MAX_RESTARTS="3")
        for rank in (0, 1)
    ]
    out = tmp_path / "runs" / "ddp"
    wait_until(lambda: any(path.name[5:].isdigit() for path in out.glob("step-*")))
    os.kill(second.pid, signal.SIGSTOP)  # as one: launcher and process
    for pid in [*children(second.pid), second.pid]:
        os.kill(pid, signal.SIGKILL)
    output = finish(first)
    assert first.returncode == 0 and "1 process on cpu" in output, output
    assert "resuming after step" in output
    found = curve(out)
    assert len(found) == len(expected) == 300
    assert max(abs(a - b) for row, other in zip(found, expected)
               for a, b in zip(row, other)) < 1e-9


def test_one_machine_stays_on_loopback(tmp_path):
    """Its processes meet there, at a port that the kernel gives to no one else, and the command
    that is shown runs as it stands."""
    script = tmp_path / "show.py"
    script.write_text(
        "import os, sys\n"
        "range = open('/proc/sys/net/ipv4/ip_local_port_range').read().split()\n"
        "assert 10_000 <= int(os.environ['MASTER_PORT']) < int(range[0])\n"
        "words = os.environ['MASTER_ADDR'], os.environ['WORLD_SIZE'], *sys.argv[1:]\n"
        "os.write(1, f'{words}\\n'.encode())\n"
    )
    output = finish(start([*RUN, "show.py", "two words", "$HOME", "--max-restarts=9"], tmp_path,
                          NPROC="2"))
    shown, *lines = output.splitlines()
    assert lines == ["('127.0.0.1', '2', 'two words', '$HOME', '--max-restarts=9')"] * 2
    again = subprocess.run(shown[1:], shell=True, cwd=tmp_path, capture_output=True, text=True,
                           timeout=PATIENCE)
    assert again.stdout.splitlines() == lines


@pytest.mark.parametrize("environment, message", [
    ({"NODE_RANK": "1"}, "NODE_RANK is 1 but NNODES is not set"),
    ({"NNODES": "2"}, "NNODES is 2 but NODE_RANK is not set: this machine is one of 0 to 1"),
    ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "of 2 machines the last is 1"),
    ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
    ({"NNODES": "two"}, "NNODES is 'two': it must be a whole number, at least 1"),
    ({"NNODES": "2", "NODE_RANK": "-1"}, "NODE_RANK is '-1'"),
    ({"NPROC": "0"}, "NPROC is '0': it must be a whole number, at least 1"),
    ({"NPROC": ""}, "NPROC is ''"),
    ({"MASTER_PORT": "70000"}, "the highest port is 65535"),
    ({"MAX_RESTARTS": "some"}, "MAX_RESTARTS is 'some'"),
    ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "no..host"},
     "this machine cannot resolve that name"),
    ({"HOSTS": "a b", "NODE_RANK": "0"}, "unset NNODES and NODE_RANK"),
    ({"HOSTS": " "}, "HOSTS is empty"),
    ({"HOSTS": "a -b"}, "no host begins with a dash"),
])
def test_settings_that_cannot_be(tmp_path, environment, message):
    process = start([*RUN, "ddp.py"], tmp_path, **environment)
    (line,) = finish(process).splitlines()
    assert process.returncode == 1 and line.startswith("run.sh: error: ") and message in line


# Over ssh


SSHD = """Port 22
HostKey {0}/key
AuthorizedKeysFile {0}/key.pub
PidFile none
StrictModes no
UsePAM no
"""


def sh(line, **options):
    return subprocess.run(line, shell=True, check=True, capture_output=True, text=True,
                          timeout=PATIENCE, **options)


def can_make_namespaces():
    if os.getuid() != 0 or not shutil.which("ip"):
        return False
    name = f"probe{os.getpid()}"
    try:
        sh(f"ip netns add {name} && ip -n {name} link add va type veth peer name vb; "
           f"ip netns del {name}")
    except subprocess.SubprocessError:
        return False
    return True


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two machines: their ``hosts``, the ``ssh`` that leads there, and the ``prefix`` for a command
    that is to run on the first."""
    folder = tmp_path_factory.mktemp("machines")
    if not can_make_namespaces():
        warnings.warn("run.sh over ssh is tested by a stand-in for ssh on loopback: "
                      "not root, or no network namespaces")
        ssh = stand_in(folder, 'case $host in 127.0.0.[12]) exec "$@";; esac')
        yield types.SimpleNamespace(hosts=["127.0.0.1", "127.0.0.2"], prefix=[], ssh=ssh)
        return
    names, hosts = [f"host{rank}-{os.getpid()}" for rank in (0, 1)], ["10.77.0.1", "10.77.0.2"]
    daemons = []
    try:
        for name in names:
            sh(f"ip netns add {name} && ip -n {name} link set lo up")
        sh(f"ip -n {names[0]} link add wire type veth peer name wire netns {names[1]}")
        for name, host in zip(names, hosts):
            sh(f"ip -n {name} addr add {host}/24 dev wire && ip -n {name} link set wire up")
        sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
        if sshd and shutil.which("ssh-keygen"):
            sh(f"ssh-keygen -q -t ed25519 -N '' -f {folder}/key && mkdir -p /run/sshd")
            (folder / "sshd_config").write_text(SSHD.format(folder))
            for name in names:
                daemons.append(subprocess.Popen([
                    "ip", "netns", "exec", name, sshd, "-D", "-f", folder / "sshd_config",
                    "-E", folder / f"{name}.log",
                ]))
            key = (folder / "key.pub").read_text()
            (folder / "known").write_text("".join(f"{host} {key}" for host in hosts))
            ssh = f"ssh -F none -i {folder}/key -o UserKnownHostsFile={folder}/known"
            wait_until(lambda: not subprocess.call(
                ["ip", "netns", "exec", names[0], *ssh.split(), hosts[1], "true"],
                stderr=subprocess.DEVNULL,
            ))
        else:
            warnings.warn("run.sh over ssh is tested by a stand-in for ssh: no sshd is installed")
            cases = " ".join(f'{host}) exec ip netns exec {name} "$@";;'
                             for host, name in zip(hosts, names))
            ssh = stand_in(folder, f"case $host in {cases} esac")
        yield types.SimpleNamespace(hosts=hosts, prefix=["ip", "netns", "exec", names[0]], ssh=ssh)
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        for name in names:
            for pid in subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True
            ).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.call(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def stand_in(folder, body):
    """A program with ssh's command line."""
    path = folder / "ssh"
    path.write_text(
        "#!/bin/bash\n"
        'while [[ $1 == -* ]]; do [ "$1" != -o ] || shift; shift; done\nhost=$1; shift\n'
        f'{body}\necho "no route to $host" >&2; exit 255\n'
    )
    path.chmod(0o755)
    return str(path)


def on_hosts(machines, tmp_path, script, *options, hosts=None, **environment):
    """Both find their folder: namespaces share the file system."""
    return start([*machines.prefix, *RUN, script, *options], tmp_path,
                 HOSTS=" ".join(hosts or machines.hosts), SSH=machines.ssh, **environment)


@thorough
def test_two_hosts_over_ssh(machines, tmp_path, corpus, expected):
    process = on_hosts(machines, tmp_path, "ddp.py", *EXACT.split(), "--data", corpus,
                       "--out", "two hosts")
    output = finish(process)
    assert process.returncode == 0, output
    assert curve(tmp_path / "two hosts") == expected
    assert sorted(line[:5] for line in output.splitlines()
                  if "common/torchrun.py" in line) == ["+ OMP", "+ OMP"]
    assert not left_over(tmp_path)


@thorough
def test_a_signal_lets_all_hosts_save(machines, tmp_path, corpus):
    options = f"{EXACT} --data {corpus} --steps 100000 --save-every 50000"
    process = on_hosts(machines, tmp_path, "ddp.py", *options.split())
    log = tmp_path / "runs" / "ddp" / "metrics.jsonl"
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) > 2)
    os.kill(process.pid, signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 0 and "Traceback" not in output, output
    # ssh keeps no order between the two outputs: the bar's last line may come after this one.
    assert output.count("stopped after step") == output.count("saved: the same command") == 1
    assert not left_over(tmp_path)


def test_what_crosses_ssh(machines, tmp_path):
    """Each host has its number; arguments and settings arrive as they are."""
    forwarded = {"OMP_PROC_BIND": "true", "TP_SIZE": "2", "NCCL_DEBUG": "a b", "CUDA_A": "c",
                 "TORCH_B": "d", "PYTORCH_C": "e", "FI_D": "f", "UCX_E": "g"}
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", *forwarded)
    (tmp_path / "show.py").write_text(
        f"import os, sys, json\nwords = [os.environ[name] for name in {names}] + sys.argv[1:]\n"
        "os.write(1, (json.dumps(words) + chr(10)).encode())\n"
    )
    odd = ["two  words", "it's", '"$HOME"', "a\nb", "*", "", "~", "é", "--max-restarts=9", "\\"]
    process = on_hosts(machines, tmp_path, "show.py", *odd, NPROC="2", **forwarded)
    output = finish(process)
    assert process.returncode == 0, output
    found = sorted(json.loads(line) for line in output.splitlines() if line.startswith('["'))
    assert found == [[str(rank), "4", machines.hosts[0], "1", *forwarded.values(), *odd]
                     for rank in range(4)]


@thorough
def test_a_host_that_cannot_start(machines, tmp_path, corpus):
    """None goes on alone, and the message names the host that is to blame."""
    options = ("--steps", "100000", "--data", corpus)
    lost = machines.hosts[1].rsplit(".", 1)[0] + ".9" if machines.prefix else "127.0.0.9"
    process = on_hosts(machines, tmp_path, "ddp.py", *options, hosts=[machines.hosts[0], lost])
    last = finish(process).splitlines()[-1]
    assert last == f"run.sh: error: {lost} cannot be reached by ssh, or was lost; all are stopped"
    assert process.returncode == 1
    process = on_hosts(machines, tmp_path, "ddp.py", *options,
                       PYTHON=str(starts_only_on_first(tmp_path)))
    output = finish(process)
    assert process.returncode == 1, output
    assert (output.splitlines()[-1]
            == f"run.sh: error: {machines.hosts[1]} ended with status 9; all are stopped")
    wait_until(lambda: not left_over(tmp_path))


def starts_only_on_first(tmp_path):
    """A Python that has all that is required, but on the second host cannot start torchrun."""
    path = tmp_path / "python"
    path.write_text('#!/bin/bash\n[ "${NODE_RANK:-0}" = 0 ] || [ "$1" != -P ] || exit 9\n'
                    f'exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


@thorough
def test_stopping_run_sh_stops_all_hosts(machines, tmp_path):
    """By Ctrl-C, by a plain kill, and by one that leaves run.sh no time to do anything."""
    (tmp_path / "wait.py").write_text(
        "import os, sys, time\nopen(sys.argv[1] + os.environ['RANK'], 'w')\ntime.sleep(600)\n"
    )
    ways = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    processes = [
        on_hosts(machines, tmp_path, "wait.py", tmp_path / how.name, MASTER_PORT=str(free_port()))
        for how in ways
    ]
    wait_until(lambda: all((tmp_path / f"{how.name}{rank}").exists()
                           for how in ways for rank in (0, 1)))
    for process, how in zip(processes, ways):
        os.kill(process.pid, how)
    wait_until(lambda: not left_over(tmp_path))
    outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [130, 143, -9], outputs


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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A Slurm of two nodes, both on this machine. Gives the variable by which commands find it."""
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname().partition(".")[0]
    daemons = {name: shutil.which(name, path="/usr/sbin:/usr/bin")
               for name in ("munged", "slurmctld", "slurmd", "sbatch")}
    if os.getuid() != 0 or not all(daemons.values()):
        pytest.skip("a real Slurm takes root, and the packages slurmctld, slurmd, slurm-client "
                    "and munge")
    conf, nodes = folder / "slurm.conf", [host, f"{host}-b"]
    conf.write_text(SLURM.format(host=host, folder=folder, ports=[free_port() for _ in range(3)]))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir()
    environment = {"SLURM_CONF": str(conf)}
    try:
        sh(f"{daemons['munged']} --force --key-file={folder}/munge.key "
           f"--socket={folder}/munge.socket --pid-file={folder}/munged.pid "
           f"--log-file={folder}/munged.log --seed-file={folder}/seed")
        sh(f"{daemons['slurmctld']} -f {conf}")
        for node in nodes:
            sh(f"{daemons['slurmd']} -f {conf} -N {node}")
        idle = lambda: sh("sinfo --noheader --format=%D --states=idle",
                          env=os.environ | environment).stdout.strip() == "2"
        wait_until(idle)
        yield environment
    finally:
        pids = [int(path.read_text()) for path in folder.glob("*.pid")]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids))


@thorough
def test_a_batch_job(slurm, tmp_path, corpus, expected):
    output = tmp_path / "log"
    job = start(["sbatch", "--parsable", "--nodes=2", f"--output={output}", "run.sh", "ddp.py",
                 *EXACT.split(), "--data", corpus, "--out", tmp_path / "out"], ROOT, **slurm)
    number = finish(job).strip()
    state = lambda: sh(f"scontrol show job {number}",
                       env=os.environ | slurm).stdout.split("JobState=")[1].split()[0]
    wait_until(lambda: state() not in ("PENDING", "RUNNING", "COMPLETING"))
    assert state() == "COMPLETED", output.read_text()
    assert curve(tmp_path / "out") == expected
    assert output.read_text().startswith("+ srun --ntasks-per-node=1 ")


@thorough
@pytest.mark.parametrize("of", ["a batch job", "a script"])
def test_a_signal_of_slurm_lets_all_save(slurm, tmp_path, corpus, of):
    """To the batch shell alone, as --signal=B:USR1@120 sends it, and to all tasks of a step."""
    environment, log = os.environ | slurm, tmp_path / "log"
    options = [*EXACT.split(), "--data", corpus, "--out", str(tmp_path / "out"),
               "--steps", "100000", "--save-every", "50000"]
    if of == "a batch job":
        sbatch = ["sbatch", "--parsable", "--nodes=2", f"--output={log}", "run.sh", "ddp.py"]
        number = finish(start([*sbatch, *options], ROOT, **slurm)).strip()
    else:
        srun = shlex.join(["srun", "--nodes=2", "--ntasks=2", sys.executable,
                           str(ROOT / "ddp.py"), *options])
        sbatch = ["sbatch", "--parsable", "--nodes=2", f"--output={log}", "--wrap", srun]
        number = finish(start(sbatch, ROOT, **slurm)).strip()
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2)
    sh(f"scancel --signal=USR1 {'--batch ' if of == 'a batch job' else ''}{number}",
       env=environment)
    state = lambda: sh(f"scontrol show job {number}",
                       env=environment).stdout.split("JobState=")[1].split()[0]
    wait_until(lambda: state() not in ("PENDING", "RUNNING", "COMPLETING"))
    assert state() == "COMPLETED", log.read_text()
    assert "saved: the same command goes on from there" in log.read_text()


@thorough
def test_srun_starts_a_script(slurm, tmp_path, corpus, expected):
    """Slurm's own variables say which process is which."""
    options = [*EXACT.split(), "--data", corpus, "--out", tmp_path / "out"]
    srun = ["srun", "--nodes=2", "--ntasks=2", sys.executable]
    process = start([*srun, ROOT / "ddp.py", *options], tmp_path, **slurm)
    output = finish(process)
    assert process.returncode == 0, output
    assert curve(tmp_path / "out") == expected
    process = start([*srun, ROOT / "single.py", *options], tmp_path, **slurm)
    assert ("single.py is one process and was started as 2" in finish(process)
            and process.returncode != 0)


STAND_IN = """#!/bin/bash
echo "srun $*"
while [[ $1 == -* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=${TASKS:-2} SLURM_STEP_NUM_NODES=2 \
SLURM_STEP_NODELIST=localhost,other
SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@"
wait $!
"""


@pytest.fixture
def job(tmp_path):
    """What a batch job of Slurm is to run.sh, with stand-ins for Slurm's commands."""
    (tmp_path / "bin").mkdir()
    for name, content in (("srun", STAND_IN),
                          ("scontrol", "#!/bin/bash\necho localhost; echo other\n")):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    shutil.copy(ROOT / "run.sh", tmp_path / "slurm_script")
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0",
            "SLURM_SUBMIT_DIR": str(ROOT)}


def test_the_commands_of_a_batch_job(job, tmp_path):
    (tmp_path / "show.py").write_text(
        "import os, sys\n"
        "words = [os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')] "
        "+ sys.argv[1:]\n"
        "os.write(1, f'{words}\\n'.encode())\n"
    )
    process = start(["bash", "slurm_script", "show.py", "two words"], tmp_path, **job)
    lines = finish(process).splitlines()
    assert process.returncode == 0, lines
    step = ("srun --ntasks-per-node=1 --ntasks=2 --cpu-bind=none --kill-on-bad-exit=1 "
            f"bash {ROOT}/run.sh show.py")
    assert lines[:2] == [f"+ {step} two\\ words", f"{step} two words"]
    port = 10000 + os.getpid() % 20000
    assert sum(f"--rdzv-endpoint=localhost:{port}" in line for line in lines) == 2
    assert sorted(lines[-2:]) == [f"['{rank}', '2', 'localhost', 'two words']" for rank in (0, 1)]


def test_srun_starts_run_sh_too_often(job, tmp_path):
    process = start(["bin/srun", *RUN, "ddp.py"], tmp_path, TASKS="4", **job)
    output = finish(process)
    assert (process.returncode == 1
            and "srun starts this 4 times on 2 machines: start it once on each" in output)


# Other launchers


STEP = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                     "MASTER_PORT")),
    "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2", "SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}",
    "SLURM_STEP_NODELIST": "localhost,node[03-05,9]",
}


def test_slurm_variables(run, corpus, expected):
    result = run("ddp.py", 2, f"{EXACT} --data {corpus}", env=STEP)
    assert curve(result.out) == expected
    result = run("single.py", 2, env=STEP, expect_ok=False)
    (line,) = result.lines
    assert "single.py is one process and was started as 2" in line and result.statuses == [1, 1]


def test_the_shell_of_a_slurm_job_is_one_process(run, corpus):
    shell = {name: STEP[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID")}
    run("single.py", 0, f"{EXACT} --steps 2 --data {corpus}", env=shell)
    run("single.py", 0, f"{EXACT} --steps 2 --data {corpus}", out="step",
        env={**STEP, "SLURM_STEP_NUM_TASKS": "1"})


@pytest.mark.parametrize("nodes, first", [
    ("node7", "node7"), ("node[03-05,9],other", "node03"), ("a-1.b,c", "a-1.b"),
    ("r[1-2]n[10,12]", "r1n10"),
])
def test_the_first_host_of_a_list(monkeypatch, nodes, first):
    from common.environment import rank_and_world_size

    step = {name: value for name, value in STEP.items() if value}
    monkeypatch.setattr(os, "environ", {**step, "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": nodes})
    assert rank_and_world_size() == (1, 2) and os.environ["MASTER_ADDR"] == first


@pytest.mark.parametrize("environment, message", [
    ({**STEP, "SLURM_STEP_NODELIST": "node[a"},
     "cannot tell the first host of SLURM_STEP_NODELIST 'node[a'"),
    ({**dict.fromkeys(STEP), "OMPI_COMM_WORLD_SIZE": "2"},
     "OMPI_COMM_WORLD_SIZE is 2 but RANK and WORLD_SIZE are not set"),
])
def test_launchers_that_do_not_say_enough(run, environment, message):
    for script in ("ddp.py", "single.py"):
        result = run(script, 2, env=environment, expect_ok=False)
        assert all(result.statuses) and all(message in line for line in result.lines)


def test_the_rank_on_a_machine(monkeypatch):
    """From LOCAL_RANK, or from what else is known; never 0 for all."""
    from common.environment import local_rank
    from common.errors import SettingError

    def found(**environment):
        monkeypatch.setattr(os, "environ", environment)
        return local_rank()

    assert found() == 0 and found(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1") == 1
    assert found(RANK="5", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4") == 1
    with pytest.raises(SettingError, match="neither LOCAL_RANK nor LOCAL_WORLD_SIZE"):
        found(RANK="5", WORLD_SIZE="8")


@pytest.mark.parametrize("script, options", sampled(
    [("ddp.py", ""), ("hybrid_3d.py", "--tp 2"), ("hybrid_3d.py", "--pp 2"),
     ("hybrid_3d.py", "--cp 2")], [("ddp.py", "")]
))
def test_a_rank_that_stops_ends_the_run(run, corpus, script, options):
    """In any group of the mesh: --timeout holds for all, and one line says what has happened."""
    options = f"{script} {options} {EXACT} --data {corpus} --timeout 5"
    result = run("tests/stopped_rank.py", 2, options, expect_ok=False)
    assert result.statuses == [1, -signal.SIGKILL]  # rank 0 kills the other in the end
    (line,) = [line for line in result.lines if "error" in line]
    assert "another process has ended or was silent for --timeout seconds" in line


def test_nccl_leaves_its_record_in_the_run_folder():
    """torch reads these variables; they stay as they are where a user has set them."""
    from common.launch import nccl_variables

    variables = nccl_variables(pathlib.Path("runs/fsdp"))
    assert variables["TORCH_FR_DUMP_TEMP_FILE"] == "runs/fsdp/flight-record-rank"
    assert int(variables["TORCH_FR_BUFFER_SIZE"]) > 0
    assert variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == variables["TORCH_GLOO_LAZY_INIT"] == "1"


def test_the_variables_of_accelerate(run, corpus, expected):
    """It sets those of torchrun; ACCELERATE_* beside them change nothing."""
    env = {"LOCAL_WORLD_SIZE": None, "ACCELERATE_USE_CPU": "true",
           "ACCELERATE_MIXED_PRECISION": "no"}
    assert curve(run("ddp.py", 2, f"{EXACT} --data {corpus}", env=env).out) == expected
