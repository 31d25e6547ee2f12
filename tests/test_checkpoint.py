"""Promises 3 and 4: checkpoints move between scripts, and nothing is lost."""

import pickle
import shutil
import warnings

import pytest
import torch

from common import checkpoint
from common.checkpoint_files import write_hashes
from common.errors import SettingError
from tests.sample import sampled
from tests.test_same_run import EXACT

OPTIONS = f"{EXACT} --save-every 5 --keep 9"


def tensors(folder, step=20):
    """All tensors of a checkpoint: weights and optimizer states."""
    return checkpoint.read(folder / f"step-{step:08d}", prefix="")


def assert_bit_equal(found, expected):
    assert found.keys() == expected.keys() and len(found) > 60
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def uninterrupted(server, corpus, tmp_path_factory):
    """The run folders of whole runs: single.py, ddp.py on 2."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return {
        world: server.run(script, world, f"{OPTIONS} --data {corpus}", folder=folder,
                          out=script).out
        for script, world in (("single.py", 0), ("ddp.py", 2))
    }


def interrupted(uninterrupted, world, folder):
    """A copy of a whole run's folder as it was after step 10, or a little later: lines are there of
    steps that no checkpoint holds."""
    shutil.copytree(uninterrupted[world], folder / "out")
    for later in ("step-00000015", "step-00000020"):
        shutil.rmtree(folder / "out" / later)
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines(True)
    (folder / "out" / "metrics.jsonl").write_text("".join(lines[:13]) + lines[13][:20])


@pytest.mark.parametrize("script, world", [("single.py", 0), ("ddp.py", 2)])
def test_resuming_is_bit_equal(run, corpus, uninterrupted, tmp_path, script, world):
    interrupted(uninterrupted, world, tmp_path)
    result = run(script, world, f"{OPTIONS} --data {corpus}")
    assert "resuming after step 10" in result.output
    assert_bit_equal(tensors(result.out), tensors(uninterrupted[world]))
    assert [record["step"] for record in result.history] == list(range(1, 21))


@pytest.mark.parametrize("saved_by, script, world", [
    (2, "single.py", 0), (0, "ddp.py", 2), (2, "ddp.py", 4),
])
def test_checkpoints_move_between_scripts(run, corpus, uninterrupted, tmp_path,
                                          saved_by, script, world):
    interrupted(uninterrupted, saved_by, tmp_path)
    result = run(script, world, f"{OPTIONS} --data {corpus}")
    expected = tensors(uninterrupted[0])
    for name, tensor in tensors(result.out).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("when", ["writing", "renaming", "removing"])
@pytest.mark.parametrize("world", sampled([0, 2], [2]))
def test_a_save_that_dies_half_way(run, corpus, uninterrupted, tmp_path, world, when):
    """Killed while it saves step 15, in three places; then started again."""
    options = f"{EXACT} --save-every 5 --keep 2 --data {corpus}"
    killed = run("tests/killed_while_saving.py", world, f"{options} --when {when}", expect_ok=False)
    assert killed.statuses[0] == -9
    complete = [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(killed.out)]
    assert complete == ([10, 15] if when == "removing" else [5, 10])
    again = run("ddp.py" if world else "single.py", world, options)
    assert f"resuming after step {complete[-1]}" in again.output
    assert_bit_equal(tensors(again.out), tensors(uninterrupted[world]))
    assert [record["step"] for record in again.history] == list(range(1, 21))
    assert {path.name for path in again.out.iterdir()} == {
        "step-00000015", "step-00000020", "metrics.jsonl", "summary.json", "lock"
    }


def test_a_new_run_moves_the_old_one_aside(run, corpus):
    options = f"{EXACT} --data {corpus} --steps 2 --save-every 2"
    first = run("single.py", 0, options)
    refused = run("single.py", 0, options, expect_ok=False)
    assert "has finished step 2" in refused.output and refused.statuses == [1]
    again = run("single.py", 0, [*options.split(), "--no-resume"])
    assert again.curve() == first.curve()
    assert_bit_equal(tensors(again.out, 2), tensors(again.out / "previous-1", 2))


def test_the_log_of_a_run_without_checkpoints_is_moved_aside(run, corpus):
    options = f"{EXACT} --data {corpus} --save-every 0"
    log = run("single.py", 0, f"{options} --steps 2").out / "metrics.jsonl"
    first = log.read_text()
    run("ddp.py", 2, f"{options} --steps 1")
    assert ((log.parent / "previous-1" / log.name).read_text() == first
            and len(log.read_text().splitlines()) == 1)


def test_read_gives_the_models_state_dict(uninterrupted):
    from common.model import ModelConfig, Transformer

    weights = checkpoint.read(uninterrupted[2] / "step-00000010")
    config = ModelConfig(256, 48, 80, 2, 4, 2)
    Transformer(config).load_state_dict(weights)  # strict: no name too many or too few


class _Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch ran",)


@pytest.mark.parametrize("where", [".metadata", "value"])
def test_loading_runs_no_code(run, corpus, uninterrupted, tmp_path, where, monkeypatch):
    """A hostile index, and a hostile value behind an honest index, are refused unread."""
    interrupted(uninterrupted, 0, tmp_path)
    folder = tmp_path / "out" / "step-00000010"
    if where == ".metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(_Evil()))
    else:
        shutil.rmtree(folder)
        shutil.copytree(uninterrupted[0] / folder.name, folder, ignore=lambda *_: [".metadata"])
        with warnings.catch_warnings(action="ignore"):
            torch.distributed.checkpoint.save({"x": _Evil()}, checkpoint_id=folder, no_dist=True)
    write_hashes(folder, [".metadata", "__0_0.distcp"])  # as whoever wrote these would
    result = run("single.py", 0, f"{OPTIONS} --data {corpus}", expect_ok=False)
    assert result.statuses == [1] and len(result.lines) == 1
    assert {".metadata": "its index asks for posix.system, which DCP never writes",
            "value": "it is not to be trusted: x is not a tensor"}[where] in result.output
    assert not list(tmp_path.rglob("ran"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError):
        checkpoint.read(folder)
    assert not list(tmp_path.rglob("ran"))


def test_each_tensor_is_staged_and_written_once(run):
    assert "each is written once" in run("tests/who_writes.py", 4).output
