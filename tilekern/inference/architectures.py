"""The models that the engine runs, read from their config.json: sizes, norms, rotations, and the names of weights.

Served are GPT-2 (OpenAI's as Hugging Face stores it, and minGPT's), Llama and Qwen3, also with experts.
They share one decoder: norm, products for q, k and v, attention, a product, norm, MLP or experts; see
:mod:`tilekern.inference.steps`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tilekern.errors import InputError

_ROPE_TYPES = ("default", "linear", "llama3")
# The smallest and the largest positive number of float32, in which kernels take numbers.
SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
# Names by which transformers takes fields of GPT-2's config too.
_OF_GPT2 = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}  # fmt: skip


@dataclass(frozen=True)
class Rotation:
    """The frequencies of a rotary embedding.

    Attributes:
        theta: the base.
        kind: ``default``, ``linear`` or ``llama3``.
        factor: positions, or the low frequencies of ``llama3``, are divided by it.
        low, high, before: of ``llama3``: wavelengths above ``before / low`` are stretched, below ``before / high`` not.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    before: int = 8192

    def frequencies(self, head_dim: int) -> list[float]:
        """Return the angle of each pair per position.

        Each operation is rounded to float32, as transformers' are; only torch's powers may differ, by their last bit.
        """
        rounded = _float32([2 * pair / head_dim for pair in range(head_dim // 2)])
        found = _float32([1 / power for power in _float32([self.theta**exponent for exponent in rounded])])
        if self.kind == "linear":
            return _float32([frequency / self.factor for frequency in found])
        return list(map(self._stretched, found)) if self.kind == "llama3" else found

    def _stretched(self, frequency: float) -> float:
        # torch divides a number by a tensor as it multiplies by the tensor's reciprocal.
        wavelength = _rounded(_rounded(2 * math.pi) * _rounded(1 / frequency))
        if wavelength < _rounded(self.before / self.high):
            return frequency
        if wavelength > _rounded(self.before / self.low):
            return _rounded(frequency / self.factor)
        turns = _rounded(self.before * _rounded(1 / wavelength))
        smooth = _rounded(_rounded(turns - self.low) / (self.high - self.low))
        stretched = _rounded(_rounded(_rounded(1 - smooth) * frequency) / self.factor)
        return _rounded(stretched + _rounded(smooth * frequency))


@dataclass(frozen=True)
class Experts:
    """Experts in place of an MLP.

    Attributes:
        number: how many there are.
        choices: how many serve a token, by the largest logits of a router.
        normalized: whether their weights sum to 1.
    """

    number: int
    choices: int
    normalized: bool


@dataclass(frozen=True)
class Architecture:
    """What the engine needs to know of a model.

    Attributes:
        kind: the ``model_type`` of its config.
        layers, width, inner, heads, kv_heads, head_dim, vocabulary: its sizes; ``inner`` is the MLP's, or each
            expert's.
        positions: the most tokens of a sequence that it was made for.
        eps: what its norms add to the variance or the mean square.
        norm: whether norms subtract the mean, and have a bias (``layer``), or not (``rms``).
        gated: whether its MLP is ``down(silu(gate(x)) * up(x))``, or ``down(gelu(up(x)))`` by tanh.
        biased: whether products have a bias: of q, k and v; of attention's output; of the MLP.
        heads_normed: whether q and k have a norm of each head.
        rotation: its rotary embedding; None if it has learned positions.
        tied: whether the head's weight is the embedding's.
        ends: the ids that end a text.
        experts: those of its MLPs; None if it has none.
        gpus: how many GPUs share the model; ``inner``, ``heads`` and ``kv_heads`` are then those of one GPU.
    """

    kind: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    eps: float
    norm: Literal["rms", "layer"]
    gated: bool
    biased: tuple[bool, bool, bool]
    heads_normed: bool
    rotation: Rotation | None
    tied: bool
    ends: frozenset[int] = field(default_factory=frozenset)
    experts: Experts | None = None
    gpus: int = 1

    @property
    def head_rows(self) -> int:
        """How many ids a GPU computes logits of: its part, if that keeps rows of 16 bytes, or else all."""
        return self.vocabulary // self.gpus if self.vocabulary % (self.gpus * 8) == 0 else self.vocabulary


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a config.json describes.

    Raises:
        InputError: the model is not served, or a field is missing or wrong.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2(_Fields(config, _OF_GPT2))
    if kind in ("llama", "qwen3", "qwen3_moe"):
        return _llama(_Fields(config), kind)
    raise InputError(f"config.json: model_type is {kind!r:.40}; the engine runs gpt2, llama, qwen3 and qwen3_moe")


class _Fields:
    """The fields of a config, checked as they are read; ``others`` are further names of some."""

    def __init__(self, config: Mapping[str, Any], others: Mapping[str, str] = MappingProxyType({})) -> None:
        self._config = {others.get(name, name): value for name, value in config.items()}

    def given(self, name: str) -> Any:
        return self._config.get(name)

    def size(self, name: str, otherwise: int | None = None) -> int:
        """Return a positive whole number."""
        value = self._config.get(name)
        value = otherwise if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise InputError(f"config.json: {name} must be a whole number from 1 to 2^31 - 1, got {value!r:.40}")
        return value

    def number(self, name: str, otherwise: float | None = None, least: float = SMALLEST_FLOAT32) -> float:
        """Return a positive number that float32 holds, at least ``least``."""
        value: Any = self._config.get(name)
        value = otherwise if value is None else value
        if type(value) not in (int, float) or not least <= value <= LARGEST_FLOAT32:
            raise InputError(f"config.json: {name} must be a number from {least:.3g} to 3.4e+38, got {value!r:.40}")
        return float(value)

    def flag(self, name: str, otherwise: bool) -> bool:
        value = self._config.get(name)
        value = otherwise if value is None else value
        if type(value) is not bool:
            raise InputError(f"config.json: {name} must be true or false, got {value!r:.40}")
        return value

    def must_be(self, name: str, *allowed: Any) -> None:
        """Refuse a field with a value that the engine does not compute; a field that is left out has the first one."""
        value = self._config.get(name, allowed[0])
        if value not in allowed:
            served = " or ".join(map(repr, allowed))
            raise InputError(f"config.json: {name} is {value!r:.40}; the engine runs models with {served}")

    def ends(self) -> frozenset[int]:
        return ends_of(self._config, "config.json")


def ends_of(config: Mapping[str, Any], file: str) -> frozenset[int]:
    """Return the ids that end a text, by ``eos_token_id`` of config.json or generation_config.json.

    Raises:
        InputError: it is not an id, a list of ids or null.
    """
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(one) is int for one in ids):
        raise InputError(f"{file}: eos_token_id must be an id or a list of ids, got {value!r:.40}")
    return frozenset(ids)


def _gpt2(fields: _Fields) -> Architecture:
    fields.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.must_be("scale_attn_weights", True)
    fields.must_be("scale_attn_by_inverse_layer_idx", False)
    width, heads = fields.size("n_embd"), fields.size("n_head")
    if width % heads or width == heads:
        raise InputError(f"config.json: n_embd {width} must be a multiple of n_head {heads}, and more than it")
    return Architecture(
        kind="gpt2", layers=fields.size("n_layer"), width=width, inner=fields.size("n_inner", 4 * width), heads=heads,
        kv_heads=heads, head_dim=width // heads, vocabulary=fields.size("vocab_size"),
        positions=fields.size("n_positions", 1024), eps=fields.number("layer_norm_epsilon", 1e-5), norm="layer",
        gated=False, biased=(True, True, True), heads_normed=False, rotation=None,
        tied=fields.flag("tie_word_embeddings", True), ends=fields.ends(),
    )  # fmt: skip


def _llama(fields: _Fields, kind: str) -> Architecture:
    fields.must_be("hidden_act", "silu")
    fields.must_be("use_sliding_window", False)
    fields.must_be("mlp_bias", False)
    layer_types = fields.given("layer_types")
    if not isinstance(layer_types, list | None) or any(one != "full_attention" for one in layer_types or ()):
        raise InputError(f"config.json: layer_types must all be 'full_attention', got {layer_types!r:.80}")
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(f"config.json: {heads} heads must be a multiple of the {kv_heads} key heads")
    head_dim = fields.size("head_dim", width // heads)
    if head_dim % 2:
        raise InputError(f"config.json: head_dim must be even for a rotary embedding, got {head_dim}")
    biased, experts = fields.flag("attention_bias", False), None
    if kind == "qwen3_moe":
        fields.must_be("decoder_sparse_step", 1)
        fields.must_be("mlp_only_layers", [], None)
        # transformers 5 writes the second name.
        number = fields.size("num_experts" if fields.given("num_experts") is not None else "num_local_experts")
        choices = fields.size("num_experts_per_tok")
        if choices > number:
            raise InputError(f"config.json: num_experts_per_tok {choices} must be at most num_experts {number}")
        experts = Experts(number, choices, fields.flag("norm_topk_prob", False))
    return Architecture(
        kind=kind, layers=fields.size("num_hidden_layers"), width=width,
        inner=fields.size("intermediate_size" if experts is None else "moe_intermediate_size"), heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, vocabulary=fields.size("vocab_size"),
        positions=fields.size("max_position_embeddings"), eps=fields.number("rms_norm_eps", 1e-6), norm="rms",
        gated=True, biased=(biased, biased, False), heads_normed=kind != "llama", rotation=_rotation(fields),
        tied=fields.flag("tie_word_embeddings", False), ends=fields.ends(), experts=experts,
    )  # fmt: skip


def _rotation(fields: _Fields) -> Rotation:
    """Return the rotation of ``rope_parameters``, or of ``rope_theta`` and ``rope_scaling`` in older configs."""
    given = fields.given("rope_parameters")
    given = fields.given("rope_scaling") if given is None else given
    if given is not None and not isinstance(given, dict):
        raise InputError(f"config.json: rope_parameters must be an object, got {given!r:.40}")
    parts = _Fields(given or {})
    kind = parts.given("rope_type") or parts.given("type") or "default"
    if kind not in _ROPE_TYPES:
        raise InputError(f"config.json: rope_type is {kind!r:.40}; the engine runs {', '.join(_ROPE_TYPES)}")
    for some in (fields, parts):
        some.must_be("partial_rotary_factor", None, 1)
    # From 1 on, all frequencies are finite numbers.
    theta = parts.number("rope_theta", fields.number("rope_theta", 10000.0, least=1), least=1)
    if kind == "default":
        return Rotation(theta)
    factor = parts.number("factor", least=1)
    if kind == "linear":
        return Rotation(theta, kind, factor)
    low, high = (parts.number(f"{name}_freq_factor") for name in ("low", "high"))
    if low >= high:
        raise InputError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
    return Rotation(theta, kind, factor, low, high, parts.size("original_max_position_embeddings"))


def _float32(numbers: Iterable[float]) -> list[float]:
    """Return numbers rounded to float32."""
    return array("f", numbers).tolist()


def _rounded(number: float) -> float:
    return _float32([number])[0]
