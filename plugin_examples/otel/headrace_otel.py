"""Observer `otel`: a span for each request, with the `gen_ai.*` attributes of OpenTelemetry.

Spans are made when a request has ended, with the times it had; the processor of the SDK sends them, on a thread of its
own. With `exporter = "global"` they go where the process was told to send traces, as by `opentelemetry-instrument`.

Source: OpenTelemetry, Semantic conventions for generative AI, "Inference" spans; docs/gen-ai/gen-ai-spans.md.
"""

from __future__ import annotations

import time
from typing import Literal

from msgspec import Struct
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

import headrace
from headrace.hooks.errors import ConfigError
from headrace.hooks.protocols import RequestEnded

headrace_api = 1


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    exporter: Literal["otlp", "console", "global"] = "otlp"
    """`otlp` needs `opentelemetry-exporter-otlp-proto-http`, and is told where to by `OTEL_EXPORTER_OTLP_ENDPOINT`."""
    service: str = "headrace"
    """`service.name`, unless `OTEL_SERVICE_NAME` says so. Of no use to `global`."""


class Otel:
    def __init__(self, context, options):
        provider = trace.get_tracer_provider() if options.exporter == "global" else own(options)
        self.tracer = provider.get_tracer("headrace")

    def on(self, event):
        if not isinstance(event, RequestEnded):
            return
        end = time.time_ns()
        start = end - round(event.wall_s * 1e9)
        span = self.tracer.start_span(
            f"{operation(event)} {event.model}".strip(),
            kind=trace.SpanKind.SERVER,
            start_time=start,
            attributes=attributes(event),
        )
        if event.ttft_s is not None:
            span.add_event("first token", timestamp=start + round(event.ttft_s * 1e9))
        if event.error is not None:
            span.set_status(trace.StatusCode.ERROR, event.error)
        span.end(end)


def operation(event):
    return "chat" if event.endpoint == "chat" else "text_completion"


def attributes(event):
    found = {
        "gen_ai.operation.name": operation(event),
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": event.model or None,
        "gen_ai.response.model": event.model or None,
        "headrace.tenant": event.tenant or None,
        "gen_ai.request.choice.count": event.n if event.n != 1 else None,
        "gen_ai.request.max_tokens": event.max_tokens,
        "gen_ai.response.id": event.id,
        "gen_ai.response.finish_reasons": list(event.finish) or None,
        "gen_ai.usage.input_tokens": event.num_prompt_tokens,
        "gen_ai.usage.output_tokens": event.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": event.num_cached_tokens,
        "error.type": str(event.status) if event.error is not None else None,
        **{f"headrace.state.{name}_s": seconds for name, seconds in event.states.items()},
    }
    return {name: value for name, value in found.items() if value is not None}


def own(options):
    """A provider of this observer's own, which sends from a thread and flushes when the process ends."""
    provider = TracerProvider(resource=Resource.create({"service.name": options.service}))
    provider.add_span_processor(BatchSpanProcessor(exporter(options)))
    return provider


def exporter(options):
    if options.exporter == "console":
        return ConsoleSpanExporter()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        need = "pip install opentelemetry-exporter-otlp-proto-http, or take another exporter"
        raise ConfigError(f"otel: exporter = otlp must have its package installed, found {error}; {need}") from None
    return OTLPSpanExporter()


@headrace.plugin
def register_observer(register):
    register("otel", Otel, config=Options, doc="OpenTelemetry spans of requests, with gen_ai.* names.")
