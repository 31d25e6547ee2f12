"""Promise 7: it lifts. A script copied with what it imports runs anywhere; its services come off;
what stands below ``main`` are functions of plain values; most of common/ can be taken alone."""

import ast
import difflib
import re

import pytest
import torch

from tests.processes import ROOT
from tests.sample import sampled

SCRIPTS = ["single", "ddp", "zero", "fsdp", "tp", "cp", "pp", "hybrid_3d", "ep"]
SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
MODEL = "--hidden-size 16 --intermediate-size 24 --num-attention-heads 4 --num-key-value-heads 2"
OPTIONS = f"{MODEL} --num-hidden-layers 3 --seq-len 16 --batch-size 8 --grad-accum 2 --steps 4"
MORE = {"hybrid_3d": "--tp 2", "pp": "--microbatches 2", "ep": "--num-experts 4"}
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
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                path = name.replace(".", "/") + ".py"
                if (ROOT / path).is_file():
                    yield path


SERVICES = {"report", "validation", "checkpoints"}


def names_in(node):
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def without_services(source):
    """``source`` without the statements that name a service, and without the imports that nothing
    uses then. In the header of the loop ``report.steps(x)`` becomes ``x``."""
    tree = ast.parse(source)
    (main,) = (node for node in tree.body if getattr(node, "name", "") == "main")
    (loop,) = (node for node in main.body if isinstance(node, ast.For) and names_in(node.iter)
               & SERVICES)
    assert ast.unparse(loop.iter).startswith("report.steps(")
    (loop.iter,) = loop.iter.args
    for block in (loop, main):
        block.body = [node for node in block.body if not names_in(node) & SERVICES]
    used = names_in(tree)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            node.names = [alias for alias in node.names if (alias.asname or alias.name) in used]
    tree.body = [node for node in tree.body if getattr(node, "names", True)]
    return ast.unparse(tree)


def copy(name, folder, services=True):
    """Copy a script and the files that it needs, and no others. Returns their paths."""
    (folder / "common").mkdir(parents=True)
    copied, todo = set(), {f"{name}.py"}
    while todo:
        path = todo.pop()
        source = (ROOT / path).read_text()
        if not services and not path.startswith("common/"):
            source = without_services(source)
        (folder / path).write_text(source)
        copied.add(path)
        todo |= set(imports(source)) - copied
    return copied


def weights(server, name, folder, corpus):
    """What the optimizer of each rank has updated."""
    (folder / "common" / "__init__.py").write_text(SAVE_WEIGHTS)
    world = 0 if name == "single" else 2
    options = f"{OPTIONS} {MORE.get(name, '')} --data {corpus}"
    server.run(f"{folder}/{name}.py", world, options, folder=folder)
    return [torch.load(folder / f"weights-{rank}.pt") for rank in range(max(world, 1))]


@pytest.mark.parametrize("name", sampled(SCRIPTS, ["single", "zero", "pp"]))
def test_a_copy_trains_to_the_same_weights_without_its_services(server, corpus, tmp_path, name):
    whole, bare = copy(name, tmp_path / "whole"), copy(name, tmp_path / "bare", services=False)
    services = "checkpoint", "counting", "loggers", "report", "theory", "validation"
    assert whole - bare == {f"common/{module}.py" for module in services}
    expected = weights(server, name, tmp_path / "whole", corpus)
    found = weights(server, name, tmp_path / "bare", corpus)
    for rank, other in zip(found, expected, strict=True):
        assert len(rank) == len(other) > 1
        assert all(torch.equal(a, b) for a, b in zip(rank, other))
    assert (tmp_path / "whole" / "out" / "metrics.jsonl").exists()
    assert not (tmp_path / "bare" / "out").exists()


def test_the_functions_below_main_lift_into_another_trainer(run):
    assert run("tests/lifted.py", 2, pass_out=False).output.count("all is right") == 2


# The shape of a script


def definitions(name):
    """The functions and classes of a script, in their order."""
    return [node for node in ast.parse(SOURCES[name]).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


@pytest.mark.parametrize("name", SCRIPTS)
def test_below_main_stands_the_strategy_in_plain_values_then_check(name):
    main, *below = definitions(name)
    assert main.name == "main"
    sections = re.findall(r"^    # (Model|Optimizer|Data|Resume|Loop)\b", SOURCES[name], re.M)
    assert sections == ["Model", "Optimizer", "Data", "Resume", "Loop"]
    if below and below[-1].name == "check":
        below.pop()
    tree = ast.parse(SOURCES[name])
    common = {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
        if node.module.startswith("common")
        and node.module not in ("common.errors", "common.attention", "common.experts")
    }
    for node in below:
        arguments = {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}
        assert not names_in(node) & (common | {"args"}) and "args" not in arguments, node.name
    scripts = {path for path in imports(SOURCES[name]) if "/" not in path}
    composed = {"hybrid_3d": {"cp.py", "fsdp.py", "pp.py", "tp.py"}, "ep": {"fsdp.py"}}
    assert scripts == composed.get(name, set())


MARK = r"# (?:DDP|ZeRO|FSDP|DP|TP|CP|PP|EP)(?:, [A-Z]+)*: "


def loop_of(name):
    """The lines of the loop down to the services, without comments that mark nothing."""
    _, _, loop = SOURCES[name].partition("\n    for step, batch in ")
    loop, _, _ = loop.partition("\n        report.log(")
    return [re.sub(f"  (?!{MARK})#.*", "", line).strip() for line in loop.splitlines()]


@pytest.mark.parametrize("name", SCRIPTS[1:])
def test_the_loop_says_which_lines_are_the_strategy(name):
    """Each run of lines that single.py's loop does not have has a mark, such as ``# TP:``."""
    own = loop_of(name)
    matcher = difflib.SequenceMatcher(None, loop_of("single"), own, autojunk=False)
    assert len(own) > 10
    for kind, _, _, first, last in matcher.get_opcodes():
        run = "\n".join(own[first:last])
        assert kind in ("equal", "delete") or re.search(MARK, run), run


# common/


VALUES = ["attention", "checkpoint", "counting", "data", "errors", "experts", "materialise",
          "model", "validation", "weights"]  # these take no options
ALLOWED = {  # what they import, besides errors
    "checkpoint": {"launch"}, "materialise": {"experts"}, "model": {"experts"},
    "validation": {"data"}, "weights": {"materialise", "model"},
}


@pytest.mark.parametrize("module", VALUES)
def test_it_can_be_taken_alone(module):
    source = (ROOT / "common" / f"{module}.py").read_text()
    allowed = {f"common/{name}.py" for name in ALLOWED.get(module, set()) | {"errors"}}
    assert set(imports(source)) <= allowed
    for node in ast.parse(source).body:
        assert not re.search(r"\bargs\.", ast.unparse(node)) or node.name == "open_datasets"
    if module in ("model", "data"):
        assert "torch.distributed" not in source


def test_common_imports_no_script():
    for path in (ROOT / "common").glob("*.py"):
        assert all(found.startswith("common/") for found in imports(path.read_text())), path


def test_no_line_is_longer_than_100_columns():
    """So that diffs stand side by side."""
    paths = [path for path in ROOT.rglob("*.py") if "/.venv" not in str(path)]
    assert len(paths) > 40
    long = [f"{path.relative_to(ROOT)}:{number}" for path in paths
            for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100]
    assert long == []
