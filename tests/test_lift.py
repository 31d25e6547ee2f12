"""Promise 6: it lifts. A script copied with what it imports runs; its services come off; what is
below ``main`` are functions of plain values; what two scripts share is the same in both."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from tests.processes import PATIENCE, ROOT
from tests.sample import sampled, thorough
from tests.services import without_services

SCRIPTS = ["single", "ddp", "zero", "fsdp", "tp", "cp", "pp", "hybrid_3d"]
COMMON = sorted(path.stem for path in (ROOT / "common").glob("[!_]*.py"))
SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}


def common_imports(source):
    """The names of the modules of common/ that ``source`` imports."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {
        node.module.removeprefix("common.") for node in nodes if node.module.startswith("common.")
    }


def definitions(name):
    """The functions and classes of a script, in their order."""
    return [node for node in TREES[name].body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def names_in(node):
    """Every name that is read, written or taken as an argument within ``node``."""
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.arg):
            yield child.arg


# The copy


def copy(name, folder, services=True):
    """Copy a script and the files of common/ that it needs, and no others. Returns those."""
    source = SOURCES[name] if services else without_services(SOURCES[name])
    folder.mkdir()
    (folder / f"{name}.py").write_text(source)
    (folder / "common").mkdir()
    needed, todo = set(), common_imports(source)
    while todo:
        module = todo.pop()
        needed.add(module)
        shutil.copy(ROOT / "common" / f"{module}.py", folder / "common")
        todo |= common_imports((ROOT / "common" / f"{module}.py").read_text()) - needed
    shutil.copy(ROOT / "tests" / "final_weights.py", folder)
    return needed


MODEL = "--hidden-size 16 --intermediate-size 24 --num-attention-heads 4 --num-key-value-heads 2"
OPTIONS = f"{MODEL} --num-hidden-layers 3 --seq-len 16 --batch-size 8 --grad-accum 2 --steps 4"
MORE = {"hybrid_3d": "--tp 2", "zero": "--stage 2", "pp": "--microbatches 2"}


def weights(server, script, name, folder, corpus):
    folder.mkdir(exist_ok=True)
    world = 0 if name == "single" else 2
    options = f"{name}.py {OPTIONS} {MORE.get(name, '')} --data {corpus} --log-every 1"
    server.run(script, world, options, folder=folder)
    return [torch.load(folder / f"weights-{rank}.pt") for rank in range(max(world, 1))]


def assert_equal(found, expected):
    for rank, other in zip(found, expected, strict=True):
        assert len(rank) == len(other) > 1
        assert all(torch.equal(a, b) for a, b in zip(rank, other))


@pytest.mark.parametrize("name", sampled(SCRIPTS, ["single", "zero", "pp"]))
def test_the_copy_runs_alone_also_without_its_services(server, corpus, tmp_path, name):
    """To the same weights, from an empty folder."""
    expected = weights(server, "tests/final_weights.py", name, tmp_path / "whole", corpus)
    copied = copy(name, tmp_path / "copy")
    script = str(tmp_path / "copy" / "final_weights.py")
    assert_equal(weights(server, script, name, tmp_path / "copy", corpus), expected)
    assert (tmp_path / "copy" / "out" / "metrics.jsonl").exists()

    bare = copy(name, tmp_path / "bare", services=False)
    assert copied - bare == {
        "checkpoint", "checkpoint_files", "replicas", "signals", "metrics", "counting", "loggers",
        "validation",
    }
    script = str(tmp_path / "bare" / "final_weights.py")
    assert_equal(weights(server, script, name, tmp_path / "bare", corpus), expected)
    assert not (tmp_path / "bare" / "out").exists()


@thorough
def test_the_copy_runs_under_torchrun(tmp_path, corpus):
    """Real processes, that nothing has prepared."""
    copy("fsdp", tmp_path / "copy")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "fsdp.py", *OPTIONS.split(), "--data", corpus],
        cwd=tmp_path / "copy", env=environment, capture_output=True, text=True, timeout=PATIENCE,
    )
    assert result.returncode == 0 and "final loss" in result.stdout, result.stderr


# The shape of a script


@pytest.mark.parametrize("name", SCRIPTS)
def test_below_main_stands_the_strategy_then_check_then_theory(name):
    first, *below, last = definitions(name)
    assert first.name == "main" and last.name == "theory"
    assert "check" not in [node.name for node in below[:-1]]
    from_common = {
        alias.asname or alias.name
        for node in TREES[name].body if isinstance(node, ast.ImportFrom)
        if node.module.startswith("common.") and node.module != "common.errors"
        for alias in node.names
    }
    for node in [*below, last]:
        if node.name not in ("check", "fill_grid"):  # these are about the command line
            assert "args" not in names_in(node), node.name
        assert not from_common & set(names_in(node)), node.name
    assert not {"torch", "dist"} & set(names_in(last))  # numbers alone


@pytest.mark.parametrize("name", SCRIPTS)
def test_main_ends_with_the_theory(name):
    main = definitions(name)[0]
    assert ast.unparse(main.body[-1]).startswith("return metrics.close(**theory(")


def loop_of(name):
    loops = [node for node in definitions(name)[0].body if isinstance(node, ast.For)]
    return next(node for node in loops if ast.unparse(node.target) == "step")


def unmarked(name):
    """Statements of the loop that single.py's loop does not have and that no comment such as
    ``# TP:`` marks: on their own line, above the run of such statements, or on a statement around
    them."""
    lines = SOURCES[name].splitlines()
    known = {ast.dump(node) for node in ast.walk(loop_of("single")) if isinstance(node, ast.stmt)}
    marks = re.compile(r"# (DDP|ZeRO|FSDP|TP|CP|PP)(, [A-Z]+)*: ")
    found = []

    def visit(statements):
        run = False  # of marked statements
        for node in statements:
            body = getattr(node, "body", [])
            end = body[0].lineno - 1 if body else node.end_lineno
            if ast.dump(node) in known:
                run = False
                continue
            own = [line for line in lines[node.lineno - 1 : end] if "#" in line]
            above = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                above.append(line)
            run = run or bool(marks.search(" ".join(above)))
            if run or marks.search(" ".join(own)):
                run = run and not body  # a block ends the run
                continue
            if body and not names_of_header(node) - HEADERS:
                visit(body)
            else:
                found.append(f"{name}.py:{node.lineno}: {lines[node.lineno - 1].strip()}")

    visit(loop_of(name).body)
    return found


HEADERS = {
    "micro_batch", "inputs", "targets", "batch", "enumerate", "metrics", "checkpoints", "step",
    "autocast", "validation",
}


def names_of_header(node):
    inside = {id(child) for child in node.body}
    return {
        child.id for part in ast.iter_child_nodes(node) if id(part) not in inside
        for child in ast.walk(part) if isinstance(child, ast.Name)
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_loop_says_which_lines_are_the_strategy(name):
    assert unmarked(name) == []


def test_what_scripts_share_is_the_same():
    """Functions of one name have one text; and some are shared: the rule holds something."""
    texts = {}
    for name in SCRIPTS:
        for node in definitions(name):
            if node.name not in ("main", "check", "theory"):
                text = ast.get_source_segment(SOURCES[name], node)
                texts.setdefault(node.name, {})[name] = text
    shared = {name: set(by.values()) for name, by in texts.items() if len(by) > 1}
    assert len(shared.pop("count_targets")) == 2  # over ranks that read different samples, or not
    assert {name for name, versions in shared.items() if len(versions) > 1} == set()
    assert {"arrange_buckets", "plan", "Replicated", "parallelize", "shard_positions", "keep_stage",
            "allgather_attention", "split_layers", "clip_grad_norm"} <= shared.keys()


# common/


ALLOWED = {
    "metrics": {"counting"}, "validation": {"data"}, "arguments": {"model", "data", "huggingface"},
    "checkpoint": {"checkpoint_files", "replicas", "signals"}, "huggingface": {"model"},
}


@pytest.mark.parametrize("module", COMMON)
def test_each_module_can_be_taken_alone(module):
    source = (ROOT / "common" / f"{module}.py").read_text()
    allowed = {"errors", "environment"} | ALLOWED.get(module, set())
    assert common_imports(source) <= allowed
    if module in ("model", "data"):
        assert "torch.distributed" not in source
    if module != "arguments":  # it takes values
        assert "argparse" not in source and not re.search(r"\bargs\.", source)


def test_no_line_is_longer_than_100_columns():
    """So that diffs stand side by side."""
    paths = [path for path in ROOT.rglob("*.py") if "/.venv" not in str(path)]
    assert len(paths) > 40
    long = [f"{path.relative_to(ROOT)}:{number}" for path in paths
            for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100]
    assert long == []
