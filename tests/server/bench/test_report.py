from array import array

import msgspec
import pytest

from headrace.server.bench.gauge import Gauge
from headrace.server.bench.record import Record
from headrace.server.bench.report import Setting, spread, summarize
from headrace.server.bench.settings import Load, Targets
from headrace.server.bench.show import lines


def record(index=0, *, sent_s=0.0, times=(0.5, 0.75, 1.0), end_s=1.25, **fields):
    fields = {"num_output_tokens": len(times), "counted": True, "num_events": len(times) + 1, **fields}
    return Record(index=index, sent_s=sent_s, end_s=end_s, times=array("d", times), **fields)


def report(*records, targets=Targets(), cpu_s=0.1):  # noqa: B008
    load = Load(url="http://x", run_id="r", concurrency=1, targets=targets)
    setting = Setting(version="0", started="now", load=load, model="m", gauge=Gauge(), interrupted=False, cpu_s=cpu_s)
    return summarize(records, setting)


def test_percentiles_are_interpolated_between_neighbours():
    of = spread(range(101))
    assert (of.p50, of.p90, of.p99, of.max, of.mean) == (50, 90, 99, 100, 50)
    assert spread([1, 2]).p90 == pytest.approx(1.9)


def test_there_is_no_spread_of_nothing():
    assert spread([None, None]) is None


def test_latencies_are_those_of_their_definitions():
    of = report(record(sent_s=0.25))
    assert of.ttft_ms.mean == 250
    assert of.itl_ms.max == 250
    assert of.e2e_ms.p50 == 1000


def test_an_event_of_several_tokens_makes_a_token_quicker_and_the_gaps_no_shorter():
    of = report(record(num_output_tokens=6))
    assert of.tpot_ms.mean == 100
    assert of.itl_ms.mean == 250


def test_rates_are_of_the_time_from_the_first_request_to_the_last_end():
    first = record(0, num_prompt_tokens=10, num_cached_tokens=4)
    of = report(record(1, sent_s=1.0, times=(1.5, 2.0), end_s=4.0, num_prompt_tokens=20, num_cached_tokens=0), first)
    assert of.wall_s == 4.0
    assert of.requests_per_s == 0.5
    assert of.output_tokens_per_s == 5 / 4
    assert of.total_tokens_per_s == 35 / 4
    assert of.num_cached_tokens == 4
    assert [row.index for row in of.requests] == [0, 1]


@pytest.mark.parametrize(
    ("targets", "good"),
    [
        (Targets(), 2),
        (Targets(ttft_ms=600), 1),
        (Targets(ttft_ms=500), 1),
        (Targets(ttft_ms=499), 0),
        (Targets(itl_ms=300), 1),
        (Targets(e2e_ms=1250), 1),
        (Targets(ttft_ms=600, e2e_ms=1000), 0),
    ],
)
def test_a_good_request_is_complete_and_meets_each_target(targets, good):
    slow = record(1, times=(1.0, 1.5, 2.0), end_s=2.0)
    failed = record(2, error="cut short")
    of = report(record(0), slow, failed, targets=targets)
    assert of.good_per_s == good / 2.0
    assert of.good_share == good / 3


def test_errors_are_counted_by_kind_with_the_first_message_of_each():
    failed = [record(i, error="http 429" if i else "timeout", message=f"number {i}") for i in range(3)]
    of = report(*failed, record(9))
    assert of.errors == {"http 429": 2, "timeout": 1}
    assert of.messages["http 429"] == "number 1"
    assert (of.num_complete, of.num_sent) == (1, 4)


def test_failed_requests_add_nothing_to_latencies_and_tokens():
    assert report(record(0), record(1, times=(9.0,), error="cut short")).output_tokens.mean == 3


def test_where_a_server_counts_nothing_events_are_tokens_and_prompts_are_not_known():
    of = report(record(counted=False))
    assert of.tokens_by == "events"
    assert of.num_output_tokens == 3
    assert of.total_tokens_per_s is of.cached_tokens is None


def test_a_run_without_a_complete_request_is_told_and_shown():
    of = report(record(error="timeout", times=(), message="too late"))
    assert of.ttft_ms is None
    assert of.requests_per_s == 0
    assert any("too late" in line for line in lines(of))


def test_the_clients_own_cost_is_told():
    of = report(record(), cpu_s=0.125)
    assert of.client.cpu_share == 0.1
    assert of.client.cpu_us_per_event == 125_000 / 4


def test_a_report_is_json():
    told = msgspec.json.decode(msgspec.json.encode(report(record())))
    assert told["ttft_ms"]["p99"] == 500
    assert told["requests"][0]["gap_max_ms"] == 250


def test_people_are_told_the_targets_that_are_stated():
    shown = "\n".join(lines(report(record(), targets=Targets(ttft_ms=600, itl_ms=20))))
    assert "0.0% of those sent: first token ≤ 600 ms, token ≤ 20 ms" in shown
