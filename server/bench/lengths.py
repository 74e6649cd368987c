"""How long prompts and answers are: fixed, uniform or lognormal numbers of tokens, drawn from a seeded generator."""

from __future__ import annotations

import math
import random
import re
from typing import Final

from msgspec import Struct


class Fixed(Struct, frozen=True, kw_only=True, tag="fixed"):
    """Always *tokens*."""

    tokens: int

    def draw(self, rng: random.Random) -> int:
        return self.tokens


class Uniform(Struct, frozen=True, kw_only=True, tag="uniform"):
    """Each number from *low* to *high*, both included, as often as any other."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


class Lognormal(Struct, frozen=True, kw_only=True, tag="lognormal"):
    """Most are short and a few are long, as people's prompts are.

    Attributes:
        mean: of the tokens, before they are rounded and limited to `1 … high`.
        sigma: standard deviation of their logarithm.
    """

    mean: float
    sigma: float
    high: int | None = None

    def draw(self, rng: random.Random) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        tokens = max(1, round(rng.lognormvariate(mu, self.sigma)))
        return tokens if self.high is None else min(tokens, self.high)


Length = Fixed | Uniform | Lognormal

_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_LOGNORMAL: Final = re.compile(rf"lognormal:{_NUMBER},{_NUMBER}(?:,(\d+))?")


def parse_length(text: str) -> Length:
    """`128`, `64-256` or `lognormal:MEAN,SIGMA[,MAX]`.

    Raises:
        ValueError: none of these, or not at least one token.
    """
    length: Length | None = None
    if re.fullmatch(r"\d+", text):
        length = Fixed(tokens=int(text))
        valid = length.tokens >= 1
    elif bounds := re.fullmatch(r"(\d+)-(\d+)", text):
        length = Uniform(low=int(bounds[1]), high=int(bounds[2]))
        valid = 1 <= length.low <= length.high
    elif shape := _LOGNORMAL.fullmatch(text):
        length = Lognormal(mean=float(shape[1]), sigma=float(shape[2]), high=int(shape[3]) if shape[3] else None)
        valid = length.mean >= 1 and length.high != 0
    if length is None or not valid:
        raise ValueError(
            f"must be a number of tokens (128), a range (64-256) or lognormal:MEAN,SIGMA[,MAX] "
            f"(lognormal:200,0.8,2000), of at least 1 token; got {text}"
        )
    return length
