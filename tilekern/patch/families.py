"""The families whose patched models are tested against the unpatched ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from tilekern.patch.matching import patches_in, path_of
from tilekern.patch.table import Patch
from tilekern.runtime.awaiting import is_being_imported
from tilekern.runtime.switches import EXPERTS, OF_MODELS

# One letter per op of OF_MODELS, in order: norm, layer norm, mlp, plain mlp, qk_norm_rope, rope, sum and norm, loss.
_LETTERS = dict(zip("nlmpqrsh", OF_MODELS, strict=True))
# The families with each set of ops; the test of each family runs every op named here.
_SERVED = {
    "nmqrsh": "afmoe doge dots1 exaone4 exaone_moe flint gemma3 gemma4 gemma4_unified glm4_moe hunyuan_v1_dense "
    "hunyuan_v1_moe hy_v3 kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama4 mellum qwen3 qwen3_5 qwen3_5_moe "
    "qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe",
    "npqrsh": "apertus1p5 nanochat",
    "nmrsh": "aria axk1 bailing_hybrid cwm deepseek_v2 deepseek_v3 diffllama ernie4_5 ernie4_5_moe ernie4_5_vl_moe "
    "falcon_h1 gemma gemma2 glm glm4 glm4_moe_lite glm4v glm4v_moe granite granite_swa granitemoe_swa "
    "granitemoehybrid granitemoeshared helium hrm_text hunyuan_vl hyperclovax llama mimo_v2_flash minicpm3 "
    "ministral ministral3 mistral mistral4 mllama olmo2 olmo3 olmo_hybrid paddleocr_vl phi3 phi4_multimodal qwen2 "
    "qwen2_5_vl qwen2_moe qwen2_vl seed_oss smollm3 solar_open vaultgemma youtu",
    "nlmrsh": "deepseek_v32 glm_moe_dsa",
    "nprsh": "arcee",
    "nqrsh": "apertus gemma3n",
    "nmsh": "jamba kimi_linear",
    "nrsh": "bitnet flex_olmo gpt_oss granitemoe jetmoe minimax minimax_m2 mixtral olmoe",
    "lmrh": "cohere cohere2 cohere2_moe olmo stablelm",
    "lprh": "codegen falcon gpt_neox gptj jais2 nemotron persimmon phi starcoder2",
    "nmrs": "bamba pixtral",
    "nph": "nemotron_h",
    "nmrh": "longcat_flash",
    "nprh": "zaya",
    "nh": "falcon_mamba mamba",
    "lph": "biogpt bloom gpt2 gpt_bigcode gpt_neo mpt opt xglm",
    "lrh": "phimoe",
    "lp": "clip siglip",
    "h": "aya_vision got_ocr2 idefics3 internvl llava llava_next mistral3 paligemma smolvlm",
}
# Ops that run only for images: in vision encoders, and in layers that pass their results to the text model.
_SEEN = {
    "nlp": "internvl",
    "np": "mistral3",
    "lp": "hunyuan_vl idefics3 llama4 mllama qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm",
    "l": "aya_vision glm4v glm4v_moe",
    "p": "llava llava_next",
}


class Family(NamedTuple):
    """A family of models.

    Attributes:
        model_type: ``model_type`` of the configuration, and transformers' folder of its code.
        ops: ops patched on the newest supported release of transformers, not counting routers.
        seen: the ops among these that run only for images.
    """

    model_type: str
    ops: tuple[str, ...]
    seen: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The module that holds its classes."""
        return module_of(self.model_type)

    @property
    def is_here(self) -> bool:
        """Whether the installed transformers has it."""
        return path_of(self.module) is not None

    def patches(self) -> tuple[Patch, ...]:
        """Return patches for code with a known form in the installed transformers, and an empty row for each other op.

        The module is read, not imported.
        """
        found = patches_in(self.module, self.model_type)
        lacking = [op for op in self.ops if op not in {patch.op for patch in found}]
        known = [patch for patch in found if {*self.ops, EXPERTS}.issuperset(patch.ops)]
        return (*known, *(Patch(op, self.model_type, self.module, "", _nothing, ()) for op in lacking))


def _nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    return original


def _ops(letters: str) -> tuple[str, ...]:
    return tuple(op for letter, op in _LETTERS.items() if letter in letters)


def _family(name: str, letters: str) -> Family:
    seen = "".join(more for more, names in _SEEN.items() if name in names.split())
    return Family(name, _ops(letters + seen), _ops(seen))


FAMILIES: dict[str, Family] = {
    name: _family(name, letters) for letters, names in _SERVED.items() for name in names.split()
}


def family_of(module: str) -> Family | None:
    """Return the family whose classes are in a module."""
    return _BY_MODULE.get(module)


def module_of(model_type: str) -> str:
    """Return the name of transformers' module with the classes of a family, tested here or not."""
    return f"transformers.models.{model_type}.modeling_{model_type}"


def is_of_transformers(module: str) -> bool:
    """Return whether a module of this name holds the classes of a transformers family, tested here or not."""
    return module.startswith("transformers.models.") and ".modeling_" in module


def may_have_forms(module: str) -> bool:
    """Return whether a module may contain models; torch's and transformers' own base classes do not."""
    top = module.partition(".")[0]
    return is_of_transformers(module) or top not in ("builtins", "torch", "transformers", "typing", "tilekern")


def imported() -> list[str]:
    """Return the imported modules of all families, tested here or not; modules still being imported are left out."""
    modules = list(sys.modules.items())
    return [name for name, module in modules if is_of_transformers(name) and not is_being_imported(module)]


_BY_MODULE = {family.module: family for family in FAMILIES.values()}
