"""Lets a logits processor that was written for one request run here, where one call has the rows of many.

    register("no-fives", per_request(lambda params: no_fives, phase="mask"))

It costs a Python call a row and step, and the tokens so far are copied into a list for each: good for a start, and for
what cannot be batched. docs/plugins/migrating.md shows the way on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

from .messages import Admit
from .protocols import Context, History, Phase, Rows

if TYPE_CHECKING:
    from torch import Tensor

Style = Literal["vllm", "transformers"]
Call = Callable[..., object]
Make = Callable[[Any], Call | None]
Run = Callable[["Tensor", History, int], object]
_STYLES: Final = ("vllm", "transformers")


def per_request(make: Make, *, phase: Phase, style: Style = "vllm") -> Callable[[Context, Any], PerRequest]:
    """A factory, to be registered for the slot `logits_processor`.

    Args:
        make: called with the parameters of each request, an instance of the struct that was registered as `params`;
            gives what is then called once for each token of it, or None: these parameters change nothing. A request
            that was preempted is made anew, so what it remembers must follow from the tokens.
        phase: when it runs.
        style: how what *make* gives is called. `vllm`: `(output_ids, row) -> row`, or with three parameters
            `(prompt_ids, output_ids, row) -> row`; ids are lists, the row is `[vocab_size]` float32. `transformers`:
            `(input_ids, scores) -> scores`, `[1, num_tokens]` int64, prompt and output, and `[1, vocab_size]` float32.
            A row may be changed in place or given back anew.

    Raises:
        ValueError: no such style.
    """
    if style not in _STYLES:
        raise ValueError(f"style must be one of {', '.join(_STYLES)}, got {style!r}")

    def factory(context: Context, options: Any) -> PerRequest:
        return PerRequest(make, phase, _vllm_style if style == "vllm" else _transformers_style)

    return factory


class PerRequest:
    """Slot `logits_processor`: calls what belongs to each row, one row after the other.

    Attributes:
        speculative: False: what is called sees the tokens so far, and a guess is none of them yet.
    """

    lookahead = True
    speculative = False

    def __init__(self, make: Make, phase: Phase, style: Callable[[Call], Run]) -> None:
        self.phase = phase
        self._make = make
        self._style = style
        self._runs: dict[int, Run] = {}

    def admit(self, slot: int, params: Any, admitted: Admit) -> bool:
        """Make what this request's rows are given to."""
        self._runs.pop(slot, None)
        call = self._make(params)
        if call is None:
            return False
        self._runs[slot] = self._style(call)
        return True

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        """Each row through its own.

        Raises:
            ValueError: one gave back something else than its row.
        """
        import torch

        for index, slot in enumerate(rows.slots):
            row = logits[index]
            result = self._runs[slot](row, rows.history, slot)
            if not isinstance(result, torch.Tensor) or result.shape != row.shape:
                found = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                raise ValueError(f"a row {list(row.shape)} must come back for a row, found {found}")
            if result is not row:
                row.copy_(result)
        return logits


def _vllm_style(call: Call) -> Run:
    wants_prompt = _num_parameters(call) == 3

    def run(row: Tensor, history: History, slot: int) -> object:
        output_ids = history.output(slot).tolist()
        return call(history.prompt(slot).tolist(), output_ids, row) if wants_prompt else call(output_ids, row)

    return run


def _transformers_style(call: Call) -> Run:
    import torch

    def run(row: Tensor, history: History, slot: int) -> object:
        input_ids = torch.cat((history.prompt(slot), history.output(slot)))[None]
        scores = call(input_ids, row[None])
        # One row in, one row out; whatever else came back is told by its shape.
        return scores[0] if isinstance(scores, torch.Tensor) and scores.ndim == 2 and len(scores) == 1 else scores

    return run


def _num_parameters(call: Call) -> int:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # Some things written in C have none.
        return 2
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in kinds and each.default is inspect.Parameter.empty for each in parameters)
