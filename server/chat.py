"""A conversation in the terminal, with a model in this process or behind a URL.

Both are a function from the messages so far to pieces of text, such as `LLM.stream_chat`; closing what it returns
cancels the answer.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, TextIO
from urllib.parse import urlsplit

import msgspec

from ..hooks.errors import RequestError, RequestFailed, StartError

Message = dict[str, str]
Answer = Callable[[list[Message]], Generator[str]]


def talk(answer: Answer, ask: Callable[[], str], out: TextIO) -> None:
    """Ask and answer until `/exit` or the end of the input. An interrupt ends the answer, or at the prompt the talk.

    Args:
        ask: gives the user's next line, as `input` does.
    """
    messages: list[Message] = []
    while True:
        try:
            line = ask().strip()
        except (EOFError, KeyboardInterrupt):
            out.write("\n")
            return
        if line == "/exit":
            return
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            text = _print_answer(answer, messages, out)
        except RequestError as error:
            messages.pop()
            out.write(f"[{error}]\n")
        else:
            messages.append({"role": "assistant", "content": text})


def _print_answer(answer: Answer, messages: list[Message], out: TextIO) -> str:
    pieces: list[str] = []
    try:
        with closing(answer(messages)) as parts:
            for piece in parts:
                pieces.append(piece)
                out.write(piece)
                out.flush()
    except KeyboardInterrupt:
        out.write(" [stopped]")
    out.write("\n")
    return "".join(pieces)


def remote(url: str) -> Answer:
    """The model behind an OpenAI-compatible server.

    Raises:
        StartError: *url* is none, or nobody answers there.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    kinds: dict[str, type[http.client.HTTPConnection]] = {
        "http": http.client.HTTPConnection,
        "https": http.client.HTTPSConnection,
    }
    if parts.scheme not in kinds or parts.hostname is None:
        raise StartError(f"--url must be the address of a server, such as http://127.0.0.1:8000, got {url}")
    base = parts.path.rstrip("/").removesuffix("/v1")

    def connect() -> http.client.HTTPConnection:
        return kinds[parts.scheme](parts.hostname or "", parts.port)

    try:
        with closing(connect()) as connection:
            connection.request("GET", f"{base}/v1/models")
            model = msgspec.json.decode(connection.getresponse().read())["data"][0]["id"]
    except (OSError, http.client.HTTPException, msgspec.MsgspecError, LookupError, TypeError) as error:
        raise StartError(f"no model answers at {url}: {error!r}") from None

    def answer(messages: list[Message]) -> Generator[str]:
        body = msgspec.json.encode({"model": model, "messages": messages, "stream": True})
        with closing(connect()) as connection:
            try:
                headers = {"content-type": "application/json"}
                connection.request("POST", f"{base}/v1/chat/completions", body, headers)
                yield from _pieces(connection.getresponse())
            except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
                raise RequestFailed(f"the connection to {url} failed: {error!r}") from None

    return answer


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The text in a stream of chunks."""
    if response.status != 200:
        raise _failure(msgspec.json.decode(response.read()))
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if data == line.strip() or data == b"[DONE]":
            continue  # A comment, an empty line, or the end.
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            raise _failure(chunk)
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""


def _failure(body: Any) -> RequestFailed:
    error = body.get("error") if isinstance(body, dict) else None
    return RequestFailed(error["message"] if isinstance(error, dict) and "message" in error else str(body))
