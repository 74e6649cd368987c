"""Log-probabilities of the prompt, and token ids, in the shapes of vLLM's extension."""

import json

import pytest

HI = [{"role": "user", "content": "w7 w8"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def ask(client, path, **fields):
    body = {"messages": HI} if path == CHAT else {"prompt": [7, 8, 9]}
    answer = await client.post(path, json={**body, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def chunks_of(answer):
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line.startswith("data: {")]


async def test_a_completions_choice_lists_its_prompt_by_id_and_rank(client):
    body = (await ask(client, TEXT, prompt_logprobs=1)).json()
    listed = body["choices"][0]["prompt_logprobs"]
    assert [item and list(item) for item in listed] == [None, ["8", "9"], ["9", "10"]]
    assert listed[1] == {
        "8": {"logprob": -9999.0, "rank": 7, "decoded_token": " w8"},
        "9": {"logprob": -0.5, "rank": 1, "decoded_token": " w9"},
    }


async def test_a_chat_answer_lists_its_prompt_beside_the_choices(client, engine):
    body = (await ask(client, CHAT, prompt_logprobs=0)).json()
    assert len(body["prompt_logprobs"]) == len(engine.requests[0].prompt_ids)
    assert body["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in body["choices"][0]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_prompt_logprobs_and_a_stream_exclude_each_other(client, path):
    body = {"messages": HI, "prompt": "x", "prompt_logprobs": 1, "stream": True}
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"


async def test_ids_of_prompt_and_answer_come_with_a_completion(client):
    choice = (await ask(client, TEXT, return_token_ids=True)).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([7, 8, 9], [1, 2])


async def test_ids_of_prompt_and_answer_come_with_a_chat(client, engine):
    body = (await ask(client, CHAT, return_token_ids=True)).json()
    assert body["prompt_token_ids"] == engine.requests[0].prompt_ids.tolist() != []
    assert body["choices"][0]["token_ids"] == [1, 2]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stream_says_the_prompts_ids_once_and_the_answers_as_they_come(client, path):
    chunks = chunks_of(await ask(client, path, return_token_ids=True, stream=True))
    holders = chunks if path == CHAT else [chunk["choices"][0] for chunk in chunks]
    assert ["prompt_token_ids" in holder for holder in holders] == [True, False]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[1], [2]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_ids_are_not_sent_unasked(client, path):
    assert "token_ids" not in (await ask(client, path, logprobs=1 if path == TEXT else True)).text
