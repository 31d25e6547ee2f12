"""docs/bugs.md: each patch applies, parity says of it what the page says, and finds nothing without
the patch."""

import re
import subprocess

import pytest

from tests import bugs
from tests.support.processes import ROOT
from tests.support.sample import sampled
from tests.test_parity import record
from tools.parity.compare import compare, read

BUGS = bugs.read()


def without_figures(words):
    """Figures that are not whole numbers depend on the machine."""
    return re.sub(r"\d+\.\d+(e[-+]\d+)?|\d+e[-+]\d+", "...", words)


@pytest.mark.parametrize("script", sampled(sorted({bug.script for bug in BUGS}),
                                           [bugs.TRAINER]))
def test_parity_says_what_the_page_says(once, shared, script):
    own = [bug for bug in BUGS if bug.script == script]
    alone, sound, spoiled = bugs.jobs(own, bugs.FEW)
    alone = record(once, shared, 0, alone)
    ranks = record(once, shared, bugs.RANKS, sound + spoiled)
    for bug in own:
        one = read(alone / f"{bugs.file_name(bug.against)}.parity")
        two = read(ranks / f"{bugs.file_name(bug.run)}.parity")
        equal = ("NOTHING PROVEN: 2 ranks against 1" if "bfloat16" in bug.run  # it compares less
                 else "EQUAL: 2 ranks against 1, .* 2 updates")
        assert re.match(equal, compare(one, two)), bug.run
        two = read(ranks / f"{bug.name}.parity")
        assert without_figures(compare(one, two)) == without_figures(bug.says), bug.name


def test_the_page_shows_the_patches():
    assert bugs.PAGE.read_text() == bugs.page(BUGS)
    assert len(BUGS) >= 20 and all("](https://github.com/" in bug.text for bug in BUGS)


def test_patches_apply():
    for path in bugs.paths():
        subprocess.run(["git", "apply", "--check", path], cwd=ROOT, check=True)
