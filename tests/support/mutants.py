"""Small faults, drawn at random and planted in one file, one at a time: which tests notice them?

    python -m tests.support.mutants common/step.py 10 tests/test_model.py tests/test_own_model.py

plants 10, each in a copy of the repository, and runs these tests until one fails. A fault that
lives is a missing test, or changes nothing that counts: read its line. ``--seed`` draws others.
"""

import argparse
import ast
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = "600"  # for the tests of one fault; if they take longer, it counts as noticed
INSTEAD = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}


def changes(node):
    """Faults in place of ``node``, which stay as they are."""
    def changed(**values):
        return type(node)(**vars(node) | values)

    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in INSTEAD:
        yield changed(op=INSTEAD[type(node.op)]())
    elif isinstance(node, ast.Compare):
        yield changed(ops=[INSTEAD[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield changed(value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield changed(value=node.value + 1)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Call):
        for number in range(len(node.keywords)):
            yield changed(keywords=node.keywords[:number] + node.keywords[number + 1 :])
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse


def faults(source):
    """For each fault in the text of a file: its line, the old words, the new ones, the new text."""
    text = source.encode()  # positions are in bytes
    starts = [0, *(match.end() for match in re.finditer(b"\n", text))]  # of the lines
    tree = ast.parse(source)
    formatted = {part for string in ast.walk(tree) if isinstance(string, ast.JoinedStr)
                 for part in ast.walk(string)}  # their positions are right from Python 3.12 on
    for node in ast.walk(tree):
        for new in changes(node) if node not in formatted else ():
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[node.end_lineno - 1] + node.end_col_offset
            old, words = text[first:last].decode(), ast.unparse(new)
            if isinstance(node, ast.expr):
                words = f"({words})"  # it may stand on several lines, or bind less
            yield node.lineno, old, words, (text[:first] + words.encode() + text[last:]).decode()


def notice(path, text, tests):
    """The first of ``tests`` that fails with another ``text`` of the file ``path``, or None."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        ignore = shutil.ignore_patterns(".git", ".venv*", ".pytest_cache", "__pycache__", "runs")
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=ignore)
        pathlib.Path(folder, path).write_text(text)
        command = [sys.executable, "-m", "pytest", "-qx", "--tb=no", f"--basetemp={folder}/out"]
        command = ["timeout", "--signal=KILL", SECONDS, *command, *tests]  # with their processes
        process = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT)
    if process.returncode == -9:
        return "none ends"
    if process.returncode > 2:  # 1: a test fails; 2: a file cannot be imported
        raise RuntimeError(process.stdout)
    failed = re.search(r"(?m)^(FAILED|ERROR) (\S+)", process.stdout)
    return failed[2] if failed else "none starts" if process.returncode else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("number", type=int)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = list(faults((ROOT / args.path).read_text()))
    drawn = random.Random(args.seed).sample(found, min(args.number, len(found)))
    lived = 0
    for line, old, new, text in drawn:
        first = notice(args.path, text, args.tests)
        lived += first is None
        print(f"{args.path}:{line}: {' '.join(old.split())} -> {new}\n    {first or 'LIVED'}",
              flush=True)
    print(f"{len(drawn) - lived} of {len(drawn)} were noticed")


if __name__ == "__main__":
    main()
