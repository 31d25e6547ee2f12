"""Bugs that were published, as patches of the scripts: *.diff, for ``git apply``. Above each patch
stand what happened in the field, what to run, the sound run to compare with, and what parity says.
docs/bugs.md is made of them.

    python -m tests.bugs    # after a change: runs them all, and writes what follows
"""

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "bugs.md"
OPTIONS = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 3 --num-attention-heads 8 "
           "--num-key-value-heads 4 --seq-len 16 --batch-size 24 --warmup-steps 1 --grad-clip 0.5 "
           "--save-every 0 --no-resume --dtype float32")
TRAINER = "tests/support/parity_trainer.py"  # it has options of its own
RANKS = 2  # of all bugs; what they are compared with is one process
FEW = "--steps 3 --lr 0.01"  # for parity


@dataclasses.dataclass(frozen=True)
class Bug:
    name: str
    title: str
    text: str  # what happened in the field
    run: str  # the script that the patch changes, and its options
    against: str  # the sound run in one process
    says: str  # what parity prints
    diff: str

    @property
    def script(self):
        return self.run.split()[0]

    @property
    def edits(self):
        """[[old text, new text], ...] of the script."""
        hunks = [hunk.splitlines(keepends=True)
                 for hunk in re.split(r"(?m)^@@ .*\n", self.diff)[1:]]
        return [["".join(line[1:] for line in hunk if line[0] in signs) for signs in (" -", " +")]
                for hunk in hunks]


def paths():
    return sorted(pathlib.Path(__file__).parent.glob("*.diff"))


def read():
    """All bugs, in the order of the page."""
    bugs = []
    for path in paths():
        head, start, diff = path.read_text().partition("--- a/")
        title, text, fields = head.strip("\n").split("\n\n")
        run, against, says = (line.partition(": ")[2] for line in fields.split("\n"))
        bugs.append(Bug(path.stem, title, text, run, against, says, start + diff))
    return bugs


def jobs(bugs, more):
    """Three lists of jobs for parity_runs.py: what to compare with, in one process; on all
    ranks, each of ``bugs`` without its patch; and with it. Sound ones are named ``file_name``.
    ``more``: options of all."""
    def job(name, command, edits=()):
        script, *options = command.split()
        common = "" if script == TRAINER else OPTIONS
        return [name, script, f"{common} {more} {' '.join(options)}", edits]

    def sound(commands):
        return [job(file_name(command), command) for command in dict.fromkeys(commands)]

    return (sound(bug.against for bug in bugs), sound(bug.run for bug in bugs),
            [job(bug.name, bug.run, bug.edits) for bug in bugs])


def file_name(command):
    return re.sub(r"[^\w.]+", "-", command)


def page(bugs):
    """The text of docs/bugs.md: its head, and a section for each bug."""
    parts = [PAGE.read_text().partition("\n## ")[0]]
    for number, bug in enumerate(bugs, 1):
        parts.append(f"""
## {number}. {bug.title}

{bug.text}

`{bug.run}` on {RANKS} ranks, compared with `{bug.against}` in one process:

```diff
{bug.diff.rstrip()}
```

```text
{bug.says}
```
""")
    return "".join(parts)
