"""A Program, run by compiled code: one call a step, without the GIL.

`pack` says how matrices lie in memory, `lower` turns a Program into an array of C structs, `model` runs it, `abi` is
the border to the C++ in `src/`. Where the library was not built, `dialect()` is None and the reference runs everything.
"""

from __future__ import annotations

from .abi import dialect

__all__ = ["dialect"]
