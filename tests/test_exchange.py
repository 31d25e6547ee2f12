"""Promise 3: what any script saved at any world size, any other resumes at any other."""

import functools
import os
import shutil

import pytest
import torch

from common import checkpoint
from tests.processes import Result
from tests.sample import thorough

OPTIONS = (
    "--hidden-size 24 --intermediate-size 40 --num-hidden-layers 2 --num-attention-heads 4 "
    "--num-key-value-heads 4 --seq-len 24 --batch-size 12 --steps 20 --log-every 1 "
    "--warmup-steps 3 --save-every 10 --dtype float64"
)
# Each saves in the middle of its run. World size 0 is plain python.
DATA_PARALLEL = [
    ("single.py", 0),
    *[("ddp.py", world) for world in (1, 2, 3, 4)],
    *[("zero.py --stage 1", world) for world in (1, 2, 3, 4)],
    *[("zero.py --stage 2", world) for world in (1, 2, 3, 4)],
    *[("fsdp.py", world) for world in (1, 2, 3, 4)],
    ("fsdp.py --replicate 2", 2), ("fsdp.py --replicate 3", 3), ("fsdp.py --replicate 2", 4),
]
SPLIT_MODELS = [  # or sequences
    ("tp.py", 2), ("tp.py --no-sequence-parallel", 4),
    ("cp.py", 3), ("cp.py --attention ulysses", 2), ("cp.py --attention allgather", 4),
    ("pp.py --microbatches 2", 2), ("pp.py --microbatches 4 --schedule zbv", 2),
    ("hybrid_3d.py --tp 2 --pp 2", 4), ("hybrid_3d.py --cp 2 --replicate 2", 4),
]
RUNS = DATA_PARALLEL + SPLIT_MODELS


# Without --all: a few runs, each of which resumes its own checkpoint and that of the next
SAMPLE = [
    ("zero.py --stage 2", 3), ("hybrid_3d.py --tp 2 --pp 2", 4), ("cp.py", 3),
]


def resumed_by(run, every):
    """Whose checkpoints a run resumes, with --all or without."""
    if every or run not in SAMPLE:
        return [other for other in RUNS if meet(run, other)]
    first = SAMPLE.index(run)
    return [SAMPLE[(first + i) % len(SAMPLE)] for i in range(2)]


def meet(run, other):
    """All of one kind do. Of two, each pair of commands does, at one world size of the first."""
    if (run in SPLIT_MODELS) == (other in SPLIT_MODELS):
        return True
    parallel, split = sorted((run, other), key=RUNS.index)
    worlds = [run for run in DATA_PARALLEL if run[0] == parallel[0]]
    return parallel == worlds[SPLIT_MODELS.index(split) % len(worlds)]


def name_of(run):
    return run[0].replace(" --", "-").replace(" ", "") + f"-on-{run[1]}"


@pytest.fixture(scope="module")
def whole(server, corpus, tmp_path_factory):
    """The uninterrupted runs: ``whole(run)`` is its result."""
    folder = tmp_path_factory.mktemp("whole")
    return functools.cache(lambda run: server.run(
        *run, f"{OPTIONS} --data {corpus}", folder=folder, out=name_of(run)
    ))


@pytest.mark.parametrize("run", [
    pytest.param(run, id=name_of(run), marks=() if run in SAMPLE else thorough) for run in RUNS
])
def test_resumes_what_any_other_saved(server, whole, corpus, tmp_path, request, run):
    """The second half of the run is that of the uninterrupted single.py; from its own checkpoint
    bit for bit that of its own, in every weight and optimizer state."""
    command, world = run
    options = [*OPTIONS.split(), "--data", corpus]
    saved_by_each = resumed_by(run, request.config.getoption("--all"))
    for saved_by in saved_by_each:
        folder, saved = tmp_path / name_of(saved_by), whole(saved_by).out / "step-00000010"
        shutil.copytree(saved, folder / saved.name, copy_function=os.link)
        options += ["--each", "--out", folder, *([] if saved_by == run else ["--save-every", "0"])]
    server.run(f"tests/several_runs.py {command}", world, options, folder=tmp_path, pass_out=False)

    expected = whole(("single.py", 0)).curve()[10:]
    for saved_by in saved_by_each:
        found = Result([0], "", tmp_path / name_of(saved_by)).curve()
        assert len(found) == len(expected) == 10
        assert max(abs(a - b) for row, reference in zip(found, expected)
                   for a, b in zip(row, reference)) < 1e-10, saved_by
    last, own, weights = (
        checkpoint.read(out / "step-00000020", prefix="")
        for out in (tmp_path / name_of(run), whole(run).out, whole(("single.py", 0)).out)
    )
    assert last.keys() == own.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(last[name], own[name]), name
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("command, world", [
    ("single.py", 0), ("ddp.py", 2), ("fsdp.py", 2), ("zero.py", 2),
])
def test_saving_while_training_goes_on(server, whole, corpus, tmp_path, command, world):
    """Every few steps, so that one save still goes on when the next is due."""
    options = f"{OPTIONS} --data {corpus} --async-save --save-every 2 --keep 20"
    result = server.run(command, world, options, folder=tmp_path)
    found = checkpoint.list_checkpoints(result.out)
    assert [checkpoint.step_of(path) for path in found] == list(range(2, 21, 2))
    for step in (10, 20):  # as it was at its step, not as training has made it since
        expected = checkpoint.read(whole(("single.py", 0)).out / f"step-{step:08d}", prefix="")
        for name, tensor in checkpoint.read(result.out / f"step-{step:08d}", prefix="").items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)
