"""Every bad input ends with one line and a non-zero status, before anything else happens."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.processes import PATIENCE, ROOT, free_port
from tests.sample import sampled

HUGE = "1" + "0" * 400
WHOLE = {  # options that are whole numbers: their least value
    "--steps": 1, "--batch-size": 1, "--grad-accum": 1, "--warmup-steps": 0, "--seed": 0,
    "--seq-len": 1, "--workers": 0, "--timeout": 1, "--save-every": 0, "--keep": 1,
    "--log-every": 1, "--resume-from": 1, "--check-replicas": 0, "--val-every": 1,
    "--val-batches": 1,
}
SIZES = ["--vocab-size", "--hidden-size", "--intermediate-size", "--num-hidden-layers",
         "--num-attention-heads", "--num-key-value-heads", "--head-dim"]
NUMBERS = ["--lr", "--min-lr", "--weight-decay", "--beta1", "--beta2", "--grad-clip",
           "--peak-tflops", "--rms-norm-eps", "--rope-theta", "--initializer-range"]
OPTIONS = [
    *[(f"{name} {least - 1}", f"{name}: {least - 1} is not allowed: it must be at least {least}")
      for name, least in WHOLE.items()],
    *[(f"{name} {HUGE}", f"{name}: 1000") for name in (*WHOLE, *SIZES)],
    *[(f"{name} 4000000000", f"{name}: 4000000000 is not allowed: it must be at most ")
      for name in SIZES],
    *[(f"{name} 1.5", f"{name}: invalid whole number value: '1.5'") for name in WHOLE],
    *[(f"{name} 0", f"{name}: 0 is not allowed: it must be greater than 0") for name in SIZES],
    *[(f"{name} {value}", f"{name}: {value} is not allowed")
      for name in NUMBERS for value in ("nan", "inf", "-1")],
    *[([name, ""], f"{name}: invalid number value: ''") for name in NUMBERS],
    ("--batch-size 1000000000000", "1000000000000 is not allowed: it must be at most 16777216"),
    ("--vocab-size 10000000000000", "--vocab-size: 10000000000000 is not allowed"),
    ("--hidden-size 2147483520 --num-attention-heads 8", "overflow"),
    ("--vocab-size 2000000000 --hidden-size 800000 --num-attention-heads 8", "memory"),
    ("--beta1 1", "--beta1 1.0 is not allowed: it must be less than 1"),
    ("--head-dim 7", "head_dim 7 is odd"),
    ("--num-attention-heads 7", "7 does not divide hidden_size 128"),
    ("--model huge", "no such preset"), (["--model", ""], "no such preset"),
    ("--dtype float16", "invalid choice"), ("--device tpu", "invalid choice"),
    ("--backend smoke", "invalid choice"), ("--token-dtype int3", "invalid choice"),
    ("--unknown", "unrecognized arguments: --unknown"), ("--steps", "expected one argument"),
    ("--profile --steps 3", "it traces from the fourth step"),
    (["--out", ""], "--out: it is empty: name a folder"),
    ("--out file", "file cannot be written (File exists)"),
    ("--out file/run", "file/run cannot be written (Not a directory)"),
    ("--out /proc/nothing/run", "/proc/nothing/run cannot be written"),
    ("--out loop/run", "loop/run cannot be written"),
    (["--data", ""], "--data '': no such file or folder"),
    ("--data nowhere", "--data nowhere: no such file"),
    ("--data dangling", "--data dangling: no such file"),
    ("--data loop", "--data loop: no such file"),
    ("--data with-dangling", "dangling cannot be read (No such file or directory)"),
    ("--data with-loop", "loop cannot be read (Too many levels of symbolic links)"),
    ("--data with-fifo", "fifo cannot be read (not a regular file)"),
    ("--data fifo", "fifo cannot be read (not a regular file)"),
    ("--data empty", "--data empty holds 0 tokens"),
    ("--data file --seq-len 2000000000", "one sample of --seq-len 2000000000 takes 2000000001"),
    ("--data odd.bin", "not a whole number of uint16 tokens"),
    ("--data big.bin", "beyond a vocabulary of 256"),
    ("--data mixed", "mixes .bin files (token ids) with others (text)"),
    (["--val-data", ""], "--val-data: it is empty: name a file or a folder"),
    ("--val-data nowhere", "--val-data nowhere: no such file"),
    ("--val-data with-fifo", "--val-data: with-fifo/fifo cannot be read (not a regular file)"),
    ("--val-data empty", "--val-data empty holds 0 tokens"),
    ("--val-data mixed", "--val-data mixed mixes .bin files (token ids) with others (text)"),
    ("--val-data big.bin", "big.bin holds token 300, beyond a vocabulary of 256"),
    ("--val-data file --batch-size 79",
     "--val-data has 78 samples of 128 tokens in file, less than one batch of --batch-size 79:"),
    ("--data shrinks.bin", "shrinks.bin cannot be read any more"),
    (["--data", os.fsdecode(b"\xff\xfe")], r"--data \udcff\udcfe: no such file"),
    (["--data", "\x1b[2Jx"], r"--data \x1b[2Jx: no such file"),
    (["--out", os.fsdecode(b"file/\xff")], r"file/\udcff cannot be written"),
]
TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ENVIRONMENTS = [
    ({"RANK": ""}, "RANK is '': it must be a whole number"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE is '': it must be a whole number"),
    ({"WORLD_SIZE": "0"}, "RANK 0 must be at least 0 and less than WORLD_SIZE 0"),
    ({"RANK": "-1"}, "RANK is '-1': it must be a whole number"),
    ({"RANK": "2"}, "RANK 2 must be at least 0 and less than WORLD_SIZE 2"),
    ({"RANK": "one"}, "RANK is 'one': it must be a whole number"),
    ({"RANK": HUGE}, "RANK is '1000"), ({"RANK": None}, "RANK is None and WORLD_SIZE is 2"),
    ({"WORLD_SIZE": None}, "RANK is 0 and WORLD_SIZE is None"),
    *[({"MASTER_PORT": port}, f"MASTER_PORT is '{port}': it must be a whole number from 1 to 65535")
      for port in ("foo", "-5", "99999", "", "0", "1.5")],
    ({"MASTER_PORT": None}, "RANK is set but not MASTER_PORT"),
    ({"MASTER_ADDR": None}, "RANK is set but not MASTER_ADDR"),
    ({"MASTER_ADDR": ""}, "MASTER_ADDR is '': this machine cannot resolve that name"),
    ({"MASTER_ADDR": "no-such-machine.invalid"},
     "MASTER_ADDR is 'no-such-machine.invalid': this machine cannot resolve that name"),
    ({"MASTER_ADDR": "a" * 300}, "this machine cannot resolve that name"),
    ({"WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth99"},
     "GLOO_SOCKET_IFNAME is 'eth99': the network interfaces of this machine are "),
    ({"WORLD_SIZE": "1", "MASTER_PORT": "{taken}"}, "Address already in use"),
    ({"RANK": None, "WORLD_SIZE": None, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "abc"},
     "SLURM_STEP_NUM_TASKS is 'abc': it must be a whole number"),
    ({"RANK": None, "WORLD_SIZE": None, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2",
      "SLURM_STEP_NODELIST": "a b", "MASTER_ADDR": None},
     "cannot tell the first host of SLURM_STEP_NODELIST 'a b'"),
    ({"RANK": None, "WORLD_SIZE": None, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2",
      "SLURM_STEP_NODELIST": "a", "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is 'x'"),
    ({"RANK": None, "WORLD_SIZE": None, "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with data of every bad kind."""
    folder = tmp_path_factory.mktemp("input")
    (folder / "file").write_text("text " * 2000)
    (folder / "empty").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    for name in ("dangling", "loop", "fifo"):
        (folder / f"with-{name}").mkdir()
        os.rename(folder / name, folder / f"with-{name}" / name)
        (folder / f"with-{name}" / "text").write_text("text")
        (folder / name).symlink_to(f"with-{name}/{name}")
    (folder / "mixed").mkdir()
    for name in ("a.bin", "b.txt"):
        (folder / "mixed" / name).write_bytes(bytes(500))
    (folder / "odd.bin").write_bytes(bytes(301))
    np.full(5000, 300, np.uint16).tofile(folder / "big.bin")
    np.zeros(5000, np.uint16).tofile(folder / "shrinks.bin")
    return folder


def wrong(case, result, message):
    """What is wrong with the end of a run that should fail: a list, empty if nothing is."""
    line = result.output.removesuffix("\n")
    good = (
        result.statuses[0] not in (0, -9)
        and line.startswith(("single.py: error: ", "ddp.py: error: ")) and message in line
        and line.isprintable() and len(line) < 600  # one line, then
    )
    return [] if good else [(case, message, result.statuses, result.output)]


def test_options(server, folder, request):
    """Some 130 of them; without --all every third."""
    assert len(OPTIONS) > 100
    found = []
    for options, message in OPTIONS[:: 1 if request.config.getoption("--all") else 3]:
        options = options if isinstance(options, list) else options.split()
        env = {}
        if "shrinks.bin" in options:  # a file that is cut while the run starts
            env["INJECT"] = ("from common.data import TokenDataset\nlength = TokenDataset.__len__\n"
                             "def shrink(self):\n    os.truncate('shrinks.bin', 100)\n"
                             "    return length(self)\nTokenDataset.__len__ = shrink")
        script = "tests/injected.py single.py" if env else "single.py"
        out = [] if "--out" in options else ["--out", "out"]
        data = [] if "--data" in options else ["--data", "file"]
        result = server.run(script, 0, [*data, *out, *options], folder=folder, pass_out=False,
                            env=env, expect_ok=False, timeout=30)
        found += wrong(options, result, message)
    assert found == []
    assert not (folder / "out" / "metrics.jsonl").exists()


def test_environments(server, folder):
    import socket

    found = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for change, message in ENVIRONMENTS:
            env = TWO | {"MASTER_PORT": str(free_port())} | change
            env = {name: port if value == "{taken}" else value for name, value in env.items()}
            result = server.run("ddp.py", 0, ["--data", "file"], folder=folder, env=env,
                                expect_ok=False, timeout=30)
            found += wrong(change, result, message)
    assert found == []


@pytest.mark.parametrize("command, environment, message", [
    ("README.md", {}, "README.md is no Python script; there are cp.py ddp.py"),
    ("nothing.py", {}, "nothing.py: no such script"), ("", {}, "say what to run"),
    ("ddp.py", {"PYTHON": "/bin/true"}, "PYTHON is '/bin/true': that is no Python"),
    ("ddp.py", {"PYTHON": "/nowhere"}, "PYTHON is '/nowhere': that is no Python"),
    ("ddp.py", {"NPROC": "0"}, "NPROC is '0': it must be a whole number, at least 1"),
    ("ddp.py", {"NNODES": "2:1"}, "NNODES is '2:1': give MIN:MAX machines, with MIN at least 1"),
    ("ddp.py", {"NNODES": "1:x"}, "NNODES is '1:x': it must be a whole number"),
    ("ddp.py", {"MASTER_PORT": "foo"}, "MASTER_PORT is 'foo': it must be a whole number"),
    ("ddp.py", {"MASTER_PORT": "99999"}, "MASTER_PORT is 99999: the highest port is 65535"),
])
def test_run_sh(tmp_path, command, environment, message):
    result = subprocess.run(
        ["bash", ROOT / "run.sh", *command.split()], cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, "PYTHON": sys.executable, **environment}, timeout=PATIENCE,
    )
    (line,) = result.stderr.splitlines()
    assert line.startswith("run.sh: error: ") and message in line and result.returncode == 1


@pytest.mark.parametrize("name", sampled(["a-file", "a-folder"], ["a-folder"]))
def test_what_may_not_be_read(tmp_path, name):
    """As a user without the right to read it; root, who has all rights, gives them up."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text").write_text("text " * 1000)
    (tmp_path / "data" / "a-folder").mkdir()
    (tmp_path / "data" / "a-file").write_text("secret")
    os.chmod(tmp_path / "data" / name, 0)
    prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] * (os.getuid() == 0)
    result = subprocess.run(
        [*prefix, sys.executable, ROOT / "single.py", "--data", "data", "--steps", "1"],
        cwd=tmp_path, text=True, capture_output=True, timeout=PATIENCE,
    )
    os.chmod(tmp_path / "data" / name, 0o700)
    (line,) = result.stderr.splitlines()
    assert f"data/{name} cannot be read (Permission denied)" in line and result.returncode == 1
