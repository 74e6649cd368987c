"""Cancel, Park and Resume: at most one of them is under way a request, for each only says "look at it again".

So control messages need no more room in `schedule`'s inbox than there are credits, and a credit goes back only when no
message about its request is left in there.
"""

from __future__ import annotations

from contextlib import suppress

import trio

from ..hooks.messages import Cancel, Park, Request, Resume
from .channel import Outbox
from .credits import Credits


class Control:
    """Tells `schedule` about requests, and gives credits back when it is done with them."""

    def __init__(self, schedule: Outbox[Cancel | Park | Resume], credits: Credits) -> None:
        self._schedule = schedule
        self._credits = credits
        self._retired: set[Request] = set()

    def tell(self, request: Request, kind: type[Cancel] | type[Park] | type[Resume]) -> None:
        """Have `schedule` look at *request*, unless it will anyway or has done with it."""
        if request.retired or request.control_pending or not self._credits.holds(request):
            return
        request.control_pending = True
        # With the line down there is nobody to tell, and the request has been told.
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            self._schedule.send_nowait(kind(request))

    def heard(self, request: Request) -> None:
        """`schedule` has the message."""
        request.control_pending = False
        if request in self._retired:
            self._retired.remove(request)
            self._credits.release(request)

    def retire(self, request: Request) -> None:
        """`schedule` holds nothing of *request* any more."""
        if request.control_pending:
            self._retired.add(request)
        else:
            self._credits.release(request)
