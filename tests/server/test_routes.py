"""What clients may ask besides answers (tokens, templates, versions, names), and what answers tell besides text."""

import json
from importlib import metadata

import click
import msgspec
import pytest
from click.testing import CliRunner

from headrace.server.options import with_settings
from tests.server.fake_engine import INFO, FakeEngine

HI = [{"role": "user", "content": "w7 #"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def post(client, path, status=200, **body):
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


# ── tokens and templates ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_text_is_tokenized_as_a_completion_would(client):
    body = await post(client, "/tokenize", prompt="w7 w8")
    assert body == {"count": 3, "max_model_len": 128, "tokens": [998, 7, 8], "token_strs": None}


async def test_bos_and_strings_are_the_clients_choice(client):
    body = await post(client, "/tokenize", prompt="w7", add_special_tokens=False, return_token_strs=True)
    assert (body["tokens"], body["token_strs"]) == ([7], [" w7"])


async def test_a_conversation_is_tokenized_through_the_template(client):
    opened = await post(client, "/tokenize", messages=HI)
    closed = await post(client, "/tokenize", messages=HI, add_generation_prompt=False)
    assert opened["count"] == closed["count"] + 1


async def test_ids_become_text_again(client):
    assert await post(client, "/detokenize", tokens=[998, 7, 8]) == {"prompt": "<s> w7 w8"}
    assert await post(client, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_a_template_is_shown_with_what_the_user_wrote(client):
    assert await post(client, "/apply-template", messages=HI) == {"prompt": "user: w7 #\nassistant:"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x" * 1001}, None),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 1001}]}, None),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 129}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": HI, "chat_template_kwargs": {"refuse": True}}, None),
    ],
    ids=str,
)
async def test_what_cannot_be_read_is_refused_by_name(client, path, body, param):
    assert (await post(client, path, 400, **body))["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template"])
async def test_another_model_is_not_found(client, path):
    await post(client, path, 404, model="other", prompt="x", tokens=[1], messages=HI)


# ── versions and names ────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_version_is_told(client):
    assert (await client.get("/version")).json() == {"version": metadata.version("headrace"), "fingerprint": "fp_fake"}


async def test_a_model_answers_to_its_aliases_under_its_own_name(client, engine):
    engine.info = msgspec.structs.replace(INFO, aliases=("gpt-4o", "default"))
    assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["fake", "gpt-4o", "default"]
    assert (await client.get("/v1/models/default")).json()["id"] == "default"
    assert (await post(client, CHAT, model="gpt-4o", messages=HI))["model"] == "fake"
    await post(client, CHAT, 404, model="gpt-5", messages=HI)


@pytest.mark.parametrize("flag", ["--name", "--served-model-name"])
def test_the_models_name_has_the_flag_of_other_servers_too(flag):
    names = []

    @click.command()
    @with_settings("model")
    def show(loaded):
        names.append((loaded.settings.model.name, loaded.settings.model.aliases))

    result = CliRunner().invoke(show, [flag, "mine", "--aliases", "gpt-4o,default"])
    assert result.exit_code == 0, result.output
    assert names == [("mine", ("gpt-4o", "default"))]


# ── what answers tell ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": ["x", "y"]}], ids=str)
async def test_a_whole_answer_says_in_its_head_where_its_time_went(client, engine: FakeEngine, body):
    engine.report_ms = {"template_ms": 0.5, "prefill_ms": 1.25, "parked_ms": 3.0, "ttft_ms": None, "wall_ms": 2.25}
    answer = await client.post(TEXT, json=body)
    assert answer.headers["server-timing"] == "template;dur=0.5, prefill;dur=1.25, total;dur=2.25"


async def test_cached_tokens_are_told(client, engine):
    engine.num_cached = 2
    assert (await post(client, CHAT, messages=HI))["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def stream(client, path=CHAT, **fields):
    body = {"messages": HI} if path == CHAT else {"prompt": "a b"}
    answer = await client.post(path, json={**body, "max_tokens": 3, "stream": True, **fields})
    return [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_grows_with_each_chunk_where_that_was_asked_for(client, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk["usage"] for chunk in await stream(client, path, stream_options=options)]
    assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3, 3]
    assert {usage["prompt_tokens"] for usage in usages} == {2}
    assert usages[-1] == usages[-2]


async def test_growing_usage_counts_all_choices_of_all_prompts(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, TEXT, prompt=["a", "b c"], n=2, stream_options=options)
    totals = [chunk["usage"]["total_tokens"] for chunk in chunks]
    assert totals == sorted(totals)
    assert totals[-1] == 15


async def test_growing_usage_needs_usage(client):
    chunks = await stream(client, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in chunks)


async def test_an_answer_may_be_continued(client, engine):
    messages = [*HI, {"role": "assistant", "content": "well"}]
    await post(client, CHAT, messages=messages, continue_final_message=True, chat_template_kwargs={"mood": "good"})
    prompt = engine.prompts[0]
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert prompt.template_kwargs == {"mood": "good"}
