"""Metrics as Prometheus reads them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.hooks.protocols import RequestEnded, StepDone, TokensDelivered
from headrace.server.metrics import Histogram, Metrics
from tests.server.wire import post


def ended(**changes: object) -> RequestEnded:
    fields = {
        "id": "r",
        "num_prompt_tokens": 20,
        "num_cached_tokens": 0,
        "num_output_tokens": 3,
        "finish": ("stop",),
        "states": {"queued": 0.5, "decode": 2.0},
        "spans": {},
        "wall_s": 2.5,
        "ttft_s": 0.7,
        "status": 200,
    }
    return RequestEnded(**{**fields, **changes})


def samples(metrics: Metrics, engine) -> dict[str, float]:
    """Every sample, by `name{label}`."""
    found = {}
    for family in text_string_to_metric_families(metrics.render(engine.statistics()).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


async def test_ended_requests_are_counted_by_status_and_timed_by_state(engine):
    metrics = Metrics()
    metrics.on(ended())
    metrics.on(ended(status=499, ttft_s=None))
    found = samples(metrics, engine)
    assert found["headrace_requests_total{status=200}"] == found["headrace_requests_total{status=499}"] == 1
    assert found["headrace_request_seconds_sum{}"] == 5.0
    assert found["headrace_time_to_first_token_seconds_count{}"] == 1
    assert found["headrace_request_state_seconds_sum{state=decode}"] == 4.0


async def test_gaps_and_steps_are_counted(engine):
    metrics = Metrics()
    metrics.on(TokensDelivered(num_tokens=3, gaps_s=(0.02, 0.04)))
    metrics.on(StepDone(index=0, num_prefill_tokens=0, num_decodes=3, forward_s=0.01, sample_s=0.002))
    found = samples(metrics, engine)
    assert found["headrace_inter_token_seconds_count{}"] == 2
    assert found["headrace_inter_token_seconds_bucket{le=0.02}"] == 1
    assert found["headrace_step_seconds_sum{}"] == pytest.approx(0.012)


async def test_the_engines_statistics_are_gauges_and_counters(engine):
    found = samples(Metrics(), engine)
    assert found["headrace_kv_blocks{state=used}"] == 3
    assert found["headrace_kv_blocks{state=free}"] == 5
    assert found["headrace_preemptions_total{}"] == 2
    assert found["headrace_channel_depth{channel=forward}"] == 1
    assert found["headrace_channel_capacity{channel=forward}"] == 2
    assert found["headrace_channel_wait_seconds_total{channel=forward}"] == 0.5
    assert found["headrace_channel_blocked_seconds_total{channel=forward}"] == 0.25


async def test_running_returns_to_zero_after_abandoned_requests(site, engine):
    engine.hold_at = 1
    async with await site.connect() as stream:
        await stream.send_all(post())
        await engine.held.wait()
        assert "headrace_requests_running 1.0" in (await site.client.get("/metrics")).text
    await engine.wait_closed(1)
    assert "headrace_requests_running 0.0" in (await site.client.get("/metrics")).text


def test_an_unknown_event_is_no_error():
    Metrics().on(object())


def test_a_bucket_includes_its_bound():
    histogram = Histogram([1.0, 2.0])
    for value in (1.0, 1.5, 3.0):
        histogram.observe(value)
    assert histogram.cumulative() == ([("1.0", 1.0), ("2.0", 2.0), ("+Inf", 3.0)], 5.5)
