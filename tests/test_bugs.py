"""docs/bugs.md: each patch applies, parity says of it what the page says, and finds nothing without
the patch."""

import re
import subprocess
import textwrap

from docs import draw
from parity.compare import compare, read
from tests.support.parity_runs import RANKS, TRAINER, read as read_bugs
from tests.support.processes import ROOT
from tests.support.sample import rows
from tests.test_check import NEEDS

BUGS = [*read_bugs()]
SCRIPTS = {bug.run.split()[0] for bug in BUGS}


def without_figures(words):
    """Figures that are not whole numbers depend on the machine."""
    return re.sub(r"\d+\.\d+(e[-+]\d+)?|\d+e[-+]\d+", "...", words)


@rows("script", "\n".join(["", f"* {TRAINER}", *sorted(SCRIPTS - {TRAINER})]))
def test_parity_says_what_the_page_says(once, script):
    own = [bug for bug in BUGS if bug.run.split()[0] == script]
    options = " ".join([*(bug.name for bug in own), "--steps 3 --lr 0.01"])
    folders = [once("tests/support/parity_runs.py", ranks, options, inject="ignored()").out
               for ranks in (0, RANKS, RANKS)]
    for bug in own:
        one, sound, spoiled = (read(folder / f"{name}.parity")
                               for folder, name in zip(folders, bug.runs))
        equal = ("NOTHING PROVEN: 2 ranks against 1" if "bfloat16" in bug.run  # it compares less
                 else "EQUAL: 2 ranks against 1, .* 2 updates")
        assert re.match(equal, str(compare(one, sound))), bug.run
        assert without_figures(str(compare(one, spoiled))) == without_figures(bug.says), bug.name


def test_the_page_shows_the_patches():
    _, *puzzles = (ROOT / "docs/bugs.md").read_text().split("\n## Bug ")
    for bug, puzzle, run in zip(BUGS, puzzles, draw.read("bugs"), strict=True):
        ((command, loss),) = re.findall(r"(?m)^`(.*)`, logged loss (.*)%\*?$", puzzle)
        assert (command, float(loss)) == (bug.run, round(100 * draw.change_of_loss(run), 1))
        shown = [f"\n> {bug.says}\n"]
        shown += [textwrap.dedent(new).strip("\n") for _, new in bug.edits]
        shown += [textwrap.dedent("".join(f"{line[1:]}\n" for line in hunk if line[0] == "-"))
                  for hunk in bug.hunks]
        assert not [part for part in shown if part not in puzzle], bug.name


def test_the_head_of_the_page_counts_the_patches():
    """And what check needs for some of them; each of these is tested in test_check.py."""
    head = " ".join((ROOT / "docs/bugs.md").read_text().partition("\n## Bug ")[0].split())
    small = [run for run in draw.read("bugs") if abs(draw.change_of_loss(run)) < 0.05]
    scripts = [bug for bug in BUGS if not bug.run.startswith(TRAINER)]
    for words in (
            f"{len(BUGS) - 1} of these bugs were published",
            f"{len(small)} of the {len(BUGS)} bugs change it by less than 5 %",
            f"{len(scripts)} of the patches change a script. `bash run.sh check SCRIPT` finds "
            f"{len(scripts) - len(NEEDS)} of them as it is"):
        assert words in head, words
    for number, words in NEEDS.items():
        assert re.search(rf" {int(number)}\b[^.]* needs `{words.split()[0]}", head), number


def test_patches_apply():
    patches = (ROOT / "tests/bugs").glob("*.diff")
    subprocess.run(["git", "apply", "--check", *patches], cwd=ROOT, check=True)
