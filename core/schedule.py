"""What runs next. Receives `Prompt`, `Sampled` and control; sends `Step`, one ahead of the one that runs.

Knows blocks, slots and numbers of tokens; knows neither text nor tensors. What it decides is in `batch/planner.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
import trio

from ..hooks.messages import Cancel, Drain, Park, Prompt, Resume, Sampled, Step
from .batch.planner import Planner
from .channel import Inbox, Outbox
from .control import Control

MAX_INFLIGHT = 2
"""The step that runs, and the one planned while it does."""

log = structlog.get_logger()

Heard = Prompt | Sampled | Cancel | Park | Resume | Drain


async def schedule(inbox: Inbox[Heard], forward: Outbox[Step], *, planner: Planner, control: Control) -> None:
    """Plan steps until drained."""
    draining = False
    with inbox, forward:
        while not (draining and planner.idle):
            with trio.move_on_at(planner.next_timeout()):
                draining |= hear(await inbox.receive(), planner, control)
            for message in _ready(inbox):
                draining |= hear(message, planner, control)
            for request in planner.expire():
                log.warning("parked too long", request=request.id, park_timeout_s=planner.limits.park_timeout_s)
            while planner.num_inflight < MAX_INFLIGHT and (step := planner.plan()):
                forward.send_nowait(step)


def hear(message: Heard, planner: Planner, control: Control) -> bool:
    """Tell the planner. True: no more requests will come, finish what there is."""
    match message:
        case Prompt():
            planner.add(message)
        case Sampled():
            planner.complete(message)
        case Cancel(request) | Park(request) | Resume(request):
            control.heard(request)
            planner.look_at(request)
        case Drain():
            return True
    return False


def _ready(inbox: Inbox[Heard]) -> Iterator[Heard]:
    """What has arrived by now; no more than the inbox holds, so that planning cannot be put off for ever."""
    for _ in range(inbox.capacity):
        try:
            yield inbox.receive_nowait()
        except (trio.WouldBlock, trio.EndOfChannel):
            return
