"""common/loggers.py: what W&B and TensorBoard get, read back from their files.

Python has no reader of W&B's file, so W&B's own command reads it: ``wandb leet inspect --json``.
"""

import json
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from common import loggers
from common.errors import SettingError
from tests.processes import PATIENCE, ROOT
from tests.sample import thorough

OPTIONS = ("--hidden-size 16 --intermediate-size 24 --num-attention-heads 4 "
           "--num-key-value-heads 2 --num-hidden-layers 1 --seq-len 16 --batch-size 8 --steps 8 "
           "--log-every 1 --save-every 3")

# Another line for every second step, as of a validation; and what happens when 5 steps are done.
INJECT = """
from common.metrics import Metrics
begin_step = Metrics.begin_step
def begin(self, step):
    if step % 2 == 0 and step > self.start:
        self._write({"step": step, "val_loss": 1 / step})
    if step == 5:
        EVENT
    begin_step(self, step)
Metrics.begin_step = begin
"""


@pytest.fixture
def log(run, corpus, tmp_path):
    """Runs a script with the loggers, and without an account of W&B."""
    def log(command, world=0, options="--wandb mine --tensorboard", event="pass", code=INJECT,
            expect_ok=True):
        return run(
            f"tests/injected.py {command}", world, f"{OPTIONS} --data {corpus} {options}",
            expect_ok=expect_ok, env={
                "INJECT": code.replace("EVENT", event), "HOME": str(tmp_path), "NETRC": "/dev/null",
                "WANDB_BASE_URL": "http://127.0.0.1:9",
                "WANDB_API_KEY": None, "WANDB_IDENTITY_TOKEN_FILE": None, "WANDB_MODE": None,
            },
        )

    return log


@pytest.fixture
def packages():
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")


def wandb_folders(out):
    """Of each start, the oldest first."""
    return sorted(out.glob("wandb/offline-run-*"))


def read_wandb(folder):
    """What one start has given to W&B: the run, a dict of its rows by step, and the exit code."""
    text = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", folder], check=True,
        capture_output=True, text=True, timeout=PATIENCE,
    ).stdout
    found = {"history": []}
    for record in map(json.loads, text.splitlines()):
        kind = record["type"]
        found.setdefault(kind, []).append(record.get(kind))
    rows = [row["item"] for row in found["history"]]
    rows = [(row["_step"], {name: row[name] for name in row if name[0] != "_"}) for row in rows]
    assert len(dict(rows)) == len(rows)  # each step once
    return found["run"][0], dict(rows), [exit.get("exit_code", 0) for exit in found.get("exit", [])]


def read_tensorboard(folder):
    """A dict of the values by step, and the texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0}).Reload()
    rows = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in rows.setdefault(event.step, {})  # each step once
            rows[event.step][name] = event.value
    texts = [event.tensor_proto.string_val[0].decode()
             for name in events.Tags()["tensors"] for event in events.Tensors(name)]
    return rows, texts


def logged(result):
    """What metrics.jsonl has: a dict of the values by step."""
    rows = {}
    for record in result.history:
        rows.setdefault(record.pop("step"), {}).update(record)
    return rows


def in_float32(rows):
    return {step: {name: float(np.float32(x)) for name, x in row.items()}
            for step, row in rows.items()}


def test_both_have_what_the_run_has_logged(log, packages):
    result = log("single.py")
    rows = logged(result)
    assert list(rows) == list(range(1, 9))
    assert rows[2].keys() == {"loss", "grad_norm", "lr", "tokens", "tokens_per_second", "val_loss"}

    (folder,) = wandb_folders(result.out)
    run, history, ended = read_wandb(folder)
    assert history == rows and ended == [0] and run["project"] == "mine"
    assert run["config"]["update"]["batch_size"] == 8
    assert run["config"]["update"]["config"]["hidden_size"] == 16
    (line,) = [line for line in result.lines if "W&B" in line]
    assert line == ("W&B is offline, since there is no API key; upload the run by: "
                    f"wandb sync {folder}")
    assert "wandb: " not in result.output  # of its own it prints nothing

    curves, (options,) = read_tensorboard(result.out)
    assert curves == in_float32(rows)
    assert json.loads(options)["wandb"] == "mine"


def test_a_resumed_run_goes_on_in_both(log, packages):
    """Killed after step 5, resumed from step 3. Rank 0 alone logs."""
    killed = log("ddp.py", 2, event="os.kill(os.getpid(), 9)", expect_ok=False)
    assert killed.statuses == [-9, -9] and list(logged(killed)) == [1, 2, 3, 4, 5]
    result = log("ddp.py", 2)
    rows = logged(result)
    assert list(rows) == list(range(1, 9))

    first, second = wandb_folders(result.out)
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    run, history, ended = read_wandb(second)
    assert run["run_id"] == second.name.rpartition("-")[2]
    assert history == rows and ended == [0]
    assert "resume" not in run  # so that its upload replaces that of the first
    assert len(list(result.out.glob("events.*"))) == 2
    assert read_tensorboard(result.out)[0] == in_float32(rows)


@thorough
def test_an_error_ends_the_logs(log, packages):
    result = log("single.py", event="raise ZeroDivisionError('on purpose')", expect_ok=False)
    assert result.statuses == [1] and "on purpose" in result.output
    rows = logged(result)
    assert list(rows) == [1, 2, 3, 4, 5]
    (folder,) = wandb_folders(result.out)
    _, history, ended = read_wandb(folder)
    assert history == rows and ended == [1]
    assert read_tensorboard(result.out)[0] == in_float32(rows)


@thorough
def test_a_signal_ends_the_logs_and_a_new_run_has_new_ones(log, packages):
    result = log("ddp.py", 2, event=f"os.kill(os.getpid(), {signal.SIGTERM:d})")
    assert "saved: the same command goes on" in result.lines[-1]
    rows = logged(result)
    assert 5 <= len(rows) < 8
    (folder,) = wandb_folders(result.out)
    _, history, ended = read_wandb(folder)
    assert history == rows and ended == [0]
    assert read_tensorboard(result.out)[0] == in_float32(rows)

    new = log("ddp.py", 2, "--wandb mine --tensorboard --no-resume")
    new_rows = logged(new)
    first, second = wandb_folders(new.out)
    assert first == folder and first.name.rpartition("-")[2] != second.name.rpartition("-")[2]
    assert read_wandb(second)[1] == new_rows and len(new_rows) == 8
    assert read_tensorboard(new.out)[0] == in_float32(new_rows)
    assert read_tensorboard(new.out / "previous-1")[0] == in_float32(rows)


KILL_CORE = """
import pathlib
def kill_core():
    for path in pathlib.Path("/proc/self/task").glob("*/children"):
        for child in path.read_text().split():
            if pathlib.Path(f"/proc/{child}/comm").read_text() == "wandb-core\\n":
                os.kill(int(child), 9)
                os.waitpid(int(child), 0)
                return
    raise RuntimeError("W&B has no process")
"""
FULL = """
def fail(*_):
    raise OSError(28, "No space left on device")
def fill_disk():
    from torch.utils.tensorboard import SummaryWriter
    SummaryWriter.add_scalar = fail
"""


@thorough
@pytest.mark.parametrize("option, name, code, event", [
    ("--wandb mine", "W&B", KILL_CORE, "kill_core()"),
    ("--tensorboard", "TensorBoard", FULL, "fill_disk()"),
])
def test_a_failing_logger_ends_no_run(log, packages, option, name, code, event):
    result = log("single.py", 0, option, event, code=code + INJECT)
    assert list(logged(result)) == list(range(1, 9)) and "final loss" in result.output
    (line,) = [line for line in result.lines if "gets no more lines" in line]
    assert line.startswith(f"{name} has failed and gets no more lines; metrics.jsonl has them all")


@pytest.mark.parametrize("command, world, option, package", [
    ("ddp.py", 2, "--wandb mine", "wandb"), ("single.py", 0, "--tensorboard", "tensorboard"),
])
def test_a_missing_package_is_one_line(log, command, world, option, package):
    result = log(command, world, option, code=f"sys.modules['{package}'] = None",
                 expect_ok=False)
    assert all(result.statuses)
    assert result.lines == [
        f"{command}: error: --{package} needs the package {package}: "
        f"python -m pip install {package}"
    ]


class Run:
    """An online run that W&B has until step 4."""
    offline, url, step = False, "https://there/run", 5

    def __init__(self):
        self.rows, self.ended = {}, []

    def log(self, values, step):
        self.rows[step] = values

    def finish(self, exit_code):
        self.ended.append(exit_code)


@pytest.fixture
def online(monkeypatch):
    """A W&B that is not there. Returns the run, and what it was started with."""
    run, started = Run(), {}
    requests = types.SimpleNamespace(utils=types.SimpleNamespace(get_netrc_auth=lambda url: None))
    settings = types.SimpleNamespace(mode="online", api_key=None, base_url="https://there")
    wandb = types.SimpleNamespace(
        __spec__=types.SimpleNamespace(origin="here"),
        setup=lambda: types.SimpleNamespace(settings=settings), Settings=dict, Error=KeyError,
        init=lambda **options: started.update(options) or run,
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "requests", requests)
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return run, started


def test_online_a_resumed_run_logs_what_is_missing_there(online, tmp_path, capsys):
    run, started = online
    (logger,) = loggers.start_loggers(tmp_path, {"--lr": 1}, 3, "mine")
    assert capsys.readouterr().out == "W&B: https://there/run\n"
    for step in range(1, 8):
        logger.log({"step": step, "loss": step / 2})
    assert run.rows == {step: {"loss": step / 2} for step in (5, 6, 7)}
    logger.finish()
    logger.finish(1)
    assert run.ended == [0]
    assert (started["mode"], started["resume"], started["project"]) == ("online", "allow", "mine")
    first = started["id"]
    loggers.start_loggers(tmp_path, {}, 3, "mine")
    assert started["id"] == first
    (tmp_path / "wandb.json").write_text('{"i')  # a power cut may leave that
    loggers.start_loggers(tmp_path, {}, 3, "mine")
    assert started["id"] == json.loads((tmp_path / "wandb.json").read_text())["id"] != first


def test_what_wandb_refuses_is_a_setting_error(online, tmp_path, monkeypatch):
    def refuse(**_):
        raise KeyError("no such host")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(SettingError, match="--wandb mine: .no such host.; WANDB_MODE=offline"):
        loggers.start_loggers(tmp_path, {}, 0, "mine")


def test_the_lines_are_equal_in_all_scripts():
    """So that one script stands for all."""
    found = []
    for path in [*ROOT.glob("*.py"), *ROOT.glob("examples/*.py")]:
        source = path.read_text()
        if "= Metrics(" in source:
            assert "profile=args.profile, loggers=loggers,\n" in source
            lines = source.splitlines()
            place = lines.index("    loggers = []")
            assert lines[place - 1] == "    # Loop"
            found.append(lines[place : place + 4])
    assert len(found) == 11 and all(lines == found[0] for lines in found)
