"""Match the code of a module against known forms, whatever its family.

Norms, MLPs, rotations and routers match if they have the shape of a function in ``forms/``. Attentions, layers and
heads match if they contain the statements that are replaced (:mod:`tilekern.patch.patterns`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tilekern.patch import experts, layers, loss, patterns, replacements, routers, whole_layers
from tilekern.patch.digests import Table, digest_of_tree
from tilekern.patch.table import PLAIN, Norm, Patch
from tilekern.runtime.switches import EXPERTS, OF_MODELS

_NORMS = Table(
    "norms",
    {
        "LlamaRMSNorm": PLAIN,
        "AfmoeRMSNorm": Norm(casting_mode="gemma"),
        "GemmaRMSNorm": Norm("eps", 1.0, "gemma"),
        "HeliumRMSNorm": Norm(casting_mode="gemma"),
        "KyutaiSpeechToTextRMSNorm": Norm("eps", casting_mode="gemma"),
        "Gemma4RMSNorm": Norm("eps", 0.0, "gemma", "with_scale"),
        "Gemma3nRMSNorm_5_0_0": Norm("eps", 0.0, "gemma", "with_scale"),
        "Llama4TextRMSNorm": Norm("eps"),
        "NanoChatRMSNorm": Norm("eps", 0.0, "gemma", scaled=False),
    },
)
# The method ``_norm`` of norms that have one.
_METHODS = Table(
    "norms", dict.fromkeys(("GemmaRMSNorm._norm", "Gemma4RMSNorm._norm", "Gemma3nRMSNorm_5_0_0._norm"), True)
)
_GATED_NORMS = Table("norms", {"Qwen3NextRMSNormGated": replacements.rms_norm_gated})
_LAYER_NORMS = Table(
    "norms",
    {
        "CohereLayerNorm": replacements.layer_norm_unbiased,
        "NemotronLayerNorm1P": replacements.layer_norm_from_1,
        "NemotronLayerNorm1P_5_0_0": replacements.layer_norm_from_1,
        "StableLmLayerNormPerHead": layers.layer_norm_per_head,
        "OlmoLayerNorm": replacements.layer_norm_alone,
    },
)
# How ``__init__`` creates torch's layer norms; the last may create another norm, which then runs unchanged.
_TORCHS = ("nn.LayerNorm", "torch.nn.LayerNorm", "LayerNorm", "NORM2FN[config.norm_type]")
_MLPS = Table(
    "mlps",
    {
        "LlamaMLP": replacements.gated_mlp,
        "Exaone4_5_MLP": replacements.gated_mlp,
        "Llama4TextMLP": partial(replacements.gated_mlp, activation="activation_fn"),
        "SeedOssMLP": partial(replacements.gated_mlp, dropout="residual_dropout"),
        "Lfm2MLP": partial(replacements.gated_mlp, activation="", layers=("w1", "w3", "w2")),
        "FalconH1MLP": replacements.multiplied_mlp,
        "Phi3MLP": replacements.joined_mlp,
        "GraniteMoeHybridMLP": partial(
            replacements.joined_mlp, activation="activation", layers=("input_linear", "output_linear")
        ),
    },
)
# Layers of experts, each with the classes of its ``experts`` and its ``router``.
_EXPERTS = Table("experts", {"Llama4TextMoe + Llama4TextExperts + Llama4Router": experts.scaled_layer})
# Layers with the attributes of norms before and behind attention and MLP, and attentions with those of heads' norms, by
# what they do where there is no cache.
_LAYERS = Table(
    "layers",
    {
        "LlamaDecoderLayer": ("input_layernorm", "", "post_attention_layernorm", ""),
        "Gemma2DecoderLayer": (
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
        ),
    },
    patterns.uncached,
)  # fmt: skip
_OF_HEADS = ("q_norm", "k_norm")
_ATTENTIONS = Table(
    "attentions",
    {"LlamaAttention": (), "Gemma2Attention": (), "Qwen3Attention": _OF_HEADS, "Gemma3Attention": _OF_HEADS},
    patterns.uncached,
)
# Linear layers that compute the same as torch's.
_LINEARS = Table("mlps", {"FalconLinear": True})
# An activation's forward and the functions that it calls; the activation has its own gradient.
_ACTIVATIONS = Table(
    "mlps",
    {"BloomGelu + GeLUFunction + GeLUFunction.backward + bloom_gelu_forward + bloom_gelu_back": "gelu_tanh"},
)
# How ``__init__`` creates linear layers and activations.
_MADE_LINEAR, _MADE_ACTIVE = ("nn.Linear", "torch.nn.Linear", "Conv1D"), ("ACT2FN[", "get_activation(", "nn.GELU(")
# A rotation, and the functions of its module that it calls. Angles are stored twice, one half after the other.
_TWICE = Table(
    "rotations",
    {
        "llama_apply_rotary_pos_emb + llama_rotate_half": replacements.rope,
        "llama_apply_rotary_pos_emb + nanochat_rotate_half": replacements.rope_back,
        "paddleocr_vl_apply_multimodal_rotary_pos_emb + llama_rotate_half": replacements.rope_multimodal,
        "beam_apply_rotary_pos_emb + llama_rotate_half": replacements.rope_cast_back,
        "hunyuan_vl_apply_rotary_pos_emb + llama_rotate_half": replacements.rope_cast_back,
        "gemma4_apply_rotary_pos_emb + llama_rotate_half": replacements.rope_alone,
        "bamba_apply_rotary_pos_emb + llama_rotate_half": replacements.rope_part,
        "phi3_apply_rotary_pos_emb + llama_rotate_half": replacements.rope_part,
        "dots3_note_apply_rotary_pos_emb + llama_rotate_half": replacements.rope_part,
        "glm_apply_rotary_pos_emb + deepseek_v4_rotate_half": replacements.rope_pairs,
        "glm4v_5_0_0_apply_rotary_pos_emb + deepseek_v4_rotate_half": replacements.rope_pairs,
        "helium_apply_rotary_pos_emb + deepseek_v4_rotate_half": replacements.rope_pairs,
        "ernie4_5_apply_rotary_pos_emb + deepseek_v4_rotate_half": replacements.rope_pairs_cast_back,
        "deepseek_v3_apply_rotary_pos_emb_interleave": replacements.rope_pairs_apart,
        "longcat_flash_apply_rotary_pos_emb_interleave + llama_rotate_half": replacements.rope_pairs_apart,
    },
)
# Angles are stored twice in a row.
_IN_A_ROW = Table(
    "rotations",
    {
        "cohere_apply_rotary_pos_emb + cohere_rotate_half": replacements.rope_pairs_in_a_row,
        "ernie4_5_vl_moe_apply_rotary_pos_emb + deepseek_v4_rotate_half": replacements.rope_pairs_in_a_row,
        "glm4v_apply_rotary_pos_emb + deepseek_v4_rotate_half": replacements.rope_part_in_a_row,
    },
)
# Angles of any kind: the stand-ins accept them unchanged.
_AS_THEY_ARE = Table(
    "rotations",
    {
        "llama_apply_rotary_pos_emb + llama_rotate_half": replacements.rope_whole,
        "hunyuan_vl_apply_rotary_pos_emb + llama_rotate_half": replacements.rope_whole_cast_back,
        "gpt_oss_apply_rotary_pos_emb + gpt_oss_apply_rotary_emb": replacements.rope_once,
        "gpt_oss_5_0_0_apply_rotary_pos_emb + gpt_oss_apply_rotary_emb": replacements.rope_once,
        "qwen2_vl_apply_rotary_pos_emb_vision + llama_rotate_half": replacements.rope_of_patches,
        "llama4_apply_rotary_emb": replacements.rope_complex,
        "deepseek_v2_apply_rotary_emb": replacements.rope_complex_by_heads,
        "llama4_vision_apply_rotary_emb + llama4_reshape_for_broadcast": replacements.rope_complex_of_patches,
        "codegen_apply_rotary_pos_emb + codegen_rotate_every_two": replacements.rope_pairs_alone,
    },
)
_ROUTERS = Table(
    "experts",
    {
        "Qwen3MoeTopKRouter": partial(routers.by_softmax, normalized="norm_topk_prob"),
        "Qwen3_5MoeTopKRouter": routers.by_softmax,
        "MixtralTopKRouter": partial(routers.by_softmax, weights="float32"),
        "JambaTopKRouter": partial(routers.by_softmax, normalized=False, weights="hidden_states"),
        "GptOssTopKRouter": partial(routers.by_softmax, biased=True),
        "GraniteMoeTopKRouter": partial(routers.by_softmax, wide=True, weights="hidden_states"),
        "DeepseekV3TopkRouter": routers.by_sigmoid,
    },
)
# The auxiliary loss in releases from 5.23, from 5.17 and from 5.0 on.
_BALANCE = "load_balancing_loss_func"
_BALANCES = Table(
    "experts", dict.fromkeys((f"mixtral_{_BALANCE}", f"mixtral_5_17_0_{_BALANCE}", f"mixtral_5_0_0_{_BALANCE}"), True)
)


class Module:
    """The classes and functions in a module's text, which is not executed."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        body = ast.parse(text).body
        self.functions = {x.name: x for x in body if isinstance(x, ast.FunctionDef)}
        self.classes = {x.name: x for x in body if isinstance(x, ast.ClassDef)}
        self.methods = {
            f"{kind}.{method.name}": method
            for kind, definition in self.classes.items()
            for method in definition.body
            if isinstance(method, ast.FunctionDef)
        }
        self.forwards = {kind: x for kind in self.classes if (x := self.methods.get(f"{kind}.forward")) is not None}
        self._names: dict[int, frozenset[str]] = {}
        self._set: dict[str, list[tuple[str, ast.expr]]] = {}

    def names(self, function: ast.FunctionDef, name: str) -> bool:
        """Return whether a function names a variable."""
        found = self._names.get(id(function))
        if found is None:
            found = frozenset(x.id for x in ast.walk(function) if isinstance(x, ast.Name))
            self._names[id(function)] = found
        return name in found

    def attributes_set(self, kind: str) -> list[tuple[str, ast.expr]]:
        """Return the attributes that the methods of a class set, with the values."""
        if kind not in self._set:
            nodes = [x for x in ast.walk(self.classes[kind]) if isinstance(x, ast.Assign)]
            self._set[kind] = [(x.targets[0].attr, x.value) for x in nodes if isinstance(x.targets[0], ast.Attribute)]
        return self._set[kind]

    @functools.cached_property
    def norms(self) -> dict[str, Norm]:
        """The norms with a known form: class name to description."""
        found = self.shaped(_NORMS, "Norm")
        return {kind: norm for kind, norm in found.items() if self.methods_of(kind) is not None}

    def methods_of(self, kind: str) -> tuple[str, ...] | None:
        """Return the paths of the methods that a norm runs; None if one has an unknown form."""
        method = self.methods.get(f"{kind}._norm")
        if "self._norm(" not in ast.unparse(self.forwards[kind]):
            return (f"{kind}.forward",)
        return None if method is None or not _METHODS.get(method) else (f"{kind}.forward", f"{kind}._norm")

    def layer_norms(self, kind: str) -> list[str]:
        """Return the attributes that ``__init__`` of a class sets to torch's LayerNorm."""
        known = [name for name in _TORCHS if name not in self.classes]
        values = [(name, x) for name, x in self.attributes_set(kind) if isinstance(x, ast.Call)]
        return list(dict.fromkeys(name for name, x in values if ast.unparse(x.func) in known))

    @functools.cached_property
    def experts(self) -> dict[str, tuple[Callable[..., Any], tuple[str, ...]]]:
        """The layers of experts with a known form: class name to the replacement and the paths that it relies on."""
        found: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
        for kind, forward in self.forwards.items():
            parts = self.parts(kind) if "Mo" in kind else {}
            paths = tuple(f"{parts.get(name)}.forward" for name in ("experts", "router"))
            if all(path in self.methods for path in paths):
                make = _EXPERTS.get(forward, *(self.methods[path] for path in paths))
                found |= {kind: (make, paths)} if make is not None else {}
        return found

    @functools.cached_property
    def linears(self) -> list[str]:
        """The classes of linear layers that compute the same as torch's."""
        return [kind for kind, x in self.forwards.items() if "Linear" in kind and _LINEARS.get(x)]

    def parts_of_mlp(self, kind: str) -> tuple[list[str], list[str]]:
        """Return the attributes that ``__init__`` of a class sets to linear layers, and those set to activations."""
        known = [name for name in (*_MADE_LINEAR, *self.linears) if name not in self.classes or name in self.linears]
        values = [(name, ast.unparse(value)) for name, value in self.attributes_set(kind)]
        linears = [name for name, text in values if text.partition("(")[0] in known]
        return linears, [name for name, text in values if text.startswith(_MADE_ACTIVE)]

    @functools.cached_property
    def activations(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """The activations with a known form: class name to the activation's name and the paths of the code it calls."""
        found: dict[str, tuple[str, tuple[str, ...]]] = {}
        for kind, forward in self.forwards.items():
            if "gelu" in kind.lower():
                methods = [path for path in self.methods if self.names(forward, path.partition(".")[0])]
                called = {path: self.methods[path] for path in methods}
                called |= {
                    name: function
                    for name, function in self.functions.items()
                    if any(self.names(self.methods[path], name) for path in methods)
                }
                name = _ACTIVATIONS.get(forward, *called.values())
                found |= {kind: (name, tuple(called))} if name else {}
        return found

    def shaped(self, table: Table, part: str, most: int = 7) -> dict[str, Any]:
        """Return the values of a table by class.

        Args:
            table: the forms.
            part: a part of the classes' names.
            most: the largest number of statements in a forward.
        """
        small = {kind: x for kind, x in self.forwards.items() if part in kind and len(x.body) <= most}
        values = {kind: table.get(x) for kind, x in small.items() if not x.decorator_list}
        return {kind: value for kind, value in values.items() if value is not None}

    @functools.cached_property
    def rotations(self) -> dict[str, tuple[Callable[..., Any], tuple[str, ...]]]:
        """The rotations with a known form: name to the replacement and the paths that it relies on.

        A rotation has a replacement if the module stores its angles in the layout that the replacement expects.
        """
        rotaries = [kind for kind in self.forwards if "Rotary" in kind and "Vision" not in kind]
        made_by = (f"{kind}.{name}" for kind in rotaries for name in ("forward", "recomposition_frequencies"))
        angles = tuple(path for path in made_by if path in self.methods)
        tables = [
            table
            for table, in_a_row in ((_TWICE, False), (_IN_A_ROW, True))
            if rotaries and all(patterns.stores_twice(self.classes[kind], in_a_row) for kind in rotaries)
        ]
        found = {}
        for name, function in self.functions.items():
            if "rotary" not in name or not self.callers(name):
                continue
            helpers = tuple(other for other in self.functions if self.names(function, other))
            code = (function, *(self.functions[other] for other in helpers))
            for table in (*tables, _AS_THEY_ARE):
                if name not in found and (make := table.get(*code)) is not None:
                    found[name] = (make, helpers if table is _AS_THEY_ARE else (*helpers, *angles))
        return found

    def norms_set(self, kind: str) -> dict[str, str]:
        """Return the attributes that ``__init__`` of a class sets to norms of the module, and their classes."""
        return {name: made for name, made in self.parts(kind).items() if made in self.norms}

    def parts(self, kind: str) -> dict[str, str]:
        """Return the attributes that ``__init__`` of a class sets to the module's classes, and these classes."""
        found: dict[str, str | None] = {}
        for name, value in self.attributes_set(kind):
            made = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else None
            found[name] = made if found.get(name, made) == made else None
        return {name: made for name, made in found.items() if made in self.classes}

    def whole(self, kind: str) -> whole_layers.Parts | None:
        """Return the parts of a decoder layer that may run as one op; None if a part has another form."""
        parts = self.parts(kind)
        attention, mlp = parts.get("self_attn", ""), parts.get("mlp", "")
        norms = _LAYERS.get(self.forwards[kind]) if {attention, mlp} <= self.forwards.keys() else None
        if norms is None:
            return None
        forward, made = self.forwards[attention], {*self.norms_set(kind).values(), *self.norms_set(attention).values()}
        heads, handed, forms = _ATTENTIONS.get(forward), patterns.handed(forward), {self.norms[norm] for norm in made}
        if heads is None or not whole_layers.NUMBERS.keys() >= set(handed) or len(forms) != 1:
            return None
        form = forms.pop()
        rotation = next((name for name in self.rotations if self.names(forward, name)), "")
        is_plain = bool(rotation) and self.rotations[rotation][0] is replacements.rope
        if not is_plain or form.scaled is not True or _MLPS.get(self.forwards[mlp]) is not replacements.gated_mlp:
            return None
        return whole_layers.Parts(norms, form, attention, mlp, heads, rotation, handed)

    def callers(self, function: str) -> list[str]:
        """Return the paths of the methods that call a function of the module."""
        return [path for path, method in self.methods.items() if self.names(method, function)]

    def has(self, kind: str, pattern: Callable[[ast.FunctionDef], int]) -> bool:
        """Return whether the forward of a class contains the statements of a pattern."""
        copied: ast.FunctionDef = pickle.loads(pickle.dumps(self.forwards[kind]))
        return pattern(copied) > 0


def patches_of(module: Module, model_type: str) -> list[Patch]:
    """Return the patches of a module's code that has a known form: routers, then ops in ``OF_MODELS``' order."""

    def add(op: str, path: str, make: Callable[..., Any], relies_on: Iterable[str] = (), **more: Any) -> None:
        code = module.methods | module.functions
        relied = tuple((other, (digest_of_tree(code[other]),)) for other in relies_on)
        digests = (digest_of_tree(code[path]),)
        patches.append(Patch(op, model_type, module.name, path, make, digests, relied, **more))

    patches: list[Patch] = []
    for kind, make in module.shaped(_ROUTERS, "Router", 20).items():
        add(EXPERTS, f"{kind}.forward", make)
    balance = module.functions.get(_BALANCE)
    callers = tuple(module.callers(_BALANCE))
    if balance is not None and callers and _BALANCES.get(balance):
        add(EXPERTS, _BALANCE, routers.balance, callers=callers)
    first, patches = patches, []
    _add_shaped(module, add)
    for kind in module.forwards:
        _add_fused(module, kind, add)
    # A method has one stand-in; a function that it calls may have its own.
    taken = {patch.attribute for patch in patches}
    for kind in module.forwards:
        if f"{kind}.forward" not in taken:
            _add_torchs_layers(module, kind, add)
    taken = {patch.attribute for patch in patches}
    for kind, forward in module.forwards.items():
        turns = any(module.names(forward, rotation) for rotation in module.rotations)
        if turns and f"{kind}.forward" not in taken and module.has(kind, patterns.projected):
            add("rope", f"{kind}.forward", layers.projected_together, takes_in=("rope",))
    return [*first, *sorted(patches, key=lambda patch: (*OF_MODELS, EXPERTS).index(patch.ops[-1]))]


def _add_shaped(module: Module, add: Callable[..., None]) -> None:
    """Add the patches of functions that match as a whole."""
    for kind, norm in module.norms.items():
        helpers = (module.methods_of(kind) or ())[1:]
        by_helper = partial(replacements.rms_norm_by_helper, norm=norm)
        whole = partial(replacements.rms_norm, norm=norm) if norm != PLAIN else replacements.rms_norm
        add("rms_norm", f"{kind}.forward", by_helper if helpers else whole, helpers)
    for op, table, part in (
        ("rms_norm", _GATED_NORMS, "NormGated"), ("layer_norm", _LAYER_NORMS, "LayerNorm"), ("swiglu", _MLPS, ""),
    ):  # fmt: skip
        for kind, make in module.shaped(table, part).items():
            add(op, f"{kind}.forward", make)
    for kind, known in module.experts.items():
        add(EXPERTS, f"{kind}.forward", *known)
    for kind, (name, relied) in module.activations.items():
        add("mlp", f"{kind}.forward", partial(replacements.activation, kind=name), relied)
    for name, (make, relied) in module.rotations.items():
        add("rope", name, make, relied, callers=tuple(module.callers(name)), covers=("layer_norm",))


def _add_fused(module: Module, kind: str, add: Callable[..., None]) -> None:
    """Add the patches of a forward with statements that are fused: norms of heads, sums and norms, head and loss."""
    forward, path, norms = module.forwards[kind], f"{kind}.forward", module.norms_set(kind)
    written = {norm: module.norms[norm] for norm in norms.values()}
    methods = tuple(method for norm in written for method in module.methods_of(norm) or ())
    for rotation, (make, angles) in module.rotations.items() if norms else ():
        pattern = partial(patterns.qk_norm_rope, norms=norms, rotation=rotation)
        if make in layers.TURNS and module.names(forward, rotation) and module.has(kind, pattern):
            stand_in = partial(layers.qk_norm_rope, norms=tuple(norms), kinds=written, rotation=rotation, make=make)
            add("qk_norm_rope", path, stand_in, (*methods, rotation, *angles), covers=("rope",))
            break
    if norms and module.has(kind, partial(patterns.sums_and_norms, norms=norms)):
        add("fused_add_rms_norm", path, partial(layers.fused_add_rms_norm, norms=tuple(norms), kinds=written), methods)
        if (parts := module.whole(kind)) is not None:
            besides = ("rms_norm", "swiglu", "rope", *(("qk_norm_rope",) if parts.heads else ()))
            whole = partial(whole_layers.decoder, norms=tuple(norms), kinds=written, parts=parts)
            add("fused_add_rms_norm", path, whole, methods, besides=besides)
    if "labels" in ast.unparse(forward.args) and module.has(kind, patterns.head_and_loss):
        add(OF_MODELS[-1], path, loss.fused_linear_cross_entropy, takes_in=(EXPERTS,))


def _add_torchs_layers(module: Module, kind: str, add: Callable[..., None]) -> None:
    """Add the patches of a forward that calls torch's layer norms, or is an MLP without a gate, or both."""
    norms, path = module.layer_norms(kind), f"{kind}.forward"
    is_normed = bool(norms) and module.has(kind, partial(patterns.normed, norms=norms))
    if is_normed:
        add("layer_norm", path, partial(layers.layer_norm, norms=tuple(norms)))
    linears, activations = module.parts_of_mlp(kind)
    if linears and activations and module.has(kind, partial(patterns.mlp, linears=linears, activations=activations)):
        relied = [f"{other}.forward" for other in module.linears]
        make = partial(layers.mlp, linears=linears, activations=activations, others=tuple(module.linears))
        if is_normed:
            add("layer_norm+mlp", path, partial(make, norms=tuple(norms)), relied, covers=("layer_norm", "mlp"))
        add("mlp", path, make, relied)


@functools.cache
def patches_in(name: str, model_type: str) -> tuple[Patch, ...]:
    """Return the patches of an installed module; none if its source is not available."""
    path = path_of(name)
    try:
        return tuple(patches_of(Module(name, path.read_text(encoding="utf-8")), model_type)) if path else ()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ()


def path_of(name: str) -> Path | None:
    """Return the path of a module's source; look in its package's folder if the module is not imported."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
        return Path(file) if file else None
    package, *parts = name.split(".")
    spec = importlib.util.find_spec(package) if package else None
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [folder.joinpath(*parts).with_suffix(".py") for folder in folders] if parts else [Path(spec.origin or "")]
    return next((file for file in files if file.suffix == ".py" and file.exists()), None)
