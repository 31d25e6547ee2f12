"""Promise 8: it lifts. A script copied with common/ runs anywhere, with or without ``Run``; the
functions below ``main`` can be taken alone. Promise 2: the scripts share one skeleton."""

import ast
import difflib
import re
import shutil

import torch

from tests.support.processes import ROOT
from tests.support.sample import rows

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


def without_run(source):
    """``source`` without the import of Run, and without the statements of ``main`` that name Run or
    ``run``. In the header of the loop ``run.steps(x)`` becomes ``x``. That is all."""
    source = re.sub(r"\brun\.steps\((.*)\):", r"\1:", source)
    first = r"( *)(?![ #]).*\b(?:run\.|run = |Run\.|import Run).*\n"
    return re.sub(rf"(?m)^{first}(?:\1(?: .*|\))\n)*", "", source)  # and what is indented more


def train(server, name, corpus, folder, bare):
    """What each rank's optimizer has updated, in a folder with common/ and the scripts."""
    left_out = shutil.ignore_patterns("__pycache__", *["run.py"] * bare)
    shutil.copytree(ROOT / "common", folder / "common", ignore=left_out)
    (folder / "common/__init__.py").write_text(SAVE_WEIGHTS)
    for script, source in SOURCES.items():
        (folder / f"{script}.py").write_text(without_run(source) if bare else source)
    world = 0 if name == "single" else 2
    more = "" if bare else f"--log-every 1 --save-every 2 --val-every 3 --val-data {corpus}"
    options = f"{OPTIONS} {MORE.get(name, '')} --data {corpus} {more}"
    server.run(f"{folder}/{name}.py", world, options, folder=folder, pass_out=not bare)
    return [torch.load(folder / f"weights-{rank}.pt") for rank in range(max(world, 1))]


@rows("name", """
* fsdp
single
ddp
zero
tp
cp
pp
hybrid_3d
ep
""")
def test_a_copy_without_run_trains_to_the_same_weights(server, corpus, tmp_path, name):
    bare, whole = (train(server, name, corpus, tmp_path / kind, kind == "bare")
                   for kind in ("bare", "whole"))
    assert len(bare) == len(whole) and len(bare[0]) > 1
    for rank, other in zip(bare, whole):
        assert all(map(torch.equal, rank, other))


def test_the_functions_below_main_need_nothing_of_common():
    """But the error that they raise; ep.py also how rows are permuted, tp.py what is tied, fsdp.py
    a refusal. hybrid_3d.py composes what others have. The model and the data know no ranks."""
    for name in set(SCRIPTS) - {"hybrid_3d"}:
        allowed = {"SettingError", "refuse", "Permute", "inverse", "read_counts",
                   "names_of_parameters", "tie", "refuse_hooks"}
        body = ast.parse(SOURCES[name]).body
        ours = {alias.name for node in body if isinstance(node, ast.ImportFrom)
                and node.module.startswith("common.") for alias in node.names}
        for node in body:
            if getattr(node, "name", "main") not in ("main", "check"):
                assert names_in(node) & ours <= allowed, (name, node.name)
    for name in ("model.py", "data.py"):
        assert "torch.distributed" not in (ROOT / "common" / name).read_text()


# The shape of a script

MARK = r"# (?:DDP|ZeRO|FSDP|DP|TP|CP|PP|EP)(?:, [A-Z]+)*: "


def loop_of(name):
    """The lines of the loop down to ``run``, without comments that mark nothing."""
    _, _, loop = without_run(SOURCES[name]).partition("\n    for step, batch in ")
    loop, _, _ = loop.partition("\n\n\n")
    return [re.sub(f"  (?!{MARK})#.*", "", line).strip() for line in loop.splitlines()]


def test_the_loop_says_which_lines_are_the_strategy():
    """Each run of lines that single.py's loop does not have has a mark, such as ``# TP:``."""
    for name in SCRIPTS[1:]:
        own = loop_of(name)
        matcher = difflib.SequenceMatcher(None, loop_of("single"), own, autojunk=False)
        assert len(own) > 10
        for kind, _, _, first, last in matcher.get_opcodes():
            lines = "\n".join(own[first:last])
            assert kind in ("equal", "delete") or re.search(MARK, lines), (name, lines)


def test_what_is_no_strategy_is_the_same_in_all_scripts():
    """The lines of ``main`` that use options, data and optimizer: what is tested of one script
    holds for all."""
    def body(name, function):
        return SOURCES[name].partition(f"\ndef {function}(")[2].partition("\n\n\n")[0]

    # hybrid_3d.py has a function for what wraps and splits its model.
    mains = {name: body(name, "main").replace(" compose(", body(name, "compose")).splitlines()
             for name in SOURCES}
    names = r"add_text|Run\.add|wrap_layers|open_dataset|run\.steps|optimizer\.|set_learn|run\.hist"

    def common_part(line):
        return line.strip().replace("part.", "model.")  # of pp.py

    shared = [common_part(line) for line in mains["single"] if re.search(names, line)]
    assert len(shared) > 8
    for name, lines in mains.items():
        rest = iter([common_part(line) for line in lines])
        assert all(line in rest for line in shared), name
