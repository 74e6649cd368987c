"""Metrics as Prometheus reads them, under our names and under vLLM's, and what is written about them."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.hooks.config import Line
from headrace.hooks.protocols import RequestEnded, StepDone, TokensDelivered
from headrace.server import vllm_metrics
from headrace.server.metrics import MAX_TENANTS, METRICS, OTHERS, Histogram, Metrics, documentation
from headrace.server.vllm_metrics import VLLM
from tests.server.fake_engine import INFO
from tests.server.wire import post

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "grafana" / "headrace.json").read_text("utf-8"))
# The names that dashboards and autoscalers are known to read.
VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "lora_requests_info",
    "cache_config_info",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_cached_total",
    "admission_rejections_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "request_max_num_generation_tokens",
    "iteration_tokens_total",
]


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
        "max_tokens": 16,
        "endpoint": "chat",
    }
    return RequestEnded(**{**fields, **changes})


def samples(metrics: Metrics, engine) -> dict[str, float]:
    """Every sample, by `name{label}`."""
    found = {}
    for family in text_string_to_metric_families(metrics.render(engine.statistics(), INFO).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


async def test_ended_requests_are_counted_by_what_and_how_and_timed_by_state(engine):
    metrics = Metrics()
    metrics.on(ended())
    metrics.on(ended(status=499, ttft_s=None))
    found = samples(metrics, engine)
    for status in (200, 499):
        assert found[f"headrace_requests_total{{endpoint=chat,status={status}}}"] == 1
    assert found["headrace_request_seconds_sum{}"] == 5.0
    assert found["headrace_time_to_first_token_seconds_count{}"] == 1
    assert found["headrace_request_state_seconds_sum{state=decode}"] == 4.0


async def test_each_key_has_its_requests_and_tokens(engine):
    metrics = Metrics()
    for tenant in ("a", "b", "a"):
        metrics.on(ended(tenant=tenant))
    found = samples(metrics, engine)
    assert found["headrace_tenant_requests_total{tenant=a}"] == 2
    assert found["headrace_tenant_tokens_total{kind=prompt,tenant=a}"] == 40
    assert found["headrace_tenant_tokens_total{kind=output,tenant=b}"] == 3


async def test_any_number_of_keys_has_a_bounded_number_of_labels(engine):
    metrics = Metrics()
    for index in range(3 * MAX_TENANTS):
        metrics.on(ended(tenant=f"key {index}"))
    found = {name: value for name, value in samples(metrics, engine).items() if "tenant_requests_total" in name}
    assert len(found) == MAX_TENANTS + 1
    assert found[f"headrace_tenant_requests_total{{tenant={OTHERS}}}"] == 2 * MAX_TENANTS


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


async def test_each_plugin_has_its_cost_its_errors_and_whether_it_is_in_quarantine(engine):
    found = samples(Metrics(), engine)
    assert found["headrace_plugin_seconds_total{plugin=acme,slot=sampler}"] == 0.25
    assert found["headrace_plugin_calls_total{plugin=acme,slot=sampler}"] == 4
    assert found["headrace_plugin_errors_total{plugin=acme,slot=sampler}"] == 1
    assert found["headrace_plugin_quarantined{plugin=acme,slot=sampler}"] == 1


async def test_running_returns_to_zero_after_abandoned_requests(site, engine):
    engine.hold_at = 1
    async with await site.connect() as stream:
        await stream.send_all(post())
        await engine.held.wait()
        assert "headrace_requests_running 1.0" in (await site.client.get("/metrics")).text
    await engine.wait_closed(1)
    assert "headrace_requests_running 0.0" in (await site.client.get("/metrics")).text


async def test_choices_are_counted_by_why_they_ended(engine):
    metrics = Metrics()
    metrics.on(ended(finish=("stop", "length")))
    metrics.on(ended(finish=("stop",)))
    found = samples(metrics, engine)
    assert found["headrace_choices_total{finish_reason=stop}"] == 2
    assert found["headrace_choices_total{finish_reason=length}"] == 1


async def test_kv_usage_is_a_ratio(engine):
    assert samples(Metrics(), engine)["headrace_kv_usage_ratio{}"] == 3 / 8


async def test_refused_answers_are_counted_too(client):
    await client.get("/nowhere")
    text = (await client.get("/metrics")).text
    assert 'headrace_http_responses_total{status="404"} 1.0' in text


def busy() -> Metrics:
    """Metrics of which every one has a sample."""
    metrics = Metrics(VLLM(Line()))
    metrics.answered(200)
    metrics.on(ended())
    metrics.on(ended(status=429, ttft_s=None, finish=()))
    metrics.on(TokensDelivered(num_tokens=2, gaps_s=(0.02,)))
    metrics.on(StepDone(index=0, num_prefill_tokens=5, num_decodes=3, forward_s=0.01, sample_s=0.002))
    return metrics


def families(text: bytes) -> set[str]:
    """Names of all metrics, as they are shown."""
    return set(re.findall(r"^# TYPE (\S+) ", text.decode(), re.MULTILINE))


async def test_the_table_names_every_metric_there_is_and_no_other(engine):
    rows = (*METRICS, *vllm_metrics.METRICS)
    text = busy().render(engine.statistics(), INFO)
    assert families(text) == {row.shown for row in rows}
    for row in rows:
        assert re.search(rf"^{row.shown}(_count)?[{{ ]", text.decode(), re.MULTILINE), f"{row.name} has no sample"


async def test_labels_are_those_of_the_table(engine):
    text = busy().render(engine.statistics(), INFO).decode()
    labels = {row.shown: set(row.labels) for row in (*METRICS, *vllm_metrics.METRICS)}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            shown = next(
                name for name in (sample.name, re.sub("_(bucket|sum|count)$", "", sample.name)) if name in labels
            )
            assert set(sample.labels) - {"le"} == labels[shown]


def test_the_page_in_the_documentation_is_the_one_made_from_the_table():
    page = documentation(vllm_metrics.METRICS)
    assert (ROOT / "docs" / "metrics.md").read_text("utf-8") == page, (
        "write it anew: python -c 'from headrace.server import metrics, vllm_metrics as v; "
        'print(metrics.documentation(v.METRICS), end="")\''
    )


def test_while_loading_only_what_is_counted_at_the_door_is_there():
    assert families(busy().render(None)) == {row.shown for row in METRICS if not row.of_engine}


# ── vLLM's names ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_vllms_names_are_those_that_others_read():
    assert {row.shown for row in vllm_metrics.METRICS} == {f"vllm:{name}" for name in VLLM_NAMES}


async def test_without_the_switch_there_are_no_names_of_vllm(client):
    assert "vllm:" not in (await client.get("/metrics")).text


async def test_vllms_metrics_repeat_ours(engine):
    metrics = Metrics(VLLM(Line()))
    metrics.on(ended(finish=("stop",), num_output_tokens=5, states={"queued": 0.5, "prefill": 0.25, "decode": 2.0}))
    metrics.on(ended(status=499, finish=()))
    metrics.on(ended(status=429, finish=()))
    metrics.on(TokensDelivered(num_tokens=3, gaps_s=(0.02, 0.04)))
    found = samples(metrics, engine)
    who = "engine=0,model_name=fake"
    assert found["vllm:request_success_total{engine=0,finished_reason=stop,model_name=fake}"] == 1
    assert found["vllm:admission_rejections_total{engine=0,model_name=fake,reason=overloaded}"] == 1
    assert found[f"vllm:e2e_request_latency_seconds_count{{{who}}}"] == 1
    assert found[f"vllm:request_time_per_output_token_seconds_sum{{{who}}}"] == 0.5
    assert found[f"vllm:request_inference_time_seconds_sum{{{who}}}"] == 2.25
    assert found[f"vllm:inter_token_latency_seconds_count{{{who}}}"] == 2
    assert found[f"vllm:kv_cache_usage_perc{{{who}}}"] == found["headrace_kv_usage_ratio{}"]
    assert found[f"vllm:prefix_cache_hits_total{{{who}}}"] == 1


@pytest.mark.parametrize(
    ("name", "first", "last", "num_buckets"),
    [
        ("time_to_first_token_seconds", "0.001", "2560.0", 23),
        ("inter_token_latency_seconds", "0.01", "80.0", 20),
        ("e2e_request_latency_seconds", "0.3", "7680.0", 22),
    ],
)
async def test_vllms_buckets_are_its_own(engine, name, first, last, num_buckets):
    text = busy().render(engine.statistics(), INFO).decode()
    bounds = re.findall(rf'^vllm:{name}_bucket{{.*le="([^"]+)"', text, re.MULTILINE)
    assert (bounds[0], bounds[-2], bounds[-1], len(bounds)) == (first, last, "+Inf", num_buckets)


# ── the dashboard ─────────────────────────────────────────────────────────────────────────────────────────────────


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def test_every_name_in_the_dashboard_is_a_metric():
    shown = {row.shown: row.kind for row in METRICS}
    known = {name for name, kind in shown.items() if kind != "histogram"}
    known |= {
        f"{name}_{end}" for name, kind in shown.items() if kind == "histogram" for end in ("bucket", "sum", "count")
    }
    used = {name for expression in expressions() for name in re.findall(r"headrace_\w+", expression)}
    assert len(used) > 15
    assert used - known == set()


def test_every_label_in_the_dashboard_is_one_of_its_metric():
    labels = {row.shown: {*row.labels, "le", "instance", "job"} for row in METRICS}
    for expression in expressions():
        for name, matchers in re.findall(r"(headrace_\w+){([^}]*)}", expression):
            base = name if name in labels else re.sub("_(bucket|sum|count)$", "", name)
            assert set(re.findall(r"(\w+)[=!]", matchers)) <= labels[base]


def test_every_panel_has_its_place_and_a_question_it_answers():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_an_unknown_event_is_no_error():
    Metrics().on(object())


def test_a_bucket_includes_its_bound():
    histogram = Histogram([1.0, 2.0])
    for value in (1.0, 1.5, 3.0):
        histogram.observe(value)
    assert histogram.cumulative() == ([("1.0", 1.0), ("2.0", 2.0), ("+Inf", 3.0)], 5.5)
