"""Promise 7: it lifts. A script copied with common/ runs anywhere, with or without its services;
the functions below ``main`` can be taken alone."""

import ast
import difflib
import functools
import re
import shutil

import pytest
import torch

from tests.support import lifted
from tests.support.on_ranks import on_ranks
from tests.support.processes import ROOT
from tests.support.sample import sampled

SCRIPTS = ["single", "ddp", "zero", "fsdp", "tp", "cp", "pp", "hybrid_3d", "ep"]
SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
MODEL = "--hidden-size 16 --intermediate-size 24 --num-attention-heads 4 --num-key-value-heads 2"
OPTIONS = f"{MODEL} --num-hidden-layers 3 --seq-len 16 --batch-size 8 --grad-accum 2 --steps 4"
MORE = {"hybrid_3d": "--tp 2", "pp": "--microbatches 2", "ep": "--num-experts 4"}
# Becomes common/__init__.py of a copy: after each step a rank saves what its optimizer has updated
SAVE_WEIGHTS = """
import os, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
def save(optimizer, *_):
    own = [getattr(p, "_local_tensor", p) for g in optimizer.param_groups for p in g["params"]]
    torch.save([p.detach() for p in own], f"weights-{os.environ.get('RANK', 0)}.pt")
register_optimizer_step_post_hook(save)
"""


def names_in(node):
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


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
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    for node in imported + main.body + loop.body:
        named = names_in(node) | {alias.name for alias in getattr(node, "names", ())}
        if node is not loop and named & services:
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = ""
    source = "".join(lines)
    return re.sub(r"report\.steps\((.*)\):", r"\1:", source) if "report" in services else source


def test_what_trains_needs_no_service():
    """Of any script, without the lines that use one. The model and the data know no ranks."""
    files = {path: path.read_text() for path in (ROOT / "common").glob("*.py")}
    files |= {name: without(ALL, source) for name, source in SOURCES.items()}
    imports = r"(?m)^(from|import) .*\b"
    assert not [path for path, text in files.items() if re.search(f"{imports}services", text)]
    for name in ("model.py", "data.py"):
        assert "torch.distributed" not in files[ROOT / "common" / name]


def train(server, name, folder, options, services=frozenset(), **kwargs):
    """For each rank what the optimizer has updated, in a folder with common/ and the scripts, which
    are without some of their services."""
    left_out = shutil.ignore_patterns("__pycache__", *["services"] * (services == ALL))
    shutil.copytree(ROOT / "common", folder / "common", ignore=left_out)
    (folder / "common" / "__init__.py").write_text(SAVE_WEIGHTS)
    for script, source in SOURCES.items():
        (folder / f"{script}.py").write_text(without(services, source))
    world = 0 if name == "single" else 2
    server.run(f"{folder}/{name}.py", world, f"{OPTIONS} {MORE.get(name, '')} {options}",
               folder=folder, **kwargs)
    return [torch.load(folder / f"weights-{rank}.pt") for rank in range(max(world, 1))]


IN_USE = "--log-every 1 --save-every 2"  # of services


@pytest.fixture(scope="module")
def whole(server, corpus, tmp_path_factory):
    """What a copy of a script with all services has trained."""
    return functools.cache(lambda name: train(
        server, name, tmp_path_factory.mktemp(name), f"--data {corpus} {IN_USE}"))


ROWS = [  # a script, the services that it is without, options of the others
    ("fsdp", CHECKPOINTS, "--log-every 1"), ("fsdp", REPORT, "--save-every 2"),
    ("fsdp", VALIDATION, IN_USE), *[(name, ALL, "") for name in SCRIPTS],
]


@pytest.mark.parametrize("name, services, options", sampled(
    ROWS, [row for row in ROWS if row[:2] in (("fsdp", CHECKPOINTS), ("fsdp", ALL))]))
def test_a_copy_without_services_trains_to_the_same_weights(
    server, corpus, tmp_path, whole, name, services, options
):
    """The other services work."""
    found = train(server, name, tmp_path, f"--data {corpus} {options}", services,
                  pass_out=services != ALL)
    expected = whole(name)
    assert len(found) == len(expected) and len(found[0]) > 1
    for rank, other in zip(found, expected):
        assert all(map(torch.equal, rank, other))


@on_ranks(2)
def test_the_functions_below_main_lift_into_another_trainer(mesh):
    lifted.compare(mesh)


# The shape of a script

MARK = r"# (?:DDP|ZeRO|FSDP|DP|TP|CP|PP|EP)(?:, [A-Z]+)*: "


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


def test_what_is_no_strategy_is_the_same_in_all_scripts():
    """The lines of ``main`` that use data, services and optimizer: what is tested of one script
    holds for all. How it evaluates differs, and when it does not."""
    def body(name, function):
        return SOURCES[name].partition(f"\ndef {function}(")[2].partition("\n\n\n")[0]

    # hybrid_3d.py has a function for what wraps and splits its model.
    mains = {name: body(name, "main").replace("= compose(", body(name, "compose")).splitlines()
             for name in SOURCES}
    names = (r"add_options|wrap_layers|open_dataset|checkpoints|every=|args\.workers|"
             r"validation\.due|log_validation|optimizer\.|set_learning_rate|break")

    def common_part(line):
        line = line.strip().replace("part.", "model.")  # of pp.py
        return line.partition("validation.loss")[0]

    shared = [common_part(line) for line in mains["single"] if re.search(names, line)]
    assert len(shared) > 19
    for name, lines in mains.items():
        rest = iter([common_part(line) for line in lines])
        assert all(line in rest for line in shared), name
