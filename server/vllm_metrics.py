"""Our measurements under vLLM's names, with its labels and buckets, for dashboards and autoscalers that read those.

Source: the metrics of vLLM's v1 engine, vllm/v1/metrics/loggers.py. Where vLLM means something that there is not here,
the row's sentence says what is given instead.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import Metric

from ..hooks.config import Line
from ..hooks.errors import Overloaded
from ..hooks.protocols import Event, RequestEnded, StepDone, TokensDelivered
from .metrics import Histogram, Kind, Row, Value, family

if TYPE_CHECKING:
    from ..core.engine import EngineStatistics, ModelInfo

_FIRST: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_FIRST_ON: Final = (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
_TOKEN_ON: Final = (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_REQUEST_ON: Final = (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_STEP: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# vLLM ends these at the length of its context, which is not known here before the model is loaded.
_LENGTH: Final = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))

_BOUNDS: Final[Mapping[str, Sequence[float]]] = {
    "time_to_first_token_seconds": _FIRST + _FIRST_ON,
    "inter_token_latency_seconds": _TOKEN + _TOKEN_ON,
    "request_time_per_output_token_seconds": _TOKEN + _TOKEN_ON,
    "e2e_request_latency_seconds": _REQUEST + _REQUEST_ON,
    "request_queue_time_seconds": _REQUEST + _REQUEST_ON,
    "request_prefill_time_seconds": _REQUEST + _REQUEST_ON,
    "request_decode_time_seconds": _REQUEST + _REQUEST_ON,
    "request_inference_time_seconds": _REQUEST + _REQUEST_ON,
    "request_prompt_tokens": _LENGTH,
    "request_generation_tokens": _LENGTH,
    "request_max_num_generation_tokens": _LENGTH,
    "request_params_max_tokens": _LENGTH,
    "request_params_n": (1, 2, 5, 10, 20),
    "iteration_tokens_total": _STEP,
}

LABELS: Final = ("model_name", "engine")
ENGINE: Final = "0"


def _row(name: str, kind: Kind, doc: str, *labels: str) -> Row:
    return Row(f"vllm:{name}", kind, doc, (*LABELS, *labels), of_engine=True)


METRICS: Final = (
    _row("num_requests_running", "gauge", "`headrace_requests_running`."),
    _row("num_requests_waiting", "gauge", "`headrace_requests_waiting`."),
    _row("num_requests_waiting_by_reason", "gauge", "The same; the reason is always `capacity`.", "reason"),
    _row("kv_cache_usage_perc", "gauge", "`headrace_kv_usage_ratio`: 0 to 1, whatever its name says."),
    _row(
        "lora_requests_info",
        "gauge",
        "The time of asking. There are no adapters: `max_lora` is 0.",
        "max_lora",
        "waiting_lora_adapters",
        "running_lora_adapters",
    ),
    _row(
        "cache_config_info",
        "gauge",
        "1; its labels tell the size of the KV cache, on whatever device it lies.",
        "block_size",
        "num_gpu_blocks",
        "enable_prefix_caching",
    ),
    _row("prompt_tokens", "counter", "`headrace_prompt_tokens_total`."),
    _row("generation_tokens", "counter", "`headrace_generated_tokens_total`."),
    _row("request_success", "counter", "`headrace_choices_total`.", "finished_reason"),
    _row("num_preemptions", "counter", "`headrace_preemptions_total`."),
    _row("prefix_cache_queries", "counter", "`headrace_prompt_tokens_total`."),
    _row("prefix_cache_hits", "counter", "`headrace_cached_prompt_tokens_total`."),
    _row("prompt_tokens_cached", "counter", "`headrace_cached_prompt_tokens_total`."),
    _row("admission_rejections", "counter", "Requests refused with 429; the reason is always `overloaded`.", "reason"),
    _row("spec_decode_num_drafts", "counter", "`headrace_drafts_total`."),
    _row("spec_decode_num_draft_tokens", "counter", "`headrace_guessed_tokens_total`."),
    _row("spec_decode_num_accepted_tokens", "counter", "`headrace_kept_tokens_total`."),
    _row(
        "spec_decode_num_accepted_tokens_per_pos", "counter", "How often each guess of a draft was right.", "position"
    ),
    _row("time_to_first_token_seconds", "histogram", "From the door to the first token."),
    _row("inter_token_latency_seconds", "histogram", "Between two tokens of one choice."),
    _row("request_time_per_output_token_seconds", "histogram", "Time in state decode ÷ tokens of a choice but one."),
    _row("e2e_request_latency_seconds", "histogram", "From the door to the last token taken by the client."),
    _row("request_queue_time_seconds", "histogram", "Time in state queued."),
    _row("request_prefill_time_seconds", "histogram", "Time in state prefill."),
    _row("request_decode_time_seconds", "histogram", "Time in state decode."),
    _row("request_inference_time_seconds", "histogram", "Time in states prefill, decode and preempted."),
    _row("request_prompt_tokens", "histogram", "Tokens of a request's prompt."),
    _row("request_generation_tokens", "histogram", "Tokens of a request's answer, all choices together."),
    _row("request_params_max_tokens", "histogram", "`max_tokens` of requests that had one."),
    _row("request_params_n", "histogram", "`n` of requests."),
    _row("request_max_num_generation_tokens", "histogram", "Tokens of a choice, the mean of a request's choices."),
    _row("iteration_tokens_total", "histogram", "Tokens one step computed."),
)
"""Every metric of `--metrics-compat vllm`."""


class VLLM:
    """An observer that speaks vLLM's names.

    Args:
        line: whose block size and prefix cache to tell of.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._histograms = {name: Histogram(bounds) for name, bounds in _BOUNDS.items()}
        self._finishes: Counter[str] = Counter()
        self._num_refused = 0

    def on(self, event: Event) -> None:
        match event:
            case TokensDelivered(gaps_s=gaps):
                gap_s = self._histograms["inter_token_latency_seconds"]
                for gap in gaps:
                    gap_s.observe(gap)
            case StepDone():
                tokens = event.num_prefill_tokens + event.num_decodes
                self._histograms["iteration_tokens_total"].observe(tokens)
            case RequestEnded(status=Overloaded.status):
                self._num_refused += 1
            case RequestEnded(status=200):
                self._finishes.update(event.finish)
                for name, value in _of_request(event):
                    self._histograms[name].observe(value)

    def families(self, statistics: EngineStatistics, info: ModelInfo) -> Iterator[Metric]:
        values = self._values(statistics)
        values |= {name: {(): histogram} for name, histogram in self._histograms.items()}
        for row in METRICS:
            by_label = values[row.name.removeprefix("vllm:")]
            yield family(row, {(info.name, ENGINE, *labels): value for labels, value in by_label.items()})

    def _values(self, statistics: EngineStatistics) -> dict[str, Mapping[tuple[str, ...], Value]]:
        config = (str(self._line.block_size), str(statistics.blocks_total), str(self._line.prefix_cache))
        return {
            "num_requests_running": {(): statistics.running},
            "num_requests_waiting": {(): statistics.waiting},
            "num_requests_waiting_by_reason": {("capacity",): statistics.waiting},
            "kv_cache_usage_perc": {(): statistics.blocks_used / statistics.blocks_total},
            "lora_requests_info": {("0", "", ""): time.time()},
            "cache_config_info": {config: 1},
            "prompt_tokens": {(): statistics.prompt_tokens_total},
            "generation_tokens": {(): statistics.generated_tokens_total},
            "request_success": {(reason,): count for reason, count in sorted(self._finishes.items())},
            "num_preemptions": {(): statistics.preemptions_total},
            "prefix_cache_queries": {(): statistics.prompt_tokens_total},
            "prefix_cache_hits": {(): statistics.cached_tokens_total},
            "prompt_tokens_cached": {(): statistics.cached_tokens_total},
            "admission_rejections": {("overloaded",): self._num_refused},
            "spec_decode_num_drafts": {(): statistics.drafts_total},
            "spec_decode_num_accepted_tokens_per_pos": {
                (str(position),): count for position, count in enumerate(statistics.kept_by_position)
            },
            "spec_decode_num_draft_tokens": {(): statistics.guessed_tokens_total},
            "spec_decode_num_accepted_tokens": {(): statistics.kept_tokens_total},
        }


def _of_request(event: RequestEnded) -> Iterator[tuple[str, float]]:
    """What a request that ended well adds to the histograms."""
    prefill_s, decode_s = event.states.get("prefill", 0.0), event.states.get("decode", 0.0)
    tokens_a_choice = event.num_output_tokens / event.n
    yield "request_params_n", event.n
    if event.max_tokens is not None:
        yield "request_params_max_tokens", event.max_tokens
    if event.ttft_s is not None:
        yield "time_to_first_token_seconds", event.ttft_s
    if tokens_a_choice > 1:
        yield "request_time_per_output_token_seconds", decode_s / (tokens_a_choice - 1)
    yield "e2e_request_latency_seconds", event.wall_s
    yield "request_queue_time_seconds", event.states.get("queued", 0.0)
    yield "request_prefill_time_seconds", prefill_s
    yield "request_decode_time_seconds", decode_s
    yield "request_inference_time_seconds", prefill_s + decode_s + event.states.get("preempted", 0.0)
    yield "request_prompt_tokens", event.num_prompt_tokens
    yield "request_generation_tokens", event.num_output_tokens
    yield "request_max_num_generation_tokens", tokens_a_choice
