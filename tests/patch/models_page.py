"""docs/models.md as the families' tests make it; ``python tests/patch/models_page.py`` writes it."""

import ast
from pathlib import Path

from tiny_families import SEEING

from tilekern.patch.families import FAMILIES
from tilekern.patch.forms import OPS, Module, path_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models

The families that `tilekern.apply()` patches, by `model_type`. The test of each makes a small model of it and holds the
patched one to the unpatched one: loss, logits, all gradients, and the tokens that are generated with a cache; and that
every op with a "yes" ran. This page is made by those tests (`python tests/patch/models_page.py`).

What is patched is found by the form of the code, whatever the family: `forms="any"` patches other families of
transformers, too, wherever their code has a form that is known. `python -m tilekern.patch` says what it is here.
`attn_implementation="tilekern"` is a door of its own, which all families that ask for an attention function have.

- `layer_norm` is of the layers of language models. Torch's own class runs in an attention or an indexer whose rotation
  is patched (Persimmon's, DeepSeek V3.2's), and in vision towers.
- `swiglu` is any MLP with a gate, by silu or gelu; experts are not among them.
- `rope` and `qk_norm_rope` are of the language model; vision towers keep their own rotation.
- "of its text": the text model is of another family, which has a row of its own.
- "-": the family has no such code.
- "another form": it has, and tilekern has no op that computes the same.

"""


def page():
    """The text of the page."""
    rows = [f"| {' | '.join(('family', *OPS))} |", "|---" * (len(OPS) + 1) + "|"]
    for family in sorted(FAMILIES.values()):
        module = Module(family.module, path_of(family.module).read_text(encoding="utf-8"))
        cells = ["yes" if op in family.ops else reason(op, module) for op in OPS]
        rows.append(f"| {' | '.join((family.model_type, *cells))} |")
    return HEAD + "\n".join(rows) + f"\n\nThese are tested with images, too: {', '.join(sorted(SEEING))}.\n"


def reason(op, module):
    """Why an op does not serve a module's classes."""
    text = path_of(module.name).read_text(encoding="utf-8")
    if op != "fused_linear_cross_entropy" and "AutoModel.from_config(" in text and "DecoderLayer" not in text:
        return "of its text"
    bodies = {kind: ast.unparse(forward) for kind, forward in module.forwards.items()}
    gated = [kind for kind, body in bodies.items() if "self.gate_proj(" in body or "self.gate_up_proj(" in body]
    has = {
        "rms_norm": any("RMSNorm" in name for name in module.classes),
        # Those of towers that see are not of the language model.
        "layer_norm": False,
        "swiglu": any(f"= {kind}(" in text for kind in gated),
        "qk_norm_rope": "self.q_norm(" in text or "self.query_layernorm(" in text,
        "rope": "apply_rotary" in text,
        "fused_add_rms_norm": "RMSNorm" in text and any("Layer" in name for name in module.forwards),
        "fused_linear_cross_entropy": "labels" in text,
    }
    return "another form" if has[op] else "-"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
