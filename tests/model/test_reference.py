"""The interpreter: however a prompt is cut, batched or laid out in blocks, its logits are the same."""

import itertools

import msgspec
import pytest
import torch
from torch.nn import functional as F

from headrace.core.kernels.reference import ReferenceModel
from headrace.core.kv.store import KVStore
from headrace.hooks.program import Builder
from headrace.plugins.sdpa import Sdpa
from headrace.plugins.unquantized import Unquantized
from tests.model.tiny import batch

PROMPT = [(5 * i * i + i) % 99 for i in range(70)]
SHUFFLED = [9, 4, 31, 2, 17]


def whole(model, token_ids=PROMPT):
    """Logits of all tokens at once, from blocks that are used for nothing else."""
    return model.forward(batch((token_ids, 0, range(90, 100))))


def close(a, b):
    return a.shape == b.shape and float((a - b).abs().max()) < 1e-4


@pytest.mark.parametrize("cuts", [(1, 2, 3), (15,), (16,), (17,), (32, 48), (31, 33, 64, 69)])
def test_a_prompt_in_chunks_equals_the_whole(model, cuts):
    bounds = [0, *cuts, len(PROMPT)]

    parts = [model.forward(batch((PROMPT[start:stop], start, SHUFFLED))) for start, stop in itertools.pairwise(bounds)]

    assert close(torch.cat(parts), whole(model))


def test_a_prompt_token_by_token_equals_the_whole(model):
    parts = [model.forward(batch(([token_id], i, SHUFFLED))) for i, token_id in enumerate(PROMPT)]

    assert close(torch.cat(parts), whole(model))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_lengths_at_the_borders_of_blocks_equal_the_whole(model, length):
    table = SHUFFLED[: -(-length // 16)]

    logits = model.forward(batch((PROMPT[:length], 0, table)))

    assert close(logits, whole(model)[:length])


def test_a_batch_equals_each_alone(model):
    """Decodes and chunks of prefill together, of several lengths, their blocks interleaved."""
    tables = ([3, 5, 7], [4, 8, 6], [12, 10, 11], [1, 2, 13])
    model.forward(batch((PROMPT[:17], 0, tables[0])))
    model.forward(batch((PROMPT[3:35], 0, tables[1])))
    model.forward(batch((PROMPT[1:21], 0, tables[2])))

    logits = model.forward(
        batch(
            ([PROMPT[17]], 17, tables[0]),
            ([PROMPT[35]], 32, tables[1]),
            (PROMPT[21:40], 20, tables[2]),
            (PROMPT[2:20], 0, tables[3]),
        )
    )

    alone = [
        whole(model)[17:18],
        whole(model, PROMPT[3:36])[32:],
        whole(model, PROMPT[1:40])[20:],
        whole(model, PROMPT[2:20]),
    ]
    assert close(logits, torch.cat(alone))


def test_sequences_may_share_blocks(model):
    model.forward(batch((PROMPT[:32], 0, [5, 3])))

    logits = model.forward(batch(([1], 32, [5, 3, 8]), ([2], 32, [5, 3, 9]), (PROMPT[32:50], 32, [5, 3, 7, 6])))

    assert close(logits[0], whole(model, [*PROMPT[:32], 1])[-1])
    assert close(logits[1], whole(model, [*PROMPT[:32], 2])[-1])
    assert close(logits[2:], whole(model)[32:50])


def test_a_copied_block_goes_its_own_way(model):
    model.forward(batch((PROMPT[:20], 0, [5, 3])))

    model.copy_blocks([(3, 8)])
    model.forward(batch(([1], 20, [5, 8])))
    logits = model.forward(batch(([2], 20, [5, 3])))

    assert close(logits[0], whole(model, [*PROMPT[:20], 2])[-1])


def test_nan_in_unused_slots_reaches_no_logits(model):
    """The fixture's cache holds nothing but NaN; the table is longer than the sequence."""
    assert model.store.pool[1:].isnan().all()

    logits = model.forward(batch((PROMPT[:18], 0, [7, 2, 30, 31]), ([4], 0, [8, 40])))

    assert logits.isfinite().all()
    assert model.store.pool[2, :, :, :, 2:].isnan().all()


def test_only_sampled_rows_have_logits_and_may_repeat(model):
    step = batch((PROMPT[:10], 0, [1]))
    rows = torch.tensor([9, 3, 9])

    logits = model.forward(msgspec.structs.replace(step, sample_rows=rows))

    assert close(logits, whole(model)[rows])


def test_a_chunk_that_samples_nothing_has_no_logits(model):
    step = batch((PROMPT[:10], 0, [1]))
    rows = torch.empty(0, dtype=torch.int64)

    logits = model.forward(msgspec.structs.replace(step, sample_rows=rows))

    assert logits.shape == (0, model.vocab_size)


# ── operations that no family uses yet ────────────────────────────────────────────────────────────────────────────


def run(write, *, head_dim=2):
    """Logits of a Program of one layer whose attention does not matter, over an identity head; and its weights."""
    b = Builder(
        source=str,
        num_layers=1,
        hidden_size=4,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        vocab_size=12,
        max_positions=16,
    )
    x = b.embed()
    attended = b.linear(b.attend(*(b.linear(x, name, head_dim) for name in "qkv")), "o", 4)
    write(b, b.add(x, b.scale(attended, 0.0)))
    program = b.build()
    torch.manual_seed(3)
    weights = {name: torch.randn(weight.shape) for name, weight in program.weights.items()}
    linears = {name: Unquantized().linear(name, weights[name], None) for name in program.matrices}
    store = KVStore(num_blocks=2, num_layers=1, num_kv_heads=1, block_size=16, head_dim=head_dim)
    model = ReferenceModel(program, weights, linears, store, Sdpa())
    return model.forward(batch((list(range(6)), 0, [1]))), weights


def test_moe_sums_the_likeliest_experts():
    logits, weights = run(lambda b, x: b.head(b.moe(x, "moe", 5, num_experts=3, num_selected=2)))

    rows = []
    for x in weights["embed"][:6]:
        probabilities = (weights["moe.router"] @ x).softmax(-1)
        chosen = probabilities.argsort(descending=True)[:2].tolist()
        answers = {
            i: weights[f"moe.experts.{i}.down"]
            @ (F.silu(weights[f"moe.experts.{i}.gate"] @ x) * (weights[f"moe.experts.{i}.up"] @ x))
            for i in chosen
        }
        rows.append(sum(answers[i] * probabilities[i] for i in chosen) / sum(probabilities[i] for i in chosen))
    assert close(logits, torch.stack(rows) @ weights["head"].T)


def test_softcap_squashes_logits():
    logits, weights = run(lambda b, x: b.softcap(b.head(x), 2.0))

    assert close(logits, 2.0 * torch.tanh(weights["embed"][:6] @ weights["head"].T / 2.0))


def test_gelu_is_the_tanh_form():
    logits, weights = run(lambda b, x: b.head(b.gated(x, x, "gelu_tanh")))

    x = weights["embed"][:6]
    gelu = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    assert close(logits, gelu * x @ weights["head"].T)


def test_a_norm_over_heads_takes_each_by_itself():
    logits, weights = run(lambda b, x: b.head(b.norm(x, "norm", eps=0.0, width=2)))

    x = weights["embed"][:6].view(6, 2, 2)
    normed = x / x.square().mean(-1, keepdim=True).sqrt() * weights["norm"]
    assert close(logits, normed.reshape(6, 4) @ weights["head"].T)


def test_heads_are_rotated_by_their_positions():
    logits, weights = run(lambda b, x: b.head(b.rotate(x, (1.0,))))

    angle = torch.arange(6.0)[:, None]
    a, b = weights["embed"][:6, 0::2], weights["embed"][:6, 1::2]
    turned = torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).flatten(1)
    assert close(logits, turned @ weights["head"].T)


def test_features_beyond_the_frequencies_stay_as_they_are():
    logits, weights = run(lambda b, x: b.head(b.rotate(x, (1.0,))), head_dim=4)

    angle = torch.arange(6.0)
    a, b, *rest = weights["embed"][:6].T
    turned = torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), *rest), -1)
    assert close(logits, turned @ weights["head"].T)
