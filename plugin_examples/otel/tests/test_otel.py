from importlib.util import find_spec

import pytest

from headrace.hooks.protocols import Context, RequestEnded
from headrace.testing import ObserverContract

pytestmark = pytest.mark.skipif(
    find_spec("opentelemetry") is None, reason="needs opentelemetry-sdk: pip install opentelemetry-sdk"
)

OPTIONS = {"exporter": "global"}


class TestOtel(ObserverContract):
    plugin = "headrace_otel"
    options = OPTIONS


@pytest.fixture
def spans(monkeypatch):
    """What is sent, with a provider of the process that keeps it."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def told(spans, **changes):
    """The span of one request."""
    import headrace_otel

    event = {
        "id": "chatcmpl-1",
        "num_prompt_tokens": 12,
        "num_cached_tokens": 4,
        "num_output_tokens": 7,
        "finish": ("stop",),
        "states": {"queued": 0.5, "decode": 1.5},
        "spans": {},
        "wall_s": 2.0,
        "ttft_s": 0.75,
        "status": 200,
        "max_tokens": 100,
        "endpoint": "chat",
        "model": "tiny",
        "tenant": "app",
    }
    observer = headrace_otel.Otel(Context(), headrace_otel.Options(exporter="global"))
    observer.on(RequestEnded(**event | changes))
    (span,) = spans.get_finished_spans()
    return span


def test_a_request_becomes_a_span_with_the_names_of_the_convention(spans):
    span = told(spans)
    assert (span.name, span.attributes["gen_ai.operation.name"]) == ("chat tiny", "chat")
    assert span.attributes["gen_ai.request.model"] == span.attributes["gen_ai.response.model"] == "tiny"
    assert span.attributes["headrace.tenant"] == "app"
    assert span.attributes["gen_ai.usage.input_tokens"] == 12
    assert span.attributes["gen_ai.usage.output_tokens"] == 7
    assert span.attributes["gen_ai.response.id"] == "chatcmpl-1"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.attributes["gen_ai.request.max_tokens"] == 100
    assert span.attributes["headrace.state.queued_s"] == 0.5
    assert span.end_time - span.start_time == 2_000_000_000
    assert [(event.name, event.timestamp - span.start_time) for event in span.events] == [("first token", 750_000_000)]
    assert span.status.is_unset


def test_what_is_not_known_is_left_out(spans):
    span = told(spans, endpoint="completion", model="", tenant="")
    assert (span.name, span.attributes["gen_ai.operation.name"]) == ("text_completion", "text_completion")
    assert not {"gen_ai.request.model", "gen_ai.response.model", "headrace.tenant"} & set(span.attributes)


def test_names_are_those_that_the_package_of_the_convention_has(spans):
    names = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    known = {value for value in vars(names).values() if isinstance(value, str)}
    found = {name for name in told(spans, n=2).attributes if name.startswith("gen_ai.")}
    assert found - known == set()


def test_a_failure_is_one(spans):
    span = told(spans, status=500, error="plugin naughty failed", finish=(), ttft_s=None)
    assert span.attributes["error.type"] == "500"
    assert (span.status.is_ok, span.status.description) == (False, "plugin naughty failed")
    assert span.events == ()
