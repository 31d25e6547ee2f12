"""metrics.jsonl: a line for each logged step."""

import contextlib
import json

from common.errors import SettingError, printable
from common.files import open_regular, reading
from common.services.new_files import append, new_file

MOST = 2**32  # bytes of metrics.jsonl


def start_metrics(claim, start):
    """A function that adds a record, a dict, to metrics.jsonl in the run folder of ``claim`` (see
    common/services/run_folder.py). ``start``: the number of steps that a resumed run has done.
    Lines after it are dropped, since these steps are repeated, and one at which a run was killed.

    The function raises SettingError if the folder is no longer that of this start. It says once
    that a line cannot be written, and training goes on.

    Raises:
        SettingError: the file cannot be written.
    """
    path, kept, failed = claim.folder / "metrics.jsonl", [], []
    with in_words(path):
        if path.exists():
            with reading(path), open_regular(path, MOST) as file:
                kept = [line for line in file if stays(line, start)]
        with new_file(path, run=claim.run) as file:
            file.writelines(kept)

    def log(record):
        claim.check()
        try:
            append(path, json.dumps(record) + "\n")
        except OSError as error:
            if not failed:
                print(printable(f"{path} lacks lines from step {record['step']} on "
                                f"({error.strerror}); the run goes on"), flush=True)
            failed.append(error)

    return log


def stays(line, last):
    """Whether a line stays: not half a line, nor a record of a step after ``last``."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= last
    except (ValueError, TypeError, LookupError, RecursionError):
        return True  # no run has written it


@contextlib.contextmanager
def in_words(path):
    """Around what writes a file of the run folder."""
    try:
        yield
    except OSError as error:
        raise SettingError(
            f"{path} cannot be written ({error.strerror}): see to its disk and its rights, and "
            f"start again; the run goes on from its newest checkpoint"
        ) from None
