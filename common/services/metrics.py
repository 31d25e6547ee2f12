"""metrics.jsonl: a line for each logged step."""

import contextlib
import json

from common.errors import SettingError
from common.files import open_regular, reading
from common.services.new_files import append, new_file
from common.services.run_folder import (
    move_to_previous, new_id, own_output, read_run_id, refuse_foreign, write_run_id
)

MOST = 2**32  # bytes of metrics.jsonl


def start_metrics(out, start):
    """A function that adds a record, a dict, to metrics.jsonl in ``out``. ``start``: the number of
    steps that a resumed run has done. Lines after it are dropped, since these steps are repeated,
    and one at which a run was killed.

    Raises:
        SettingError: the file cannot be written, or is not of a run.
    """
    path, kept = out / "metrics.jsonl", []
    with in_words(path):
        out.mkdir(parents=True, exist_ok=True)
        run, _ = read_run_id(out)
        if not run:  # Checkpoints has come off
            refuse_foreign(out)
            run = new_id()
            write_run_id(out, run)
        if not start:
            move_to_previous(out, own_output(out))  # the same
        if path.exists():
            with reading(path), open_regular(path, MOST) as file:
                kept = [line for line in file if stays(line, start)]
        with new_file(path, run=run) as file:
            file.writelines(kept)

    def log(record):
        with in_words(path):
            append(path, json.dumps(record) + "\n")

    return log


def stays(line, last):
    """Whether a line stays: not half a line, nor a record of a step after ``last``."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= last
    except (ValueError, TypeError, LookupError, RecursionError):
        return True  # somebody's


@contextlib.contextmanager
def in_words(path):
    """Around what writes a file of the run folder."""
    try:
        yield
    except OSError as error:
        raise SettingError(
            f"{path} cannot be written ({error.strerror}): make room if its disk is full, and "
            f"start again; the run goes on from its newest checkpoint"
        ) from None
