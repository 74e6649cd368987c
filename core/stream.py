"""Tokens to text. Receives `Sampled`, puts `Delta` into each request's mailbox; never waits for a reader.

Decodes, holds back what may become a stop string, and ends a choice whose text reached one. A decoder that fails ends
its own request. Knows neither blocks nor tensors. The state of an answer lies in its `Sequence`, and dies with it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import trio

from ..hooks.errors import RequestError
from ..hooks.messages import Cancel, Delta, FinishReason, Request, Sampled, SampledRow, Sequence, TokenLogprobs, Usage
from ..hooks.protocols import Event, StepDone, TextDecoder, Tokenizer, TokensDelivered
from .channel import Inbox
from .containment import Account
from .text import StopStrings
from .watchers import Watchers

Watch = Callable[[Request], Watchers]


class Answer:
    """One choice's text on its way out."""

    __slots__ = ("decoder", "finished", "last_at", "logprobs", "num_tokens", "stops", "token_ids", "watchers")

    def __init__(self, decoder: TextDecoder, stops: StopStrings, watchers: Watchers | None) -> None:
        self.decoder = decoder
        self.stops = stops
        self.watchers = watchers
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
    account: Account,
    watch: Watch,
) -> None:
    """Turn tokens into deltas.

    Args:
        watch: opens the stop watchers of a request.
        account: the tokenizer's.
        tell: says to the line that a choice has reached a stop string.
        observe: hears of each step and of the tokens it delivered.
    """
    with inbox:
        async for sampled in inbox:
            now = trio.current_time()
            for request in {row.row.sequence.request for row in sampled.rows}:
                span = request.timeline.span
                span("compute", sampled.forward_s)
                span("sampling", sampled.sample_s)
            note_plugins(sampled)
            gaps: list[float] = []
            num_tokens = 0
            for row in sampled.rows:
                sequence = row.row.sequence
                if row.scores:
                    sequence.request.prompt_scores += row.scores
                if not row.row.samples or sequence.unwanted:
                    continue
                answer: Answer | None = sequence.answer
                if answer is None:
                    try:
                        answer = sequence.answer = open_answer(sequence.request, tokenizer, account, watch)
                    except RequestError as error:
                        fail(sequence, error, tell)
                        continue
                if answer.finished:
                    continue
                num_tokens += 1
                if answer.last_at is not None:
                    gaps.append(now - answer.last_at)
                answer.last_at = now
                deliver(answer, row, tell, account)
            observe(step_done(sampled))
            if num_tokens:
                observe(TokensDelivered(num_tokens=num_tokens, gaps_s=tuple(gaps)))


def note_plugins(sampled: Sampled) -> None:
    """Tell each request what the plugins took that ran for it."""
    if not sampled.plugins:
        return
    owners = {row.row.sequence.slot: row.row.sequence.request.timeline for row in sampled.rows}
    for call in sampled.plugins:
        for timeline in {owners[slot] for slot in call.slots if slot in owners}:
            timeline.plugin(call.who, call.seconds)


def open_answer(request: Request, tokenizer: Tokenizer, account: Account, watch: Watch) -> Answer:
    """Raises:
    RequestFailed: the tokenizer gives no decoder, or a stop watcher cannot be opened.
    """
    params = request.params
    try:
        decoder = tokenizer.decoder(skip_special=params.skip_special_tokens)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A panic in Rust is no Exception.
        account.failed(error)
        raise account.failure(error) from error
    return Answer(decoder, StopStrings(params.stop), watch(request) if request.stops else None)


def fail(sequence: Sequence, error: RequestError, tell: Callable[[Request, type[Cancel]], None]) -> None:
    """The request ends with *error*, and the line shall drop what it holds of it."""
    sequence.request.mailbox.put(Delta(choice=sequence.choice, error=error))
    tell(sequence.request, Cancel)


def deliver(answer: Answer, row: SampledRow, tell: Callable[[Request, type[Cancel]], None], account: Account) -> None:
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
    try:
        text, finish = _text(answer, row, account)
    except RequestError as error:
        answer.finished = True
        fail(sequence, error, tell)
        return
    finally:
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


def _decode(answer: Answer, row: SampledRow, account: Account) -> str:
    """The text this token completes, and at the end what is left.

    Raises:
        RequestFailed: the decoder failed.
    """
    started = perf_counter()
    try:
        # An end token is no part of the answer.
        text = "" if row.finish is FinishReason.STOP else answer.decoder.feed(row.token_id)
        if row.finish is not None:
            text += answer.decoder.flush()
        if not isinstance(text, str):
            raise TypeError(f"a decoder must give str, found {type(text).__name__}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # As in `open_answer`.
        account.failed(error)
        raise account.failure(error) from error
    finally:
        account.spent(perf_counter() - started)
    return text


def _text(answer: Answer, row: SampledRow, account: Account) -> tuple[str, FinishReason | None]:
    """The text this token completes, and why the answer ends with it if it does."""
    text = _decode(answer, row, account)
    watched = answer.watchers is not None and row.finish is None and answer.watchers.feed(text, row.token_id)
    text, stopped = answer.stops.feed(text)
    if stopped:
        return text, FinishReason.STOP
    if row.finish is not None or watched:
        text += answer.stops.flush()
    return text, FinishReason.STOP if watched else row.finish


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
    if answer.token_ids:
        answer.token_ids = ()
        answer.logprobs = ()


def step_done(sampled: Sampled) -> StepDone:
    num_prefill_tokens = num_decodes = 0
    for row in sampled.rows:
        if row.row.decode:
            num_decodes += 1
        else:
            num_prefill_tokens += row.row.num_tokens
    return StepDone(
        index=sampled.index,
        num_prefill_tokens=num_prefill_tokens,
        num_decodes=num_decodes,
        forward_s=sampled.forward_s,
        sample_s=sampled.sample_s,
    )
