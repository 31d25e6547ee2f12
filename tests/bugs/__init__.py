"""Bugs that were published, as patches of the scripts: *.diff, for ``git apply``. Above each patch
stand what happened in the field, what to run, the sound run to compare with, and what parity says.
docs/bugs.md is made of them.

    python -m tests.bugs           # after a change: runs them all, and writes what follows
    python -m tests.bugs NAME      # runs one
    python -m tests.bugs --page    # writes the page alone, from what an earlier run has found
"""

import dataclasses
import pathlib
import re
import textwrap

from docs import draw

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parent.parent
PAGE = ROOT / "docs" / "bugs.md"
OPTIONS = ("--hidden-size 32 --intermediate-size 48 --num-hidden-layers 3 --num-attention-heads 8 "
           "--num-key-value-heads 4 --seq-len 16 --batch-size 24 --warmup-steps 1 --grad-clip 0.5 "
           "--save-every 0 --no-resume --dtype float32")
TRAINER = "tests/support/parity_trainer.py"
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
    return sorted(FOLDER.glob("*.diff"))


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
        common = "" if script.startswith("tests/") else OPTIONS  # these have options of their own
        return [name, script, f"{common} {more} {' '.join(options)}", edits]

    def sound(commands):
        return [job(file_name(command), command) for command in dict.fromkeys(commands)]

    return (sound(bug.against for bug in bugs), sound(bug.run for bug in bugs),
            [job(bug.name, bug.run, bug.edits) for bug in bugs])


def file_name(command):
    return re.sub(r"[^\w.]+", "-", command)


# The page


def found_in(bug):
    """[(project and number, its address), ...] of the text."""
    return re.findall(r"\[([^]]+)\]\((https://github\.com/[^)]+)\)", bug.text.replace("\n", " "))


def verdict(says):
    """What parity says, without its step, names and digits, and without where it says to look."""
    says = re.sub(r"DIFFERENT: step \d+: ", "", says)
    says = re.sub(r"(gradients|values|weights) of [\w.]+ to [\w.]+ \((.*?)\)", r"\1 of \2", says)
    says = re.sub(r"those of [\w.]+ to [\w.]+ \((.*?)\)", r"\1", says)
    says = re.sub(r"\d+\.\d{6,}", lambda number: f"{float(number[0]):.6g}", says)
    return re.split(r"[;,](?: and)? the loss is right|: look at|: learning rate| \(times", says)[0]


def short(says):
    """Its first clause, in the width of a table."""
    says = verdict(says)
    wrong = re.search(r"wrong up to [\w.]+, correct after it", says)
    ends = ";|: neither|: all differ|: with losses|, elsewhere|, by up to"
    return wrong[0] if wrong else re.split(ends, says)[0]


def change(bug):
    """Of the mean loss of the last 10 of 50 steps, such as +0.1%."""
    (run,) = (run for run in draw.read("bugs") if run["name"] == bug.name)
    return f"{round(draw.change_of_loss(run), 3) + 0.0:+.1%}"  # no -0.0


def index(bugs):
    yield ("| what went wrong | found in | lines | loss | what parity says |\n"
           "|---|---|---|---|---|\n")
    for number, bug in enumerate(bugs, 1):
        name, address = found_in(bug)[0]
        lines = max(len(re.findall(rf"(?m)^{sign}(?!--|\+\+)", bug.diff)) for sign in ("-", r"\+"))
        yield (f"| [{number}. {bug.title}](#bug-{number}) | [{name}]({address}) | {lines} | "
               f"{change(bug)} | {short(bug.says)} |\n")


def puzzle(bug):
    """The lines with the bug, as in the script, without what the patch takes away."""
    hunks = [textwrap.dedent(new).strip("\n") for _, new in bug.edits]
    return "\n...\n".join(hunks)


def changed(bug):
    """The lines of the patch without those around them."""
    hunks = re.split(r"(?m)^@@ .*\n", bug.diff)[1:]
    return "\n\n".join("\n".join(re.findall(r"(?m)^[-+].*", hunk)) for hunk in hunks)


def page(bugs):
    """The text of docs/bugs.md: its head, an index, and a puzzle for each bug."""
    parts = [PAGE.read_text().partition("\n## ")[0], "\n## Index\n\n", *index(bugs)]
    for number, bug in enumerate(bugs, 1):
        parts.append(f"""
## Bug {number}

`{bug.run}`

![Loss](pictures/bugs/{number:02}.svg)

```python
{puzzle(bug)}
```

<details><summary>Which line?</summary>

{bug.text}

```diff
{changed(bug)}
```

> {verdict(bug.says)}

</details>
""")
    return "".join(parts)
