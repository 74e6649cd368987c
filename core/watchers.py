"""The stop watchers of one answer: each is shown every token, and any of them may end it.

Knows neither channels nor tensors. One that fails fails its own answer, by name.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from .containment import Account, Ledger

if TYPE_CHECKING:
    from ..hooks.messages import Request
    from ..hooks.protocols import StopWatcher


class Watchers:
    """Stop watchers, opened for one choice of *request*.

    Raises:
        RequestFailed: one cannot be opened.
        Unavailable: one is in quarantine.
    """

    __slots__ = ("_watchers",)

    def __init__(self, request: Request, ledger: Ledger) -> None:
        self._watchers: list[tuple[Account, StopWatcher]] = []
        for bound, params in request.stops:
            account = ledger.account("stop", bound)
            if account.quarantined is not None:
                raise account.refusal()
            try:
                watcher = bound.component.watch(params)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # Here no cancellation arrives; an extension's panic is no Exception.
                account.failed(error, "watch")
                raise account.failure(error) from error
            account.worked("watch")
            if watcher is not None:
                self._watchers.append((account, watcher))

    def feed(self, text: str, token_id: int) -> bool:
        """Show them a token and the text it completes. True: the answer ends with it.

        Raises:
            RequestFailed: one failed.
        """
        stopped = False
        for account, watcher in self._watchers:
            started = perf_counter()
            try:
                try:
                    stopped |= bool(watcher.feed(text, token_id))
                finally:
                    account.spent(perf_counter() - started, "feed")
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # Here no cancellation arrives; an extension's panic is no Exception.
                account.failed(error, "feed")
                raise account.failure(error) from error
            account.worked("feed")
        return stopped
