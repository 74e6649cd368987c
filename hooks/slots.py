"""The table of extension points: one row a slot. Hooks, documentation and checks are made from it.

Each row becomes a pluggy hook `register_<name>(register)`. A plugin implements the hooks of the slots it fills and
calls `register` (see `protocols.Register`) once for each component. Hooks are called at start-up only; which registered
component is used is the configuration's choice, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Final, Literal

import pluggy
from msgspec import Struct

from . import protocols

PROJECT: Final = "headrace"

Kind = Literal["one", "chain", "all"]
"""`one` is chosen by name, `chain` runs in the configuration's order, of `all` each enabled one is called."""
OnError = Literal["start", "request", "quarantine"]
"""Whom a component's failure ends: the start, the requests that use it, or only the component."""


class Slot(Struct, frozen=True, kw_only=True):
    """One extension point.

    Attributes:
        name: the hook is `register_<name>`.
        protocol: what a built component must do.
        opt_in: a plugin may fill it only if its distribution stands in `plugins.allow`, for it widens whom we trust.
        doc: one sentence.
    """

    name: str
    kind: Kind
    protocol: type
    on_error: OnError
    doc: str
    opt_in: bool = False


def _slot(name: str, kind: Kind, protocol: type, on_error: OnError, doc: str, *, opt_in: bool = False) -> Slot:
    return Slot(name=name, kind=kind, protocol=protocol, on_error=on_error, doc=doc, opt_in=opt_in)


_ROWS: Final = (
    # The model.
    _slot("model_source", "one", protocols.ModelSource, "start", "Finds a checkpoint, by the scheme of its URI."),
    _slot("weight_loader", "one", protocols.WeightLoader, "start", "Opens a checkpoint, by its kind of file."),
    _slot("architecture", "one", protocols.Architecture, "start", "Writes a family's Program from its checkpoint."),
    _slot("quantizer", "one", protocols.Quantizer, "start", "Keeps and multiplies weight matrices."),
    _slot("attention", "one", protocols.Attention, "start", "Reads and writes the paged KV cache."),
    _slot("executor", "one", protocols.Executor, "start", "Runs the steps of the model."),
    # Text.
    _slot("tokenizer", "one", protocols.Tokenizer, "start", "Turns text into the model's tokens, and back."),
    _slot("chat_template", "one", protocols.ChatTemplate, "request", "Renders a conversation as text."),
    _slot("tool_parser", "one", protocols.ToolParser, "request", "Finds tool calls in an answer; not used yet."),
    _slot("reasoning_parser", "one", protocols.ReasoningParser, "request", "Tells thinking from answer; not used yet."),
    # The step.
    _slot("scheduler_policy", "one", protocols.SchedulerPolicy, "start", "Orders who starts first and who yields."),
    _slot("logits_processor", "chain", protocols.LogitsProcessor, "request", "Changes logits before the draw."),
    _slot("sampler", "one", protocols.Sampler, "request", "Draws one token for each row of logits."),
    _slot("grammar", "one", protocols.Grammar, "request", "Compiles what answers conform to; not used yet."),
    _slot("stop", "chain", protocols.Stop, "request", "Ends answers by what they say."),
    # Around the line.
    _slot("admission", "chain", protocols.Admission, "request", "Decides whether a request may enter."),
    _slot("observer", "all", protocols.Observer, "quarantine", "Is told what happened."),
    _slot("auth", "one", protocols.Auth, "request", "Decides who asks.", opt_in=True),
    _slot("middleware", "chain", protocols.Middleware, "start", "Wraps the ASGI application.", opt_in=True),
    _slot("routes", "all", protocols.Routes, "start", "Adds routes under `/plugins/<plugin>/`.", opt_in=True),
    _slot("command", "all", protocols.Command, "start", "Adds a subcommand to `headrace`.", opt_in=True),
)

SLOTS: Final[dict[str, Slot]] = {slot.name: slot for slot in _ROWS}
"""Every slot by its name."""


def _spec(slot: Slot) -> Callable[..., None]:
    def hook(register: protocols.Register) -> None: ...

    hook.__name__ = hook.__qualname__ = f"register_{slot.name}"
    hook.__doc__ = f"{slot.doc}\n\nCall `register` for each component; see `protocols.{slot.protocol.__name__}`."
    return hook


def hookspecs(slots: Iterable[Slot] = _ROWS) -> Any:
    """The pluggy specifications of *slots*, as a namespace for `PluginManager.add_hookspecs`."""
    mark = pluggy.HookspecMarker(PROJECT)
    return SimpleNamespace(**{hook.__name__: mark(hook) for hook in map(_spec, slots)})
