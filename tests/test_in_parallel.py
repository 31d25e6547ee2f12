"""tests/in_parallel.py runs each test once, and loses no failure."""

import os
import subprocess
import sys

import pytest

from tests.processes import PATIENCE, ROOT
from tests.sample import thorough

CONFTEST = """
from tests.in_parallel import pytest_runtestloop

def pytest_addoption(parser):
    parser.addoption("--processes", type=int)
    parser.addoption("--share")
"""
TESTS = """
import os, time, pytest

@pytest.fixture(scope="module")
def alive():
    state = [True]
    yield state
    state.clear()

@pytest.mark.parametrize("number", range(60))
def test_one(number, alive):
    assert alive
    with open("ran", "a+") as file:
        file.write(f"{number} {os.getpid()}\\n")
        file.flush()
        while len({line.split()[1] for line in open("ran")}) < int(os.environ["PROCESSES"]):
            time.sleep(0.01)
    if number in (3, 47):
        assert number < 0, "a reason"
    if number == 50:
        pytest.skip("another reason")
    if number == 55 and os.environ.get("DIES"):
        os._exit(0 if os.environ["DIES"] == "0" else 7)
"""


@pytest.fixture
def share(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(TESTS)

    def share(processes, *options, **variables):
        variables |= {"PYTHONPATH": str(ROOT), "PROCESSES": str(processes)}
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "--processes", str(processes), *options],
            cwd=tmp_path, text=True, timeout=PATIENCE, capture_output=True,
            env=os.environ | variables,
        )
        ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
        (tmp_path / "ran").unlink()
        return result.returncode, result.stdout, ran

    return share


@pytest.mark.parametrize("processes", [pytest.param(2, marks=thorough), 3])
def test_each_test_runs_once_and_is_reported(share, processes):
    status, output, ran = share(processes)
    assert status == 1 and "4 failed, 114 passed, 2 skipped" in output
    for name in ("test_a.py::test_one[3]", "test_b.py::test_one[47]"):
        assert output.count(f"FAILED {name} - AssertionError: a reason") == 1
    assert sorted(int(number) for number, _ in ran) == sorted([*range(60)] * 2)
    assert len({process for _, process in ran}) == processes
    assert output.count("[100%]") == 1


@thorough
def test_it_stops_at_the_first_failure(share):
    status, output, ran = share(2, "-x")
    assert status == 1 and "stopping after" in output and len(ran) < 115


@thorough
@pytest.mark.parametrize("code", ["0", "7"])
def test_a_process_that_dies_is_a_failure(share, code):
    """In test_b, with whose end the further process begins."""
    status, output, _ = share(2, "-k", "test_b or not 55", DIES=code)
    assert status == 1 and f"ended with the status [{code}]" in output
