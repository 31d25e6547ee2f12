"""README.md and docs/: every command is run by a test, every message that is quoted exists, and the
table of variables is complete."""

import ast
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.processes import PATIENCE, ROOT, free_port
from tests.sample import sampled, thorough

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [path for folder in (".", "common", "tools", "examples")
           for path in sorted((ROOT / folder).glob("*.py"))]
SHELL = [ROOT / "run.sh"]


# Commands

STARTS = ("accelerate bash cat cd cp curl diff docker export git iptables mkdir mpirun nohup pip "
          "py-spy pytest python python3 salloc sbatch sha256sum source squeue srun ssh tail "
          "tensorboard torchfrtrace torchrun wandb").split()
SMALL = "--steps 2 --hidden-size 32 --seq-len 32 --num-hidden-layers 2"
NO_TESTS = "--collect-only -q tests/test_docs.py"
# By the beginning of a command. RUN: this file runs it as it stands in the page, with these words
# at its end. TESTED: this test runs it, or a stand-in. LEFT_OUT: why no test does.
RUN = {
    "bash run.sh ddp.py": SMALL,
    "bash run.sh test --all": NO_TESTS,
    "bash run.sh test": NO_TESTS,
    "python -m pytest": NO_TESTS,
    "torchrun --nproc_per_node=2 -m examples.": "--steps 2",
    "torchrun --nproc_per_node=": SMALL,
    "python single.py": SMALL,
    "bash run.sh examples/": "--steps 2",
    "python -m tools.dry_run": "--num-hidden-layers 8",
    "bash run.sh dry_run": "--num-hidden-layers 8",
    "diff ": "",
}
TESTED = {
    "bash run.sh bench": "test_user.py::test_the_benchmark_runs",
    "python -m tools.dry_run --rank 0 WORLD_SIZE":
        "test_dry_run.py::test_it_counts_what_a_run_counts",
    "bash run.sh plan": "test_plan.py::test_its_order_is_that_of_real_runs",
    "python -m tools.plan": "test_plan.py::test_its_order_is_that_of_real_runs",
    "python -m tools.prepare": "test_tools.py::test_split_is_by_document",
    "python -m tools.plot": "test_tools.py::test_drawn_is_what_runs_wrote",
    "python -m tools.export": "test_weights.py::test_transformers_reads_what_is_exported",
    "bash run.sh fsdp.py --init-from": "test_weights.py::test_every_script_starts_from_the_weights",
    "NNODES=2 NODE_RANK=": "test_launch.py::test_all_machines_start_again_after_a_kill",
    "NNODES=1:2 MAX_RESTARTS=9": "test_launch.py::test_fewer_machines_go_on",
    'HOSTS="host0 host1" bash run.sh fsdp.py': "test_launch.py::test_two_hosts_over_ssh",
    "sbatch --nodes=2 --exclusive run.sh": "test_launch.py::test_a_batch_job",
    "sbatch --signal=B:USR1@120": "test_launch.py::test_a_signal_of_slurm_lets_all_save",
    "srun --nodes=2 --ntasks-per-node=8": "test_launch.py::test_srun_starts_a_script",
    "torchrun --nnodes=2": "test_docs.py::test_torchrun_on_two_machines",
    "accelerate launch": "test_launch.py::test_the_variables_of_accelerate",
    "cd runs/fsdp/step-00000200 && sha256sum": "test_damage.py::test_sha256sum_reads_the_hashes",
}
LEFT_OUT = {
    "bash run.sh test --torch": "downloads a torch of 5 GB",
    "bash run.sh test tests/test_cuda.py": "needs GPUs",
    "pip install": "needs the network",
    "source .venv/bin/activate": "then pip, which needs the network",
    "iptables ": "changes the firewall; the page says so",
    "py-spy dump": "a tool that is not required; it was run by hand",
    "torchfrtrace ": "reads the records of NCCL, which needs GPUs",
}


def blocks(page):
    """The lines of the indented blocks, and of the fenced ones that are for a shell."""
    fence = None
    for line in page.read_text().splitlines():
        if found := re.match(r" *```(\w*)", line):
            fence = found[1] or "any" if fence is None else None
        elif fence in ("any", "sh", "bash", "shell", "console") or fence is None and re.match(
                r" {4,}\S", line):
            yield line.strip().removeprefix("$ ")


def commands():
    """(page, command) of each line of a block that begins with a program, or sets variables."""
    return [
        (page.name, line) for page in PAGES for line in blocks(page)
        if re.match(r"[A-Z_]+=\S", line) or line.split() and line.split()[0] in STARTS
    ]


def kind(command):
    """RUN, TESTED or LEFT_OUT, and what it says of ``command``; the longest beginning decides."""
    found = max(((len(start), table[start], table) for table in (RUN, TESTED, LEFT_OUT)
                 for start in table if command.startswith(start)),
                key=lambda found: found[0], default=(0, None, None))
    return found[2], found[1]


def test_every_command_is_run_by_a_test():
    unknown = [(page, line) for page, line in commands() if kind(line)[0] is None]
    assert not unknown, "say in RUN, TESTED or LEFT_OUT which test runs them"
    assert len(commands()) > 20
    for test in TESTED.values():
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), test


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of this folder, and the environment in which its commands find this Python."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(
        ".git", ".venv*", "runs", "__pycache__", ".pytest_cache"))
    (folder / "bin").mkdir()
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return folder / "copy", environment | {
        "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }


RUN_HERE = sorted({line for _, line in commands() if kind(line)[0] is RUN})


@pytest.mark.parametrize("command", sampled(
    RUN_HERE, [line for line in RUN_HERE if kind(line)[1] == NO_TESTS][:1]
))
def test_it_runs_as_it_stands(clone, command):
    folder, environment = clone
    result = subprocess.run(
        f"{command} {kind(command)[1]}", shell=True, cwd=folder, env=environment, text=True,
        capture_output=True, timeout=PATIENCE,
    )
    assert result.returncode == command.startswith("diff "), result.stderr[-2000:]
    assert result.stdout


@thorough
def test_torchrun_on_two_machines(clone, corpus):
    """The line of docs/launching.md, on this machine twice, with one process each."""
    folder, environment = clone
    (line,) = {line for _, line in commands() if line.startswith("torchrun --nnodes=2")}
    line = line.replace("host0:29500", f"127.0.0.1:{free_port()}").replace("node=8", "node=1")
    line = f"{line.replace('/shared/run', 'shared')} --local-addr=127.0.0.1"
    line = re.sub(r"(torchrun)(.*) (--local-addr=\S+)", r"\1 \3\2", line)
    processes = [
        subprocess.Popen(f"{line} {SMALL} --data {corpus}", shell=True, cwd=folder, text=True,
                         env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum("2 processes on cpu" in output for output in outputs) == 1


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


def said():
    """What the sources may print, and what tests expect of a run, one message each."""
    for path in [*SOURCES, *sorted((ROOT / "tests").glob("test_*.py"))]:
        if path.name != pathlib.Path(__file__).name:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.JoinedStr, ast.Constant)):
                    yield from templates(node)
    for path in SHELL:
        yield from path.read_text().splitlines()


def quoted():
    """The messages in the first cells of the tables of our own messages."""
    page = (ROOT / "docs" / "when-it-fails.md").read_text()
    ours = page.partition("## Messages of these scripts")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in ours.splitlines() if line.startswith("| `")]
    return [message for cell in cells for message in re.findall("`([^`]+)`", cell)]


def is_in(message, text):
    """Are the parts of ``message`` between its ellipses in ``text``, in their order?"""
    place = 0
    for part in message.split("..."):
        place = text.find(part.strip(), place)
        if place < 0:
            return False
        place += len(part.strip())
    return True


def test_every_message_that_is_quoted_exists():
    texts, found = list(said()), quoted()
    assert len(found) > 30
    assert not [message for message in found if not any(is_in(message, text) for text in texts)]


@thorough
def test_messages_of_torch_exist():
    """Those that torch for CPUs can print; the page marks the others."""
    import torch
    from torch.distributed.elastic.multiprocessing import errors

    page = (ROOT / "docs" / "when-it-fails.md").read_text()
    source = pathlib.Path(errors.__file__).read_text()
    for words in ("ChildFailedError", "Root Cause (first observed failure)", "error_file",
                  "exitcode  : "):
        assert words in source and words in page
    library = (pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").read_bytes()
    for words in ("Gloo connectFullMesh failed", "Connection closed by peer"):
        assert words.encode() in library and words in page


# Variables


def names_in_code():
    """The variables of the environment that the code reads or sets: in Python the strings that look
    like one, in the shell the names in capitals that are not its own."""
    names = set()
    for path in SOURCES:
        strings = [node.value for node in ast.walk(ast.parse(path.read_text()))
                   if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        names |= {text for text in strings
                  if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK", text)}
    for path in SHELL:
        text = re.sub(r"(?m)^ *#.*|PYTHON'(.|\n)*?^PYTHON$", "", path.read_text())
        names |= set(re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", text))
    names |= {f"{axis}_SIZE" for axis in ("DP", "TP", "CP", "PP")}  # hybrid_3d.py builds these
    no_variables = ("RUN_OR_CHECKPOINT MIN MAX REMOTE EXIT HUP INT PIPE TERM USR1 BASH_SOURCE PWD "
                    "CUDA_ FI_ GLOO_ NCCL_ OMP_ PYTORCH_ TORCH_ UCX_")  # beginnings of names
    return names - set(no_variables.split())


def test_the_table_of_variables_is_complete():
    page = (ROOT / "docs" / "launching.md").read_text()
    table = page.partition("## Variables")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for cell in rows for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) == len(set(names)) and len(names) > 30
    assert set(names) == names_in_code()


# Links


def test_every_link_leads_somewhere():
    """To a file of this repository, and to a heading of it."""
    def anchors(path):
        headings = re.findall(r"(?m)^#+ (.*)", path.read_text())
        return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if "://" not in link:
                name, _, anchor = link.partition("#")
                path = page.parent / name if name else page
                assert path.exists(), (page.name, link)
                assert not anchor or anchor in anchors(path), (page.name, link)
