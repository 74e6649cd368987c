import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.kv.plan import (
    UNASKED_BLOCKS,
    MemoryPlan,
    blocks_for,
    estimate_step_bytes,
    human,
    kv_bytes_per_token,
    plan,
    plan_blocks,
)
from headrace.hooks.errors import MemoryPlanError

MIB = 2**20
GIB = 2**30
PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=200)
SHAPES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "max_step_tokens": 512,
    "max_running": 64,
    "max_model_len": 8192,
}


def plan_of(**changes) -> MemoryPlan:
    """A plan with round numbers: blocks of 1 MiB, sequences of 64 blocks, 8 GiB left after weights and one step."""
    numbers = {
        "available_bytes": 10 * GIB,
        "weight_bytes": 1 * GIB,
        "step_bytes": 1 * GIB,
        "step_measured": True,
        "bytes_per_token": MIB // 16,
        "max_model_len": 1024,
        "max_running": 64,
    }
    return plan(**(numbers | changes))


@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "head_dim", "dtype_bytes", "expected"),
    [
        (30, 3, 64, 4, 46_080),  # SmolLM2-135M, float32
        (30, 3, 64, 2, 23_040),  # SmolLM2-135M, bfloat16
        (32, 8, 128, 2, 128 * 1024),  # Llama-3-8B
        (80, 8, 128, 2, 320 * 1024),  # Llama-3-70B
    ],
)
def test_a_token_takes_keys_and_values_of_the_kv_heads(num_layers, num_kv_heads, head_dim, dtype_bytes, expected):
    assert expected == kv_bytes_per_token(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes
    )


def test_a_last_block_that_is_not_full_is_still_a_block():
    assert [blocks_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_by_default_running_sequences_get_what_they_need_and_no_more():
    found = plan_of(max_running=8)
    assert (found.num_blocks, found.num_sequences_at_full_length, found.num_tokens) == (512, 8, 8192)


def test_by_default_half_of_what_is_left_is_the_most():
    found = plan_of()
    assert found.kv_bytes == 4 * GIB
    assert (found.num_blocks, found.num_sequences_at_full_length) == (4095, 63)


def test_by_default_the_headroom_stays_free():
    found = plan_of(weight_bytes=6 * GIB, share=1.0)
    assert found.kv_bytes == 1 * GIB


def test_a_device_of_our_own_is_used_up_to_its_headroom():
    assert plan_of(share=1.0, max_running=1000).kv_bytes == 6 * GIB


def test_the_null_block_is_paid_for_and_not_counted():
    found = plan_of(kv_memory=100 * MIB)
    assert (found.num_blocks, found.kv_bytes) == (99, 100 * MIB)


def test_an_explicit_number_of_blocks_is_taken_as_it_is():
    found = plan_of(kv_blocks=5000)
    assert (found.num_blocks, found.kv_bytes) == (5000, 5001 * MIB)


def test_an_explicit_size_may_use_up_the_headroom():
    assert plan_of(kv_memory=8 * GIB).num_blocks == 8191


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"available_bytes": 2 * GIB}, "weights and one step leave no room .* choose a smaller"),
        ({"kv_memory": 9 * GIB}, f"must fit into the 8.0 GiB .* set kv_memory to at most {8 * GIB} bytes"),
        ({"kv_blocks": 8192}, "or kv_blocks to at most 8191"),
        (
            {"kv_blocks": 63},
            f"and has 63; set max_model_len to at most 1008, .* kv_memory to {65 * MIB}",
        ),
        ({"kv_blocks": 0}, f"takes 64 blocks, and has 0; set kv_memory to {65 * MIB}"),
        ({"max_model_len": 2**20}, "and has 4,095; set max_model_len to at most 65520, or free memory"),
        ({"kv_memory": GIB, "kv_blocks": 9}, "not both"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_what_to_do(changes, message):
    with pytest.raises(MemoryPlanError, match=message):
        plan_of(**changes)


def test_a_refusal_shows_all_the_numbers():
    with pytest.raises(MemoryPlanError) as caught:
        plan_of(kv_blocks=1)
    for number in ("10.0 GiB", "1.0 GiB", "64.0 KiB a token", "1 blocks of 16 tokens", "0 sequences of 1,024"):
        assert number in str(caught.value)


@PROFILE
@given(
    available=st.integers(0, 2**36),
    weights=st.integers(0, 2**34),
    step=st.integers(0, 2**32),
    per_token=st.integers(1, 2**20),
    max_model_len=st.integers(1, 2**17),
    max_running=st.integers(1, 256),
    block_size=st.sampled_from([1, 16, 256]),
)
def test_a_default_plan_keeps_its_promises(available, weights, step, per_token, max_model_len, max_running, block_size):
    try:
        found = plan_of(
            available_bytes=available,
            weight_bytes=weights,
            step_bytes=step,
            bytes_per_token=per_token,
            max_model_len=max_model_len,
            max_running=max_running,
            block_size=block_size,
        )
    except MemoryPlanError:
        least = (blocks_for(max_model_len, block_size) + 1) * block_size * per_token
        assert least > min((available - weights - step) // 2, available - weights - step - int(0.2 * available))
        return
    assert found.kv_bytes <= (available - weights - step) / 2
    assert found.kv_bytes + weights + step <= available - int(0.2 * available)
    assert found.kv_bytes == (found.num_blocks + 1) * block_size * per_token
    assert 1 <= found.num_sequences_at_full_length <= max_running


def test_the_description_is_aligned_and_says_what_it_means():
    assert plan_of(step_measured=False, kv_memory=7 * GIB).describe().splitlines() == [
        "available memory        10.0 GiB",
        "weights                  1.0 GiB",
        "one step                 1.0 GiB  estimated, not measured",
        "KV cache                 7.0 GiB  7,167 blocks of 16 tokens, 64.0 KiB a token",
        "headroom                 1.0 GiB  10% of what is available; by default 20%",
        "room for          114,672 tokens  111 sequences of 1,024 tokens",
    ]


def test_a_measured_step_is_called_so():
    assert "1.0 GiB  measured" in plan_of().describe()


def test_logits_and_their_order_are_the_peak_of_a_small_model():
    assert estimate_step_bytes(**SHAPES) == 20 * 64 * 49152


def test_the_mlp_is_the_peak_of_a_small_vocabulary():
    shapes = SHAPES | {"vocab_size": 256, "max_model_len": 1024}
    assert estimate_step_bytes(**shapes) == 4 * 512 * (2 * 576 + 3 * 1536 + 576)


def test_one_gathered_sequence_is_the_peak_of_a_long_context():
    shapes = SHAPES | {"max_step_tokens": 1, "max_running": 1, "max_model_len": 2**20}
    attention = (3 * 9 + 4 * 3) * 64 + 2 * 2**20 * 3 * 64
    assert estimate_step_bytes(**shapes, dtype_bytes=2) == 2 * (2 * 576 + attention)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (46_080, "45.0 KiB"), (-3 * GIB, "-3.0 GiB"), (2**42, "4096.0 GiB")],
)
def test_sizes_are_written_for_people(size, text):
    assert human(size) == text


@pytest.mark.parametrize(
    ("changes", "num_blocks"),
    [
        ({}, 8 * 64),  # Eight sequences of full length.
        ({"held": 100}, 100),
        ({"held": 10_000}, 8 * 64),
        ({"kv_blocks": 77}, 77),
        ({"kv_blocks": 77, "held": 77}, 77),
        ({"max_running": 10**6}, UNASKED_BLOCKS),
        ({"max_model_len": 16 * 10**6}, 10**6),  # More than is asked for unasked, but one sequence must fit.
    ],
)
def test_somebody_elses_blocks_are_as_many_as_are_needed_or_said_or_held(changes, num_blocks):
    found = plan_blocks(**({"max_model_len": 1024, "max_running": 8, "block_size": 16} | changes))
    assert (found.num_blocks, found.settled) == (num_blocks, "held" in changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_blocks": 77, "held": 76}, "kv_blocks must be at most 76, what the executor holds, and is 77"),
        ({"kv_blocks": 63}, "takes 64 blocks, and has 63; set max_model_len to at most 1008"),
        ({"held": 63}, "takes 64 blocks, and has 63; set max_model_len to at most 1008"),
    ],
)
def test_too_few_of_somebody_elses_blocks_are_refused(changes, message):
    with pytest.raises(MemoryPlanError, match=message):
        plan_blocks(**({"max_model_len": 1024, "max_running": 8, "block_size": 16} | changes))
