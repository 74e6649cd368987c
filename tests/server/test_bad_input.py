"""Every bad input is answered with a client error in OpenAI's shape, and with nothing else."""

import json

import pytest

from headrace.hooks.errors import ContextTooLong, Overloaded, TimedOut
from headrace.hooks.params import SamplingParams
from headrace.server.schemas import Sampling

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def error_of(answer, status=400):
    """The error object of a refusal."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


MALFORMED = [
    b"{:",
    b"",
    b'{"messages": [',
    b"[1,2,3]",
    b'"str"',
    b"null",
    b'{"model": "m",}',
    b'{"messages": NaN}',
    b"\xef\xbb\xbf{",
    b"{}",
    b"\xff\xfe",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"deep": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("raw", MALFORMED, ids=lambda raw: repr(raw[:20]))
async def test_malformed_json_is_refused(client, path, raw):
    error = error_of(await client.post(path, content=raw))
    assert error["type"] == "invalid_request_error"


WRONG = {
    "messages is a string": ({"messages": "hello"}, "messages"),
    "messages is empty": ({"messages": []}, "messages"),
    "a message is a number": ({"messages": [7]}, "messages[0]"),
    "a message has no role": ({"messages": [{"content": "x"}]}, "messages[0].role"),
    "content is a number": ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "content is an object": ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content"),
    "a role nobody knows": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    "a part is an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    "temperature is text": ({"temperature": "hot"}, "temperature"),
    "temperature is a list": ({"temperature": [1]}, "temperature"),
    "max_tokens is text": ({"max_tokens": "ten"}, "max_tokens"),
    "max_tokens is a fraction": ({"max_tokens": 1.5}, "max_tokens"),
    "stream is text": ({"stream": "yes"}, "stream"),
    "n is text": ({"n": "two"}, "n"),
    "stop is a number": ({"stop": 5}, "stop"),
    "stop holds numbers": ({"stop": [1, 2]}, "stop[0]"),
    "seed is text": ({"seed": "abc"}, "seed"),
    "logit_bias is a list": ({"logit_bias": [1]}, "logit_bias"),
    "logit_bias has a word": ({"logit_bias": {"dog": 5}}, "logit_bias"),
    "logit_bias has an unknown id": ({"logit_bias": {"5": 1, "99999999": 5}}, "logit_bias"),
    "presence_penalty is text": ({"presence_penalty": "x"}, "presence_penalty"),
    "tools is text": ({"tools": "t"}, "tools"),
    "response_format is text": ({"response_format": "json"}, "response_format"),
    "response_format is unknown": ({"response_format": {"type": "yaml"}}, "response_format.type"),
    "response_format is json_object": ({"response_format": {"type": "json_object"}}, "response_format.type"),
    "response_format is a schema": ({"response_format": {"type": "json_schema"}}, "response_format.type"),
    "a grammar": ({"grammar": "root ::= x"}, "grammar"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "model is a number": ({"model": 5}, "model"),
    "stream_options is a number": ({"stream_options": 3}, "stream_options"),
    "top_logprobs alone": ({"top_logprobs": 3}, "top_logprobs"),
    "two ways to go on": (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    "an unknown extension": ({"headrace": {"sampling": {}}}, "headrace"),
}


@pytest.mark.parametrize(("fields", "param"), WRONG.values(), ids=WRONG)
async def test_a_wrong_field_is_refused_by_name(client, fields, param):
    error = error_of(await client.post(CHAT, json={"messages": HI, "max_tokens": 1, **fields}))
    assert error["param"] == param
    assert param.split(".")[0].split("[")[0] in error["message"]


OUT_OF_RANGE = [
    {"temperature": -0.5},
    {"top_p": 1.5},
    {"top_p": -0.1},
    {"n": 0},
    {"n": -1},
    {"frequency_penalty": 5},
    {"logit_bias": {"-4": 5}},
    {"logit_bias": {"5": 100000}},
    {"max_tokens": 0},
    {"max_tokens": -5},
    {"max_completion_tokens": -5},
    {"logprobs": True, "top_logprobs": 21},
    {"stop": ""},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", OUT_OF_RANGE, ids=str)
async def test_a_value_out_of_range_is_refused_before_the_stream_begins(client, fields, stream):
    error_of(await client.post(CHAT, json={"messages": HI, "stream": stream, **fields}))


@pytest.mark.parametrize("max_tokens", [10**6, 2**31, 2**63, 10**30])
async def test_an_absurd_max_tokens_is_not_an_error(client, engine, max_tokens):
    body = {"messages": HI, "max_tokens": max_tokens, "logit_bias": {"2": 100}}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert engine.params[0]["max_tokens"] == min(max_tokens, 2**63 - 1)


async def test_a_number_of_five_thousand_digits_is_refused(client):
    raw = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 5000 + b"}"
    error_of(await client.post(CHAT, content=raw))


NULLABLE = [
    *("model", "temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "user"),
    *("seed", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "stream", "stream_options"),
    *("parallel_tool_calls", "metadata", "max_tokens", "top_k", "min_p", "add_generation_prompt", "headrace"),
    *("continue_final_message", "chat_template_kwargs"),
]


@pytest.mark.parametrize("name", NULLABLE)
async def test_null_means_the_default(client, engine, name):
    answer = await client.post(CHAT, json={"messages": HI, name: None})
    assert answer.status_code == 200
    assert engine.params == [{}]


IGNORED = [
    {"max_completion_tokens": 1},
    {"user": "u-1"},
    {"store": False},
    {"metadata": {"k": "v"}},
    {"service_tier": "auto"},
    {"parallel_tool_calls": True},
    {"frequency_penalty": 0},
    {"logit_bias": {}},
    {"stop": []},
    {"tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"top_k": 40},
    {"repetition_penalty": 1.0},
    {"min_p": 0.0},
    {"reasoning_effort": "low"},
    {"prompt_cache_key": "abc"},
    {"safety_identifier": "s"},
    {"a_field_of_next_year": [1]},
]


@pytest.mark.parametrize("fields", IGNORED, ids=str)
async def test_fields_that_common_clients_add_are_tolerated(client, fields):
    assert (await client.post(CHAT, json={"messages": HI, "max_tokens": 1, **fields})).status_code == 200


async def test_the_newer_token_limit_wins(client, engine):
    await client.post(CHAT, json={"messages": HI, "max_tokens": 1, "max_completion_tokens": 2})
    assert engine.params[0]["max_tokens"] == 2


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_unknown_model_is_not_found(client, path):
    body = {"model": "no-such-model", "messages": HI, "prompt": "x"}
    assert error_of(await client.post(path, json=body), 404)["code"] == "model_not_found"


async def test_an_unknown_model_has_no_page(client):
    assert error_of(await client.get("/v1/models/some/where"), 404)["code"] == "model_not_found"
    assert (await client.get("/v1/models/fake")).status_code == 200


@pytest.mark.parametrize("prompt", [[1, "a"], ["a", 1], [[1], "a"]], ids=str)
async def test_prompts_of_several_kinds_are_refused(client, prompt):
    assert "must be all texts" in error_of(await client.post(TEXT, json={"prompt": prompt}))["message"]


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []], 5, {"a": 1}, [None], [[["x"]]], [True]], ids=str)
async def test_a_prompt_that_is_none_is_refused(client, prompt):
    assert error_of(await client.post(TEXT, json={"prompt": prompt}))["param"].startswith("prompt")


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"best_of": 2}, {"n": 2, "best_of": 1}], ids=str)
async def test_what_completions_cannot_do_is_refused(client, fields):
    error = error_of(await client.post(TEXT, json={"prompt": "x", **fields}))
    assert error["code"] == "unsupported_parameter"


FAR = {"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"headrace": {"patience_s": -1}}, {"headrace": {"tenant": "x"}}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields", FAR, ids=str)
async def test_an_extension_out_of_range_is_refused(client, path, fields):
    error_of(await client.post(path, json={"messages": HI, "prompt": "x", **fields}))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", CHAT, 405), ("POST", "/health", 405), ("GET", "/health/", 404)],
)
async def test_a_wrong_route_has_an_error_object_too(client, method, path, status):
    assert path in error_of(await client.request(method, path), status)["message"]


async def test_a_body_over_the_limit_is_refused(client):
    assert error_of(await client.post(CHAT, content=b"x" * 100_001), 413)["code"] == "body_too_large"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [
        (Overloaded("the line is full", retry_after_s=2.1), 429, "3"),
        (ContextTooLong("200 tokens do not fit into 128"), 400, None),
    ],
)
async def test_a_refusal_of_the_engine_has_its_status(client, engine, refusal, status, retry_after, stream):
    engine.refusal = refusal
    answer = await client.post(CHAT, json={"messages": HI, "stream": stream})
    assert error_of(answer, status)["code"] == refusal.code
    assert answer.headers.get("retry-after") == retry_after
    assert list(engine.closed.values()) == [(status, str(refusal))]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_instead_of_the_first_token_is_an_http_error(client, engine, stream):
    engine.fail_at, engine.failure = 0, TimedOut("too late")
    error_of(await client.post(CHAT, json={"messages": HI, "stream": stream}), 504)


async def test_an_error_after_the_first_token_is_an_event_and_no_good_end_follows(client, engine):
    engine.fail_at, engine.failure = 2, TimedOut("too late")
    answer = await client.post(CHAT, json={"messages": HI, "stream": True})
    last = answer.text.strip().split("\n\n")[-1]
    assert answer.status_code == 200
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert list(engine.closed.values()) == [(504, "too late")]


async def test_what_nobody_foresaw_is_an_error_object_without_details(engine, nursery, client):
    engine.refusal = ZeroDivisionError("secret")
    with pytest.raises(ZeroDivisionError):  # Reported to the server, which logs it.
        await client.post(CHAT, json={"messages": HI})
    assert list(engine.closed.values()) == [(500, "ZeroDivisionError('secret')")]


def test_every_field_of_the_bodies_sampling_part_is_a_sampling_parameter():
    assert set(Sampling.__struct_fields__) <= set(SamplingParams.__struct_fields__)
    assert set(SamplingParams.__struct_fields__) - set(Sampling.__struct_fields__) == {"logprobs"}
