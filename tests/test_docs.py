"""What README.md and docs/ show exists: commands and options, files, links, messages, variables.
Diffs, blocks of code and tables of figures are those of the sources."""

import ast
import functools
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest

import pp
from common import torch_versions
from docs import draw
from tests.support.processes import PATIENCE, ROOT
from tests.support.sample import thorough
from tests.test_lift import SCRIPTS, needed

PAGES = {str(path.relative_to(ROOT)): path.read_text()
         for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
DOCSTRINGS = {f"{name}.py": ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text()))
              for name in SCRIPTS}
README = PAGES["README.md"]
TOOLS = ["bench", "plan", "dry_run", "prepare", "export", "import_hf", "parity"]
PRODUCT = ["", "common/", "common/services/", "tools/", "tools/support/", "examples/"]
FOLDERS = [*PRODUCT, "docs/", "tests/", "tests/support/", "tests/gpu/"]
# Options of torchrun, Slurm, Docker, iptables, an example, the trainer of the tests, and run.sh
FOREIGN = set("""--all --torch --cap-add --ipc --pid --shm-size --ulimit --ctstate --dport
    --exclusive --gpus-per-node --gpus-per-task --kill-on-bad-exit --mem --nodes --ntasks-per-node
    --signal --separator --tied
    --max-restarts --nnodes --nproc_per_node --rdzv-backend --rdzv-endpoint --shutdown-timeout
    --signals-to-handle --standalone --multi_gpu --num_processes --prefix""".split())


def sources(folders):
    return [path.read_text() for folder in folders for path in ROOT.glob(f"{folder}*.py")]


def section(text, heading):
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def blocks(text, kind):
    return re.findall(rf"(?s)```{kind}\n(.*?)```", text)


def in_order(lines, text):
    rest = iter(text)
    return all(line in rest for line in lines)


# Commands and options


@functools.cache
def options(name):
    """What the help of a script or a tool names."""
    place = {"parity": "tools.parity.compare"}.get(name, f"tools.{name}")
    module = importlib.import_module(name if name in SCRIPTS else place)
    with (mock.patch.object(sys, "argv", [name, "--help"]), pytest.raises(SystemExit),
          mock.patch.object(sys, "stdout") as stdout):
        module.main()
    text = "".join(str(call.args[0]) for call in stdout.write.call_args_list)
    return set(re.findall(r"--[a-z][\w-]*", text))


def commands(text):
    """The commands in indented blocks and between backticks, as lists of words."""
    text = re.sub(r"(?s)```.*?```", "", text)
    for line in re.findall(r"(?m)^    (\S.*)", text) + re.findall(r"`([^`\n]+)`", text):
        if re.match(r"([A-Z_]+=\S+ )*(accelerate|bash|diff|python3?|sbatch|srun|torchrun|\w+\.py) ",
                    line):
            yield shlex.split(line, comments=True)


@pytest.mark.parametrize("page", [*PAGES, *DOCSTRINGS])
def test_commands_and_options_exist(page):
    text = (PAGES | DOCSTRINGS)[page]
    known = FOREIGN.union(*map(options, [*SCRIPTS, *TOOLS]))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) <= known
    for words in commands(text):
        owner = None
        for before, word in zip(["", *words], words):
            name = word.removeprefix("tools.").removesuffix(".py")
            if word == f"{name}.py" and name in SCRIPTS:
                owner = name
            elif before in ("run.sh", "-m") and name in TOOLS:
                owner = name
            elif before == "run.sh":
                assert word == "test" or (ROOT / word).exists(), words
            elif owner and word.startswith("--"):
                assert word in options(owner), words


def test_the_first_commands_run(tmp_path):
    """All of the section Start of the README, typed in their order, with a smaller model and fewer
    steps. The third one starts a new run beside the one of the first, which is finished."""
    small = f"--steps 2 --hidden-size 32 --seq-len 32 --num-hidden-layers 2 --out {tmp_path}/run"
    torchrun = f"{sys.executable} -m torch.distributed.run"
    for line, (program, status, words) in zip(
        re.findall(r"(?m)^    (\S.*?)(?:  #.*)?$", section(README, "Start")),
        [("bash", 0, "2 processes on cpu"), ("diff", 1, "device = start_process_group(args)"),
         ("torchrun", 0, "2 processes on cpu")], strict=True,
    ):
        assert line.startswith(program)
        command = line if program == "diff" else line.replace("torchrun", torchrun) + f" {small}"
        result = subprocess.run(
            command.split(), cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE,
            env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        )
        assert result.returncode == status and words in result.stdout, result.stderr[-2000:]


# Diffs and code


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
    return [line for line in real.splitlines()[4:] if re.match(r"[+-](?! *\)$)", line)]


def test_the_diff_of_the_readme(tmp_path):
    """It is complete from ``# Model`` on, below the comment about your own model: first what
    single.py has, then what fsdp.py has, in each place. Its lines are indented by 4 blanks less."""
    (block,) = blocks(README, "diff")
    lines = [f"{line[0]}    {line[1:]}" for line in block.splitlines() if line[1:] != ")"]
    real = difference("fsdp.py", tmp_path, "\n    with torch.device(")
    for sign in "+-":
        assert [x for x in lines if x[0] == sign] == [x for x in real if x[0] == sign]


@pytest.mark.parametrize("script", [name for name in DOCSTRINGS if name != "single.py"])
def test_the_diffs_of_the_lesson(script, tmp_path):
    """The lines of each block stand in the diff of the two functions ``main``, in this order. A
    block may be indented less than the script, by the same number of blanks in all of its lines."""
    real = difference(script, tmp_path)
    found = blocks(section(PAGES["docs/lesson.md"], script), "diff")
    assert found
    for block in found:
        lines = [line for line in block.splitlines() if line[1:].strip() != ")"]
        assert any(in_order([f"{line[0]}{blanks}{line[1:]}" for line in lines], real)
                   for blanks in ("", " " * 4, " " * 8)), block


def test_the_code_of_the_pages():
    """The loop of single.py in the lesson, indented by 8 blanks less; and what to lift are lines of
    the trainers in tests/support/lifted.py, which a test runs."""
    (loop,) = blocks(PAGES["docs/lesson.md"], "python")
    assert in_order(loop.splitlines(), [line[8:] for line in main_of("single.py").splitlines()])
    lifted = (ROOT / "tests" / "support" / "lifted.py").read_text()
    found = blocks(PAGES["docs/lifting.md"], "python")
    assert found and not [block for block in found if block not in lifted]


def test_the_functions_to_take_are_complete():
    """A function that the table names uses no other name of its script, or of common/, than those
    that the table names too, and those of torch_versions."""
    rows = re.findall(r"(?m)^\| [^|]+ \| (.*?\[(\w+)\.py\].*?) \| .* \|$", PAGES["docs/lifting.md"])
    assert len(rows) == 7
    for cell, script in rows:
        tree = ast.parse((ROOT / f"{script}.py").read_text())
        defined = {node.name: node for node in tree.body
                   if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
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


# Tables


def test_the_lines_of_the_scripts():
    """And of what they need, to 5 %."""
    names, own, needs = (
        re.findall(what, re.search(rf"(?m)^\|{first} \|(.*)", README)[1])
        for first, what in (("", r"\((\w+)\.py\)"), (" lines of the file", r"[\d,]+"),
                            (" lines that it imports from here", r"[\d,]+"))
    )
    assert sorted(names) == sorted(SCRIPTS)
    for name, *said in zip(names, own, needs, strict=True):
        imported = {path for path in needed(f"{name}.py") if "/services/" not in path}
        for shown, paths in zip(said, ({f"{name}.py"}, imported - {f"{name}.py"})):
            lines = sum(len((ROOT / path).read_text().splitlines()) for path in paths)
            assert int(shown.replace(",", "")) == pytest.approx(lines, rel=0.05), (name, lines)


def cells(row):
    held = sum(row["held"][kind] for kind in draw.KINDS)
    return [draw.gb(size) for size in (held, row["peak"]["in all"], row["sent"])]


def test_the_table_of_the_8b_model():
    """README.md has the figures of docs/data/8b.json."""
    rows = draw.read("8b")
    table = re.findall(
        r"`([\w.]+)`\]\(\S+\)(?: `(.*?)`)? \|[^|]*\| (\S+) \| (\S+) \| (\S+) ", README
    )
    assert [script for script, *_ in table] == list(DOCSTRINGS)
    for script, options, *shown in table:
        name = {"zero.py": "zero.py --stage 2"}.get(script, f"{script} {options}".strip())
        assert shown == cells(rows[name]), name


@thorough
@pytest.mark.parametrize("name", [
    "zero.py --stage 2", "fsdp.py", "ep.py --num-experts 8 --expert-size 7168",
])
def test_a_dry_run_counts_what_the_table_says(tmp_path, name):
    row = draw.read("8b")[name]
    words = row["command"].replace("python", sys.executable, 1).split()
    at = words.index("tools.dry_run") + 1
    subprocess.run([*words[:at], "--json", tmp_path / "row.json", *words[at:]], cwd=ROOT,
                   check=True, capture_output=True, timeout=PATIENCE)
    assert cells(json.loads((tmp_path / "row.json").read_text())) == cells(row)


@pytest.mark.parametrize("name", pp.SCHEDULES)
def test_the_waiting_of_a_schedule(name):
    """In the table and in its picture, as the formula of pp.py says."""
    waiting = f"{draw.waiting(draw.read('schedules')[name]):.1%}"
    v = 1 if name in pp.ONE_STAGE else 2
    assert pp.bubble(name, 4, v, 8)[1].endswith(f"= {waiting}")
    assert re.search(rf"\| `{name}` \| .* \| {waiting} \|", PAGES["docs/pipelines.md"])


def test_every_message_in_the_table_exists():
    """In the sources, or in a test that expects it of torch. Where it has ... stand values."""
    table = section(PAGES["docs/when-it-fails.md"], "Messages of these scripts")
    said = "".join([*sources([*PRODUCT, "tests/"]), (ROOT / "run.sh").read_text()])
    said = re.sub(r'"\s*f?"', "", said)  # a string that goes on in the next line
    quoted = [message for cell in re.findall(r"(?m)^\| (`.*?) \|", table)
              for message in re.findall("`([^`]+)`", cell)]
    assert len(quoted) > 30
    assert not [message for message in quoted
                if not all(part.strip() in said for part in message.split("..."))]


def test_the_table_of_variables_is_complete():
    """It has the strings in the code that look like a variable, and run.sh's names in capitals."""
    names = {f"{axis}_SIZE" for axis in ("DP", "TP", "CP", "PP")}  # the code builds these
    for source in sources(PRODUCT):
        names |= set(re.findall(r'"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|RANK)"', source))
    shell = re.sub(r"(?m)^ *#.*|PYTHON'(.|\n)*?^PYTHON$", "", (ROOT / "run.sh").read_text())
    names |= set(re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", shell))
    others = "RUN_OR_CHECKPOINT ERROR BASH_SOURCE CAUSAL_LM WITHOUT_VALUES"  # no variables
    names -= set(others.split())
    table = section(PAGES["docs/launching.md"], "Variables")
    found = [name for cell in re.findall(r"(?m)^\| (`.*?) \|", table)
             for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(found) == sorted(names)


# Files and links


@pytest.mark.parametrize("page", PAGES)
def test_files_and_links_exist(page):
    """A link leads to a file of this repository, and to a heading of it."""
    names = re.findall(r"`([\w./-]+\.(?:py|sh|md|svg|txt))\b", PAGES[page])
    assert not [name for name in names
                if not any((ROOT / folder / name).exists() for folder in FOLDERS)]
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), link
            headings = re.findall(r"(?m)^#+ (.*)", path.read_text()) if anchor else [""]
            titles = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
            assert anchor in [title.replace(" ", "-") for title in titles], link
