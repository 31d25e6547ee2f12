"""Which tests run by default, and which only with --all: a sample of every kind runs by default.
And which need optional packages."""

import re

import pytest

OPTIONAL = "an optional package is missing: "  # conftest.py looks for it

thorough = pytest.mark.thorough  # left out without --all; see conftest.py


def table(text, **words):
    """The rows of ``text`` as parameters of a test. A line is a row, and one that begins with a
    blank goes on with the row before; cells stand between " | ", and whole numbers become int.
    {NAME} is one of ``words``. Without --all only rows that begin with "* " run, or all if none
    does."""
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", word)
    rows, starred = [], "\n* " in text
    for line in re.sub("\n +", " ", text.strip()).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?:^| )\|(?= |$)", line.removeprefix("* "))]
        values = [int(cell) if cell.isdecimal() else cell for cell in cells]
        left_out = starred and not line.startswith("* ")
        rows.append(pytest.param(*values, marks=[thorough] * left_out))
    return rows


def rows(names, text, **words):
    """A decorator: a test runs with each row of ``table(text, ...)``, whose cells are ``names``."""
    return pytest.mark.parametrize(names, table(text, **words))


def needs(*packages):
    """Skip a test unless these optional packages are installed, those of tests/requirements.txt.
    Returns the last one."""
    module = None
    for package in packages:
        module = pytest.importorskip(package, reason=OPTIONAL + package)
    return module
