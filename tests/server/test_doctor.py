"""What the doctor finds, and what it calls a problem."""

import msgspec
import pytest

from headrace.hooks import config
from headrace.hooks.components import PluginInfo
from headrace.hooks.errors import StartError
from headrace.hooks.messages import Delta
from headrace.server.doctor import Finding, files, machine, plan, plugins, self_test
from tests.server.fake_engine import FakeEngine


class Clean(FakeEngine):
    """Holds nothing after its answers."""

    def statistics(self):
        return msgspec.structs.replace(super().statistics(), blocks_used=0, slots_used=0)


def problems(findings) -> list[str]:
    return [finding.what for finding in findings if not finding.ok]


def test_a_machine_is_described_by_versions_threads_and_kernels():
    found = {finding.what: finding for finding in machine()}
    assert "torch " in found["versions"].text
    assert "missing" not in found["versions"].text
    assert "instruction set" in found["torch"].text
    assert found["native"].ok


def test_a_failed_plugin_is_a_problem_and_a_skipped_one_is_not():
    infos = [
        PluginInfo(id="good"),
        PluginInfo(id="bad", distribution="acme", version="1", state="failed", reason="cannot be imported"),
        PluginInfo(id="off", state="skipped", reason="disabled by plugins.disable"),
    ]
    found = list(plugins(infos))
    assert found[0].text == "1 of 3 loaded"
    assert problems(found) == ["plugin bad (acme 1)"]


def test_more_connections_than_files_are_a_problem_with_advice():
    assert files(1).ok
    found = files(2**40)
    assert not found.ok
    assert "ulimit -n" in found.text


def test_a_model_that_is_not_there_is_a_problem_in_the_operators_words():
    found = plan(config.load(sets=["model.uri=/no/such/model"]))
    assert not found.ok
    assert "/no/such/model" in found.text


def test_an_engine_that_answers_and_gives_everything_back_is_healthy():
    engine = Clean()
    found = list(self_test(engine, 0.05))
    assert problems(found) == []
    assert [finding.what for finding in found] == ["load", "answer", "repeats", "speed", "returned"]
    assert len(engine.requests) >= 2
    assert all(request.params.temperature == 0 for request in engine.requests)


def test_an_engine_that_keeps_blocks_is_found_out():
    assert problems(self_test(FakeEngine(), 0.01)) == ["returned"]


def test_greedy_answers_that_differ_are_found_out():
    class Moody(Clean):
        def put(self, request, choice, token_id, last, usage):
            super().put(request, choice, token_id + len(self.requests), last, usage)

    assert problems(self_test(Moody(), 0.01)) == ["repeats"]


def test_an_engine_that_cannot_start_is_found_out():
    class Broken(Clean):
        async def run(self, *, progress=None):
            raise StartError("no such checkpoint")

    (found,) = self_test(Broken(), 0.01)
    assert (found.ok, found.text) == (False, "no such checkpoint")


def test_an_answer_that_fails_is_found_out():
    class Failing(Clean):
        def put(self, request, choice, token_id, last, usage):
            request.mailbox.put(Delta(error=self.failure))

    assert problems(self_test(Failing(), 0.01)) == ["self test"]


@pytest.mark.parametrize(
    ("ok", "line"), [(True, "  memory    a\n            b"), (False, "! memory    a\n            b")]
)
def test_a_finding_is_a_line_that_shows_problems(ok, line):
    assert str(Finding(what="memory", text="a\nb", ok=ok)) == line
