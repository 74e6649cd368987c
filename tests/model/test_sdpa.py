"""Attention `sdpa` against a plain loop over queries and keys."""

import math

import pytest
import torch

from headrace.core.kernels import Batch
from headrace.plugins.sdpa import Sdpa

HEAD_DIM, BLOCK_SIZE = 8, 4


def plain(query, keys, values, position, *, scale, window, softcap):
    """One query head at *position* over all keys of its KV head, by the definition."""
    first = 0 if window is None else max(0, position - window + 1)
    scores = [float(query @ keys[i]) * scale for i in range(first, position + 1)]
    if softcap is not None:
        scores = [softcap * math.tanh(score / softcap) for score in scores]
    weights = [math.exp(score - max(scores)) for score in scores]
    return sum(w * values[i] for w, i in zip(weights, range(first, position + 1), strict=True)) / sum(weights)


def attend_in_chunks(query, key, value, cuts, *, scale=0.3, window=None, softcap=None):
    """One sequence, its tokens in shuffled blocks of one layer of a pool full of NaN."""
    num_tokens, num_kv_heads, _ = key.shape
    kv = torch.full((20, 3, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM), torch.nan)[:, 1]
    table = torch.randperm(19)[: -(-num_tokens // BLOCK_SIZE)] + 1
    sdpa, parts = Sdpa(), []
    for start, stop in zip([0, *cuts], [*cuts, num_tokens], strict=True):
        plan = sdpa.plan(
            Batch(
                token_ids=torch.zeros(stop - start, dtype=torch.int64),
                positions=torch.arange(start, stop),
                cu_tokens=[0, stop - start],
                seq_lens=[stop],
                block_tables=[table],
                block_size=BLOCK_SIZE,
                sample_rows=torch.tensor([0]),
                num_decodes=0,
            )
        )
        sdpa.write(kv, key[start:stop], value[start:stop], plan)
        parts.append(sdpa.attend(query[start:stop], kv, plan, scale=scale, window=window, softcap=softcap))
    return torch.cat(parts)


@pytest.mark.parametrize("cuts", [(), (1, 2), (4, 8), (7, 8, 9)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (1, None), (50, None), (None, 0.7), (5, 0.7)])
@pytest.mark.parametrize("num_heads", [2, 6])
def test_each_row_attends_to_what_its_definition_says(cuts, window, softcap, num_heads):
    torch.manual_seed(5)
    num_tokens, num_kv_heads = 11, 2
    query = torch.randn(num_tokens, num_heads, HEAD_DIM) * 2
    key, value = torch.randn(2, num_tokens, num_kv_heads, HEAD_DIM)

    found = attend_in_chunks(query, key, value, cuts, window=window, softcap=softcap)

    for position in range(num_tokens):
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            wanted = plain(
                query[position, head],
                key[:, kv_head],
                value[:, kv_head],
                position,
                scale=0.3,
                window=window,
                softcap=softcap,
            )
            assert torch.allclose(found[position, head], wanted, atol=1e-5)


def test_heads_that_do_not_fit_their_kv_heads_are_refused_with_the_reason():
    sizes = {"head_dim": 8, "window": None, "softcap": None, "device": "cpu"}

    assert Sdpa().supports(num_heads=9, num_kv_heads=3, **sizes) is None
    assert "9" in Sdpa().supports(num_heads=9, num_kv_heads=2, **sizes)
