"""The page docs/plugins/slots.md, made from the table of slots, their protocols and what fills them.

python -m headrace.hooks.slots_page > docs/plugins/slots.md
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from .choices import keys
from .components import Component
from .config_text import settings
from .decode import describe
from .discovery import builtin
from .registry import Registry
from .slots import SLOTS, Slot

Facts = tuple[str, str, str]
RUNS: Final[dict[str, Facts]] = {
    "model_source": ("when the engine starts", "worker", "seconds, with progress"),
    "weight_loader": ("when the engine starts", "worker", "seconds"),
    "architecture": ("when the engine starts", "worker", "a second"),
    "quantizer": ("for each weight when the engine starts, then in every step", "worker, then compute", "none"),
    "attention": ("once a step, and twice a layer", "compute", "none"),
    "executor": ("once a step", "loop; `result` awaits", "50 µs to submit"),
    "tokenizer": (
        "`encode` and `decode` once a request, decoders once a token",
        "worker; decoders loop",
        "10 µs a token",
    ),
    "chat_template": ("once a request", "worker", "1 ms"),
    "tool_parser": ("once for each piece of an answer", "loop", "50 µs a piece"),
    "reasoning_parser": ("once for each piece of an answer", "loop", "50 µs a piece"),
    "scheduler_policy": (
        "when a sequence begins to wait, and when memory is short",
        "loop",
        "50 µs and 1 µs a candidate",
    ),
    "logits_processor": ("once a step, with the rows of all requests that use it", "compute", "100 µs at 64 rows"),
    "sampler": ("once a step, with all rows that are not greedy", "compute", "150 µs at 64 rows"),
    "grammar": (
        "`compile` once a request, a matcher once a token",
        "worker, then compute",
        "2 s to compile, 50 µs a row",
    ),
    "stop": ("once a token", "loop", "20 µs a token"),
    "admission": ("once a request, at the door", "loop; awaits, ten seconds at most", "0.2 ms of its own work"),
    "observer": ("at each event", "loop", "20 µs an event"),
    "auth": ("once a request", "loop; awaits, ten seconds at most", "2 ms of its own work"),
    "middleware": ("once when the server starts; what it returns, for each request", "loop; awaits", "none"),
    "routes": ("once when the server starts; its handlers, for each request", "loop; awaits", "none"),
    "command": ("when somebody runs the command", "its own process", "none"),
}
"""Slot → (when it runs, on which thread, and whether it may await, its budget)."""

_FAILS: Final = {
    "start": "Stops the start, with plugin, distribution and reason.",
    "request": "Ends the requests that use it, with an error that names the plugin; the others go on unchanged.",
    "quarantine": "Is counted and logged; after `plugins.quarantine_after` failures in a row it is called no more.",
}
_FAILS_OTHERWISE: Final = {
    "scheduler_policy": "At start: stops it. While serving: `fcfs` decides in its place, and the failure is counted.",
    "auth": "Refuses the request, with status 503.",
    "admission": "Refuses the request, with status 503; `Overloaded` is 429.",
    "executor": "At start: stops it. While serving: ends the engine, and every live request is told.",
    "attention": "At start: stops it. While serving: ends the engine, and every live request is told.",
    "quantizer": "At start: stops it. While serving: ends the engine, and every live request is told.",
    "middleware": "At start: stops it. While serving: the request gets status 500.",
    "routes": "At start: stops it. While serving: the request gets status 500.",
    "command": "The command ends; nothing else knows of it.",
}
_CHOSEN_BY: Final = {
    "model_source": "the scheme of `model.uri`: `hf:NAME` asks the source `hf`",
    "weight_loader": "the kind of file that the model source found",
    "architecture": "the checkpoint; `model.architecture` goes over it",
    "command": "being installed, with its distribution in `plugins.allow`",
}
_ASKED: Final = {
    "logits_processor": '`"headrace": {"logits": {"NAME": {…}}}`',
    "sampler": '`"headrace": {"sampler": {…}}`',
    "stop": '`"headrace": {"stop": {"NAME": {…}}}`',
    "scheduler_policy": '`"headrace": {"priority": …}`',
    "admission": '`"headrace": {"priority": …}`',
}

_HEAD: Final = """# Slots

What can be replaced by a plugin, made from the table in [hooks/slots.py](../../hooks/slots.py) and the protocols in
[hooks/protocols.py](../../hooks/protocols.py). [tutorial.md](tutorial.md) shows how to fill one; `headrace plugins new
NAME --slot SLOT` writes a project that does.

A plugin's module has one hook for each slot it fills, `register_SLOT(register)`, marked with `@headrace.plugin`. The
hook calls `register(name, factory, config=…, params=…, doc=…)` for each component. `factory(context, options)` runs
when the configuration names the component, and not before. *config* is a `msgspec.Struct` of what the operator sets,
under `options`; *params* is one of what a request may set, with a default for every field. Where both are the same
struct, the operator's values are the defaults of requests; a field that stands in `sampling.locked` no request may set.

Threads: the *loop* is Trio's, and nothing on it may block for longer than a millisecond or touch tensors. *compute* is
the one thread that owns the model; nothing on it may wait or touch Trio. A *worker* is a thread of its own for the
call, and may block. Only what says so may await. Budgets are aims, not limits: `headrace plugins bench` measures, and a
call that takes longer than `plugins.slow_call_s` counts as a failure.

Kinds: of *one*, a single component is chosen by name; a *chain* runs in the order of the configuration; of *all*, each
that is enabled is called. *Opt-in* slots are filled only by distributions in `plugins.allow`, for they widen whom we
trust.
"""


def page(registry: Registry) -> str:
    """The page, whole.

    Args:
        registry: what is installed; only the built-ins are shown.
    """
    lines = [_HEAD, "| slot | kind | what it does | thread | budget |", "|---|---|---|---|---|"]
    for slot in SLOTS.values():
        _, thread, budget = RUNS[slot.name]
        kind = f"{slot.kind}, opt-in" if slot.opt_in else slot.kind
        lines.append(f"| [`{slot.name}`](#{slot.name}) | {kind} | {slot.doc} | {thread} | {budget} |")
    for slot in SLOTS.values():
        lines += ["", *_section(slot, registry)]
    return "\n".join(lines) + "\n"


def _section(slot: Slot, registry: Registry) -> Iterator[str]:
    when, thread, budget = RUNS[slot.name]
    text = re.sub(r"^Slot `\w+`(: |, )", "", inspect.getdoc(slot.protocol) or "")
    yield f"## {slot.name}"
    yield ""
    yield text[:1].upper() + text[1:]
    yield ""
    yield f"- Runs: {when}. Thread: {thread}. Budget: {budget}."
    yield f"- When it fails: {_FAILS_OTHERWISE.get(slot.name) or _FAILS[slot.on_error]}"
    yield f"- Chosen by: {_chosen_by(slot)}."
    yield f"- A request may set: {_ASKED.get(slot.name, 'nothing')}."
    yield ""
    yield f"```python\n{_outline(slot.protocol)}\n```"
    offered = sorted((each for each in registry.offered(slot.name) if builtin(each.plugin)), key=lambda each: each.name)
    if offered:
        yield ""
        yield "| built in | | options | parameters of a request |"
        yield "|---|---|---|---|"
        yield from map(_component, offered)


def _chosen_by(slot: Slot) -> str:
    if slot.name in _CHOSEN_BY:
        return _CHOSEN_BY[slot.name]
    known = {setting.key for setting in settings()}
    found = [f"`{key}`" for key, name in keys().items() if name == slot.name and key in known]
    return " and ".join(found) or "nothing yet: nothing in the line asks for it"


def _outline(protocol: type) -> str:
    """What *protocol* asks for, as source without bodies."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(protocol))).body
    assert isinstance(tree, ast.ClassDef)
    tree.body = [_bare(node) for node in tree.body[_is_text(tree.body[0]) :]]
    return ast.unparse(tree)


def _bare(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node.body = [*filter(_is_text, node.body[:1]), ast.Expr(ast.Constant(...))]
    return node


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _component(component: Component) -> str:
    same = component.params is not None and component.params is component.config
    asked = "the same" if same else _fields(component.params)
    cells = (f"`{component.name}`", component.doc, _fields(component.config), asked)
    return f"| {' | '.join(cells)} |"


def _fields(kind: type[Struct] | None) -> str:
    fields = msgspec.structs.fields(kind) if kind else ()
    return "; ".join(f"`{field.encode_name}`: {describe(field.type)}{_default(field)}" for field in fields)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    value: Any = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return " (unset)" if value is None else f" (`{msgspec.json.encode(value, enc_hook=repr).decode()}`)"


if __name__ == "__main__":
    print(page(Registry.discover(environ={"HEADRACE_PLUGINS": "off"})), end="")
