"""Places in the line. Whoever holds a credit may have one prompt and one control message in each inbox behind the door.

Knows requests and the length of their prompts; knows neither channels nor the model.
"""

from __future__ import annotations

import math
from collections import deque

import trio

from ..hooks.errors import Overloaded
from ..hooks.messages import ChatPrompt, Request, TextPrompt, TokenPrompt

BYTES_PER_TOKEN_GUESS = 4
"""Until a prompt is tokenized its credit is a guess, and then the truth."""


class Credits:
    """Places in the line, and prompt tokens in it.

    Args:
        max_sequences: choices that may be in the line at once.
        max_tokens: prompt tokens that may be in the line at once. One request may exceed it when it is alone.
    """

    def __init__(self, *, max_sequences: int, max_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.num_sequences = 0
        self.num_tokens = 0
        self._holders: set[Request] = set()
        self._releases: deque[float] = deque(maxlen=64)
        self._queue: deque[Request] = deque()
        """Who waits for room, in the order of arrival; nobody is let in past them."""
        self._waiting = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._holders)

    def has_room(self, request: Request) -> bool:
        if not self._holders:
            return request.params.n <= self.max_sequences
        return (
            self.num_sequences + request.params.n <= self.max_sequences
            and self.num_tokens + guess_tokens(request) <= self.max_tokens
        )

    async def wait_for_room(self, request: Request) -> None:
        """Wait for a credit and take it, as long as the request allows. Ends early when it is no longer wanted."""
        self._queue.append(request)
        try:
            with trio.move_on_at(min(request.deadline, trio.current_time() + request.patience_s)):
                while not request.cancelled and not self.take(request):
                    await self._waiting.park()
        finally:
            self._queue.remove(request)
            self.wake()

    def wake(self) -> None:
        """Have those who wait look again at what became of them."""
        self._waiting.unpark_all()

    def holds(self, request: Request) -> bool:
        return request in self._holders

    def take(self, request: Request) -> bool:
        """Take a credit for *request*, or keep the one it has; False when there is none, or others wait for one."""
        if request in self._holders:
            return True
        if (self._queue and self._queue[0] is not request) or not self.has_room(request):
            return False
        self._holders.add(request)
        request.credit_tokens = guess_tokens(request)
        self.num_sequences += request.params.n
        self.num_tokens += request.credit_tokens
        return True

    def settle(self, request: Request, num_tokens: int) -> None:
        """The prompt has *num_tokens* tokens; the guess is over."""
        if request in self._holders:
            self.num_tokens += num_tokens - request.credit_tokens
            request.credit_tokens = num_tokens

    def release(self, request: Request) -> None:
        """The line holds nothing of *request* any more. Idempotent."""
        if request not in self._holders:
            return
        self._holders.remove(request)
        self.num_sequences -= request.params.n
        self.num_tokens -= request.credit_tokens
        request.retired = True
        self._releases.append(trio.current_time())
        self.wake()

    def refusal(self) -> Overloaded:
        """What to tell a request that found no room."""
        return Overloaded(
            f"the line is full: {self.num_sequences} of {self.max_sequences} places and {self.num_tokens} of "
            f"{self.max_tokens} prompt tokens are taken; try again later",
            retry_after_s=self.retry_after_s(),
        )

    def retry_after_s(self) -> float:
        """Seconds until the line has likely worked off what is in it: backlog ÷ the rate at which requests end."""
        if len(self._releases) < 2:
            return 1.0
        elapsed = trio.current_time() - self._releases[0]
        rate = len(self._releases) / max(elapsed, 1e-3)
        return float(min(600, max(1, math.ceil(len(self._holders) / rate))))


def guess_tokens(request: Request) -> int:
    """Prompt tokens, exact for ids and guessed from the length of a text."""
    match request.prompt:
        case TokenPrompt(token_ids=ids):
            return len(ids)
        case TextPrompt(text=text):
            return 1 + len(text) // BYTES_PER_TOKEN_GUESS
        case ChatPrompt(messages=messages):
            return 1 + sum(len(str(message.get("content", ""))) for message in messages) // BYTES_PER_TOKEN_GUESS
