"""Tokens to text. Receives `Sampled`, puts `Delta` into each request's mailbox; never waits for a reader.

Decodes, holds back what may become a stop string, and ends a choice whose text reached one. Knows neither blocks nor
tensors. The state of an answer dies with its `Sequence`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from weakref import WeakKeyDictionary

import trio

from ..hooks.messages import Cancel, Delta, FinishReason, Request, Sampled, SampledRow, Sequence, TokenLogprobs, Usage
from ..hooks.protocols import Event, StepDone, TextDecoder, Tokenizer, TokensDelivered
from .channel import Inbox
from .text import StopStrings


class Answer:
    """One choice's text on its way out."""

    __slots__ = ("decoder", "finished", "last_at", "logprobs", "num_tokens", "stops", "token_ids")

    def __init__(self, decoder: TextDecoder, stops: StopStrings) -> None:
        self.decoder = decoder
        self.stops = stops
        self.finished = False
        self.last_at: float | None = None
        self.num_tokens = 0
        """Tokens whose text has not left yet."""
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprobs, ...] = ()


async def stream(
    inbox: Inbox[Sampled],
    *,
    tokenizer: Tokenizer,
    tell: Callable[[Request, type[Cancel]], None],
    observe: Callable[[Event], None],
) -> None:
    """Turn tokens into deltas.

    Args:
        tell: says to the line that a choice has reached a stop string.
        observe: hears of each step and of the tokens it delivered.
    """
    answers: WeakKeyDictionary[Sequence, Answer] = WeakKeyDictionary()
    with inbox:
        async for sampled in inbox:
            now = trio.current_time()
            for request in {row.row.sequence.request for row in sampled.rows}:
                request.timeline.span("compute", sampled.forward_s)
                request.timeline.span("sampling", sampled.sample_s)
            gaps: list[float] = []
            num_tokens = 0
            for row in sampled.rows:
                if row.scores:
                    row.row.sequence.request.prompt_scores += row.scores
                if not row.row.samples or row.row.sequence.unwanted:
                    continue
                answer = answers.get(row.row.sequence)
                if answer is None:
                    answer = answers[row.row.sequence] = open_answer(row.row.sequence.request, tokenizer)
                if answer.finished:
                    continue
                num_tokens += 1
                if answer.last_at is not None:
                    gaps.append(now - answer.last_at)
                answer.last_at = now
                deliver(answer, row, tell)
            observe(step_done(sampled))
            if num_tokens:
                observe(TokensDelivered(num_tokens=num_tokens, gaps_s=tuple(gaps)))


def open_answer(request: Request, tokenizer: Tokenizer) -> Answer:
    params = request.params
    return Answer(tokenizer.decoder(skip_special=params.skip_special_tokens), StopStrings(params.stop))


def deliver(answer: Answer, row: SampledRow, tell: Callable[[Request, type[Cancel]], None]) -> None:
    """Put what *row* adds to its answer into the mailbox."""
    sequence = row.row.sequence
    request = sequence.request
    timeline = request.timeline
    if row.error is not None:
        answer.finished = True
        request.mailbox.put(Delta(choice=sequence.choice, error=row.error))
        return
    timeline.mark("first_token")
    started = perf_counter()
    text, finish = _text(answer, row)
    timeline.span("detokenize", perf_counter() - started)
    if finish is FinishReason.STOP and row.finish is not FinishReason.STOP:
        request.stopped.add(sequence.choice)
        tell(request, Cancel)
    answer.num_tokens += 1
    request.num_output_tokens += 1
    if row.logprobs is not None or request.params.return_token_ids:
        answer.token_ids += (row.token_id,)
    if row.logprobs is not None:
        answer.logprobs += (row.logprobs,)
    if text or finish is not None or answer.token_ids:
        _put(answer, sequence, text, finish)


def _text(answer: Answer, row: SampledRow) -> tuple[str, FinishReason | None]:
    """The text this token completes, and why the answer ends with it if it does."""
    # An end token is no part of the answer.
    text = "" if row.finish is FinishReason.STOP else answer.decoder.feed(row.token_id)
    if row.finish is not None:
        text += answer.decoder.flush()
    text, stopped = answer.stops.feed(text)
    if stopped:
        return text, FinishReason.STOP
    if row.finish is not None:
        text += answer.stops.flush()
    return text, row.finish


def _put(answer: Answer, sequence: Sequence, text: str, finish: FinishReason | None) -> None:
    request = sequence.request
    usage = None
    if finish is not None:
        answer.finished = True
        request.num_finished += 1
        request.finish.append(finish)
        if request.num_finished == request.params.n:
            request.timeline.enter("delivering")
            usage = Usage(
                prompt=request.num_prompt_tokens,
                completion=request.num_output_tokens,
                cached=request.num_cached_tokens,
            )
    request.mailbox.put(
        Delta(
            choice=sequence.choice,
            text=text,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            num_tokens=answer.num_tokens,
            finish=finish,
            usage=usage,
        )
    )
    answer.num_tokens = 0
    answer.token_ids = ()
    answer.logprobs = ()


def step_done(sampled: Sampled) -> StepDone:
    rows = [row.row for row in sampled.rows]
    return StepDone(
        index=sampled.index,
        num_prefill_tokens=sum(row.num_tokens for row in rows if not row.decode),
        num_decodes=sum(1 for row in rows if row.decode),
        forward_s=sampled.forward_s,
        sample_s=sampled.sample_s,
    )
