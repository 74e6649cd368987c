"""What is kept of one request: when its pieces came, what the server counted, and what went wrong."""

from __future__ import annotations

from array import array
from itertools import pairwise

from msgspec import Struct

from .answer import Answer
from .settings import Targets


class Record(Struct, frozen=True, kw_only=True):
    """One request. Times are seconds since the run began.

    Attributes:
        times: of each event that brought text.
        num_output_tokens: as the server counts, else the events that brought text.
        num_prompt_tokens, num_cached_tokens: as the server counts; None where it does not tell.
        lag_s: how much later it was sent than it was to be.
        num_events: of the stream, of any kind.
        error: the kind of what went wrong; None: it is complete.
    """

    index: int
    sent_s: float
    end_s: float
    times: array[float]
    num_output_tokens: int = 0
    counted: bool = False
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    lag_s: float = 0.0
    num_events: int = 0
    finish: str | None = None
    error: str | None = None
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.times[0] - self.sent_s if self.times else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between events: what a reader sees. A server may put several tokens into one."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first."""
        return (self.times[-1] - self.times[0]) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None

    def keeps(self, targets: Targets) -> bool:
        """Whether it is complete, and met each target that is set."""
        met = (
            (self.ttft_s, targets.ttft_ms),
            (self.tpot_s, targets.itl_ms),
            (self.e2e_s, targets.e2e_ms),
        )
        return self.error is None and all(
            value is None or target is None or value * 1000 <= target for value, target in met
        )


def record_of(index: int, answer: Answer, sent: float, ended: float, began: float, lag_s: float) -> Record:
    """What is kept of an answer. *sent*, *ended* and *began* are of `time.perf_counter()`."""
    usage = answer.usage
    counted = usage is not None and usage.completion_tokens is not None
    details = usage.prompt_tokens_details if usage is not None else None
    return Record(
        index=index,
        sent_s=sent - began,
        end_s=ended - began,
        times=array("d", [at - began for at in answer.times]),
        num_output_tokens=usage.completion_tokens or 0 if usage is not None and counted else len(answer.times),
        counted=counted,
        num_prompt_tokens=usage.prompt_tokens if usage is not None else None,
        num_cached_tokens=details.cached_tokens if details is not None else None,
        lag_s=lag_s,
        num_events=answer.num_events,
        finish=answer.finish,
        error=answer.error,
        message=answer.message,
    )
