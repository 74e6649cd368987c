"""The answers of `/v1/completions`, with log-probabilities in the older shape and the prompt in front on request."""

from __future__ import annotations

import codecs
from typing import Any

from ..hooks.messages import TokenLogprobs
from .answers import JSON, Format, finite


class CompletionFormat(Format):
    """`/v1/completions`.

    Args:
        echo: the prompt's text, to stand before each choice; None: it does not.
    """

    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"
    _text_open = b'"text":'
    _text_shut = b',"logprobs":null,"finish_reason":null}'

    def __init__(self, *, echo: str | None = None, **common: Any) -> None:
        super().__init__(**common)
        self._echo = echo
        self._offsets: dict[int, Offset] = {}

    def _chunk_text(self, text: str, *, first: bool) -> JSON:
        return {"text": (self._echo or "") + text if first else text}

    def _whole_text(self, text: str) -> JSON:
        return {"text": (self._echo or "") + text}

    def _ids(self, ids: list[int], *, first: bool) -> JSON:
        part = super()._ids(ids, first=first)
        if first and self._wanted.token_ids:
            part["prompt_token_ids"] = self._prompt_ids
        if first and self._wanted.prompt_logprobs:
            part["prompt_logprobs"] = self._scored_prompt()
        return part

    def _listed(self, ids: list[int], logprobs: list[TokenLogprobs], choice: int, *, first: bool) -> JSON:
        of: list[TokenLogprobs | None] = [*logprobs]
        if first and self._echo is not None:
            ids = self._prompt_ids + ids
            of = [None, *self._prompt_scores, *of]
        shown = [self._token_text(id) for id in ids]
        offset = self._offsets.get(choice)
        if offset is None:
            prompt = b"".join(data for _, data in shown[: len(self._prompt_ids)]) if self._echo is not None else b""
            offset = self._offsets[choice] = Offset(prompt, self._echo or "")
        return {
            "tokens": [text for text, _ in shown],
            "token_logprobs": [one and finite(one.logprob) for one in of],
            "top_logprobs": [one and self._tops(id, one) for id, one in zip(ids, of, strict=True)],
            "text_offset": [offset.advance(data) for _, data in shown],
        }

    def _tops(self, id: int, of: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that is there if it is none of them."""
        tops = zip(of.top_ids, of.top_logprobs, strict=True)
        # Different ids may look alike: pieces of characters do. The likelier one is shown.
        shown: dict[str, float] = {}
        for top, logprob in (*tops, (id, of.logprob)):
            shown.setdefault(self._token_text(top)[0], finite(logprob))
        return shown


class Offset:
    """Where in the text of a choice each token begins, in characters; a token may hold a piece of one.

    Args:
        prompt, echo: the prompt by its tokens, and by its text. What the tokens have before the text, such as BOS, is
            not in it.
    """

    def __init__(self, prompt: bytes = b"", echo: str = "") -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = min(0, len(echo) - len(prompt.decode("utf-8", "replace")))

    def advance(self, data: bytes) -> int:
        start = self._num_chars
        self._num_chars += len(self._decoder.decode(data))
        return max(0, start)
