"""Text to tokens and back beside the line: what a client wants to know without asking the model.

Runs off the loop, a few texts at a time; nobody queues here without a bound.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import structlog

from ..hooks.errors import BadRequest, Overloaded, RequestError, RequestFailed
from ..hooks.messages import ChatPrompt, TextPrompt
from ..hooks.protocols import ChatTemplate, Rendered, Tokenizer
from .containment import Account
from .tokenize import OffLoop, charged, check_bytes

T = TypeVar("T")

MAX_TEXTS: Final = 64
"""Texts in work and waiting; one more is refused."""

log = structlog.get_logger()


class Codec:
    """The model's tokenizer and chat template, for anybody's use.

    Args:
        accounts: the tokenizer's, and the template's.
        off_loop: runs a function in a worker thread.
        max_model_len: token ids that are decoded at once, at most.
        max_bytes: a longer text is refused unread, as the line would.
        vocab_size: ids must lie below it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        accounts: tuple[Account, Account],
        off_loop: OffLoop,
        max_model_len: int,
        max_bytes: int,
        vocab_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._encoding, self._rendering = accounts
        self._off_loop = off_loop
        self._max_model_len = max_model_len
        self._max_bytes = max_bytes
        self._vocab_size = vocab_size
        self._num_texts = 0

    async def encode(self, prompt: ChatPrompt | TextPrompt, *, add_special: bool = True) -> array[int]:
        """Token ids of *prompt*, as a request with it would have.

        Args:
            add_special: put BOS before a plain text, where the model has one; a conversation's comes from its template.

        Raises:
            BadRequest: too long, or the template refuses it.
            Overloaded: too many texts at once.
        """
        if isinstance(prompt, ChatPrompt):
            rendered = await self._render(prompt)
            return await self._work(lambda: self._tokenizer.encode_rendered(rendered))
        check_bytes(prompt.text, self._max_bytes)
        return await self._work(
            lambda: self._tokenizer.encode(prompt.text, parse_special=prompt.parse_special, add_special=add_special)
        )

    def follow(self, template: ChatTemplate, account: Account) -> None:
        """Render with *template* from now on."""
        self._template, self._rendering = template, account

    async def decode(self, token_ids: Sequence[int], *, param: str = "tokens") -> str:
        """The text of *token_ids*, control tokens included.

        Args:
            param: how the client calls them.

        Raises:
            BadRequest: an id that the model has not, or too many of them.
            Overloaded: too many texts at once.
        """
        if len(token_ids) > self._max_model_len:
            raise BadRequest(
                f"{param}: must be at most {self._max_model_len}, as many as the model's context holds, "
                f"got {len(token_ids)}: decode them in parts",
                param=param,
            )
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise BadRequest(
                    f"{param}: token ids must be >= 0 and < {self._vocab_size}, got {token_id}", param=param
                )
        return await self._work(lambda: self._tokenizer.decode(token_ids, skip_special=False))

    async def strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token by itself; U+FFFD for what is no whole character.

        Raises:
            Overloaded: too many texts at once.
        """
        bytes_of = self._tokenizer.token_bytes
        return await self._work(lambda: [bytes_of(token_id).decode("utf-8", "replace") for token_id in token_ids])

    async def render(self, prompt: ChatPrompt) -> str:
        """A conversation as the model would read it.

        Raises:
            BadRequest: too long, or the template refuses it.
            Overloaded: too many texts at once.
        """
        rendered = await self._render(prompt)
        text = rendered.text
        for stand_in, written in rendered.stand_ins.items():
            text = text.replace(stand_in, written)
        return text

    async def _render(self, prompt: ChatPrompt) -> Rendered:
        for message in prompt.messages:
            check_bytes(str(message.get("content") or ""), self._max_bytes)
        template = self._template
        return await self._work(lambda: template.render(prompt), self._rendering)

    async def _work(self, function: Callable[[], T], account: Account | None = None) -> T:
        """Run *function*, which is the tokenizer's unless *account* is another's."""
        if self._num_texts >= MAX_TEXTS:
            raise Overloaded(f"{MAX_TEXTS} texts are being read already; try again later", retry_after_s=1)
        self._num_texts += 1
        try:
            return await charged(account or self._encoding, self._off_loop, function)
        except RequestError:
            raise
        except Exception as error:
            log.exception("a text could not be read")
            raise RequestFailed(f"the text could not be read: {error!r}") from error
        finally:
            self._num_texts -= 1
