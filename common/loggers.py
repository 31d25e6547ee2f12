"""Copies of metrics.jsonl in Weights & Biases (W&B) and in TensorBoard.

Each needs a package of its own: ``pip install wandb``, ``pip install tensorboard``.
"""

import atexit
import dataclasses
import importlib.util
import json
import os
import pathlib
import secrets
import shlex
import sys
import textwrap

import torch.distributed as dist
from tqdm import tqdm

from common.errors import SettingError, printable


class Logger:
    """Copies the lines of metrics.jsonl to one service.

    After an error it prints one line and copies no more; training continues.

    Args:
        name: the name of the service.
        write: called with a step and a dict of its values.
        end: called once, with the status of the process.
    """

    def __init__(self, name, write, end):
        self.name, self.write, self.end, self.over = name, write, end, False
        atexit.register(self.finish, 1)  # if an error ends the process; ``launch`` runs it too

    def log(self, record):
        """Copy a line of metrics.jsonl: a dict of the step and its values."""
        values = {name: value for name, value in record.items() if name != "step"}
        self._try(self.write, record["step"], values)

    def finish(self, status=0):
        """Write what is left. All calls but the first do nothing."""
        self._try(self.end, status)
        self.over = True

    def _try(self, function, *args):
        if self.over:
            return
        try:
            function(*args)
        except Exception as error:  # any error: no error of a logger may end the run
            self.over = True
            tqdm.write(printable(
                f"{self.name} has failed and gets no more lines; metrics.jsonl has them all: "
                f"{type(error).__name__}: {error}"
            ), file=sys.stderr)


def start_loggers(folder, options, start, project=None, tensorboard=False):
    """The ``Logger`` objects of rank 0, a list; other ranks have none. Call it before ``Metrics``.

    Args:
        folder: the run folder.
        options: a dict of the settings of the run, to be shown beside its curves.
        start: the number of steps that a resumed run has already done.
        project: the W&B project to log into, or None.
        tensorboard: whether to log for TensorBoard.

    Raises:
        SettingError: a package is missing, or W&B cannot start.
    """
    for package in ["wandb"] * bool(project) + ["tensorboard"] * tensorboard:
        # All ranks check, so that none waits for rank 0. A mere folder wandb/ has no origin.
        if not getattr(importlib.util.find_spec(package), "origin", None):
            raise SettingError(
                f"--{package} needs the package {package}: python -m pip install {package}"
            )
    if dist.is_initialized() and dist.get_rank() != 0:
        return []
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    options = json.loads(json.dumps(options, default=_plain))
    loggers = []
    if tensorboard:
        loggers.append(Logger("TensorBoard", *_start_tensorboard(folder, options, start)))
    if project:
        loggers.append(Logger("W&B", *_start_wandb(folder, options, project)))
    return loggers


def _start_wandb(folder, options, project):
    """The run's id is kept in wandb.json, so that a resumed run is the same run of W&B.

    W&B cannot replace a step that it has. So online, a resumed run logs only the steps that W&B
    lacks. Offline, each start writes its own folder in blocks of 32 kB, and a killed process loses
    its last block. So each start writes the whole run, with the lines from before the resume, and
    does not set ``resume``: uploading its folder replaces what was uploaded before.
    """
    import requests  # the package wandb requires it
    import wandb

    # Without a network W&B would wait without limit at the end of a run.
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "60")
    try:
        settings = wandb.setup().settings
        mode, why = settings.mode, ""
        if "WANDB_MODE" not in os.environ and not (
            settings.api_key or os.environ.get("WANDB_API_KEY")
            or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
            or requests.utils.get_netrc_auth(settings.base_url)  # where `wandb login` writes
        ):
            mode, why = "offline", ", since there is no API key"
        run = wandb.init(
            project=project, id=_run_id(folder / "wandb.json"), dir=folder, mode=mode,
            config=options, resume=None if mode in ("offline", "dryrun") else "allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        first = run.step  # the first step that W&B does not have
    except wandb.Error as error:
        raise SettingError(
            f"--wandb {project}: {error}; WANDB_MODE=offline logs without a network"
        ) from None
    if run.offline:
        here = shlex.quote(str(folder / "wandb" / pathlib.Path(run.dir).parent.name))
        print(printable(f"W&B is offline{why}; upload the run by: wandb sync {here}"), flush=True)
    elif run.url:
        print(printable(f"W&B: {run.url}"), flush=True)

    def write(step, values):
        if step >= first:
            run.log(values, step=step)

    return write, lambda status: run.finish(exit_code=status)


def _run_id(path):
    """The id in the file ``path``, or a new one. A run that starts anew finds no file there, since
    the files of an earlier run are moved aside."""
    try:
        return json.loads(path.read_text())["id"]
    except (OSError, ValueError):  # there is no file, or only a part of it
        run_id = secrets.token_hex(4)
        path.write_text(json.dumps({"id": run_id}) + "\n")
        return run_id


def _start_tensorboard(folder, options, start):
    """Write event files into the run folder. TensorBoard drops the steps after ``start`` of earlier
    files, since a resumed run logs them again."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder, purge_step=start + 1)
    writer.add_text("options", textwrap.indent(json.dumps(options, indent=1), "    "), start)

    def write(step, values):
        if step > start:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

    return write, lambda status: writer.close()


def _plain(value):
    """For types that JSON does not have: a dataclass as a dict, anything else as text."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)
