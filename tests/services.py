"""Takes the three services off a script: what is left is the training itself."""

import ast

SERVICES = {"report", "validation", "checkpoints"}


def names_in(node):
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def without_services(source):
    """``source`` without the statements that name a service, and without the imports that nothing
    uses then. In the header of the loop ``report.steps(x)`` becomes ``x``."""
    tree = ast.parse(source)
    (main,) = (node for node in tree.body if getattr(node, "name", "") == "main")
    (loop,) = (node for node in main.body if isinstance(node, ast.For) and names_in(node.iter)
               & SERVICES)
    assert ast.unparse(loop.iter).startswith("report.steps(")
    (loop.iter,) = loop.iter.args
    for block in (loop, main):
        block.body = [node for node in block.body if not names_in(node) & SERVICES]
    used = names_in(tree)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            node.names = [alias for alias in node.names if (alias.asname or alias.name) in used]
    tree.body = [node for node in tree.body if getattr(node, "names", True)]
    return ast.unparse(tree)
