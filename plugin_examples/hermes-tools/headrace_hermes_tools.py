"""Tool parser `hermes`: a call is JSON between `<tool_call>` and `</tool_call>`, as Hermes and Qwen write it.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Ulm"}}
    </tool_call>

Text around calls is content; so is a block that is no call, as it stands. Runs on the loop: a chunk costs its length.

Source: NousResearch, Hermes-Function-Calling, README ("Prompt Format for Function Calling").
"""

from __future__ import annotations

import json
from uuid import uuid4

import headrace

headrace_api = 1

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Stream:
    """One answer, split into text and calls. However the text is cut into chunks, what comes of it is the same."""

    def __init__(self):
        self.held = ""  # What may be the beginning of a call, or one that is not complete.
        self.inside = False
        self.seen = 0  # Characters of a call that were searched for its end before.
        self.num_calls = 0

    def feed(self, text):
        self.held += text
        deltas = []
        while (delta := self.take()) is not None:
            deltas.append(delta)
        return deltas

    def finish(self):
        """A call that is not complete is text."""
        rest, self.held = self.held, ""
        return [{"content": rest}] if rest else []

    def take(self):
        """The next delta, or None when there is not enough for one."""
        if not self.inside:
            start = self.held.find(OPEN)
            cut = len(self.held) - begun(self.held) if start < 0 else start
            self.inside, self.seen = start >= 0, 0
            content, self.held = self.held[:cut], self.held[cut:]
            return {"content": content} if content else self.take() if self.inside else None
        end = self.held.find(CLOSE, max(self.seen, len(OPEN)))
        if end < 0:
            # The end may have begun already.
            self.seen = len(self.held) - len(CLOSE) + 1
            return None
        self.inside = False
        block, self.held = self.held[: end + len(CLOSE)], self.held[end + len(CLOSE) :]
        return self.call(block) or {"content": block}

    def call(self, block):
        try:
            call = json.loads(block.removeprefix(OPEN).removesuffix(CLOSE))
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        self.num_calls += 1
        made = {"index": self.num_calls - 1, "id": f"call_{uuid4().hex}", "type": "function", "function": function}
        return {"tool_calls": [made]}


def begun(text):
    """How many characters at the end of *text* may be the beginning of a call."""
    return next(size for size in range(min(len(OPEN) - 1, len(text)), -1, -1) if text.endswith(OPEN[:size]))


class Hermes:
    def __init__(self, context, options):
        pass

    def stream(self):
        return Stream()


@headrace.plugin
def register_tool_parser(register):
    register("hermes", Hermes, doc="JSON between <tool_call> and </tool_call>.")
