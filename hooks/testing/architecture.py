"""The contract of the slot `architecture`: a Program that fits its checkpoint, uses all of it, and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...core.kernels import Batch
from ...core.kernels.reference import ReferenceModel
from ...core.model.load import check, load
from ..errors import ModelError
from ..program import Attend, Checkpoint, Program
from .checkpoints import FakeCheckpoint
from .contract import Contract, ensure, skip
from .plain import PlainAttention, PlainQuantizer

BLOCK_SIZE = 4
TOLERANCE = 1e-3


class ArchitectureContract(Contract):
    """Writes the Program of a tiny checkpoint with random weights, and runs it.

    Attributes:
        config: what the checkpoint's `config.json` says (or the keys of a GGUF file), with sizes of a few dozen.
        shapes: its tensors, name → shape.
        kind: `safetensors`, or `gguf`.
        unused: tensors that the family leaves out on purpose.
        optional: keys of *config* without which it must still work.
    """

    slot = "architecture"
    config: ClassVar[Mapping[str, Any]] = {}
    shapes: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    kind: ClassVar[str] = "safetensors"
    unused: ClassVar[Sequence[str]] = ()
    optional: ClassVar[Sequence[str]] = ()

    def checkpoint(self, config: Mapping[str, Any] | None = None) -> Checkpoint:
        """The tiny checkpoint. Override it to bring one of your own."""
        if not self.config or not self.shapes:
            skip("set config and shapes to those of a tiny checkpoint")
        return FakeCheckpoint(
            architecture=self.entry().name,
            metadata=self.config if config is None else config,
            shapes=self.shapes,
            kind=self.kind,
        )

    def model(self) -> ReferenceModel:
        """The tiny model, its KV cache full of NaN."""
        checkpoint = self.checkpoint()
        loaded = load(
            checkpoint.artifact,
            checkpoint,
            self.build(),
            PlainQuantizer(),
            PlainAttention(),
            num_blocks=40,
            block_size=BLOCK_SIZE,
        )
        assert isinstance(loaded, ReferenceModel)
        loaded.store.pool[1:] = torch.nan
        return loaded

    def test_it_has_the_name_it_is_registered_under(self) -> None:
        names, name = self.build().names, self.entry().name
        ensure(name in names, f"names must have {name!r}, as it is registered, found {names}")

    def test_its_program_fits_the_checkpoint(self) -> None:
        """Every weight is there, and of the right shape."""
        checkpoint = self.checkpoint()
        program = self.build().program(checkpoint)
        ensure(isinstance(program, Program), f"program must return a Program, found {type(program).__name__}")
        check(program, checkpoint)

    def test_all_of_the_checkpoint_is_used(self) -> None:
        """A tensor that is left out is a bias, a norm or a head that was forgotten."""
        checkpoint = self.checkpoint()
        weights = self.build().program(checkpoint).weights.values()
        left = sorted(set(checkpoint.shapes) - {weight.source for weight in weights} - set(self.unused))
        ensure(not left, f"all tensors must be used, or stand in unused; left: {', '.join(left)}")

    def test_writing_it_is_pure(self) -> None:
        """The same checkpoint gives the same Program, and no weights are read."""
        checkpoint = self.checkpoint()
        family = self.build()
        first, second = family.program(checkpoint), family.program(checkpoint)
        ensure(first == second, "one checkpoint must always give the same Program")
        sources = {weight.source for weight in first.weights.values()}
        read = sorted(set(getattr(checkpoint, "read", ())) & sources)
        ensure(not read, f"program must read metadata and shapes alone, it read {', '.join(read)}")

    def test_sizes_that_are_missing_or_wrong_are_model_errors(self) -> None:
        """For the operator, with what is wrong; never a KeyError."""
        self.checkpoint()
        for key, value in self.config.items():
            wrongs: Sequence[object] = (None, -1, 0, "x", [])
            for wrong in wrongs:
                config = {name: each for name, each in self.config.items() if name != key}
                if wrong is not None:
                    config[key] = wrong
                try:
                    self.build().program(self.checkpoint(config))
                except ModelError:
                    ensure(wrong is not None or key not in self.optional, f"it must do without {key} (optional)")
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
                    ensure(False, f"{key} = {wrong!r} (of {value!r}) must be used or raise ModelError, found {found}")

    def test_logits_are_finite_and_differ(self) -> None:
        model = self.model()
        logits = _forward(model, [([1, 2, 3, 4, 5], 0)])
        wanted = [5, model.program.vocab_size]
        ensure(list(logits.shape) == wanted, f"logits must be {wanted}, found {list(logits.shape)}")
        ensure(logits.isfinite().all(), "logits of random weights must be finite")
        ensure(logits.std(-1).min() > 1e-4, "logits must differ from token to token")

    def test_the_order_of_tokens_counts(self) -> None:
        """What was said before must reach the logits, and in which order."""
        if not self._attends():
            skip("the model has no attention")
        first = _forward(self.model(), [([1, 2, 3, 4], 0)])[-1]
        second = _forward(self.model(), [([2, 3, 1, 4], 0)])[-1]
        ensure((first - second).abs().max() > 1e-4, "the logits after 1 2 3 4 and after 2 3 1 4 must differ")

    def test_a_token_sees_those_before_it_and_no_other(self) -> None:
        first = _forward(self.model(), [([1, 2, 3, 4], 0)])
        second = _forward(self.model(), [([1, 2, 3, 9], 0)])
        error = (first[:3] - second[:3]).abs().max().item()
        ensure(error <= TOLERANCE, f"logits must not depend on later tokens, they differ by {error:.3g}")

    def test_a_sequence_is_the_same_in_company_and_in_parts(self) -> None:
        def check(ids: list[int], cut: int) -> None:
            model = self.model()
            size = model.program.vocab_size
            ids = [token_id % size for token_id in ids]
            whole = _forward(model, [(ids, 0)])
            other = _forward(self.model(), [(ids[::-1], 0), (ids, 0)])[len(ids) :]
            parts = self.model()
            cut = cut % (len(ids) - 1) + 1
            chunks = torch.cat([_forward(parts, [(ids[:cut], 0)]), _forward(parts, [(ids[cut:], cut)])])
            for name, found in (("in company", other), ("in parts", chunks)):
                error = (found - whole).abs().max().item()
                ensure(error <= TOLERANCE, f"logits must be the same {name}, they differ by {error:.3g}")

        ids = st.lists(st.integers(0, 1000), min_size=2, max_size=10)
        self.for_all(ids, st.integers(0, 20), check=check)

    def _attends(self) -> bool:
        return any(isinstance(op, Attend) for op in self.build().program(self.checkpoint()).ops)


def _forward(model: ReferenceModel, sequences: Sequence[tuple[list[int], int]]) -> Tensor:
    """Logits of each token of (token ids, position of the first); sequence i has blocks of its own."""
    counts = [len(ids) for ids, _ in sequences]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return model.forward(
        Batch(
            token_ids=torch.tensor([token_id for ids, _ in sequences for token_id in ids]),
            positions=torch.cat([torch.arange(start, start + len(ids)) for ids, start in sequences]),
            cu_tokens=starts,
            seq_lens=[start + len(ids) for ids, start in sequences],
            block_tables=[torch.arange(10) + 1 + 10 * i for i in range(len(sequences))],
            block_size=BLOCK_SIZE,
            sample_rows=torch.arange(starts[-1]),
            num_decodes=0,
        )
    )
