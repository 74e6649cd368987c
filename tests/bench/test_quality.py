"""The arithmetic of the quality figures, held against torch's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.quality import contexts
from benchmarks.quality.divergence import ROWS_AT_ONCE, Divergence, kl_rows
from benchmarks.quality.kl import compare
from benchmarks.quality.llamacpp import Perplexity, read
from benchmarks.quality.report import table, write
from benchmarks.quality.simulate import Candidate, grouped, through
from torch import Tensor

PRINTED = """
kl_divergence: computing over 17 chunks, n_ctx=512, batch_size=2048, n_seq=4
====== KL divergence statistics ======
Mean    KLD:   0.003012 ±   0.000061
Maximum KLD:   0.412345
99.9%   KLD:   0.101010
99.0%   KLD:   0.021000
Same top p: 96.800 ± 0.270 %
"""


def logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 5


def torch_kl(reference: Tensor, other: Tensor) -> Tensor:
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("num_rows", [1, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 7])
def test_the_divergence_of_rows_is_that_of_torch(num_rows: int) -> None:
    reference, other = logits(num_rows, 301), logits(num_rows, 301, seed=1)
    torch.testing.assert_close(kl_rows(reference, other), torch_kl(reference, other), rtol=1e-12, atol=1e-12)


def test_the_divergence_is_from_the_reference_and_not_to_it() -> None:
    reference, other = logits(3, 50), logits(3, 50, seed=1)
    assert not torch.allclose(kl_rows(reference, other), kl_rows(other, reference))


def test_small_divergences_are_not_lost_in_rounding() -> None:
    reference = logits(4, 4096)
    other = reference + 1e-4 * logits(4, 4096, seed=1)
    torch.testing.assert_close(kl_rows(reference, other), torch_kl(reference, other), rtol=1e-6, atol=0)
    assert kl_rows(reference, other).max() < 1e-6


def test_a_token_that_the_reference_excludes_adds_nothing() -> None:
    reference, other = torch.tensor([[0.0, 1.0, -torch.inf]]), torch.tensor([[0.0, 1.0, -torch.inf]])
    assert kl_rows(reference, other).item() == 0


def test_a_summary_counts_positions_over_all_contexts() -> None:
    divergence, reference, other = Divergence(), logits(10, 99), logits(10, 99, seed=1)
    other[:7] = reference[:7] + 3  # The same distribution: logits have no zero of their own.
    divergence.add(reference[:4], other[:4])
    divergence.add(reference[4:], other[4:])
    summary, expected = divergence.summary(), torch_kl(reference, other)
    agree = (reference.argmax(-1) == other.argmax(-1)).double().mean().item()
    assert (summary.num_positions, summary.top1) == (10, agree)
    assert 0.7 <= agree < 1
    assert summary.mean_kl == pytest.approx(expected.mean().item())
    assert summary.p99_kl == pytest.approx(expected.quantile(0.99).item())
    assert summary.max_kl == pytest.approx(expected.max().item())


def test_nan_is_an_error_and_no_figure() -> None:
    broken = logits(2, 9)
    broken[1, 3] = torch.nan
    with pytest.raises(ValueError, match="found NaN"):
        Divergence().add(logits(2, 9), broken)
    with pytest.raises(ValueError, match="one shape"):
        Divergence().add(logits(2, 9), logits(2, 8))


class Letters:
    """A token for each character."""

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> list[int]:
        assert not parse_special
        assert not add_special
        return list(map(ord, text))


def test_a_text_is_cut_into_whole_contexts_that_do_not_overlap() -> None:
    text = "".join(chr(97 + i % 26) for i in range(3 * contexts.LENGTH - 1))
    found = contexts.contexts(text, Letters())  # type: ignore[arg-type]
    assert [len(token_ids) for token_ids in found] == [contexts.LENGTH] * 2
    assert "".join(map(chr, found[0] + found[1])) == text[: 2 * contexts.LENGTH]
    assert contexts.contexts(text, Letters(), 1) == found[:1]  # type: ignore[arg-type]


def test_the_second_half_of_a_context_is_scored_but_for_its_last_row() -> None:
    batch = contexts.batch(range(contexts.LENGTH), 16)
    assert batch.sample_rows.tolist() == list(range(256, 511))
    assert batch.seq_lens == [512]
    assert batch.block_tables[0].tolist() == list(range(1, 33))


def test_a_comparison_runs_every_context_of_every_text() -> None:
    texts = {"a": [[1], [2]], "b": [[3]]}
    found = compare(lambda ids: logits(5, 20, seed=ids[0]), lambda ids: logits(5, 20, seed=ids[0]), texts)
    assert {name: (s.num_positions, s.mean_kl, s.top1) for name, s in found.items()} == {
        "a": (10, 0, 1),
        "b": (5, 0, 1),
    }


@pytest.mark.parametrize("name", contexts.NAMES)
def test_a_text_is_small_whole_and_has_its_source_listed(name: str) -> None:
    raw = (contexts.TEXTS / f"{name}.txt").read_bytes()
    assert len(raw) <= 100_000
    text = raw.decode("utf-8")
    assert "\N{REPLACEMENT CHARACTER}" not in text
    assert "\r" not in text
    assert f"`{name}.txt`" in (contexts.TEXTS / "SOURCES.md").read_text("utf-8")


def test_groups_are_rounded_to_their_own_largest_value() -> None:
    x = torch.tensor([[1.0, 127.0, -2.4, 0.0, 0.0, 0.0, 0.001, -0.127]])
    by_4 = grouped(4)(x)
    torch.testing.assert_close(by_4, torch.tensor([[1.0, 127.0, -2.0, 0.0, 0.0, 0.0, 0.001, -0.127]]))
    assert grouped(None)(x)[0, 6:].tolist() == [0, 0]


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_rounding_errs_by_half_a_step_at_most(bits: int) -> None:
    x = logits(6, 96)
    step = x.reshape(6, 3, 32).abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    error = (grouped(32, bits)(x) - x).reshape(6, 3, 32).abs()
    assert (error <= step * 0.5001).all()
    assert error.max() > 0


def test_a_candidate_changes_only_what_it_names() -> None:
    x = logits(2, 64)
    candidate = Candidate(name="x", keys_values=through(torch.bfloat16))
    assert candidate.activations(x) is x
    torch.testing.assert_close(candidate.keys_values(x), x.bfloat16().float(), rtol=0, atol=0)


def test_what_llama_perplexity_prints_is_read() -> None:
    summary = read(PRINTED)
    assert summary.num_positions == 17 * 255
    assert (summary.mean_kl, summary.p99_kl, summary.max_kl) == (0.003012, 0.021, 0.412345)
    assert summary.top1 == pytest.approx(0.968)
    with pytest.raises(ValueError, match="Same top p"):
        read(PRINTED.replace("Same top", "top"))


def test_llama_perplexity_keeps_float32_and_is_compared_with_it(tmp_path: Path) -> None:
    program = tmp_path / "llama-perplexity"
    program.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\ncat <<'END'\n{PRINTED}\nEND\n")
    program.chmod(0o755)
    run = Perplexity(tmp_path, tmp_path, threads=2, num_contexts=None)
    run.keep(Path("f32.gguf"), Path("text.txt"))
    assert run.compare(Path("q4.gguf")) == read(PRINTED)
    kept, compared = (tmp_path / "calls").read_text().splitlines()
    base = f"--kl-divergence-base {tmp_path}/float32.logits"
    assert base in kept
    assert base in compared
    assert "-m f32.gguf -f text.txt -ctk f32 -ctv f32" in kept
    assert compared.endswith("-m q4.gguf --kl-divergence")


def test_a_program_that_fails_says_what_it_said(tmp_path: Path) -> None:
    program = tmp_path / "llama-perplexity"
    program.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"got 3:\nno such model"):
        Perplexity(tmp_path, tmp_path, threads=None, num_contexts=None).compare(Path("q4.gguf"))


def test_a_result_is_written_for_machines_and_shown_to_people(tmp_path: Path) -> None:
    found = {"int4": {"english": read(PRINTED)}}
    write(tmp_path / "new" / "x.json", found, settings=["model.quantizer=int4"])
    assert '"mean_kl": 0.003012' in (tmp_path / "new" / "x.json").read_text()
    assert table(found).splitlines()[-1] == "| int4 | 0.00301, 0.021, 96.8 % |"
