"""README.md and docs/ name what exists: commands, options, files, messages, variables, headings.
Diffs, blocks of code and numbers of lines are those of the sources."""

import ast
import contextlib
import functools
import importlib
import io
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest

from common import torch_versions
from common.model import PRESETS
from common.services.report import PEAK_TFLOPS
from tests.support.processes import PATIENCE, ROOT
from tests.test_lift import needed

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = ["single", "ddp", "zero", "fsdp", "tp", "cp", "pp", "hybrid_3d", "ep", "diloco"]
FOLDERS = ["", "common", "common/services", "tools", "examples", "docs",
           "tests", "tests/support", "tests/gpu"]
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
CODE = [path for path in SOURCES if path.parent.name not in ("tests", "support", "gpu", "docs")]
PROGRAMS = "accelerate bash diff python python3 sbatch srun torchrun".split()
# Options of torchrun, Slurm, Docker, iptables, an example, the trainer of the tests, and run.sh
FOREIGN = set("""--all --torch --cap-add --ipc --pid --shm-size --ulimit --ctstate --dport
    --exclusive --gpus-per-node --gpus-per-task --kill-on-bad-exit --nodes --ntasks-per-node
    --signal --separator --tied
    --max-restarts --nnodes --nproc_per_node --rdzv-backend --rdzv-endpoint --shutdown-timeout
    --signals-to-handle --standalone --multi_gpu --num_processes --prefix""".split())


# Commands and options


@functools.cache
def options(name):
    """What the help of a script or a tool names."""
    module = importlib.import_module(name if name in SCRIPTS else f"tools.{name}")
    text = io.StringIO()
    with (contextlib.redirect_stdout(text), pytest.raises(SystemExit) as end,
          mock.patch.object(sys, "argv", [name, "--help"])):
        module.main()
    assert not end.value.code and module.__doc__.splitlines()[0] in text.getvalue()
    return set(re.findall(r"--[a-z][\w-]*", text.getvalue()))


def commands(text):
    """The commands among the lines of indented blocks and among what stands between backticks."""
    blocks = re.sub(r"(?s)```(diff|text|python).*?```", "", text)
    lines = re.findall(r"(?m)^    (\S.*)", blocks) + re.findall(r"`([^`\n]+)`", blocks)
    for line in lines:
        words = re.sub(r"^([A-Z_]+=(\"[^\"]*\"|\S+) )+", "", line).split()
        if words and (words[0] in PROGRAMS or re.fullmatch(r"(\w+)\.py", words[0])):
            yield shlex.split(line, comments=True)


@pytest.mark.parametrize(
    "path", [*PAGES, *(ROOT / f"{name}.py" for name in SCRIPTS)], ids=lambda path: path.name
)
def test_commands_and_options_exist(path):
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text))
    tools = ["bench", "plan", "dry_run", "prepare", "export", "import_hf", "parity"]
    known = FOREIGN.union(*map(options, [*SCRIPTS, *tools]))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) <= known
    for words in commands(text):
        owner = None
        for before, word in zip(["", *words], words):
            name = word.removeprefix("tools.").removesuffix(".py")
            if word == f"{name}.py" and name in SCRIPTS:
                owner = name
            elif before in ("run.sh", "-m") and (ROOT / "tools" / f"{name}.py").exists():
                owner = name
            elif before == "run.sh":
                assert word == "test" or (ROOT / word).exists(), words
            elif owner and word.startswith("--"):
                assert word in options(owner), words


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_exist(page):
    names = re.findall(r"`([\w./-]+\.(?:py|sh|md|svg|txt))\b", page.read_text())
    assert not [name for name in names
                if not any((ROOT / folder / name).exists() for folder in FOLDERS)]


def test_the_first_commands_run(tmp_path):
    """All of the section Start of the README, typed in their order, with a smaller model and fewer
    steps. The third one starts a new run beside the one of the first, which is finished."""
    start = (ROOT / "README.md").read_text().partition("\n## Start\n")[2].partition("\n## ")[0]
    small = f"--steps 2 --hidden-size 32 --seq-len 32 --num-hidden-layers 2 --out {tmp_path}/run"
    commands = [line.partition("  #")[0] for line in re.findall(r"(?m)^    (\S.*)", start)]
    assert [command.split()[0] for command in commands] == ["bash", "diff", "torchrun"]
    torchrun = f"{sys.executable} -m torch.distributed.run"
    for command, status, words in zip(commands, (0, 1, 0), (
        "2 processes on cpu", "device = start_process_group(args)", "2 processes on cpu",
    )):
        if command.startswith(("bash", "torchrun")):
            command = command.replace("torchrun", torchrun) + f" {small}"
        result = subprocess.run(
            command.split(), cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE,
            env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        )
        assert result.returncode == status, result.stderr[-2000:]
        assert words in result.stdout


def main_of(script):
    source = (ROOT / script).read_text()
    (main,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "main")
    return ast.get_source_segment(source, main) + "\n"


def difference(script, folder, after=""):
    """The lines of ``git diff single.py SCRIPT`` in ``main``, below the first line with ``after``.
    Git may pair a closing parenthesis with another one, so these are left out."""
    for name in ("single.py", script):
        (folder / name).write_text(main_of(name).partition(after)[2] if after else main_of(name))
    words = f"git diff --no-index -U0 single.py {script}".split()
    real = subprocess.run(words, cwd=folder, text=True, stdout=subprocess.PIPE).stdout
    lines = [line for line in real.splitlines()[4:] if line.startswith(("+", "-"))]
    return [line for line in lines if line[1:].strip() != ")"]


def test_the_diff_of_the_readme(tmp_path):
    """It is complete from ``# Model`` on, below the comment about your own model: first what
    single.py has, then what fsdp.py has, in each place. Its lines are indented by 4 blanks less."""
    (block,) = re.findall(r"(?s)```diff\n(.*?)```", (ROOT / "README.md").read_text())
    lines = [f"{line[0]}    {line[1:]}" for line in block.splitlines() if line[1:] != ")"]
    real = difference("fsdp.py", tmp_path, "\n    with torch.device(")
    for sign in "+-":
        assert [line for line in lines if line.startswith(sign)] == [
            line for line in real if line.startswith(sign)
        ]


def test_the_numbers_of_the_readme():
    """Lines of the scripts and of what they need, to 5 %; how far apart the curves are."""
    readme = (ROOT / "README.md").read_text()
    names, own, needs = (
        re.findall(what, re.search(rf"(?m)^\|{first} \|(.*)", readme)[1])
        for first, what in (("", r"\((\w+)\.py\)"), (" lines of the file", r"[\d,]+"),
                            (" lines that it imports from here", r"[\d,]+"))
    )
    assert sorted(names) == sorted(SCRIPTS)

    def close(said, paths):
        lines = sum(len((ROOT / path).read_text().splitlines()) for path in paths)
        return abs(int(said.replace(",", "")) - lines) <= 0.05 * lines

    for name, said, needed_lines in zip(names, own, needs, strict=True):
        script = f"{name}.py"
        essentials = {path for path in needed(script) if "/services/" not in path} - {script}
        assert close(said, [script]) and close(needed_lines, essentials), name
    model, services = re.search(r"\n- (\S+) of the imported .*? (\S+) more lines", readme).groups()
    assert close(model, ["common/model.py", "common/experts.py"])
    assert close(services, [path for path in needed("fsdp.py") if "/services/" in path])
    comparison = (ROOT / "docs" / "comparison.md").read_text()
    total, fsdp = re.search(r"\[some (\S+)\]\S+ without tools; \[for FSDP some (\S+)\]",
                            comparison).groups()
    assert close(total, [*ROOT.glob("*.py"), *ROOT.glob("common/**/*.py")])
    assert close(fsdp, {path for path in needed("fsdp.py") if "/services/" not in path})
    (said,) = re.findall(r"less than \*\*(\S+)\*\* apart", readme)
    losses = json.loads((ROOT / "docs" / "data" / "curves.json").read_text())["loss"]
    assert all(abs(loss - reference) < float(said) for curve in losses.values()
               for loss, reference in zip(curve, losses["single.py"], strict=True))


LESSON = (ROOT / "docs" / "lesson.md").read_text()


@pytest.mark.parametrize("script", [f"{name}.py" for name in SCRIPTS if name != "single"])
def test_the_diffs_of_the_lesson(script, tmp_path):
    """The lines of each block stand in the diff of the two functions ``main``, in this order. A
    block may be indented less than the script, by the same number of blanks in all of its lines."""
    section = LESSON.partition(f"\n## {script}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"(?s)```diff\n(.*?)```", section)
    assert len(blocks) >= 2 and section.count("<details>") == 2
    real = difference(script, tmp_path)
    for block in blocks:
        lines = block.splitlines()
        assert 1 <= len(lines) <= 12 and {line[0] for line in lines} <= {"+", "-"}, block
        assert any(
            in_order([f"{line[0]}{blanks}{line[1:]}" for line in lines if line[1:].strip() != ")"],
                     real)
            for blanks in ("", " " * 4, " " * 8)
        ), block


def in_order(lines, text):
    rest = iter(text)
    return all(line in rest for line in lines)


def test_the_loop_of_the_lesson():
    (block,) = re.findall(r"(?s)```python\n(.*?)```", LESSON)
    whole = [line[8:] for line in main_of("single.py").splitlines()]
    assert in_order(block.splitlines(), whole)


# Lifting

LIFTING = (ROOT / "docs" / "lifting.md").read_text()


def test_the_blocks_about_lifting():
    """They are lines of the trainers in tests/support/lifted.py, which a test runs."""
    blocks = re.findall(r"(?s)```python\n(.*?)```", LIFTING)
    source = (ROOT / "tests" / "support" / "lifted.py").read_text()
    assert len(blocks) > 5 and not [block for block in blocks if block not in source]


def test_the_functions_to_take_are_complete():
    """A function that the table names uses no other name of its script, or of common/, than those
    that the table names too, and those of torch_versions."""
    rows = re.findall(r"(?m)^\| [^|]+ \| (.*?\[(\w+)\.py\].*?) \| .* \|$", LIFTING)
    assert len(rows) == 8
    for cell, script in rows:
        tree = ast.parse((ROOT / f"{script}.py").read_text())
        defined = {name.name: name for name in tree.body
                   if isinstance(name, (ast.FunctionDef, ast.ClassDef))}
        taken = set(re.findall(r"`(\w+)`", cell)) - {"main"}
        if "all below `main`" in cell:
            taken |= defined.keys() - {"main", "check"}
        known = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom)
                 and node.module.split(".")[0] in ("common", *SCRIPTS) for alias in node.names}
        known |= {target.id for node in tree.body if isinstance(node, ast.Assign)
                  for target in node.targets} | defined.keys()
        used = {child.id for name in taken & defined.keys() for child in ast.walk(defined[name])
                if isinstance(child, ast.Name)}
        allowed = taken | {"SettingError"} | vars(torch_versions).keys()
        assert len(used) > 3 and used & known <= allowed, script


# What others have


def test_every_cell_of_the_comparison_has_a_source():
    """A link: to a file of this repository, or to a commit of another, so that it stays true."""
    page = (ROOT / "docs" / "comparison.md").read_text()
    links = dict(re.findall(r"(?m)^\[([\w-]+)\]: (\S+)$", page))
    _, _, *rows = re.findall(r"(?m)^\| .*", page.replace("|---|", "| --- |"))
    assert len(rows) > 10
    for row in rows:
        _, first, *others = row.strip("| ").split(" | ")
        assert re.search(r"\]\([a-z.#]", first), first
        assert len(others) == 5 and all(re.search(r"\[[\w-]+\]", cell) for cell in others), row
    used = set(re.findall(r"\]\[([\w-]+)\]", page))
    assert used == links.keys()
    assert all(re.search("/[0-9a-f]{40}", links[name]) for name in used if "-" in name)


def test_what_40_percent_of_8_gpus_are():
    page = (ROOT / "docs" / "first-gpus.md").read_text()
    found = re.findall(r"some ([\d,]+) tokens/s\sfor\s`(\S+)` at\s([\d,]+) tokens", page)
    assert len(found) == 2
    for said, model, length in found:
        operations = PRESETS[model].flops_per_token(int(length.replace(",", "")))
        rate = 0.4 * 8 * PEAK_TFLOPS["H100"] * 1e12 / operations
        assert int(said.replace(",", "")) == pytest.approx(rate, rel=0.01)


# Messages


def templates(node):
    """The strings that an expression may give, with a zero byte for each value in it."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.IfExp):
        return templates(node.body) + templates(node.orelse)
    if isinstance(node, ast.JoinedStr):
        return ["".join(parts) for parts in itertools.product(*map(templates, node.values))]
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.IfExp):
        return templates(node.value)
    return ["\0"]


def test_every_message_that_is_quoted_exists():
    """In the sources, or in a test that expects it of torch."""
    page = (ROOT / "docs" / "when-it-fails.md").read_text()
    ours = page.partition("## Messages of these scripts")[2].partition("\n## ")[0]
    quoted = [message for cell in re.findall(r"(?m)^\| (`.*?) \|", ours)
              for message in re.findall("`([^`]+)`", cell)]
    said = (ROOT / "run.sh").read_text().splitlines()
    for path in set(SOURCES) - {pathlib.Path(__file__)}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.JoinedStr, ast.Constant)):
                said += templates(node)
    patterns = {message: ".*".join(re.escape(part.strip()) for part in message.split("..."))
                for message in quoted}
    assert len(quoted) > 30
    assert not [message for message, pattern in patterns.items()
                if not any(re.search(pattern, text, re.DOTALL) for text in said)]


# Variables


def test_the_table_of_variables_is_complete():
    """It has the strings in the code that look like a variable, and run.sh's names in capitals."""
    names = {f"{axis}_SIZE" for axis in ("DP", "TP", "CP", "PP")}  # the code builds these
    for path in CODE:
        strings = [node.value for node in ast.walk(ast.parse(path.read_text()))
                   if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        names |= {text for text in strings
                  if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK", text)}
    shell = re.sub(r"(?m)^ *#.*|PYTHON'(.|\n)*?^PYTHON$", "", (ROOT / "run.sh").read_text())
    names |= set(re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", shell))
    names -= set(  # no variables, or their beginnings
        "RUN_OR_CHECKPOINT MIN MAX REMOTE ERROR EXIT HUP INT PIPE TERM USR1 BASH_SOURCE PWD "
        "CAUSAL_LM COPROC COPROC_PID "
        "CUDA_ FI_ GLOO_ NCCL_ OMP_ PYTORCH_ TORCH_ UCX_".split()
    )
    page = (ROOT / "docs" / "launching.md").read_text()
    table = page.partition("## Variables")[2].partition("\n## ")[0]
    cells = re.findall(r"(?m)^\| (`.*?) \|", table)
    found = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(found) == len(set(found)) and set(found) == names


# Links


def test_readme_links_every_page():
    readme = (ROOT / "README.md").read_text()
    assert not [page for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name}" not in readme]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(page):
    """To a file of this repository, and to a heading of it."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), link
            headings = re.findall(r"(?m)^#+ (.*)", path.read_text()) if anchor else [""]
            titles = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
            assert anchor in [title.replace(" ", "-") for title in titles], link
