"""Replace statements of a function by a call, in the function's own text; all other code stays.

Each pattern changes a definition in place and returns the number of replacements. Code that it does not recognise
exactly is left alone: an extra statement in between, or a result that is used differently. ``norms``, ``linears`` and
``activations`` are the attributes of ``self`` that hold such modules; ``rotation`` is the function that rotates.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

# Names under which a changed function calls the replacements.
ADD_NORM, NORM_ADD, NORM_ADD_NORM = "tilekern_add_norm", "tilekern_norm_add", "tilekern_norm_add_norm"
TURNED, TURNED_ALONE = "tilekern_turned", "tilekern_turned_alone"
SERVES, LOSS, CACHED = "tilekern_serves", "tilekern_loss", "tilekern_cached"
TIED = "tilekern_tied"
NORMED, ROTATED, PROJECTED, MLP = "tilekern_normed", "tilekern_rotated", "tilekern_projected", "tilekern_mlp"
SKIPPED, WHOLE = "tilekern_skipped", "tilekern_whole"
# Argument added to a forward whose logits may be skipped.
SKIP_LOGITS = "skip_logits"
# Arguments with which transformers' releases hand on a cache.
CACHES = ("cache", "past_key_values", "cache_position")
# Numbers that a layer may hand to its attention.
_HANDED = ("sliding_window", "softcap")
# Operations on logits that do not change their loss.
_SAME_LOGITS = (").float()", ").contiguous()")
_UNUSED, _NORMAL, _TIE = "tilekern_sum", "tilekern_normal", "tilekern_tie"
_DROPOUTS = ("nn.functional.dropout", "torch.nn.functional.dropout", "F.dropout")
# Expressions that may skip a part of a statement or run it later.
_NOT_AT_ONCE = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.Compare, ast.comprehension, ast.NamedExpr)


def sums_and_norms(function: ast.FunctionDef, norms: Collection[str]) -> int:
    """Replace sums with their norm, sums with a norm as one term, and sums with both."""
    return add_norm(function, norms) + norm_add(function, norms)


def add_norm(function: ast.FunctionDef, norms: Collection[str]) -> int:
    """Replace a sum and its norm: ``a = x + y``, optionally ``residual = a``, then ``b = self.norm(a)``.

    The norm may be inside the last statement: ``b = a + self.mlp(self.norm(a))``. An ``if`` may follow the sum, such as
    GPT-2's for cross attention; if its test is true, the original steps run.
    """
    number = 0
    for body in _bodies(function):
        place = 0
        while place < len(body):
            changed = _sum_and_norm(body[place : place + 3], norms) or _parted(body[place : place + 4], norms)
            if changed is not None:
                statements, length = changed
                body[place : place + length] = statements
                number += 1
            place += 1
    return number


def _sum_and_norm(statements: list[ast.stmt], norms: Collection[str]) -> tuple[list[ast.stmt], int] | None:
    total, value = _assigned(statements[0])
    if total is None or not (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)):
        return None
    kept, length = None, 2
    if len(statements) == 3:
        name, source = _assigned(statements[1])
        if name is not None and isinstance(source, ast.Name) and source.id == total:
            kept, length = name, 3
    if len(statements) < length:
        return None
    last, sums = statements[length - 1], [name for name in (kept, total) if name is not None]
    call = _norm_of(last, norms, sums)
    if call is None:
        return None
    normed, whole = _assigned(last)
    if whole is not call:
        normed = _NORMAL
    elif normed is None or normed == kept:
        return None
    names = [name for name in sums if name != normed]
    called = f"{names[0] if names else _UNUSED}, {normed} = {ADD_NORM}(0, 0, self.{_own_call(call)})"
    first = _statement(called, statements[0])
    _called(first, ADD_NORM).args[:2] = [value.left, value.right]
    rest = (
        [] if whole is call else [_Exchanged(call, ast.copy_location(ast.Name(_NORMAL, ast.Load()), call)).visit(last)]
    )
    return [first, *[_statement(f"{name} = {names[0]}", statements[0]) for name in names[1:]], *rest], length


def _parted(statements: list[ast.stmt], norms: Collection[str]) -> tuple[list[ast.stmt], int] | None:
    """Fuse a sum of two variables and its norm around an ``if`` whose test reads neither the terms nor the sum."""
    if len(statements) < 3 or not isinstance(asked := statements[1], ast.If) or asked.orelse:
        return None
    first, rest = statements[0], statements[2:]
    total, value = _assigned(first)
    terms = [value.left, value.right] if isinstance(value, ast.BinOp) else []
    names = [total, *(x.id for x in terms if isinstance(x, ast.Name))]
    nodes = [x for x in ast.walk(asked.test) if isinstance(x, ast.expr)]
    if len(names) != 3 or any(isinstance(x, ast.Name) and x.id in names for x in nodes):
        return None
    if not all(isinstance(x, ast.Compare | ast.Name | ast.Constant) for x in nodes):
        return None
    found = _sum_and_norm(copy.deepcopy([first, *rest]), norms)
    if found is None:
        return None
    changed, length = found
    before = [copy.deepcopy(first), *asked.body, *copy.deepcopy(rest[: length - 1])]
    return [ast.copy_location(ast.If(asked.test, before, changed), asked)], length + 1


def _norm_of(statement: ast.stmt, norms: Collection[str], names: Collection[str]) -> ast.Call | None:
    """Return the call of a norm of one of ``names``, if all other calls in the statement use its result."""
    nodes = list(ast.walk(statement))
    at_once = isinstance(statement, ast.Assign | ast.AnnAssign)
    if not at_once or any(isinstance(x, _NOT_AT_ONCE) for x in nodes):
        return None
    calls = [x for x in nodes if isinstance(x, ast.Call)]
    found = [x for x in calls if _own_call(x) in norms and _argument(x) in names]
    if len(found) != 1 or not all(any(y is found[0] for y in ast.walk(x)) for x in calls):
        return None
    return found[0]


def norm_add(function: ast.FunctionDef, norms: Collection[str]) -> int:
    """Replace a norm and its sum with a variable: ``x = self.norm(x)``, then ``x = residual + x``.

    The sum may already be changed by :func:`add_norm`. The norm's result must have no other use.
    """
    number = 0
    for body in _bodies(function):
        for place in range(len(body) - 2, -1, -1):
            changed = _norm_and_sum(body[place:], norms, function)
            if changed is not None:
                body[place : place + 2] = [changed]
                number += 1
    return number


def _norm_and_sum(statements: list[ast.stmt], norms: Collection[str], function: ast.FunctionDef) -> ast.stmt | None:
    normed, call = _assigned(statements[0])
    if normed is None or not isinstance(call, ast.Call) or _own_call(call) not in norms:
        return None
    if len(call.args) != 1 or call.keywords or any(isinstance(x, ast.Starred | ast.NamedExpr) for x in ast.walk(call)):
        return None
    terms, following = _terms(statements[1])
    names = [x.id for x in terms if isinstance(x, ast.Name)]
    if len(names) != 2 or names.count(normed) != 1 or not _is_dead(normed, statements, function):
        return None
    residual = terms[1 - names.index(normed)]
    changed = copy.deepcopy(statements[1])
    assert isinstance(changed, ast.Assign | ast.AnnAssign)
    name = ast.Name(NORM_ADD_NORM if following else NORM_ADD, ast.Load())
    changed.value = ast.copy_location(ast.Call(name, [residual, call.args[0], call.func, *following], []), changed)
    return changed


def _terms(statement: ast.stmt) -> tuple[list[ast.expr], list[ast.expr]]:
    """Return the two terms of a sum, and its norm if :func:`add_norm` has replaced it."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.Call) and _text(value.func) == ADD_NORM:
        return value.args[:2], value.args[2:]
    if _assigned(statement)[0] is not None and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return [value.left, value.right], []
    return [], []


def _is_dead(name: str, statements: list[ast.stmt], function: ast.FunctionDef) -> bool:
    """Return whether only the second statement reads the variable that the first one sets."""
    for statement in statements[1:]:
        copied = _assigned(statement)[1]
        is_copy = isinstance(copied, ast.Name) and copied.id != name
        if statement is not statements[1] and not is_copy:
            break
        if any(isinstance(x, ast.Name) and x.id == name and isinstance(x.ctx, ast.Store) for x in ast.walk(statement)):
            return True
    return _uses([function], name) == 2


class _Exchanged(ast.NodeTransformer):
    def __init__(self, call: ast.Call, value: ast.expr) -> None:
        self.call, self.value = call, value

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.value if node is self.call else self.generic_visit(node)


def normed(function: ast.FunctionDef, norms: Collection[str]) -> int:
    """Replace calls of norms, ``self.norm(x)`` with one argument, anywhere in the text."""
    calls = [x for x in _calls(function) if _own_call(x) in norms and len(x.args) == 1 and not x.keywords]
    calls = [x for x in calls if not isinstance(x.args[0], ast.Starred)]
    for call in calls:
        call.args.insert(0, call.func)
        call.func = ast.copy_location(ast.Name(NORMED, ast.Load()), call)
    return len(calls)


def mlp(function: ast.FunctionDef, linears: Collection[str], activations: Collection[str]) -> int:
    """Replace ``self.down(self.act(self.up(x)))`` in one or more statements, also with dropout before ``down``."""
    body = function.body
    for place, statement in enumerate(body):
        calls = [x for x in ast.walk(statement) if isinstance(x, ast.Call)]
        for call in [x for x in calls if _own_call(x) in linears]:
            found = _chain_before(body, place, call, linears, activations)
            if found is not None:
                first, activation, up, given, dropout = found
                call.args, call.keywords = [up, activation, call.func, given], dropout
                call.func = ast.copy_location(ast.Name(MLP, ast.Load()), call)
                del body[first:place]
                return 1
    return 0


def _chain_before(
    body: list[ast.stmt], place: int, call: ast.Call, linears: Collection[str], activations: Collection[str]
) -> tuple[int, ast.expr, ast.expr, ast.expr, list[ast.keyword]] | None:
    """Return the index of the first statement that computes the argument of ``down``, and the parts of the MLP.

    The parts are the activation, ``up``, its argument, and the dropout in between as a keyword argument, if any.
    """
    value, first = _given_to(call, body, place)
    dropout = _dropout(value)
    if dropout:
        value, first = _given_to(ast.Call(value.func, value.args, []), body, first)
    if _own_call(value) not in activations:
        return None
    inner, first = _given_to(value, body, first)
    if _own_call(inner) not in linears or _given_to(inner, body, 0)[0] is None:
        return None
    last = body[place]
    target = _assigned(last)[0]
    whole = last.value if isinstance(last, ast.Return | ast.Assign | ast.AnnAssign) else None
    set_before = {_assigned(x)[0] for x in body[first:place]} - {target}
    if first < place and (whole is not call or any(_uses(body[place + 1 :], name) for name in set_before if name)):
        return None
    return first, value.func, inner.func, inner.args[0], dropout


def _dropout(value: Any) -> list[ast.keyword]:
    """Return the rate of ``dropout(x, p=rate, training=self.training)`` as a keyword argument."""
    if not isinstance(value, ast.Call) or _text(value.func) not in _DROPOUTS:
        return []
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    if given.keys() != {"p", "training"} or _text(given["training"]) != "self.training":
        return []
    share = ast.IfExp(given["training"], given["p"], ast.Constant(0.0))
    return [ast.copy_location(ast.keyword("dropout", share), value)]


def _given_to(call: Any, body: list[ast.stmt], place: int) -> tuple[Any, int]:
    """Return a call's only argument and its place; if it is a variable set by the statement before, that value."""
    if len(call.args) != 1 or call.keywords or isinstance(call.args[0], ast.Starred):
        return None, place
    given = call.args[0]
    if isinstance(given, ast.Name) and place > 0:
        name, value = _assigned(body[place - 1])
        if name == given.id:
            return value, place - 1
    return given, place


def qk_norm_rope(function: ast.FunctionDef, norms: Collection[str], rotation: str) -> int:
    """Replace the norms of each head of q and k and their rotation ``q, k = rotation(q, k, ...)`` in a forward.

    The norms ``q = self.q_norm(q)`` are before the rotation (possibly in the statement that makes q, or with a
    transpose of tokens and heads) or right after it. Norms or rotation may be under a condition. The layers that make
    q, k and v from one input are called together if they are in the forward too. Alternatively q and k have a statement
    each, ``q = rotation(q, ...)``, with k's in the ``else`` of a condition (:func:`_normed_apart`).
    """
    for body in _bodies(function):
        for place in range(len(body)):
            turn = _rotated(body[place], rotation)
            if turn is None:
                continue
            if _normed_before(body, place, turn, norms) or _normed_after(body, place, turn, norms):
                projected(function)
                return 1
        if _normed_apart(body, norms, rotation):
            return 1
    return 0


class _Single(NamedTuple):
    """Two statements from ``place`` on: ``x = self.norm(x)`` and ``x = rotation(x, *angles, unsqueeze_dim=2)``."""

    place: int
    name: str
    norm: str
    angles: tuple[str, ...]


def _singles(body: list[ast.stmt], norms: Collection[str], rotation: str) -> list[_Single]:
    """Return the variables that are normalised and rotated on their own."""
    found = []
    for place, (name, value) in enumerate(map(_assigned, body[:-1])):
        turned, call = _assigned(body[place + 1])
        if name is None or name != turned or name != _argument(value) or not isinstance(call, ast.Call):
            continue
        given = tuple(_text(x) for x in (*call.args, *call.keywords))
        known = _text(call.func) == rotation and given[0] == name and given[-1] == "unsqueeze_dim=2"
        if known and (norm := _own_call(value)) in norms and all(x.isidentifier() for x in given[1:-1]):
            found.append(_Single(place, name, str(norm), given[1:-1]))
    return found


def _normed_apart(body: list[ast.stmt], norms: Collection[str], rotation: str) -> bool:
    """Move q's norm and rotation next to k's, which are in the ``else`` of a condition on an attribute of ``self``.

    Other statements on q before the condition move into both branches. In the ``if`` branch q is rotated alone.
    """
    for q in _singles(body, norms, rotation):
        last = next((i for i, x in enumerate(body) if i > q.place + 1 and _assigned(x)[0] != q.name), q.place)
        asked, moved = body[last], body[q.place : last]
        if not isinstance(asked, ast.If) or not _is_own(asked.test) or _uses(asked.orelse, q.name):
            continue
        turned = [k for k in _singles(asked.orelse, norms, rotation) if k.angles == q.angles]
        read = {x.id for part in moved[2:] for x in ast.walk(part) if isinstance(x, ast.Name)}
        if len(turned) != 1 or read - {q.name} or _stores(asked.orelse, q.angles):
            continue
        k, angles = turned[0], ", ".join(q.angles)
        alone = _statement(f"{q.name} = {TURNED_ALONE}(self.{q.norm}, {q.name}, {angles})", moved[0])
        fused = f"{q.name}, {k.name} = {TURNED}(self.{q.norm}, self.{k.norm}, {q.name}, {k.name}, {angles})"
        asked.orelse[k.place : k.place + 2] = [_statement(fused, asked.orelse[k.place]), *copy.deepcopy(moved[2:])]
        asked.body[:0] = [alone, *moved[2:]]
        del body[q.place : last]
        return True
    return False


def _is_own(test: ast.expr) -> bool:
    """Return whether an expression is an attribute of ``self``."""
    return isinstance(test, ast.Attribute) and _text(test.value) == "self"


def _stores(statements: list[ast.stmt], names: Collection[str | None]) -> bool:
    """Return whether statements set one of the variables."""
    nodes = (x for statement in statements for x in ast.walk(statement))
    return any(isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.id in names for x in nodes)


class _Turn(NamedTuple):
    """A rotation ``q, k = rotation(q, k, ...)``: the call, and the condition around it, if any."""

    q: str
    k: str
    call: ast.Call
    condition: ast.If | None

    def fused(self, norms: tuple[str, str], **said: bool) -> str:
        """Return the call that replaces the rotation and the norms of q and k."""
        more = [_text(x) for x in self.call.args[2:]] + [f"{name}={value}" for name, value in said.items()]
        of = f"self.{norms[0]}, self.{norms[1]}, {self.q}, {self.k}"
        return f"{self.q}, {self.k} = {TURNED}({', '.join((of, *more))})"

    def alone(self) -> str:
        """Return the call of the rotation by itself."""
        return f"{self.q}, {self.k} = {ROTATED}({', '.join(_text(x) for x in self.call.args)})"


def _rotated(statement: ast.stmt, rotation: str) -> _Turn | None:
    """Return the rotation of a statement: the statement itself, or the last one of an ``if`` without ``else``."""
    condition = statement if isinstance(statement, ast.If) and not statement.orelse else None
    last = statement if condition is None else condition.body[-1]
    if not isinstance(last, ast.Assign) or not isinstance(last.targets[0], ast.Tuple) or len(last.targets) > 1:
        return None
    names, call = [_text(x) for x in last.targets[0].elts], last.value
    if not isinstance(call, ast.Call) or _text(call.func) != rotation or call.keywords or len(names) != 2:
        return None
    if not all(name.isidentifier() for name in names) or [_text(x) for x in call.args[:2]] != names:
        return None
    if condition is not None and any(_uses([*condition.body[:-1], condition.test], name) for name in names):
        return None
    return _Turn(names[0], names[1], call, condition)


class _Before(NamedTuple):
    """The norms of q and k before a rotation.

    ``layout`` is empty if q and k are transposed somewhere else, ``swapped`` if the transpose of tokens and heads is
    behind the norms, ``behind`` if the norms are behind it. ``asked`` is the condition around the norms, if any.
    ``changes`` are pairs of a statement and its replacement without the norms, and without such a transpose.
    """

    names: tuple[str, str]
    layout: str
    asked: ast.If | None
    changes: list[tuple[ast.stmt, list[ast.stmt]]]


def _norms_before(statements: list[ast.stmt], turn: _Turn, norms: Collection[str]) -> _Before | None:
    """Return the norms of q and k before a rotation; None if q or k is used differently in between."""
    found: dict[str, str] = {}
    swapped = dict.fromkeys((turn.q, turn.k), False)
    changes: list[tuple[ast.stmt, list[ast.stmt]]] = []
    asked = None
    for statement in reversed(statements):
        named = [name for name in swapped if name not in found and _uses([statement], name)]
        if not found and isinstance(statement, ast.If) and _is_norms(statement, turn, norms):
            asked, found = statement, _norms_in(statement.body, norms)
            changes.append((statement, []))
        elif named:
            norm, others = _without_norm(statement, norms, swapped)
            if [_assigned(statement)[0]] != named or others is None:
                return None
            if norm is not None:
                found[named[0]] = norm
            changes.append((statement, others))
        if len(found) == 2:
            break
    if len(found) < 2 or swapped[turn.q] != swapped[turn.k]:
        return None
    names, layout = (found[turn.q], found[turn.k]), "swapped" if swapped[turn.q] else ""
    transposes = None if layout else _transposes_before(statements, turn, [x for x, _ in changes])
    return (
        _Before(names, "behind", asked, changes + transposes) if transposes else _Before(names, layout, asked, changes)
    )


def _transposes_before(
    statements: list[ast.stmt], turn: _Turn, readers: list[ast.stmt]
) -> list[tuple[ast.stmt, list[ast.stmt]]] | None:
    """Return the last statements on q and on k before some that read them, and what they are without a transpose.

    Return None unless both end with a transpose of tokens and heads.
    """
    changes = []
    for name, other in ((turn.q, turn.k), (turn.k, turn.q)):
        first = next(i for i, x in enumerate(statements) if x in readers and _uses([x], name))
        made = next((x for x in reversed(statements[:first]) if _uses([x], name)), None)
        target, value = (None, None) if made is None else _assigned(made)
        value, transposed = _untransposed(value)
        if made is None or value is None or target != name or not transposed or _uses([made], other):
            return None
        text = f"{name} = {_text(value)}"
        changes.append((made, [] if text == f"{name} = {name}" else [_statement(text, made)]))
    return changes


def _without_norm(
    statement: ast.stmt, norms: Collection[str], swapped: dict[str, bool]
) -> tuple[str | None, list[ast.stmt] | None]:
    """Return the norm in a statement that makes q or k, and the statements left without it; else None, None.

    A transpose of tokens and heads, which may be all that the statement does, is left out too; ``swapped`` records it.
    """
    name, value = _assigned(statement)
    value, transposed = _untransposed(value)
    if name not in swapped or any(_uses([statement], other) for other in swapped if other != name):
        return None, None
    if transposed and swapped[name]:
        return None, None
    swapped[name] |= transposed
    norm = _own_call(value)
    if norm in norms and isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords:
        text = f"{name} = {_text(value.args[0])}"
        return norm, [] if text == f"{name} = {name}" else [_statement(text, statement)]
    return None, [] if transposed and value is not None and _text(value) == name else None


def _normed_before(body: list[ast.stmt], place: int, turn: _Turn, norms: Collection[str]) -> bool:
    """Replace a rotation and the norms of q and k before it by one call."""
    before, first = _norms_before(body[:place], turn, norms), body[place]
    named = all(isinstance(x, ast.Name) for x in turn.call.args)
    if before is None or not named or (before.asked is not None and turn.condition is not None):
        return False
    fused = turn.fused(before.names, **({before.layout: True} if before.layout else {}))
    # Of the layout in which q and k are made, that in which they are rotated.
    turns = [f"{x} = {x}{_SWAP}" for x in turn[:2]] if before.layout else []
    if before.asked is not None:
        rest = "\n    ".join([*turns, turn.alone()])
        made = _statement(f"if {_text(before.asked.test)}:\n    {fused}\nelse:\n    {rest}", first)
        before.changes.append((first, [made]))
    elif turn.condition is None:
        before.changes.append((first, [_statement(fused, first)]))
    else:
        normed = [f"{x} = self.{norm}({x})" for x, norm in zip(turn[:2], before.names, strict=True)]
        turn.condition.body[-1] = _statement(fused, first)
        alone = [*normed, *turns] if before.layout == "swapped" else [*turns, *normed]
        turn.condition.orelse = [_statement(text, first) for text in alone]
    _exchange(body, before.changes)
    return True


def _exchange(body: list[ast.stmt], changes: list[tuple[ast.stmt, list[ast.stmt]]]) -> None:
    """Replace statements of a body by others."""
    for statement, others in changes:
        at = next(i for i, x in enumerate(body) if x is statement)
        body[at : at + 1] = others


def _normed_after(body: list[ast.stmt], place: int, turn: _Turn, norms: Collection[str]) -> bool:
    """Replace a rotation and the norms of q and k right after it by one call."""
    last = body[place + 1 : place + 2]
    asked = last[0] if last and isinstance(last[0], ast.If) else None
    behind = body[place + 1 : place + 3] if asked is None else asked.body
    found = _norms_in(behind, norms)
    if found.keys() != {turn.q, turn.k} or len(behind) != 2 or (asked is None) != (turn.condition is None):
        return False
    first, called = body[place], (found[turn.q], found[turn.k])
    if asked is None or turn.condition is None:
        transposes = _transposes_before(body[: place + 1], turn, [first])
        fused = turn.fused(called, norm_last=True, **({"behind": True} if transposes else {}))
        body[place : place + 3] = [_statement(fused, first)]
        _exchange(body, transposes or [])
        return True
    fused = turn.fused(called, norm_last=True)
    tests = [_text(x.test) for x in (turn.condition, asked)]
    told = all(x.startswith(("self.", "hasattr(self, ")) for x in tests)
    if asked.orelse or len(turn.condition.body) > 1 or not told:
        return False
    turn.condition.body[0] = _statement(turn.alone(), first)
    made = _statement(f"if {tests[0]} and {tests[1]}:\n    {fused}\nelse:\n    pass", first)
    assert isinstance(made, ast.If)
    made.orelse = [turn.condition, asked]
    body[place : place + 2] = [made]
    return True


# Transposes [batch, heads, tokens, ...] to [batch, tokens, heads, ...] and back.
_SWAP = ".transpose(1, 2)"


def _untransposed(value: ast.expr | None) -> tuple[ast.expr | None, bool]:
    """Return the value before a transpose of tokens and heads, or the value itself."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        swaps = f".{value.func.attr}({', '.join(map(_text, value.args))})" == _SWAP and not value.keywords
        return (value.func.value, True) if swaps else (value, False)
    return value, False


def _is_norms(statement: ast.stmt, turn: _Turn, norms: Collection[str]) -> bool:
    """Return whether a statement is the norms of q and k under a condition on an attribute of ``self``."""
    if not isinstance(statement, ast.If) or statement.orelse or len(statement.body) != 2:
        return False
    return _is_own(statement.test) and _norms_in(statement.body, norms).keys() == {turn.q, turn.k}


def _norms_in(statements: list[ast.stmt], norms: Collection[str]) -> dict[str, str]:
    """Return the norm of each variable ``x`` in statements ``x = self.norm(x)``."""
    found = {}
    for name, value in map(_assigned, statements):
        norm = _own_call(value)
        if name is not None and norm in norms and _argument(value) == name:
            found[name] = str(norm)
    return found


def projected(function: ast.FunctionDef) -> int:
    """Replace ``self.q_proj(x)``, ``self.k_proj(x)`` and ``self.v_proj(x)`` in three statements by one call."""
    layers = {f"{kind}_proj": f"tilekern_{kind}" for kind in "qkv"}
    for body in _bodies(function):
        made: dict[str, tuple[int, ast.Call]] = {}
        for place, statement in enumerate(body):
            whole = isinstance(statement, ast.Assign | ast.AnnAssign)
            if whole and not any(isinstance(x, _NOT_AT_ONCE) for x in ast.walk(statement)):
                calls = [x for x in ast.walk(statement) if isinstance(x, ast.Call) and _argument(x)]
                made |= {layer: (place, x) for x in calls if (layer := _own_call(x)) and layer in layers}
        if made.keys() != layers.keys() or len({_argument(call) for _, call in made.values()}) != 1:
            continue
        given, first = _argument(made["q_proj"][1]), min(place for place, _ in made.values())
        last = max(place for place, _ in made.values())
        if _stores(body[first:last], {given}):
            continue
        for layer, (place, call) in made.items():
            name = ast.copy_location(ast.Name(layers[layer], ast.Load()), call)
            body[place] = _Exchanged(call, name).visit(body[place])
        text = f"{', '.join(layers.values())} = {PROJECTED}(self, {given})"
        body.insert(first, _statement(text, body[first]))
        return 1
    return 0


def whole(function: ast.FunctionDef) -> int:
    """Return what a function makes of the arguments of a layer, unless it makes nothing, before the first statement."""
    x, told = function.args.args[1].arg, _keywords(function)
    caches = [arg.arg for arg in function.args.args if arg.arg in CACHES]
    if function.args.kwarg is None:
        return 0
    given = f"{{{', '.join(f'{name!r}: {name}' for name in caches)}}} | {function.args.kwarg.arg}"
    called = f"{WHOLE}_made = {WHOLE}(self, {x}, {told['attention_mask']}, {told['position_embeddings']}, {given})"
    first = _first(function)
    place = function.body[first]
    returned = _statement(f"if {WHOLE}_made is not None:\n    return {WHOLE}_made", place)
    function.body[first:first] = [_statement(called, place), returned]
    return 1


def _first(function: ast.FunctionDef) -> int:
    """Return the place of the first statement that is no docstring."""
    return 0 if ast.get_docstring(function, clean=False) is None else 1


def uncached(function: ast.FunctionDef) -> ast.FunctionDef:
    """Return a function without window and soft cap, without defaults, and without what releases write for a cache."""
    made: ast.FunctionDef = _Uncached().visit(copy.deepcopy(function))
    return made


def handed(function: ast.FunctionDef) -> tuple[str, ...]:
    """Return the expressions of window and soft cap that a function hands to attention; empty for one that it lacks."""
    found = _keywords(function)
    return tuple(found.get(name, "") for name in _HANDED)


def _keywords(function: ast.FunctionDef) -> dict[str | None, str]:
    """Return the expressions that a function's calls hand on by keyword."""
    return {x.arg: ast.unparse(x.value) for x in ast.walk(function) if isinstance(x, ast.keyword)}


class _Uncached(ast.NodeTransformer):
    def visit_arguments(self, node: ast.arguments) -> ast.arguments:
        node.args, node.defaults = [arg for arg in node.args if arg.arg not in CACHES], []
        return node

    def visit_If(self, node: ast.If) -> ast.If | None:
        asked = ast.unparse(node.test)
        return None if not node.orelse and asked in {f"{name} is not None" for name in CACHES} else node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword | None:
        return None if node.arg in (*CACHES, *_HANDED) else node


def head_and_loss(function: ast.FunctionDef) -> int:
    """Replace ``logits = self.lm_head(x)`` and their loss: in training one call computes the loss without logits.

    The function gets an additional argument ``skip_logits``. Between head and loss the logits may be multiplied,
    divided, or capped by a number of the configuration. A forward that returns a tuple on request makes logits in this
    case.
    """
    body, names = function.body, {x.arg for x in ast.walk(function.args) if isinstance(x, ast.arg)}
    for place, statement in enumerate(body):
        logits, value = _assigned(statement)
        call, scale = _scaled_call(value)
        head = _own_call(call)
        if logits is None or head is None or call is None or len(call.args) != 1 or call.keywords:
            continue
        found = _loss_after(body, place + 1, logits, scale)
        if found is None or "labels" not in names or _uses([*body[:place], call], logits) or SKIP_LOGITS in names:
            continue
        end, loss, arguments, settings = found
        # Statements that return a tuple if the caller sets return_dict to False.
        asking = [x for x in body[end:] if isinstance(x, ast.If) and not x.orelse]
        tuples: list[ast.stmt] = [
            x for x in asking if _text(x.test) == "not return_dict" and isinstance(x.body[-1], ast.Return)
        ]
        if not _only_returned([x for x in body[end:] if x not in tuples], logits):
            continue
        keep = "logits_to_keep" if "logits_to_keep" in names else "0"
        served = _statement(
            f"if {'return_dict and ' if tuples else ''}{SERVES}(self, self.{head}, labels, {keep}, {SKIP_LOGITS}):\n"
            f"    {logits} = {SKIPPED}\n"
            f"    {loss} = {LOSS}(self.{head}, 0)\n"
            "else:\n    pass",
            statement,
        )
        assert isinstance(served, ast.If)
        made = _called(served, LOSS)
        made.args[1], made.keywords = copy.deepcopy((call.args[0], arguments))
        served.orelse = [x for x in body[place:end] if x not in settings]
        body[place:end] = [*settings, served]
        if _tie(body, place, head):
            made.keywords.append(
                ast.copy_location(ast.keyword("tied", ast.copy_location(ast.Name(_TIE, ast.Load()), made)), made)
            )
        function.args.kwonlyargs.append(ast.arg(SKIP_LOGITS))
        function.args.kw_defaults.append(ast.Constant(None))
        _leave_out_cache(function, names)
        return 1
    return 0


def _tie(body: list[ast.stmt], place: int, head: str) -> bool:
    """Run the model, before the statement at ``place``, as one whose head may be its embedding; return whether it runs.

    That is the first call of a part of the model with its input.
    """
    for at, statement in enumerate(body[:place]):
        _, value = _assigned(statement)
        if value is not None and _own_call(value) and _uses([value], "input_ids"):
            text = f"with {TIED}(self, self.{head}, labels, {SKIP_LOGITS}) as {_TIE}:\n    pass"
            run = _statement(text, statement)
            assert isinstance(run, ast.With)
            run.body, body[at] = [statement], run
            return True
    return False


def _leave_out_cache(function: ast.FunctionDef, names: Collection[str]) -> None:
    """Let a forward that skips its logits make no cache of keys and values, unless it is given one or asked for one."""
    given = next((name for name in CACHES if name in names), None)
    if given is None or "use_cache" not in names:
        return
    first = _first(function)
    text = f"use_cache = {CACHED}(self, use_cache, {given}, labels, {SKIP_LOGITS})"
    function.body.insert(first, _statement(text, function.body[first]))


def _scaled_call(value: ast.expr | None) -> tuple[ast.Call | None, list[ast.keyword]]:
    """Return a call whose result may be cast to float32, made contiguous or multiplied, and the loss's ``factor``."""
    scale = []
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) and _text(value.right).startswith("self."):
        scale, value = [ast.keyword("factor", value.right)], value.left
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and _text(value).endswith(_SAME_LOGITS):
        # The loss is computed in float32 and row by row in any case.
        value = value.func.value
    return (value if isinstance(value, ast.Call) else None), scale


def _loss_after(
    body: list[ast.stmt], place: int, logits: str, options: list[ast.keyword]
) -> tuple[int, str, list[ast.keyword], list[ast.stmt]] | None:
    """Return the end of the loss after a head, its variable, its arguments, and the statements that set these.

    The last item lists the statements in between that set variables which the arguments name.
    """
    settings: list[ast.stmt] = []
    for end, statement in enumerate(body[place:], place + 1):
        option = _scale(statement, logits) or _softcap(statement, logits)
        loss = _loss(statement, logits)
        if loss is not None:
            return end, loss[0], [*options, *loss[1]], settings
        if option is not None and not options:
            options = [option]
        elif _is_setting(statement, logits):
            settings.append(statement)
        elif _text(statement) not in ("loss = None", f"{logits} = {logits}.float()"):
            return None
    return None


def _is_setting(statement: ast.stmt, logits: str) -> bool:
    """Return whether a statement reads a value of the configuration into a variable."""
    name, value = _assigned(statement)
    read = value is not None and _text(value).startswith(("self.config.", "getattr(self.config."))
    return read and name != logits and not _uses([statement], logits)


def _scale(statement: ast.stmt, logits: str) -> ast.keyword | None:
    """Return ``logits = logits * factor`` or ``/ divisor`` as an argument of the loss."""
    name, value = _assigned(statement)
    if name != logits or not isinstance(value, ast.BinOp) or _text(value.left) != logits:
        return None
    if not isinstance(value.op, ast.Mult | ast.Div) or not _text(value.right).startswith("self."):
        return None
    return ast.keyword("factor" if isinstance(value.op, ast.Mult) else "divisor", value.right)


def _softcap(statement: ast.stmt, logits: str) -> ast.keyword | None:
    """Return the cap of logits, from the configuration, a variable or an assignment in the test, as an argument."""
    if not isinstance(statement, ast.If) or statement.orelse or not isinstance(statement.test, ast.Compare):
        return None
    value = statement.test.left
    named, value = (value.target, value.value) if isinstance(value, ast.NamedExpr) else (value, value)
    cap = _text(named)
    if not _text(statement.test).endswith(" is not None") or not cap.endswith("final_logit_softcapping"):
        return None
    steps = [f"{logits} = {logits} / {cap}", f"{logits} = torch.tanh({logits})", f"{logits} = {logits} * {cap}"]
    return ast.keyword("softcap", value) if [_text(step) for step in statement.body] == steps else None


def _loss(statement: ast.stmt, logits: str) -> tuple[str, list[ast.keyword]] | None:
    """Return the variable and the other arguments of ``loss = self.loss_function(logits, labels, ...)`` with labels."""
    if not isinstance(statement, ast.If) or statement.orelse or _text(statement.test) != "labels is not None":
        return None
    name, call = _assigned(statement.body[0]) if len(statement.body) == 1 else (None, None)
    if name is None or _own_call(call) != "loss_function" or not isinstance(call, ast.Call) or len(call.args) > 3:
        return None
    first = zip(("logits", "labels", "vocab_size"), call.args, strict=False)
    arguments = [*(ast.keyword(argument, value) for argument, value in first), *call.keywords]
    texts = {argument.arg: _text(argument.value) for argument in arguments}
    if texts.get("logits") != logits or texts.get("labels") != "labels":
        return None
    return name, [argument for argument in arguments if argument.arg != "logits"]


def _only_returned(statements: list[ast.stmt], name: str) -> bool:
    """Return whether a variable is only returned, as the output's field ``logits``."""
    fields = [
        keyword.arg
        for statement in statements
        for part in ast.walk(statement)
        if isinstance(part, ast.Return) and isinstance(part.value, ast.Call)
        for keyword in part.value.keywords
        if isinstance(keyword.value, ast.Name) and keyword.value.id == name
    ]
    return fields == ["logits"] and _uses(statements, name) == 1


def _uses(nodes: Iterable[ast.AST], name: str) -> int:
    """Return how often a variable occurs."""
    return sum(isinstance(x, ast.Name) and x.id == name for node in nodes for x in ast.walk(node))


def stores_twice(rotary: ast.ClassDef, in_a_row: bool = False) -> bool:
    """Return whether a rotary embedding returns cosines and sines of angles doubled by ``cat((angles, angles))``.

    ``in_a_row``: doubled by ``repeat_interleave(angles, 2)``. A method ``recomposition_frequencies`` may double both.
    """
    methods = {x.name: x for x in rotary.body if isinstance(x, ast.FunctionDef)}
    forward, joined = methods.get("forward"), methods.get("recomposition_frequencies")
    if forward is None:
        return False
    methods_called = [x.func for x in _calls(forward) if isinstance(x.func, ast.Attribute) and not x.args]
    angles = {_text(x.value) for x in methods_called if x.attr in ("cos", "sin")}
    is_doubled = _is_repeated if in_a_row else _is_doubled
    doubled = {name for name, value in map(_assigned, _statements(forward)) if name and is_doubled(value)}
    if joined is None:
        return bool(angles) and angles <= doubled
    texts = [_text(x) for x in _statements(forward)]
    passed = all(f"{name} = self.recomposition_frequencies({name})" in texts for name in ("cos", "sin"))
    last = joined.body[-1]
    return passed and not doubled and isinstance(last, ast.Return) and is_doubled(last.value)


def _is_doubled(value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Call) or _text(value.func) != "torch.cat" or len(value.args) not in (1, 2):
        return False
    parts, last = value.args[0], [_text(x) for x in (*value.args[1:], *(k.value for k in value.keywords))]
    if not isinstance(parts, ast.Tuple | ast.List) or last != ["-1"] or len(parts.elts) != 2:
        return False
    return _text(parts.elts[0]) == _text(parts.elts[1]) and isinstance(parts.elts[0], ast.Name)


def _is_repeated(value: ast.expr | None) -> bool:
    way = r"(torch\.repeat_interleave\(\w+, |\w+\.repeat_interleave\()2, dim=-1\)"
    return value is not None and re.fullmatch(way, _text(value)) is not None


def _calls(function: ast.FunctionDef) -> list[ast.Call]:
    return [x for x in ast.walk(function) if isinstance(x, ast.Call)]


def _statements(function: ast.FunctionDef) -> list[ast.stmt]:
    return [x for x in ast.walk(function) if isinstance(x, ast.stmt)]


def _bodies(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements in a function."""
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield body


def _assigned(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """Return the variable and the value of an assignment to a single variable, else None, None."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id, statement.value
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    return None, None


def _own_call(call: ast.expr | None) -> str | None:
    """Return the name of the attribute of ``self`` that an expression calls."""
    function = call.func if isinstance(call, ast.Call) else None
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
        return function.attr
    return None


def _argument(call: ast.expr | None) -> str | None:
    """Return the variable that is the only argument of a call."""
    if not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1 or not isinstance(call.args[0], ast.Name):
        return None
    return call.args[0].id


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _called(tree: ast.AST, name: str) -> ast.Call:
    """Return the first call of a function in a tree."""
    return next(x for x in ast.walk(tree) if isinstance(x, ast.Call) and _text(x.func) == name)


def _statement(text: str, place: ast.stmt) -> ast.stmt:
    """Parse a statement and give it the line of another one."""
    made = ast.parse(text).body[0]
    for node in ast.walk(made):
        if hasattr(node, "lineno"):
            ast.copy_location(node, place)
    return made
