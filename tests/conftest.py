"""Fixtures: a server of ready-made processes, on which the tests run whole scripts."""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
# On the CPU: float64 curves and exact bytes, on as many ranks as a test asks for
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from tests.processes import ProcessServer  # noqa: E402


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
