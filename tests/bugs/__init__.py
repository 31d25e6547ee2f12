"""Bugs that were published, as patches of the scripts: *.diff, for ``git apply``. Above each patch
stand a title, what happened in the field, what to run, the sound run in one process to compare
with, what parity says, and the same in short. docs/bugs.md is made of them: see __main__.py.
"""

import collections
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
TRAINER = "tests/support/parity_trainer.py"  # it has options of its own
RANKS = 2  # of all bugs; what they are compared with is one process
FEW = "--steps 3 --lr 0.01"  # for parity


class Bug(collections.namedtuple("Bug", "name title text run against says short diff")):
    @property
    def hunks(self):
        """The lines of each hunk of the patch."""
        return [hunk.splitlines() for hunk in re.split(r"(?m)^@@ .*\n", self.diff)[1:]]

    @property
    def edits(self):
        """[(old text, new text), ...] of the script."""
        return [["".join(f"{line[1:]}\n" for line in hunk if line[0] in signs)
                 for signs in (" -", " +")] for hunk in self.hunks]

    @property
    def runs(self):
        """{name of the recording: (ranks, command, edits)}: one process; ranks without the bug;
        ranks with it."""
        sound = [(1, self.against, []), (RANKS, self.run, [])]
        named = {re.sub(r"[^\w.]+", "-", f"{run[0]} {run[1]}"): run for run in sound}
        return named | {self.name: (RANKS, self.run, self.edits)}


def read(names=None):
    """Bugs of these names, or all, in the order of the page."""
    bugs = []
    for path in sorted(FOLDER.glob("*.diff")):
        head, start, diff = path.read_text().partition("--- a/")
        title, text, fields = head.strip("\n").split("\n\n")
        fields = [line.partition(": ")[2] for line in fields.split("\n")]
        bugs.append(Bug(path.stem, title, text, *fields, start + diff))
    return [bug for bug in bugs if names is None or bug.name in names]


# The page


def page(bugs):
    """The text of docs/bugs.md: its head, an index, and a puzzle for each bug."""
    index = ["| what went wrong | found in | lines | loss | what parity says |",
             "|---|---|---|---|---|"]
    puzzles, curves = [], {run["name"]: run for run in draw.read("bugs")}
    for number, bug in enumerate(bugs, 1):
        link = re.search(r"\[[^]]+\]\(https://github\.com/[^)]+\)", bug.text)[0].replace("\n", " ")
        lines = max(sum(line[0] == sign for hunk in bug.hunks for line in hunk) for sign in "-+")
        loss = round(draw.change_of_loss(curves[bug.name]), 3) + 0.0  # no -0.0
        index.append(f"| [{number}. {bug.title}](#bug-{number}) | {link} | {lines} | {loss:+.1%} | "
                     f"{bug.short} |")
        puzzle = "\n...\n".join(textwrap.dedent(new).strip("\n") for _, new in bug.edits)
        changed = "\n\n".join("\n".join(line for line in hunk if line[0] != " ")
                              for hunk in bug.hunks)
        puzzles.append(f"""
## Bug {number}

`{bug.run}`

![Loss](pictures/bugs/{number:02}.svg)

```python
{puzzle}
```

<details><summary>Which line?</summary>

{bug.text}

```diff
{changed}
```

> {bug.says}

</details>
""")
    head = PAGE.read_text().partition("\n## ")[0]
    return "".join([head, "\n## Index\n\n", *(f"{line}\n" for line in index), *puzzles])
