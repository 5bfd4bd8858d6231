"""Forms: functions of which many families of models have copies, by their shapes, and what stands in for each.

A form is matched against the classes and functions of a module, whatever the family. Norms, MLPs and rotations are
known by their shapes (:mod:`tilekern.patch.shapes`); attentions, layers and heads, of which most of the text does not
matter, by the statements in them that are exchanged (:mod:`tilekern.patch.patterns`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tilekern.patch import layers, loss, patterns, replacements
from tilekern.patch.digests import digest_of_tree
from tilekern.patch.shapes import shape_of
from tilekern.patch.table import Patch

# In the order in which they are applied.
OPS = ("rms_norm", "swiglu", "qk_norm_rope", "rope", "fused_add_rms_norm", "fused_linear_cross_entropy")

# ``weight * (x / sqrt(mean(x^2) + variance_epsilon)).to(dtype of x)``.
_NORMS = {"97c299fa1548c4048eae806e7e4c278d3b2dd6e7b417ccae49646f69bac9a520": replacements.rms_norm}
_MLPS = {
    # ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, by way of a variable and at once.
    "054836297e76c35300f38c2c34570cc1817a980b8e556862f9d05134300f9be7": replacements.gated_mlp,
    "548a505913086122ddd6d272ac293d1ec0da0692352930dfd18242fe48a38b8b": replacements.gated_mlp,
    # The same of the two halves of ``gate_up_proj(x)``.
    "7fe71be2cc49abe13d55d10136915709392465e4a0ad1febebcf86f145a1b7a1": replacements.joined_mlp,
}
_ROTATIONS = {
    # ``q * cos + rotate_half(q) * sin``, and so for k.
    "5c512eaee8adfce5bb118d0a6ae7d4a8d0531b96ba508496782a2839bf2e1c84": replacements.rope,
    # The same, cast to the dtypes of q and k.
    "bece90e1691b797048f14475f6bffff75c730b189b76c41ca69e3eb9ca4525b2": replacements.rope_cast_back,
}
# ``cat((-second half, first half))``.
_ROTATE_HALF = "6bb1d912795ebafbd980d054c74f863791fed174c6fee5abb5d3a79b7756d119"


class Module:
    """The classes and functions of a module's text, which is not executed."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        body = ast.parse(text).body
        self.functions = {x.name: x for x in body if isinstance(x, ast.FunctionDef)}
        self.classes = {x.name: x for x in body if isinstance(x, ast.ClassDef)}
        self.forwards = {
            kind: method
            for kind, definition in self.classes.items()
            for method in definition.body
            if isinstance(method, ast.FunctionDef) and method.name == "forward"
        }

    @functools.cached_property
    def norms(self) -> dict[str, Callable[..., Any]]:
        """The classes that are norms of a known form, each with its replacement."""
        return self._shaped(_NORMS, "Norm")

    @functools.cached_property
    def mlps(self) -> dict[str, Callable[..., Any]]:
        """The classes that are MLPs of a known form, each with its replacement."""
        return self._shaped(_MLPS, "")

    def _shaped(self, forms: dict[str, Callable[..., Any]], part: str) -> dict[str, Callable[..., Any]]:
        small = {kind: x for kind, x in self.forwards.items() if part in kind and len(x.body) < 8}
        shapes = {kind: shape_of(x) for kind, x in small.items() if not x.decorator_list}
        return {kind: forms[shape] for kind, shape in shapes.items() if shape in forms}

    @functools.cached_property
    def rotation(self) -> Callable[..., Any] | None:
        """The replacement of ``apply_rotary_pos_emb``, where that turns halves by angles that are stored twice."""
        function, half = self.functions.get("apply_rotary_pos_emb"), self.functions.get("rotate_half")
        if function is None or half is None or shape_of(half) != _ROTATE_HALF or not self.rotaries:
            return None
        return _ROTATIONS.get(shape_of(function))

    @functools.cached_property
    def rotaries(self) -> list[str]:
        """The classes that make the text's angles, where all of them store each twice; else none."""
        found = [kind for kind in self.forwards if "Rotary" in kind and "Vision" not in kind]
        return found if all(patterns.stores_twice(self.classes[kind]) for kind in found) else []

    def attributes(self, kind: str) -> dict[str, str]:
        """Of which of the module's norms each attribute is that ``__init__`` of a class sets."""
        found: dict[str, str | None] = {}
        for node in ast.walk(self.classes[kind]):
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
                continue
            name, call = node.targets[0].attr, node.value
            made = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
            found[name] = made if found.get(name, made) == made else None
        return {name: made for name, made in found.items() if made in self.norms}

    def callers(self, function: str) -> list[str]:
        """The methods that call a function of the module."""
        return [
            f"{kind}.{method.name}"
            for kind, definition in self.classes.items()
            for method in definition.body
            if isinstance(method, ast.FunctionDef)
            and any(isinstance(x, ast.Name) and x.id == function for x in ast.walk(method))
        ]

    def digest(self, path: str) -> str:
        """The digest of the function at a path."""
        kind, _, method = path.partition(".")
        return digest_of_tree(self.forwards[kind] if method else self.functions[kind])


def patches_of(module: Module, model_type: str) -> list[Patch]:
    """What in a module has one of the forms, in the order of :data:`OPS`."""
    row = partial(_row, module, model_type)
    forwards = [("rms_norm", module.norms), ("swiglu", module.mlps)]
    found = [row(op, f"{kind}.forward", make) for op, kinds in forwards for kind, make in kinds.items()]
    if module.rotation is not None:
        angles = ("rotate_half", *(f"{kind}.forward" for kind in module.rotaries))
        for kind in module.forwards:
            norms = _names({"q_norm", "k_norm"}, module.attributes(kind))
            if len(norms) == 2 and _has(module, kind, patterns.qk_norm_rope):
                relied = (*_forwards(norms), "apply_rotary_pos_emb", *angles)
                make = partial(layers.qk_norm_rope, norms=norms)
                found.append(row("qk_norm_rope", f"{kind}.forward", make, relied, covers=("rope",)))
        callers = tuple(module.callers("apply_rotary_pos_emb"))
        found.append(row("rope", "apply_rotary_pos_emb", module.rotation, angles, callers=callers))
    for kind in module.forwards:
        norms = module.attributes(kind)
        if norms and _has(module, kind, partial(patterns.add_norm, norms=norms)):
            make = partial(layers.fused_add_rms_norm, norms=norms)
            found.append(row("fused_add_rms_norm", f"{kind}.forward", make, _forwards(norms)))
    heads = [kind for kind in module.forwards if _has(module, kind, patterns.head_and_loss)]
    return [*found, *(row(OPS[-1], f"{kind}.forward", loss.fused_linear_cross_entropy) for kind in heads)]


def _row(
    module: Module, model_type: str, op: str, path: str, make: Callable[..., Any], relies_on: Iterable[str] = (),
    **more: Any,
) -> Patch:  # fmt: skip
    relied = tuple((other, (module.digest(other),)) for other in relies_on)
    return Patch(op, model_type, module.name, path, make, (module.digest(path),), relied, **more)


def _names(wanted: Iterable[str], norms: dict[str, str]) -> dict[str, str]:
    return {name: norms[name] for name in sorted(wanted) if name in norms}


def _forwards(norms: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{kind}.forward" for kind in dict.fromkeys(norms.values()))


def _has(module: Module, kind: str, pattern: Callable[[ast.FunctionDef], int]) -> bool:
    """Whether the forward of a class has a pattern's statements."""
    copied = ast.parse(ast.unparse(module.forwards[kind])).body[0]
    return isinstance(copied, ast.FunctionDef) and pattern(copied) > 0


@functools.cache
def patches_in(name: str, model_type: str) -> tuple[Patch, ...]:
    """What in an installed module has one of the forms; nothing where its source is not at hand."""
    path = path_of(name)
    try:
        return tuple(patches_of(Module(name, path.read_text(encoding="utf-8")), model_type)) if path else ()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ()


def path_of(name: str) -> Path | None:
    """Where a module's source is; one that is not imported is not imported for it, and lies in its package's folder."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
        return Path(file) if file else None
    package, *parts = name.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*parts).with_suffix(".py")
    return path if path.exists() else None
