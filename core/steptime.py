"""What `steps` measures; loads without torch."""

from __future__ import annotations

from msgspec import Struct


class Limits(Struct, frozen=True, kw_only=True):
    """What the machine can do, measured in the same run.

    Attributes:
        kernels: the instruction set, or `reference`.
        read_bytes_per_s: from memory, with all threads. None for the reference.
        products_per_s: of small integers, or of bfloat16 for `amx`, with everything in registers.
        weight_bytes: what a step multiplies with.
        breaks: what torch runs between compiled segments, and how often.
    """

    kernels: str
    read_bytes_per_s: float | None = None
    products_per_s: float | None = None
    weight_bytes: int | None = None
    breaks: dict[str, int] = {}


class StepTime(Struct, frozen=True, kw_only=True):
    """One kind of step.

    Attributes:
        kind: `decode`, of *size* sequences of *context* tokens; or `prefill`, of *size* tokens.
        best_s, median_s: of the whole step, without sampling.
        limit_s: the larger of what reading weights and keys takes and what the products take, at the machine's limits.
        parts: seconds of each kind of part run alone; they leave out what threads wait for one another.
    """

    kind: str
    size: int
    context: int
    best_s: float
    median_s: float
    limit_s: float | None
    parts: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.size / self.median_s
