"""What is measured: one row a figure, with what it must reach.

A figure is compared with the best peer (`floor` and `goal` are ratios, the larger the better, whatever the unit), or it
stands for itself (`own`: they are values of Headrace's own).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

SELF: Final = "headrace"
"""The engine that the others are compared with."""


class Metric(NamedTuple):
    """One line of the table.

    Attributes:
        better: which way is good.
        floor, goal: a ratio to the best peer, or with *own* a value of Headrace itself. None: only reported.
    """

    name: str
    label: str
    unit: str
    better: Literal["more", "less"]
    floor: float | None = None
    goal: float | None = None
    own: bool = False


METRICS: Final = (
    Metric("decode_1", "decode in process, 1 sequence of about 192 tokens", "tok/s", "more", 1.5, 2.0),
    Metric("decode_8", "decode in process, 8 sequences", "tok/s", "more", 2.5, 3.5),
    Metric("decode_32", "decode in process, 32 sequences", "tok/s", "more", 2.0, 3.0),
    Metric("prefill_512", "prefill of 512 tokens in process", "tok/s", "more", 1.6, 2.0),
    Metric("http_1", "output over HTTP, 1 stream", "tok/s", "more", 1.4, 1.8),
    Metric("http_8", "output over HTTP, 8 streams", "tok/s", "more", 3.0, 4.0),
    Metric("http_32", "output over HTTP, 32 streams", "tok/s", "more", 3.0, 5.0),
    Metric("ttft_p50_32", "first token, p50, 32 streams at once", "s", "less", 3.0, 4.0),
    Metric("itl_p99_32", "between tokens, p99, 32 streams", "s", "less"),
    Metric("shared_cold", "32 requests, one 400-token prefix, cold: last token", "s", "less", 4.0, 8.0),
    Metric("shared_warm", "the same, warm", "s", "less", 3.0, 5.0),
    Metric("sampling_share_1", "sampling's throughput of greedy's, 1 stream", "", "more", 0.85, 0.95, own=True),
    Metric("sampling_share_32", "sampling's throughput of greedy's, 32 streams", "", "more", 0.85, 0.95, own=True),
    Metric("pause", "longest pause beside four 1,700-token prompts", "× median gap", "less", 8, 4, own=True),
    Metric("peak_rss_mb", "peak memory at 32 streams", "MB", "less", 1200, 900, own=True),
    Metric("ready_s", "start to ready", "s", "less", 8, 5, own=True),
)
"""In the order of the table."""
