"""What the engine says, in OpenAI's shapes: chunks of a stream, and whole answers. What both kinds have in common.

Receives deltas, gives bytes. Most chunks carry nothing but text, so their constant parts are encoded once a request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import isfinite
from typing import Any, ClassVar, Final

import msgspec
from msgspec import Struct

from ..hooks.messages import Delta, Request, TokenLogprobs, Usage

TokenText = Callable[[int], tuple[str, bytes]]
"""A token id → what to show for it, and its bytes."""

JSON = dict[str, Any]

# JSON has no infinity; OpenAI reports this for tokens that cannot be drawn.
LEAST_LOGPROB: Final = -9999.0

_encode: Final = msgspec.json.Encoder().encode


class Collected:
    """One choice of an answer that is not streamed, as far as it has come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: str | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish


class Wanted(Struct, frozen=True, kw_only=True):
    """What a client wants to see of an answer besides its text.

    Attributes:
        logprobs: log-probabilities of the answer's tokens.
        prompt_logprobs: those of the prompt's.
        token_ids: of prompt and answer.
        usage: end the stream with a chunk of usage.
        running_usage: say in every chunk of the stream what has been used until then.
    """

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    usage: bool = False
    running_usage: bool = False


NOTHING_MORE: Final = Wanted()


class Tally:
    """Tokens of one answer so far, of all its prompts."""

    def __init__(self) -> None:
        self.prompt = self.completion = self.cached = 0

    def begin(self, request: Request) -> None:
        self.prompt += request.num_prompt_tokens
        self.cached += request.num_cached_tokens

    def usage(self) -> Usage:
        return Usage(prompt=self.prompt, completion=self.completion, cached=self.cached)


class Format(ABC):
    """Common to both kinds of completions; one instance a request.

    Args:
        id, created, model: repeated in every chunk.
        fingerprint: likewise; of what the request was resolved on, where that is known.
        token_text: for log-probabilities.
        wanted: what the client wants to see.
        tally: shared by the requests of one answer.
        place: which of the answer's prompts the request is about; its choices follow those of the prompts before.
    """

    id_prefix: ClassVar[str]
    whole: ClassVar[str]
    chunk: ClassVar[str]
    _text_open: ClassVar[bytes]
    _text_shut: ClassVar[bytes]

    def __init__(
        self,
        *,
        id: str,
        created: int,
        model: str,
        fingerprint: str,
        token_text: TokenText,
        wanted: Wanted = NOTHING_MORE,
        tally: Tally | None = None,
        place: int = 0,
    ) -> None:
        self._head = {"id": id, "created": created, "model": model, "system_fingerprint": fingerprint}
        self._token_text = token_text
        self._wanted = wanted
        self._tally = tally or Tally()
        self._place = place
        self._first_index = 0
        self._prompt_ids: list[int] = []
        self._prompt_scores: list[TokenLogprobs] = []
        self._event = self._opened()
        self._tail = b'],"usage":null}\n\n' if wanted.usage else b"]}\n\n"
        self._begun: dict[int, bytes] = {}

    def begin(self, request: Request) -> None:
        """The first delta of *request* is there, and with it all that is known of its prompt."""
        if request.stack is not None and request.stack.fingerprint != self._head["system_fingerprint"]:
            # The engine was reloaded between the reading of the body and the making of the request.
            self._head["system_fingerprint"] = request.stack.fingerprint
            self._event = self._opened()
        self._first_index = self._place * request.params.n
        self._prompt_ids = request.prompt_ids.tolist()
        self._prompt_scores = request.prompt_scores
        self._tally.begin(request)

    def event(self, delta: Delta, timings: JSON | None = None) -> bytes:
        """One event of a stream, or nothing where the client would see nothing.

        Args:
            timings: given with the last delta.
        """
        begun = self._begun.get(delta.choice)
        self._tally.completion += delta.num_tokens
        if begun is not None and delta.finish is None and not delta.token_ids:
            return begun + _encode(delta.text) + self._text_shut + self._rest() if delta.text else b""
        if begun is None and delta.finish is None and not delta.text and not delta.token_ids:
            return b""
        first = begun is None
        index = self._first_index + delta.choice
        choice = {
            "index": index,
            **self._chunk_text(delta.text, first=first),
            "logprobs": self._logprobs(list(delta.token_ids), list(delta.logprobs), delta.choice, first=first),
            "finish_reason": delta.finish,
            **self._ids(list(delta.token_ids), first=first),
        }
        self._begun[delta.choice] = self._event + b',"choices":[{"index":%d,' % index + self._text_open
        # With a chunk of usage to come, that one is the last.
        more = b'],"timings":%b}\n\n' % _encode(timings) if timings and not self._wanted.usage else self._rest()
        return self._event + self._chunk_head(first=first) + b',"choices":[' + _encode(choice) + more

    def end(self, usage: Usage | None, timings: JSON) -> bytes:
        """What follows the last delta: usage where it was asked for, and the mark of a good end."""
        if usage is None or not self._wanted.usage:
            return b"data: [DONE]\n\n"
        rest = _encode({"choices": [], "usage": usage_object(usage), "timings": timings})
        return self._event + b"," + rest[1:] + b"\n\ndata: [DONE]\n\n"

    def choices(self, collected: list[Collected]) -> list[JSON]:
        """The choices of a request that is not streamed."""
        return [
            {
                "index": self._first_index + choice,
                **self._whole_text("".join(of.texts)),
                "logprobs": self._logprobs(of.token_ids, of.logprobs, choice, first=True),
                "finish_reason": of.finish,
                **self._ids(of.token_ids, first=True),
            }
            for choice, of in enumerate(collected)
        ]

    def answer(self, choices: list[JSON], usage: Usage, timings: JSON) -> bytes:
        """The whole answer, where it is not streamed."""
        whole = {"object": self.whole, **self._head, "choices": choices, "usage": usage_object(usage)}
        return _encode({**whole, "timings": timings, **self._prompt_part()})

    def _opened(self) -> bytes:
        """What every event begins with."""
        return b"data: " + _encode({"object": self.chunk, **self._head})[:-1]

    def _rest(self) -> bytes:
        """What follows a chunk's choice."""
        if not self._wanted.running_usage:
            return self._tail
        return b'],"usage":%b}\n\n' % _encode(usage_object(self._tally.usage()))

    def _logprobs(self, ids: list[int], logprobs: list[TokenLogprobs], choice: int, *, first: bool) -> JSON | None:
        return self._listed(ids, logprobs, choice, first=first) if self._wanted.logprobs else None

    def _scored_prompt(self) -> list[JSON | None]:
        """Field `prompt_logprobs`: the first token of a prompt has none; ids are keys, as vLLM has it."""
        listed: list[JSON | None] = [None]
        for id, of in zip(self._prompt_ids[1:], self._prompt_scores, strict=True):
            tops = zip(of.top_ids, of.top_logprobs, range(1, len(of.top_ids) + 1), strict=True)
            entries = {id: (of.logprob, of.rank), **{top: (logprob, rank) for top, logprob, rank in tops}}
            listed.append(
                {
                    str(id): {"logprob": finite(logprob), "rank": rank, "decoded_token": self._token_text(id)[0]}
                    for id, (logprob, rank) in entries.items()
                }
            )
        return listed

    def _ids(self, ids: list[int], *, first: bool) -> JSON:
        """What a choice says in ids."""
        return {"token_ids": ids} if self._wanted.token_ids else {}

    def _chunk_head(self, *, first: bool) -> bytes:
        """Further fields of a chunk, beside its choices."""
        return b""

    def _prompt_part(self) -> JSON:
        """Further fields of a whole answer, beside its choices."""
        return {}

    @abstractmethod
    def _chunk_text(self, text: str, *, first: bool) -> JSON:
        """What a chunk says in text."""

    @abstractmethod
    def _whole_text(self, text: str) -> JSON:
        """What a whole answer says in text."""

    @abstractmethod
    def _listed(self, ids: list[int], logprobs: list[TokenLogprobs], choice: int, *, first: bool) -> JSON:
        """The log-probabilities of some tokens."""


def usage_object(usage: Usage) -> JSON:
    """Token counts of a request."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if isfinite(logprob) else LEAST_LOGPROB
