"""Faults that tests/support/mutants.py plants."""

import ast

from tests.support.mutants import faults

BEFORE = '''"""One é."""
def f(x, n=2):
    g(f"{x + 1}")
    return h(x, scale=(x
        * n), deep=True) if x < 3 else -x
'''


def test_each_fault_is_one_change_of_a_program_that_still_parses():
    found = list(faults(BEFORE))
    assert {(old.replace("\n       ", ""), new) for _, old, new, _ in found} >= {
        ("2", "(3)"), ('g(f"{x + 1}")', "pass"), ("x * n", "(x / n)"), ("True", "(False)"),
        ("x < 3", "(x <= 3)"), ("-x", "(x)"), ("3", "(4)")}
    assert len(found) == 11 and not [text for *_, text in found if text == BEFORE]
    for line, old, _, text in found:
        ast.parse(text)
        assert old.splitlines()[0] in BEFORE.splitlines()[line - 1]
