"""The contract of the slot `admission`: a request enters or is told when to come again, and nothing else happens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import trio
from hypothesis import strategies as st

from ...core.mailbox import Mailbox
from ...core.timeline import Timeline
from ..errors import Overloaded
from ..messages import Request, TextPrompt
from ..params import SamplingParams
from ..protocols import Load
from .contract import Contract, ensure, skip
from .loop import on_loop

IDLE = Load(num_running=0, num_waiting=0, num_blocks=1000, num_free_blocks=1000)
BUSY = Load(num_running=64, num_waiting=256, num_blocks=1000, num_free_blocks=0)
ADMIT_S = 10.0
"""What the line waits for an answer before it refuses."""


class AdmissionContract(Contract):
    """Asks for requests in a loop whose clock jumps on.

    Attributes:
        refuses_when_busy: it refuses some of a hundred requests that come at once to a full line.
        recovers_after_s: seconds after which, every request over and the line idle, the next one may enter.
    """

    slot = "admission"
    refuses_when_busy: ClassVar[bool] = False
    recovers_after_s: ClassVar[float] = 3600.0

    def test_it_lets_in_or_says_overloaded(self) -> None:
        """Any other error refuses everybody with 503."""

        def check(tenants: list[str], priority: int, size: int, load: Load) -> None:
            async def ask() -> None:
                admission = self.build()
                for number, tenant in enumerate(tenants):
                    await _admitted(admission, _request(number, tenant, priority, size), load)

            on_loop(ask)

        tenants = st.lists(st.text(max_size=4), min_size=1, max_size=6)
        loads = st.sampled_from([IDLE, BUSY])
        self.for_all(tenants, st.integers(-5, 5), st.integers(0, 2000), loads, check=check)

    def test_an_idle_line_lets_somebody_in(self) -> None:
        async def ask() -> None:
            ensure(await _admitted(self.build(), _request(0), IDLE), "the first request of an idle line must enter")

        on_loop(ask)

    def test_it_answers_within_the_time_it_has(self) -> None:
        """Ten seconds, even when many come at once; it may wait, and must then decide."""

        async def ask() -> None:
            admission = self.build()
            with trio.move_on_after(ADMIT_S) as scope:
                async with trio.open_nursery() as nursery:
                    for number in range(50):
                        nursery.start_soon(_admitted, admission, _request(number), BUSY)
            ensure(not scope.cancelled_caught, f"admit must return or raise within {ADMIT_S:g} s")

        on_loop(ask)

    def test_it_leaves_the_request_as_it_is(self) -> None:
        async def ask() -> None:
            request = _request(0)
            before = _fields(request)
            await _admitted(self.build(), request, IDLE)
            changed = [name for name, value in _fields(request).items() if value is not before[name]]
            ensure(not changed, f"admit must not change the request, it changed {', '.join(changed)}")

        on_loop(ask)

    def test_those_who_leave_make_room(self) -> None:
        """What was taken is given back by `release`, or comes back with time."""

        async def ask() -> None:
            admission = self.build()
            release = getattr(admission, "release", lambda request: None)
            for round_ in range(3):
                entered = []
                for number in range(100):
                    request = _request(100 * round_ + number)
                    if await _admitted(admission, request, IDLE):
                        entered.append(request)
                ensure(entered, "once all requests are over, the next ones must enter, and none did")
                for request in entered:
                    release(request)
                await trio.sleep(self.recovers_after_s)

        on_loop(ask, patience_s=10 * self.recovers_after_s + 3600)

    def test_it_refuses_when_busy(self) -> None:
        if not self.refuses_when_busy:
            skip("set refuses_when_busy = True if some of a hundred requests must be refused by a full line")

        async def ask() -> None:
            admission = self.build()
            entered = [await _admitted(admission, _request(number), BUSY) for number in range(100)]
            ensure(not all(entered), "some of a hundred requests that come at once to a full line must be refused")

        on_loop(ask)


async def _admitted(admission: Any, request: Request, load: Load) -> bool:
    """Whether *request* may enter."""
    answer = admission.admit(request, load)
    ensure(inspect.isawaitable(answer), f"admit must be async, it returned {answer!r}")
    try:
        said = await answer
    except Overloaded as error:
        after = error.retry_after_s
        ensure(after is not None and after > 0, f"Overloaded must say retry_after_s, found {after}")
        return False
    except Exception as error:
        ensure(False, f"admit may raise Overloaded alone, found {type(error).__name__}: {error}")
    ensure(said is None, f"admit must return None, for what it returns is not looked at; found {said!r}")
    return True


def _request(number: int, tenant: str = "", priority: int = 0, size: int = 10) -> Request:
    return Request(
        id=f"request-{number}",
        prompt=TextPrompt(text="a " * size),
        params=SamplingParams(max_tokens=size + 1),
        chain=(),
        mailbox=Mailbox(max_deltas=4),
        timeline=Timeline(),
        arrival=trio.current_time(),
        priority=priority,
        tenant=tenant,
    )


def _fields(request: Request) -> dict[str, object]:
    names: Sequence[str] = [name for name in type(request).__slots__ if not name.startswith("_")]
    return {name: getattr(request, name, None) for name in names}
