"""tools/check.py: what it finds in edited scripts, and what it says of those that are right."""

import re
import shutil

import pytest

from tests.support.edits import edited
from tests.support.processes import ROOT
from tests.support.sample import sampled
from tests.test_porting import DATA_PARALLEL, HEADS, REDUCES_UNUSED, UNITS

SMALL = "--num-hidden-layers 2 --seq-len 24 --steps 2"
NO_CHECK_OF_CALLS = ("    compare_calls(model,", "    (lambda *_, **__: 0)(model,")


@pytest.fixture
def check(server, tmp_path):
    """A function of the tool's words: (status, output), run in a folder, which stays as it is."""
    def check(words):
        before = sorted(tmp_path.iterdir())
        found = server.run("tools/check.py", 0, words, folder=tmp_path, pass_out=False,
                           expect_ok=False, env={"TMPDIR": str(tmp_path)})
        assert sorted(tmp_path.iterdir()) == before
        return found.statuses[0], found.output

    return check


WRONG = [
    ([("add_gradients_up(model)  # FSDP: each", "pass  # FSDP: each")],
     "DIFFERENT  step 0: gradients: all: divided by 2, as many as the ranks"),
    (HEADS, "FAILED     rank 1 calls lm_head.parts."),
    ([("check(args, n)  #", "refuse([(n > 1, 'it needs a GPU')])  #")],
     "REFUSED    it needs a GPU"),
    ([*HEADS, NO_CHECK_OF_CALLS], "FAILED     rank . aborts in a collective: the "),
    ([("count_targets(batch, dist.group.WORLD)", "n * count_targets(batch)")],
     "DIFFERENT  step 0: "),
    ([("    report = Report(", "    1 / (n - 2)\n    report = Report(")],
     r"FAILED     ZeroDivisionError: division by zero, fsdp.py:\d+: 1 / "),
]


@pytest.mark.parametrize("edits, words", sampled(WRONG, WRONG[:3]))
def test_what_is_wrong_is_found(check, tmp_path, edits, words):
    copy = edited(tmp_path / "copy", "fsdp.py", *edits)
    status, said = check(f"{copy} --ranks 2 {SMALL} --steps 1 --batch-size 6 --grad-accum 3")
    assert status == 1 and re.search(f"2 processes  {words}", said), said


LISTED = UNITS, "        [model.model.norm, *model.lm_head.parts.values()],\n"
PARTS = "--batch-size 6 --grad-accum 3"  # some ranks use no part of the head that others use
RIGHT = [(command, []) for command in (
    "ddp.py --grad-accum 3", "zero.py --stage 1 --grad-accum 3", "fsdp.py --grad-accum 3",
    "tp.py --grad-accum 3", "cp.py", "pp.py --num-hidden-layers 4", "ep.py", "hybrid_3d.py",
    "diloco.py",
)] + [(f"{script} {PARTS}", HEADS + DATA_PARALLEL[script]) for script in ("ddp.py", "zero.py")]
if REDUCES_UNUSED:
    RIGHT += [(f"fsdp.py {PARTS}", HEADS + DATA_PARALLEL["fsdp.py"] + more)
              for more in ([], [LISTED])]


@pytest.mark.parametrize("command, edits", sampled(
    RIGHT, [row for row in RIGHT if row[0] == f"zero.py {PARTS}"]))
def test_what_is_right_is_equal(check, tmp_path, command, edits):
    script, _, more = command.partition(" ")
    path = edited(tmp_path / "copy", script, *edits) if edits else script
    status, said = check(f"{path} --ranks 2 {SMALL} {more}")
    assert status == 0 and "2 processes  EQUAL      up to " in said, said
    assert ("--replicas 1" in said) == (script == "diloco.py")


def test_tied_weights_are_equal(check, tmp_path):
    """zero.py records shards, under both names."""
    tied = ("    layers = model", "    model.lm_head.weight = model.model.embed_tokens.weight\n"
            "    layers = model")
    one = edited(tmp_path / "one", "single.py", tied)
    copy = edited(tmp_path / "copy", "zero.py", tied, (UNITS, "        [model.model.norm],\n"), (
        "[model.model.embed_tokens], *", "[model.model.embed_tokens, model.lm_head], *"))
    status, said = check(f"{copy} --ranks 2 --against {one} --stage 1 {SMALL}")
    assert status == 0, said


def test_a_copy_uses_its_own_common(check, tmp_path):
    copy = edited(tmp_path / "copy", "fsdp.py")
    (tmp_path / "copy" / "common").unlink()
    shutil.copytree(ROOT / "common", tmp_path / "copy" / "common")
    (tmp_path / "copy" / "common" / "step.py").write_text("1 / 0")
    status, said = check(f"{copy} --ranks 2 {SMALL}")
    assert status == 1 and "ZeroDivisionError" in said, said
