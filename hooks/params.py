"""What a request may ask of sampling: names, defaults and limits, said once.

`SamplingParams` speaks the words of OpenAI's API and of its usual extensions. A logits processor has a parameter
struct of its own; `ALIASES` says which of the words here fill which of its fields, so that `top_p` in a request and
`{"headrace": {"logits": {"top-p": {"p": …}}}}` are the same thing.

Values enter through `msgspec.convert`, which checks the limits; a constructor checks nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta, Struct, field

Probability = Annotated[float, Meta(ge=0, le=1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]

MAX_CHOICES: Final = 128


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen and when they end.

    Out of range is refused, never clamped; only `max_tokens` is capped to the room left in the context.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """Choices drawn for one prompt. Choice 0 equals what n = 1 gives."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Tokens to generate at most. None: to the end of the context."""
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Tokens before which no end token can be drawn."""
    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Divides the logits. 0 (and anything under 1e-5) is greedy, untouched by truncation."""
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    """Keep the k likeliest tokens. 0 and -1: off."""
    top_p: Probability = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities reach this sum."""
    min_p: Probability = 0.0
    """Keep tokens at least this likely, relative to the likeliest."""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output."""
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Subtracted once from tokens in the output."""
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Subtracted once for each time a token stands in the output."""
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Every draw is a pure function of (seed, choice, position). None: a random one."""
    stop: Annotated[tuple[StopString, ...], Meta(max_length=16)] = ()
    """Text at which an answer ends; it is not part of the answer."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=128)] = ()
    """Tokens at which an answer ends, besides the model's own."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Report the log-probability of each token, and of this many alternatives. None: off."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Report the same for each token of the prompt but the first. None: off. The whole prompt is computed then."""
    return_token_ids: bool = False
    """Report the ids of prompt and answer besides the text."""


GREEDY_BELOW: Final = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow float32."""


class Extension(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Field `headrace` of a request: what OpenAI's API has no word for.

    Attributes:
        logits: logits processor → its parameters.
        sampler: parameters of the server's sampler.
        stop: stop watcher → its parameters.
        priority: smaller is served first, where the scheduler policy looks at it.
        patience_s: how long the request may wait at the door for a place; 0: refused at once.
        timeout_s, timeout_ms: how long it may take in all.
    """

    logits: dict[str, dict[str, Any]] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, dict[str, Any]] = field(default_factory=dict)
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    patience_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    timeout_s: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    timeout_ms: Annotated[int, Meta(gt=0, le=10**9)] | None = None

    @property
    def allowed_s(self) -> float | None:
        """Seconds it may take in all; None: no limit."""
        limits = (self.timeout_s, None if self.timeout_ms is None else self.timeout_ms / 1000)
        return min((limit for limit in limits if limit is not None), default=None)


ALIASES: Final[dict[str, tuple[str, str]]] = {
    "logit_bias": ("logit-bias", "bias"),
    "repetition_penalty": ("repetition", "penalty"),
    "presence_penalty": ("presence-frequency", "presence"),
    "frequency_penalty": ("presence-frequency", "frequency"),
    "min_tokens": ("min-tokens", "count"),
    "temperature": ("temperature", "value"),
    "top_k": ("top-k", "k"),
    "top_p": ("top-p", "p"),
    "min_p": ("min-p", "p"),
}
"""Field of `SamplingParams` → (logits processor, field of its parameter struct)."""
