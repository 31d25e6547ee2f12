"""README.md and docs/ name what exists: commands, options, files, messages, variables, headings.
The README's diff is a real one."""

import ast
import contextlib
import functools
import importlib
import io
import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest

from tests.processes import PATIENCE, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = ["single", "ddp", "zero", "fsdp", "tp", "cp", "pp", "hybrid_3d", "ep", "diloco"]
FOLDERS = ["", "common", "common/services", "tools", "examples", "tests", "docs"]
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
CODE = [path for path in SOURCES if path.parent.name not in ("tests", "docs")]
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
    steps. The third one finds the run of the first one finished, says so, and has status 0."""
    start = (ROOT / "README.md").read_text().partition("\n## Start\n")[2].partition("\n## ")[0]
    small = f"--steps 2 --hidden-size 32 --seq-len 32 --num-hidden-layers 2 --out {tmp_path}/run"
    commands = [line.partition("  #")[0] for line in re.findall(r"(?m)^    (\S.*)", start)]
    assert [command.split()[0] for command in commands] == ["bash", "diff", "torchrun"]
    torchrun = f"{sys.executable} -m torch.distributed.run"
    for command, status, words in zip(commands, (0, 1, 0), (
        "2 processes on cpu", "device = start_process_group(args)", "holds a run that has finished",
    )):
        if command.startswith(("bash", "torchrun")):
            command = command.replace("torchrun", torchrun) + f" {small}"
        result = subprocess.run(
            command.split(), cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE,
            env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        )
        assert result.returncode == status, result.stderr[-2000:]
        assert words in result.stdout


def test_the_diff_of_the_readme():
    """Every line is one of the diff of the two scripts, where it may be indented deeper."""
    (block,) = re.findall(r"(?s)```diff\n(.*?)```", (ROOT / "README.md").read_text())
    words = "git diff --no-index -U0 single.py fsdp.py".split()
    real = subprocess.run(words, cwd=ROOT, text=True, stdout=subprocess.PIPE).stdout.splitlines()
    known = {*real, *(line[0] + line[5:] for line in real if line[1:5] == "    ")}
    lines = [line for line in block.splitlines() if line.startswith(("+", "-"))]
    assert len(lines) > 20 and not set(lines) - known - {"-)"}  # git pairs it with that of shard()


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
        "COPROC COPROC_PID "
        "CUDA_ FI_ GLOO_ NCCL_ OMP_ PYTORCH_ TORCH_ UCX_".split()
    )
    page = (ROOT / "docs" / "launching.md").read_text()
    table = page.partition("## Variables")[2].partition("\n## ")[0]
    cells = re.findall(r"(?m)^\| (`.*?) \|", table)
    found = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(found) == len(set(found)) and set(found) == names


# Links


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
