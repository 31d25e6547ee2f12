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
from common.services.report import Report, start_metrics
from tests.support.processes import BARE, SMALL
from tests.test_checkpoint import checkpoints_of, steps


def contents(folder):
    return {str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else
            path.read_bytes() for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def start(out, saved=(), source=None):
    """Start a run, in this process, and save after the steps ``saved``. Returns the steps it had
    done, and a number that its last checkpoint holds: it is that of the step."""
    weight = torch.nn.Parameter(torch.zeros(8))
    checkpoints = checkpoints_of(out, {"weight": weight, "buffer": torch.ones(8)}, keep=3)
    done = checkpoints.resume(source)
    start_metrics(checkpoints.claim, done)
    for step in saved:
        torch.nn.init.constant_(weight, step)
        checkpoints.save(step)
    checkpoints.background.shutdown()
    checkpoints.claim.lock.close()
    return done, weight[0].item()


@pytest.fixture
def out(tmp_path, monkeypatch):
    """A run folder with steps 1 to 3, each with several files of data."""
    monkeypatch.setattr(checkpoint, "HashingWriter", functools.partial(
        checkpoint_files.HashingWriter, single_file_per_rank=False))
    start(tmp_path / "out", (1, 2, 3))
    return tmp_path / "out"


def test_locks_of_other_file_systems(out, monkeypatch):
    """A lock that another process holds has two errors. Where there are no locks a run starts."""
    monkeypatch.setattr(run_folder.time, "sleep", lambda _: None)
    lock = mock.Mock(side_effect=PermissionError(errno.EACCES, "denied"))
    monkeypatch.setattr(run_folder.fcntl, "lockf", lock)
    with pytest.raises(SettingError, match="out is in use"):
        start(out)
    lock.side_effect = OSError(errno.ENOLCK, "No locks available")
    assert start(out) == (3, 3.0)


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


# Whose a folder is


def write(path):
    path.write_bytes(b"precious \xff")


def link(path):
    path.symlink_to("../elsewhere")


@pytest.mark.parametrize("name, make", [
    ("metrics.jsonl", write), ("notes", write), ("lock", write), ("lock", link),
    ("lock", os.mkdir), ("run-id", link), ("step-00000003", os.mkdir), ("tensorboard", os.mkdir),
    ("slurm-7.out", os.mkfifo), ("lost", link),
])
def test_a_foreign_folder_is_refused(tmp_path, name, make):
    """In one line that names what is there, and what to take instead; and nothing has changed."""
    path = tmp_path / "out" / name
    path.parent.mkdir()
    (tmp_path / "elsewhere").write_text("precious")
    make(path)
    before = contents(tmp_path)
    for refused in (lambda: start(path.parent, (1,)), lambda: run_folder.claim_for_log(path.parent)):
        with pytest.raises(SettingError, match=f"{name} and no run: .* such as .*out/run|run-id "
                                               f"(is no regular file|cannot be read)|run-id is not"):
            refused()
    assert contents(tmp_path) == before and os.listdir(path.parent) == [name]


def test_what_does_not_count(tmp_path):
    """Hidden names, what a file system makes, and the lock of a run that was killed at once."""
    for name in ("lost+found", ".snapshot"):
        (tmp_path / name).mkdir()
    (tmp_path / "lock").touch()
    assert start(tmp_path, (1,)) == (0, 1.0) and start(tmp_path) == (1, 1.0)


def test_what_else_is_in_a_folder_stays(corpus, tmp_path):
    """Whatever somebody puts into the folder of a run, through all that the run does."""
    out, names = tmp_path / "out", [
        "config.json", "training.log", "step-by-step.md", "step-\u0661\u0662\u0663\u0664"
        "\u0665\u0666\u0667\u0668", "metrics.jsonl.tmp", "traces", "previous-1", "tensorboard"]
    options = f"{SMALL} --save-every 1 --keep 1 --data {corpus} --out {out}"
    single.main(f"{options} --steps 2".split())
    for name in names:
        (out / name).write_text(f"my {name}")
    (tmp_path / "elsewhere").write_text("linked")
    (out / "summary.json.tmp").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(out / "run-id.tmp")
    (out / "step-00000002" / "notes").write_text("mine")
    before = {name: content for name, content in contents(tmp_path).items()
              if pathlib.Path(name).name in [*names, "summary.json.tmp", "elsewhere"]}
    single.main(f"{options} --steps 4".split())  # removes step 2
    (notes,) = out.glob("step-00000002.*.old/notes")
    assert notes.read_text() == "mine" and len(list(notes.parent.iterdir())) == 1
    assert before.items() <= contents(tmp_path).items() and len(before) == len(names) + 2


def test_a_run_without_a_checkpoint_begins_again(tmp_path, corpus):
    """It has the same id, and writes its log anew."""
    options = f"{SMALL} --data {corpus} --log-every 1 --save-every 0 --out {tmp_path / 'out'}"
    for steps_of_run in (3, 2):
        single.main(f"{options} --steps {steps_of_run}".split())
        lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3][:steps_of_run]


def test_a_run_that_begins_from_a_checkpoint(out, tmp_path):
    """The same command again continues it, or begins again while it has no checkpoint. Another
    --from is refused, and so is none before the first save."""
    two, three = (str(out / f"step-0000000{step}") for step in (2, 3))
    new = tmp_path / "new"
    for refused, words in (
        ((new, (), str(out)), f"--from {out} is no checkpoint: name one, such as {three}"),
        ((new, (), str(tmp_path)), "no checkpoint: name one, such as runs/a/step-00000100"),
        ((new, (), str(out / "step-00000007")), "step-00000007/SHA256SUMS cannot be read"),
        ((out, (), two), f"holds a run that began from no other, and --from is {two}: give"),
    ):
        with pytest.raises(SettingError, match=words):
            start(*refused)
    assert start(new, (), two) == (2, 2.0)  # after the typing errors
    before = contents(out)
    assert start(new, (), os.path.relpath(two)) == (2, 2.0)  # as if killed before the first save
    for source, words in ((None, f"no checkpoint yet, .* began from {two}: give the same --from"),
                          (three, f"began from {two}, and --from is {three}: give the same")):
        with pytest.raises(SettingError, match=words):
            start(new, (), source)
    assert start(new, (4,), two) == (2, 4.0) and steps(new) == [4]
    for source in (two, None):
        assert start(new, (), source) == (4, 4.0)
    with pytest.raises(SettingError, match=f"began from {two}, and --from is {three}"):
        start(new, (), three)
    assert contents(out) == before
    assert run_folder.read_run_id(new)[0] != run_folder.read_run_id(out)[0]


def test_a_run_that_is_over_is_no_beginning(out, tmp_path):
    with pytest.raises(SettingError, match="step-00000009 has finished step 9, and --steps is 9"):
        start(out, (9,))
        start(tmp_path / "new", (), str(out / "step-00000009"))


# A folder that another start has taken


def moved(folder):
    folder.rename(folder.with_name("elsewhere"))


def removed(folder):
    shutil.rmtree(folder)


def unlocked(folder):
    (folder / "lock").unlink()


def locked_anew(folder):
    unlocked(folder)
    (folder / "lock").touch()


@pytest.mark.parametrize("lose", [moved, removed, unlocked, locked_anew])
@pytest.mark.parametrize("again", [True, False])
def test_a_run_that_has_lost_its_folder_ends(tmp_path, monkeypatch, lose, again):
    """At its next line of the log as at its next save, and the other run is untouched. ``again``:
    whether another start has taken the name."""
    monkeypatch.setattr(run_folder.fcntl, "lockf", lambda *_: None)  # both are this process
    out = tmp_path / "out"
    weight = torch.nn.Parameter(torch.zeros(8))
    first = checkpoints_of(out, {"weight": weight, "buffer": torch.ones(8)}, keep=1)
    first.resume()
    log = start_metrics(first.claim, 0)
    first.save(1)
    log({"step": 1})
    lose(out)
    if again:
        start(out, (2, 3))
    elif lose in (unlocked, locked_anew):
        first.save(2)  # nobody else has come
        return
    before = contents(out)
    for step in (2, 4):
        with pytest.raises(SettingError, match="no longer the folder of this run: it was moved"):
            first.save(step)
    with pytest.raises(SettingError, match="another start has taken it; nothing more is written"):
        log({"step": 2})
    assert contents(out) == before and (again or not out.exists())


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


def claimed(folder):
    claim = run_folder.claim_folder(folder)
    claim.take()
    return claim


def test_lines_of_metrics(tmp_path):
    """Lines after the step that a run resumes from go, and half a line; somebody's line stays."""
    claim = claimed(tmp_path)
    start_metrics(claim, 0)
    lines = ['{"step": 1}', '{"step": 2}', "my note", '{"step": 3}', "[" * 9999, '{"step": 4}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": ')
    start_metrics(claim, 3)({"step": 4})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    """It is said once. A file that logrotate has moved is written anew."""
    log, path = start_metrics(claimed(tmp_path), 0), tmp_path / "metrics.jsonl"
    log({"step": 1})
    path.rename(tmp_path / "metrics.jsonl.1")
    log({"step": 2})
    assert path.read_text() == '{"step": 2}\n'
    path.unlink()
    path.mkdir()
    for step in (3, 4):
        log({"step": step})
    (line,) = capsys.readouterr().out.splitlines()
    assert "metrics.jsonl lacks lines from step 3 on (Is a directory); the run goes on" in line
    path.rmdir()
    log({"step": 5})
    assert path.read_text() == '{"step": 5}\n'


def test_a_checkpoint_that_cannot_be_removed(out, capsys):
    """It stays, and training goes on: the newer one is complete."""
    with mock.patch.object(pathlib.Path, "rename", autospec=True, side_effect=lambda path, new: (
            os.rename(path, new) if path.suffix == ".tmp" else
            (_ for _ in ()).throw(OSError(errno.EACCES, "Permission denied"))) or new):
        start(out, (4,))
    assert steps(out) == [1, 2, 3, 4] and checkpoint_files.read(out / "step-00000004")
    assert "step-00000001 could not be removed (Permission denied)" in capsys.readouterr().out


def test_without_checkpoints_a_log_is_written_anew(out, tmp_path):
    """But not that of a run that has some."""
    (out / "run-id").write_text((out / "run-id").read_text().replace("process ", "process 1"))
    with pytest.raises(SettingError, match="out has checkpoints, and this script reads none"):
        run_folder.claim_for_log(out)
    for _ in range(2):
        start_metrics(run_folder.claim_for_log(tmp_path / "new"), 0)


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
    older = f"start from the older one: --from {out}/step-00000002 and another --out"
    assert line.endswith(older), line
    assert start(tmp_path / "new", (), f"{out}/step-00000002") == (2, 2.0)
    with pytest.raises(SettingError):
        checkpoint_files.read(out / "step-00000003")
    assert not (tmp_path / "ran").exists()


def test_no_older_one(out):
    """A checkpoint is older by its number, not by its name."""
    flip_a_bit(out / "step-00000001" / DATA)
    for name in ("step-99999999", "step-100000000"):
        (out / name).mkdir()
    assert steps(out) == [1, 2, 3, 99999999, 100000000]
    with pytest.raises(SettingError, match="no older checkpoint: for a new run take another --out"):
        start(out.with_name("new"), (), out / "step-00000001")
    assert checkpoint_files.older_checkpoint(out / "step-100000000").name == "step-99999999"


def test_an_index_that_another_python_has_written(out, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle a member of an Enum by getattr. DCP's index has one."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__",
                        lambda member, _: (getattr, (type(member), member.name)))
    step = out / "step-00000003"
    write_index(step, pickle.dumps(pickle.loads((step / ".metadata").read_bytes())))
    assert start(out) == (3, 3.0)
