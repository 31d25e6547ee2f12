"""Checkpoints that are damaged, or that a stranger wrote: refused in one line that names the file
and what to use instead. Loading runs no code that a file has chosen."""

import functools
import os
import pathlib
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from common.errors import SettingError
from common.services import checkpoint, checkpoint_files
from tests.test_run_folder import start

DATA, MORE, SUMS = "__0_0.distcp", "__0_1.distcp", checkpoint_files.SUMS


@pytest.fixture
def out(tmp_path, monkeypatch):
    """A run folder with steps 2, 4 and 6, each with several files of data."""
    monkeypatch.setattr(checkpoint, "HashingWriter", functools.partial(
        checkpoint_files.HashingWriter, single_file_per_rank=False))
    start(tmp_path / "out", (2, 4, 6))
    return tmp_path / "out"


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


class Run:
    """What a stranger could write: a pickle that calls a function when it is read."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def write_index(folder, index):
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    hash_again(folder)


def hash_again(folder):
    """Write the list of hashes of all files in a checkpoint."""
    lines = [f"{checkpoint_files.hash_of(path)}  {path.name}\n" for path in sorted(folder.iterdir())
             if path.name != SUMS]
    (folder / SUMS).write_text("".join(lines))


def save_an_object(folder):
    """A hostile value behind an honest index."""
    shutil.rmtree(folder)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"x": Run(os.system, "touch ran")}, checkpoint_id=folder, no_dist=True)
    (folder / "run.json").write_text('{"step": 6, "must stay the same": {}, "may change": {}}')
    hash_again(folder)


def take_files_of_step_2(step):
    shutil.rmtree(step)
    shutil.copytree(step.with_name("step-00000002"), step)


DAMAGE = [  # a file of a checkpoint, or all of it; what happens to it; what the line says
    (".metadata", flip_a_bit, ".metadata is damaged"), ("run.json", flip_a_bit, "is damaged"),
    (MORE, flip_a_bit, f"{MORE} is damaged"), (SUMS, flip_a_bit, ""),
    (SUMS, lambda path: path.write_text(""), "SHA256SUMS lacks it"),
    (DATA, pathlib.Path.unlink, f"{DATA} cannot be read"),
    (DATA, lambda path: os.truncate(path, path.stat().st_size + 1), "bytes, and at most"),
    ("", take_files_of_step_2, "was saved after step 2"),
    # What a stranger could write, with hashes that fit
    ("", lambda folder: write_index(folder, Run(os.system, "touch ran")), "posix.system"),
    ("", lambda folder: write_index(folder, Run(getattr, torch.Size, "mro")), "'torch.Size'"),
    ("", save_an_object, "BytesStorageMetadata"),
]


@pytest.mark.parametrize("name, change, words", DAMAGE)
def test_damage(out, tmp_path, monkeypatch, name, change, words):
    """It is refused by a run that resumes and by what only reads; the first names an older one."""
    monkeypatch.chdir(tmp_path)
    change(out / "step-00000006" / name)
    (out / "step-00000006" / "notes").write_text("mine")  # is ignored
    with pytest.raises(SettingError) as error:
        start(out)
    line = str(error.value)
    assert f"{out}/step-00000006" in line and words in line, line
    assert line.endswith(f"use the older {out}/step-00000004: --resume-from 4"), line
    if change != take_files_of_step_2:
        with pytest.raises(SettingError):
            checkpoint_files.read(out / "step-00000006")
    assert not (tmp_path / "ran").exists()


def test_no_older_one(out):
    flip_a_bit(out / "step-00000002" / DATA)
    with pytest.raises(SettingError, match="no older checkpoint: start a new run"):
        start(out, step=2)


def test_an_index_that_another_python_has_written(out, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle a member of an Enum by getattr. DCP's index has one."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__",
                        lambda member, _: (getattr, (type(member), member.name)))
    step = out / "step-00000006"
    write_index(step, pickle.loads((step / ".metadata").read_bytes()))
    assert start(out) == (6, 6.0)
