"""docs/bugs.md: each patch applies, parity says of it what the page says, and finds nothing without
the patch."""

import re
import subprocess

import pytest

from tests import bugs
from tests.support.processes import ROOT
from tests.support.sample import sampled
from tools.parity.compare import compare, read

BUGS = bugs.read()


def without_figures(words):
    """Figures that are not whole numbers depend on the machine."""
    return re.sub(r"\d+\.\d+(e[-+]\d+)?|\d+e[-+]\d+", "...", words)


@pytest.mark.parametrize("script", sampled(sorted({bug.run.split()[0] for bug in BUGS}),
                                           [bugs.TRAINER]))
def test_parity_says_what_the_page_says(once, script):
    own = [bug for bug in BUGS if bug.run.split()[0] == script]
    options = " ".join([*(bug.name for bug in own), bugs.FEW])
    folders = [once("tests/support/parity_runs.py", ranks, options, inject="ignored()").out
               for ranks in (0, bugs.RANKS, bugs.RANKS)]
    for bug in own:
        one, sound, spoiled = (read(folder / f"{name}.parity")
                               for folder, name in zip(folders, bug.runs))
        equal = ("NOTHING PROVEN: 2 ranks against 1" if "bfloat16" in bug.run  # it compares less
                 else "EQUAL: 2 ranks against 1, .* 2 updates")
        assert re.match(equal, compare(one, sound)), bug.run
        assert without_figures(compare(one, spoiled)) == without_figures(bug.says), bug.name


def test_the_page_shows_the_patches():
    """What parity says in short has no other words."""
    assert bugs.PAGE.read_text() == bugs.page(BUGS)
    for bug in BUGS:
        short, long = (set(re.findall("[a-z]+", words)) for words in (bug.short, bug.says))
        assert short <= long, bug.name


def test_patches_apply():
    patches = bugs.FOLDER.glob("*.diff")
    subprocess.run(["git", "apply", "--check", *patches], cwd=ROOT, check=True)
