"""One sequence as the scheduler sees it: what is known, what is in the KV cache, what is under way."""

from __future__ import annotations

from array import array

from ...hooks.messages import Request, Sequence
from ...hooks.protocols import RunningView, WaitingView
from .ngram import Lookup


class Live:
    """State of one sequence between its arrival and the return of its last block. Compared by identity.

    A sequence *runs* while it owns blocks, and waits otherwise. Steps are planned one ahead, so counts include what is
    in flight: `length` counts drawn tokens whose ids are still on their way, `num_computed` tokens whose step has been
    planned.
    """

    __slots__ = (
        "__weakref__",
        "blocks",
        "claims",
        "digests",
        "key",
        "last_step",
        "leaving",
        "lookup",
        "max_tokens",
        "num_computed",
        "num_inflight",
        "num_preemptions",
        "num_prompt",
        "num_published",
        "num_scored",
        "running",
        "sequence",
        "siblings",
        "tokens",
        "turn",
    )

    def __init__(self, sequence: Sequence, tokens: array[int], *, num_prompt: int, max_tokens: int) -> None:
        self.sequence = sequence
        self.tokens = tokens
        """Prompt and answer, as far as ids are known."""
        self.num_prompt = num_prompt
        self.max_tokens = max_tokens
        self.num_computed = 0
        self.num_inflight = 0
        """Tokens drawn in steps that have not come back."""
        self.lookup: Lookup | None = None
        """Where guesses of the next tokens come from. While one is in flight, `num_computed` counts all as right."""
        self.blocks = array("i")
        self.digests: list[bytes] = []
        """Of the full blocks of `tokens`, from the start; extended as blocks fill."""
        self.num_published = 0
        self.num_scored = 1
        """Tokens of the prompt whose log-probabilities are known or under way; the first can have none."""
        self.last_step = -1
        """Index of the last step that names its blocks."""
        self.running = False
        self.claims = False
        """It computes a prefix that others may be waiting for."""
        self.leaving = False
        """Preempted, as soon as its last step has come back."""
        self.num_preemptions = 0
        self.siblings = 0
        """Choices to fork from it when its prompt has been computed."""
        self.turn = 0.0
        """See `turns`."""
        self.key: tuple[object, ...] = ()
        """Its place among the waiting."""

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def length(self) -> int:
        return len(self.tokens) + self.num_inflight

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) + self.num_inflight - self.num_prompt

    @property
    def todo(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) + self.num_inflight - self.num_computed

    @property
    def wants_scores(self) -> bool:
        """Log-probabilities of its prompt are still to be computed."""
        return self.request.params.prompt_logprobs is not None and self.num_scored < self.num_prompt

    @property
    def plannable(self) -> bool:
        """May it take part in the next step? Not when all its tokens are under way: an end by length costs no row."""
        request = self.sequence.request
        return (
            self.running
            and not self.leaving
            and len(self.tokens) + self.num_inflight - self.num_prompt < self.max_tokens
            and not self.sequence.unwanted
            and not request.mailbox.parked
            and (self.num_inflight == 0 or (request.lookahead and self.lookup is None))
        )

    def waiting_view(self) -> WaitingView:
        request = self.request
        return WaitingView(
            arrival=request.arrival,
            priority=request.priority,
            num_tokens=len(self.tokens),
            num_preemptions=self.num_preemptions,
            tenant=request.tenant,
            deadline=request.deadline,
            num_left=self.max_tokens - self.num_outputs,
            turn=self.turn,
        )

    def running_view(self) -> RunningView:
        request = self.request
        return RunningView(
            arrival=request.arrival,
            priority=request.priority,
            num_tokens=self.length,
            num_blocks=len(self.blocks),
            num_preemptions=self.num_preemptions,
            parked=request.mailbox.parked,
            tenant=request.tenant,
            deadline=request.deadline,
            num_left=self.max_tokens - self.num_outputs,
            turn=self.turn,
        )

    def __repr__(self) -> str:
        return f"<Live {self.sequence!r} {self.num_computed}/{self.length} computed, {len(self.blocks)} blocks>"
