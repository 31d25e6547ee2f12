"""W&B, offline, and TensorBoard have what metrics.jsonl has, and no logger ends a run.

Python has no reader of W&B's file, so W&B's own command reads it: ``wandb leet inspect --json``.
"""

import argparse
import json
import subprocess
import sys
import time

import pytest

from common.errors import SettingError
from common.services import loggers
from tests.support.processes import PATIENCE, SMALL

wandb = pytest.importorskip("wandb")
pytest.importorskip("tensorboard")


def read_wandb(folder):
    """What one start has given to W&B: its settings, and a dict of the values by step."""
    words = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", folder]
    text = subprocess.check_output(words, text=True, timeout=PATIENCE)
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


def test_both_have_what_the_run_has_logged_and_a_resume_continues_it(tmp_path, monkeypatch, capsys):
    """Step 3, which the resume repeats, TensorBoard shows once."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    args = argparse.Namespace(out=tmp_path, wandb="mine", tensorboard=True, batch_size=8)
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        time.sleep(min(start, 1))  # W&B names the folder of a start by its second
        for log in loggers.chosen_loggers(args, start):
            for step in steps:
                log({"step": step, "loss": step + start, "lr": 0.5})
        shown = read_tensorboard(tmp_path / "tensorboard")  # at once
        assert wandb.setup().settings.silent  # it would ask at a terminal
        wandb.finish()
    first, second = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    assert f"W&B: wandb sync {second}" in capsys.readouterr().out
    run, found = read_wandb(second)
    rows = {step: {"loss": step + 2 * (step > 2), "lr": 0.5} for step in (1, 2, 3, 4)}
    assert found == {step: rows[step] for step in (3, 4)} and run["project"] == "mine"
    assert run["config"]["update"]["batch_size"] == 8
    assert shown == rows


def test_a_logger_that_raises_is_said_once_and_left_out(run, corpus):
    """W&B, and a user's."""
    result = run("single.py", 0, f"{SMALL} --steps 4 --log-every 1 --data {corpus} --wandb mine",
                 inject="from common.services import loggers\n"
                 "loggers.start_wandb = lambda *_: 1 / 0\n"
                 "after(loggers, 'chosen_loggers', lambda chosen, *_: "
                 "chosen.insert(0, lambda record: 1 / (3 - record['step'])))")
    assert [record["step"] for record in result.history] == [1, 2, 3, 4]
    failed = [line for line in result.lines if "ZeroDivisionError: division by zero" in line]
    for line, name in zip(failed, ("log_to_wandb", "<lambda>"), strict=True):
        assert f"{name} failed" in line and "metrics.jsonl" in line


def test_a_missing_package_is_one_line(monkeypatch):
    for package in "wandb", "tensorboard":
        monkeypatch.setitem(sys.modules, package, None)
        args = {"wandb": None, "tensorboard": False} | {package: "mine"}
        with pytest.raises(SettingError, match=f"--{package} needs .* install {package}"):
            loggers._check(argparse.Namespace(**args))
