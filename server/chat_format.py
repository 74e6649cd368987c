"""The answers of `/v1/chat/completions`."""

from __future__ import annotations

import msgspec

from ..hooks.messages import TokenLogprobs
from .answers import JSON, Format, finite


class ChatFormat(Format):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    _text_open = b'"delta":{"content":'
    _text_shut = b'},"logprobs":null,"finish_reason":null}'

    def _chunk_text(self, text: str, *, first: bool) -> JSON:
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"delta": delta}

    def _whole_text(self, text: str) -> JSON:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _listed(self, ids: list[int], logprobs: list[TokenLogprobs], choice: int, *, first: bool) -> JSON:
        def entry(id: int, logprob: float) -> JSON:
            text, data = self._token_text(id)
            return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

        content = [
            {
                **entry(id, of.logprob),
                "top_logprobs": [entry(*top) for top in zip(of.top_ids, of.top_logprobs, strict=True)],
            }
            for id, of in zip(ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _chunk_head(self, *, first: bool) -> bytes:
        # Once a choice, for a reader may look at one choice only.
        return (
            b',"prompt_token_ids":' + msgspec.json.encode(self._prompt_ids) if first and self._wanted.token_ids else b""
        )

    def _prompt_part(self) -> JSON:
        part: JSON = {}
        if self._wanted.prompt_logprobs:
            part["prompt_logprobs"] = self._scored_prompt()
        if self._wanted.token_ids:
            part["prompt_token_ids"] = self._prompt_ids
        return part
