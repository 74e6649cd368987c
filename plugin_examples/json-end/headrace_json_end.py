"""Stop watcher `json-end`: ends an answer when its first JSON object or array is complete.

For models that go on to explain what they have just said. It looks at characters alone: brackets that stand in a
string do not count, and what comes before the first bracket is passed over.
"""

from __future__ import annotations

from msgspec import Struct

import headrace

headrace_api = 1

CLOSES = {"{": "}", "[": "]"}


class Params(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    on: bool = False
    """Off unless a request, or the server's options, say so."""


class Watcher:
    def __init__(self):
        self.open = []  # The brackets that are missing, the outermost first.
        self.in_string = False
        self.escaped = False

    def feed(self, text, token_id):
        return any(self.ends(character) for character in text)

    def ends(self, character):
        if self.escaped:
            self.escaped = False
        elif self.in_string:
            self.escaped, self.in_string = character == "\\", character != '"'
        elif character == '"':
            self.in_string = bool(self.open)
        elif character in CLOSES:
            self.open.append(CLOSES[character])
        elif self.open and character == self.open[-1]:
            self.open.pop()
            return not self.open
        return False


class JsonEnd:
    def __init__(self, context, options):
        pass

    def watch(self, params):
        return Watcher() if params.on else None


@headrace.plugin
def register_stop(register):
    register("json-end", JsonEnd, config=Params, params=Params, doc="Ends an answer with its first JSON value.")
