"""The shapes of good answers, seen by OpenAI's own typed client and in the raw events."""

import json
import time

import httpx
import openai
import pytest
import trio

from tests.server.fake_engine import EMOJI_ID, END_ID

HI = [{"role": "user", "content": "hi there"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def ask(site):
    """Run a function with OpenAI's client, in a thread: its asynchronous streams do not close under Trio."""
    with httpx.Client(trust_env=False) as http:
        client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", http_client=http, max_retries=0)
        yield lambda function: trio.to_thread.run_sync(function, client)


async def events(client, path=CHAT, **fields):
    """The chunks of a stream, and whether it ended with [DONE]."""
    body = {"messages": HI, "max_tokens": 3} if path == CHAT else {"prompt": "hi there", "max_tokens": 3}
    answer = await client.post(path, json={**body, "stream": True, **fields})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_the_typed_client_reads_a_chat_answer(ask):
    answer = await ask(lambda client: client.chat.completions.create(model="fake", messages=HI, max_tokens=3))
    assert answer.choices[0].message.content == " w1 w2 w3"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens == 5


async def test_the_typed_client_reads_a_chat_stream(ask):
    chunks = await ask(
        lambda client: list(client.chat.completions.create(model="fake", messages=HI, max_tokens=3, stream=True))
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " w1 w2 w3"


async def test_the_typed_client_reads_completions(ask):
    answer = await ask(
        lambda client: client.completions.create(model="fake", prompt=[10, 11], max_tokens=2, logprobs=1)
    )
    assert answer.choices[0].text == " w1 w2"
    assert answer.choices[0].logprobs.tokens == [" w1", " w2"]


async def test_the_typed_client_reads_models(ask):
    assert [model.id for model in await ask(lambda client: client.models.list())] == ["fake"]
    assert (await ask(lambda client: client.models.retrieve("fake"))).owned_by == "headrace"


async def test_the_typed_client_raises_its_own_error_for_ours(ask):
    with pytest.raises(openai.NotFoundError) as caught:
        await ask(lambda client: client.chat.completions.create(model="other", messages=HI))
    assert caught.value.code == "model_not_found"


async def test_a_plain_answer_has_the_documented_shape(client):
    first, second = [(await client.post(CHAT, json={"messages": HI, "max_tokens": 2})) for _ in range(2)]
    assert first.headers["content-type"] == "application/json"
    body = first.json()
    assert body["object"] == "chat.completion"
    assert abs(body["created"] - time.time()) < 60
    assert body["id"] != second.json()["id"]
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["timings"] == {"prefill_ms": 1.5}


async def test_the_answers_id_is_the_requests_id(client):
    answer = await client.post(CHAT, json={"messages": HI})
    assert answer.json()["id"] == f"chatcmpl-{answer.headers['x-request-id']}"


async def test_each_choice_of_a_stream_has_its_role_once_and_the_head_stays_the_same(client):
    chunks = await events(client, n=2)
    for index in (0, 1):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [delta.get("role") for delta in deltas] == ["assistant", None, None]
    for key in ("id", "model", "object", "created", "system_fingerprint"):
        assert len({chunk[key] for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_usage_comes_once_and_last_and_equals_that_of_a_plain_answer(client):
    chunks = await events(client, n=2, stream_options={"include_usage": True})
    plain = (await client.post(CHAT, json={"messages": HI, "max_tokens": 3, "n": 2})).json()
    assert [chunk["usage"] for chunk in chunks if chunk["usage"]] == [plain["usage"]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["timings"] == plain["timings"]


async def test_without_usage_the_last_chunk_has_the_timings(client):
    chunks = await events(client)
    assert [chunk.get("timings") for chunk in chunks] == [None, None, {"prefill_ms": 1.5}]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_there_is_one_finish_reason_length_at_the_cap(client, path):
    chunks = await events(client, path, max_tokens=2)
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]] == [None, "length"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_there_is_one_finish_reason_stop_at_an_end_token(client, path):
    chunks = await events(client, path, max_tokens=5, logit_bias={str(END_ID): 100})
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]] == ["stop"]


async def test_n_choices_have_their_indices_and_one_usage(client):
    body = (await client.post(CHAT, json={"messages": HI, "max_tokens": 2, "n": 3})).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 6


async def test_text_with_quotes_and_newlines_survives_the_stream(client, engine):
    engine.word = lambda token_id: f'\n"{token_id}\\ é🦜'
    chunks = await events(client, TEXT, max_tokens=2)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ['\n"1\\ é🦜', '\n"2\\ é🦜']


async def test_chat_logprobs_have_bytes_and_alternatives_and_no_infinity(client):
    body = (await client.post(CHAT, json={"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 2})).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(bytes(entry["bytes"]).decode() for entry in content) == " w1 w2"
    assert content[0]["logprob"] == -9999.0
    assert [top["token"] for top in content[0]["top_logprobs"]] == [" w1", " w2"]


async def test_logprobs_without_alternatives_have_an_entry_a_token(client):
    chunks = await events(client, logprobs=True, top_logprobs=0)
    entries = [entry for chunk in chunks for c in chunk["choices"] for entry in c["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [" w1", " w2", " w3"]
    assert [entry["top_logprobs"] for entry in entries] == [[], [], []]


async def test_text_offsets_go_on_over_chunks_and_count_whole_characters(client):
    bias = {str(EMOJI_ID): 100}
    body = (await client.post(TEXT, json={"prompt": "x", "max_tokens": 2, "logprobs": 0, "logit_bias": bias})).json()
    assert body["choices"][0]["logprobs"]["tokens"] == ["\ufffd", "\ufffd"]
    chunks = await events(client, TEXT, logprobs=0)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [3], [6]]


async def test_a_completion_takes_text_or_ids_and_parses_markers_unless_told_not_to(client, engine):
    for prompt in ("a b", ["a b"], [1, 2], [[1, 2]]):
        assert (await client.post(TEXT, json={"prompt": prompt, "max_tokens": 1})).status_code == 200
    await client.post(TEXT, json={"prompt": "a", "max_tokens": 1, "parse_special": False})
    texts, ids = (engine.prompts[0], engine.prompts[1]), (engine.prompts[2], engine.prompts[3])
    assert [prompt.text for prompt in texts] == ["a b", "a b"]
    assert [prompt.token_ids for prompt in ids] == [(1, 2), (1, 2)]
    assert [engine.prompts[0].parse_special, engine.prompts[4].parse_special] == [True, False]


async def test_the_model_list_tells_the_context_length(client):
    assert (await client.get("/v1/models")).json() == {
        "object": "list",
        "data": [
            {"id": "fake", "object": "model", "created": 1700000000, "owned_by": "headrace", "max_model_len": 128}
        ],
    }


async def test_extensions_reach_the_engine(client, engine):
    extension = {"logits": {"top-p": {"p": 0.5}}, "priority": 3, "timeout_s": 2.5, "patience_s": 1.5}
    await client.post(CHAT, json={"messages": HI, "headrace": extension})
    assert engine.calls[0] == {"extra": {"top-p": {"p": 0.5}}, "priority": 3, "timeout_s": 2.5, "patience_s": 1.5}
    extension = {"sampler": {"tau": 3.0}, "stop": {"time-limit": {"max_time_s": 2}}}
    await client.post(CHAT, json={"messages": HI, "headrace": extension})
    assert {name: engine.calls[1][name] for name in extension} == extension


async def test_metrics_are_prometheus_text(client):
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'headrace_kv_blocks{state="used"} 3.0' in answer.text
