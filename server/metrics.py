"""What is measured, in Prometheus' words.

As an observer it hears of every token, so it counts into plain lists; when someone asks, the counts and the engine's
own statistics become metrics. `METRICS` is the table of all there are; docs/metrics.md is made from it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..hooks.protocols import Event, RequestEnded, StepDone, TokensDelivered

if TYPE_CHECKING:
    from ..core.engine import EngineStatistics, ModelInfo, PluginCost

_LATENCY: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_STATE: Final = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
MAX_TENANTS: Final = 100
"""Names of keys that have numbers of their own. Where tokens are signed elsewhere there may be any number of names."""
OTHERS: Final = "(others)"

_TOKENS: Final = tuple(float(2**power) for power in range(18))


Kind = Literal["counter", "gauge", "histogram"]


class Row(Struct, frozen=True):
    """One metric. Counters are shown with `_total` behind their name, as Prometheus wants it.

    Attributes:
        doc: what it says, one sentence.
        of_engine: only there once the model is loaded.
    """

    name: str
    kind: Kind
    doc: str
    labels: tuple[str, ...] = ()
    of_engine: bool = False

    @property
    def shown(self) -> str:
        """The name in `/metrics`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


METRICS: Final = (
    Row("headrace_http_responses", "counter", "HTTP answers begun, refused ones included, by status.", ("status",)),
    Row(
        "headrace_requests",
        "counter",
        "Requests that have ended, by what they asked for and the HTTP status they amount to.",
        ("endpoint", "status"),
    ),
    Row(
        "headrace_tenant_requests",
        "counter",
        "Requests of a key that have ended; of keys after the first hundred under `(others)`.",
        ("tenant",),
    ),
    Row(
        "headrace_tenant_tokens",
        "counter",
        "Tokens in the prompts of a key's requests and in the answers to them; keys as above.",
        ("tenant", "kind"),
    ),
    Row("headrace_choices", "counter", "Choices of answers that have ended, by reason.", ("finish_reason",)),
    Row("headrace_time_to_first_token_seconds", "histogram", "From the door to the first token."),
    Row("headrace_inter_token_seconds", "histogram", "Between two tokens of one choice."),
    Row("headrace_request_seconds", "histogram", "From the door to the last token taken by the client."),
    Row("headrace_request_state_seconds", "histogram", "Time a request spent in each state.", ("state",)),
    Row("headrace_request_prompt_tokens", "histogram", "Tokens in the prompts of requests."),
    Row("headrace_request_output_tokens", "histogram", "Tokens in the answers to requests, all choices together."),
    Row("headrace_step_seconds", "histogram", "Forward and sampling of one step."),
    Row("headrace_step_tokens", "histogram", "Tokens of prompts one step computed, and one for each other sequence."),
    Row("headrace_requests_running", "gauge", "Requests whose sequences share the steps.", of_engine=True),
    Row("headrace_requests_waiting", "gauge", "Requests that wait for a place.", of_engine=True),
    Row("headrace_requests_parked", "gauge", "Requests whose reader does not keep up.", of_engine=True),
    Row("headrace_slots", "gauge", "Places for sequences in the line.", ("state",), of_engine=True),
    Row("headrace_kv_blocks", "gauge", "Blocks of the KV cache.", ("state",), of_engine=True),
    Row("headrace_kv_usage_ratio", "gauge", "Share of the KV cache's blocks in use, 0 to 1.", of_engine=True),
    Row("headrace_preemptions", "counter", "Times a sequence had to leave the KV cache.", of_engine=True),
    Row("headrace_steps", "counter", "Steps the model has run.", of_engine=True),
    Row("headrace_prompt_tokens", "counter", "Tokens of prompts, looked up in the prefix cache.", of_engine=True),
    Row("headrace_cached_prompt_tokens", "counter", "Tokens of prompts found in the prefix cache.", of_engine=True),
    Row("headrace_generated_tokens", "counter", "Tokens drawn.", of_engine=True),
    Row("headrace_drafts", "counter", "Times tokens were guessed ahead for a sequence.", of_engine=True),
    Row("headrace_guessed_tokens", "counter", "Tokens guessed ahead.", of_engine=True),
    Row("headrace_kept_tokens", "counter", "Tokens guessed ahead that were right.", of_engine=True),
    Row("headrace_channel_depth", "gauge", "Messages in a channel.", ("channel",), of_engine=True),
    Row("headrace_channel_capacity", "gauge", "Messages a channel can hold.", ("channel",), of_engine=True),
    Row("headrace_channel_messages", "counter", "Messages sent.", ("channel",), of_engine=True),
    Row("headrace_channel_wait_seconds", "counter", "Time messages lay in a channel.", ("channel",), of_engine=True),
    Row("headrace_channel_blocked_seconds", "counter", "Time senders waited for room.", ("channel",), of_engine=True),
    Row("headrace_plugin_seconds", "counter", "Time in a plugin's calls.", ("plugin", "slot"), of_engine=True),
    Row("headrace_plugin_calls", "counter", "Calls of a plugin.", ("plugin", "slot"), of_engine=True),
    Row(
        "headrace_plugin_errors",
        "counter",
        "Calls of a plugin that raised, gave back what cannot be used, or took too long.",
        ("plugin", "slot"),
        of_engine=True,
    ),
    Row(
        "headrace_plugin_quarantined",
        "gauge",
        "Components of a plugin that failed too often in a row and are not called any more.",
        ("plugin", "slot"),
        of_engine=True,
    ),
)
"""Every metric of our own."""


class Histogram:
    """Counts of values by upper bound (inclusive), for one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        bounds, counts = self._bounds, self._counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """((upper bound, values up to it) …, sum of the values), as `HistogramMetricFamily` takes them."""
        buckets, total = [], 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, self._sum


class Translation(Protocol):
    """The same measurements under other names; see vllm_metrics.py."""

    def on(self, event: Event) -> None:
        """As slot `observer`."""
        ...

    def families(self, statistics: EngineStatistics, info: ModelInfo) -> Iterable[Metric]:
        """The metrics now."""
        ...


Value = float | Histogram
Values = Mapping[str, Value | Mapping[str, Value] | Mapping[tuple[str, ...], Value]]
"""Name of a metric → its value, or with labels: its values by label, or by several."""


class Metrics(Collector):
    """An observer of the engine that can be read at `/metrics`.

    Args:
        more: gives the same under other names; an observer too.
    """

    def __init__(self, more: Translation | None = None) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._more = more
        self._statistics: EngineStatistics | None = None
        self._info: ModelInfo | None = None
        self._responses: Counter[str] = Counter()
        self._requests: Counter[tuple[str, ...]] = Counter()
        self._tenants: dict[str, tuple[float, float, float]] = {}
        """Requests, tokens of prompts, tokens of answers."""
        self._finishes: Counter[str] = Counter()
        self._ttft = Histogram(_LATENCY)
        self._gap = Histogram(_STEP)
        self._wall = Histogram(_LATENCY)
        self._prompt_tokens = Histogram(_TOKENS)
        self._output_tokens = Histogram(_TOKENS)
        self._step = Histogram(_STEP)
        self._step_tokens = Histogram(_TOKENS)
        self._states: dict[str, Histogram] = {}

    def on(self, event: Event) -> None:
        """Slot `observer`."""
        match event:
            case TokensDelivered(gaps_s=gaps):
                self._gap.observe_all(gaps)
            case StepDone(forward_s=forward_s, sample_s=sample_s):
                self._step.observe(forward_s + sample_s)
                self._step_tokens.observe(event.num_prefill_tokens + event.num_decodes)
            case RequestEnded():
                self._request_ended(event)
        if self._more is not None:
            self._more.on(event)

    def answered(self, status: int) -> None:
        """An HTTP answer has begun."""
        self._responses[str(status)] += 1

    def render(self, statistics: EngineStatistics | None, info: ModelInfo | None = None) -> bytes:
        """Everything, in Prometheus' text format.

        Args:
            statistics, info: None while the engine is loading.
        """
        self._statistics, self._info = statistics, info
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        values = {**self._counted(), **({} if self._statistics is None else _of_engine(self._statistics))}
        for row in METRICS:
            if row.name in values:
                yield _family(row, values[row.name])
        if self._more is not None and self._statistics is not None and self._info is not None:
            yield from self._more.families(self._statistics, self._info)

    def _counted(self) -> Values:
        tokens: dict[tuple[str, ...], Value] = {}
        for tenant, (_, prompt, output) in self._tenants.items():
            tokens |= {(tenant, "prompt"): prompt, (tenant, "output"): output}
        return {
            "headrace_http_responses": self._responses,
            "headrace_requests": self._requests,
            "headrace_tenant_requests": {tenant: counts[0] for tenant, counts in self._tenants.items()},
            "headrace_tenant_tokens": tokens,
            "headrace_choices": self._finishes,
            "headrace_time_to_first_token_seconds": self._ttft,
            "headrace_inter_token_seconds": self._gap,
            "headrace_request_seconds": self._wall,
            "headrace_request_state_seconds": self._states,
            "headrace_request_prompt_tokens": self._prompt_tokens,
            "headrace_request_output_tokens": self._output_tokens,
            "headrace_step_seconds": self._step,
            "headrace_step_tokens": self._step_tokens,
        }

    def _request_ended(self, event: RequestEnded) -> None:
        self._requests[event.endpoint, str(event.status)] += 1
        known = event.tenant in self._tenants or len(self._tenants) < MAX_TENANTS
        tenant = event.tenant if known else OTHERS
        requests, prompt, output = self._tenants.get(tenant, (0, 0, 0))
        self._tenants[tenant] = (requests + 1, prompt + event.num_prompt_tokens, output + event.num_output_tokens)
        self._finishes.update(event.finish)
        self._wall.observe(event.wall_s)
        self._prompt_tokens.observe(event.num_prompt_tokens)
        self._output_tokens.observe(event.num_output_tokens)
        if event.ttft_s is not None:
            self._ttft.observe(event.ttft_s)
        for state, seconds in event.states.items():
            self._states.setdefault(state, Histogram(_STATE)).observe(seconds)


def documentation(compat: Iterable[Row]) -> str:
    """The page docs/metrics.md, whole.

    Args:
        compat: the rows that `--metrics-compat vllm` adds.
    """
    return "\n".join([_HEAD, *_table(METRICS), _COMPAT, *_table(compat), ""])


_HEAD: Final = """# Metrics

`GET /metrics` in Prometheus' text format. [grafana/headrace.json](../grafana/headrace.json) is a dashboard of them.

Times are in seconds. A request is always in exactly one state, so the sums of `headrace_request_state_seconds` over its
states add up to `headrace_request_seconds`. A histogram has `_bucket`, `_sum` and `_count` behind its name.
"""

_COMPAT: Final = """
## `--metrics-compat vllm`

The same measurements besides, under vLLM's names, with its buckets and its labels `model_name` and `engine`, for
dashboards and autoscalers that read those.
"""


def _table(rows: Iterable[Row]) -> Iterator[str]:
    yield from ("| metric | type | labels | |", "|---|---|---|---|")
    for row in rows:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        yield f"| `{row.shown}` | {row.kind} | {labels} | {row.doc} |"


def _family(row: Row, value: Value | Mapping[str, Value] | Mapping[tuple[str, ...], Value]) -> Metric:
    if not isinstance(value, Mapping):
        return family(row, {(): value})
    values = {(labels,) if isinstance(labels, str) else labels: each for labels, each in value.items()}
    return family(row, dict(sorted(values.items(), key=lambda item: item[0])))


def family(row: Row, values: Mapping[tuple[str, ...], Value]) -> Metric:
    """*row* with its values by the values of its labels."""
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    made: Metric = kinds[row.kind](row.name, row.doc, labels=list(row.labels))
    for labels, value in values.items():
        if isinstance(value, Histogram):
            made.add_metric(list(labels), *value.cumulative())  # type: ignore[attr-defined]
        else:
            made.add_metric(list(labels), value)  # type: ignore[attr-defined]
    return made


def _of_engine(statistics: EngineStatistics) -> Values:
    used, total = statistics.blocks_used, statistics.blocks_total
    taken, places = statistics.slots_used, statistics.slots_total
    return {
        "headrace_requests_running": statistics.running,
        "headrace_requests_waiting": statistics.waiting,
        "headrace_requests_parked": statistics.parked,
        "headrace_slots": {"used": taken, "free": places - taken},
        "headrace_kv_blocks": {"used": used, "free": total - used},
        "headrace_kv_usage_ratio": used / total,
        "headrace_preemptions": statistics.preemptions_total,
        "headrace_steps": statistics.steps_total,
        "headrace_prompt_tokens": statistics.prompt_tokens_total,
        "headrace_cached_prompt_tokens": statistics.cached_tokens_total,
        "headrace_generated_tokens": statistics.generated_tokens_total,
        "headrace_drafts": statistics.drafts_total,
        "headrace_guessed_tokens": statistics.guessed_tokens_total,
        "headrace_kept_tokens": statistics.kept_tokens_total,
        "headrace_channel_depth": {each.name: each.depth for each in statistics.channels},
        "headrace_channel_capacity": {each.name: each.capacity for each in statistics.channels},
        "headrace_channel_messages": {each.name: each.num_messages for each in statistics.channels},
        "headrace_channel_wait_seconds": {each.name: each.wait_s for each in statistics.channels},
        "headrace_channel_blocked_seconds": {each.name: each.blocked_s for each in statistics.channels},
        "headrace_plugin_seconds": _by_plugin(statistics.plugins, lambda cost: cost.seconds),
        "headrace_plugin_calls": _by_plugin(statistics.plugins, lambda cost: cost.calls),
        "headrace_plugin_errors": _by_plugin(statistics.plugins, lambda cost: cost.errors),
        "headrace_plugin_quarantined": _by_plugin(statistics.plugins, lambda cost: cost.quarantined),
    }


def _by_plugin(costs: Iterable[PluginCost], field: Callable[[PluginCost], float]) -> dict[tuple[str, ...], Value]:
    return {(cost.plugin, cost.slot): field(cost) for cost in costs}
