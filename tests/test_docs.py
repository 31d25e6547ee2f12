"""What README.md and docs/ show exists: commands and options, files, links, messages, variables.
Diffs and blocks of code are those of the sources."""

import ast
import contextlib
import functools
import importlib
import io
import pathlib
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest

from docs import draw
from tests.support.processes import PATIENCE, ROOT, TOOLS
from tests.support.sample import thorough
from tests.test_bare import SCRIPTS, SOURCES, names_in, without_run

PAGES = {str(path.relative_to(ROOT)): path.read_text()
         for folder in (".", "docs", "parity") for path in sorted((ROOT / folder).glob("*.md"))}
DOCSTRINGS = {f"{name}.py": ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text()))
              for name in SCRIPTS}
README = PAGES["README.md"]
HISTORY = "CHANGELOG.md"  # it names options and files that are gone
FOLDERS = ["", "common/", "parity/", "tools/", "tools/counting/",
           "tools/huggingface/", "examples/", "docs/", "tests/", "tests/support/", "tests/gpu/"]
# Of torchrun, Slurm, Docker, accelerate, run.sh, tools/bench.py, and of a trainer in tests/
FOREIGN = {f"--{name}" for name in """all cap-add exclusive fsdp gpus-per-node help hsdp ipc
    local-rank master_addr mem multi_gpu nnodes node_rank nodes nproc_per_node ntasks-per-node
    num_processes output pid prefix query-norm rdzv-backend rdzv-endpoint requeue separator shm-size
    shutdown-timeout signal signals-to-handle standalone tied trace ulimit""".split()}


def section(text, heading):
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def outside(text):
    """Without blocks of code."""
    return re.sub(r"(?s)```.*?```", "", text)


def blocks(text, kind):
    return re.findall(rf"(?s)```{kind}\n(.*?)```", text)


def in_order(lines, text):
    rest = iter(text)
    return all(line in rest for line in lines)


# Commands and options


@functools.cache
def options(name):
    """What the help of a script or a tool names."""
    module = importlib.import_module(TOOLS.get(name, name))
    with (mock.patch.object(sys, "argv", [name, "--help"]), pytest.raises(SystemExit),
          contextlib.redirect_stdout(io.StringIO()) as text):
        module.main()
    return set(re.findall(r"--[a-z][\w-]*", text.getvalue()))


def commands(text):
    """The commands in indented blocks and between backticks, as lists of words."""
    text = outside(text)
    starts = r"([A-Z_]+=\S+ )*(accelerate|bash|diff|python3?|sbatch|srun|torchrun|\w+\.py) "
    for line in re.findall(r"(?m)^    (\S.*)", text) + re.findall(r"`([^`\n]+)`", text):
        if re.match(starts, line):
            yield shlex.split(line, comments=True)


@pytest.mark.parametrize("page", [*sorted(PAGES.keys() - {HISTORY}), *DOCSTRINGS])
def test_commands_and_options_exist(page):
    text = (PAGES | DOCSTRINGS)[page]
    known = FOREIGN.union(*map(options, [*SCRIPTS, *TOOLS]))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) <= known
    for words in commands(text):
        owner = None
        for before, word in zip(["", *words], words):
            name = word.removeprefix("tools.").removesuffix(".py")
            if word in DOCSTRINGS or before in ("run.sh", "-m") and name in TOOLS:
                owner = name
                allowed = options(name) | ({"--trace"} if "bench" in words else set())
                allowed |= options("check") if "check" in words else set()
            elif word.startswith("tests/"):
                assert (ROOT / word).exists(), word
            elif before == "run.sh":
                assert (word in ("test", "share", "bench", "--help") or (ROOT / word).exists()
                        or word.startswith("my_")), words
            elif owner and word.startswith("--"):
                assert word in allowed, words


SMALL = "--steps 2 --hidden-size 32 --seq-len 32 --num-hidden-layers 2"
PRINTED = re.findall(r"(?m)^    # ((?:in all|parameters|sent in) .*)", README)
APPENDED = {  # to a command that begins so
    "bash run.sh ddp.py": SMALL, "torchrun": SMALL,
    "bash run.sh test": "--version",
    "bash run.sh plan": "--model tiny --devices 2 --seq-len 64 --only fsdp.py",
    "bash run.sh parity": "--help",
}
# What two pages show
SHOWN = dict.fromkeys(" ".join(words) for page in (README, PAGES["AGENTS.md"])
                      for words in commands(page) if words[0] in ("bash", "diff", "torchrun"))


@thorough
@pytest.mark.parametrize("line", [line for line in SHOWN if " my_" not in line])
def test_a_command_works_as_typed(line, tmp_path):
    """Some with a smaller model. In a folder that looks like this one."""
    for path in ROOT.iterdir():
        if path.name != "runs":
            (tmp_path / path.name).symlink_to(path)
    more = next((APPENDED[begin] for begin in APPENDED if line.startswith(begin)), "")
    python = pathlib.Path(sys.executable).parent
    environment = {"PATH": f"{python}:/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path),
                   "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        ["bash", "-c", f"{line} {more}"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=PATIENCE, env=environment)
    assert result.returncode == line.startswith("diff "), result.stdout[-3000:]
    assert "dry_run" not in line or len(PRINTED) == 3 and all(x in result.stdout for x in PRINTED)


# Diffs and code


def main_of(script):
    """With what hybrid_3d.py has functions of its own for."""
    parts = r"(?ms)^def (?:main|make_meshes|compose)\(.*?\n\n\n"
    return "".join(re.findall(parts, (ROOT / script).read_text())).rstrip() + "\n"


@pytest.mark.parametrize("script", [name for name in DOCSTRINGS if name != "single.py"])
def test_the_diffs_of_the_lesson(script, tmp_path):
    """And of README.md. The lines of each block stand in the diff of the two functions ``main``, in
    this order. A block may be indented less than the script, by the same number of blanks in all of
    its lines. Git may pair a closing parenthesis with another one: these are left out."""
    for name in ("single.py", script):
        (tmp_path / name).write_text(main_of(name))
    output = subprocess.run(f"git diff --no-index -U999 single.py {script}".split(), cwd=tmp_path,
                            text=True, stdout=subprocess.PIPE).stdout
    real = [line for line in output.splitlines()[4:] if re.match(r"[ +-](?! *\)$)", line)]
    found = blocks(section(PAGES["docs/lesson.md"], script), "diff")
    assert found
    for block in found + blocks(README, "diff") * (script == "fsdp.py"):
        lines = [line for line in block.splitlines() if line[1:].strip() != ")"]
        assert any(in_order([f"{line[0]}{blanks}{line[1:]}" for line in lines], real)
                   for blanks in ("", " " * 4, " " * 8)), block


def test_the_code_of_the_pages():
    """The header of a loop without ``Run`` in README.md; the loop of single.py in the lesson,
    indented by 8 blanks less; and what to lift or to change are lines of tests/support/lifted.py
    and tests/ports.md, which tests run, and which test_loggers.py takes from its section."""
    (line,) = re.findall("`(for step, batch in .*:)`", README)
    assert all(f"\n    {line}\n" in without_run(source) for source in SOURCES.values())
    (loop,) = blocks(PAGES["docs/lesson.md"], "python")
    assert in_order(loop.splitlines(), [line[8:] for line in main_of("single.py").splitlines()])
    page = PAGES["docs/copying.md"].replace("patience=9", "patience=0, threshold=9")
    found = blocks(page.replace(section(page, "Your own logger"), ""), "python")
    assert len(found) == 11
    lifted = (ROOT / "tests" / "support" / "lifted.py").read_text().splitlines()
    ported = (ROOT / "tests" / "ports.md").read_text().replace("\n+", "\n").splitlines()
    for block in found:
        assert any(in_order(block.splitlines(), lines) for lines in (lifted, ported)), block


def test_the_functions_to_take_are_complete():
    """A function that the table names uses no other name of its script, or of common/, than those
    that the table names too."""
    row = r"(?m)^\| [^|]+ \| (.*?\]\(\.\./([\w/]+\.py)\).*?) \| .* \|$"
    rows = re.findall(row, section(PAGES["docs/copying.md"], "Only the functions"))
    assert len(rows) == 6
    for cell, script in rows:
        source = (ROOT / script).read_text()
        body = ast.parse(source).body
        defined = {node.name: node for node in body if hasattr(node, "name")}
        known = {*defined, *re.findall(r"(?m)^([A-Z_]+) =", source)}
        known |= {alias.name for node in body if isinstance(node, ast.ImportFrom)
                  and node.module.split(".")[0] in ("common", *SCRIPTS) for alias in node.names}
        taken = {"SettingError", *re.findall(r"`(\w+)`", cell)}
        if "all below `main`" in cell:
            taken |= defined.keys() - {"main", "check"}
        used = set.union(*(names_in(defined[name]) for name in taken & defined.keys() - {"main"}))
        assert used & known <= taken | {"refuse"}, script


def test_what_a_table_quotes_exists():
    """In the sources, or in a test that expects it of torch. Where it has ... stand values."""
    tables = (section(PAGES["docs/when-it-fails.md"], "Messages of these scripts")
              + section(PAGES["docs/launching.md"], "Variables"))
    said = "".join(path.read_text() for folder in FOLDERS
                   for path in [*ROOT.glob(f"{folder}*.py"), *ROOT.glob(f"{folder}*.sh")])
    said = re.sub(r'"\s*f?"', "", said)  # a string that goes on in the next line
    quoted = [words for cell in re.findall(r"(?m)^\| (`.*?) \|", tables)
              for words in re.findall("`([^`]+)`", cell)]
    assert len(quoted) > 25
    assert not [words for words in quoted
                if not all(part.strip() in said for part in words.split("..."))]


# Files and links


@pytest.mark.parametrize("page", PAGES)
def test_files_and_links_exist(page):
    """A link leads to a file of this repository, and to a heading of it."""
    named = r"`([\w./-]+\.(?:py|sh|md|svg|txt))\b"
    names = re.findall(named, PAGES[page]) if page != HISTORY else []
    assert not [name for name in names
                if not any((ROOT / folder / name).exists() for folder in FOLDERS)]
    for link in re.findall(r"\]\(([^)\s]+)\)", outside(PAGES[page])):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), link
            headings = re.findall(r"(?m)^#+ (.*)", path.read_text()) if anchor else [""]
            titles = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
            assert anchor in [title.replace(" ", "-") for title in titles], link


def test_the_pictures_show_their_sources(tmp_path, monkeypatch):
    """docs/data/, cp.py and theory.py: docs/draw.py draws from them what is there."""
    (tmp_path / "bugs").mkdir()
    monkeypatch.setattr(draw, "PICTURES", tmp_path)
    draw.draw()
    drawn, kept = (
        {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.svg")}
        for folder in (tmp_path, ROOT / "docs" / "pictures"))
    del kept["grid.svg"]  # it shows no data, and is edited by hand
    assert drawn.keys() == kept.keys()
    assert [name for name in kept if drawn[name] != kept[name]] == []
