from __future__ import annotations

import trio

from headrace.core.credits import Credits
from headrace.core.mailbox import Mailbox
from headrace.core.timeline import Timeline
from headrace.hooks.messages import Request, TokenPrompt
from headrace.hooks.params import SamplingParams


def request(num_tokens: int = 10, n: int = 1, patience_s: float = 0.0) -> Request:
    return Request(
        id="r",
        prompt=TokenPrompt(token_ids=(1,) * num_tokens),
        params=SamplingParams(n=n),
        chain=(),
        mailbox=Mailbox(max_deltas=4),
        timeline=Timeline(),
        patience_s=patience_s,
    )


async def test_each_choice_takes_a_place() -> None:
    credits = Credits(max_sequences=4, max_tokens=1000)
    first = request(n=3)
    assert credits.take(first)
    assert not credits.take(request(n=2))
    credits.release(first)
    assert credits.take(request(n=2))


async def test_prompt_tokens_are_a_guess_until_they_are_known() -> None:
    credits = Credits(max_sequences=100, max_tokens=100)
    long = request(90)
    assert credits.take(long)
    assert not credits.take(request(20))
    credits.settle(long, 50)
    assert credits.take(request(20))
    assert credits.num_tokens == 70


async def test_a_request_longer_than_all_credits_may_run_alone() -> None:
    credits = Credits(max_sequences=100, max_tokens=100)
    assert credits.take(request(500))
    assert not credits.take(request(1))


async def test_releasing_twice_gives_back_once() -> None:
    credits = Credits(max_sequences=2, max_tokens=100)
    only = request()
    credits.take(only)
    credits.release(only)
    credits.release(only)
    assert (credits.num_sequences, credits.num_tokens, len(credits)) == (0, 0, 0)


async def test_retry_after_is_the_backlog_over_the_rate_at_which_requests_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    credits = Credits(max_sequences=100, max_tokens=10_000)
    done = [request() for _ in range(10)]
    staying = [request() for _ in range(20)]
    for each in done + staying:
        credits.take(each)
    for each in done:
        credits.release(each)
        await trio.sleep(0.5)
    # Ten requests ended in five seconds and twenty are left.
    assert credits.retry_after_s() == 10


async def test_a_patient_request_waits_for_a_place_and_no_longer_than_it_may(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    credits = Credits(max_sequences=1, max_tokens=100)
    first = request()
    credits.take(first)

    async def leave() -> None:
        await trio.sleep(2)
        credits.release(first)

    nursery.start_soon(leave)
    started = trio.current_time()
    await credits.wait_for_room(request(patience_s=10))
    assert trio.current_time() - started == 2
    credits.take(first)
    await credits.wait_for_room(request(patience_s=3))
    assert trio.current_time() - started == 5
