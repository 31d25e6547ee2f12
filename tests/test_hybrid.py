"""hybrid_3d.py: what is left without one strategy. Its curves and bytes: test_same_run.py."""

import subprocess

from tests.support.processes import ROOT, edited
from tests.support.sample import thorough
from tests.support.table import Row
from tests.test_same_run import curve, tensors, validation


@thorough
def test_without_the_lines_that_the_docs_delete(once, shared):
    """Those of context parallelism: what is left trains and saves what single.py does."""
    script = edited(shared / "without-cp", "hybrid_3d.py")
    patch = ROOT / "docs/without_cp.diff"
    subprocess.run(["git", "apply", patch], cwd=shared / "without-cp", check=True)
    for claim in (curve, validation, tensors):
        claim(Row(f"{script} --tp 2 --pp 2", 4, "copy"), lambda row: row.run(once))
