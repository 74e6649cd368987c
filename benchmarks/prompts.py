"""Prompts of a wanted length, each different from its first word on, so that no cache helps unless it is meant to."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any, Final

WORDS: Final = tuple(
    word
    for line in (
        "the of and to in is was for that on as with by are from at this or an be which it not have were but one can",
        "more also two about time after other first new some into when people made work all many would used most over",
        "year years such between than part called only both state world high day system number well life long same",
        "water house city name small large found place right line end must big even turn here why ask went men read",
        "need land different home us move try kind hand picture again change off play air away animal page letter",
        "mother answer study still learn should plant cover food sun four keep eye never last let thought tree cross",
    )
    for word in line.split()
)
"""Short English words: with a blank before it each is one token of the usual byte-pair vocabularies."""


class Prompts:
    """Makes the bodies of requests to one server.

    Args:
        model: what the server calls the model.
        extra: fields that this server needs in every request, or with None does not take.
    """

    def __init__(self, model: str, extra: Mapping[str, Any]) -> None:
        self._model = model
        self._extra = extra
        self._random = random.Random(os.urandom(8))
        self.template_tokens = 0
        """Tokens that the chat template adds. Found out by asking the server."""

    def text(self, num_tokens: int) -> str:
        """Words of about so many tokens."""
        return " ".join(self._random.choices(WORDS, k=max(1, num_tokens)))

    def body(self, prompt_tokens: int, max_tokens: int, *, system: str = "", **more: Any) -> dict[str, Any]:
        """A streamed, greedy chat of *prompt_tokens* tokens, template and *system* included, to its full length.

        Args:
            system: counted as one token a word.
        """
        # A system message keeps templates from putting one of their own, of unknown length, in its place.
        system = system or "Go"
        words = prompt_tokens - self.template_tokens - len(system.split())
        body = {
            "model": self._model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": self.text(words)}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **self._extra,
            **more,
        }
        return {name: value for name, value in body.items() if value is not None}
