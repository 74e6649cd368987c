"""The rotation of a checkpoint: which frequencies its heads turn with, after the scaling that it names.

Scalings whose frequencies depend on a sequence's length (`dynamic`, `longrope`) are right as long as that length stays
within the original context: keys in the cache were turned when the sequence was shorter, and would have to be turned
again. So a Program with one of them has no more positions than that, and equals transformers on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from ...hooks.errors import ModelError
from ...hooks.program import rotary_frequencies
from .config import Config, Sizes
from .metadata import number, wrong

Frequencies = tuple[float, ...]


class Rotation(Struct, frozen=True, kw_only=True):
    """How the heads of a layer turn.

    Attributes:
        frequencies: radians a position, one for each pair of features that is turned.
        magnitude: what turned features are multiplied with.
        max_positions: the longest sequence that it is right for; None: any.
    """

    frequencies: Frequencies
    magnitude: float = 1.0
    max_positions: int | None = None


class Parameters(Struct, frozen=True, kw_only=True):
    """What a checkpoint says of its scaling.

    Attributes:
        values: Hugging Face's name → value.
        keys: the same → where the checkpoint has it, for errors; `keys[""]` is all of it.
        theta: base of the unscaled frequencies.
        max_positions: tokens that the checkpoint allows.
    """

    config: Config
    values: Mapping[str, Any]
    keys: Callable[[str], str]
    theta: float
    max_positions: int

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        key = self.keys(name)
        return number({key: self.values.get(name)}, key, self.config.checkpoint, default)

    def numbers(self, name: str, count: int) -> list[float]:
        """*count* numbers above 0."""
        found = self.values.get(name)
        if not isinstance(found, list) or len(found) != count:
            raise self.wrong(name, f"a list of {count} numbers")
        key = self.keys(name)
        return [number({key: value}, key, self.config.checkpoint) for value in found]

    def wrong(self, name: str, expected: str) -> ModelError:
        """The error for the value of *name*."""
        return wrong(self.config.checkpoint, self.keys(name), expected, self.values.get(name))

    @property
    def original(self) -> float:
        """Positions that the model was first trained on."""
        name = "original_max_position_embeddings"
        if self.config.get(name) is not None:
            return self.config.number(name)
        return self.number(name, self.max_positions)

    @property
    def factor(self) -> float:
        """How many times longer sequences may be than the original ones."""
        name = "original_max_position_embeddings"
        said = self.values.get(name) is not None or self.config.get(name) is not None
        return self.number("factor", self.max_positions / self.original if said else None)


def _linear(parameters: Parameters, frequencies: Frequencies) -> Rotation:
    """Positions divided by the factor. Source: Chen et al. 2023, Position Interpolation, arXiv:2306.15595."""
    factor = parameters.number("factor")
    return Rotation(frequencies=tuple(frequency / factor for frequency in frequencies))


def _llama3(parameters: Parameters, frequencies: Frequencies) -> Rotation:
    """Long waves divided by the factor, short ones kept, a ramp between. Source: `apply_scaling` of Llama 3.1."""
    factor, original = parameters.number("factor"), parameters.original
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if low >= high:
        raise parameters.wrong("high_freq_factor", f"above low_freq_factor ({low})")

    def scaled(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - kept) * frequency / factor + kept * frequency

    return Rotation(frequencies=tuple(map(scaled, frequencies)))


def _yarn(parameters: Parameters, frequencies: Frequencies) -> Rotation:
    """A ramp over the pairs, and sharper attention. Source: Peng et al. 2023, YaRN, arXiv:2309.00071, section 3."""
    factor, original, width = parameters.factor, parameters.original, 2 * len(frequencies)
    if parameters.theta <= 1:
        raise wrong(parameters.config.checkpoint, parameters.config.key("rope_theta"), "above 1", parameters.theta)

    def pair_of(num_turns: float) -> float:
        """The pair that turns so often over the original context."""
        return width * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(parameters.theta))

    first, last = pair_of(parameters.number("beta_fast", 32)), pair_of(parameters.number("beta_slow", 1))
    if parameters.values.get("truncate") is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    span = last - first or 0.001

    def scaled(pair: int, frequency: float) -> float:
        divided = min(max((pair - first) / span, 0.0), 1.0)
        return frequency / factor * divided + frequency * (1 - divided)

    return Rotation(
        frequencies=tuple(scaled(*item) for item in enumerate(frequencies)), magnitude=_sharpness(parameters, factor)
    )


def _sharpness(parameters: Parameters, factor: float) -> float:
    """YaRN's attention factor."""

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = [parameters.values.get(name) for name in ("mscale", "mscale_all_dim")]
    default = grown(1.0)
    if all(given):
        default = grown(parameters.number("mscale")) / grown(parameters.number("mscale_all_dim"))
    return parameters.number("attention_factor", default)


def _dynamic(parameters: Parameters, frequencies: Frequencies) -> Rotation:
    """Unscaled within the context, which is as far as sequences go here: beyond, keys would turn with each token."""
    parameters.number("factor")
    return Rotation(frequencies=frequencies, max_positions=parameters.max_positions)


def _longrope(parameters: Parameters, frequencies: Frequencies) -> Rotation:
    """A divisor for each pair, the ones for short sequences. Source: Ding et al. 2024, LongRoPE, arXiv:2402.13753."""
    original = parameters.original
    if original <= 1:
        raise parameters.wrong("original_max_position_embeddings", "above 1")
    divisors = parameters.numbers("short_factor", len(frequencies))
    factor = parameters.number("factor", parameters.max_positions / original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rotation(
        frequencies=tuple(frequency / divisor for frequency, divisor in zip(frequencies, divisors, strict=True)),
        magnitude=parameters.number("attention_factor", magnitude),
        max_positions=int(original),
    )


SCALINGS: dict[str, Callable[[Parameters, Frequencies], Rotation]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _dynamic,
    "longrope": _longrope,
}


def read_rotation(
    config: Config, sizes: Sizes, *, theta: float = 10000.0, partial: bool = False, layer_type: str | None = None
) -> Rotation:
    """The rotation that a checkpoint describes.

    Args:
        theta: the base where a Hugging Face config names none; in GGUF that is 10000.
        partial: whether the family may turn only the first features of each head.
        layer_type: which of several rotations, where Hugging Face configs have one for each type of layer.

    Raises:
        ModelError: an unknown scaling, or one of its numbers is missing or impossible.
    """
    parameters = _gguf(config, sizes) if config.from_gguf else _hf(config, sizes, theta, layer_type)
    width = _rotary_width(parameters, sizes, partial)
    frequencies = _divided(config, rotary_frequencies(parameters.theta, width))
    kind = parameters.values.get("rope_type") or "default"
    if kind in ("default", "none"):
        return Rotation(frequencies=frequencies)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise parameters.wrong("rope_type", f"one of default, {', '.join(SCALINGS)}")
    return SCALINGS[kind](parameters, frequencies)


def _rotary_width(parameters: Parameters, sizes: Sizes, partial: bool) -> int:
    """How many features of each head turn."""
    if parameters.config.from_gguf:
        name, width = "rotary_dim", parameters.values.get("rotary_dim") or sizes.head_dim
    else:
        name = "partial_rotary_factor"
        width = int(sizes.head_dim * min(parameters.number(name, 1.0), 2.0))
    if width != sizes.head_dim and not (partial and isinstance(width, int) and width < sizes.head_dim):
        raise parameters.wrong(name, "left out: this family turns whole heads")
    return int(width)


def _divided(config: Config, frequencies: Frequencies) -> Frequencies:
    """GGUF keeps the scaling of Llama 3.1 as one divisor a pair, in a tensor."""
    name = "rope_freqs.weight"
    if not config.from_gguf or not config.has(name):
        return frequencies
    if config.checkpoint.shapes[name] != (len(frequencies),):
        found = list(config.checkpoint.shapes[name])
        raise wrong(config.checkpoint, f"the shape of {name}", f"[{len(frequencies)}]", found)
    divisors = config.checkpoint.tensor(name).tolist()
    if not all(0 < divisor < math.inf for divisor in divisors):
        raise wrong(config.checkpoint, name, "numbers above 0", divisors)
    return tuple(frequency / divisor for frequency, divisor in zip(frequencies, divisors, strict=True))


def _hf(config: Config, sizes: Sizes, theta: float, layer_type: str | None) -> Parameters:
    """`rope_parameters` of newer configs holds the base too; older ones have `rope_theta` and `rope_scaling`."""
    place, rope = _hf_place(config, layer_type)
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise wrong(config.checkpoint, place, "an object with one rotation", rope)
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "su" or (kind == "yarn" and "short_factor" in rope):
        kind = "longrope"  # As the first configs of Phi-3 called it.
    values = {**rope, "partial_rotary_factor": fraction, "rope_type": kind}
    has_theta = rope.get("rope_theta") is not None
    return Parameters(
        config=config,
        values=values,
        keys=lambda name: f"{place}.{name}",
        theta=number(rope, "rope_theta", config.checkpoint) if has_theta else config.number("rope_theta", theta),
        max_positions=sizes.max_positions,
    )


def _hf_place(config: Config, layer_type: str | None) -> tuple[str, Any]:
    """Where a config speaks of the rotation, and what it says there."""
    nested = config.get("rope_parameters")
    if layer_type is not None and isinstance(nested, dict) and layer_type in nested:
        return f"rope_parameters.{layer_type}", nested[layer_type] or {}
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    return place, config.get(place) or {}


GGUF_KEYS = {
    "rope_type": "type",
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def _gguf(config: Config, sizes: Sizes) -> Parameters:
    """`rope.scaling.*`; a factor without a type means linear, as did `rope.scale_linear` before there were types."""
    metadata, prefix = config.checkpoint.metadata, f"{config.checkpoint.architecture}.rope."
    keys = {name: f"{prefix}scaling.{word}" for name, word in GGUF_KEYS.items()}
    if metadata.get(keys["factor"]) is None and metadata.get(f"{prefix}scale_linear") is not None:
        keys["factor"] = f"{prefix}scale_linear"
    if config.has("rope_factors_short.weight"):
        keys["attention_factor"] = f"{prefix}scaling.attn_factor"
    values = {name: metadata[key] for name, key in keys.items() if metadata.get(key) is not None}
    keys["rotary_dim"], values["rotary_dim"] = config.key("rotary_dim"), config.get("rotary_dim")
    if config.has("rope_factors_short.weight"):
        short = config.checkpoint.tensor("rope_factors_short.weight").tolist()
        values |= {"rope_type": "longrope", "short_factor": short}
    elif "rope_type" not in values and values.get("factor", 1.0) != 1.0:
        values["rope_type"] = "linear"
    if "rope_type" in values and values["rope_type"] != "longrope":
        _refuse(config, f"{prefix}scaling.")
    return Parameters(
        config=config,
        values=values,
        keys=lambda name: keys.get(name, f"{prefix}scaling.{name}"),
        theta=config.number("rope_theta", 10000.0),
        max_positions=sizes.max_positions,
    )


NEUTRAL = {"attn_factor": (1,), "yarn_log_multiplier": (0,), "yarn_ext_factor": (1, -1)}
"""Settings of llama.cpp's YaRN that transformers has no word for, with the values that change nothing."""


def _refuse(config: Config, prefix: str) -> None:
    for word, values in NEUTRAL.items():
        found = config.checkpoint.metadata.get(prefix + word)
        if found is not None and found not in values:
            raise wrong(config.checkpoint, prefix + word, f"{values[0]} (nothing else is supported yet)", found)
