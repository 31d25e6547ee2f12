"""Which tests run by default, and which only with --all: a sample of every kind runs by default.
And which need optional packages."""

import pytest

OPTIONAL = "an optional package is missing: "  # conftest.py looks for it

thorough = pytest.mark.thorough  # left out without --all; see conftest.py


def sampled(runs, sample):
    """``runs`` as parameters of a test, those that are not in ``sample`` marked as thorough."""
    assert sample and all(run in runs for run in sample)
    return [
        run if run in sample
        else pytest.param(*(run if isinstance(run, tuple) else [run]), marks=thorough)
        for run in runs
    ]


def needs(*packages):
    """Skip a test unless these optional packages are installed, those of tests/requirements.txt.
    Returns the last one."""
    module = None
    for package in packages:
        module = pytest.importorskip(package, reason=OPTIONAL + package)
    return module
