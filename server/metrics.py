"""What is measured, in Prometheus' words.

As an observer it hears of every token, so it counts into plain lists; when someone asks, the counts and the engine's
own statistics become metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..hooks.protocols import Event, RequestEnded, StepDone, TokensDelivered

if TYPE_CHECKING:
    from ..core.engine import EngineStatistics

_LATENCY: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_STATE: Final = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
_TOKENS: Final = tuple(float(2**power) for power in range(4, 18))


class Histogram:
    """Counts of values by upper bound (inclusive), for one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """((upper bound, values up to it) …, sum of the values), as `HistogramMetricFamily` takes them."""
        buckets, total = [], 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, self._sum


class Metrics(Collector):
    """An observer of the engine that can be read at `/metrics`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._statistics: EngineStatistics | None = None
        self._requests: Counter[str] = Counter()
        self._ttft = Histogram(_LATENCY)
        self._gap = Histogram(_STEP)
        self._wall = Histogram(_LATENCY)
        self._prompt_tokens = Histogram(_TOKENS)
        self._step = Histogram(_STEP)
        self._states: dict[str, Histogram] = {}

    def on(self, event: Event) -> None:
        """Slot `observer`."""
        match event:
            case TokensDelivered(gaps_s=gaps):
                for gap in gaps:
                    self._gap.observe(gap)
            case StepDone(forward_s=forward_s, sample_s=sample_s):
                self._step.observe(forward_s + sample_s)
            case RequestEnded():
                self._request_ended(event)

    def render(self, statistics: EngineStatistics | None) -> bytes:
        """Everything, in Prometheus' text format.

        Args:
            statistics: None while the engine is loading.
        """
        self._statistics = statistics
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield _histogram("time_to_first_token_seconds", "From the door to the first token.", self._ttft)
        yield _histogram("inter_token_seconds", "Between two tokens of one choice.", self._gap)
        yield _histogram("request_seconds", "From the door to the last token taken by the client.", self._wall)
        yield _histogram("request_prompt_tokens", "Tokens in the prompts of requests.", self._prompt_tokens)
        yield _histogram("step_seconds", "Forward and sampling of one step.", self._step)
        states = HistogramMetricFamily(
            "headrace_request_state_seconds", "Time a request spent in each state.", labels=["state"]
        )
        for state, histogram in sorted(self._states.items()):
            states.add_metric([state], *histogram.cumulative())
        yield states
        requests = CounterMetricFamily(
            "headrace_requests", "Requests that have ended, by HTTP status.", labels=["status"]
        )
        for status, count in sorted(self._requests.items()):
            requests.add_metric([status], count)
        yield requests
        if self._statistics is not None:
            yield from _of_engine(self._statistics)

    def _request_ended(self, event: RequestEnded) -> None:
        self._requests[str(event.status)] += 1
        self._wall.observe(event.wall_s)
        self._prompt_tokens.observe(event.num_prompt_tokens)
        if event.ttft_s is not None:
            self._ttft.observe(event.ttft_s)
        for state, seconds in event.states.items():
            self._states.setdefault(state, Histogram(_STATE)).observe(seconds)


def _of_engine(statistics: EngineStatistics) -> Iterator[Metric]:
    for name, text, value in (
        ("requests_running", "Requests whose sequences share the steps.", statistics.running),
        ("requests_waiting", "Requests that wait for a place.", statistics.waiting),
        ("requests_parked", "Requests whose reader does not keep up.", statistics.parked),
    ):
        yield GaugeMetricFamily(f"headrace_{name}", text, value=value)
    for name, text, value in (
        ("preemptions", "Times a sequence had to leave the KV cache.", statistics.preemptions_total),
        ("steps", "Steps the model has run.", statistics.steps_total),
        ("prompt_tokens", "Tokens of prompts, cached ones included.", statistics.prompt_tokens_total),
        ("cached_prompt_tokens", "Tokens of prompts found in the prefix cache.", statistics.cached_tokens_total),
        ("generated_tokens", "Tokens drawn.", statistics.generated_tokens_total),
        ("guessed_tokens", "Tokens guessed ahead.", statistics.guessed_tokens_total),
        ("kept_tokens", "Tokens guessed ahead that were right.", statistics.kept_tokens_total),
    ):
        yield CounterMetricFamily(f"headrace_{name}", text, value=value)
    blocks = GaugeMetricFamily("headrace_kv_blocks", "Blocks of the KV cache.", labels=["state"])
    blocks.add_metric(["used"], statistics.blocks_used)
    blocks.add_metric(["free"], statistics.blocks_total - statistics.blocks_used)
    yield blocks
    yield from _of_channels(statistics)


def _of_channels(statistics: EngineStatistics) -> Iterator[Metric]:
    labels = ["channel"]
    depth = GaugeMetricFamily("headrace_channel_depth", "Messages in a channel.", labels=labels)
    capacity = GaugeMetricFamily("headrace_channel_capacity", "Messages a channel can hold.", labels=labels)
    messages = CounterMetricFamily("headrace_channel_messages", "Messages sent.", labels=labels)
    wait = CounterMetricFamily("headrace_channel_wait_seconds", "Time messages lay in a channel.", labels=labels)
    blocked = CounterMetricFamily("headrace_channel_blocked_seconds", "Time senders waited for room.", labels=labels)
    for channel in statistics.channels:
        depth.add_metric([channel.name], channel.depth)
        capacity.add_metric([channel.name], channel.capacity)
        messages.add_metric([channel.name], channel.num_messages)
        wait.add_metric([channel.name], channel.wait_s)
        blocked.add_metric([channel.name], channel.blocked_s)
    yield from (depth, capacity, messages, wait, blocked)


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    buckets, total = histogram.cumulative()
    return HistogramMetricFamily(f"headrace_{name}", text, buckets=buckets, sum_value=total)
