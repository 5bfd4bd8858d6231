"""docs/models.md as the families' tests make it; ``python tests/patch/models_page.py`` writes it."""

import ast
import functools
import re
from pathlib import Path

from tiny_families import SEEING, make

from tilekern.patch import experts, patterns
from tilekern.patch.families import FAMILIES
from tilekern.patch.forms import OPS, Module, path_of

EXPERTS = re.compile(r"^class \w+(Experts|MoE)\(", re.MULTILINE)
HEADS = re.compile(r"self\.(q_norm|q_layernorm|query_layernorm)\(")

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models

The families that `tilekern.apply()` patches, by `model_type`. The test of each family makes a small model and compares
the patched with the unpatched one: loss, logits, all gradients, and the tokens generated with a cache. It also checks
that every op with a "yes" ran. The tests write this page (`python tests/patch/models_page.py`).

Patches recognise the form of the code, not the family: `forms="any"` also patches other families of transformers if
their code has a known form. `python -m tilekern.patch` lists the patches for the installed transformers.
`attn_implementation="tilekern"` is a separate switch, for all families that ask for an attention function, and
`experts_implementation="tilekern"` is one for families with experts ([gates](reference.md#experts)). `experts=True`
sets the latter for all models; it also patches the experts of `llama4`, which have no such choice, and the
[routers](reference.md#routers) of these families.

Columns:

- `rms_norm` includes norms with a gate, such as those of linear attention in Qwen3-Next and Qwen3.5, with `swiglu`
  after the norm. Norms of Mamba's layers, each over a part of a row, keep their own code.
- `layer_norm` in an attention or an indexer with a patched rotation (Persimmon, Phi, DeepSeek V3.2) runs with `apply`;
  with `apply_to_model`, torch's class runs.
- `swiglu` is any MLP with a gate, by silu or gelu, except experts, which have their own column.
- `mlp` is any MLP without a gate, by gelu, silu, relu or its square, with or without biases; in BLOOM only the
  activation is replaced.
- `rope` includes the rotations of vision encoders: those of Pixtral, Llama 4, Qwen-VL from 2 on, GLM-V, ERNIE-VL and
  PaddleOCR-VL and, with `apply`, Gemma 4. The norms of heads in Gemma 4's vision encoder run `rms_norm`.
- `fused_add_rms_norm` is a sum with its norm, with the norm of the sublayer's result, or with both.
- `experts` run the op by `experts_implementation="tilekern"` or `apply(experts=True)`, or not at all for the reason
  given.

Cells:

- "images": only the vision encoder, or the part that passes its results to the text, has such code, and the op serves
  it. Vision encoders that are families of their own have rows: `clip`, `pixtral` and `siglip`.
- "of its text": the text model is of another family, which has its own row.
- "-": the family has no such code.
- "norm of all heads": the norms of q and k are over whole rows; `rms_norm` serves them.
- "another norm": the norm of q and k is a layer norm, which `layer_norm` serves.
- "norm after": the norm of q and k follows a rotation whose two halves have different angles; `rope` and `rms_norm`
  serve them.
- "another gate": squared ReLU.
- "another activation": no op computes its activation.
- "another form": it has such code, but in statements that no patch knows.

"""

ATTENTION = """
## Attention

The attention of each family of transformers 5.24 with `attn_implementation="tilekern"`:

| families | attention |
|---|---|
| all that ask transformers for an attention function, except those below | the kernels, and SDPA for [the \
rest](reference.md#attention) |
| `doge`, `qwen4_exp` | SDPA, with the mask of chosen keys from their own code; the kernels in Doge's layers \
without such a mask |
| `qwen2_moe` before transformers 5.24, `phimoe` | SDPA in layers with a window, which only the mask contains |
| `nllb-moe`, `bigbird_pegasus`, `splinter` and others for which transformers has neither SDPA nor flash \
attention | SDPA, by an additive mask |
| `deepseek_v4` | refused: its code appends compressed keys, and a bias for them, that its mask does not cover |
| `axk2`, `deepseek_v32`, `dots3_note`, `glm_moe_dsa`, `hy_v4`, `hy_v4_vl`, `mistral_large4` | refused: an \
indexer chooses the keys of each query |
| `minimax_m3_vl` | refused: an indexer chooses blocks of keys in its sparse layers |
| `inkling2`, `inkling2_loop` | refused: each query has its own sink |
| `bloom`, `mpt`, `trocr`, the text part of `blip` and others that compute their attention themselves | \
refused, or the choice has no effect |
| `falcon`, `gpt_neo`, `gptj` before transformers 5.24 | transformers' `KeyError: 'tilekern'`: they have a \
class for each attention |

A refused model raises an error in its first forward, and in `apply_to_model` if it already has this attention; the
error names the model. Attention never drops a key that the mask does not exclude.

One row may hold several sequences if `position_ids` restart in each, as a flattening collator makes them. All of these
families keep the sequences apart, with and without a cache or a mask of ones. In `falcon_h1`, `jamba`, `lfm2_moe`,
`minimax`, `qwen3_5`, `qwen3_5_moe`, `qwen3_next` and others with convolutions or recurrent layers, those layers process
the row as one sequence; a warning says so once.
"""


def page(of_experts):
    """The text of the page; ``of_experts`` gives the last cell of a family's row."""
    rows = [f"| {' | '.join(('family', *OPS, 'experts'))} |", "|---" * (len(OPS) + 2) + "|"]
    for family in sorted(FAMILIES.values()):
        module = Module(family.module, path_of(family.module).read_text(encoding="utf-8"))
        cells = [served(op, family) or reason(op, module) for op in OPS]
        rows.append(f"| {' | '.join((family.model_type, *cells, of_experts(family.model_type)))} |")
    seeing = [f"{name}{_without(SEEING[name].without)}" for name in sorted(SEEING)]
    return HEAD + "\n".join(rows) + f"\n\nThese are tested with images, too: {', '.join(seeing)}.\n" + ATTENTION


def served(op, family):
    """What the page says of an op that serves a family; nothing where it does not."""
    return "images" if op in family.seen else "yes" if op in family.ops else ""


def _without(ops):
    """Which ops a model does not run once it is one that sees."""
    return f" (without {' and '.join(ops)}: its head and its loss are in two classes)" if ops else ""


@functools.cache
def bodies_of(module):
    """The texts of the forwards of a module's classes of language models."""
    kinds = [kind for kind in module.forwards if "Vision" not in kind and "Cross" not in kind]
    return {kind: ast.unparse(module.forwards[kind]) for kind in kinds}


def reason(op, module):
    """Why an op does not serve a module's classes."""
    text, bodies = path_of(module.name).read_text(encoding="utf-8"), bodies_of(module)
    if op != "fused_linear_cross_entropy" and is_of_its_text(text):
        return "of its text"
    if op == "qk_norm_rope":
        return next((of_heads(module, kind, x) for kind, x in bodies.items() if HEADS.search(x) and "rotary" in x), "-")
    if op == "fused_add_rms_norm":
        layers = [x for kind, x in bodies.items() if "Layer" in kind and module.attributes(kind)]
        return "another form" if layers else "-"
    if op == "mlp":
        return of_mlp(module, bodies)
    gated = [kind for kind, body in bodies.items() if "self.gate_proj(" in body or "self.gate_up_proj(" in body]
    has = {
        "rms_norm": any("RMSNorm" in name for name in module.classes),
        # Those of towers that see are not of the language model.
        "layer_norm": False,
        "swiglu": any(f"= {kind}(" in text for kind in gated),
        "rope": "apply_rotary" in text and module.rotaries,
        "fused_linear_cross_entropy": "labels" in text and "ForCausalLM" in text,
    }
    if op == "swiglu" and has[op] and "relu2" in _configuration(module):
        return "another gate"
    return "another form" if has[op] else "-"


def is_of_its_text(text):
    """Whether a module's language model is one of another family."""
    return "AutoModel.from_config(" in text and "DecoderLayer" not in text


def experts_said(model_type):
    """What the page says of a family's experts."""
    rows = (line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines())
    return next((row[-1] for row in rows if row[0] == model_type), "")


def experts_of(family, model):
    """Whether the op serves the experts in a family's model, or why not."""
    if any(patch.replacement is experts.scaled_layer for patch in family.patches()):
        return "yes"
    own = [x for x in model.modules() if type(x).__module__ == family.module]
    reasons = {experts.unserved(x) for x in own if hasattr(type(x), "_apply_gate")}
    if not reasons:
        text = path_of(family.module).read_text(encoding="utf-8")
        if is_of_its_text(text):
            return "of its text"
        return "another form" if EXPERTS.search(text) else "-"
    return "; ".join(sorted(reasons - {""})) or "yes"


def of_mlp(module, bodies):
    """Why an MLP without a gate is not one op."""
    kinds = [kind for kind in bodies if kind.endswith("MLP") and "Projector" not in kind]
    if any(patterns.mlp(ast.parse(bodies[kind]).body[0], *module.parts_of_mlp(kind)) for kind in kinds):
        return "another activation"
    return "another form" if any("self.fc2(" in x for kind, x in bodies.items() if "Layer" in kind) else "-"


def _configuration(module):
    """The text of a module's configuration."""
    return path_of(module.name.replace(".modeling_", ".configuration_")).read_text(encoding="utf-8")


def of_heads(module, kind, text):
    """Why the norms of q and k and their rotation are not one op in an attention."""
    if HEADS.search(text).start() > text.index("rotary_pos_emb("):
        return "norm after"
    if "self.q_norm(self.q_proj(hidden_states))" in text:
        return "norm of all heads"
    return "another form" if module.attributes(kind) else "another norm"


if __name__ == "__main__":
    PAGE.write_text(page(lambda name: experts_of(FAMILIES[name], make(name)[0])), encoding="utf-8")
