"""The server under load: its routes, and requests in its words. Knows what a chat and a text completion look like."""

from __future__ import annotations

import time
from typing import Final

import msgspec
import trio
from msgspec import Struct

from ...hooks.errors import StartError
from .answer import Answer
from .connections import Connections
from .framing import CutShort, WireError
from .settings import API

PATHS: Final[dict[API, str]] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
OK: Final = 200


class Prompt(Struct, frozen=True, kw_only=True):
    """What is asked.

    Attributes:
        head: its beginning: a chat's system message. A template would else write one of its own, the same each time.
        text: the rest.
        num_output_tokens: tokens the answer may have.
    """

    head: str
    text: str
    num_output_tokens: int


class Card(Struct, frozen=True):
    """A model, as a server lists it."""

    id: str
    max_model_len: int | None = None


class Cards(Struct, frozen=True):
    data: list[Card]


class Tokenized(Struct, frozen=True):
    """An answer of `/tokenize`: vLLM's and Headrace's have a count, llama.cpp's the tokens alone."""

    count: int | None = None
    tokens: list[msgspec.Raw] = []


class Whole:
    """A `wire.Sink` that keeps a small body."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""

    def head(self, status: int, content_type: str) -> None:
        self.status = status

    def body(self, data: bytes) -> None:
        self.data += data


class Target:
    """One model of a server.

    Args:
        fields: of each request's body, besides what is asked.

    Attributes:
        card: the model.
        takes_system: its chats may begin with a system message.
    """

    def __init__(
        self,
        connections: Connections,
        api: API,
        fields: dict[str, msgspec.Raw],
        *,
        ignore_eos: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self._connections = connections
        self._ignore_eos = ignore_eos
        self._api = api
        self._fields = fields
        self._timeout_s = timeout_s
        self.card = Card(id="")
        self.takes_system = True

    async def find_model(self, name: str | None) -> None:
        """Take the model *name*, or the first that is listed.

        Raises:
            StartError: nobody answers, or no model has to be asked for by name.
        """
        status, data = await self._call("GET", "/v1/models", b"")
        try:
            cards = msgspec.json.decode(data, type=Cards).data if status == OK else []
        except msgspec.MsgspecError:
            cards = []
        if name is not None:
            self.card = next((card for card in cards if card.id == name), Card(id=name))
        elif cards:
            self.card = cards[0]
        else:
            place = f"{self._connections.url}/v1/models"
            raise StartError(f"{place} must list a model, and answered {status}: give --model, or --api-key")

    async def count(self, text: str) -> int | None:
        """Tokens of *text* by the server's own tokenizer; None where it does not tell."""
        asked = {"model": self.card.id, "prompt": text, "content": text, "add_special_tokens": False}
        status, data = await self._call("POST", "/tokenize", msgspec.json.encode(asked))
        try:
            told = msgspec.json.decode(data, type=Tokenized) if status == OK else Tokenized()
        except msgspec.MsgspecError:
            return None
        return (len(told.tokens) if told.count is None else told.count) or None

    async def _call(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        whole = Whole()
        try:
            with trio.fail_after(self._timeout_s):
                await self._connections.send(method, path, body, whole)
        except trio.TooSlowError:
            raise StartError(
                f"{self._connections.url}{path} must answer within {self._timeout_s:g} s, and does not"
            ) from None
        except (OSError, WireError) as error:
            raise StartError(f"a server must answer at {self._connections.url}{path}: {error}") from None
        return whole.status, whole.data

    def encode(self, prompt: Prompt) -> bytes:
        """The body that asks *prompt*. The run's own fields win."""
        asked: dict[str, object] = {
            "model": self.card.id,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": prompt.num_output_tokens,
        }
        if self._api == "completions":
            asked["prompt"] = f"{prompt.head} {prompt.text}"
        elif self.takes_system:
            system, user = {"role": "system", "content": prompt.head}, {"role": "user", "content": prompt.text}
            asked["messages"] = [system, user]
        else:
            asked["messages"] = [{"role": "user", "content": f"{prompt.head} {prompt.text}"}]
        if self._ignore_eos:
            asked["ignore_eos"] = True
        return msgspec.json.encode({**asked, **self._fields})

    async def ask(self, body: bytes) -> tuple[float, Answer]:
        """Send a body and take its answer, whatever becomes of it.

        Returns:
            `time.perf_counter()` when it was sent, and the answer.
        """
        answer = Answer()
        sent = time.perf_counter()
        try:
            with trio.fail_after(self._timeout_s):
                await self._connections.send("POST", PATHS[self._api], body, answer)
        except trio.TooSlowError:
            answer.fail("timeout", f"not complete after {self._timeout_s:g} s")
        except WireError as error:
            answer.fail("cut short" if isinstance(error, CutShort) else "bad answer", str(error))
        except OSError as error:
            answer.fail("connect", str(error))
        else:
            answer.end()
        return sent, answer
