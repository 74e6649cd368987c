"""Reading a checkpoint's metadata, where every value may be missing or of the wrong kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...hooks.errors import ModelError
from ...hooks.program import Checkpoint


def whole(checkpoint: Checkpoint, key: str, default: int | None = None, *, least: int = 1) -> int:
    """A size or a count: a whole number of at least *least*.

    Raises:
        ModelError: missing (or null) without a *default*, or something else.
    """
    value = checkpoint.metadata.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise wrong(checkpoint, key, f"a whole number of at least {least}", value)
    return value


def number(metadata: Mapping[str, Any], key: str, checkpoint: Checkpoint, default: float | None = None) -> float:
    """A finite number above 0 in *metadata*, which is the checkpoint's or a part of it. Raises like `whole`."""
    value = metadata.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise wrong(checkpoint, key, "a number above 0", value)
    return float(value)


def wrong(checkpoint: Checkpoint, key: str, expected: str, found: object) -> ModelError:
    """The error for a value of the metadata: which, where, what must hold, what was found."""
    shown = "nothing" if found is None else repr(found)
    if len(shown) > 200:
        shown = f"{shown[:200]}…"
    return ModelError(f"{checkpoint.artifact.path}: {key} must be {expected}, found {shown}")
