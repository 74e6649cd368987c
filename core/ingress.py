"""The door. Receives `Request`, takes a credit for it, sends it to `tokenize`; without a credit the request is refused.

Every inbox behind the door is sized from the credits, so there is no queue in front of the queue. Knows neither tokens
nor the model.
"""

from __future__ import annotations

from ..hooks.messages import Delta, Request
from .channel import Inbox, Outbox
from .credits import Credits


async def ingress(inbox: Inbox[Request], tokenize: Outbox[Request], *, credits: Credits) -> None:
    """Let requests in while there are credits, and refuse the rest at once."""
    with inbox, tokenize:
        async for request in inbox:
            if request.cancelled:
                credits.release(request)
                request.retired = True
            elif credits.take(request):
                tokenize.send_nowait(request)
            else:
                request.retired = True
                request.mailbox.put(Delta(error=credits.refusal()))
