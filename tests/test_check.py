"""tools/check.py: what it finds in edited scripts, and what it says of those that are right."""

import importlib
import itertools
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys
import time

import pytest

from parity.compare import Verdict
from tests.support.commands import left_over, start, wait_until
from tests.support.parity_runs import read as bugs
from tests.support.processes import ROOT, edited
from tests.support.sample import rows, thorough
from tests.test_porting import pairs_in, port
from tests.test_refusals import Started, started
from tools import check as tool
from tools.flatten import flatten, without_run
from tools.checking import recorded


@pytest.fixture
def check(server, tmp_path):
    """A function of a script and options: (status, output), run in a folder, which stays as it
    is."""
    def check(script, options=""):
        before = sorted(tmp_path.iterdir())
        small = "--num-hidden-layers 2 --batch-size 24 --seq-len 24 --steps 2 --ranks 2"
        found = server.run(
            "tools/check.py", 0, shlex.split(f"{script} {small} {options}"), folder=tmp_path,
            pass_out=False, expect_ok=False, env={"TMPDIR": str(tmp_path)})
        assert sorted(tmp_path.iterdir()) == before
        return found.statuses[0], found.output

    return check


EQUAL = "EQUAL( to itself on one process)? +up to (0.0e|.*e-1)"  # float64
TIED = ("    layers = model", "    model.lm_head.weight = model.model.embed_tokens.weight\n"
        "    layers = model")


def policy_without_run(text):
    """Its model is called policy: parameters have the names of its modules, as in single.py."""
    return re.sub(r"(?<![.\w-])model(?=[.,()\n]| =)", "policy", without_run(text))


def norm_without_run(text):
    return without_run(text).replace("grad_norm", "norm")


# Of scripts as they stand; most of those that are left out have sound rows in checks.md
SOUND = """hybrid_3d.py --against 'ep.py --ep 1' --ep 2
hybrid_3d.py --against ep.py --cp 2 --pp 2 --ranks 4
hybrid_3d.py
ddp.py --grad-accum 3
fsdp.py --against single.py --replicate 2 --ranks 4
cp.py --attention ulysses
pp.py --num-hidden-layers 4 --schedule zbv
ep.py
examples/diloco.py --replicas 1"""
SECTION = (r"(?m)^## (\* )?(.*)\nRun: (.*)\nSays: (.*)\n(?:With: (.*)\n)?"
           r"(?:```diff\n((?:.*\n)*?)```)?")
ROWS = [pytest.param(*row, id=title, marks=[thorough] * (not star)) for star, title, *row
        in re.findall(SECTION, (ROOT / "tests/checks.md").read_text())]
ROWS += [pytest.param(command, "EQUAL", "", "", marks=thorough) for command in SOUND.splitlines()]


@pytest.mark.parametrize("command, words, kinds, body", ROWS)
def test_what_it_says(check, tmp_path, command, words, kinds, body):
    """Of a script with edits, or with none."""
    script, _, more = command.partition(" ")
    more = more.replace("README.md", f"{ROOT}/README.md")
    more = more.replace("tied.py", edited(tmp_path / "one", "single.py", TIED))
    if "grad-accum" not in command + words:
        more += " --grad-accum 2"  # as by default, but it does not try 1 after a DIFFERENT
    if kinds or body:
        ported = port(kinds, script) if "heads" in kinds else []
        copy = pathlib.Path(edited(tmp_path / "copy", script, *ported, *pairs_in(body)))
        for change in policy_without_run, norm_without_run:
            if change.__name__.partition("_")[0] in kinds:
                copy.write_text(change(copy.read_text()))
        script = str(copy)
    status, said = check(script, more)
    differs = "\n1 process    DIFFERENT" in said  # from single.py
    assert status == (words[:5] != "EQUAL" or differs), said
    expected = EQUAL if words == "EQUAL" else words
    assert re.search(f"[24] processes  {expected}", said), said
    assert status or "\nNot compared: " in said, said
    assert not differs or words != "EQUAL", said


@rows("verdicts, status", """
EQUAL REFUSED EQUAL | None
EQUAL DIFFERENT EQUAL | 1
EQUAL EQUAL FAILED | 1
EQUAL NOTHING EQUAL | 1
REFUSED REFUSED REFUSED | 1
""")
def test_its_status(monkeypatch, verdicts, status):
    found = [Verdict(kind, "") for kind in verdicts.split()]
    monkeypatch.setattr(tool, "on_end", lambda _: None)  # of the process of the tests
    monkeypatch.setattr(tool, "verdicts_of", lambda *_: (found, [], False))
    with pytest.raises(SystemExit) as end:
        sys.exit(tool.main([f"{ROOT}/fsdp.py", "--float32-inside"]))
    assert str(end.value.code) == str(status)


def test_a_process_that_takes_too_long():
    """One waits for no other."""
    kind, words = tool.why_it_ended([], [], 1)
    assert kind == "FAILED" and words.startswith("it is not over after 300 seconds: take a smaller")


@thorough
def test_a_factor_on_one_process_too(check, tmp_path):
    """It shows better in one micro-batch."""
    copy = edited(tmp_path / "copy", "pp.py", ("scale_grads=False", "scale_grads=True"))
    status, said = check(copy)
    assert status == 1 and re.search(
        "\n1 process with --grad-accum 1, .*: DIFFERENT .* all: divided by 4, as many as ", said)


def test_a_script_that_is_none(check):
    """No advice on the reference."""
    status, said = check("nofile.py")
    assert status == 1 and "nofile.py is no script" in said and "--against" not in said


def test_its_sizes_fit_3_and_4_ranks(monkeypatch, tmp_path):
    """And are refused by none of the scripts."""
    assert tool.DEFAULTS["steps"] > 3  # two updates after the warm-up
    for name, world in itertools.product(("fsdp", "tp", "cp", "pp", "ep"), "34"):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "start_process_group", started)
        monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": world})
        with pytest.raises(Started):
            recorded.train_recorded(module, [], tmp_path / "run", tool.DEFAULTS)


@rows("prefix, names, status", """
* | SIGKILL | -9
| SIGTERM | 143
| SIGHUP | 129
nohup | SIGHUP SIGTERM | 143
""")
def test_a_signal_ends_it_and_leaves_nothing(tmp_path, prefix, names, status):
    """As of a CI whose time is up, or a terminal that is closed, when all of its processes get
    SIGHUP, which nohup lets them ignore: no rank, no data worker of one, and no file, but after
    SIGKILL."""
    words = f"{prefix} {sys.executable} -m tools.check fsdp.py --steps 3000 --workers 1"
    process = start(words.split(), tmp_path, PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path))
    wait_until(lambda: [*tmp_path.glob("*/*/run.parity")])
    wait_until(lambda: len(left_over(tmp_path)) > 2)  # the tool, a rank, its data worker
    for name in names.split():
        send = os.killpg if prefix and name == "SIGHUP" else os.kill
        send(process.pid, getattr(signal, name))
    assert process.wait(60) == int(status)
    end = time.monotonic() + 20  # torch lets a worker look for its parent every 5 seconds
    while left := left_over(tmp_path):
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert names == "SIGKILL" or not [*tmp_path.glob("check-*")]


@thorough
@rows("script, with_run", """
tp | 1
fsdp | 0
cp | 0
""")
def test_one_flat_file(check, tmp_path, script, with_run):
    """In a project that has a common/ and tools/ of its own; fsdp.py as it stands is refused."""
    for name in "common/mine.py", "tools/helpers.py":
        (tmp_path / "project" / name).parent.mkdir(parents=True)
        (tmp_path / "project" / name).touch()
    copy = pathlib.Path(shutil.copy(ROOT / "fsdp.py", tmp_path / "project"))
    status, said = check(str(copy))
    assert status == 1 and "imports common.data of this project, and what is beside it" in said
    copy.write_text(flatten(ROOT / f"{script}.py", with_run).replace(
        "import torch\n", "import common.mine, tools.helpers, torch\n", 1))
    more = f"--val-data {ROOT}/README.md" if with_run else ""
    status, said = check(str(copy), f"--against single.py {more}")
    assert status == 0 and re.search(f"2 processes  {EQUAL}", said), said


def test_a_copy_uses_its_own_common(check, tmp_path):
    copy = edited(tmp_path / "copy", "fsdp.py")
    (tmp_path / "copy/common").unlink()
    shutil.copytree(ROOT / "common", tmp_path / "copy/common")
    (tmp_path / "copy/common/step.py").write_text("1 / 0")
    status, said = check(copy)
    assert status == 1 and "ZeroDivisionError" in said, said


# Bugs of docs/bugs.md that the bare command does not find, and what it must be given
NEEDS = {"11": "--attention allgather",
         "20": f"--against {ROOT}/examples/cp_documents.py --separator 32"}


@rows("name", """
* 24-adam-counts-from-2
02-own-token-count
09-scale-grads
11-all-gather
16-no-sync-on-the-last
17-last-micro-batch-only
20-packed-documents
""")
def test_it_finds_the_bugs_by_example(check, tmp_path, name):
    """Those that only several micro-batches show. Or it says which options find them."""
    (bug,) = (bug for bug in bugs() if bug.name == name)
    needed = NEEDS.get(name[:2])
    script = bug.run.split()[0]
    copy = edited(tmp_path / "copy", pathlib.Path(script).name, *bug.edits, source=script)
    status, said = check(copy)
    assert status == (not needed), said
    if needed:
        for option in re.findall("--[a-z]+", needed):
            assert re.search(f"(?m)^Not compared.*{option}", said), said
        status, said = check(copy, needed)
        assert status == 1 and "DIFFERENT" in said, said
