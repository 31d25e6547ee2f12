"""hybrid_3d.py: its grid. Its curves and bytes: test_same_run.py."""

import re
import subprocess

import pytest

import hybrid_3d
from common.options import SettingError
from tests.support.processes import ROOT, edited
from tests.support.sample import thorough
from tests.support.table import Row
from tests.test_same_run import curve, tensors, validation


def test_the_grid_comes_from_the_environment(monkeypatch):
    for name, size in (("DP_SIZE", "1"), ("CP_SIZE", "2"), ("TP_SIZE", "3"), ("PP_SIZE", "4")):
        monkeypatch.setenv(name, size)
    grid = re.escape("dp (1) x tp (3) x cp (5) x pp (4) = 60")
    with pytest.raises(SettingError, match=grid):
        hybrid_3d.main(["--cp", "5"])


@thorough
def test_without_the_lines_that_the_docs_delete(once, shared):
    """Those of context parallelism: what is left trains and saves what single.py does."""
    script = edited(shared / "without-cp", "hybrid_3d.py")
    patch = ROOT / "docs" / "without_cp.diff"
    subprocess.run(["git", "apply", patch], cwd=shared / "without-cp", check=True)
    for claim in (curve, validation, tensors):
        claim(Row(f"{script} --tp 2 --pp 2", 4, "copy"), lambda row: row.run(once))
