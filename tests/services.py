"""Takes the services off a script: what is left is the training itself."""

import ast

NAMES = {"metrics", "checkpoints", "loggers", "held_out", "validation"}
MODULES = {"common.metrics", "common.checkpoint", "common.loggers", "common.validation"}


def without_services(source):
    """``source`` without the statements that name one of ``NAMES``, and without their imports. A
    compound statement goes as a whole if its own line names one of them, or nothing is left in its
    body."""
    lines = source.splitlines(keepends=True)

    def cut(statements):
        """Returns whether nothing is left."""
        left = 0
        for statement in statements:
            blocks = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
            inside = {id(node) for block in blocks for node in block}
            own = [child for child in ast.iter_child_nodes(statement) if id(child) not in inside]
            named = {
                node.id for child in own for node in ast.walk(child) if isinstance(node, ast.Name)
            }
            gone = named & NAMES or getattr(statement, "module", None) in MODULES
            if gone or any([cut(block) for block in blocks if block]):
                for number in range(statement.lineno - 1, statement.end_lineno):
                    lines[number] = ""
            else:
                left += 1
        return not left

    cut(ast.parse(source).body)
    return "".join(lines)
