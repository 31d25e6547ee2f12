"""Takes the services off a script: what is left is the training itself."""

import ast

NAMES = {"metrics", "checkpoints"}
MODULES = {"common.metrics", "common.checkpoint"}


def without_services(source):
    """``source`` without the statements that name ``metrics`` or ``checkpoints``, and without their
    imports. A compound statement goes as a whole if its own line names one of them."""
    lines = source.splitlines(keepends=True)

    def cut(statements):
        for statement in statements:
            blocks = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
            inside = {id(node) for block in blocks for node in block}
            own = [child for child in ast.iter_child_nodes(statement) if id(child) not in inside]
            named = {
                node.id for child in own for node in ast.walk(child) if isinstance(node, ast.Name)
            }
            if named & NAMES or getattr(statement, "module", None) in MODULES:
                for number in range(statement.lineno - 1, statement.end_lineno):
                    lines[number] = ""
            else:
                for block in blocks:
                    cut(block)

    cut(ast.parse(source).body)
    return "".join(lines)
