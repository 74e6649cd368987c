"""The stop watchers, alone and in a line."""

import pytest
import trio
from msgspec import structs

from headrace.core.engine import Parts
from headrace.hooks.components import Bound
from headrace.hooks.errors import BadRequest, RequestFailed
from headrace.hooks.messages import TokenPrompt
from tests.fakes import FakeExecutor, answer, ask, humming, make_engine, make_parts, text_of
from tests.plugins.rig import build


def detector(**params):
    bound = build("stop", "repetition-detector")
    return bound.component.watch(bound.params(**params))


def ends_at(watcher, tokens):
    """How many tokens were taken when the watcher ended the answer; None: it did not."""
    return next((place for place, token_id in enumerate(tokens, 1) if watcher.feed("", token_id)), None)


@pytest.mark.parametrize("period", [1, 2, 5, 8])
@pytest.mark.parametrize("min_repeats", [2, 3])
def test_a_circle_is_found_when_it_is_closed_for_the_last_time(period, min_repeats):
    tokens = [100, 101, *(list(range(period)) * 10)]
    watcher = detector(min_repeats=min_repeats, max_period=8, min_tokens=1)
    assert ends_at(watcher, tokens) == 2 + period * min_repeats


def test_a_short_circle_may_go_on_until_it_fills_the_least_number_of_tokens():
    assert ends_at(detector(min_repeats=2, min_tokens=20), [7] * 50) == 20


def test_what_does_not_repeat_often_enough_goes_on():
    assert (
        ends_at(detector(min_repeats=3, max_period=4, min_tokens=1), [1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]) is None
    )
    assert ends_at(detector(min_repeats=2, max_period=4, min_tokens=1), list(range(5)) * 9) is None


def test_a_watcher_that_is_off_is_not_asked():
    assert detector() is None
    assert build("stop", "time-limit").component.watch(build("stop", "time-limit").params()) is None


def with_stops(parts: Parts, *bounds: Bound) -> Parts:
    return structs.replace(parts, stack=structs.replace(parts.stack, stops=bounds))


async def running(nursery, parts):
    engine = make_engine(parts)
    nursery.start_soon(engine.run)
    await engine.ready.wait()
    return engine


async def until_dead(engine):
    """Wait for the last results, which a drain does not."""
    while engine.state != "dead":  # noqa: ASYNC110, for nobody would set an event.
        await trio.sleep(0.01)


async def test_the_answer_ends_at_the_token_that_closed_the_circle_and_gives_its_blocks_back(nursery, autojump_clock):
    def circling(tokens, choice, seed):
        return (tokens[-1] + 1) % 3

    parts = make_parts(executor=lambda pool: FakeExecutor(pool, model=circling))
    engine = await running(
        nursery, with_stops(parts, build("stop", "repetition-detector", min_repeats=4, min_tokens=1))
    )
    assert await ask(engine, [5, 0], {"max_tokens": 100}) == {0: text_of([1, 2, 0] * 4)}
    looser = {"repetition-detector": {"min_repeats": 0}}
    assert await ask(engine, [5, 0], {"max_tokens": 60}, stop=looser) == {0: text_of([1, 2, 0] * 20)}
    await engine.drain(10)
    await until_dead(engine)
    assert engine.statistics().blocks_used == 0


async def test_a_time_limit_ends_the_answer_with_what_there_is(nursery, autojump_clock):
    engine = await running(nursery, with_stops(make_parts(), build("stop", "time-limit")))
    request = engine.request(TokenPrompt(token_ids=(1, 2)), {"seed": 0}, stop={"time-limit": {"max_time_s": 0.095}})
    await engine.submit(request)
    deltas = []
    while (delta := await engine.receive(request)) is not None:
        deltas.append(delta)
    # A token every 0.01 s, and the first one starts the clock.
    assert "".join(delta.text for delta in deltas) == text_of(answer([1, 2], 11))
    assert deltas[-1].finish == "stop"
    engine.close(request)
    await engine.drain(10)


async def test_a_watcher_that_fails_ends_its_own_request_by_name(nursery, autojump_clock):
    class Broken:
        def watch(self, params):
            return self

        def feed(self, text, token_id):
            raise ZeroDivisionError("on purpose")

    engine = await running(nursery, with_stops(make_parts(), Bound(name="broken", plugin="theirs", component=Broken())))
    with pytest.raises(RequestFailed, match="broken of plugin theirs"):
        await ask(engine, [1, 2], {"max_tokens": 9})
    await engine.drain(10)
    await until_dead(engine)
    assert engine.statistics().blocks_used == 0


async def test_what_a_request_asks_of_watchers_is_checked_at_the_door(nursery, autojump_clock):
    engine = await running(nursery, with_stops(make_parts(), build("stop", "time-limit")))
    for stop, param in (
        ({"time-limit": {"max_time_s": -1}}, "headrace.stop.time-limit.max_time_s"),
        ({"time-limt": {}}, "headrace.stop.time-limt"),
    ):
        with pytest.raises(BadRequest) as caught:
            engine.request(TokenPrompt(token_ids=(1,)), {}, stop=stop)
        assert caught.value.param == param
    await engine.drain(10)


async def test_every_choice_is_watched_by_itself(nursery, autojump_clock):
    def circling(tokens, choice, seed):
        return (tokens[-1] + 1) % 3 if choice else humming(tokens, choice, seed)

    parts = make_parts(executor=lambda pool: FakeExecutor(pool, model=circling))
    detect = build("stop", "repetition-detector", min_repeats=5, min_tokens=1, max_period=3)
    engine = await running(nursery, with_stops(parts, detect))
    texts = await ask(engine, [5, 0], {"max_tokens": 40, "n": 2})
    assert texts[1] == text_of([1, 2, 0] * 5)
    assert texts[0] == text_of(answer([5, 0], 40, model=humming))
    await engine.drain(10)
