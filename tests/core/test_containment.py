"""Accounts: what is counted, when a plugin goes into quarantine, and who is refused then."""

from __future__ import annotations

import pytest
import structlog.testing
from msgspec import Struct

from headrace.core.containment import Account, Ledger, describe, refuse_quarantined
from headrace.hooks.components import Bound
from headrace.hooks.errors import Unavailable


class Params(Struct, frozen=True):
    power: float = 0.0


def bound(name: str = "top-a", plugin: str = "acme", distribution: str = "acme-top-a 1.0") -> Bound:
    return Bound(name=name, plugin=plugin, component=object(), distribution=distribution)


def account(**limits: float) -> Account:
    return Account("logits_processor", "acme", "top-a", **limits)  # type: ignore[arg-type]


def in_quarantine(ledger: Ledger, slot: str, stranger: Bound) -> Account:
    broken = ledger.account(slot, stranger)
    for _ in range(5):
        broken.failed(ValueError("no"))
    return broken


def test_seconds_calls_and_errors_add_up_over_a_plugins_components() -> None:
    ledger = Ledger()
    ledger.account("sampler", bound("one")).spent(0.25)
    ledger.account("sampler", bound("two")).spent(0.5)
    ledger.account("sampler", bound("two")).failed("no")
    ledger.account("stop", bound("one"))
    first, second = ledger.costs()
    assert (first.plugin, first.slot, first.seconds, first.calls, first.errors) == ("acme", "sampler", 0.75, 2, 1)
    assert (second.slot, second.calls) == ("stop", 0)


def test_a_stated_number_of_failures_in_a_row_is_quarantine_and_is_logged_once() -> None:
    broken = account(quarantine_after=3)
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            assert (broken.quarantined is None) == (broken.errors < 3)
            broken.failed(RuntimeError("no luck"))
    assert broken.quarantined == "it failed 3 times in a row, the last time so: RuntimeError: no luck"
    (entry,) = (entry for entry in logs if entry["log_level"] == "error")
    assert entry["event"] == "a plugin is in quarantine: it is not called any more"
    assert (entry["plugin"], entry["slot"], entry["component"]) == ("acme", "logits_processor", "top-a")


def test_failures_with_a_success_between_them_are_not_in_a_row() -> None:
    shaky = account(quarantine_after=2)
    for _ in range(10):
        shaky.failed("no")
        shaky.spent(0.0)
        shaky.worked()
    assert (shaky.quarantined, shaky.errors) == (None, 10)


def test_a_method_that_works_does_not_excuse_one_that_does_not() -> None:
    broken = account(quarantine_after=2)
    for _ in range(2):
        broken.worked("order")
        broken.failed("no", "victim")
    assert broken.quarantined is not None


def test_a_call_that_served_some_is_an_error_and_no_failure() -> None:
    shaky = account(quarantine_after=2)
    for _ in range(3):
        shaky.served_some()
    assert (shaky.quarantined, shaky.errors) == (None, 3)


def test_a_slow_call_is_a_failure_even_where_it_works() -> None:
    slow = account(quarantine_after=2, slow_call_s=1.0)
    for _ in range(2):
        slow.spent(1.5)
        slow.worked()
    assert slow.quarantined is not None
    assert "must not take longer than 1 s, this one took 1.5 s" in slow.quarantined


def test_quarantine_after_0_is_never() -> None:
    borne = account(quarantine_after=0)
    for _ in range(100):
        borne.failed("no")
    assert borne.quarantined is None


def test_a_builtin_is_counted_and_never_in_quarantine() -> None:
    ours = in_quarantine(Ledger(), "sampler", bound(distribution="headrace 0.1.0"))
    assert (ours.errors, ours.quarantined) == (5, None)


def test_who_needs_what_is_in_quarantine_is_refused_with_503_by_name() -> None:
    ledger = Ledger()
    in_quarantine(ledger, "logits_processor", bound())
    with pytest.raises(Unavailable) as caught:
        refuse_quarantined(ledger, [bound()], [Params(power=2.0)], None)
    assert (caught.value.status, caught.value.code, caught.value.plugin) == (503, "plugin_quarantined", "acme")
    assert "the logits processor top-a of plugin acme is in quarantine, for it failed 5 times" in str(caught.value)


def test_who_does_not_use_it_goes_on() -> None:
    ledger = Ledger()
    broken = in_quarantine(ledger, "logits_processor", bound())
    refuse_quarantined(ledger, [bound()], [None], None)
    broken.changes_nothing(Params())
    refuse_quarantined(ledger, [bound()], [Params()], None)
    with pytest.raises(Unavailable):
        refuse_quarantined(ledger, [bound()], [Params(power=1.0)], None)


def test_a_sampler_in_quarantine_refuses_who_draws_and_nobody_else() -> None:
    ledger = Ledger()
    in_quarantine(ledger, "sampler", bound())
    refuse_quarantined(ledger, [], [], None)
    with pytest.raises(Unavailable, match="sampler top-a of plugin acme"):
        refuse_quarantined(ledger, [], [], bound())


def test_an_exception_that_cannot_say_what_it_is_is_named_by_its_type() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe(Mute()) == "Mute"
