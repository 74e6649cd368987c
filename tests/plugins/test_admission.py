"""Admission: who may enter the line, alone and in a line."""

import pytest
import trio
from msgspec import structs

from headrace.hooks.components import Bound
from headrace.hooks.decode import Bytes
from headrace.hooks.errors import Overloaded, StartError, Unavailable
from headrace.hooks.messages import TokenPrompt
from headrace.hooks.protocols import Load
from headrace.plugins.memory_headroom import MemoryHeadroom, Options
from tests.fakes import ask, make_engine, make_parts
from tests.plugins.rig import build

LOAD = Load(num_running=0, num_waiting=0, num_blocks=100, num_free_blocks=50)


class Asking:
    """As much of a request as admission looks at."""

    def __init__(self, tenant="", num_tokens=0):
        self.tenant = tenant
        self.num_prompt_tokens = num_tokens
        self.num_output_tokens = 0


async def test_concurrency_counts_each_tenant_and_all_of_them():
    component = build("admission", "concurrency", max_requests=3, max_requests_per_tenant=2).component
    inside = [Asking("a"), Asking("a"), Asking("b")]
    for request in inside[:2]:
        await component.admit(request, LOAD)
    with pytest.raises(Overloaded, match="a may have 2 requests"):
        await component.admit(Asking("a"), LOAD)
    await component.admit(inside[2], LOAD)
    with pytest.raises(Overloaded, match="the server may have 3 requests"):
        await component.admit(Asking("c"), LOAD)
    component.release(inside[0])
    await component.admit(Asking("a"), LOAD)


async def test_a_bucket_of_requests_says_when_to_come_again_and_keeps_its_word(autojump_clock):
    component = build("admission", "token-bucket", requests_per_minute=6, burst_s=20).component
    for _ in range(2):
        await component.admit(Asking("a"), LOAD)
    with pytest.raises(Overloaded) as caught:
        await component.admit(Asking("a"), LOAD)
    assert caught.value.retry_after_s == pytest.approx(10)
    await component.admit(Asking("b"), LOAD)
    await trio.sleep(9.9)
    with pytest.raises(Overloaded):
        await component.admit(Asking("a"), LOAD)
    await trio.sleep(0.11)
    await component.admit(Asking("a"), LOAD)


async def test_a_bucket_of_tokens_goes_into_debt_by_what_an_answer_took(autojump_clock):
    component = build("admission", "token-bucket", tokens_per_minute=600).component
    await component.admit(Asking(num_tokens=900), LOAD)
    component.release(Asking(num_tokens=900))
    with pytest.raises(Overloaded) as caught:
        await component.admit(Asking(), LOAD)
    assert caught.value.retry_after_s == pytest.approx(30.1)
    await trio.sleep(30.2)
    await component.admit(Asking(), LOAD)


def test_a_bucket_without_a_rate_does_not_start():
    with pytest.raises(StartError, match="requests_per_minute or tokens_per_minute"):
        build("admission", "token-bucket")


async def test_memory_headroom_looks_at_the_kv_cache_and_at_the_machine():
    component = MemoryHeadroom(Options(min_free_kv=0.2, min_free_memory=Bytes(1000)), lambda: 1000)
    await component.admit(Asking(), structs.replace(LOAD, num_free_blocks=20))
    with pytest.raises(Overloaded, match="found 19 of 100 blocks"):
        await component.admit(Asking(), structs.replace(LOAD, num_free_blocks=19))
    with pytest.raises(Overloaded, match="found 999"):
        await MemoryHeadroom(Options(min_free_memory=Bytes(1000)), lambda: 999).admit(Asking(), LOAD)


# ── in a line ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def running(nursery, *bounds, **limits):
    parts = make_parts(**limits)
    engine = make_engine(structs.replace(parts, stack=structs.replace(parts.stack, admission=bounds)))
    nursery.start_soon(engine.run)
    await engine.ready.wait()
    return engine


async def test_a_place_is_free_again_when_its_request_is_over_however_it_ended(nursery, autojump_clock):
    engine = await running(nursery, build("admission", "concurrency", max_requests=1))
    first = engine.request(TokenPrompt(token_ids=(1, 2)), {"max_tokens": 5})
    await engine.submit(first)
    with pytest.raises(Overloaded) as caught:
        await ask(engine, [1, 2])
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
    engine.close(first)
    engine.close(first)
    for _ in range(3):
        await ask(engine, [1, 2], {"max_tokens": 5})
    await engine.drain(10)


async def test_who_admitted_one_that_another_refused_hears_of_its_end(nursery, autojump_clock):
    class Refusing:
        async def admit(self, request, load):
            raise Overloaded("not today", retry_after_s=7)

    never = Bound(name="never", plugin="theirs", component=Refusing())
    one = build("admission", "concurrency", max_requests=1)
    engine = await running(nursery, one, never)
    for _ in range(2):
        with pytest.raises(Overloaded, match="not today"):
            await ask(engine, [1, 2])
    await engine.drain(10)


async def test_an_admission_that_fails_or_does_not_answer_denies(nursery, autojump_clock):
    class Broken:
        async def admit(self, request, load):
            raise ZeroDivisionError("on purpose")

    class Silent:
        async def admit(self, request, load):
            await trio.sleep_forever()

    for component in (Broken(), Silent()):
        engine = await running(nursery, Bound(name="odd", plugin="theirs", component=component))
        with pytest.raises(Unavailable, match="odd of plugin theirs failed"):
            await ask(engine, [1, 2])
        await engine.drain(10)


async def test_admission_is_told_how_busy_the_line_is(nursery, autojump_clock):
    seen = []

    class Looking:
        async def admit(self, request, load):
            seen.append(load)

    engine = await running(nursery, Bound(name="looking", plugin="theirs", component=Looking()), num_blocks=16)
    first = engine.request(TokenPrompt(token_ids=tuple(range(10))), {"max_tokens": 50})
    await engine.submit(first)
    await engine.receive(first)
    await ask(engine, [1, 2], {"max_tokens": 2})
    engine.close(first)
    assert seen[0] == Load(num_running=0, num_waiting=0, num_blocks=16, num_free_blocks=16)
    assert (seen[1].num_running, seen[1].num_free_blocks) == (1, 13)
    await engine.drain(10)
