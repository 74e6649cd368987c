"""Processors that read what was written: no-repeat-ngram, bad-words and DRY."""

import pytest
import torch
import transformers

from headrace.hooks.errors import BadRequest
from headrace.plugins.dry import MAX_EXTRA
from tests.plugins.rig import Letters, admission, apply, build, finite, random_logits, random_texts

VOCAB_SIZE = 7
"""So few that almost everything comes again."""


@pytest.mark.parametrize("ngram_size", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("length", [1, 2, 3, 30])
def test_no_repeat_ngram_equals_transformers(ngram_size, length):
    logits, texts = random_logits(50, 4), random_texts(VOCAB_SIZE, 4, length)
    result = apply("no-repeat-ngram", logits, [{"ngram_size": ngram_size}] * 4, texts=texts)
    theirs = transformers.NoRepeatNGramLogitsProcessor(ngram_size)(torch.tensor(texts), logits.clone())
    assert torch.equal(result, theirs)


def test_no_repeat_ngram_looks_no_further_back_than_its_window():
    params = [{"ngram_size": 2}, {"ngram_size": 2, "window_size": 3}]
    result = apply("no-repeat-ngram", torch.zeros(2, 5), params, texts=[[1, 2, 3, 3, 1]] * 2, num_prompt=2)
    assert [finite(row) for row in result] == [[0, 1, 3, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("length", [1, 2, 12])
def test_bad_words_equal_transformers(length):
    logits, texts = random_logits(50, 6), random_texts(3, 6, length)
    bad = ((49,), (0, 1), (1, 2, 0), (2, 2), (0, 0, 0, 0))
    result = apply("bad-words", logits, [{"bad_words_ids": bad}] * 6, texts=texts)
    processor = transformers.NoBadWordsLogitsProcessor([list(ids) for ids in bad], eos_token_id=None)
    assert torch.equal(result, processor(torch.tensor(texts), logits.clone()))


def test_a_bad_word_is_found_across_prompt_and_answer_and_after_a_space():
    letters = Letters("abc ")
    texts = [[0], [0, 1], [3, 0, 1]]
    result = apply("bad-words", torch.zeros(3, 4), [{"bad_words": ("abc",)}] * 3, texts=texts, tokenizer=letters)
    assert [finite(row) for row in result] == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 3]]


def test_bad_words_that_cannot_be_are_refused_at_the_door():
    bound = build("logits_processor", "bad-words", vocab_size=10)
    with pytest.raises(BadRequest, match="token ids must be < 10, got 10"):
        bound.component.check(bound.params(bad_words_ids=((3, 10),)))
    with pytest.raises(BadRequest, match="no tokenizer"):
        bound.component.check(bound.params(bad_words=("a",)))


def dry(tokens, breakers, *, multiplier, base, allowed_length, vocab_size):
    """The penalties, worked out one place at a time as its author describes it."""
    penalties = torch.zeros(vocab_size, dtype=torch.float64)
    longest: dict[int, int] = {}
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and tokens[end - length] == tokens[-1 - length] and tokens[-1 - length] not in breakers:
            length += 1
        follower = tokens[end + 1]
        if length and follower not in breakers:
            longest[follower] = max(longest.get(follower, 0), length)
    for token, length in longest.items():
        if length >= allowed_length:
            penalties[token] = multiplier * base ** min(length - allowed_length, MAX_EXTRA)
    return penalties.float()


@pytest.mark.parametrize("allowed_length", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 60])
def test_dry_equals_its_formula(allowed_length, length):
    letters = Letters("abc:x")
    logits, texts = random_logits(5, 8), random_texts(4, 8, length)
    given = {"multiplier": 0.8, "base": 1.75, "allowed_length": allowed_length}
    result = apply("dry", logits, [given] * 8, texts=texts, tokenizer=letters)
    for row, text in enumerate(texts):
        assert torch.equal(result[row], logits[row] - dry(text, {3}, vocab_size=5, **given))


def test_dry_takes_the_breakers_and_the_window_of_each_request():
    letters = Letters("ab:")
    texts = [[0, 2, 1, 0, 2]] * 3
    params = [
        {"multiplier": 1.0},
        {"multiplier": 1.0, "sequence_breakers": ()},
        {"multiplier": 1.0, "sequence_breakers": (), "penalty_last_n": 2},
    ]
    result = apply("dry", torch.zeros(3, 3), params, texts=texts, tokenizer=letters)
    assert result.tolist() == [[0, 0, 0], [0, -1, 0], [0, 0, 0]]


def test_a_breaker_counts_wherever_it_stands_in_a_token_and_not_between_two():
    class Pieces(Letters):
        def token_bytes(self, token_id):
            return (b"a", b".\n", b".", b"\n")[token_id]

    bound = build("logits_processor", "dry", vocab_size=4, tokenizer=Pieces("abcd"))
    for breakers, tokens in (("\n", {1, 3}), (".\n", {1})):
        bound.component.admit(0, bound.params(multiplier=1.0, sequence_breakers=(breakers,)), admission(0))
        assert set(bound.component._pasts[0].breakers.nonzero()[0]) == tokens


def test_the_largest_dry_penalty_is_finite():
    texts = [[0] * 3 * MAX_EXTRA]
    result = apply("dry", torch.zeros(1, 3), [{"multiplier": 100, "base": 8, "allowed_length": 1}], texts=texts)
    assert result.isfinite().all()
    assert result[0, 0] < -1e20
