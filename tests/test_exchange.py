"""Promise 3: what any script saved at any world size, any other resumes at any other."""

import functools
import itertools
import os
import shutil

import pytest
import torch

from common import checkpoint
from tests.processes import Result
from tests.sample import thorough

OPTIONS = (
    "--hidden-size 24 --intermediate-size 40 --num-hidden-layers 2 --num-attention-heads 4 "
    "--num-key-value-heads 4 --seq-len 24 --batch-size 12 --steps 9 --log-every 1 "
    "--warmup-steps 3 --save-every 6 --dtype float64"
)
COMMANDS = {  # the world sizes of each; 0 is plain python
    "single.py": (0,), "ddp.py": (1, 2, 3, 4), "zero.py --stage 1": (1, 2, 3, 4),
    "zero.py --stage 2": (1, 2, 3, 4), "fsdp.py": (1, 2, 3, 4), "fsdp.py --replicate 2": (2, 4),
    "fsdp.py --replicate 3": (3,), "tp.py": (2,), "tp.py --no-sequence-parallel": (4,),
    "cp.py": (3,), "cp.py --attention ulysses": (2,), "cp.py --attention allgather": (4,),
    "pp.py --microbatches 2": (2,), "pp.py --microbatches 4 --schedule zbv": (2,),
    "hybrid_3d.py --tp 2 --pp 2": (4,), "hybrid_3d.py --cp 2 --replicate 2": (4,),
}
RUNS = [(command, world) for command, worlds in COMMANDS.items() for world in worlds]
SAMPLE = [("zero.py --stage 2", 3), ("tp.py", 2), ("pp.py --microbatches 2", 2)]  # without --all


def resumed_by(run):
    """Whose checkpoints a run resumes: its own, that of its command at another world size, and
    those of other commands. Each ordered pair of commands meets at one pair of world sizes."""
    command, world = run
    own, place = COMMANDS[command], list(COMMANDS).index(command)
    found = [run]
    for i, (other, worlds) in enumerate(COMMANDS.items()):
        if other == command:
            found += [(other, own[(own.index(world) + 1) % len(own)])] * (len(own) > 1)
        elif world == own[i % len(own)]:
            found.append((other, worlds[place % len(worlds)]))
    return found


def test_every_pair_of_commands_meets():
    """And each run resumes what another command saved, and another command what it saved."""
    pairs = [(run, saved) for run in RUNS for saved in resumed_by(run)]
    assert len(set(pairs)) == len(pairs) and all((run, run) in pairs for run in RUNS)
    commands = [(run[0], saved[0]) for run, saved in pairs if run[0] != saved[0]]
    assert sorted(commands) == sorted(itertools.permutations(COMMANDS, 2))
    others = [(run, saved) for run, saved in pairs if run[0] != saved[0]]
    assert {run for run, _ in others} == {saved for _, saved in others} == set(RUNS)
    assert all(run[1] != saved[1] for run, saved in others  # the number of ranks changes
               if min(len(COMMANDS[run[0]]), len(COMMANDS[saved[0]])) == 4)


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
    """The rest of the run is that of the uninterrupted single.py; from its own checkpoint bit for
    bit that of its own, in every weight and optimizer state."""
    command, world = run
    options = [*OPTIONS.split(), "--data", corpus]
    saved_by_each = resumed_by(run)
    if run in SAMPLE and not request.config.getoption("--all"):  # its own, and that of the next
        saved_by_each = [run, SAMPLE[SAMPLE.index(run) - 1]]
    for saved_by in saved_by_each:
        folder, saved = tmp_path / name_of(saved_by), whole(saved_by).out / "step-00000006"
        shutil.copytree(saved, folder / saved.name, copy_function=os.link)
        options += ["--each", "--out", folder, *([] if saved_by == run else ["--save-every", "0"])]
    server.run(f"tests/several_runs.py {command}", world, options, folder=tmp_path, pass_out=False)

    expected = whole(("single.py", 0)).curve()[6:]
    for saved_by in saved_by_each:
        found = Result([0], "", tmp_path / name_of(saved_by)).curve()
        assert len(found) == len(expected) == 3
        assert max(abs(a - b) for row, reference in zip(found, expected)
                   for a, b in zip(row, reference)) < 1e-10, saved_by
    last, own, weights = (
        checkpoint.read(out / "step-00000009", prefix="")
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
    options = f"{OPTIONS} --data {corpus} --async-save --save-every 2 --keep 9"
    result = server.run(command, world, options, folder=tmp_path)
    found = checkpoint.list_checkpoints(result.out)
    assert [checkpoint.step_of(path) for path in found] == [2, 4, 6, 8, 9]
    for step in (6, 9):  # as it was at its step, not as training has made it since
        expected = checkpoint.read(whole(("single.py", 0)).out / f"step-{step:08d}", prefix="")
        for name, tensor in checkpoint.read(result.out / f"step-{step:08d}", prefix="").items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)
