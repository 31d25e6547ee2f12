"""Promise 7: it lifts. A script copied with what it imports runs anywhere, with or without its
services; the functions below ``main`` can be taken alone."""

import ast
import difflib
import functools
import re

import pytest
import torch

from tests.support.processes import ROOT
from tests.support.sample import sampled

SCRIPTS = ["single", "ddp", "zero", "fsdp", "tp", "cp", "pp", "hybrid_3d", "ep", "diloco"]
SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
MODEL = "--hidden-size 16 --intermediate-size 24 --num-attention-heads 4 --num-key-value-heads 2"
OPTIONS = f"{MODEL} --num-hidden-layers 3 --seq-len 16 --batch-size 8 --grad-accum 2 --steps 4"
MORE = {"hybrid_3d": "--tp 2", "pp": "--microbatches 2", "ep": "--num-experts 4"}
# Becomes common/__init__.py of a copy: after each step a rank saves what its optimizer has updated
SAVE_WEIGHTS = """
import os, torch
update = torch.optim.AdamW.step
def update_and_save(self, *args):
    update(self, *args)
    own = [getattr(p, "_local_tensor", p) for g in self.param_groups for p in g["params"]]
    torch.save([p.detach() for p in own], f"weights-{os.environ.get('RANK', 0)}.pt")
torch.optim.AdamW.step = update_and_save
"""


def imports(source):
    """The files of this repo that ``source`` imports."""
    for node in ast.parse(source).body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            path = name.replace(".", "/") + ".py"
            if (ROOT / path).is_file():
                yield path


def needed(path):
    """The files that ``path`` imports, they themselves, and so on, with ``path``."""
    found, todo = set(), {path}
    while todo:
        path = todo.pop()
        found.add(path)
        todo |= set(imports((ROOT / path).read_text())) - found
    return found


def names_in(node):
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


# The two rooms

HEADING = "\n\n# Services, optional: delete an import and every line that uses it\n"


def test_the_two_rooms():
    """No essential imports a service, nor anything else outside of its room. A script's imports are
    two paragraphs: what it needs in order to train; then what is optional."""
    for path in (ROOT / "common").glob("*.py"):
        found = needed(f"common/{path.name}")
        assert {path.rpartition("/")[0] for path in found} == {"common"}, path
    for path in ("common/model.py", "common/data.py"):
        assert "torch.distributed" not in (ROOT / path).read_text()
    for source in SOURCES.values():
        essentials, services = source.split(HEADING)
        services, rest = services.split("\n\n", 1)
        assert all(line.startswith("from common.services") for line in services.splitlines())
        assert not [path for path in imports(essentials) if path.startswith("common/services/")]
        assert not list(imports(rest))


# What a service is called: the names that its paragraph imports, and its variable in ``main``.
CHECKPOINTS = {"Checkpoints", "checkpoints", "run_settings", "arrange_buckets"}
VALIDATION = {"Validation", "validation"}
REPORT = {"Report", "report", "theory"}
CALLS = {"compare_calls"}
ALL = CHECKPOINTS | VALIDATION | REPORT | CALLS


def without(services, source):
    """``source`` without the lines that name ``services``: imports of them, and statements in
    ``main``. In the header of the loop ``report.steps(x)`` becomes ``x``. That is all."""
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    (main,) = (node for node in tree.body if getattr(node, "name", "") == "main")
    loop = next(node for node in main.body if "report.steps(" in ast.unparse(node))
    dropped = [node for node in main.body + loop.body
               if node is not loop and names_in(node) & services]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} <= services:
            dropped.append(node)
    for node in dropped:
        for number in range(node.lineno - 1, node.end_lineno):
            lines[number] = ""
    source = "".join(lines)
    if "report" in services:
        source, found = re.subn(r"report\.steps\((.*)\):", r"\1:", source)
        assert found == 1
    return source


def copy(name, folder, services=frozenset()):
    """Copy a script without some of its services, and the files that it needs, and no others.
    Returns their paths."""
    (folder / "common" / "services").mkdir(parents=True)
    copied, todo = set(), {f"{name}.py"}
    while todo:
        path = todo.pop()
        source = (ROOT / path).read_text()
        if services and "/" not in path:
            source = without(services, source)
        (folder / path).write_text(source)
        copied.add(path)
        todo |= set(imports(source)) - copied
    (folder / "common" / "__init__.py").write_text(SAVE_WEIGHTS)
    return copied


def train(server, name, folder, options, **kwargs):
    """For each rank what the optimizer has updated."""
    world = 0 if name == "single" else 2
    server.run(f"{folder}/{name}.py", world, f"{OPTIONS} {MORE.get(name, '')} {options}",
               folder=folder, **kwargs)
    return [torch.load(folder / f"weights-{rank}.pt") for rank in range(max(world, 1))]


def equal(found, expected):
    assert all(len(rank) == len(other) > 1 for rank, other in zip(found, expected, strict=True))
    return all(torch.equal(a, b) for rank, other in zip(found, expected)
               for a, b in zip(rank, other))


IN_USE = {  # the services of a whole script
    "checkpoint": "--save-every 2 --keep 1", "report": "--log-every 1",
    "validation": "--val-data {corpus} --val-every 2 --val-batches 1",
}


@pytest.fixture(scope="module")
def whole(server, corpus, tmp_path_factory):
    """A copy of a script with what it imports, and no others; what it has trained."""
    @functools.cache
    def whole(name):
        folder = tmp_path_factory.mktemp("whole") / "copy"
        used = " ".join(IN_USE.values()).replace("{corpus}", corpus)
        copied = copy(name, folder)
        return copied, train(server, name, folder, f"--data {corpus} {used}")

    return whole


OF_CHECKPOINTS = {"checkpoint", "checkpoint_files", "settings", "signals"}  # files only it needs
ROWS = [("fsdp", CHECKPOINTS, OF_CHECKPOINTS), ("fsdp", VALIDATION, {"validation"}),
        ("fsdp", CALLS, {"same_calls"}),
        ("fsdp", REPORT, {"counting", "loggers", "metrics", "report", "theory"}),
        *[(name, ALL, None) for name in SCRIPTS]]


@pytest.mark.parametrize("name, services, files", sampled(
    ROWS, [row for row in ROWS if row[:2] in (("fsdp", CHECKPOINTS), ("fsdp", ALL))]))
def test_a_copy_without_services_trains_to_the_same_weights(
    server, corpus, tmp_path, whole, name, services, files
):
    """In a folder with the script, or those of which it is composed. The other services work."""
    copied, expected = whole(name)
    bare = copy(name, tmp_path / "copy", services)
    left = {path for path in copied - bare if path.startswith("common/services/")}
    assert bare < copied and left == copied - bare
    used = ""
    if files:
        assert left == {f"common/services/{name}.py" for name in files}
        used = " ".join(use for name, use in IN_USE.items() if name not in files)
    else:
        (tmp_path / "copy" / "common" / "services").rmdir()  # it is empty
    options = f"--data {corpus} {used}".replace("{corpus}", corpus)
    found = train(server, name, tmp_path / "copy", options, pass_out=bool(files))
    assert equal(found, expected)
    out = {path.name for path in (tmp_path / "copy" / "out").glob("*")}
    assert ("step-00000004" in out) == bool(files and "checkpoint" not in files)
    assert ("metrics.jsonl" in out) == bool(files and "report" not in files)


def test_the_functions_below_main_lift_into_another_trainer(run):
    assert run("tests/support/lifted.py", 2, pass_out=False).output.count("all is right") == 2


# The shape of a script

MARK = r"# (?:DDP|ZeRO|FSDP|DP|TP|CP|PP|EP|DiLoCo)(?:, [A-Z]+)*: "


def loop_of(name):
    """The lines of the loop down to the services, without comments that mark nothing."""
    _, _, loop = SOURCES[name].partition("\n    for step, batch in ")
    loop, _, _ = loop.partition("\n        report.log(")
    return [re.sub(f"  (?!{MARK})#.*", "", line).strip() for line in loop.splitlines()]


def test_the_loop_says_which_lines_are_the_strategy():
    """Each run of lines that single.py's loop does not have has a mark, such as ``# TP:``."""
    for name in SCRIPTS[1:]:
        own = loop_of(name)
        matcher = difflib.SequenceMatcher(None, loop_of("single"), own, autojunk=False)
        assert len(own) > 10
        for kind, _, _, first, last in matcher.get_opcodes():
            run = "\n".join(own[first:last])
            assert kind in ("equal", "delete") or re.search(MARK, run), (name, run)


def test_no_line_is_longer_than_100_columns():
    """So that diffs stand side by side."""
    paths = [path for path in ROOT.rglob("*.py") if "/.venv" not in str(path)]
    assert len(paths) > 40
    long = [f"{path.relative_to(ROOT)}:{number}" for path in paths
            for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100]
    assert long == []
