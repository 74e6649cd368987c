import json
from itertools import combinations

import pytest

from headrace.hooks.errors import StartError
from headrace.server.bench.dataset import Entry, read
from headrace.server.bench.gauge import MAX_COUNTS, WORDS, Gauge, single_tokens
from headrace.server.bench.lengths import Fixed, Uniform
from headrace.server.bench.prompts import Prompts
from headrace.server.bench.settings import Load


def prompts(run_id="one", *, gauge=Gauge(), entries=None, **fields):  # noqa: B008
    return Prompts(Load(url="", run_id=run_id, **fields), WORDS, gauge, entries)


def texts(of: Prompts, number: int = 50) -> list[str]:
    asked = [of(index) for index in range(number)]
    return [f"{prompt.head} {prompt.text}" for prompt in asked]


def shared_words(one: str, other: str) -> int:
    pairs = zip(one.split(), other.split(), strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), 1000)


def test_no_two_prompts_of_two_runs_begin_with_the_same_few_words():
    asked = texts(prompts("one")) + texts(prompts("two"))
    assert max(shared_words(*pair) for pair in combinations(asked, 2)) < 4


def test_a_runs_id_gives_the_same_prompts_again():
    assert texts(prompts("one")) == texts(prompts("one"))


def test_a_prompt_has_as_many_words_as_tokens_are_wanted_beside_its_template():
    of = prompts(gauge=Gauge(tokens_per_word=1.25, overhead=28), prompt_tokens=Fixed(tokens=128))
    assert {len(text.split()) for text in texts(of)} == {80}


def test_two_runs_with_the_same_seed_have_the_same_lengths():
    fields = {"prompt_tokens": Uniform(low=10, high=90), "output_tokens": Uniform(low=1, high=50)}
    one, two, other = prompts("one", **fields), prompts("two", **fields), prompts("one", seed=1, **fields)
    lengths = [[(len(of(i).text.split()), of(i).num_output_tokens) for i in range(20)] for of in (one, two, other)]
    assert lengths[0] == lengths[1] != lengths[2]


def test_shared_prefixes_take_turns_in_front_of_prompts_that_differ():
    asked = texts(prompts(shared_prefix_tokens=40, num_prefixes=2), 4)
    shared = [[shared_words(one, other) for other in asked] for one in asked]
    assert 40 <= shared[0][2] < 44
    assert 40 <= shared[1][3] < 44
    assert shared[0][1] < 4


def test_warming_a_prefix_asks_for_it_and_for_nothing_that_a_request_has():
    of = prompts(shared_prefix_tokens=40)
    warm = of.prefix(0)
    assert warm.head == of(0).head
    assert shared_words(warm.text, of(0).text) < 4


def test_an_entry_of_a_data_set_is_asked_behind_words_of_its_own():
    of = prompts(entries=[Entry(prompt="What is it?", num_output_tokens=7)])
    first, second = of(0), of(1)
    assert first.text == second.text == "What is it?"
    assert first.head != second.head
    assert first.num_output_tokens == 7


def test_a_length_of_answers_that_is_asked_for_wins_over_the_data_sets():
    of = prompts(entries=[Entry(prompt="What?", num_output_tokens=7)], output_tokens=Fixed(tokens=3))
    assert of(0).num_output_tokens == 3


# ── gauging ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_only_words_of_one_token_are_kept():
    async def count(text: str) -> int:
        return sum(2 if word in ("answer", "boat") else 1 for word in text.split())

    kept = await single_tokens(count, WORDS)
    assert set(WORDS) - set(kept) == {"answer", "boat"}


async def test_a_server_where_most_words_are_several_tokens_is_not_asked_without_end():
    asked = []

    async def count(text: str) -> int:
        asked.append(text)
        return 2 * len(text.split())

    assert await single_tokens(count, WORDS) == ()
    assert len(asked) == MAX_COUNTS


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def conversation(*turns: tuple[str, str]) -> dict:
    return {"id": "x", "conversations": [{"from": speaker, "value": value} for speaker, value in turns]}


@pytest.fixture
def file(tmp_path):
    def write(*conversations: dict):
        path = tmp_path / "set.json"
        path.write_text(json.dumps(conversations))
        return path

    return write


def test_the_first_thing_a_human_says_is_a_prompt_and_its_answer_gives_the_length(file):
    path = file(conversation(("system", "be nice"), ("human", "Hello?"), ("gpt", "x" * 40), ("human", "Bye")))
    assert read(path, seed=0, max_model_len=None) == [Entry(prompt="Hello?", num_output_tokens=10)]


def test_conversations_without_an_answer_or_too_long_are_left_out(file):
    path = file(
        conversation(("human", "Hello?")),
        conversation(("human", "x" * 4000), ("gpt", "short")),
        conversation(("human", " "), ("gpt", "what?")),
        conversation(("user", "fits"), ("assistant", "yes")),
    )
    assert [entry.prompt for entry in read(path, seed=0, max_model_len=500)] == ["fits"]


def test_the_seed_orders_a_data_set(file):
    path = file(*(conversation(("human", f"{number}"), ("gpt", "x")) for number in range(20)))
    orders = [[entry.prompt for entry in read(path, seed=seed, max_model_len=None)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_a_file_without_anything_to_ask_is_refused(file):
    with pytest.raises(StartError, match="must hold a human's turn"):
        read(file(conversation(("gpt", "hello"))), seed=0, max_model_len=100)


def test_a_file_of_another_shape_is_refused_with_the_right_one(tmp_path):
    path = tmp_path / "set.json"
    path.write_text('{"conversations": 3}')
    with pytest.raises(StartError, match=r"must hold .*conversations"):
        read(path, seed=0, max_model_len=None)
