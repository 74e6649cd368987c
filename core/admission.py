"""Whether a request may enter the line: the configured admission components, asked one after the other.

Knows neither channels nor what the line holds. Whatever goes wrong, the answer is no.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ..hooks.errors import RequestError, Unavailable
from ..hooks.protocols import Load
from .containment import Ledger

if TYPE_CHECKING:
    from ..hooks.components import Bound
    from ..hooks.messages import Request

ADMIT_S: Final = 10.0

log = structlog.get_logger()


async def admit(request: Request, components: Sequence[Bound], load: Load, ledger: Ledger) -> None:
    """Ask all *components* whether *request* may enter. Tell `release` of its end, whatever comes of it.

    Raises:
        Overloaded: one of them says no, for now.
        Unavailable: one of them failed, or took longer than ten seconds.
    """
    for bound in components:
        account = ledger.account("admission", bound)
        if account.quarantined is not None:
            raise account.refusal()
        started = perf_counter()
        try:
            with trio.fail_after(ADMIT_S):
                await bound.component.admit(request, load)
        except RequestError:
            account.worked()
            raise
        except Exception as error:
            account.failed(error)
            raise Unavailable(
                f"{account.who} failed, so nobody can be let in now; try again later",
                retry_after_s=5,
                plugin=bound.plugin,
            ) from error
        finally:
            account.calls += 1
            # No call in the sense of `spent`, for it may wait.
            account.seconds += perf_counter() - started
        account.worked()
        request.admitted_by.append(bound)


def release(request: Request, ledger: Ledger) -> None:
    """Tell those who admitted *request* that it is over. Idempotent."""
    admitted_by, request.admitted_by = request.admitted_by, []
    for bound in admitted_by:
        tell = getattr(bound.component, "release", None)
        if tell is None:
            continue
        try:
            tell(request)
        except Exception as error:
            ledger.account("admission", bound).failed(error, "release")
            log.exception("an admission component failed to release a request", plugin=bound.plugin)
