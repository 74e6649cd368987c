"""Text to tokens and back beside the line."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TypeVar

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from headrace.core.codec import MAX_TEXTS, Codec
from headrace.core.containment import Account
from headrace.hooks.errors import BadRequest, ContextTooLong, Overloaded, RequestFailed
from headrace.hooks.messages import ChatPrompt, TextPrompt
from headrace.hooks.protocols import Rendered
from tests.fakes import JoinTemplate, NumberTokenizer, inline

T = TypeVar("T")


class ShyTemplate(JoinTemplate):
    """A user's 9 is none of the template's."""

    def render(self, prompt: ChatPrompt) -> Rendered:
        text = super().render(prompt).text
        return Rendered(text=text.replace("9", "\ue000"), stand_ins={"\ue000": "9"})


def accounts() -> tuple[Account, Account]:
    return Account("tokenizer", "numbers", "numbers"), Account("chat_template", "shy", "shy")


def codec(off_loop: Callable[..., object] = inline, charge: tuple[Account, Account] | None = None) -> Codec:
    return Codec(
        NumberTokenizer(),
        ShyTemplate(),
        accounts=charge or accounts(),
        off_loop=off_loop,  # type: ignore[arg-type]
        max_model_len=10,
        max_bytes=40,
        vocab_size=1000,
    )


def chat(content: str) -> ChatPrompt:
    return ChatPrompt(messages=({"role": "user", "content": content},))


async def test_a_text_and_a_conversation_become_ids() -> None:
    assert await codec().encode(TextPrompt(text="5 6")) == array("i", [5, 6])
    assert await codec().encode(chat("7 8")) == array("i", [7, 8])


async def test_each_call_is_charged_to_whose_it_is() -> None:
    charge = accounts()
    asked = codec(charge=charge)
    await asked.encode(chat("7 8"))
    assert [account.calls for account in charge] == [1, 1]
    await asked.decode([5, 6])
    await asked.render(chat("1"))
    assert [account.calls for account in charge] == [2, 2]
    other = Account("chat_template", "other", "other")
    asked.follow(JoinTemplate(), other)
    await asked.render(chat("1"))
    assert [account.calls for account in (*charge, other)] == [2, 2, 1]


async def test_ids_become_text_and_pieces() -> None:
    assert await codec().decode([5, 6]) == "5 6 "
    assert await codec().strings([5, 6]) == ["5 ", "6 "]


async def test_a_rendered_conversation_shows_what_the_user_wrote() -> None:
    assert await codec().render(chat("1 9")) == "1 9"


@pytest.mark.parametrize("prompt", [TextPrompt(text="1" * 41), chat("1" * 41)])
async def test_a_text_that_can_never_fit_is_refused_unread(prompt: ChatPrompt | TextPrompt) -> None:
    with pytest.raises(ContextTooLong, match="at most 40 bytes, found 41"):
        await codec().encode(prompt)


@pytest.mark.parametrize(("ids", "reason"), [([1000], ">= 0 and < 1000"), ([-1], "got -1"), ([1] * 11, "at most 10")])
async def test_ids_that_cannot_be_are_refused(ids: list[int], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        await codec().decode(ids)


async def test_a_tokenizer_that_fails_fails_its_caller_alone() -> None:
    with pytest.raises(RequestFailed, match="could not be read"):
        await codec().encode(TextPrompt(text="no number"))
    assert await codec().decode([1]) == "1 "


async def test_one_text_too_many_is_refused_and_there_is_room_again_afterwards() -> None:
    go = trio.Event()

    async def held(function: Callable[[], T]) -> T:
        await go.wait()
        return function()

    busy = codec(held)
    async with trio.open_nursery() as nursery:
        for _ in range(MAX_TEXTS):
            nursery.start_soon(busy.decode, [1])
        await wait_all_tasks_blocked()
        with pytest.raises(Overloaded):
            await busy.decode([1])
        go.set()
    assert await busy.decode([1]) == "1 "
