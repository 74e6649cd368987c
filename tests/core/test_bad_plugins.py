"""Observers, decoders, samplers and processors that fail in a line without a model: who pays, and what is said."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import pytest
import structlog.testing
import trio
from msgspec import Struct
from trio.testing import MockClock

from headrace.core.containment import Ledger
from headrace.core.engine import Parts
from headrace.hooks.components import Bound
from headrace.hooks.errors import RequestFailed, Unavailable
from headrace.hooks.messages import PluginTime, Step, StepResult, TokenPrompt
from headrace.hooks.protocols import Event
from tests.core.test_line import line
from tests.fakes import FakeExecutor, NumberDecoder, NumberTokenizer, answer, ask, make_parts, text_of


def stranger(component: object, name: str = "odd", params: type[Struct] | None = None) -> Bound:
    return Bound(name=name, plugin="acme", component=component, params=params)


def parts_with(executor: Callable[..., FakeExecutor] = FakeExecutor, **stack: object) -> Parts:
    parts = make_parts(executor=executor)
    return msgspec.structs.replace(parts, stack=msgspec.structs.replace(parts.stack, **stack), ledger=Ledger())


class Observer:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error
        self.heard = 0

    def on(self, event: Event) -> None:
        self.heard += 1
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(1)])
async def test_an_observer_that_fails_is_dropped_after_its_failures_and_others_hear_on(
    error: BaseException, autojump_clock: MockClock
) -> None:
    bad, good = Observer(error), Observer(None)
    with structlog.testing.capture_logs() as logs:
        async with line(parts_with(observers=(stranger(bad), stranger(good, "good")))) as engine:
            assert await ask(engine, [1, 2], {"max_tokens": 20}) == {0: text_of(answer([1, 2], 20))}
            (cost,) = (each for each in engine.statistics().plugins if each.slot == "observer")
    assert (bad.heard, cost.errors, cost.quarantined) == (5, 5, 1)
    assert good.heard > 20
    assert [entry["component"] for entry in logs if "quarantine" in entry["event"]] == ["odd"]


class Panic(BaseException):
    """As extensions in Rust raise it."""


class BadDecoder(NumberDecoder):
    def feed(self, token_id: int) -> str:
        raise Panic("index out of bounds")


class Mumbling(NumberDecoder):
    def feed(self, token_id: int) -> str:
        return None  # type: ignore[return-value]


class FailsAtTheEnd(NumberDecoder):
    def flush(self) -> str:
        raise ValueError("half a character")


class OddTokenizer(NumberTokenizer):
    """Gives every second answer an odd decoder."""

    def __init__(self, decoder: Callable[[], NumberDecoder]) -> None:
        self.odd = decoder
        self.opened = 0

    def decoder(self, *, skip_special: bool) -> NumberDecoder:
        self.opened += 1
        return self.odd() if self.opened % 2 == 0 else NumberDecoder()


def no_decoder() -> NumberDecoder:
    raise RuntimeError("none left")


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (BadDecoder, "Panic: index out of bounds"),
        (Mumbling, "TypeError: a decoder must give str, found NoneType"),
        (FailsAtTheEnd, "ValueError: half a character"),
        (no_decoder, "RuntimeError: none left"),
    ],
)
async def test_a_decoder_that_fails_ends_its_own_request_and_no_other(
    decoder: Callable[[], NumberDecoder], reason: str, autojump_clock: MockClock
) -> None:
    texts: list[str] = []
    errors: list[RequestFailed] = []

    async def one(i: int) -> None:
        try:
            texts.append((await ask(engine, [i, 2], {"max_tokens": 9}))[0])
        except RequestFailed as error:
            errors.append(error)

    async with line(parts_with(tokenizer=stranger(OddTokenizer(decoder), "numbers"))) as engine:
        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(one, i)
        (cost,) = (each for each in engine.statistics().plugins if each.slot == "tokenizer")
    assert len(texts) == 4
    assert set(texts) < {text_of(answer([i, 2], 9)) for i in range(8)}
    assert {error.plugin for error in errors} == {"acme"}
    assert [str(error) for error in errors] == [f"tokenizer numbers of plugin acme failed: {reason}"] * 4
    assert (cost.errors, cost.quarantined) == (4, 0)


class Power(Struct, frozen=True, forbid_unknown_fields=True):
    power: float = 0.0


async def test_who_asks_for_a_processor_in_quarantine_is_refused_at_the_door(autojump_clock: MockClock) -> None:
    top_a = stranger(object(), "top-a", Power)
    parts = parts_with(chain=(("bias", (top_a,)),))
    async with line(parts) as engine:
        account = parts.ledger.account("logits_processor", top_a)
        account.changes_nothing(Power())
        for _ in range(5):
            account.failed("no")
        with pytest.raises(Unavailable, match="processor top-a of plugin acme is in quarantine, for it failed 5 times"):
            engine.request(TokenPrompt(token_ids=(1,)), {}, extra={"top-a": {"power": 2.0}})
        assert engine.num_live == 0
        assert await ask(engine, [1, 2], {"max_tokens": 5}) == {0: text_of(answer([1, 2], 5))}


class Value(Struct, frozen=True, forbid_unknown_fields=True):
    value: float = 1.0


async def test_a_sampler_in_quarantine_refuses_who_draws_and_serves_the_greedy(autojump_clock: MockClock) -> None:
    sampler = stranger(object(), "mirostat")
    parts = parts_with(sampler=sampler, chain=(("temperature", (stranger(object(), "temperature", Value),)),))
    async with line(parts) as engine:
        for _ in range(5):
            parts.ledger.account("sampler", sampler).failed("no")
        with pytest.raises(Unavailable, match="sampler mirostat of plugin acme is in quarantine"):
            engine.request(TokenPrompt(token_ids=(1,)), {"temperature": 1})
        assert await ask(engine, [1, 2], {"max_tokens": 5, "temperature": 0}) == {0: text_of(answer([1, 2], 5))}


async def test_a_request_is_told_what_the_plugins_took_that_ran_for_it(autojump_clock: MockClock) -> None:
    class Timed(FakeExecutor):
        """Every call for slot 0 takes an eighth of a second, and none is for the others."""

        def run(self, step: Step) -> StepResult:
            call = PluginTime(who="acme/slow", seconds=0.125, slots=frozenset({0}))
            return msgspec.structs.replace(super().run(step), plugins=(call,))

    async with line(parts_with(Timed)) as engine:
        requests = [engine.request(TokenPrompt(token_ids=(i, 2)), {"max_tokens": 4, "seed": 0}) for i in range(2)]
        for request in requests:
            await engine.submit(request)
        for request in requests:
            while await engine.receive(request) is not None:
                pass
        reports = [engine.close(request) for request in requests]
    assert [report.get("plugins_ms") for report in reports] == [{"acme/slow": 500.0}, None]


async def test_the_order_of_sampling_is_logged_at_the_start(autojump_clock: MockClock) -> None:
    chain = (("bias", ()), ("truncate", (stranger(object(), "top-a", Power),)))
    config = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    with structlog.testing.capture_logs() as logs:
        async with line(parts_with(chain=chain, sampler=stranger(object(), "acme"))):
            pass
    structlog.configure(**config)
    (entry,) = (entry for entry in logs if entry["event"] == "order of sampling")
    assert entry["chain"] == "bias: nothing; truncate: acme/top-a; draw: acme"
