import random

import pytest

from headrace.server.bench.lengths import Fixed, Lognormal, Uniform, parse_length


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("128", Fixed(tokens=128)),
        ("64-256", Uniform(low=64, high=256)),
        ("lognormal:200,0.8", Lognormal(mean=200, sigma=0.8)),
        ("lognormal:200.5,1,2000", Lognormal(mean=200.5, sigma=1, high=2000)),
    ],
)
def test_a_length_is_written_in_one_of_three_ways(text, length):
    assert parse_length(text) == length


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "9-3", "0-3", "1.5", "lognormal:200", "lognormal:0,1", "lognormal:9,1,0"]
)
def test_other_lengths_are_refused_with_what_was_found(text):
    with pytest.raises(ValueError, match=f"at least 1 token; got {text}"):
        parse_length(text)


def test_a_uniform_length_takes_each_number_and_no_other():
    rng = random.Random(1)
    assert {Uniform(low=3, high=6).draw(rng) for _ in range(100)} == {3, 4, 5, 6}


def test_a_lognormal_length_has_the_mean_that_was_asked_for_and_a_long_tail():
    rng = random.Random(1)
    drawn = [Lognormal(mean=200, sigma=0.8).draw(rng) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(200, rel=0.02)
    assert sorted(drawn)[10_000] < 160
    assert max(drawn) > 1000


def test_a_lognormal_length_stays_within_its_limit():
    rng = random.Random(1)
    assert max(Lognormal(mean=200, sigma=2, high=300).draw(rng) for _ in range(1000)) == 300
