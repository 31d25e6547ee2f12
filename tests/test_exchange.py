"""Promise 4: what any script saved at any world size, any other resumes at any other. That each row
of the table resumes its own checkpoint bit for bit: test_same_run.py."""

import pytest

from common.services import checkpoint_files
from tests.support.processes import Result
from tests.support.sample import sampled, thorough
from tests.support.table import EXACT, OPTIONS
from tests.test_same_run import assert_near, furthest

SCRIPTS = sorted({row.script for row in EXACT} - {"diloco.py"})
READERS = [("single.py", 0), ("ddp.py", 3), ("zero.py --stage 1", 2), ("fsdp.py --replicate 2", 4),
           ("tp.py", 2), ("cp.py --attention ulysses", 2), ("pp.py --schedule zbv", 2),
           ("hybrid_3d.py --dp 2 --tp 2", 4)]


def saved_by(reader):
    """A row of each other script; another one for each reader."""
    for script in SCRIPTS:
        others = [row for row in EXACT if row.script == script]
        if script != READERS[reader][0].split()[0]:
            yield others[reader % len(others)]


@thorough
@pytest.mark.parametrize("reader", range(len(READERS)), ids=lambda reader: READERS[reader][0])
def test_resumes_what_others_saved(once, reader):
    """The rest of the run is that of single.py."""
    rows = list(saved_by(reader))
    folders = [str(row.run(once).out) for row in rows]
    out = once(*READERS[reader], f"{OPTIONS} --dtype float64",
               inject=f"ignored(); resumed({folders}, train=False)").out
    for number, row in enumerate(rows):
        found = Result([0], "", out / f"again-{number}").curve()
        assert furthest(found, EXACT[0].run(once).curve()[2:]) < 1e-10, row


SAVERS = [("single.py", 0), ("ddp.py", 2), ("fsdp.py", 2), ("zero.py", 2)]


@pytest.mark.parametrize("command, world", sampled(SAVERS, SAVERS[2:3]))
def test_saving_while_training_goes_on(once, command, world):
    """Every few steps, so that one save still goes on when the next is due."""
    result = once(command, world, f"{OPTIONS} --dtype float64 --async-save --save-every 1 --keep 9",
                  inject="ignored()")
    found = checkpoint_files.list_checkpoints(result.out)
    assert [checkpoint_files.step_of(path) for path in found] == [1, 2, 3]
    for name in ("step-00000002", "step-00000003"):  # as it was then, not as training has made it
        assert_near(*(checkpoint_files.read(run.out / name, prefix="")
                      for run in (result, EXACT[0].run(once))))
