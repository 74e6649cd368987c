"""What the ledger says of tokenizers and chat templates, which run beside the loop."""

from __future__ import annotations

import time

import msgspec
import pytest

from headrace.core.containment import Ledger
from headrace.core.engine import Engine
from headrace.hooks.errors import BadRequest, RequestFailed
from headrace.hooks.messages import ChatPrompt, TextPrompt
from headrace.hooks.protocols import Rendered
from tests.core.test_line import line
from tests.fakes import JoinTemplate, make_parts, make_stack


class Slow(JoinTemplate):
    """Takes its time, or refuses, or breaks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.error: Exception | None = None

    def render(self, prompt: ChatPrompt) -> Rendered:
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return super().render(prompt)


async def test_templates_and_tokenizers_are_charged_what_they_take() -> None:
    template, ledger = Slow(), Ledger(slow_call_s=0.01)
    bound = msgspec.structs.replace(make_stack().chat_template, component=template)
    stack = msgspec.structs.replace(make_stack(), chat_template=bound)
    parts = msgspec.structs.replace(make_parts(), stack=stack, ledger=ledger)
    chat = ChatPrompt(messages=({"role": "user", "content": "1 2"},))

    async def ask_for(engine: Engine, prompt: ChatPrompt | TextPrompt) -> None:
        request = engine.request(prompt, {"max_tokens": 1, "seed": 0})
        try:
            await engine.submit(request)
            while (delta := await engine.receive(request)) is not None:
                if delta.error is not None:
                    raise delta.error
        finally:
            engine.close(request)

    def costs(slot: str) -> tuple[int, int]:
        (cost,) = [each for each in ledger.costs() if each.slot == slot]
        return cost.calls, cost.errors

    async with line(parts) as engine:
        await ask_for(engine, TextPrompt(text="1 2"))
        encoded = costs("tokenizer")[0]
        template.seconds = 0.02
        await ask_for(engine, chat)
        # A worker may take long; the tokenizer is also called for the text of the answer.
        assert costs("chat_template") == (1, 0)
        assert costs("tokenizer")[0] == 2 * encoded
        assert sum(each.seconds for each in ledger.costs() if each.slot == "chat_template") >= 0.02
        template.error = BadRequest("the roles must alternate")
        with pytest.raises(BadRequest):
            await ask_for(engine, chat)
        assert costs("chat_template") == (2, 0)
        template.error = RuntimeError("broken")
        with pytest.raises(RequestFailed):
            await ask_for(engine, chat)
        assert costs("chat_template") == (3, 1)
