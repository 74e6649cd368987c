"""The model's chat template, a Jinja program that came with the weights, rendered as transformers does.

What a user wrote never becomes a control token: each one's text in a conversation is replaced by a stand-in before
the template sees it, and `Rendered.stand_ins` says what it was. Knows no token ids.

Source for behaviour: transformers 5, `apply_chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from ..hooks.errors import BadRequest, ConfigError, ModelError
from ..hooks.messages import ChatPrompt
from ..hooks.protocols import Rendered
from ..hooks.registry import plugin
from .template_language import Refusal, environment
from .tokenizer_json import read_json

if TYPE_CHECKING:
    from ..hooks.program import Checkpoint
    from ..hooks.protocols import Context, Register

headrace_api = 1


class TemplateOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the chat template."""

    file: str | None = None
    """A Jinja file to use instead of the checkpoint's template."""
    parse_special: bool = False
    """Let control tokens in messages count as such. Then users can forge turns."""


# ── stand-ins ─────────────────────────────────────────────────────────────────────────────────────────────────────

_PRIVATE_USE: Final = range(0x100000, 0x10FFFE)


def _strings(value: object) -> Iterator[str]:
    """Every string in a JSON-like *value*, keys included."""
    match value:
        case str():
            yield value
        case Mapping():
            yield from chain.from_iterable(map(_strings, chain(value.keys(), value.values())))
        case list() | tuple():
            yield from chain.from_iterable(map(_strings, value))


def _plain(value: object, text: Callable[[str], str]) -> Any:
    """A copy of a JSON-like *value*, made of dicts and lists, with each string sent through *text*."""
    match value:
        case str():
            return text(value)
        case Mapping():
            return {_plain(key, text): _plain(item, text) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, text) for item in value]
    return value


def _stand_ins(strings: list[str], control: re.Pattern[str], source: str) -> dict[str, str]:
    """Control token → a character that neither *strings* nor *source* have, for those found in *strings*."""
    found = dict.fromkeys(chain.from_iterable(map(control.findall, strings)))
    if not found:
        return {}
    taken = set(source).union(*strings)
    free = (character for character in map(chr, _PRIVATE_USE) if character not in taken)
    return dict(zip(found, free, strict=False))


# ── the template ──────────────────────────────────────────────────────────────────────────────────────────────────

_RESERVED: Final = frozenset(("messages", "tools", "add_generation_prompt"))
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_HELLO: Final = ChatPrompt(messages=({"role": "user", "content": "Hello"},))
# The space at its end shows whether the template trims what it is given.
_CONTINUE_HERE: Final = "\U0010fffe continue here "


class JinjaTemplate:
    """Slot `chat_template`.

    Args:
        templates: name → source: `default`, and `tool_use` where requests with tools have one of their own.
        names: further names for the template, such as `bos_token`.
        control_tokens: texts that do not count as such where users write them.

    Attributes:
        digest: of the templates, for the fingerprint of the stack.

    Raises:
        ModelError: a template does not compile, or fails on a plain message.
    """

    def __init__(
        self, templates: Mapping[str, str], *, names: Mapping[str, str], control_tokens: Iterable[str]
    ) -> None:
        env = environment()
        self._sources = dict(templates)
        self.digest = sha256(repr(sorted(self._sources.items())).encode()).hexdigest()[:16]
        self._templates = {name: _compile(env, name, source) for name, source in templates.items()}
        self._names = dict(names)
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        if "default" in self._templates:
            self._try_out()

    def render(self, prompt: ChatPrompt) -> Rendered:
        """See `protocols.ChatTemplate`."""
        _check(prompt)
        name = "tool_use" if prompt.tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise BadRequest(
                "the model must have a chat template to answer a chat, found none; use completions, or configure a "
                "template (option file of the chat template)"
            )
        try:
            return self._render(name, prompt)
        except BadRequest:
            raise
        except Refusal as error:
            raise BadRequest(str(error), param="messages") from error
        except Exception as error:  # A template is a program and fails in any way it likes.
            raise BadRequest(
                f"the model's chat template cannot render this conversation: {type(error).__name__}: {error}",
                param="messages",
            ) from error

    def _render(self, name: str, prompt: ChatPrompt) -> Rendered:
        strings = [*_strings((prompt.messages, prompt.tools, prompt.template_kwargs))]
        stand_ins = _stand_ins(strings, self._control, self._sources[name])

        def replaced(text: str) -> str:
            return self._control.sub(lambda match: stand_ins[match[0]], text) if stand_ins else text

        messages = [_message(_plain(message, replaced)) for message in prompt.messages]
        ending = messages[-1]["content"]
        if prompt.continue_final_message:
            messages[-1]["content"] = ending + _CONTINUE_HERE
        text = self._templates[name].render(
            {
                "documents": None,
                **self._names,
                **_plain(prompt.template_kwargs, replaced),
                "messages": messages,
                "tools": _plain(prompt.tools, replaced) or None,
                "add_generation_prompt": prompt.add_generation_prompt,
            }
        )
        if prompt.continue_final_message:
            text = _left_open(text, ending)
        return Rendered(text=text, stand_ins={stand_in: token for token, stand_in in stand_ins.items()})

    def _try_out(self) -> None:
        try:
            self._render("default", _HELLO)
        except Refusal:
            pass  # It may want a system message first, or the like.
        except Exception as error:
            raise ModelError(
                f"the chat template must render a plain user message, found {type(error).__name__}: {error}; "
                "configure another one (option file of the chat template)"
            ) from error


def _compile(env: ImmutableSandboxedEnvironment, name: str, source: str) -> Template:
    try:
        return env.from_string(source)
    except TemplateError as error:
        raise ModelError(
            f"the chat template ({name}) must be a Jinja template, found {type(error).__name__}: {error}; "
            "configure another one (option file of the chat template)"
        ) from error


def _check(prompt: ChatPrompt) -> None:
    if not prompt.messages:
        raise BadRequest("messages must have at least one message, found none", param="messages")
    if prompt.continue_final_message and prompt.add_generation_prompt:
        raise BadRequest(
            "continue_final_message must come with add_generation_prompt = false, for a message cannot be both open "
            "and followed by another; set one of them",
            param="continue_final_message",
        )
    if prompt.continue_final_message and not isinstance(prompt.messages[-1].get("content", ""), str):
        raise BadRequest("the message to continue must have text as its content", param="messages")
    if clash := sorted(_RESERVED & prompt.template_kwargs.keys()):
        raise BadRequest(f"further names for the template must not be {', '.join(clash)}; those are set already")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """*message* without what is null, with content, and with its reasoning under the names that templates use."""
    message = {"content": "", **{key: value for key, value in message.items() if value is not None}}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _left_open(text: str, ending: str) -> str:
    """*text* up to where its last message, which is *ending*, goes on."""
    end = text.rfind(_CONTINUE_HERE.strip())
    if end < 0 or ending.strip() not in text:
        raise BadRequest(
            "the final message cannot be continued, for the model's chat template changes or leaves out its text",
            param="continue_final_message",
        )
    return text[:end] if text.startswith(_CONTINUE_HERE, end) else text[:end].rstrip()


# ── from a checkpoint ─────────────────────────────────────────────────────────────────────────────────────────────


def find_templates(checkpoint: Checkpoint) -> dict[str, str]:
    """Name → source of all templates that came with the weights."""
    if checkpoint.artifact.kind == "gguf":
        key = "tokenizer.chat_template"
        named = {k.removeprefix(f"{key}."): v for k, v in checkpoint.metadata.items() if k.startswith(f"{key}.")}
        return {**named, "default": checkpoint.metadata[key]} if key in checkpoint.metadata else named
    folder = checkpoint.artifact.path
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        files["default"] = path
    if files:
        return {name: path.read_text("utf-8") for name, path in files.items()}
    return _in_json(folder / "chat_template.json") or _in_json(folder / "tokenizer_config.json")


def _in_json(path: Path) -> dict[str, str]:
    """What `chat_template` in *path* holds: one source, or a list of named ones."""
    match read_json(path).get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case [*entries] if all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in entries):
            return {entry["name"]: entry["template"] for entry in entries}
    raise ModelError(f"{path}: chat_template must be a template, or a list of objects with name and template")


def jinja(context: Context, options: TemplateOptions) -> JinjaTemplate:
    """The chat template that came with the weights, or the one that is configured."""
    checkpoint = context.checkpoint
    assert checkpoint is not None, "the checkpoint is opened first"
    if options.file is None:
        templates = find_templates(checkpoint)
    else:
        try:
            templates = {"default": Path(options.file).read_text("utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"file of the chat template must be a readable text file, found {error}") from error
    # A stranger's tokenizer need not tell its control tokens; then there is nothing to keep apart.
    specials = {} if options.parse_special else getattr(context.tokenizer, "specials", {})
    names = getattr(context.tokenizer, "named_specials", {})
    return JinjaTemplate(templates, names=names, control_tokens=specials)


@plugin
def register_chat_template(register: Register) -> None:
    register("jinja", jinja, config=TemplateOptions, doc="The model's own, as transformers renders it.")
