"""Statements that are exchanged in a function's text, and those that are left."""

import ast
import textwrap

import pytest

from tilekern.patch import patterns
from tilekern.patch.digests import shape_of
from tilekern.patch.matching import Module, patches_of


def changed(text, pattern, *arguments):
    """How often a pattern was there, and the lines of the body afterwards."""
    function = ast.parse(textwrap.dedent(text)).body[0]
    number = pattern(function, *arguments)
    return number, [line.strip() for line in ast.unparse(function).splitlines()[1:]]


def layer(*lines):
    return "def forward(self, x, r):\n" + "".join(f"    {line}\n" for line in lines) + "    return x"


PATTERNS = {
    "add_norm": (patterns.add_norm, {"norm"}),
    "sums_and_norms": (patterns.sums_and_norms, {"norm", "other"}),
    "normed": (patterns.normed, ["norm", "other"]),
    "mlp": (patterns.mlp, ["up", "down"], ["act"]),
}
# By pattern: statements and what is made of them. A sum and the norm of it, around a branch too; a norm and the sum
# with it; calls of layer norms; an MLP without a gate.
CHANGED = {
    "add_norm": [
        (["x = r + x", "r = x", "x = self.norm(x)"], ["r, x = tilekern_add_norm(r, x, self.norm)"]),
        (["x = r + x", "r = x", "x = self.norm(r)"], ["r, x = tilekern_add_norm(r, x, self.norm)"]),
        (["r = r + x", "x = self.norm(r)"], ["r, x = tilekern_add_norm(r, x, self.norm)"]),
        (["x = r + x", "x = self.norm(x)"], ["tilekern_sum, x = tilekern_add_norm(r, x, self.norm)"]),
        (["x = r + x", "r = x", "y = self.norm(x)"], ["r, y = tilekern_add_norm(r, x, self.norm)", "x = r"]),
        (["x = r + self.drop(x) * 2", "r = x", "x = self.norm(x)"],
         ["r, x = tilekern_add_norm(r, self.drop(x) * 2, self.norm)"]),
        (["x = r + x", "x = x + self.mlp(self.norm(x))"],
         ["x, tilekern_normal = tilekern_add_norm(r, x, self.norm)", "x = x + self.mlp(tilekern_normal)"]),
        (["x = r + x", "r = x", "x, y = self.mlp(x=self.norm(r), r=r)"],
         ["r, tilekern_normal = tilekern_add_norm(r, x, self.norm)", "x = r",
          "x, y = self.mlp(x=tilekern_normal, r=r)"]),
        (["x = r + x", "if y is not None:", "    x = self.more(x, y)", "r = x", "x = self.norm(x)"],
         ["if y is not None:", "x = r + x", "x = self.more(x, y)", "r = x", "x = self.norm(x)", "else:",
          "r, x = tilekern_add_norm(r, x, self.norm)"]),
    ],
    "sums_and_norms": [
        (["x = self.norm(x)", "x = r + x"], ["x = tilekern_norm_add(r, x, self.norm)"]),
        (["x = self.norm(self.mlp(x))", "x = x + r"], ["x = tilekern_norm_add(r, self.mlp(x), self.norm)"]),
        (["y = self.norm(x)", "r = r + y", "x = r"], ["r = tilekern_norm_add(r, x, self.norm)", "x = r"]),
        (["x = self.norm(x)", "y = r + x", "x = y"], ["y = tilekern_norm_add(r, x, self.norm)", "x = y"]),
        (["x = self.norm(x)", "x = r + x", "r = x", "x = self.other(x)"],
         ["r, x = tilekern_norm_add_norm(r, x, self.norm, self.other)"]),
        (["x = self.norm(x)", "x = r + x", "r = x", "y = self.other(x)"],
         ["r, y = tilekern_norm_add_norm(r, x, self.norm, self.other)", "x = r"]),
        (["x = self.norm(x)", "x = r + x", "x = x + self.mlp(self.other(x))"],
         ["x, tilekern_normal = tilekern_norm_add_norm(r, x, self.norm, self.other)",
          "x = x + self.mlp(tilekern_normal)"]),
    ],
    "normed": [
        (["x = self.norm(x)"], ["x = tilekern_normed(self.norm, x)"]),
        (["x = self.mlp(self.norm(x + r))"], ["x = self.mlp(tilekern_normed(self.norm, x + r))"]),
        (["x = self.norm(self.other(x)) if r else x"],
         ["x = tilekern_normed(self.norm, tilekern_normed(self.other, x)) if r else x"]),
    ],
    "mlp": [
        (["x = self.down(self.act(self.up(x)))"], ["x = tilekern_mlp(self.up, self.act, self.down, x)"]),
        (["x = self.up(x)", "x = self.act(x)", "x = self.down(x)", "x = self.drop(x)"],
         ["x = tilekern_mlp(self.up, self.act, self.down, x)", "x = self.drop(x)"]),
        (["h = self.act(self.up(x + r))", "x = self.down(h)"],
         ["x = tilekern_mlp(self.up, self.act, self.down, x + r)"]),
        (["h = self.up(x)", "x = self.down(self.act(h))"], ["x = tilekern_mlp(self.up, self.act, self.down, x)"]),
        (["x = r + self.down(self.act(self.up(x)))"], ["x = r + tilekern_mlp(self.up, self.act, self.down, x)"]),
    ],
}  # fmt: skip
# And statements of other forms: a branch may see the sum, a norm's argument or a variable is used elsewhere.
LEFT = {
    "add_norm": [
        *(
            ["x = r + x", f"if {test}:", "    y = x", *more, "r = x", "x = self.norm(x)"]
            for test, more in (
                ("x is not None", []), ("r is not None", []), ("self.asks()", []), ("y", ["else:", "    r = y"]),
            )
        ),
        ["x = r - x", "x = self.norm(x)"],
        ["x = r + x", "x = self.other(x)"],
        ["x = r + x", "x = self.norm(r)"],
        ["x = r + x", "x = self.drop(x)", "x = self.norm(x)"],
        ["x = r + x", "r = x", "r = self.norm(x)"],
        ["x = r + x", "x = self.norm(x, True)"],
        ["x += r", "x = self.norm(x)"],
        ["x = r + x", "x = x + self.mlp(self.norm(x), self.other(r))"],
        ["x = r + x", "x = self.norm(x) + self.norm(x)"],
        ["x = r + x", "x = self.norm(x) if r is None else r"],
        ["x = r + x", "x = [self.norm(x) for _ in r]"],
        ["x = r + x"],
    ],
    "sums_and_norms": [
        ["x = self.norm(x)", "x = r - x"],
        ["x = self.third(x)", "x = r + x"],
        ["x = self.norm(x)", "x = r + self.mlp(x)"],
        ["x = self.norm(x)", "x = x + x"],
        ["x = self.norm(x)", "x = 2 + x"],
        ["x = self.norm(x)", "x += r"],
        ["x = self.norm(x, r)", "x = r + x"],
        ["x = self.norm(*x)", "x = r + x"],
        ["x = self.norm((r := x))", "x = r + x"],
        ["x = self.norm(x)", "x = self.drop(x)", "x = r + x"],
        ["x = self.norm(x)", "y = r + x", "x = x + y"],
        ["y = self.norm(x)", "x = r + y", "x = x + y"],
        ["for _ in r:", "    x = self.mlp(y)", "    y = self.norm(x)", "    x = r + y"],
    ],
    "normed": [
        ["x = self.mlp(x)"],
        ["x = self.norm(x, r)"],
        ["x = self.norm(input=x)"],
        ["x = self.norm(*x)"],
        ["x = r.norm(x)"],
    ],
    "mlp": [
        ["x = self.down(self.act(self.gate(x)) * self.up(x))"],
        ["x = self.down(self.drop(self.act(self.up(x))))"],
        ["x = self.act(self.up(x))", "x = self.drop(x)", "x = self.down(x)"],
        ["x = self.up(x)", "r = self.act(x)", "r = self.down(r)"],
        ["x = self.up(x)", "x = self.act(x)", "x = r + self.down(x)"],
        ["x = self.down(self.act(self.up(x, r)))"],
        ["x = self.down(self.act(self.up(*x)))"],
        ["x = self.act(self.up(x))"],
        ["x = self.down(self.up(self.act(x)))"],
    ],
}  # fmt: skip


def rows(table):
    return [(name, *(row if isinstance(row, tuple) else (row,))) for name, rows in table.items() for row in rows]


@pytest.mark.parametrize(("name", "lines", "expected"), rows(CHANGED))
def test_what_an_op_computes_is_exchanged(name, lines, expected):
    number, body = changed(layer("x = self.attention(x)", *lines), *PATTERNS[name])
    exchanged = {"add_norm": 1, "mlp": 1, "normed": "".join(expected).count("tilekern")}
    assert number == exchanged.get(name, number) > 0
    assert body == ["x = self.attention(x)", *expected, "return x"]


@pytest.mark.parametrize(("name", "lines"), rows(LEFT))
def test_what_is_of_another_form_is_left(name, lines):
    assert changed(layer(*lines), *PATTERNS[name]) == (0, [*(line.strip() for line in lines), "return x"])


HEAD = """
def forward(self, x, labels=None, logits_to_keep=0, **kwargs):
    {head}
    {between}
    loss = None
    if labels is not None:
        loss = self.loss_function({given}, **kwargs)
    {after}
    return Output(loss=loss, logits=logits, more=self.more(x))
"""


def head(head="logits = self.lm_head(x)", between="pass", given="logits=logits, labels=labels, vocab_size=5", after=""):
    text = HEAD.format(head=head, between=between, given=given, after=after or "pass")
    return "\n".join(line for line in text.splitlines() if line.strip() != "pass")


CAP = """if self.config.final_logit_softcapping is not None:
        logits = logits / self.config.final_logit_softcapping
        logits = torch.tanh(logits)
        logits = logits * self.config.final_logit_softcapping"""

NAMED_CAP = CAP.replace("self.config.", "").replace(
    "final_logit_softcapping is", "(final_logit_softcapping := self.config.a) is"
)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (head(), "self.lm_head, x, labels=labels, vocab_size=5"),
        (head("logits = self.embed_out(x[:, s, :])"), "self.embed_out, x[:, s, :], labels=labels, vocab_size=5"),
        (head("logits = self.lm_head(x).contiguous()"), "self.lm_head, x, labels=labels, vocab_size=5"),
        (head("logits = self.lm_head(x).float()"), "self.lm_head, x, labels=labels, vocab_size=5"),
        (head(given="logits, labels, self.n"), "self.lm_head, x, labels=labels, vocab_size=self.n"),
        (head(between="logits = logits.float()"), "self.lm_head, x, labels=labels, vocab_size=5"),
        (head(between="logits = logits / self.c"), "self.lm_head, x, divisor=self.c, labels=labels, vocab_size=5"),
        (head(between="logits = logits * self.c"), "self.lm_head, x, factor=self.c, labels=labels, vocab_size=5"),
        (head(between=CAP),
         "self.lm_head, x, softcap=self.config.final_logit_softcapping, labels=labels, vocab_size=5"),
        (head("logits = self.lm_head(x) * self.model.c"),
         "self.lm_head, x, factor=self.model.c, labels=labels, vocab_size=5"),
        (head(between=NAMED_CAP), "self.lm_head, x, softcap=self.config.a, labels=labels, vocab_size=5"),
        (head(after="loss = loss + self.aux"), "self.lm_head, x, labels=labels, vocab_size=5"),
    ],
)  # fmt: skip
def test_a_head_and_its_loss(text, call):
    number, body = changed(text, patterns.head_and_loss)
    assert number == 1
    kept = ast.unparse(ast.parse(text)).splitlines()
    assert body[1:3] == ["logits = tilekern_skipped", f"loss = tilekern_loss({call}, **kwargs)"]
    assert body[0] == f"if tilekern_serves(self, {call.partition(',')[0]}, labels, logits_to_keep, skip_logits):"
    assert [line.strip() for line in kept[1:]] == [line for line in body if line != "else:"][3:]


def test_a_cap_that_is_named_between_the_head_and_its_loss():
    named = "final_logit_softcapping = getattr(self.config.text, 'cap', None)"
    between = f"{named}\n    {CAP.replace('self.config.', '')}"
    number, body = changed(head(between=between), patterns.head_and_loss)
    assert number == 1
    assert body[0] == named
    assert "softcap=final_logit_softcapping" in body[3]
    assert body.count(named) == 1


TUPLE = """if not return_dict:
        output = (logits,) + self.more(x)
        return output"""


def test_a_call_that_asks_for_a_tuple_gets_logits():
    text = head(after=TUPLE).replace("logits_to_keep=0", "return_dict=None")
    number, body = changed(text, patterns.head_and_loss)
    assert number == 1
    assert body[0] == "if return_dict and tilekern_serves(self, self.lm_head, labels, 0, skip_logits):"


def test_a_forward_gets_an_argument_that_says_whether_there_are_logits():
    function = ast.parse(head()).body[0]
    patterns.head_and_loss(function)
    assert ast.unparse(function.args) == "self, x, labels=None, logits_to_keep=0, *, skip_logits=None, **kwargs"


@pytest.mark.parametrize(
    "text",
    [
        head(after=TUPLE.replace("not return_dict", "return_dict")),
        head(after=TUPLE.replace("return output", "self.last = output")),
        head(between="scale = logits.mean()"),
        head("logits = self.lm_head(x) * 2"),
        head("logits = self.lm_head(x) * self.a", "logits = logits * self.b"),
        head(between="logits = logits / 2"),
        head(between="logits = self.clip(logits)"),
        head(between="self.seen(logits)"),
        head(between="other = logits"),
        head(between="logits = logits * self.a\n    logits = logits * self.b"),
        head(after="loss = loss + logits.mean()"),
        head(given="logits=logits[:, 1:], labels=labels"),
        head(given="logits=logits, labels=self.shifted(labels)"),
        head("logits = self.lm_head(x, 2)"),
        head("logits = self.lm_head(x) + self.b"),
        head().replace("labels is not None", "self.training"),
        head().replace("logits=logits, more", "scores=logits, more"),
        head().replace("self, x, labels=None, ", "self, x, "),
        head().replace("labels=None, ", "labels=None, skip_logits=None, "),
    ],
)
def test_logits_that_are_used_otherwise_are_left(text):
    assert changed(text, patterns.head_and_loss) == (
        0, [line.strip() for line in ast.unparse(ast.parse(text)).splitlines()[1:]],
    )  # fmt: skip


ATTENTION = """
def forward(self, h, position_embeddings):
    s = (1, 2)
    q = self.q_norm(self.q_proj(h).view(s)).transpose(1, 2)
    k = self.k_norm(self.k_proj(h).view(s)).transpose(1, 2)
    v = self.v_proj(h).view(s).transpose(1, 2)
    cos, sin = position_embeddings
    q, k = rotate(q, k, cos, sin)
    return q, k, v
"""
# What follows s, where q and k are made in other statements.
MADE = ["q = self.q_proj(h).view(s)", "k = self.k_proj(h).view(s)", "v = self.v_proj(h).view(s)"]
SWAPPED = [f"{x} = {x}.transpose(1, 2)" for x in "qkv"]
NORMS, ROTATION = ["q = self.q_norm(q)", "k = self.k_norm(k)"], "q, k = rotate(q, k, cos, sin)"


def heads(text):
    """How often a pattern of head norms was there, and the lines behind the projections."""
    number, body = changed(text, patterns.qk_norm_rope, {"q_norm", "k_norm", "norm"}, "rotate")
    return number, body[1:-1]


def attention(*lines):
    body = "".join(f"    {line}\n" for line in lines)
    return f"def forward(self, h, cos, sin):\n    s = (1, 2)\n{body}    return q, k"


def test_the_norms_of_heads_and_their_rotation():
    number, body = heads(ATTENTION)
    assert number == 1
    assert body.pop(4).strip("()").startswith("cos, sin")
    assert body == [
        "tilekern_q, tilekern_k, tilekern_v = tilekern_projected(self, h)",
        "q = tilekern_q.view(s)",
        "k = tilekern_k.view(s)",
        "v = tilekern_v.view(s).transpose(1, 2)",
        "q, k = tilekern_turned(self.q_norm, self.k_norm, q, k, cos, sin, swapped=True)",
    ]


TURNED = "q, k = tilekern_turned(self.q_norm, self.k_norm, q, k, cos, sin, {})"
# The statements behind those that make q, k and v, and what is made of them.
ORDERS = {
    "heads first": ([*SWAPPED, *NORMS, ROTATION], [SWAPPED[2], TURNED.format("behind=True")]),
    "transposed elsewhere": (
        [SWAPPED[0], *NORMS, ROTATION],
        [SWAPPED[0], "q, k = tilekern_turned(self.q_norm, self.k_norm, q, k, cos, sin)"],
    ),
    "heads first, under a condition": (
        [*SWAPPED, "if self.has:", *(f"    {x}" for x in NORMS), ROTATION],
        [SWAPPED[2], "if self.has:", TURNED.format("behind=True"), "else:", *SWAPPED[:2],
         "q, k = tilekern_rotated(q, k, cos, sin)"],
    ),
    "tokens first": ([*NORMS, *SWAPPED, ROTATION], [SWAPPED[2], TURNED.format("swapped=True")]),
    "under a condition": (
        ["if self.has:", *(f"    {x}" for x in NORMS), *SWAPPED, ROTATION],
        [SWAPPED[2], "if self.has:", TURNED.format("swapped=True"), "else:", *SWAPPED[:2],
         "q, k = tilekern_rotated(q, k, cos, sin)"],
    ),
    "of some layers": (
        [*SWAPPED, *NORMS, "if self.a is None or self.b:", f"    {ROTATION}"],
        [SWAPPED[2], "if self.a is None or self.b:", TURNED.format("behind=True"), "else:", *SWAPPED[:2], *NORMS],
    ),
    "of some layers, tokens first": (
        [*NORMS, *SWAPPED, "if self.a:", "    c = h", f"    {ROTATION}"],
        [SWAPPED[2], "if self.a:", "c = h", TURNED.format("swapped=True"), "else:", *NORMS, *SWAPPED[:2]],
    ),
    "behind the rotation": (
        [*SWAPPED, ROTATION, *NORMS], [SWAPPED[2], TURNED.format("norm_last=True, behind=True")],
    ),
    "both under conditions": (
        ["if self.a:", f"    {ROTATION}", "if hasattr(self, 'norm'):", *(f"    {x}" for x in NORMS)],
        ["if self.a and hasattr(self, 'norm'):", TURNED.format("norm_last=True"), "else:", "if self.a:",
         "q, k = tilekern_rotated(q, k, cos, sin)", "if hasattr(self, 'norm'):", *NORMS],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), ORDERS.values(), ids=ORDERS)
def test_norms_and_rotations_in_other_orders(lines, expected):
    number, body = heads(attention(*MADE, *lines))
    assert number == 1
    assert body[4:] == expected


# Gemma 4's: q and k by themselves, and layers without keys of their own.
APART = """
def forward(self, h, cos, sin, before):
    q = self.q_proj(h).view((1, 2))
    q = self.q_norm(q)
    q = rotate(q, cos, sin, unsqueeze_dim=2)
    q = q.transpose(1, 2)
    if self.is_shared:
        k = before.to(q.device)
    else:
        k = self.k_proj(h).view((1, 2))
        k = self.k_norm(k)
        k = rotate(k, cos, sin, unsqueeze_dim=2)
        k = k.transpose(1, 2)
    return q, k
"""


def test_norms_and_rotations_of_q_and_of_k_alone():
    assert heads(APART) == (
        1,
        [
            "if self.is_shared:",
            "q = tilekern_turned_alone(self.q_norm, q, cos, sin)", "q = q.transpose(1, 2)", "k = before.to(q.device)",
            "else:",
            "k = self.k_proj(h).view((1, 2))", "q, k = tilekern_turned(self.q_norm, self.k_norm, q, k, cos, sin)",
            "q = q.transpose(1, 2)", "k = k.transpose(1, 2)",
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if self.is_shared", "if q.any()"),
        ("if self.is_shared", "if before is None"),
        ("        k = self.k_proj(h)", "        cos = h\n        k = self.k_proj(h)"),
        ("        k = self.k_proj(h)", "        k = self.k_proj(q)"),
        ("k = rotate(k, cos, sin", "k = rotate(k, sin, cos"),
        ("k = rotate(k, cos, sin, unsqueeze_dim=2)", "k = rotate(k, cos, sin, unsqueeze_dim=1)"),
        ("k = self.k_norm(k)", "k = self.other(k)"),
        ("    q = q.transpose(1, 2)\n", "    q = q.transpose(1, 2) + h\n"),
        ("    q = q.transpose(1, 2)\n", "    q = q.transpose(1, 2)\n    before = q\n"),
        ("    q = self.q_norm(q)\n", ""),
    ],
)
def test_those_in_other_places_are_left(old, new):
    text = APART.replace(old, new, 1)
    assert text != APART
    assert heads(text) == (0, changed(text, lambda _: 0)[1][1:-1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.k_norm(self.k_proj(h).view(s))", "self.k_norm(q)"),
        ("self.k_norm(self.k_proj(h).view(s)).transpose(1, 2)", "self.k_norm(self.k_proj(h)).view(s)"),
        ("self.k_norm(self.k_proj(h).view(s))", "self.other(self.k_proj(h).view(s))"),
        ("self.k_norm(self.k_proj(h).view(s)).transpose(1, 2)", "self.k_norm(self.k_proj(h).view(s))"),
        ("self.k_norm(self.k_proj(h).view(s)).transpose(1, 2)", "self.k_norm(self.k_proj(h).view(s)).transpose(1, 3)"),
        ("rotate(q, k, cos, sin)", "rotate(q, k, cos, sin, unsqueeze_dim=2)"),
        ("rotate(q, k, cos, sin)", "rotate(k, q, cos, sin)"),
        ("rotate(q, k, cos, sin)", "rotate(q, k, self.turned(q), sin)"),
        ("    q, k = rotate", "    k = k + 1\n    q, k = rotate"),
        ("    q, k = rotate", "    seen(q)\n    q, k = rotate"),
        ("    q, k = rotate", "    if q.any():\n        q, k = rotate"),
        ("    return", "    q = self.q_norm(q)\n    return"),
    ],
)
def test_other_norms_and_rotations_are_left(old, new):
    text = ATTENTION.replace(old, new)
    assert text != ATTENTION
    if "return" not in old:
        assert heads(text)[0] == 0
        assert "tilekern" not in "".join(heads(text)[1])
    else:
        # The norms before the rotation are fused with it; another one stays.
        assert heads(text)[1][-1] == "q = self.q_norm(q)"


@pytest.mark.parametrize(
    "lines",
    [
        [*SWAPPED, ROTATION, NORMS[0]],
        [*SWAPPED, ROTATION, "q = self.q_norm(k)", NORMS[1]],
        ["if self.has:", *(f"    {x}" for x in NORMS), *SWAPPED, "if self.a:", f"    {ROTATION}"],
        ["if h.any():", *(f"    {x}" for x in NORMS), *SWAPPED, ROTATION],
        ["if self.a:", f"    {ROTATION}", *NORMS],
        [ROTATION, "if self.a:", *(f"    {x}" for x in NORMS)],
        ["if h.any():", f"    {ROTATION}", "if self.a:", *(f"    {x}" for x in NORMS)],
        ["if self.a:", f"    {ROTATION}", "else:", "    h = h", *NORMS],
        [*NORMS, "q = q.transpose(1, 2)", ROTATION],
        [*NORMS, *SWAPPED, *SWAPPED, ROTATION],
    ],
)
def test_orders_that_are_not_known_are_left(lines):
    number, body = heads(attention(*MADE, *lines))
    assert number == 0
    assert body == [*MADE, *(x.strip() for x in lines)]


@pytest.mark.parametrize(
    "change",
    [("v = self.v_proj(h)", "v = self.v_proj(x)"), ("k = self.k_proj", "h = h + 1\n    k = self.k_proj"),
     ("v = self.v_proj(h).view(s)", "v = self.v_proj(h).view(s) if self.has else k")],
)  # fmt: skip
def test_projections_that_are_not_of_one_variable_stay(change):
    number, body = heads(attention(*MADE, *SWAPPED, *NORMS, ROTATION).replace(*change))
    assert number == 1
    assert "tilekern_projected" not in "".join(body)


ROTARY = """
class XRotaryEmbedding:
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos() * self.scale, emb.sin() * self.scale
"""


@pytest.mark.parametrize(
    ("old", "new", "twice"),
    [
        ("", "", True),
        ("(freqs, freqs)", "(freqs, -freqs)", False),
        ("dim=-1", "dim=-2", False),
        ("emb.sin()", "freqs.sin()", False),
        ("torch.cat((freqs, freqs), dim=-1)", "freqs.repeat_interleave(2, -1)", False),
    ],
)
def test_angles_that_are_stored_twice(old, new, twice):
    definition = ast.parse(ROTARY.replace(old, new) if old else ROTARY).body[0]
    assert patterns.stores_twice(definition) == twice


def shape(text):
    return shape_of(ast.parse(textwrap.dedent(text)).body[0])


PLAIN = "def f(self, x, y=1):\n    z = x + y\n    return self.a(z)"


def test_names_annotations_decorators_and_docstrings_do_not_change_a_shape():
    same = '@known\ndef g(self, h: int, k: int = 1) -> int:\n    """Doc."""\n    s: int = h + k\n    return self.a(s)'
    assert shape(PLAIN) == shape(same)


@pytest.mark.parametrize(
    ("old", "new"), [("self.a", "self.b"), ("x + y", "y + x"), ("y=1", "y=2"), ("(z)", "(torch.z)"), ("x + y", "x - y")]
)
def test_code_attributes_and_globals_do(old, new):
    assert shape(PLAIN) != shape(PLAIN.replace(old, new))


MODULE = """
class MyRMSNorm(nn.Module):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)

class MyLayer(nn.Module):
    def __init__(self, config):
        self.norm = MyRMSNorm(config.hidden_size)

    def forward(self, x, r):
        x = r + x
        return self.norm(x)

class MyOtherLayer(nn.Module):
    def __init__(self, config):
        self.norm = {norm}(config.hidden_size)

    def forward(self, x, r):
        r = r + x
        x = self.norm(r)
        return x, r
"""


def found(text):
    return [(patch.op, patch.attribute) for patch in patches_of(Module("mine", text), "mine")]


def test_only_norms_of_a_known_form_are_fused_with_sums():
    norm = ("rms_norm", "MyRMSNorm.forward")
    assert found(MODULE.format(norm="MyRMSNorm")) == [norm, ("fused_add_rms_norm", "MyOtherLayer.forward")]
    assert found(MODULE.format(norm="nn.RMSNorm")) == found(MODULE.format(norm="Other")) == [norm]
    changed = MODULE.format(norm="MyRMSNorm").replace("self.weight * hidden_states.to(input_dtype)", "hidden_states")
    assert found(changed) == []


NORMED = """
class MyBlock(nn.Module):
    def __init__(self, config):
        self.ln = nn.LayerNorm(config.hidden_size)
        self.other = {other}(config.hidden_size)

    def forward(self, x):
        return self.ln(x)
"""


def test_layer_norms_of_torch_are_served_where_they_are_called():
    assert found(NORMED) == [("layer_norm", "MyBlock.forward")]
    assert found(NORMED.replace("nn.LayerNorm", "LayerNorm")) == [("layer_norm", "MyBlock.forward")]
    assert found(NORMED.replace("return self.ln(x)", "return self.other(x)")) == []
    own = NORMED.replace("nn.LayerNorm", "LayerNorm") + "\n\nclass LayerNorm(nn.Module):\n    pass\n"
    assert found(own) == []


UNGATED = """
class MyMLP(nn.Module):
    def __init__(self, config):
        self.up = Conv1D(4, 4)
        self.down = nn.Linear(4, 4)
        self.act = {act}

    def forward(self, x):
        return self.down(self.act(self.up(x)))
"""


def test_mlps_of_linear_layers_and_an_activation_are_served():
    assert found(UNGATED.format(act="ACT2FN[config.hidden_act]")) == [("mlp", "MyMLP.forward")]
    assert found(UNGATED.format(act="nn.GELU()")) == [("mlp", "MyMLP.forward")]
    assert found(UNGATED.format(act="nn.Dropout(0.1)")) == []
    own = UNGATED.format(act="nn.GELU()") + "\n\nclass Conv1D(nn.Module):\n    pass\n"
    assert found(own) == []


BOTH = """
class MyBlock(MyLayer):
    def __init__(self, config):
        self.norm = MyRMSNorm(config.hidden_size)
        self.ln = nn.LayerNorm(config.hidden_size)

    def forward(self, x, r):
        r = r + self.ln(x)
        x = self.norm(r)
        return x, r
"""


def test_a_method_that_another_op_changes_keeps_its_layer_norms():
    assert found(MODULE.format(norm="Other") + BOTH) == [
        ("rms_norm", "MyRMSNorm.forward"), ("fused_add_rms_norm", "MyBlock.forward"),
    ]  # fmt: skip
