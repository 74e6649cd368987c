"""What runs next. Receives `Prompt`, `Sampled` and control; sends `Step`, one ahead of the one that runs.

Knows blocks, slots and numbers of tokens; knows neither text nor tensors. What it decides is in `batch/planner.py`.
"""

from __future__ import annotations

import math

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
            if (timeout := planner.next_timeout()) == math.inf:  # As nearly always: a scope would cost every step.
                draining |= hear(await inbox.receive(), planner, control)
            else:
                with trio.move_on_at(timeout):
                    draining |= hear(await inbox.receive(), planner, control)
            # No more than there are now, so that planning cannot be put off for ever.
            for _ in range(inbox.num_ready):
                draining |= hear(inbox.receive_nowait(), planner, control)
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
