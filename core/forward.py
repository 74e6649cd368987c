"""The model's turn. Receives `Step`, hands it to the executor, sends `Logits`; never waits for a result itself.

So the executor has the next step before it has finished this one. Knows neither requests nor text.
"""

from __future__ import annotations

from ..hooks.messages import Logits, Step
from ..hooks.protocols import Executor
from .channel import Inbox, Outbox


async def forward(inbox: Inbox[Step], sample: Outbox[Logits], *, executor: Executor) -> None:
    """Submit steps in the order they come."""
    with inbox, sample:
        async for step in inbox:
            await sample.send(Logits(step=step, handle=executor.submit(step)))
