"""metrics.jsonl: a line for each logged step."""

import contextlib
import json
import os

from common.errors import SettingError
from common.services.run_folder import move_aside, run_files


def start_metrics(out, start):
    """A function that adds a record, a dict, to metrics.jsonl in ``out``. ``start``: the number of
    steps that a resumed run has done. Lines after it are dropped, since these steps are repeated,
    and one at which a run was killed.

    Raises:
        SettingError: the file cannot be written.
    """
    path, kept = out / "metrics.jsonl", ""
    with in_words(path):
        out.mkdir(parents=True, exist_ok=True)
        if not start:
            move_aside(out, run_files(out))  # of another run, if Checkpoints has come off
        for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # no record
                if json.loads(line)["step"] <= start:
                    kept += f"{line}\n"
        replace(path, kept)
        file = path.open("a")

    def log(record):
        with in_words(path):
            print(json.dumps(record), file=file, flush=True)

    return log


def replace(path, text):
    """Write a file under another name first, so that a link is replaced, not followed."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


@contextlib.contextmanager
def in_words(path):
    """Around what writes a file of the run folder."""
    try:
        yield
    except OSError as error:
        raise SettingError(
            f"{path} cannot be written ({error.strerror}); the checkpoints are intact: make room, "
            f"or choose another folder by --out"
        ) from None
