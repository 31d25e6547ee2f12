"""Promise 4: what any script saved at any world size, any other resumes at any other. Promise 5: a
resumed run is bit for bit the uninterrupted one."""

import itertools
import os
import shutil

import pytest
import torch

from common import checkpoint
from tests.processes import Result
from tests.table import EXACT, OPTIONS, SAMPLE, TRAINING
from tests.test_same_run import furthest, of_table

SCRIPTS = sorted({row.script for row in EXACT})


def resumed_by(row):
    """Whose checkpoints a run resumes, beside its own. Of each other script at least one row: the
    rows of a script share the other scripts."""
    rows = [other for other in EXACT if other.script == row.script]
    place = rows.index(row)
    found = []
    for i, script in enumerate(script for script in SCRIPTS if script != row.script):
        others = [other for other in EXACT if other.script == script]
        if i % len(rows) == place or i == place % (len(SCRIPTS) - 1):
            found.append(others[(len(rows) * i + place) % len(others)])
    return found


def test_every_pair_of_scripts_meets():
    pairs = [(row, saved) for row in EXACT for saved in resumed_by(row)]
    scripts = {(row.script, saved.script) for row, saved in pairs}
    assert scripts == set(itertools.permutations(SCRIPTS, 2)) and len(SCRIPTS) == 8
    assert {row for row, _ in pairs} == set(EXACT)
    assert sum(row.world != saved.world for row, saved in pairs) > len(pairs) / 2


@of_table(EXACT)
def test_resumes_what_others_saved(server, once, corpus, tmp_path, row, request):
    """The rest of the run is that of single.py. From its own checkpoint it is bit for bit its own,
    in every weight and optimizer state, although nothing is evaluated any more."""
    whole, single = row.run(once), EXACT[0].run(once)
    options = [*TRAINING.split(), "--dtype", row.dtype, "--data", corpus]
    saved_by_each = [row, *resumed_by(row)]
    if not request.config.getoption("--all"):
        saved_by_each = [row, SAMPLE[SAMPLE.index(row) - 1]] if row in SAMPLE else [row]
    for saved_by in saved_by_each:
        folder, saved = tmp_path / saved_by.name, saved_by.run(once).out / "step-00000006"
        shutil.copytree(saved, folder / saved.name, copy_function=os.link)
        options += ["--each", "--out", folder, *([] if saved_by == row else ["--save-every", "0"])]
    server.run(row.command, row.world, options, folder=tmp_path, pass_out=False,
               inject=f"{row.inject}; each()")

    for saved_by in saved_by_each:
        found = Result([0], "", tmp_path / saved_by.name).curve()
        assert furthest(found, single.curve()[6:]) < 1e-10, saved_by
    last, own = (checkpoint.read(out / "step-00000009", prefix="")
                 for out in (tmp_path / row.name, whole.out))
    assert last.keys() == own.keys()
    for name, tensor in own.items():
        assert torch.equal(last[name], tensor), name


@pytest.mark.parametrize("command, world", [
    ("single.py", 0), ("ddp.py", 2), ("fsdp.py", 2), ("zero.py", 2),
])
def test_saving_while_training_goes_on(once, server, corpus, tmp_path, command, world):
    """Every few steps, so that one save still goes on when the next is due."""
    result = once(command, world, f"{OPTIONS} --dtype float64 --async-save --save-every 3 --keep 9",
                  inject="ignored()")
    found = checkpoint.list_checkpoints(result.out)
    assert [checkpoint.step_of(path) for path in found] == [3, 6, 9]
    for name in ("step-00000006", "step-00000009"):  # as it was then, not as training has made it
        expected = checkpoint.read(EXACT[0].run(once).out / name, prefix="")
        for key, tensor in checkpoint.read(result.out / name, prefix="").items():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-10)
