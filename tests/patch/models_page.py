"""docs/models.md and README.md's number of families; ``python tests/patch/models_page.py`` writes both."""

import ast
import functools
import re
from pathlib import Path

from tiny_families import SEEING, make

from tilekern.patch import experts, patterns
from tilekern.patch.families import FAMILIES
from tilekern.patch.matching import OF_MODELS, Module, path_of

EXPERTS = re.compile(r"^class \w+(Experts|MoE)\(", re.MULTILINE)
HEADS = re.compile(r"self\.(q_norm|q_layernorm|query_layernorm)\(")

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
README = PAGE.parents[1] / "README.md"
OLD = "docs/models.md or README.md is out of date; run python tests/patch/models_page.py"
# What is made of the page: from the table of families to the line on images.
MADE = re.compile(r"^\| family \|.*?^These are tested with images, too: [^\n]*\n", re.MULTILINE | re.DOTALL)


def page(of_experts):
    """The text of the page, its tables anew; ``of_experts`` gives the last cell of a family's row."""
    rows = [f"| {' | '.join(('family', *OF_MODELS, 'experts'))} |", "|---" * (len(OF_MODELS) + 2) + "|"]
    for family in sorted(FAMILIES.values()):
        module = Module(family.module, path_of(family.module).read_text(encoding="utf-8"))
        cells = [served(op, family) or reason(op, module) for op in OF_MODELS]
        rows.append(f"| {' | '.join((family.model_type, *cells, of_experts(family.model_type)))} |")
    seeing = [f"{name}{_without(SEEING[name].without)}" for name in sorted(SEEING)]
    made = "\n".join(rows) + f"\n\nThese are tested with images, too: {', '.join(seeing)}.\n"
    before, behind = MADE.split(PAGE.read_text(encoding="utf-8"))
    return before + made + behind


def readme():
    """The text of README.md with today's number of families."""
    text = README.read_text(encoding="utf-8")
    return re.sub(r"\d+ families of transformers", f"{len(FAMILIES)} families of transformers", text)


def served(op, family):
    """Return the page's entry for an op of a family; empty if the op does not serve it."""
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
        layers = [x for kind, x in bodies.items() if "Layer" in kind and module.norms_set(kind)]
        return "another form" if layers else "-"
    if op == "mlp":
        return of_mlp(module, bodies)
    gated = [kind for kind, body in bodies.items() if "self.gate_proj(" in body or "self.gate_up_proj(" in body]
    has = {
        "rms_norm": any("RMSNorm" in name for name in module.classes),
        # Those of towers that see are not of the language model.
        "layer_norm": False,
        "swiglu": any(f"= {kind}(" in text for kind in gated),
        "rope": "apply_rotary" in text and any("Rotary" in kind and "Vision" not in kind for kind in module.forwards),
        "fused_linear_cross_entropy": "labels" in text and "ForCausalLM" in text,
    }
    if op == "swiglu" and has[op] and "relu2" in _configuration(module):
        return "another gate"
    return "another form" if has[op] else "-"


def is_of_its_text(text):
    """Return whether a module's language model is one of another family."""
    return "AutoModel.from_config(" in text and "DecoderLayer" not in text


def experts_said(model_type):
    """Return the page's entry for a family's experts."""
    rows = (line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines())
    return next((row[-1] for row in rows if row[0] == model_type), "")


def experts_of(family, model):
    """Return whether the op serves the experts in a family's model, or why not."""
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
    return "another form" if module.norms_set(kind) else "another norm"


if __name__ == "__main__":
    PAGE.write_text(page(lambda name: experts_of(FAMILIES[name], make(name)[0])), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
