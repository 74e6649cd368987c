"""What tests of built-in plugins share: one processor at a time on rows of its own, a tokenizer of single letters."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headrace.core.history import TokenHistory
from headrace.core.uniform import uniforms
from headrace.hooks.decode import Use
from headrace.hooks.messages import Admit
from headrace.hooks.params import SamplingParams
from headrace.hooks.protocols import Context, Rows, SamplingContext
from headrace.hooks.registry import Registry

REGISTRY = Registry.discover(environ={"HEADRACE_PLUGINS": "off"})


class Letters:
    """Token i is character i of *text*; a longer text is that of its letters."""

    bos_id = None
    end_ids = frozenset[int]()
    specials: Mapping[str, int] = {}
    named_specials: Mapping[str, str] = {}

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_tokens = len(text)

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> array:
        return array("i", (self.text.index(character) for character in text))

    def token_bytes(self, token_id: int) -> bytes:
        return self.text[token_id].encode()


def build(slot: str, name: str, *, vocab_size: int = 100, num_slots: int = 8, tokenizer: Any = None, **options: Any):
    """The built-in *name*, as the registry builds it."""
    context = Context(sampling=SamplingContext(vocab_size=vocab_size, num_slots=num_slots), tokenizer=tokenizer)
    return REGISTRY.build(slot, Use(use=name, options=options), context)


def admission(slot: int, prompt: Sequence[int] = (0,), output: Sequence[int] = (), **params: Any) -> Admit:
    return Admit(
        slot=slot,
        choice=0,
        params=SamplingParams(**params),
        chain=(),
        end_ids=frozenset(),
        prompt_ids=array("i", prompt),
        output_ids=array("i", output),
    )


def numbers(rows: int, position: int = 0) -> Callable[[str], torch.Tensor]:
    """Random numbers as the line makes them, of seeds 0, 1, …"""
    return lambda stream: torch.from_numpy(uniforms(range(rows), [0] * rows, [position] * rows, 1))


def apply(
    name: str,
    logits: torch.Tensor,
    params: Sequence[Mapping[str, Any]],
    *,
    texts: Sequence[Sequence[int]] | None = None,
    num_prompt: int = 1,
    tokenizer: Any = None,
    make_uniforms: Callable[[str], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Admit one sequence a row, with the row's parameters, and apply the processor to those that want it.

    Args:
        texts: the tokens of each row; the first *num_prompt* are its prompt.
    """
    num_rows, vocab_size = logits.shape
    bound = build("logits_processor", name, vocab_size=vocab_size, num_slots=num_rows, tokenizer=tokenizer)
    history = TokenHistory(num_rows)
    texts = texts or [[0]] * num_rows
    wanted = []
    for row, values in enumerate(params):
        op = admission(row, texts[row][:num_prompt], texts[row][num_prompt:])
        history.admit(row, op.prompt_ids, op.output_ids)
        if bound.component.admit(row, bound.params(**values), op):
            wanted.append(row)
    result = logits.clone()
    if wanted:
        rows = Rows(wanted, [len(texts[row]) - num_prompt for row in wanted], history, make_uniforms)
        result[wanted] = bound.component.apply(logits[wanted].clone(), rows)
    return result


def random_logits(vocab_size: int, num_rows: int, *, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def random_texts(vocab_size: int, num_rows: int, length: int, *, seed: int = 0) -> list[list[int]]:
    return torch.randint(vocab_size, (num_rows, length), generator=torch.Generator().manual_seed(seed)).tolist()


def finite(row: torch.Tensor) -> list[int]:
    return (row > -torch.inf).nonzero()[:, 0].tolist()
