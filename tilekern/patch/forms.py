"""Forms: functions of which many families of models have copies, by their shapes, and what stands in for each.

A form is matched against the classes and functions of a module, whatever the family. Norms, MLPs, rotations and
routers are known by their shapes (:mod:`tilekern.patch.shapes`); attentions, layers and heads, of which most of the
text does not matter, by the statements in them that are exchanged (:mod:`tilekern.patch.patterns`).
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

from tilekern.patch import experts, layers, loss, patterns, replacements, routers
from tilekern.patch.digests import digest_of_tree
from tilekern.patch.shapes import shape_of
from tilekern.patch.table import PLAIN, Norm, Patch
from tilekern.runtime.switches import EXPERTS, OPS

_NORMS = {
    # ``weight * (x / sqrt(mean(x^2) + variance_epsilon)).to(dtype of x)``.
    "97c299fa1548c4048eae806e7e4c278d3b2dd6e7b417ccae49646f69bac9a520": PLAIN,
    # ``(weight * x / sqrt(mean(x^2) + variance_epsilon)).to(dtype of x)``.
    "236adb3abb030e1399af1b55c1215251b855cbfdcf4d64bba278c25596b0a17e": Norm(casting_mode="gemma"),
    # ``((1 + weight) * _norm(x)).to(dtype of x)``.
    "29b720b65422e4c7b086582be06683960925e755b6b4ab4359bca62a46f3ef62": Norm("eps", 1.0, "gemma"),
    # The second with the weight cast to float32.
    "82a6c2b5ce69b3e7ed347187acd57fdbb8833acc542b928a3847d26c8b5588fa": Norm(casting_mode="gemma"),
    # ``(weight * _norm(x)).to(dtype of x)``; the second may have no weight.
    "349b88c58b0394a4a996e6e35507a29f17177294db8f1412b71d45bb7ca2a906": Norm("eps", casting_mode="gemma"),
    "a7a36a3c661159d13198567dd85400cdac82514cc4bb5750a18cd748c2aa636d": Norm("eps", 0.0, "gemma", "with_scale"),
    # ``_norm(x).to(dtype of x) * weight``, and without the weight.
    "99b3d5a323cbb992742758066065ec8e659fca3a2d3f40da03fdf42d49af5e7b": Norm("eps"),
    "f717795c9a46eab158aa5a9ceb8655a9026a12ded77ac900275a8af9669afac0": Norm("eps", 0.0, "gemma", scaled=False),
}
# ``x / sqrt(mean(x^2) + eps)`` by a root and by a power, the method ``_norm`` of a class that has one.
_METHODS = (
    "d88575f450985cd5b6a3c3b92bbbaa320f84fb519f3a01ee52110dc84047086b",
    "a410980622b805e31942cd814201b6aa9f93df09a18c74d5aa9f0bf30ff82811",
)
# ``weight * (x / sqrt(mean(x^2) + variance_epsilon)).to(dtype of x) * activation(gate)``, the last in float32.
_GATED_NORMS = {"09bffaaf2247745817c3bd2a4c641f17af05e2b888b5cdab47a5153bc2e16402": replacements.rms_norm_gated}
_LAYER_NORMS = {
    # ``(weight * (x - mean(x)) / sqrt(var(x) + variance_epsilon)).to(dtype of x)``.
    "5fd0291e913344e9117c553a0b313c9878405867bcea63c2a9e4e3c7d5214ccf": replacements.layer_norm_unbiased,
    # torch's by ``weight + 1``, of two releases, whose devices alone differ.
    "b60f1767055586b26945691f01568363a51a8a982d3e09bc27b08741f8db2888": replacements.layer_norm_from_1,
    "83993e6b3108dc4dbed91dd70e24356886c860be2415d9228adf37b04daef69d": replacements.layer_norm_from_1,
    # torch's of each head by itself.
    "e0c4736c7a9d7c4a1521b0c3ad0d57196351d6b483487dab6b446faff232e748": layers.layer_norm_per_head,
    # torch's without weight and bias, in float32.
    "20e27ada9aaef997076ab2bda7bc78390d1d580d8a6edad592ebbcb05b6dc007": replacements.layer_norm_alone,
}
# How ``__init__`` makes torch's layer norms; the last may make another one, which then runs as it is.
_TORCHS = ("nn.LayerNorm", "torch.nn.LayerNorm", "LayerNorm", "NORM2FN[config.norm_type]")
_MLPS = {
    # ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, by way of a variable and at once.
    "054836297e76c35300f38c2c34570cc1817a980b8e556862f9d05134300f9be7": replacements.gated_mlp,
    "548a505913086122ddd6d272ac293d1ec0da0692352930dfd18242fe48a38b8b": replacements.gated_mlp,
    "37a2e5ae033e56501cc51d6e0e9775fa4195aa0d1484000300ca001f92fdb9b9": partial(
        replacements.gated_mlp, activation="activation_fn"
    ),
    # The first one with dropout of its result.
    "c47901667edb199c1d1c614aa680aa73ab7bdcf3f75a7533fdf89077993a22e0": partial(
        replacements.gated_mlp, dropout="residual_dropout"
    ),
    # ``w2(silu(w1(x)) * w3(x))``.
    "5b997711e2dd5c179353efbae71827d6c6f131d8b93d0a39d2616a2df006197e": partial(
        replacements.gated_mlp, activation="", layers=("w1", "w3", "w2")
    ),
    # ``down_proj(up_proj(x) * act_fn(gate_proj(x) * gate_multiplier)) * down_multiplier``.
    "30f58a896f0a49ebf5f9a400c9378a3d11e4677fdca0f41e99bf665a30756fb0": replacements.multiplied_mlp,
    # The first one of the two halves of ``gate_up_proj(x)``, and of ``input_linear(x)``.
    "7fe71be2cc49abe13d55d10136915709392465e4a0ad1febebcf86f145a1b7a1": replacements.joined_mlp,
    "a6332b0ade6c4a29dc60bbce244b37bc78ecccf9bf46184b9c9c4f38f791098f": partial(
        replacements.joined_mlp, activation="activation", layers=("input_linear", "output_linear")
    ),
}
# A layer of experts, what it calls ``experts``, and what it calls ``router``: Llama 4's.
_EXPERTS: dict[tuple[str, ...], Callable[..., Any]] = {
    (
        "72508cc3ec86af0fd78080bef932372f6b30590f1f8c26b03c2622a25334db9f",
        "641203c7773d12d4bfe628b79dd47a9cd6cfd3a514f2b6c1a331f777b88d4f7a",
        "8c4b5bda85bf3d304040dd5136aeae73e801bf8b0bc81f063480c1023e7b9a90",
    ): experts.scaled_layer
}
# The linear layers of families' own that compute what torch's do: ``input @ weight.T``, and the bias added to that.
_LINEARS = ("43d817a081b3169e27350c0c494b5e48785e0c4409a811639b0e0105f2756e93",)
# An activation's forward and what that calls, each with the activation that it is: BLOOM's, with a gradient of its own.
_ACTIVATIONS = {
    (
        "f6b074225573d27b9a6ae818953d0dc47c50ab35734474b01b6fb299d3b361a2",
        "a2dbac289260bcdbe3c19445768ee07f92a491e248e9c8efab045968ec2f87cb",
        "08c4b91a43908912027eb56f4700f54e4d6b9ec1075f582f5ae934d355f61a23",
        "a025b2c7a0d11fbb61b7394744a08b30a54997f5be1dceaf6fd8632e3b4f0ea7",
        "93f73694112d1a8326a945ba0197f097e4db9b4d0b4fbef0ea870129d904cd38",
    ): "gelu_tanh"
}
# How ``__init__`` makes linear layers and activations.
_MADE_LINEAR, _MADE_ACTIVE = ("nn.Linear", "torch.nn.Linear", "Conv1D"), ("ACT2FN[", "get_activation(", "nn.GELU(")
# ``cat((-second half, first half))``; ``(-x[2i + 1], x[2i])`` for each pair, in two ways; both halves by turns.
_HALVES = "6bb1d912795ebafbd980d054c74f863791fed174c6fee5abb5d3a79b7756d119"
_PAIRS = (
    "7e41828ec489fbef7e83548170dbde0e44a8f8f3e1cffacb85217c2aba72087e",
    "edde18d4c0c6bd1aeb892b07d0dab9308cff666dacfbfc8cfbafff69a1e9ef37",
)
_CHUNKS = "0c855edfba59b95fbaa11f92aac89f94ddfb9a0c21c986c11e69442c45dd5b1f"
# By the shapes of a rotation and of the function of the module that it calls. Angles are stored twice, halves or not:
_TWICE = {
    # ``q * cos + rotate_half(q) * sin``, and so for k.
    ("5c512eaee8adfce5bb118d0a6ae7d4a8d0531b96ba508496782a2839bf2e1c84", _HALVES): replacements.rope,
    # The same the other way around, by ``cat((second half, -first half))``.
    (
        "5c512eaee8adfce5bb118d0a6ae7d4a8d0531b96ba508496782a2839bf2e1c84",
        "8f22c20a9b3b3070bf39aa54449308ac0c6fb13c3ca21584bed7f88ce1fa828a",
    ): replacements.rope_back,
    # The first by angles of three positions.
    ("c7b26c8a0b28e92361ec7ae04461605b87c28c96f88e8c5d115051921a5a2847", _HALVES): replacements.rope_multimodal,
    # The same, cast to the dtypes of q and k, and in float32 before that.
    ("bece90e1691b797048f14475f6bffff75c730b189b76c41ca69e3eb9ca4525b2", _HALVES): replacements.rope_cast_back,
    ("303ea2b0f50f0aa98fafb5033a59b81742a62fbe29fa3b9fb108a866c514214a", _HALVES): replacements.rope_cast_back,
    # The first of one tensor.
    ("fe84855ae6de80b8ce1c422f3d55c1adf4c9d72c4ec5ce2d2546dcfe8a5b0f1f", _HALVES): replacements.rope_alone,
    # The same of the beginning of each head, in three ways.
    ("e9ab7d7970cffe824d749380ee04e09eaffcf02a3e3314eff6f52d509d56fc58", _HALVES): replacements.rope_part,
    ("16814712639fccf8c793f0bfda7f4dc5ce9617308ca0829eb74292876cc84b4a", _HALVES): replacements.rope_part,
    ("2319eb3f6f3aaac1984d10d863640f4f0cceca6350459e34f85ec9546c48b10b", _HALVES): replacements.rope_part,
    # Pairs by the first half of the angles, each for two numbers: of a part of each head, of all of it, cast back.
    ("e2effc6efdfa420807a9212145b50cc47a21fdebfbe1dba1a3b4f8d5506f0e45", _PAIRS[0]): replacements.rope_pairs,
    ("8a4af7a1b3ff3ec813e468d0553996524b639c101bb866b019c831a012ebb1b8", _PAIRS[0]): replacements.rope_pairs,
    ("a08c805df0ec0d650a717a6de393be5ee9211ff3c128625114f4358ea905b006", _PAIRS[0]): replacements.rope_pairs,
    ("3db0eaf5cb8aa3bf251e16bb93b53c83116a1324c5b284f85eef8fb89db3a50a", _PAIRS[0]): replacements.rope_pairs_cast_back,
    # Pairs, all first numbers of which come first in the result; by their slices, and moved there before.
    ("0e8830bc8e8cd5707b10e72205ee2dd347ac5cf1059287b83a8debe75b275a3f", ""): replacements.rope_pairs_apart,
    ("ff7a101f2efdfe4fc497c43c51905297f88a4fb43fa7c223dc0e88e7ff7bcde2", _HALVES): replacements.rope_pairs_apart,
}
# Pairs by angles that are stored twice in a row: in float32, cast back, and of a part of each head.
_IN_A_ROW = {
    ("fc077fffca05e54936fba83f3ca440e9932918389d3fe1084c52b74d8929a2df", _PAIRS[1]): replacements.rope_pairs_in_a_row,
    ("d1369a425a406f6b60c352d54d76d5fa3c93d8ea981a9cc74d634e367d86602c", _PAIRS[0]): replacements.rope_pairs_in_a_row,
    ("e1ac2ac823dab41f3edb22fdd5f948253db6ec808c7d8cc2984d0fafc92008f9", _PAIRS[0]): replacements.rope_part_in_a_row,
}
# By the angles as they are: whole heads, cast back or not; halves by halves; pairs taken for complex numbers.
_AS_THEY_ARE = {
    ("5c512eaee8adfce5bb118d0a6ae7d4a8d0531b96ba508496782a2839bf2e1c84", _HALVES): replacements.rope_whole,
    ("303ea2b0f50f0aa98fafb5033a59b81742a62fbe29fa3b9fb108a866c514214a", _HALVES): replacements.rope_whole_cast_back,
    ("fcd9d9dae21834da0799b32adba80c40ff54dfcceb13a404d0616edbf30a69f5", _CHUNKS): replacements.rope_once,
    ("984e7942ca96e21e5c57c49fae1e682a4519fd2acdd94d74f2c83a9eaf30ed68", _CHUNKS): replacements.rope_once,
    # Of patches without a batch.
    ("85f866739404c4f78eed8b25b440d1e8d6bc7812fadcab4059bb7b4bcddaa1af", _HALVES): replacements.rope_of_patches,
    ("33759f0e733bdd0e8afdcc9abf33adce54afe3a63c25e5bd99539188ae3f81cb", ""): replacements.rope_complex,
    ("12b48959aef90bb52bdfb205f6cfdb3ad3437699954a31884bd055a7d84c476d", ""): replacements.rope_complex_by_heads,
    (
        "995578b887ca06eb1f67a12badcdcd91130c20dcc566e50fb51f4d7e1775fa78",
        "2f614a0af4b7a08feeec85d79906c3a7ef71fcf23f860de04a841fa8a7be8811",
    ): replacements.rope_complex_of_patches,
    # Pairs of one tensor, by angles that are doubled in the function.
    (
        "38dbcba4270dc97e7b235f245f0099c0e8fb46eafa8bcfba11811444fd8f66a6",
        "b21841385dc49d912103a92acaf778a7829b708eb89962f5098ba310ff7b52c9",
    ): replacements.rope_pairs_alone,
}
_ROUTERS = {
    # ``softmax(linear(x))`` in float32 and its largest: normalised where an attribute says so, or always.
    "7559368512e56e692b82c5987ad344ecdf098cae54012252f1cb9c6d85e0938b": partial(
        routers.by_softmax, normalized="norm_topk_prob"
    ),
    "3194864c4027aa3e248d6d2fa58d409c49e855661fcf95cc76a1cbcf82099891": routers.by_softmax,
    # The second with weights in float32: Mixtral. Never normalised: Jamba.
    "fa60ae6d85adea0f57ee540b9b2242e78b39ea6b2ba75ae8bacbc194e6f3335e": partial(routers.by_softmax, weights="float32"),
    "739d4046465dc1e4b61f8c85b60462c56ff7187932952c8e662889de783ac298": partial(
        routers.by_softmax, normalized=False, weights="hidden_states"
    ),
    # The softmax of the largest logits: GPT-OSS, and in float32 GraniteMoE.
    "852b92d631744e8fdebe5e87f7ee3a3d6510bd7259a1456fb9b29f027c211fe3": partial(routers.by_softmax, biased=True),
    "50f3f7443ae401e40c19ce5578e900134d9bd3e02317ba1ef44dbfb26bc9ee17": partial(
        routers.by_softmax, wide=True, weights="hidden_states"
    ),
    # Sigmoids in groups, with a bias of the choice: DeepSeek-V3.
    "5102fbef7e77148c22c97986f96888bce7e49c5c79f436876b43867bf3315f51": routers.by_sigmoid,
}
# The auxiliary loss, ``load_balancing_loss_func``: from 5.23, from 5.17 and from 5.0 on.
_BALANCE = "load_balancing_loss_func"
_BALANCES = (
    "e6d3e72b198ce995b9aeea8c5cf4cbae5f74aa62c28a02081dbab6146142adb3",
    "68b94f8c77ef4c3e463970cac6ad6cdea43648332b9f45aa4970c86a84172571",
    "351dc8085a407412c3d5e111133ee8f865ea27222c3ef3f7209119f21474f5d9",
)


class Module:
    """The classes and functions of a module's text, which is not executed."""

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

    @functools.cached_property
    def norms(self) -> dict[str, Norm]:
        """The classes that are norms of a known form, and how each is written."""
        found = self._shaped(_NORMS, "Norm")
        return {kind: norm for kind, norm in found.items() if self.methods_of(kind) is not None}

    def methods_of(self, kind: str) -> tuple[str, ...] | None:
        """The paths of the methods that a norm's forward is made of; None where one has a form that is not known."""
        method = self.methods.get(f"{kind}._norm")
        if "self._norm(" not in ast.unparse(self.forwards[kind]):
            return (f"{kind}.forward",)
        if method is None or shape_of(method) not in _METHODS:
            return None
        return f"{kind}.forward", f"{kind}._norm"

    @functools.cached_property
    def gated_norms(self) -> dict[str, Callable[..., Any]]:
        """The classes that are norms with a gate of a known form, each with its replacement."""
        return self._shaped(_GATED_NORMS, "NormGated")

    @functools.cached_property
    def layer_norms(self) -> dict[str, Callable[..., Any]]:
        """The classes that are layer norms of a known form, each with its replacement."""
        return self._shaped(_LAYER_NORMS, "LayerNorm")

    def has_layer_norms(self, kind: str) -> list[str]:
        """The attributes that ``__init__`` of a class sets to torch's LayerNorm."""
        known = [name for name in _TORCHS if name not in self.classes]
        found = []
        for node in ast.walk(self.classes[kind]):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                target, called = node.targets[0], ast.unparse(node.value.func)
                found += [target.attr] if called in known and isinstance(target, ast.Attribute) else []
        return list(dict.fromkeys(found))

    @functools.cached_property
    def mlps(self) -> dict[str, Callable[..., Any]]:
        """The classes that are MLPs of a known form, each with its replacement."""
        return self._shaped(_MLPS, "")

    @functools.cached_property
    def experts(self) -> dict[str, tuple[Callable[..., Any], tuple[str, ...]]]:
        """The classes that are layers of experts of a known form: the replacement, and the paths that it relies on."""
        found: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
        for kind, forward in self.forwards.items():
            parts = self.parts(kind) if "Mo" in kind else {}
            experts, router = (f"{parts.get(name)}.forward" for name in ("experts", "router"))
            if experts in self.methods and router in self.methods:
                shapes = shape_of(forward), shape_of(self.methods[experts]), shape_of(self.methods[router])
                make = _EXPERTS.get(shapes)
                found |= {kind: (make, (experts, router))} if make is not None else {}
        return found

    @functools.cached_property
    def linears(self) -> list[str]:
        """The classes of linear layers that compute what torch's do."""
        return [kind for kind, x in self.forwards.items() if "Linear" in kind and shape_of(x) in _LINEARS]

    def parts_of_mlp(self, kind: str) -> tuple[list[str], list[str]]:
        """The attributes that ``__init__`` of a class sets to linear layers, and those that it sets to activations."""
        linears, activations = [], []
        known = [name for name in (*_MADE_LINEAR, *self.linears) if name not in self.classes or name in self.linears]
        for node in ast.walk(self.classes[kind]):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                made = ast.unparse(node.value)
                linears += [node.targets[0].attr] if made.partition("(")[0] in known else []
                activations += [node.targets[0].attr] if made.startswith(_MADE_ACTIVE) else []
        return linears, activations

    @functools.cached_property
    def activations(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """The classes that are activations of a known form: which, and the paths of what their forwards call."""
        found = {}
        for kind, forward in self.forwards.items():
            if "gelu" in kind.lower():
                methods = [path for path in self.methods if _names(forward, path.partition(".")[0])]
                helpers = [name for name in self.functions if any(_names(self.methods[path], name) for path in methods)]
                called = [*(self.methods[path] for path in methods), *(self.functions[name] for name in helpers)]
                shapes = tuple(shape_of(x) for x in (forward, *called))
                if shapes in _ACTIVATIONS:
                    found[kind] = (_ACTIVATIONS[shapes], (*methods, *helpers))
        return found

    @functools.cached_property
    def routers(self) -> dict[str, Callable[..., Any]]:
        """The classes that are routers of a known form, each with its replacement."""
        return self._shaped(_ROUTERS, "Router", 20)

    def _shaped(self, forms: dict[str, Any], part: str, most: int = 7) -> dict[str, Any]:
        small = {kind: x for kind, x in self.forwards.items() if part in kind and len(x.body) <= most}
        shapes = {kind: shape_of(x) for kind, x in small.items() if not x.decorator_list}
        return {kind: forms[shape] for kind, shape in shapes.items() if shape in forms}

    @functools.cached_property
    def rotations(self) -> dict[str, tuple[Callable[..., Any], tuple[str, ...]]]:
        """The functions that are rotations of a known form: the replacement of each, and the paths it relies on.

        A rotation has a replacement where its angles are stored as that takes them.
        """
        found = {}
        made_by = (f"{kind}.{name}" for kind in self.rotaries for name in ("forward", "recomposition_frequencies"))
        angles = tuple(path for path in made_by if path in self.methods)
        twice, in_a_row = (
            bool(self.rotaries) and all(patterns.stores_twice(self.classes[kind], rows) for kind in self.rotaries)
            for rows in (False, True)
        )
        for name, function in self.functions.items():
            if "rotary" not in name or not self.callers(name):
                continue
            helpers = tuple(other for other in self.functions if _names(function, other))
            key = (shape_of(function), "".join(shape_of(self.functions[other]) for other in helpers))
            if key in _TWICE and twice:
                found[name] = (_TWICE[key], (*helpers, *angles))
            elif key in _IN_A_ROW and in_a_row:
                found[name] = (_IN_A_ROW[key], (*helpers, *angles))
            elif key in _AS_THEY_ARE:
                found[name] = (_AS_THEY_ARE[key], helpers)
        return found

    @functools.cached_property
    def rotaries(self) -> list[str]:
        """The classes that make the text's angles."""
        return [kind for kind in self.forwards if "Rotary" in kind and "Vision" not in kind]

    def attributes(self, kind: str) -> dict[str, str]:
        """Of which of the module's norms each attribute is that ``__init__`` of a class sets."""
        return {name: made for name, made in self.parts(kind).items() if made in self.norms}

    def parts(self, kind: str) -> dict[str, str]:
        """Of which class of the module each attribute is that ``__init__`` of a class sets."""
        found: dict[str, str | None] = {}
        for node in ast.walk(self.classes[kind]):
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
                continue
            name, call = node.targets[0].attr, node.value
            made = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
            found[name] = made if found.get(name, made) == made else None
        return {name: made for name, made in found.items() if made in self.classes}

    def callers(self, function: str) -> list[str]:
        """The methods that call a function of the module."""
        return [path for path, method in self.methods.items() if _names(method, function)]

    def digest(self, path: str) -> str:
        """The digest of the function at a path."""
        return digest_of_tree((self.methods if "." in path else self.functions)[path])


def patches_of(module: Module, model_type: str) -> list[Patch]:
    """The code of a module that has one of the forms: routers, and the rest in the order of :data:`OPS`."""
    row = partial(_row, module, model_type)
    found = []
    for kind, norm in module.norms.items():
        make = partial(replacements.rms_norm, norm=norm) if norm != PLAIN else replacements.rms_norm
        found.append(row("rms_norm", f"{kind}.forward", make, _code(module, {"": kind})[1:]))
    found += [row("rms_norm", f"{kind}.forward", make) for kind, make in module.gated_norms.items()]
    found += [row("layer_norm", f"{kind}.forward", make) for kind, make in module.layer_norms.items()]
    found += [row("swiglu", f"{kind}.forward", make) for kind, make in module.mlps.items()]
    found += [row(EXPERTS, f"{kind}.forward", *known) for kind, known in module.experts.items()]
    for kind, (name, relied) in module.activations.items():
        found.append(row("mlp", f"{kind}.forward", partial(replacements.activation, kind=name), relied))
    for kind in module.forwards:
        found += _head_norms(module, kind, row)
    found += [
        row("rope", name, make, relied, callers=tuple(module.callers(name)), covers=("layer_norm",))
        for name, (make, relied) in module.rotations.items()
    ]
    for kind in module.forwards:
        norms = module.attributes(kind)
        if norms and _has(module, kind, partial(patterns.sums_and_norms, norms=norms)):
            written = {norm: module.norms[norm] for norm in norms.values()}
            make = partial(layers.fused_add_rms_norm, norms=tuple(norms), kinds=written)
            found.append(row("fused_add_rms_norm", f"{kind}.forward", make, _code(module, norms)))
    heads = [kind for kind in module.forwards if _has(module, kind, patterns.head_and_loss)]
    found += [row(OPS[-1], f"{kind}.forward", loss.fused_linear_cross_entropy, takes_in=(EXPERTS,)) for kind in heads]
    # One method has one stand-in; a function that it calls may have one of its own.
    taken = {patch.attribute for patch in found}
    for kind in module.forwards:
        if f"{kind}.forward" not in taken:
            found += _torchs_layers(module, kind, row)
    return [*_routers(module, row), *sorted(found, key=lambda patch: (*OPS, EXPERTS).index(patch.ops[-1]))]


def _torchs_layers(module: Module, kind: str, row: Callable[..., Patch]) -> list[Patch]:
    """The patches of a forward that calls torch's layer norms, of one that is an MLP without a gate, and of both."""
    named, found = module.has_layer_norms(kind), []
    if named and _has(module, kind, partial(patterns.normed, norms=named)):
        found.append(row("layer_norm", f"{kind}.forward", partial(layers.layer_norm, norms=tuple(named))))
    linears, activations = module.parts_of_mlp(kind)
    if linears and activations and _has(module, kind, partial(patterns.mlp, linears=linears, activations=activations)):
        relied = [f"{other}.forward" for other in module.linears]
        make = partial(layers.mlp, linears=linears, activations=activations, others=tuple(module.linears))
        if found:
            both = partial(make, norms=tuple(named))
            found.append(row("layer_norm+mlp", f"{kind}.forward", both, relied, covers=("layer_norm", "mlp")))
        found.append(row("mlp", f"{kind}.forward", make, relied))
    return found


def _routers(module: Module, row: Callable[..., Patch]) -> list[Patch]:
    """The patches of a module's routers and of their auxiliary loss."""
    found = [row(EXPERTS, f"{kind}.forward", make) for kind, make in module.routers.items()]
    balance = module.functions.get(_BALANCE)
    callers = tuple(module.callers(_BALANCE))
    if balance is not None and callers and shape_of(balance) in _BALANCES:
        found.append(row(EXPERTS, _BALANCE, routers.balance, callers=callers))
    return found


def _head_norms(module: Module, kind: str, row: Callable[..., Patch]) -> list[Patch]:
    """The patch of an attention that normalises each head of q and k beside their rotation."""
    norms = module.attributes(kind)
    for rotation, (make, angles) in module.rotations.items():
        turns = make in layers.TURNS and _names(module.forwards[kind], rotation)
        pattern = partial(patterns.qk_norm_rope, norms=norms, rotation=rotation)
        if norms and turns and _has(module, kind, pattern):
            written = {norm: module.norms[norm] for norm in norms.values()}
            stand_in = partial(layers.qk_norm_rope, norms=tuple(norms), kinds=written, rotation=rotation, make=make)
            relied = (*_code(module, norms), rotation, *angles)
            return [row("qk_norm_rope", f"{kind}.forward", stand_in, relied, covers=("rope",))]
    return []


def _row(
    module: Module, model_type: str, op: str, path: str, make: Callable[..., Any], relies_on: Iterable[str] = (),
    **more: Any,
) -> Patch:  # fmt: skip
    relied = tuple((other, (module.digest(other),)) for other in relies_on)
    return Patch(op, model_type, module.name, path, make, (module.digest(path),), relied, **more)


def _code(module: Module, norms: dict[str, str]) -> tuple[str, ...]:
    """The paths of what some norms are made of."""
    return tuple(path for kind in dict.fromkeys(norms.values()) for path in module.methods_of(kind) or ())


def _names(function: ast.FunctionDef, name: str) -> bool:
    """Whether a function names another one."""
    return any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(function))


def _has(module: Module, kind: str, pattern: Callable[[ast.FunctionDef], int]) -> bool:
    """Whether the forward of a class has a pattern's statements."""
    copied = ast.parse(ast.unparse(module.forwards[kind])).body[0]
    return isinstance(copied, ast.FunctionDef) and pattern(copied) > 0


@functools.cache
def patches_in(name: str, model_type: str) -> tuple[Patch, ...]:
    """The code of an installed module that has one of the forms; nothing where its source is not at hand."""
    path = path_of(name)
    try:
        return tuple(patches_of(Module(name, path.read_text(encoding="utf-8")), model_type)) if path else ()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ()


def path_of(name: str) -> Path | None:
    """The path of a module's source; one that is not imported is looked for in its package's folder."""
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
