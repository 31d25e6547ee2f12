"""Nothing is lost, and nothing diverges in silence: ranks that differ, signals, lost processes,
folders that two runs want, and steps that must not be saved."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from common import checkpoint
from common.errors import SettingError
from common.replicas import NOT_HELD, first_difference, sum_of_bits
from tests.processes import PATIENCE, ROOT
from tests.sample import sampled, thorough
from tests.test_checkpoint import assert_bit_equal, tensors
from tests.test_launch import RUN, children, finish, left_over, start, wait_until
from tests.test_same_run import MODEL

OPTIONS = (f"{MODEL} --seq-len 32 --batch-size 8 --steps 8 --log-every 1 --warmup-steps 3 "
           "--dtype float64 --save-every 4 --keep 9")
COMMANDS = [
    ("single.py", 0), ("ddp.py", 2), ("zero.py --stage 1", 2), ("zero.py --stage 2", 2),
    ("fsdp.py", 2), ("fsdp.py --replicate 2", 2), ("tp.py", 2), ("cp.py", 2), ("pp.py", 2),
    ("hybrid_3d.py --tp 2", 2), ("hybrid_3d.py --tp 2 --cp 2", 4),
]
SAMPLE = [("single.py", 0), ("ddp.py", 2)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture
def inject(run, corpus):
    """Run a script after some code, in which ``rank`` is the rank."""

    def start(command, world, code, options="", expect_ok=False, **more):
        return run(f"tests/injected.py {command}", world, f"{OPTIONS} --data {corpus} {options}",
                   env={"INJECT": code, **more}, expect_ok=expect_ok)

    return start


@pytest.fixture(scope="module")
def whole(server, corpus, tmp_path_factory):
    """The run folders of uninterrupted runs, by command."""
    folder, runs = tmp_path_factory.mktemp("whole"), {}

    def folder_of(command, world):
        if command not in runs:
            runs[command] = server.run(
                command, world, f"{OPTIONS} --data {corpus}", folder=folder, out=str(len(runs))
            ).out
        return runs[command]

    return folder_of


def one_error(result):
    """The error, which is all that a run has printed beside its start lines and its bar."""
    assert all(result.statuses), result.output
    assert "Traceback" not in result.output, result.output
    (line,) = [line for line in result.lines if "error:" in line]
    return line


# Ranks that are not the same run


@pytest.mark.parametrize("command, world, option, value", sampled(
    [("ddp.py", 2, "--lr", "0.5"), ("ddp.py", 2, "--seed", "1"), ("ddp.py", 2, "--steps", "9"),
     ("ddp.py", 2, "--save-every", "3"), ("ddp.py", 2, "--log-every", "2"),
     ("ddp.py", 2, "--dtype", "float32"), ("ddp.py", 2, "--hidden-size", "96"),
     ("zero.py", 2, "--lr", "0.5"), ("fsdp.py", 2, "--steps", "9"), ("tp.py", 2, "--seed", "1"),
     ("cp.py", 2, "--save-every", "3"), ("pp.py", 2, "--dtype", "float32"),
     ("hybrid_3d.py --tp 2", 4, "--log-every", "2")],
    [("ddp.py", 2, "--lr", "0.5"), ("ddp.py", 2, "--dtype", "float32")],
))
def test_ranks_with_different_options(inject, command, world, option, value):
    code = f"if rank == 1: sys.argv += ['{option}', '{value}']"
    line = one_error(inject(command, world, code))
    assert f"{option} is " in line and f" on rank 0 and {value} on rank 1: start all" in line


@pytest.mark.parametrize("change", sampled(["content", "length"], ["content"]))
@pytest.mark.parametrize("command", sampled(["ddp.py", "fsdp.py", "tp.py", "pp.py"], ["pp.py"]))
def test_ranks_with_different_data(run, tmp_path, command, change):
    """Of one name, but with one other letter, or a little longer."""
    for name, letter, more in (("0", "a", 0), ("1", "b", 640 if change == "length" else 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(letter + "x" * (5000 + more))
    result = run(f"tests/injected.py {command}", 2, f"{OPTIONS} --data text",
                 env={"INJECT": f"os.chdir('{tmp_path}/' + str(rank))"}, expect_ok=False)
    what = "hash of some" if change == "content" else "number of"
    assert f"the {what} samples in --data is " in one_error(result)


def test_ranks_with_different_versions(inject):
    code = "import platform\nif rank: platform.python_version = lambda: '3.99.0'"
    assert "and 3.99.0 on rank 1: start all ranks" in one_error(inject("ddp.py", 2, code))


FLIP = """
from common.checkpoint import Checkpoints
after_step = Checkpoints.after_step
def flip(self, step):
    if step == 4 and rank == {rank}:
        tensor = self.tensors["{name}"]
        tensor = self.optimizer.state[tensor]["{state}"] if "{state}" else tensor
        tensor = getattr(tensor, "_local_tensor", tensor).detach()
        tensor.view(-1)[0:1].view(torch.int64).bitwise_xor_(1)
    return after_step(self, step)
import torch
Checkpoints.after_step = flip
"""
NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize("command, world, name, state", sampled(
    [("ddp.py", 2, HEAD, ""), ("ddp.py", 4, NORM, "exp_avg_sq"), ("cp.py", 2, NORM, ""),
     ("tp.py", 2, NORM, ""), ("fsdp.py --replicate 2", 2, HEAD, "exp_avg"),
     ("hybrid_3d.py --tp 2 --cp 2", 4, NORM, ""), ("hybrid_3d.py --pp 2 --tp 2", 4, NORM, "")],
    [("tp.py", 2, NORM, "")],
))
def test_a_bit_that_flips_on_one_rank_is_found(inject, command, world, name, state):
    where = world - 1 if "pp" in command else 1
    code = FLIP.format(rank=where, name=name, state=state)
    result = inject(command, world, code, "--check-replicas 5 --save-every 0")
    line = one_error(result)
    kind = "the optimizer's states of " if state else ""
    assert f"after step 5 {kind}{name} should be equal and is not: rank " in line
    assert f"rank {where}" in line and name in line
    if command == "tp.py":  # without the option nobody notices
        assert inject(command, world, code, "--save-every 0 --no-resume").ok


@pytest.mark.parametrize("command, world", sampled(
    COMMANDS, [("cp.py", 2)]
))
def test_replicas_are_equal_in_every_script(run, corpus, command, world):
    run(command, world, f"{OPTIONS} --data {corpus} --check-replicas 1")


@thorough
def test_running_statistics_are_each_ranks_own(run):
    run("examples/ddp_convnet.py", 2, "--steps 4 --check-replicas 1 --save-every 2")


def test_the_sum_of_bits_sees_every_bit():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.ones(5, 3).to(dtype)
        before = sum_of_bits([tensor])
        for bit in range(8 * tensor.itemsize):
            flipped = tensor.clone()
            flipped.view(torch.uint8)[2, bit // 8] ^= 1 << bit % 8
            assert sum_of_bits([flipped]) != before
    assert sum_of_bits([torch.tensor(1.0), torch.tensor(2.0)]) != sum_of_bits(
        [torch.tensor(2.0), torch.tensor(1.0)])


def test_the_extremes_of_a_sum_are_compared(monkeypatch):
    """Largest and smallest number, and places that one rank, or none, holds."""
    import torch.distributed as dist

    largest = torch.iinfo(torch.int64).max
    ranks = [torch.tensor([largest, NOT_HELD, NOT_HELD, -1, 5]),
             torch.tensor([largest, 7, NOT_HELD, 1, 5])]

    def all_reduce(both, *_, **__):
        both.copy_(torch.stack([
            torch.stack([s, torch.where(s == NOT_HELD, NOT_HELD, ~s)]) for s in ranks
        ]).amax(0))

    def all_gather(into, _, **__):
        for tensor, sums in zip(into, ranks):
            tensor.copy_(sums[3])

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    assert first_difference(ranks[0]) == (3, [[0], [1]])
    ranks[0][3] = 1
    assert first_difference(ranks[0]) is None


# One run, one folder


@pytest.mark.parametrize("command, world", sampled([("single.py", 0), ("ddp.py", 2)],
                                                   [("ddp.py", 2)]))
def test_a_folder_that_another_run_uses(run, corpus, tmp_path, command, world):
    (tmp_path / "out").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys, time; from common.checkpoint import _lock; "
         "from pathlib import Path; f = _lock(Path('out')); print('held', flush=True); "
         "time.sleep(600)"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        line = one_error(run(command, world, f"{OPTIONS} --data {corpus}", expect_ok=False))
        assert f"out is in use by process {holder.pid} on " in line
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]
    finally:
        holder.kill()
        holder.wait()
    run(command, world, f"{OPTIONS} --data {corpus}")  # the lock has died with its holder


def test_a_folder_that_cannot_be_locked(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    checkpoint._lock(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be locked (No locks available)" in line


# Signals


SIGNAL = """
import signal, time
from common.metrics import Metrics
begin_step = Metrics.begin_step
def ask(self, step):
    if step == 2 and rank == {rank}:
        os.kill(os.getpid(), signal.{name})
        if {twice}:
            time.sleep(1.2)
            os.kill(os.getpid(), signal.{name})
    begin_step(self, step)
Metrics.begin_step = ask
"""


@pytest.mark.parametrize("command, world, name", sampled(
    [(*command, "SIGTERM") for command in COMMANDS]
    + [(*command, name) for command in SAMPLE for name in ("SIGUSR1", "SIGINT")],
    [(*command, "SIGTERM") for command in SAMPLE],
))
def test_a_signal_to_one_rank_lets_all_save(run, inject, whole, corpus, command, world, name):
    """They end with status 0; the same command goes on to the same end."""
    code = SIGNAL.format(rank=max(world - 1, 0), name=name, twice=False)
    stopped = inject(command, world, code, expect_ok=True)
    (saved,) = checkpoint.list_checkpoints(stopped.out)
    assert checkpoint.step_of(saved) in (3, 4)
    (line,) = [line for line in stopped.lines if "stopped" in line]
    assert line == (f"stopped after step {checkpoint.step_of(saved)} of 8, saved: the same command "
                    f"goes on from there") == stopped.lines[-1]
    again = run(command, world, f"{OPTIONS} --data {corpus}")
    assert [record["step"] for record in again.history] == list(range(1, 9))
    assert_bit_equal(tensors(again.out, 8), tensors(whole(command, world), 8))


@pytest.mark.parametrize("options, end", [
    ("--async-save", "saved: the same command goes on from there"),
    ("--save-every 0", "and nothing is saved"),
])
def test_a_signal_beside_other_options(inject, options, end):
    result = inject("ddp.py", 2, SIGNAL.format(rank=0, name="SIGTERM", twice=False), options,
                    expect_ok=True)
    assert result.lines[-1].startswith("stopped after step") and result.lines[-1].endswith(end)
    assert len(checkpoint.list_checkpoints(result.out)) == ("async" in options)


def test_a_second_signal_ends_at_once(inject):
    result = inject("single.py", 0, SIGNAL.format(rank=0, name="SIGTERM", twice=True))
    assert result.statuses == [-signal.SIGTERM] and not checkpoint.list_checkpoints(result.out)


@thorough
def test_data_workers_outlive_the_signal(inject):
    """It may reach every process of a run."""
    code = SIGNAL.format(rank=0, name="SIGTERM", twice=False).replace(
        "os.kill(os.getpid()", "os.killpg(os.getpgid(0)")
    result = inject("single.py", 0, code, "--workers 2", expect_ok=True)
    assert "saved: the same command" in result.lines[-1]


def started(folder):
    """Whether a run has logged a few steps."""
    log = folder / "runs" / "ddp" / "metrics.jsonl"
    return log.exists() and len(log.read_text().splitlines()) > 3


@thorough
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_run_sh_ends_with_one_line(tmp_path, corpus, name):
    options = f"{OPTIONS} --data {corpus} --steps 100000 --save-every 50000"
    process = start([*RUN, "ddp.py", *options.split()], tmp_path, NPROC="2", MAX_RESTARTS="3")
    wait_until(lambda: started(tmp_path))
    os.kill(process.pid, getattr(signal, name))
    output = finish(process)
    assert process.returncode == 0, output
    lines = [line for line in output.splitlines() if "steps/s" not in line and line]
    assert lines[-1].startswith("stopped after step") and "saved" in lines[-1]
    assert len(lines) == 6 and "Traceback" not in output  # the command, four lines of the start
    assert len(checkpoint.list_checkpoints(tmp_path / "runs" / "ddp")) == 1
    assert not left_over(tmp_path)


@thorough
def test_run_sh_ends_at_once_at_a_second_signal(tmp_path, corpus):
    """Also if a rank has stopped, so that the others cannot save."""
    options = f"{OPTIONS} --data {corpus} --steps 100000 --save-every 50000"
    process = start([*RUN, "ddp.py", *options.split()], tmp_path, NPROC="2", MAX_RESTARTS="3")
    wait_until(lambda: started(tmp_path))
    workers = children(process.pid)
    os.kill(workers[1], signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    finish(process, timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not left_over(tmp_path))


@pytest.mark.parametrize("launcher, name", sampled(
    [("run.sh", "SIGKILL"), ("torchrun", "SIGKILL"), ("torchrun", "SIGUSR1"),
     ("torchrun", "SIGTERM")], [("torchrun", "SIGKILL")],
))
def test_processes_that_lose_their_launcher_save_and_end(tmp_path, corpus, launcher, name):
    options = f"{OPTIONS} --data {corpus} --steps 100000 --save-every 50000"
    command = [*RUN, "ddp.py"] if launcher == "run.sh" else [*TORCHRUN, ROOT / "ddp.py"]
    process = start([*command, *options.split()], tmp_path, NPROC="2", PYTHONPATH=str(ROOT))
    wait_until(lambda: started(tmp_path))
    os.kill(process.pid, getattr(signal, name))
    wait_until(lambda: not left_over(tmp_path))
    assert "saved: the same command goes on from there" in finish(process)
    assert len(checkpoint.list_checkpoints(tmp_path / "runs" / "ddp")) == 1


@thorough
def test_a_script_without_torchrun_outlives_its_parent(tmp_path, corpus):
    options = f"{OPTIONS} --data {corpus}"
    command = f"{sys.executable} {ROOT}/single.py {options} >log 2>&1 & sleep 1"
    shell = start(["bash", "-c", command], tmp_path)
    finish(shell)
    wait_until(lambda: "final loss" in (tmp_path / "log").read_text())


# Faults


def test_a_process_that_dies_leaves_one_line(inject):
    code = SIGNAL.format(rank=1, name="SIGKILL", twice=False)
    result = inject("ddp.py", 2, code)
    (line,) = [line for line in result.lines if "error:" in line]
    assert "a collective of rank 0 failed, since another process has ended" in line
    assert result.statuses == [1, -9] and "Traceback" not in result.output


def test_an_error_of_ones_own_model_keeps_its_traceback(inject):
    code = ("from common.model import Transformer\n"
            "def forward(*_): raise RuntimeError('my own fault')\n"
            "Transformer.forward = forward")
    result = inject("ddp.py", 2, code)
    assert result.output.count("Traceback") == 1 and "RuntimeError: my own fault" in result.output


def test_an_error_of_the_system_in_the_loop_keeps_its_traceback(inject):
    code = ("from common.metrics import Metrics\n"
            "def begin_step(self, step): raise OSError(5, 'my disk')\n"
            "Metrics.begin_step = begin_step")
    assert "Traceback" in inject("single.py", 0, code).output
    code = code.replace("begin_step", "_place").replace("self, step", "self")
    assert one_error(inject("single.py", 0, code)) == "single.py: error: OSError: [Errno 5] my disk"


@thorough
@pytest.mark.parametrize("command", ["ddp.py --lr fast", "hybrid_3d.py --tp 3"])
def test_the_line_of_a_rank_that_is_faster_than_rank_0(tmp_path, command):
    """torchrun ends rank 0 before it has parsed anything."""
    script, *options = command.split()
    result = subprocess.run(
        [*TORCHRUN, ROOT / "tests" / "injected.py", script, *options], cwd=tmp_path,
        capture_output=True, text=True, timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "INJECT": (
            f"module = importlib.import_module('{script[:-3]}')\n"
            "parse, time = module.parse_arguments, __import__('time')\n"
            "def slow(*a):\n    time.sleep(30 * (rank == 0))\n    return parse(*a)\n"
            "module.parse_arguments = slow")},
    )
    assert result.returncode and result.stderr.count(": error: ") == 1, result.stderr


# Steps that must not be saved


@pytest.mark.parametrize("command, world", sampled(COMMANDS, [("single.py", 0), ("fsdp.py", 2)]))
def test_a_step_that_is_not_finite_is_not_saved(run, corpus, command, world):
    options = f"{OPTIONS} --data {corpus} --dtype float32 --save-every 1 --warmup-steps 0"
    line = one_error(run(command, world, f"{options} --lr 3e38 --log-every 9", expect_ok=False))
    assert "is not saved, since" in line and "is not finite: training diverged; lower --lr" in line
    assert not list((pathlib.Path(line.split(" ")[0]).parent).glob("out/step-*"))


def test_a_mask_of_infinities_is_saved(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    checkpoints = checkpoint.Checkpoints(
        tmp_path, {}, model.state_dict(keep_vars=True), optimizer, stop=9, every=1)
    checkpoints.resume()
    checkpoints.after_step(0)
    assert checkpoint.read(tmp_path / "step-00000001")["mask"].tolist() == [0, float("-inf")]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["momentum_buffer"][1, 1] = float("nan")
    with pytest.raises(SettingError, match="step 2 is not saved, since weight is not finite"):
        checkpoints.after_step(1)
    assert len(checkpoint.list_checkpoints(tmp_path)) == 1


@pytest.mark.parametrize("options", sampled(["", "--async-save"], [""]))
@pytest.mark.parametrize("rank", sampled([0, 1], [1]))
def test_a_disk_that_is_full(inject, whole, rank, options, run, corpus):
    """One line from all; the half-written checkpoint is gone, and the older one is intact."""
    code = ("fsync = os.fsync\n"
            "def full(descriptor):\n"
            "    if rank == %d and os.path.isdir('out/step-00000008.tmp'):\n"
            "        raise OSError(28, 'No space left on device')\n"
            "    fsync(descriptor)\n"
            "os.fsync = full" % rank)
    result = inject("ddp.py", 2, code, options)
    assert ("the checkpoint of step 8 could not be written to" in one_error(result)
            and f"(rank {rank}: " in result.output and "No space left on device" in result.output)
    assert [path.name for path in result.out.glob("step-*")] == ["step-00000004"]
    again = run("ddp.py", 2, f"{OPTIONS} --data {corpus}")
    assert_bit_equal(tensors(again.out, 8), tensors(whole("ddp.py", 2), 8))


@pytest.mark.parametrize("what, message", [
    ("common.checkpoint.write_text", "could not be written to"),
    ("common.checkpoint.write_hashes", "could not be written to"),
    ("common.metrics.json.dumps", "cannot be written (No space left on device)"),
])
def test_a_file_that_cannot_be_written(inject, what, message):
    module, _, name = what.rpartition(".")
    code = (f"import common.checkpoint, common.metrics\n"
            f"def full(*_, **__):\n    raise OSError(28, 'No space left on device', 'out/x')\n"
            f"{module}.{name} = full")
    if "json" in what:
        code = ("import common.metrics\n"
                "class Full:\n"
                "    def write(self, _): raise OSError(28, 'No space left on device')\n"
                "common.metrics._open_log = lambda *_: (Full(), [])")
    assert message in one_error(inject("single.py", 0, code))


def test_a_log_that_cannot_be_opened(run, corpus, tmp_path):
    (tmp_path / "out" / "metrics.jsonl").mkdir(parents=True)
    result = run("single.py", 0, f"{OPTIONS} --data {corpus} --save-every 0", expect_ok=True)
    assert (tmp_path / "out" / "previous-1" / "metrics.jsonl").is_dir()  # moved aside, as any log
    shutil.rmtree(tmp_path / "out")
    run("single.py", 0, f"{OPTIONS} --data {corpus} --steps 4")
    (result.out / "metrics.jsonl").unlink()
    (result.out / "metrics.jsonl").mkdir()
    line = one_error(run("single.py", 0, f"{OPTIONS} --data {corpus}", expect_ok=False))
    assert "metrics.tmp cannot be written (Is a directory)" in line


def test_old_checkpoints_that_cannot_be_removed(inject):
    code = ("import shutil\n"
            "def fail(path, ignore_errors=False):\n"
            "    if not ignore_errors: raise OSError(16, 'busy')\n"
            "shutil.rmtree = fail")
    result = inject("single.py", 0, code, "--keep 1 --save-every 2", expect_ok=True)
    assert len(list(result.out.glob("step-*.old"))) == 3
