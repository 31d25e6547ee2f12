"""Fixtures: a server of ready-made processes, on which the tests run whole scripts."""

import fcntl
import functools
import hashlib
import os
import pathlib
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
# The GPUs that test_cuda.py lets scripts see. Processes of pytest-xdist inherit both variables.
VISIBLE_GPUS = os.environ.setdefault(
    "GPUS_OF_TESTS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
# On the CPU: float64 curves and exact bytes, on as many ranks as a test asks for
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores

from tests.support.processes import ProcessServer, Result  # noqa: E402
from tests.support.sample import OPTIONAL  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true",
                     help="run every test; without it, a sample of every kind")
    parser.addoption("--kills", type=int, default=9, help="how many kills the soak does")
    parser.addoption("--seed", type=int, default=0, help="seed of the soak")


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: left out without --all")
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled")  # DCP


def pytest_collection_modifyitems(config, items):
    """Without --all leave out what is thorough, unless a test is named: tests/test_x.py::test_y."""
    if config.getoption("--all") or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_terminal_summary(terminalreporter):
    """How to run what optional packages would add."""
    if OPTIONAL in str([report.longrepr for report in terminalreporter.stats.get("skipped", [])]):
        terminalreporter.write_line(
            "Some tests were skipped, since optional packages are missing. To run these too: "
            f"{sys.executable} -m pip install -r tests/requirements.txt")


SERVER = ProcessServer()


def pytest_sessionstart():
    SERVER.start()  # it imports torch while pytest does


def pytest_sessionfinish():
    SERVER.stop()


@pytest.fixture(scope="session")
def server():
    return SERVER


@pytest.fixture
def run(server, tmp_path):
    """Run a script; see ``ProcessServer.run``. Output folders are relative to a fresh folder."""
    return functools.partial(server.run, folder=tmp_path)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder of all tests, also of those that run in other processes (pytest-xdist)."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def corpus(shared):
    words = "the quick brown fox jumps over a lazy dog while seven wizards box"
    return write_once(shared / "corpus.txt", words, 8000)


@pytest.fixture(scope="session")
def held_out(shared):
    """Text of other words than the corpus."""
    words = "every box of wine needs a lazy wizard and quick foxes"
    return write_once(shared / "held-out.txt", words, 400)


def write_once(path, words, number):
    """A small text: the same on every machine."""
    words, state, text = words.split(), 1, []
    for _ in range(number):  # docs/data/bugs.json is of this corpus
        state = state * 48271 % 2147483647
        text.append(words[state % len(words)])
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(" ".join(text))
    return str(own.rename(path))


@pytest.fixture(scope="session")
def once(server, corpus, held_out, shared):
    """Run a command on the corpus as the first test that asks for it, and give its Result to all.
    ``{val}`` in the options is the held-out text."""

    def once(command, world, options, **kwargs):
        key = repr((command, world, options, kwargs))
        name = f"run-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # while another process runs it
            output = shared / f"{name}.txt"
            if not output.exists():
                shutil.rmtree(shared / name, ignore_errors=True)  # of a run that has failed
                result = server.run(
                    command, world, f"{options} --data {corpus}".replace("{val}", held_out),
                    folder=shared, out=name, **kwargs,
                )
                output.write_text(result.output)
        return Result([0], output.read_text(), shared / name)

    return once
