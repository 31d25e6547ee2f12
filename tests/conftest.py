"""Fixtures: a server of ready-made processes, on which the tests run whole scripts."""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
VISIBLE_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")  # test_cuda.py lets scripts see them
# On the CPU: float64 curves and exact bytes, on as many ranks as a test asks for
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from tests.in_parallel import pytest_runtestloop  # noqa: E402, F401
from tests.processes import ProcessServer  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true",
                     help="run every test; without it, a sample of every kind")
    parser.addoption("--processes", type=int, default=min(4, os.cpu_count() + 1),
                     help="how many processes share the tests")
    parser.addoption("--share", help="for what --processes starts")
    parser.addoption("--kills", type=int, default=14, help="how many kills the soak does")
    parser.addoption("--seed", type=int, default=0, help="seed of the soak")


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: left out without --all")


def pytest_collection_modifyitems(config, items):
    """Without --all leave out what is thorough, unless a test is named: tests/test_x.py::test_y."""
    if config.getoption("--all") or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_report_header(config):
    if not config.getoption("--all"):
        return "a sample of every kind of test; --all runs every test"


@pytest.fixture(scope="session")
def server():
    with ProcessServer() as server:
        yield server


@pytest.fixture
def run(server, tmp_path):
    """Run a script; see ``ProcessServer.run``. Output folders are relative to a fresh folder."""

    def run(*args, **kwargs):
        return server.run(*args, folder=tmp_path, **kwargs)

    return run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small text: the same on every machine."""
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    words = "the quick brown fox jumps over a lazy dog while seven wizards box".split()
    state, text = 1, []
    for _ in range(8000):
        state = state * 48271 % 2147483647
        text.append(words[state % len(words)])
    path.write_text(" ".join(text))
    return str(path)


@pytest.fixture(scope="session")
def single(server, corpus, tmp_path_factory):
    """The curves of single.py, by options."""
    curves = {}

    def curve(options):
        if options not in curves:
            folder = tmp_path_factory.mktemp("single")
            curves[options] = server.run("single.py", 0, f"{options} --data {corpus}",
                                         folder=folder).curve()
        return curves[options]

    return curve
