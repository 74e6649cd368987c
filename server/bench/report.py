"""The figures of a run, from the records of its requests. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy
from msgspec import Struct

from .gauge import Gauge
from .record import Record
from .settings import Load


class Spread(Struct, frozen=True, kw_only=True):
    """How a value is distributed; quantiles are interpolated linearly between neighbours."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Row(Struct, frozen=True, kw_only=True):
    """One request, for the raw part of a report. Gaps are those between its events."""

    index: int
    sent_s: float
    e2e_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    gap_p50_ms: float | None
    gap_max_ms: float | None
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int
    finish: str | None
    error: str | None


class Client(Struct, frozen=True, kw_only=True):
    """What the load generator itself took. *lag_ms*: how much later requests were sent than they were to be."""

    cpu_s: float
    cpu_share: float
    num_events: int
    cpu_us_per_event: float | None
    lag_ms: Spread | None


class Report(Struct, frozen=True, kw_only=True):
    """A run. Rates are a second of `wall_s`, from the first request sent to the last that ended.

    Attributes:
        ttft_ms: from sending a request to its first text.
        itl_ms: between events of a stream, over all streams.
        tpot_ms: a token after the first, one value a request.
        e2e_ms: from sending a request to the end of its answer.
        total_tokens_per_s: of prompts, cached ones included, and answers.
        good_per_s: complete requests that met all targets; *good_share*: of those sent.
        tokens_by: `usage`: the server counted tokens; `events`: it did not, and an event that brought text is one.
        errors: how many of each kind; *messages*: the first of each.
    """

    version: str
    started: str
    load: Load
    model: str
    gauge: Gauge
    interrupted: bool
    wall_s: float
    num_sent: int
    num_complete: int
    errors: dict[str, int]
    messages: dict[str, str]
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    good_per_s: float
    good_share: float
    prompt_tokens: Spread | None
    output_tokens: Spread | None
    cached_tokens: Spread | None
    num_prompt_tokens: int | None
    num_output_tokens: int
    num_cached_tokens: int | None
    tokens_by: Literal["usage", "events"]
    client: Client
    requests: list[Row]


class Setting(Struct, frozen=True, kw_only=True):
    """What of a run is not in its records."""

    version: str
    started: str
    load: Load
    model: str
    gauge: Gauge
    interrupted: bool
    cpu_s: float


def summarize(records: Sequence[Record], setting: Setting) -> Report:
    """The report on a run; figures that need a complete request are None without one, and rates 0."""
    records = sorted(records, key=lambda record: record.index)
    complete = [record for record in records if record.error is None]
    wall_s = max((r.end_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
    per_s = 1 / wall_s if wall_s > 0 else 0.0
    good = sum(record.keeps(setting.load.targets) for record in complete)
    num_output = sum(record.num_output_tokens for record in complete)
    num_prompt = _total(record.num_prompt_tokens for record in complete)
    return Report(
        version=setting.version,
        started=setting.started,
        load=setting.load,
        model=setting.model,
        gauge=setting.gauge,
        interrupted=setting.interrupted,
        wall_s=wall_s,
        num_sent=len(records),
        num_complete=len(complete),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        messages={r.error: r.message for r in reversed(records) if r.error is not None},
        ttft_ms=_ms(record.ttft_s for record in complete),
        itl_ms=_ms(gap for record in complete for gap in record.gaps_s),
        tpot_ms=_ms(record.tpot_s for record in complete),
        e2e_ms=_ms(record.e2e_s for record in complete),
        requests_per_s=len(complete) * per_s,
        output_tokens_per_s=num_output * per_s,
        total_tokens_per_s=None if num_prompt is None else (num_prompt + num_output) * per_s,
        good_per_s=good * per_s,
        good_share=good / len(records) if records else 0.0,
        prompt_tokens=spread(record.num_prompt_tokens for record in complete),
        output_tokens=spread(record.num_output_tokens for record in complete),
        cached_tokens=spread(record.num_cached_tokens for record in complete),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        num_cached_tokens=_total(record.num_cached_tokens for record in complete),
        tokens_by="usage" if all(record.counted for record in complete) else "events",
        client=_client(records, setting.cpu_s, wall_s),
        requests=[_row(record) for record in records],
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """None where there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = numpy.percentile(known, (50, 90, 99)).tolist()
    return Spread(mean=sum(known) / len(known), p50=p50, p90=p90, p99=p99, max=float(max(known)))


def _ms(seconds: Iterable[float | None]) -> Spread | None:
    return spread(_in_ms(value) for value in seconds)


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _total(values: Iterable[int | None]) -> int | None:
    """Of those that are told; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _client(records: Sequence[Record], cpu_s: float, wall_s: float) -> Client:
    num_events = sum(record.num_events for record in records)
    return Client(
        cpu_s=cpu_s,
        cpu_share=cpu_s / wall_s if wall_s > 0 else 0.0,
        num_events=num_events,
        cpu_us_per_event=cpu_s / num_events * 1e6 if num_events else None,
        lag_ms=_ms(record.lag_s for record in records),
    )


def _row(record: Record) -> Row:
    gaps = spread(record.gaps_s)
    return Row(
        index=record.index,
        sent_s=record.sent_s,
        e2e_ms=record.e2e_s * 1000,
        ttft_ms=_in_ms(record.ttft_s),
        tpot_ms=_in_ms(record.tpot_s),
        gap_p50_ms=None if gaps is None else gaps.p50 * 1000,
        gap_max_ms=None if gaps is None else gaps.max * 1000,
        num_prompt_tokens=record.num_prompt_tokens,
        num_cached_tokens=record.num_cached_tokens,
        num_output_tokens=record.num_output_tokens,
        finish=record.finish,
        error=record.error,
    )
