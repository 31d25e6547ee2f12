"""What a user sees: the terminal, the run folder, the launcher, and how a run ends."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from common import checkpoint
from tests.processes import PATIENCE, ROOT
from tests.sample import sampled, thorough
from tests.test_same_run import EXACT

SMALL = "--hidden-size 32 --seq-len 32 --batch-size 8"


@pytest.mark.parametrize("script, world", [("single.py", 0), ("ddp.py", 2)])
def test_the_terminal(run, corpus, script, world):
    options = f"{SMALL} --steps 4 --log-every 2 --grad-accum 2 --data {corpus}"
    result = run(script, world, options)
    bars = [line for line in result.lines if "|" in line and "/4 [" in line]
    lines = [line for line in result.lines if line not in bars]
    start, model, batch, data, final, *table = lines
    ranks = world or 1
    grid = " (gloo), rank grid dp 2" if world else ""
    assert start == f"{script}: {'2 processes' if world else '1 process'} on cpu{grid}"
    assert re.fullmatch(r"model tiny: [\d,]+ parameters, float32", model)
    share = f"{8 // ranks // 2} samples x 2 accumulation steps x {ranks} data-parallel rank"
    assert batch == f"batch 8 = {share}{'s' if ranks > 1 else ''}"
    assert re.fullmatch(r"[\d,]+ samples of 32 tokens in .*corpus.txt", data)
    assert ("4/4" in bars[-1] and "loss" in bars[-1] and "grad norm" in bars[-1]
            and "tokens/s" in bars[-1])
    assert final.startswith("final loss ") and "tokens/s" in final
    assert table[0].split("  ")[0] == "bytes on rank 0" and table[0].endswith("theory")
    rows = [re.split(r"  +", line) for line in table[1:]]
    assert [row[0] for row in rows] == [
        "parameters", "gradients", "optimizer states", "activations", "in all", "sent in a step"
    ]
    assert rows[0][1] == rows[0][2] == rows[0][3].removeprefix("P = ")


def test_metrics_lines(run, corpus):
    result = run("ddp.py", 2, f"{SMALL} --steps 7 --log-every 3 --save-every 5 --data {corpus}")
    assert [record["step"] for record in result.history] == [1, 3, 5, 6, 7]
    for record in result.history:
        assert record.keys() == {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second"}
        assert record["tokens"] == record["step"] * 8 * 32
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(result.out)] == [5, 7]


def test_the_share_of_the_peak_is_reported(run, corpus):
    """By the GPU's name, or as given: here 2 ranks of 0.1 TFLOP/s."""
    from common.model import ModelConfig

    options = f"{SMALL} --steps 6 --log-every 1 --data {corpus}"
    result = run("ddp.py", 2, f"{options} --peak-tflops 0.1")
    flops = ModelConfig(
        hidden_size=32, intermediate_size=352, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4,
    ).flops_per_token(32)
    for record in result.history:
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / 0.2e12)
    assert f"MFU {result.summary['mfu']:.1%}" in result.output
    assert "MFU" not in run("ddp.py", 2, options, out="other").output  # of no CPU the peak is known


@thorough
def test_the_benchmark_runs(tmp_path):
    command = ["bash", ROOT / "run.sh", "bench", "--rounds", "1", "--least", "2", "--most", "4"]
    result = subprocess.run(
        [*command, "--only", "ddp.py"], cwd=tmp_path, capture_output=True, text=True,
        timeout=PATIENCE, env=os.environ | {"PYTHON": sys.executable},
    )
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["tools/tutorial.py", "ddp.py"]


def test_profile_writes_a_trace_per_rank(run, corpus):
    result = run("ddp.py", 2, f"{SMALL} --steps 6 --profile --data {corpus}")
    # What a torch with CUDA says on a machine without GPUs
    said = re.sub("ERROR.*DeviceProperties.*\n", "", result.output).lower()
    assert "error" not in said and "warn" not in said
    for rank in (0, 1):
        events = json.loads((result.out / f"trace-rank{rank}.json").read_text())["traceEvents"]
        names = " ".join(event.get("name", "") for event in events)
        assert "allreduce" in names and "ProfilerStep#3" in names
        assert "ProfilerStep#2" not in names  # that one is counted, which takes its time


def test_help_once(run):
    result = run("ddp.py", 2, "--help", pass_out=False)
    assert result.output.count("usage:") == 1
    for words in ("all-reduce of the gradients", "--num-key-value-heads N",
                  "optimizer steps in the whole run", "run folder:"):
        assert words in result.output


def test_help_waits_for_no_rank(run):
    """Rank 0 has printed it and ended before rank 1 begins."""
    late = {"INJECT": "import time\ntime.sleep(3 * rank)"}
    run("tests/injected.py ddp.py", 2, "--help", pass_out=False, env=late, timeout=60)


@pytest.mark.parametrize("script, runs", sampled(
    [("ddp.py", 5), ("ddp.py", 20), ("zero.py", 20), ("fsdp.py", 20)], [("ddp.py", 5)]
))
def test_good_runs_end_with_status_0(run, corpus, script, runs):
    """gloo can abort or hang while the interpreter is taken down, so it is not: see ``launch``."""
    for i in range(runs):
        options = f"{ROOT}/{script} {SMALL} --steps 2 --num-hidden-layers 2 --data {corpus}"
        result = run("tests/with_exit_handler.py", 2, options, out=f"out-{i}")
        assert result.statuses == [0, 0] and "final loss" in result.output
        assert result.output.count("the handler has run") == 2
        assert "the interpreter is finalised" not in result.output


@pytest.fixture
def bash(tmp_path):
    def bash(arguments, **environment):
        environment = {**os.environ, "PYTHON": sys.executable, **environment}
        return subprocess.run(
            ["bash", str(ROOT / "run.sh"), *arguments.split()],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE,
        )

    return bash


def test_run_sh(bash, tmp_path, corpus):
    result = bash(f"ddp.py --steps 3 {SMALL} --data {corpus}")
    assert result.returncode == 0, result.stderr
    assert "2 processes on cpu (gloo), rank grid dp 2" in result.stdout
    assert "W1" not in result.stderr and "warn" not in result.stderr.lower()  # the bar, and no more
    assert len((tmp_path / "runs" / "ddp" / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (ROOT / ".venv").exists() or ".venv" in sys.executable  # it installed nothing


def test_run_sh_refuses_in_words(bash):
    for arguments, message in (
        ("", "say what to run"), ("dpp.py", "dpp.py: no such script; there are cp.py ddp.py"),
        ("single.py", "single.py is one process: unset NPROC"),
    ):
        result = bash(arguments, NPROC="2")
        assert result.returncode == 1 and message in result.stderr
        assert len(result.stderr.splitlines()) == 1 and not result.stdout


@thorough
def test_restarted_by_torchrun_after_a_kill(run, corpus, tmp_path):
    """A worker is killed in mid-run: torchrun starts both again, and the weights end the same."""
    options = f"{EXACT} --steps 60 --save-every 10 --data {corpus}"
    expected = run("ddp.py", 2, options, out="whole")
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost",
         "--nproc-per-node=2", "--max-restarts=1", ROOT / "ddp.py", *options.split(),
         "--out", "killed"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not checkpoint.list_checkpoints(tmp_path / "killed"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = pathlib.Path(
            f"/proc/{process.pid}/task/{process.pid}/children"
        ).read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "resuming after step" in output
    last = "step-00000060"
    found = checkpoint.read(tmp_path / "killed" / last, prefix="")
    for name, tensor in checkpoint.read(expected.out / last, prefix="").items():
        assert torch.equal(found[name], tensor), name
