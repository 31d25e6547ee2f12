"""The faults of tests/support/mutants.py can be planted. That tests notice them is seen by running
it, which takes long."""

from tests.support.processes import ROOT
from tests.support.mutants import MUTANTS


def test_each_fault_can_be_planted():
    for mutant in MUTANTS:
        assert (ROOT / mutant.path).read_text().count(mutant.old) == 1, mutant
        assert mutant.old != mutant.new, mutant
        for name in mutant.tests.split():
            assert (ROOT / "tests" / f"test_{name}.py").is_file(), mutant
