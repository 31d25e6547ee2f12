"""The folder of a run: what is the run's there, and what is somebody's. A run deletes nothing that
it has not made. Checkpoints that are damaged, or that a stranger wrote, are refused in one line
that names the file and what to use instead. Loading runs no code that a file has chosen."""

import errno
import functools
import json
import os
import pathlib
import pickle
import shutil
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata

import single
from common.errors import SettingError
from common.options import option_parser, parse_options
from common.services import checkpoint, checkpoint_files, run_folder
from common.services.checkpoint import Checkpoints
from common.services.metrics import start_metrics
from common.services.report import Report
from tests.support.processes import BARE, SMALL
from tests.test_checkpoint import checkpoints_of, steps


def contents(folder):
    return {str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else
            path.read_bytes() for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def start(out, saved=(), **which):
    """Start a run, in this process, and save after the steps ``saved``. Returns the steps it had
    done, and a number that its last checkpoint holds: it is that of the step."""
    weight = torch.nn.Parameter(torch.zeros(8))
    checkpoints = checkpoints_of(out, {"weight": weight, "buffer": torch.ones(8)}, keep=3)
    done = checkpoints.resume(**which)
    start_metrics(out, done)
    for step in saved:
        torch.nn.init.constant_(weight, step)
        checkpoints.save(step)
    checkpoints.background.shutdown()
    checkpoints.lock.close()
    return done, weight[0].item()


@pytest.fixture
def out(tmp_path, monkeypatch):
    """A run folder with steps 1 to 3, each with several files of data."""
    monkeypatch.setattr(checkpoint, "HashingWriter", functools.partial(
        checkpoint_files.HashingWriter, single_file_per_rank=False))
    start(tmp_path / "out", (1, 2, 3))
    return tmp_path / "out"


def test_locks_of_other_file_systems(out, monkeypatch, capsys):
    """A lock that somebody holds has two errors. Where there are none a run starts, and says so."""
    monkeypatch.setattr(run_folder.time, "sleep", lambda _: None)
    lock = mock.Mock(side_effect=PermissionError(errno.EACCES, "denied"))
    monkeypatch.setattr(run_folder.fcntl, "lockf", lock)
    with pytest.raises(SettingError, match="out is in use"):
        start(out)
    lock.side_effect = OSError(errno.ENOLCK, "No locks available")
    assert start(out) == (3, 3.0)
    assert "out cannot be locked (No locks available)" in capsys.readouterr().err


@pytest.mark.parametrize("service", [Checkpoints, Report])
def test_a_service_alone_has_the_folder(service, monkeypatch):
    """NCCL's records go there too, as a user has said."""
    monkeypatch.setattr(os, "environ", {**BARE, "TORCH_FR_BUFFER_SIZE": "5"})
    parser = option_parser("")
    service.add_options(parser)
    assert parse_options(parser, ["--out", "here"]).out == pathlib.Path("here")
    records = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
    assert (records == "here/flight-record-rank") == (service is Report)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "5"


# Somebody's files

def write(path):
    path.write_bytes(b"precious \xff")


def link(path):
    path.symlink_to("../elsewhere")


@pytest.mark.parametrize("name, make", [
    ("metrics.jsonl", write), ("trace-rank0.json", write), ("lock", write), ("lock", link),
    ("run-id", link), ("step-00000003", os.mkdir), ("step-00000003.tmp", write),
    ("tensorboard", os.mkdir), ("wandb", os.mkdir), ("summary.json", os.mkfifo),
    ("flight-record-rank0", write),
])
def test_a_foreign_folder_is_refused(tmp_path, name, make):
    """In one line that names what bears the name of a run's file; and nothing has changed."""
    path = tmp_path / "out" / name
    path.parent.mkdir()
    (tmp_path / "elsewhere").write_text("precious")
    make(path)
    before = contents(tmp_path)
    with pytest.raises(SettingError, match=f"{name}.* (choose another|is no regular file|cannot be "
                                           f"read)"):
        start(path.parent, (1,))
    with pytest.raises(SettingError):
        start_metrics(path.parent, 0)  # without Checkpoints
    assert contents(tmp_path) == before and os.listdir(path.parent) == [name]


def test_what_else_is_in_a_folder_stays(corpus, tmp_path):
    """Also what has almost the name of a file that a run writes, through all that a run does."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("config.json", "training.log", "step-by-step.md", "step-\u0661\u0662\u0663\u0664"
                 "\u0665\u0666\u0667\u0668", "metrics.jsonl.tmp", "traces", "previous-1"):
        (out / name).write_text(f"my {name}")
    (tmp_path / "elsewhere").write_text("linked")
    (out / "summary.json.tmp").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(out / "run-id.tmp")
    before = contents(tmp_path)
    options = f"{SMALL} --save-every 1 --keep 1 --data {corpus} --out {out}"
    single.main(f"{options} --steps 4".split())
    for name in ("trace-rank0.json", "wandb.json"):
        (out / name).touch()
    (out / "step-00000004" / "notes").write_text("mine")
    single.main(f"{options} --steps 5".split())  # removes step 4
    (notes,) = out.glob("step-00000004.*.old/notes")
    assert notes.read_text() == "mine" and len(list(notes.parent.iterdir())) == 1
    single.main(f"{options} --steps 1 --no-resume".split())
    held = json.loads((out / "summary.json").read_text())["held"]
    assert held["optimizer states"] > held["gradients"]  # which this only step has allocated
    assert before.items() <= contents(tmp_path).items()
    assert sorted(path.name for path in (out / "previous-2").iterdir()) == [
        "metrics.jsonl", "step-00000005", "summary.json", "trace-rank0.json", "wandb.json"]


def test_links_to_old_checkpoints(out, tmp_path):
    """They are removed as links, if they lead to this run's; others stay, and stand in no way."""
    for step in (1, 2):
        shutil.move(out / f"step-0000000{step}", tmp_path / f"kept-{step}")
        (out / f"step-0000000{step}").symlink_to(tmp_path / f"kept-{step}")
    (out / "step-00000001.old").symlink_to(tmp_path / "kept-2")
    (out / "step-00000009.tmp").symlink_to("nowhere")
    start(out, (4, 5))
    assert {path.name for path in out.glob("step-*")} == {
        "step-00000003", "step-00000004", "step-00000005", "step-00000001.old", "step-00000009.tmp"}
    assert checkpoint_files.read(tmp_path / "kept-1") and checkpoint_files.read(tmp_path / "kept-2")


# The run's own files


def test_what_a_killed_process_leaves(out):
    """The next start of the run removes it; what another run has left stays."""
    mine, other = run_folder.read_run_id(out)[0], "0123456789abcdef"
    for run in (mine, other):
        half = out / f"step-00000004.{run}.tmp"
        half.mkdir()
        for name in ("__0_0.distcp", ".metadata.tmp", ".metadata", "run.json",
                     f".run.json.{run}.01234567.tmp", f".SHA256SUMS.{run}.01234567.tmp"):
            (half / name).touch()
        (out / f".metrics.jsonl.{run}.01234567.tmp").touch()
    assert start(out) == (3, 3.0)
    assert sorted(path.name for path in out.glob("*.tmp")) == [
        f".metrics.jsonl.{other}.01234567.tmp", half.name]


def test_lines_of_metrics(tmp_path):
    """Lines after the step that a run resumes from go, and half a line; somebody's line stays. A
    new run moves them all, also if it saves no checkpoints."""
    start_metrics(tmp_path, 0)
    lines = ['{"step": 1}', '{"step": 2}', "my note", '{"step": 3}', "[" * 9999, '{"step": 4}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": ')
    start_metrics(tmp_path, 3)({"step": 4})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines
    start_metrics(tmp_path, 0)
    assert (tmp_path / "previous-1" / "metrics.jsonl").read_text().splitlines() == lines


def test_a_new_run_and_an_older_step_move_the_rest(out):
    assert start(out, step=2) == (2, 2.0)
    assert (out / "previous-1" / "step-00000003").is_dir()
    first, _ = run_folder.read_run_id(out)
    assert start(out, (1,), newest=False)[0] == 0 and run_folder.read_run_id(out)[0] != first
    assert {path.name for path in (out / "previous-2").iterdir()} == {
        "metrics.jsonl", "step-00000001", "step-00000002"}
    assert steps(out) == [1]


# Damage


DATA, MORE, SUMS = "__0_0.distcp", "__0_1.distcp", checkpoint_files.SUMS


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def write_index(folder, pickled):
    (folder / ".metadata").write_bytes(pickled)
    hash_again(folder)


def hash_again(folder):
    """Write the list of hashes of all files in a checkpoint."""
    lines = [f"{checkpoint_files.hash_of(path)}  {path.name}\n" for path in sorted(folder.iterdir())
             if path.name != SUMS]
    (folder / SUMS).write_text("".join(lines))


# Pickles that call a function when they are read
SYSTEM = b"cposix\nsystem\n(S'touch ran'\ntR."  # os.system("touch ran")
LOAD = b"ctorch.serialization\nload\n(S'x'\ntR."  # torch.serialization.load("x")
GETATTR = b"cbuiltins\ngetattr\n(ctorch\nSize\nS'mro'\ntR."  # getattr(torch.Size, "mro")
DAMAGE = [  # a file of a checkpoint, or all of it; what happens to it; what the line says
    (".metadata", flip_a_bit, ".metadata is damaged"), ("run.json", flip_a_bit, "is damaged"),
    (MORE, flip_a_bit, f"{MORE} is damaged"),
    (SUMS, lambda path: path.write_text(""), "SHA256SUMS lacks it"),
    (DATA, pathlib.Path.unlink, f"{DATA} cannot be read"),
    (DATA, lambda path: os.truncate(path, path.stat().st_size + 1), "bytes, and at most"),
    ("", lambda folder: (shutil.rmtree(folder), shutil.copytree(
        folder.with_name("step-00000001"), folder)), "was saved after step 1"),
    # What a stranger could write, with hashes that fit
    ("", lambda folder: write_index(folder, SYSTEM), "posix.system"),
    ("", lambda folder: write_index(folder, LOAD), "torch.serialization.load"),
    ("", lambda folder: write_index(folder, GETATTR), "for getattr of"),
    ("", lambda folder: write_index(folder, pickle.dumps(BytesStorageMetadata())), "BytesStorage"),
]


@pytest.mark.parametrize("name, change, words", DAMAGE)
def test_damage(out, tmp_path, monkeypatch, name, change, words):
    """It is refused by a run that resumes and by what only reads; the first names an older one."""
    monkeypatch.chdir(tmp_path)
    change(out / "step-00000003" / name)
    (out / "step-00000003" / "notes").write_text("mine")  # is ignored
    with pytest.raises(SettingError) as error:
        start(out)
    line = str(error.value)
    assert f"{out}/step-00000003" in line and words in line, line
    assert line.endswith(f"use the older {out}/step-00000002: --resume-from 2"), line
    with pytest.raises(SettingError):
        checkpoint_files.read(out / "step-00000003")
    assert not (tmp_path / "ran").exists()


def test_no_older_one(out):
    """A checkpoint is older by its number, not by its name."""
    flip_a_bit(out / "step-00000001" / DATA)
    for name in ("step-99999999", "step-100000000"):
        (out / name).mkdir()
    assert steps(out) == [1, 2, 3, 99999999, 100000000]
    with pytest.raises(SettingError, match="no older checkpoint: start a new run"):
        start(out, step=1)
    assert checkpoint_files.older_checkpoint(out / "step-100000000").name == "step-99999999"


def test_an_index_that_another_python_has_written(out, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle a member of an Enum by getattr. DCP's index has one."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__",
                        lambda member, _: (getattr, (type(member), member.name)))
    step = out / "step-00000003"
    write_index(step, pickle.dumps(pickle.loads((step / ".metadata").read_bytes())))
    assert start(out) == (3, 3.0)
