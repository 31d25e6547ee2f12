"""W&B, offline, and TensorBoard have what metrics.jsonl has, and no logger ends a run.

Python has no reader of W&B's file, so W&B's own command reads it: ``wandb leet inspect --json``.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support.processes import PATIENCE, ROOT
from tests.support.sample import thorough

OPTIONS = ("--hidden-size 16 --intermediate-size 24 --num-attention-heads 4 "
           "--num-key-value-heads 2 --num-hidden-layers 1 --seq-len 16 --batch-size 8 --steps 4 "
           "--log-every 1 --save-every 2 --val-every 2 --val-batches 1")
pytest.importorskip("wandb")
pytest.importorskip("tensorboard")


@pytest.fixture
def log(run, corpus, held_out):
    """Runs a script with the loggers, offline."""
    def log(command, world, options, **more):
        options = f"{OPTIONS} --data {corpus} --val-data {held_out} {options}"
        return run(command, world, options, env={"WANDB_MODE": "offline"}, **more)

    return log


def read_wandb(folder):
    """What one start has given to W&B: its settings, and a dict of the values by step."""
    text = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", folder], check=True,
        capture_output=True, text=True, timeout=PATIENCE,
    ).stdout
    records = [json.loads(line) for line in text.splitlines()]
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    return run, {row["_step"]: {k: row[k] for k in row if k[0] != "_"} for row in rows}


def read_tensorboard(folder):
    """A dict of the values by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    rows = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in rows.setdefault(event.step, {})  # each step once
            rows[event.step][name] = event.value
    return rows


def logged(result, kind=float):
    """What metrics.jsonl has: a dict of the values by step."""
    rows = {}
    for record in result.history:
        values = {name: float(kind(value)) for name, value in record.items() if name != "step"}
        rows.setdefault(record["step"], {}).update(values)
    return rows


def test_both_have_what_the_run_has_logged_and_a_resume_continues_it(log):
    """Rank 0 alone logs. Step 3, which the resume repeats, TensorBoard shows once."""
    ended = log("ddp.py", 2, "--wandb mine --tensorboard", inject="at(4, kill_self)",
                expect_ok=False)
    assert list(logged(ended)) == [1, 2, 3]
    result = log("ddp.py", 2, "--wandb mine --tensorboard")
    rows = logged(result)
    assert list(rows) == [1, 2, 3, 4] and "val_loss" in rows[2]
    first, second = sorted(result.out.glob("wandb/offline-run-*"))
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    run, found = read_wandb(second)
    assert found == {step: rows[step] for step in (3, 4)} and run["project"] == "mine"
    assert run["config"]["update"]["batch_size"] == 8
    assert read_tensorboard(result.out / "tensorboard") == logged(result, np.float32)
    assert f"W&B: wandb sync {second}" in result.output


@pytest.mark.parametrize("option, inject, name", [
    ("--wandb mine", "loggers.start_wandb = lambda *_: 1 / 0", "log_to_wandb"),
    ("", "after(loggers, 'chosen_loggers', lambda chosen, *_: "  # a user's
     "chosen.insert(0, lambda record: 1 / (3 - record['step'])))", "<lambda>"),
])
def test_a_logger_that_raises_is_said_once_and_left_out(log, option, inject, name):
    result = log("single.py", 0, option, inject=f"from common.services import loggers\n{inject}")
    assert list(logged(result)) == [1, 2, 3, 4] and "final loss" in result.output
    (line,) = [line for line in result.lines if "ZeroDivisionError: division by zero" in line]
    assert f"{name} failed" in line and "metrics.jsonl" in line


@thorough
def test_w_and_b_without_a_login_does_not_ask_at_a_terminal(corpus, tmp_path):
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    options = f"{OPTIONS} --data {corpus} --wandb mine --out {tmp_path / 'out'}"
    environment = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    result = subprocess.run(
        [sys.executable, "-c", spawn, sys.executable, ROOT / "single.py", *options.split()],
        env=environment | {"HOME": str(tmp_path), "NETRC": "/dev/null"}, cwd=tmp_path,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE,
    )
    assert result.returncode == 0 and "final loss" in result.stdout, result.stdout
    assert result.stdout.count("wandb login") == 1


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package_is_one_line(log, package):
    """Before the run, and also where the working folder has a folder of that name."""
    option = {"wandb": "--wandb mine", "tensorboard": "--tensorboard"}[package]
    result = log("ddp.py", 2, option, inject=f"sys.modules['{package}'] = None", expect_ok=False)
    (line,) = result.lines
    assert all(result.statuses) and f"--{package} needs" in line and f"install {package}" in line
