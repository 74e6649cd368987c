"""Penalties, temperature, truncation and the draw of a step's rows in one call, on the threads of the model.

What it says is what the built-in processors `repetition`, `presence-frequency`, `temperature`, `top-k`, `top-p` and
`min-p` and the sampler `categorical` say one after the other, in that order.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from . import abi

ROW: Final = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("uniform", np.float64),
        ("seed", np.uint64),
        ("position", np.uint64),
        ("logits", np.uint64),
        ("token", np.int32),
        ("top", np.float32),
        ("choice", np.uint32),
        ("num_prompt", np.int32),
        ("tokens", np.uint64),
        ("num_tokens", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
    ]
)
"""`abi.Draw`, for numpy."""
assert ROW.itemsize == ctypes.sizeof(abi.Draw)

Params = npt.NDArray[Any]
NO_PENALTY: Final = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
NEUTRAL: Final = {**NO_PENALTY, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Values that change nothing, in the order in which they are applied."""
BY_COUNTER: Final = -1.0
"""A number that is made of seed, choice and position."""
ONLY_TOP: Final = -1.0
"""A temperature: nothing is drawn."""


def slots(num_slots: int) -> Params:
    """Parameters by slot, all neutral."""
    rows = np.zeros(num_slots, ROW)
    for name, value in NEUTRAL.items():
        rows[name] = value
    rows["uniform"] = BY_COUNTER
    return rows


class Drawer:
    """Draws on the threads of *engine*, which must outlive it. Compute thread only."""

    def __init__(self, engine: int) -> None:
        self._engine = engine
        lib = abi.library()
        assert lib is not None
        self._draw = lib.hr_draw
        self._draw_slots = lib.hr_draw_slots

    def draw(self, logits: Tensor, params: Params, rows: list[int]) -> tuple[list[int], list[float]]:
        """Draw a token for each of *rows*.

        Args:
            logits: `[num_rows, vocab_size]` float32, rows contiguous; left as they are.
            params: `[len(rows)]`, from `slots`; written to. A temperature of 0 takes the likeliest. Where `uniform` is
                below 0, the number is that of `core.uniform` for seed, choice and position.

        Returns:
            Ids, -1 where the largest logit is not finite; and that largest logit, NaN where any is.
        """
        assert logits.stride(1) == 1
        params["logits"] = logits.data_ptr() + np.asarray(rows, np.uint64) * np.uint64(4 * logits.stride(0))
        self._draw(self._engine, params.ctypes.data, len(rows), logits.shape[1])
        return params["token"].tolist(), params["top"].tolist()

    def draw_slots(self, logits: Tensor, params: int, slots: array[int], positions: array[int]) -> array[int]:
        """Draw a token for each row of *logits*, which are left as they are; one call, and no numpy around it.

        Args:
            params: the address of an array from `slots`.
            slots: of each row: where its parameters are.
            positions: in its sequence, of each row.

        Returns:
            Ids, -1 where the largest logit is not finite.

        Raises:
            ValueError: there are not as many rows as slots and positions; compiled code would read what is not there.
        """
        num_rows, vocab_size = logits.shape
        if not num_rows == len(slots) == len(positions):
            raise ValueError(
                f"a row is needed for each of {len(slots)} slots, {len(positions)} positions, found {num_rows}"
            )
        row_stride, stride = logits.stride()
        assert stride == 1
        ids = array("i", bytes(4 * num_rows))
        self._draw_slots(
            self._engine,
            params,
            slots.buffer_info()[0],
            positions.buffer_info()[0],
            logits.data_ptr(),
            row_stride,
            num_rows,
            vocab_size,
            ids.buffer_info()[0],
        )
        return ids

    def tops(self, logits: Tensor) -> list[float]:
        """The largest of each row of `[num_rows, vocab_size]`, NaN where any is."""
        rows = slots(len(logits))
        rows["temperature"] = ONLY_TOP
        return self.draw(logits, rows, list(range(len(logits))))[1]
