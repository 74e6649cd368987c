"""Clients that people have, against a live server: OpenAI's own with every parameter, and others where installed."""

import os
import subprocess
import sys

import httpx
import openai
import pytest
import trio

HI = [{"role": "user", "content": "w7 w8"}]


@pytest.fixture
async def ask(site):
    """Run a function with OpenAI's client, in a thread: its asynchronous streams do not close under Trio."""
    with httpx.Client(trust_env=False) as http:
        client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", http_client=http, max_retries=0)
        yield lambda function: trio.to_thread.run_sync(function, client)


SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "seed": 3,
    "stop": ["never"],
    "logit_bias": {"1": 0},
    "n": 2,
}
FURTHER = {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True}


async def test_every_sampling_parameter_reaches_the_engine_as_it_was_given(ask, engine):
    extra = {**FURTHER, "headrace": {"priority": 1, "patience_s": 0.5}}
    await ask(
        lambda client: client.chat.completions.create(
            model="fake", messages=HI, max_completion_tokens=2, extra_body=extra, **SAMPLING
        )
    )
    assert engine.params[0] == {**SAMPLING, **FURTHER, "logit_bias": {1: 0.0}, "max_tokens": 2}
    assert (engine.calls[0]["priority"], engine.calls[0]["patience_s"]) == (1, 0.5)


async def test_chat_logprobs_and_further_fields_are_read(ask):
    answer = await ask(
        lambda client: client.chat.completions.create(
            model="fake",
            messages=HI,
            max_tokens=2,
            n=2,
            logprobs=True,
            top_logprobs=2,
            extra_body={"prompt_logprobs": 1, "return_token_ids": True},
        )
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [len(token.top_logprobs) for token in answer.choices[1].logprobs.content] == [2, 2]
    assert answer.model_extra["prompt_logprobs"][0] is None
    assert answer.choices[0].model_extra["token_ids"] == [1, 2]
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_message_is_continued_with_the_templates_own_words(ask, engine):
    extra = {"continue_final_message": True, "add_generation_prompt": False, "chat_template_kwargs": {"mood": "good"}}
    messages = [*HI, {"role": "assistant", "content": "well"}]
    await ask(lambda client: client.chat.completions.create(model="fake", messages=messages, extra_body=extra))
    assert engine.prompts[0].continue_final_message
    assert engine.prompts[0].template_kwargs == {"mood": "good"}


async def test_a_stream_tells_its_usage_as_it_goes(ask):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await ask(
        lambda client: list(
            client.chat.completions.create(model="fake", messages=HI, max_tokens=2, stream=True, stream_options=options)
        )
    )
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 2]


@pytest.mark.parametrize("prompt", ["w7", ["w7", "w8"], [7, 8], [[7], [8, 9]]], ids=str)
async def test_completions_of_all_kinds_of_prompts_are_read(ask, prompt):
    answer = await ask(
        lambda client: client.completions.create(
            model="fake", prompt=prompt, max_tokens=2, echo=True, logprobs=1, n=2, best_of=2
        )
    )
    num_prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    for choice in answer.choices:
        assert choice.text.endswith(" w1 w2")
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(choice.logprobs.top_logprobs)


async def test_completions_of_several_prompts_stream(ask):
    chunks = await ask(
        lambda client: list(client.completions.create(model="fake", prompt=["a", "b"], max_tokens=2, stream=True))
    )
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: " w1 w2", 1: " w1 w2"}


async def test_a_suffix_is_refused_by_name(ask):
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(lambda client: client.completions.create(model="fake", prompt="x", suffix="y"))
    assert caught.value.param == "suffix"


# ── others ────────────────────────────────────────────────────────────────────────────────────────────────────────
# They warn about things of their own, and are not installed by default: `pip install headrace[clients]`.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_litellm_streams_a_chat(site, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # It would fetch one.
    litellm = pytest.importorskip("litellm")

    def talk():
        chunks = litellm.completion(
            model="openai/fake", api_base=f"{site.url}/v1", api_key="none", messages=HI, max_tokens=3, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert await trio.to_thread.run_sync(talk) == " w1 w2 w3"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_langchain_streams_a_chat(site):
    langchain = pytest.importorskip("langchain_openai")

    def talk():
        model = langchain.ChatOpenAI(base_url=f"{site.url}/v1", api_key="none", model="fake", max_tokens=3)
        return "".join(str(chunk.content) for chunk in model.stream("w7 w8"))

    assert await trio.to_thread.run_sync(talk) == " w1 w2 w3"


@pytest.mark.slow
async def test_llm_streams_a_chat(site, tmp_path):
    pytest.importorskip("llm")
    entry = f"- model_id: headrace\n  model_name: fake\n  api_base: {site.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    command = [sys.executable, "-m", "llm", "-m", "headrace", "--key", "none", "-n", "-o", "max_tokens", "3", "w7 w8"]
    environ = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
    done = await trio.run_process(command, env=environ, capture_stdout=True, stderr=subprocess.STDOUT, check=False)
    assert done.stdout.decode() == " w1 w2 w3\n"
