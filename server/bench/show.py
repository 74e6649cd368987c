"""A report as a few lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from .report import Report, Spread

LABEL = 26


def lines(report: Report) -> Iterator[str]:
    """The figures of *report*, a line each."""
    load = report.load
    pace = f"{load.rate:g} requests/s" if load.rate is not None else f"{load.concurrency} at a time"
    ended = ", interrupted" if report.interrupted else ""
    yield _line("model", f"{report.model} at {load.url} ({load.api})")
    yield _line("load", f"{pace}, seed {load.seed}, run {load.run_id}{ended}")
    yield _line("requests", f"{report.num_complete} complete of {report.num_sent} in {report.wall_s:.2f} s")
    for kind, number in report.errors.items():
        yield _line(f"  {kind}", f"{number}: {report.messages[kind]}")
    yield _line("prompt tokens", _tokens(report.num_prompt_tokens, report.prompt_tokens))
    yield _line("  of them cached", _tokens(report.num_cached_tokens, report.cached_tokens))
    by = "" if report.tokens_by == "usage" else " (events: the server counts none)"
    yield _line("output tokens", _tokens(report.num_output_tokens, report.output_tokens) + by)
    yield _line("", f"{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    yield _line("time to first token, ms", _spread(report.ttft_ms))
    yield _line("between events, ms", _spread(report.itl_ms))
    yield _line("a token after the first, ms", _spread(report.tpot_ms))
    yield _line("end to end, ms", _spread(report.e2e_ms))
    yield _line("requests/s", f"{report.requests_per_s:.3f}")
    yield _line("output tokens/s", f"{report.output_tokens_per_s:.1f}")
    if report.total_tokens_per_s is not None:
        yield _line("total tokens/s", f"{report.total_tokens_per_s:.1f}")
    yield from _goodput(report)
    client = report.client
    each = f", {client.cpu_us_per_event:.0f} µs an event" if client.cpu_us_per_event is not None else ""
    yield _line("client", f"{client.cpu_share:.1%} of a core{each}")


def _goodput(report: Report) -> Iterator[str]:
    targets = report.load.targets
    named = (("first token", targets.ttft_ms), ("token", targets.itl_ms), ("end", targets.e2e_ms))
    stated = [f"{name} ≤ {value:g} ms" for name, value in named if value is not None]
    if stated:
        yield _line(
            "good requests/s", f"{report.good_per_s:.3f} ({report.good_share:.1%} of those sent: {', '.join(stated)})"
        )


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL}}  {text}".rstrip()


def _spread(of: Spread | None) -> str:
    if of is None:
        return f"{'–':>10}"
    return "".join(f"{value:>10.2f}" for value in (of.mean, of.p50, of.p90, of.p99, of.max))


def _tokens(total: int | None, of: Spread | None) -> str:
    return "not told" if total is None or of is None else f"{total}, {of.mean:.1f} a request"
