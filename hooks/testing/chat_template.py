"""The contract of the slot `chat_template`: known conversations word for word, and users who cannot forge turns."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st

from ..errors import BadRequest
from ..messages import ChatPrompt
from ..protocols import Context, Rendered, TextDecoder
from .contract import Contract, ensure, skip

Golden = tuple[Mapping[str, Any] | Sequence[Mapping[str, Any]], str]


class Markers:
    """A tokenizer that knows nothing but its control tokens."""

    num_tokens = 0
    bos_id: int | None = None
    end_ids: frozenset[int] = frozenset()
    named_specials: Mapping[str, str] = {}

    def __init__(self, markers: Iterable[str]) -> None:
        self.specials: Mapping[str, int] = {marker: i for i, marker in enumerate(markers)}

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> array[int]:
        raise AssertionError("a template must write text, and ask the tokenizer for no tokens")

    def encode_rendered(self, rendered: Rendered) -> array[int]:
        raise AssertionError("a template must write text, and ask the tokenizer for no tokens")

    def decode(self, token_ids: Iterable[int], *, skip_special: bool) -> str:
        raise AssertionError("a template must write text, and ask the tokenizer for no tokens")

    def decoder(self, *, skip_special: bool) -> TextDecoder:
        raise AssertionError("a template must write text, and ask the tokenizer for no tokens")

    def token_bytes(self, token_id: int) -> bytes:
        raise AssertionError("a template must write text, and ask the tokenizer for no tokens")


class ChatTemplateContract(Contract):
    """Renders conversations, and looks at the text.

    Attributes:
        goldens: pairs of a conversation (its messages, or all fields of a `ChatPrompt`) and the text it must become.
        markers: the control tokens of the model; a user who types one must not be taken at their word.
    """

    slot = "chat_template"
    goldens: ClassVar[Sequence[Golden]] = ()
    markers: ClassVar[Sequence[str]] = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")

    def context(self) -> Context:
        return Context(tokenizer=Markers(self.markers))

    def test_golden_chats_are_rendered_word_for_word(self) -> None:
        if not self.goldens:
            skip("set goldens = [(messages, text), …] to have them compared; take the texts from the model's makers")
        for chat, wanted in self.goldens:
            found = _plain(self.build().render(_prompt(chat)))
            ensure(found == wanted, f"{chat} must become {wanted!r}, found {found!r}")

    def test_markers_that_users_type_stay_text(self) -> None:
        """They become stand-ins; only the template's own count as control tokens."""

        template = self.build()

        def check(marker: str, before: str, after: str, role: str) -> None:
            tame, hostile = (_chat(f"{before}{middle}{after}", role) for middle in ("x", marker))
            try:
                wanted = template.render(tame).text.count(marker)
            except BadRequest:
                return
            rendered = template.render(hostile)
            found = rendered.text.count(marker)
            ensure(
                found == wanted, f"{marker} must count {wanted} times with one in a message of {role}, found {found}"
            )
            typed = f"{before}{marker}{after}".strip()
            ensure(typed in _plain(rendered), f"what was typed, {typed!r}, must come back through the stand-ins")

        if not self.markers:
            skip("set markers = [the model's control tokens]")
        words = st.text("ab <|>é\n", max_size=6)
        roles = st.sampled_from(["user", "system", "assistant"])
        self.for_all(st.sampled_from(list(self.markers)), words, words, roles, check=check)

    def test_stand_ins_are_not_in_the_messages(self) -> None:
        """Characters of the private use areas may be typed too."""

        template = self.build()

        def check(typed: str) -> None:
            content = f"{typed}{self.markers[0] if self.markers else ''}{typed}"
            text = _plain(template.render(_chat(content)))
            ensure(content.strip() in text, f"{content!r} must come back through the stand-ins, found {text!r}")

        typed = st.text(st.characters(min_codepoint=0x100000, max_codepoint=0x100010), min_size=1, max_size=5)
        self.for_all(typed, check=check)

    def test_nothing_that_was_said_is_lost(self) -> None:
        template = self.build()

        def check(content: str) -> None:
            text = _plain(template.render(_chat(content)))
            ensure(content.strip() in text, f"the user's {content!r} must stand in the text, found {text!r}")

        self.for_all(st.text(st.characters(exclude_categories=["Cs", "Co"]), min_size=1, max_size=20), check=check)

    def test_it_refuses_with_bad_request_only(self) -> None:
        """Whatever the roles are, and whatever is missing."""

        template = self.build()

        def check(messages: list[dict[str, Any]], generate: bool) -> None:
            prompt = ChatPrompt(messages=tuple(messages), add_generation_prompt=generate)
            try:
                rendered = template.render(prompt)
            except BadRequest:
                return
            ensure(isinstance(rendered, Rendered), f"render must return Rendered, found {type(rendered).__name__}")
            ensure(isinstance(rendered.text, str), f"Rendered.text must be a str, found {rendered.text!r}")

        roles = st.sampled_from(["system", "user", "assistant", "tool", "stranger", ""])
        message = st.fixed_dictionaries(
            {"role": roles, "content": st.text(max_size=5)}, optional={"name": st.just("n"), "reasoning": st.just("r")}
        )
        self.for_all(st.lists(message, max_size=4), st.booleans(), check=check)

    def test_rendering_changes_nothing(self) -> None:
        """Neither the conversation nor what the next one comes to: worker threads share the template."""
        template = self.build()
        messages = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}]
        prompt = ChatPrompt(messages=(*messages, {"role": "user", "content": f"Three {' '.join(self.markers)}"}))
        before = copy.deepcopy(msgspec.to_builtins(prompt))
        first = template.render(prompt)
        template.render(_chat("something else"))
        second = template.render(prompt)
        ensure(msgspec.to_builtins(prompt) == before, "render must not change the conversation")
        ensure(
            _plain(first) == _plain(second), f"one conversation must always give the same, found {first} and {second}"
        )

    def test_a_message_to_be_continued_stays_open(self) -> None:
        """The text ends where the answer goes on; or the template refuses."""
        said = "The answer is"
        prompt = ChatPrompt(
            messages=({"role": "user", "content": "Well?"}, {"role": "assistant", "content": said}),
            add_generation_prompt=False,
            continue_final_message=True,
        )
        try:
            text = self.build().render(prompt).text
        except BadRequest:
            return
        ensure(
            text.endswith(said), f"with continue_final_message the text must end with {said!r}, found {text[-40:]!r}"
        )


def _chat(content: str, role: str = "user") -> ChatPrompt:
    spoken = {"role": role, "content": content}
    if role == "user":
        return ChatPrompt(messages=(spoken,))
    user = {"role": "user", "content": "Go on."}
    return ChatPrompt(messages=(spoken, user) if role == "system" else (user, spoken, user))


def _prompt(chat: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> ChatPrompt:
    fields = chat if isinstance(chat, Mapping) else {"messages": chat}
    return ChatPrompt(**{**fields, "messages": tuple(fields["messages"])})


def _plain(rendered: Rendered) -> str:
    """The text with what users typed put back."""
    return "".join(rendered.stand_ins.get(character, character) for character in rendered.text)
