"""What is not a regular file, or larger than what is parsed, is refused by its name; nothing that a
user has is overwritten."""

import os
import pathlib
from unittest import mock

import pytest

from common.errors import SettingError
from common.services import checkpoint_files, hf_config, run_folder
from common.services.new_files import append, new_file, new_folder
from common.services.report import start_metrics
from common.tokens import TokenDataset
from tools.huggingface import weights
from tools.support import command

# What a path may be instead of a regular file. A sparse file takes no disk.
INSTEAD = {
    "fifo": os.mkfifo, "folder": os.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "sparse": lambda path: (path.touch(), os.truncate(path, 2**40)),
    "nested": lambda path: path.write_text("[" * 99_999),
    "long number": lambda path: path.write_text('{"x": 1' + "0" * 400 + "e400}"),
    "binary": lambda path: path.write_bytes(b"\xff\x00"),
}
READERS = {  # what reads a path, and what may stand there
    "config.json": (hf_config.read_config, INSTEAD.keys() - {"folder"}),
    "data": (lambda path: TokenDataset(str(path), 9), {"fifo", "endless"}),
    "run-id": (lambda path: run_folder.read_run_id(path.parent), INSTEAD.keys()),
    "SHA256SUMS": (lambda path: checkpoint_files.read_sums(path.parent),
                   INSTEAD.keys() - {"nested", "long number"}),
    "metrics.jsonl": (lambda path: start_metrics(run_folder.Claim(path.parent, None, "0" * 16), 1),
                      {"fifo", "folder", "sparse"}),
    "model.safetensors": (lambda path: weights.find_tensors(path.parent),
                          {"fifo", "folder", "endless", "binary"}),
    "plan.json": (lambda path: command.check_json(path, "plan"), INSTEAD.keys()),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused(tmp_path, name):
    """By its name, in one line, at once."""
    if name == "model.safetensors":
        pytest.importorskip("safetensors")
    read, kinds = READERS[name]
    for kind in kinds:
        path = tmp_path / kind / name
        path.parent.mkdir()
        INSTEAD[kind](path)
        with pytest.raises((SettingError, OSError, ValueError), match=path.name):
            read(path)


# Writing


def write_file(path):
    with new_file(path, "w") as file:
        file.write("new")


def write_folder(path):
    with new_folder(path) as folder:
        (folder / "new").touch()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(tmp_path, monkeypatch, error):
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=error))
    monkeypatch.setattr(pathlib.Path, "rename", mock.Mock(side_effect=error))
    for write in (write_file, write_folder):
        with pytest.raises(error):
            write(tmp_path / "y")
        assert not os.listdir(tmp_path)


def test_a_link_is_replaced_and_a_fifo_too(tmp_path, monkeypatch):
    """A file gets its name when it is written to its end."""
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to("precious")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError):
        append(tmp_path / "link", "more")
    for name in ("link", "fifo"):
        write_file(tmp_path / name)
        assert (tmp_path / name).read_text() == "new" and not (tmp_path / name).is_symlink()
    assert (tmp_path / "precious").read_text() == "precious" and sizes == [3, 3]


@pytest.mark.parametrize("make", [os.mkdir, pathlib.Path.touch,
                                  lambda path: path.symlink_to("nowhere")])
def test_a_folder_takes_no_name_that_exists(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(SettingError, match="x exists"):
        write_folder(tmp_path / "x")
    with pytest.raises(SettingError, match="y exists"), new_folder(tmp_path / "y"):
        make(tmp_path / "y")  # meanwhile
    assert sorted(os.listdir(tmp_path)) == ["x", "y"]


def test_json_of_a_tool(tmp_path):
    """A tool replaces its own, and nothing else."""
    for number in (1, 2):
        command.check_json(tmp_path / "x", "plan")
        command.write_json(tmp_path / "x", "plan", {"rows": number})
    for tool, text in (("dry_run", None), ("plan", "my notes"), ("plan", "{}")):
        if text:
            (tmp_path / "x").write_text(text)
        with pytest.raises(SettingError, match="x exists, and .* has not written it"):
            command.check_json(tmp_path / "x", tool)
