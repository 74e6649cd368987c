"""The messages of a chat body, one struct a role, and how templates see them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


Content = str | list[TextPart]


class Function(Struct, frozen=True, omit_defaults=True):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct, frozen=True):
    function: Function
    id: str | None = None
    type: str | None = None


class _Message(Struct, frozen=True, kw_only=True, tag_field="role"):
    """Content may be a string, a list of text parts, null or missing; templates get a string."""

    content: Content | None = None
    name: str | None = None

    def rendered(self) -> dict[str, Any]:
        """The message as the chat template sees it."""
        message: dict[str, Any] = {"role": self.role, "content": _text(self.content)}
        if self.name is not None:
            message["name"] = self.name
        return message

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)


class System(_Message, frozen=True, tag="system"):
    pass


class Developer(_Message, frozen=True, tag="developer"):
    """OpenAI's newer word for *system*, which templates do not know."""

    @property
    def role(self) -> str:
        return "system"


class User(_Message, frozen=True, tag="user"):
    pass


class Assistant(_Message, frozen=True, kw_only=True, tag="assistant"):
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None

    def rendered(self) -> dict[str, Any]:
        message = super().rendered()
        if self.tool_calls:
            message["tool_calls"] = [_call(call) for call in self.tool_calls]
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


class Tool(_Message, frozen=True, kw_only=True, tag="tool"):
    tool_call_id: str | None = None

    def rendered(self) -> dict[str, Any]:
        message = super().rendered()
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class FunctionResult(_Message, frozen=True, tag="function"):
    """The predecessor of *tool*, kept by OpenAI for old clients."""


Message = System | Developer | User | Assistant | Tool | FunctionResult


def _text(content: Content | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        # Templates print the object as JSON themselves and would quote a string twice. What is no object stays.
        try:
            arguments = msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type or "function", "function": function}
