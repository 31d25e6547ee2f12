"""A run deletes nothing that it has not made itself. What has the name of one of its files, and is
not its own, moves into previous-N. A checkpoint knows its run, its step and all of its files."""

import json
import os
import shutil

import pytest
import torch

from common.errors import SettingError
from common.services import stored
from common.services.checkpoint import Checkpoints
from tests.support.sample import sampled

SMALL = "--hidden-size 32 --num-hidden-layers 2 --seq-len 32 --batch-size 8 --log-every 1"
OWN = ["metrics.jsonl", "summary.json", "trace-rank0.json", "trace-rank1.json"]


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file()}


@pytest.mark.parametrize("command, world", sampled([("single.py", 0), ("ddp.py", 2)],
                                                   [("ddp.py", 2)]))
def test_a_folder_of_somebody_loses_nothing(run, corpus, tmp_path, command, world):
    """Files that only have the names of ours, backups of checkpoints, links."""
    out = tmp_path / "out"
    (out / "step-00000002.old").mkdir(parents=True)
    (out / "step-00000002.old" / "backup").write_text("precious")
    (out / "step-00000003.tmp").write_text("precious")
    (out / "step-00000004.0123456789abcdef.old").mkdir()
    (out / "step-00000004.0123456789abcdef.old" / "part").write_text("of another run")
    for name in OWN[:3]:
        (out / name).write_text(f"my {name}")
    (tmp_path / "elsewhere").write_text("linked")
    (out / "trace-rank1.json").symlink_to(tmp_path / "elsewhere")
    (out / "notes").write_text("mine")
    before = contents(out)
    result = run(command, world, f"{SMALL} --steps 3 --save-every 1 --keep 1 --data {corpus}")
    moved = {"step-00000004.0123456789abcdef.old/part", *OWN[:4]}
    after = contents(out)
    for name, text in before.items():
        assert after[f"previous-1/{name}" if name in moved else name] == text, name
    assert (out / "previous-1" / "trace-rank1.json").is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "linked"
    assert [record["step"] for record in result.history] == [1, 2, 3]
    assert stored.list_checkpoints(out) == [out / "step-00000003"]
    run(command, world, f"{SMALL} --steps 4 --save-every 1 --keep 1 --data {corpus}")  # its resume
    assert not (out / "previous-2").exists()
    assert [json.loads(line)["step"] for line in open(out / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_checkpoint_of_another_run_is_not_rotated(run, corpus, tmp_path):
    """An older one that somebody has put there stays, and so do files beside a foreign lock."""
    options = f"{SMALL} --save-every 1 --keep 1 --data {corpus}"
    other = run("single.py", 0, f"{options} --steps 1", out="other").out
    run("single.py", 0, f"{options} --steps 3")
    shutil.copytree(other / "step-00000001", tmp_path / "out" / "step-00000001")
    (tmp_path / "out" / "lock").unlink()  # now nobody knows whose the other files are
    run("single.py", 0, f"{options} --steps 5")
    found = [path.name for path in stored.list_checkpoints(tmp_path / "out")]
    assert found == ["step-00000001", "step-00000005"]
    assert len((tmp_path / "out" / "previous-1" / "metrics.jsonl").read_text().splitlines()) == 3


def link(out):
    (out.parent / "target").write_text("precious")
    (out / "lock").symlink_to(out.parent / "target")


@pytest.mark.parametrize("make", [
    link, lambda out: (out / "lock").write_text("my own lock"),
    lambda out: (out / "lock").mkdir(), lambda out: os.mkfifo(out / "lock"),
])
def test_a_foreign_lock_is_refused(run, corpus, tmp_path, make):
    out = tmp_path / "out"
    out.mkdir()
    make(out)
    result = run("single.py", 0, f"{SMALL} --data {corpus}", expect_ok=False)
    (line,) = [line for line in result.lines if "error:" in line]
    assert "has a file named lock that no run has made: choose another folder" in line
    if make is link:
        assert (tmp_path / "target").read_text() == "precious"


# A checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run folder with steps 1 to 3."""
    out = tmp_path_factory.mktemp("saved") / "out"
    weight = torch.nn.Parameter(torch.arange(8.0))
    checkpoints = Checkpoints(
        out, ({}, {}), {"weight": weight}, torch.optim.AdamW([weight]), stop=9, keep=9
    )
    checkpoints.resume()
    for step in (1, 2, 3):
        with torch.no_grad():
            weight.add_(1)
        checkpoints.save(step)
    checkpoints.lock.close()
    return out


@pytest.fixture
def out(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "out")
    return tmp_path / "out"


def resume(out, **which):
    weight = torch.nn.Parameter(torch.zeros(8))
    checkpoints = Checkpoints(
        out, ({}, {}), {"weight": weight}, torch.optim.AdamW([weight]), stop=9
    )
    try:
        return checkpoints.resume(**which), weight[0].item()
    finally:
        checkpoints.lock.close()


def test_it_knows_its_step(out):
    """Renamed, it would skip samples or repeat some."""
    assert resume(out) == (3, 3.0)
    (out / "step-00000003").rename(out / "step-00000008")
    with pytest.raises(SettingError, match="it was saved after step 3.*use the older .*00002"):
        resume(out)


def test_a_file_of_another_step_is_noticed(out):
    """Also with its hash: there is one list of all files."""
    data = "__0_0.distcp"
    shutil.copy(out / "step-00000001" / data, out / "step-00000003" / data)
    with pytest.raises(SettingError, match=f"{data} is damaged: .*: --resume-from 2"):
        resume(out)


@pytest.mark.parametrize("change, words", [
    (lambda step: (step / "__0_0.distcp").unlink(), "__0_0.distcp is missing, or no regular file"),
    (lambda step: (step / stored.SUMS).unlink(), "SHA256SUMS is missing, or no regular file"),
    (lambda step: (step / stored.SUMS).write_text(""), "cannot be checked: SHA256SUMS lacks it"),
    (lambda step: (step / ".metadata.sha256").touch(), "is of an earlier format, with a .sha256"),
    (lambda step: [path.unlink() for path in step.iterdir()], "SHA256SUMS is missing"),
])
def test_a_list_that_does_not_fit(out, change, words):
    change(out / "step-00000003")
    with pytest.raises(SettingError, match=words):
        resume(out)


def test_files_that_are_not_listed_are_ignored(out):
    (out / "step-00000003" / "notes.txt").write_text("mine")
    assert resume(out) == (3, 3.0)


def test_an_empty_folder_with_the_name_of_a_step(out):
    (out / "step-99999999").mkdir()
    with pytest.raises(SettingError, match="step-99999999/SHA256SUMS is missing.*use the older"):
        resume(out)
    assert resume(out, step=3) == (3, 3.0)
    assert (out / "previous-1" / "step-99999999").is_dir()
