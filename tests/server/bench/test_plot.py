import pytest

from headrace.server.bench.plot import plot
from headrace.server.bench.settings import Targets
from tests.server.bench.test_report import record, report

RUNS = {
    "of equal gaps": [record(index, sent_s=index / 10, times=(0.5, 0.6, 0.7)) for index in range(3)],
    "without a complete request": [record(error="timeout", times=(), message="too late")],
    "of many requests, some of them failed": [record(i, error="cut short" if i % 9 == 0 else None) for i in range(450)],
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_can_be_drawn(run, tmp_path):
    file = tmp_path / "plot.png"
    plot(file, report(*RUNS[run], targets=Targets(ttft_ms=50)), RUNS[run])
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
