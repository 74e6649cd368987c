"""`/v1/completions`: lists of prompts, the prompt repeated in front, and log-probabilities in the older shape."""

import json

import pytest
import trio

from headrace.hooks.errors import ContextTooLong, Overloaded, TimedOut
from headrace.server.several import Body

TEXT = "/v1/completions"


async def complete(client, status=200, **fields):
    answer = await client.post(TEXT, json={"prompt": "w7 w8", "max_tokens": 2, **fields})
    assert answer.status_code == status, answer.text
    return answer.json()


async def chunks_of(client, **fields):
    """The chunks of a stream, without its [DONE]."""
    answer = await client.post(TEXT, json={"prompt": "w7 w8", "max_tokens": 2, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def by_index(chunks):
    """The choices of *chunks*, by index."""
    found = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found.setdefault(choice["index"], []).append(choice)
    return found


# ── several prompts ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_choices_of_several_prompts_follow_each_other(client, engine):
    body = await complete(client, prompt=["a", "b c"], n=2, max_tokens=1)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [prompt.text for prompt in engine.prompts] == ["a", "b c"]


async def test_the_usage_of_several_prompts_is_their_sum(client, engine):
    engine.num_cached = 1
    body = await complete(client, prompt=[[1], [2, 3]], n=2)
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_several_prompts_stream_side_by_side_and_say_their_usage_once(client):
    chunks = await chunks_of(client, prompt=["a", "b c"], n=2, stream_options={"include_usage": True})
    found = by_index(chunks)
    assert {index: "".join(choice["text"] for choice in choices) for index, choices in found.items()} == dict.fromkeys(
        range(4), " w1 w2"
    )
    assert [choices[-1]["finish_reason"] for choices in found.values()] == ["length"] * 4
    assert [chunk["usage"]["total_tokens"] for chunk in chunks if chunk["usage"]] == [11]
    assert chunks[-1]["choices"] == []


async def test_the_requests_of_several_prompts_have_names_of_their_own(client, engine):
    answer = await client.post(TEXT, json={"prompt": ["a", "b"], "max_tokens": 1})
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
    assert [request.id for request in engine.requests] == [f"{answer.json()['id']}-{place}" for place in range(2)]


@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_64_prompts_are_refused(client, engine, stream):
    error = (await complete(client, 400, prompt=["a"] * 65, stream=stream))["error"]
    assert error["message"] == "prompt: must be at most 64 prompts, got 65: send several requests"
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_that_never_fit_into_the_line_are_refused(client, engine, stream):
    engine.max_sequences = 5
    error = (await complete(client, 400, prompt=["a"] * 3, n=2, stream=stream))["error"]
    assert error["message"] == "prompt: prompts times n must be <= 5, got 6: send fewer at once"
    assert len(await engine.wait_closed(3)) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_one_prompt_is_that_of_all(client, engine, stream):
    engine.refusal = Overloaded("the line is full", retry_after_s=2)
    answer = await client.post(TEXT, json={"prompt": ["a", "b"], "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert await engine.wait_closed(2) == [(429, "the line is full")] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parameter_out_of_range_leaves_no_prompt_open(client, engine, stream):
    await complete(client, 400, prompt=["a", "b"], temperature=-1, stream=stream)
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_is_an_http_error(client, engine, stream):
    engine.fail_at, engine.failure = 0, ContextTooLong("too long")
    body = await complete(client, 400, prompt=["a", "b"], stream=stream)
    assert body["error"]["code"] == "context_length_exceeded"


async def test_an_error_in_one_of_several_streams_ends_all_with_an_event(client, engine):
    engine.fail_at, engine.failure = 1, TimedOut("too late")
    answer = await client.post(TEXT, json={"prompt": ["a", "b"], "stream": True})
    last = answer.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert await engine.wait_closed(2) == [(504, "too late")] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_all_its_prompts(site, engine, stream):
    engine.hold_at = 1
    async with trio.open_nursery() as nursery:
        body = {"prompt": ["a", "b", "c"], "stream": stream}
        nursery.start_soon(lambda: site.client.post(TEXT, json=body))
        await engine.held.wait()
        nursery.cancel_scope.cancel()
    assert await engine.wait_closed(3) == [(499, None)] * 3


async def test_a_reader_that_stands_still_parks_every_stream(site, engine):
    engine.mailbox_deltas = 2
    engine.word = lambda token_id: "x" * 20_000
    stream = await site.connect(receive_buffer=4096)
    body = json.dumps({"prompt": ["a", "b"], "max_tokens": 100, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    await stream.send_all(head + body)
    with trio.fail_after(10):
        while len(engine.requests) < 2 or not all(request.mailbox.parked for request in engine.requests):  # noqa: ASYNC110
            await trio.sleep(0.01)  # No event tells of it.
    await stream.aclose()
    assert [status for status, _ in await engine.wait_closed(2)] == [499, 499]


async def test_a_silent_stream_begins_with_a_comment(autojump_clock):
    sent = []

    async def send(message):
        sent.append(message)

    with trio.move_on_after(16):
        await Body(send, 15).ping()
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[1]["body"] == b": ping\n\n"


# ── echo ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("prompt", "text"), [("w7 w8", "w7 w8"), ([7, 8], " w7 w8"), (["w7 w8"], "w7 w8")])
async def test_echo_puts_the_prompt_in_front(client, prompt, text):
    body = await complete(client, prompt=prompt, echo=True)
    assert body["choices"][0]["text"] == text + " w1 w2"


async def test_echo_is_streamed_once_a_choice(client):
    found = by_index(await chunks_of(client, echo=True, n=2, prompt=["w7", "w8"]))
    texts = {index: [choice["text"] for choice in choices] for index, choices in found.items()}
    assert texts == {index: [f"{prompt} w1", " w2"] for index, prompt in enumerate(["w7", "w7", "w8", "w8"])}


async def test_echo_of_an_unknown_id_is_refused(client):
    error = (await complete(client, 400, prompt=[7, 5000], echo=True))["error"]
    assert error["param"] == "prompt"


async def test_echo_with_logprobs_scores_the_prompt_and_its_first_token_has_none(client, engine):
    body = await complete(client, echo=True, logprobs=1)
    listed = body["choices"][0]["logprobs"]
    assert listed["tokens"] == ["<s>", " w7", " w8", " w1", " w2"]
    assert listed["token_logprobs"] == [None, *[-9999.0] * 4]
    assert listed["top_logprobs"][:2] == [None, {" w8": -0.5, " w7": -9999.0}]
    assert engine.params[0]["prompt_logprobs"] == 1


async def test_text_offsets_count_in_the_text_that_is_shown(client):
    """BOS is a token of the prompt and no part of its text; nor is the space that the tokenizer put in front."""
    choice = (await complete(client, echo=True, logprobs=0))["choices"][0]
    assert choice["logprobs"]["text_offset"] == [0, 0, 2, 5, 8]
    assert choice["text"][5:] == " w1 w2"


async def test_a_streamed_echo_lists_the_same_logprobs_as_a_whole_one(client):
    whole = (await complete(client, echo=True, logprobs=2))["choices"][0]["logprobs"]
    parts = [choice["logprobs"] for choice in by_index(await chunks_of(client, echo=True, logprobs=2))[0]]
    assert {key: [item for part in parts for item in part[key]] for key in whole} == whole


# ── log-probabilities ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_drawn_token_is_listed_beside_the_likeliest(client, engine):
    engine.top_offset = 1
    listed = (await complete(client, logprobs=2))["choices"][0]["logprobs"]
    assert listed["top_logprobs"][0] == {" w2": -0.5, " w3": -0.5, " w1": -9999.0}


async def test_without_alternatives_only_the_drawn_token_is_listed(client):
    listed = (await complete(client, logprobs=0))["choices"][0]["logprobs"]
    assert listed["top_logprobs"] == [{" w1": -9999.0}, {" w2": -9999.0}]


@pytest.mark.parametrize("logprobs", [6, -1])
async def test_more_than_five_alternatives_are_refused(client, logprobs):
    await complete(client, 400, logprobs=logprobs)


async def test_two_numbers_of_alternatives_for_one_prompt_are_refused(client):
    error = (await complete(client, 400, echo=True, logprobs=2, prompt_logprobs=1))["error"]
    assert error["param"] == "prompt_logprobs"
