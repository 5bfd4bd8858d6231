"""The models that the engine runs, read from their config.json: sizes, norms, rotations, and the names of weights.

Served are GPT-2 (OpenAI's as Hugging Face stores it, and minGPT's and nanoGPT's), Llama and Qwen3. They share one
decoder: norm, products for q, k and v, attention, a product, norm, MLP; see :mod:`tilekern.inference.steps`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tilekern.errors import InputError

_ROPE_TYPES = ("default", "linear", "llama3")
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
        """Return the angle of each pair per position, rounded to float32 where transformers rounds it."""
        rounded = _float32([2 * pair / head_dim for pair in range(head_dim // 2)])
        found = _float32([1 / power for power in _float32([self.theta**exponent for exponent in rounded])])
        if self.kind == "linear":
            return _float32([frequency / self.factor for frequency in found])
        return _float32(map(self._stretched, found)) if self.kind == "llama3" else found

    def _stretched(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < self.before / self.high:
            return frequency
        if wavelength > self.before / self.low:
            return frequency / self.factor
        smooth = (self.before / wavelength - self.low) / (self.high - self.low)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True)
class Architecture:
    """What the engine needs to know of a model.

    Attributes:
        kind: the ``model_type`` of its config.
        layers, width, inner, heads, kv_heads, head_dim, vocabulary: its sizes; ``inner`` is the MLP's.
        positions: the most tokens of a sequence that it was made for.
        eps: what its norms add to the variance or the mean square.
        norm: whether norms subtract the mean, and have a bias (``layer``), or not (``rms``).
        gated: whether its MLP is ``down(silu(gate(x)) * up(x))``, or ``down(gelu(up(x)))`` by tanh.
        biased: whether products have a bias: of q, k and v; of attention's output; of the MLP.
        heads_normed: whether q and k have a norm of each head.
        rotation: its rotary embedding; None if it has learned positions.
        tied: whether the head's weight is the embedding's.
        ends: the ids that end a text.
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


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a config.json describes.

    Raises:
        InputError: the model is not served, or a field is missing or wrong.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2(_Fields(config, _OF_GPT2))
    if kind in ("llama", "qwen3"):
        return _llama(_Fields(config), kind)
    raise InputError(f"config.json: model_type is {kind!r:.40}; the engine runs gpt2, llama and qwen3")


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

    def number(self, name: str, otherwise: float | None = None, among: Mapping[str, Any] | None = None) -> float:
        """Return a positive number, of this config or of a part of it."""
        value: Any = (self._config if among is None else among).get(name)
        value = otherwise if value is None else value
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise InputError(f"config.json: {name} must be a positive number, got {value!r:.40}")
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
        value = self._config.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int for one in ids):
            raise InputError(f"config.json: eos_token_id must be an id or a list of ids, got {value!r:.40}")
        return frozenset(ids)


def _gpt2(fields: _Fields) -> Architecture:
    fields.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.must_be("scale_attn_weights", True)
    fields.must_be("scale_attn_by_inverse_layer_idx", False)
    width, heads = fields.size("n_embd"), fields.size("n_head")
    if width % heads:
        raise InputError(f"config.json: n_embd {width} must be a multiple of n_head {heads}")
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
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(f"config.json: {heads} heads must be a multiple of the {kv_heads} key heads")
    head_dim = fields.size("head_dim", width // heads)
    if head_dim % 2:
        raise InputError(f"config.json: head_dim must be even for a rotary embedding, got {head_dim}")
    biased = fields.flag("attention_bias", False)
    return Architecture(
        kind=kind, layers=fields.size("num_hidden_layers"), width=width, inner=fields.size("intermediate_size"),
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocabulary=fields.size("vocab_size"),
        positions=fields.size("max_position_embeddings"), eps=fields.number("rms_norm_eps", 1e-6), norm="rms",
        gated=True, biased=(biased, biased, False), heads_normed=kind == "qwen3", rotation=_rotation(fields),
        tied=fields.flag("tie_word_embeddings", False), ends=fields.ends(),
    )  # fmt: skip


def _rotation(fields: _Fields) -> Rotation:
    """Return the rotation of ``rope_parameters``, or of ``rope_theta`` and ``rope_scaling`` in older configs."""
    parts = fields.given("rope_parameters") or fields.given("rope_scaling") or {}
    if not isinstance(parts, dict):
        raise InputError(f"config.json: rope_parameters must be an object, got {parts!r:.40}")
    kind = parts.get("rope_type", parts.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise InputError(f"config.json: rope_type is {kind!r:.40}; the engine runs {', '.join(_ROPE_TYPES)}")
    theta = fields.number("rope_theta", 10000.0, parts if "rope_theta" in parts else None)
    if kind == "default":
        return Rotation(theta)
    factor = fields.number("factor", None, parts)
    if kind == "linear":
        return Rotation(theta, kind, factor)
    low, high = (fields.number(f"{name}_freq_factor", None, parts) for name in ("low", "high"))
    before = fields.number("original_max_position_embeddings", None, parts)
    if low >= high:
        raise InputError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
    return Rotation(theta, kind, factor, low, high, int(before))


def _float32(numbers: Any) -> list[float]:
    """Return numbers rounded to float32."""
    return array("f", numbers).tolist()
