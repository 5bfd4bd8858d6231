"""Compare code that no longer matches with the forms, to see what a new transformers changed."""

from __future__ import annotations

import ast
import difflib
import pickle
from collections.abc import Collection, Iterator
from pathlib import Path

from tilekern.patch.digests import quoted
from tilekern.patch.families import Family
from tilekern.patch.matching import Module, patches_of

# For each op: the file of its forms, and a pattern for the names of classes or functions that may contain one.
_CANDIDATES = {
    "rms_norm": ("norms", ("Norm",)),
    "layer_norm": ("norms", ("LayerNorm",)),
    "swiglu": ("mlps", ("MLP",)),
    "mlp": ("mlps", ("MLP", "gelu", "Gelu")),
    "qk_norm_rope": ("attentions", ("Attention",)),
    "rope": ("rotations", ("rotary", "rotate")),
    "fused_add_rms_norm": ("layers", ("Layer", "Block")),
    "fused_linear_cross_entropy": ("heads", ("ForCausalLM", "ForConditionalGeneration", "LMHead")),
    "experts": ("experts", ("Router", "MoE", "Moe", "load_balancing")),
}


def differences(family: Family, path: Path, ops: Collection[str] = ()) -> Iterator[str]:
    """Yield unified diffs between the forms and the code of a family that should match one but does not.

    Each class or function that may implement an unserved op is compared with the most similar form.
    Args:
        family: the family.
        path: the file that holds its code.
        ops: only these; all if empty.
    """
    module = Module(family.module, path.read_text(encoding="utf-8"))
    patches = patches_of(module, family.model_type)
    lost = [op for op in family.ops if op in (ops or family.ops) and op not in {patch.op for patch in patches}]
    taken = {patch.attribute for patch in patches}
    code = {f"{kind}.forward": forward for kind, forward in module.forwards.items()} | module.functions
    for op in lost:
        file, parts = _CANDIDATES[op]
        for name, function in code.items():
            if name in taken or not any(part in name for part in parts):
                continue
            now = _lines(function, function.name)
            forms = {form: _lines(quote, function.name) for form, quote in quoted(file).items()}
            form = max(forms, key=lambda form: difflib.SequenceMatcher(None, forms[form], now).ratio())
            before = f"tilekern/patch/forms/{file}.py:{quoted(file)[form].lineno} {form}"
            yield from difflib.unified_diff(forms[form], now, before, f"{path}:{function.lineno} {name}", lineterm="")


class _Bare(ast.NodeTransformer):
    """Remove code that forms do not quote: annotations, decorators and docstrings."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return ast.Assign([node.target], node.value) if node.value is not None else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list, node.returns = [], None
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)


def _lines(function: ast.FunctionDef, name: str) -> list[str]:
    """Return the lines of a function as a form quotes them, under the name ``name``."""
    bare: ast.FunctionDef = _Bare().visit(pickle.loads(pickle.dumps(function)))
    bare.name = name
    return ast.unparse(ast.fix_missing_locations(bare)).splitlines()
