import math

import pytest
import torch

from headrace.core.history import TokenHistory
from headrace.core.uniform import uniforms
from headrace.hooks.protocols import Context, Rows
from headrace.plugins import categorical

INF = math.inf
LARGEST = 1 - 2**-53


def sample(logits, numbers):
    rows = Rows(list(range(len(logits))), [0] * len(logits), TokenHistory(0))
    return (
        categorical.Categorical(Context(), None)
        .sample(logits, torch.as_tensor(numbers, dtype=torch.float64), rows)
        .tolist()
    )


@pytest.mark.parametrize("vocab_size", [2, 127, 128, 129, 1000])
def test_draws_have_the_distribution_of_the_softmax(vocab_size):
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    num_draws = 20_000
    numbers = uniforms([3] * num_draws, [0] * num_draws, range(num_draws))
    drawn = [token for part in torch.from_numpy(numbers).split(2000) for token in sample(logits.expand(2000, -1), part)]
    expected = logits[0].softmax(-1) * num_draws
    counts = torch.bincount(torch.tensor(drawn), minlength=vocab_size)
    # Rare tokens are counted together, for the test is not valid for expectations under 5.
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((observed - wanted) ** 2 / wanted.clamp(min=1e-9)).sum().item()
    freedom = int((wanted > 0).sum()) - 1
    # Four standard deviations of a chi-square; the numbers never change.
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_a_uniform_falls_where_the_running_sum_passes_it():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(6, -1)
    assert sample(logits, [0.0, 0.49, 0.51, 0.74, 0.76, 0.88]) == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("vocab_size", [1, 5, 128, 300, 1024])
@pytest.mark.parametrize("number", [0.0, 0.5, LARGEST])
def test_a_token_without_probability_is_never_drawn(vocab_size, number):
    for token_id in {0, vocab_size // 2, vocab_size - 1}:
        logits = torch.full((1, vocab_size), -INF)
        logits[0, token_id] = -1e4
        assert sample(logits, [number]) == [token_id]


def test_the_ends_of_the_unit_interval_draw_the_first_and_last_possible_token():
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    logits[:, :7] = logits[:, 990:] = -INF
    assert sample(logits, [0.0, LARGEST]) == [7, 989]


@pytest.mark.parametrize("vocab_size", [100, 1000, 4999])
def test_a_row_draws_the_same_in_any_company(vocab_size):
    logits = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(1))
    numbers = uniforms(range(40), [0] * 40, [0] * 40).tolist()
    alone = [sample(logits[row : row + 1], numbers[row : row + 1])[0] for row in range(40)]
    assert sample(logits, numbers) == alone
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2)).tolist()
    assert sample(logits[order], [numbers[row] for row in order]) == [alone[row] for row in order]


def test_the_sampler_registers_under_its_name():
    offered = {}
    categorical.register_sampler(lambda name, factory, doc: offered.update({name: factory}))
    assert offered == {"categorical": categorical.Categorical}
