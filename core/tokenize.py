"""Text to token ids, off the event loop. Receives `Request`, sends `Prompt`; knows neither blocks nor the model.

A request that cannot be tokenized ends here with its error and gives its credit back.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Protocol, TypeVar

import structlog
import trio

from ..hooks.errors import BadRequest, ContextTooLong, RequestError, RequestFailed
from ..hooks.messages import ChatPrompt, Delta, Prompt, Request, TextPrompt, TokenPrompt
from ..hooks.protocols import ChatTemplate, Tokenizer
from .channel import Inbox, Outbox
from .containment import Account, Ledger
from .credits import Credits

T = TypeVar("T")


class OffLoop(Protocol):
    """Runs a function where it does not hold up the loop."""

    async def __call__(self, function: Callable[[], T], /) -> T: ...


log = structlog.get_logger()


async def charged(account: Account, off_loop: OffLoop, function: Callable[[], T]) -> T:
    """Run *function*, a plugin's, off the loop, and note what it took there; waiting for a thread is not its fault."""
    seconds: float | None = None

    def timed() -> T:
        nonlocal seconds
        started = perf_counter()
        try:
            return function()
        finally:
            seconds = perf_counter() - started

    try:
        return await off_loop(timed)
    except (RequestError, trio.Cancelled, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic in Rust is no Exception.
        account.failed(error)
        raise
    finally:
        # Here on the loop, for an account has one writer.
        if seconds is not None:
            account.spent_apart(seconds)


async def tokenize(
    inbox: Inbox[Request],
    schedule: Outbox[Prompt],
    *,
    tokenizer: Tokenizer,
    credits: Credits,
    max_model_len: int,
    max_token_bytes: int,
    vocab_size: int,
    workers: int,
    off_loop: OffLoop,
    ledger: Ledger,
) -> None:
    """Turn text into token ids, *workers* requests at a time.

    Args:
        max_model_len: tokens of prompt and answer together.
        max_token_bytes: bytes of the longest token; a longer text than their product is refused unread.
        vocab_size: rows of the embedding, which a tokenizer may exceed.
        off_loop: runs a function in a worker thread.
        ledger: where is noted what tokenizers and templates cost.
    """

    async def work(inbox: Inbox[Request]) -> None:
        with inbox:
            async for request in inbox:
                if request.cancelled:
                    credits.release(request)
                    continue
                try:
                    token_ids = await _token_ids(request, tokenizer, off_loop, ledger, max_model_len * max_token_bytes)
                    _check_length(len(token_ids), max_model_len)
                    _check_ids(token_ids, vocab_size)
                except RequestError as error:
                    _refuse(request, error, credits)
                except (trio.Cancelled, KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # A panic in Rust is no Exception.
                    log.exception("tokenizing failed", request=request.id)
                    _refuse(request, RequestFailed(f"the prompt could not be tokenized: {error!r}"), credits)
                else:
                    _hand_on(request, token_ids, credits, schedule)

    with inbox, schedule:
        async with trio.open_nursery() as nursery:
            for _ in range(workers):
                nursery.start_soon(work, inbox.clone())
            inbox.close()


async def _token_ids(
    request: Request, tokenizer: Tokenizer, off_loop: OffLoop, ledger: Ledger, max_bytes: int
) -> array[int]:
    timeline, stack = request.timeline, request.stack
    assert stack is not None, "a request enters the line resolved"
    # Nothing could take the place of these two.
    encoding = ledger.account("tokenizer", stack.tokenizer, quarantine=False)
    match request.prompt:
        case TokenPrompt(token_ids=token_ids):
            return array("i", token_ids)
        case TextPrompt(text=text, parse_special=parse_special):
            check_bytes(text, max_bytes)
            timeline.enter("tokenize")
            encode = partial(tokenizer.encode, text, parse_special=parse_special, add_special=True)
            ids = await charged(encoding, off_loop, encode)
        case ChatPrompt() as chat:
            timeline.enter("template")
            template: ChatTemplate = stack.chat_template.component
            rendering = ledger.account("chat_template", stack.chat_template, quarantine=False)
            rendered = await charged(rendering, off_loop, lambda: template.render(chat))
            check_bytes(rendered.text, max_bytes)
            timeline.enter("tokenize")
            ids = await charged(encoding, off_loop, lambda: tokenizer.encode_rendered(rendered))
    return ids


def check_bytes(text: str, max_bytes: int) -> None:
    """Raises:
    ContextTooLong: *text* is longer than the longest tokens can make up.
    """
    # Characters are at most as many as bytes, so this refuses only what could not fit in any tokenization.
    if len(text) > max_bytes:
        raise ContextTooLong(
            f"the prompt must fit into this model's context, which holds at most {max_bytes} bytes, "
            f"found {len(text)} characters; shorten it"
        )


def _check_length(num_tokens: int, max_model_len: int) -> None:
    if num_tokens == 0:
        raise BadRequest("the prompt must have at least one token, found none; write some text")
    if num_tokens >= max_model_len:
        raise ContextTooLong(
            f"the prompt must leave room for one token in the model's context of {max_model_len} tokens, "
            f"found {num_tokens} tokens of prompt; shorten it"
        )


def _check_ids(token_ids: array[int], vocab_size: int) -> None:
    largest = max(token_ids)
    if largest >= vocab_size:
        raise BadRequest(
            f"the prompt has token {largest}, which the tokenizer knows and the model does not: its tokens must be "
            f"below {vocab_size}; leave that text out"
        )


def _hand_on(request: Request, token_ids: array[int], credits: Credits, schedule: Outbox[Prompt]) -> None:
    if request.cancelled:  # While it was tokenized; `schedule` may be gone too.
        credits.release(request)
        return
    credits.settle(request, len(token_ids))
    request.num_prompt_tokens = len(token_ids)
    if request.params.return_token_ids or request.params.prompt_logprobs is not None:
        request.prompt_ids = token_ids[:]  # The scheduler's grows.
    request.timeline.enter("queued")
    schedule.send_nowait(Prompt(request=request, token_ids=token_ids))


def _refuse(request: Request, error: RequestError, credits: Credits) -> None:
    request.mailbox.put(Delta(error=error))
    credits.release(request)
