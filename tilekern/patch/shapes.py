"""The shape of a function: its digest without annotations, decorators and docstrings, its variables numbered.

Functions of one shape compute the same, provided that the attributes and the globals that they name are the same.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

from tilekern.patch.digests import digest_of_tree


def shape_of(function: ast.FunctionDef) -> str:
    """The sha256 of a function's shape; the function's own name does not count, that of ``self`` does."""
    bare: ast.FunctionDef = copy.deepcopy(function)
    bare.name, bare.decorator_list, bare.returns = "f", [], None
    _Unannotated().visit(bare)
    _number(bare)
    return digest_of_tree(bare)


class _Unannotated(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value is not None else None


def _number(function: ast.FunctionDef) -> None:
    """Give the variables of a function numbers in the order in which they appear."""
    nodes = list(ast.walk(function))
    stored = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    own = (stored | {x.arg for x in nodes if isinstance(x, ast.arg)}) - {"self"}
    numbers: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in own:
            node.id = numbers.setdefault(node.id, f"v{len(numbers)}")
        elif isinstance(node, ast.arg) and node.arg in own:
            node.arg = numbers.setdefault(node.arg, f"v{len(numbers)}")
