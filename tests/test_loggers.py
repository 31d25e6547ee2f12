"""common/loggers.py: what W&B, offline, and TensorBoard get, read back from their files.

Python has no reader of W&B's file, so W&B's own command reads it: ``wandb leet inspect --json``.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.processes import PATIENCE
from tests.sample import sampled, thorough

OPTIONS = ("--hidden-size 16 --intermediate-size 24 --num-attention-heads 4 "
           "--num-key-value-heads 2 --num-hidden-layers 1 --seq-len 16 --batch-size 8 --steps 8 "
           "--log-every 1 --save-every 3 --val-every 2 --val-batches 1")
BOTH = "--wandb mine --tensorboard"


@pytest.fixture
def log(run, corpus, held_out, tmp_path):
    """Runs a script with the loggers, and without an account of W&B."""
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    environment = {
        "HOME": str(tmp_path), "NETRC": "/dev/null", "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": None, "WANDB_MODE": None,
    }

    def log(command, world, options, **more):
        options = f"{OPTIONS} --data {corpus} --val-data {held_out} {options}"
        return run(command, world, options, env=environment, **more)

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
    rows = [(row["_step"], {k: row[k] for k in row if k[0] != "_"}) for row in rows]
    assert len(dict(rows)) == len(rows)  # each step once
    return run, dict(rows)


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


def test_both_have_what_the_run_has_logged(log):
    result = log("single.py", 0, BOTH)
    rows = logged(result)
    assert list(rows) == list(range(1, 9)) and "val_loss" in rows[2]
    (folder,) = result.out.glob("wandb/offline-run-*")
    run, history = read_wandb(folder)
    assert history == rows and run["project"] == "mine"
    assert run["config"]["update"]["batch_size"] == 8
    assert read_tensorboard(result.out) == logged(result, np.float32)
    (line,) = [line for line in result.lines if "W&B" in line]
    assert line.endswith(f"wandb sync {folder}") and "wandb: " not in result.output


@pytest.mark.parametrize("event", sampled(
    ["kill_self", "signal_self, 'SIGTERM'", "fail, 'a bug'"], ["kill_self"]))
def test_a_resumed_run_goes_on_in_both(log, event):
    """Whatever has ended it. Rank 0 alone logs."""
    ended = log("ddp.py", 2, BOTH, inject=f"at(6, {event})", expect_ok="TERM" in event)
    before = logged(ended)
    result = log("ddp.py", 2, BOTH)
    rows = logged(result)
    assert 5 <= len(before) <= 7 and list(rows) == list(range(1, 9))
    first, second = sorted(result.out.glob("wandb/offline-run-*"))
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    if event != "kill_self":
        assert read_wandb(first)[1] == before
    history = read_wandb(second)[1]
    assert history == {step: rows[step] for step in range(min(history), 9)}
    assert min(history) <= len(before) + 1
    assert read_tensorboard(result.out) == logged(result, np.float32)


@pytest.mark.parametrize("option, name, fault", sampled(
    [("--wandb mine", "W&B", "kill_wandb"),
     ("--tensorboard", "TensorBoard", "fill_disk_under_tensorboard")],
    [("--tensorboard", "TensorBoard", "fill_disk_under_tensorboard")]))
def test_a_failing_logger_ends_no_run(log, option, name, fault):
    result = log("single.py", 0, option, inject=f"at(5, {fault})")
    assert list(logged(result)) == list(range(1, 9)) and "final loss" in result.output
    (line,) = [line for line in result.lines if "gets no more lines" in line]
    assert f"{name} has failed and gets no more lines; metrics.jsonl has them all" in line


@thorough
def test_an_id_that_a_power_cut_has_cut(log, tmp_path):
    """A new one takes its place."""
    log("single.py", 0, "--wandb mine --steps 3")
    (tmp_path / "out" / "wandb.json").write_text('{"i')
    log("single.py", 0, "--wandb mine")
    run_id = json.loads((tmp_path / "out" / "wandb.json").read_text())["id"]
    assert len([*tmp_path.glob(f"out/wandb/offline-run-*-{run_id}")]) == 1


@pytest.mark.parametrize("command, world, option, package", [
    ("ddp.py", 2, "--wandb mine", "wandb"), ("single.py", 0, "--tensorboard", "tensorboard"),
])
def test_a_missing_package_is_one_line_before_all_others(log, command, world, option, package):
    inject = f"sys.modules['{package}'] = None"
    result = log(command, world, option, inject=inject, expect_ok=False)
    assert all(result.statuses) and result.lines == [
        f"{command}: error: --{package} needs the package {package}: "
        f"python -m pip install {package}"
    ]
