import json
import socket
from functools import partial

import pytest
import trio
from click.testing import CliRunner

from headrace.server.bench import commands
from headrace.server.cli import main
from tests.server.bench.odd_server import Nth, odd_server, whole

SMALL = ("--requests", "4", "--concurrency", "2", "--prompt-tokens", "10-20", "--output-tokens", "4")


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["bench", "load", *arguments])


@pytest.fixture
async def bench(site):
    """Run `headrace bench load` against the site, in a thread: it brings a loop of its own."""

    async def run(*arguments: str):
        return await trio.to_thread.run_sync(partial(invoke, site.url, *SMALL, *arguments))

    return run


async def test_a_run_is_shown_to_people(bench):
    result = await bench("--target-ttft", "100000")
    assert result.exit_code == 0
    assert "4 complete of 4" in result.output
    assert "100.0% of those sent: first token ≤ 100000 ms" in result.output


async def test_a_report_is_written_as_json_with_a_row_for_each_request(bench, tmp_path):
    file = tmp_path / "report.json"
    await bench("--json", str(file), "--param", "temperature=0", "--run-id", "mine", "--seed", "3")
    report = json.loads(file.read_text())
    assert len(report["requests"]) == report["num_complete"] == 4
    assert report["load"]["params"] == {"temperature": 0}
    assert (report["load"]["run_id"], report["load"]["seed"]) == ("mine", 3)
    assert report["load"]["prompt_tokens"] == {"type": "uniform", "low": 10, "high": 20}
    assert report["output_tokens"]["mean"] == 4


async def test_each_run_has_an_id_of_its_own(bench):
    first, second = await bench(), await bench()
    ids = [line.rpartition("run ")[2] for result in (first, second) for line in result.output.splitlines()[1:2]]
    assert ids[0] != ids[1]


async def test_a_data_set_gives_the_prompts(bench, engine, tmp_path):
    file = tmp_path / "set.json"
    turns = [{"from": "human", "value": "w77 w78"}, {"from": "gpt", "value": "hello there"}]
    file.write_text(json.dumps([{"conversations": turns}]))
    assert (await bench("--dataset", str(file))).exit_code == 0
    assert engine.prompts[-1].messages[-1]["content"] == "w77 w78"


async def test_a_key_is_sent_and_not_reported(bench, tmp_path):
    file = tmp_path / "report.json"
    await bench("--api-key", "sesame", "--json", str(file))
    assert "sesame" not in file.read_text()


async def test_a_plot_is_a_png(bench, tmp_path):
    file = tmp_path / "plot.png"
    result = await bench("--plot", str(file), "--target-e2e", "50")
    assert result.exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert file.stat().st_size > 10_000


async def test_a_plot_without_matplotlib_is_refused_before_anything_is_sent(monkeypatch, bench, engine, tmp_path):
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    result = await bench("--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 1
    assert "pip install 'headrace[bench]'" in result.output
    assert engine.requests == []


async def test_a_run_without_a_complete_request_is_shown_and_ends_with_1():
    async with odd_server(Nth(whole(b"{}", status=b"500 Oh"))) as server:
        result = await trio.to_thread.run_sync(partial(invoke, server.url, *SMALL))
    assert result.exit_code == 1
    assert "0 complete of 4" in result.output
    assert "http 500" in result.output


def test_a_server_that_is_not_there_is_told():
    with socket.create_server(("127.0.0.1", 0)) as owner:
        url = f"http://127.0.0.1:{owner.getsockname()[1]}"
    result = invoke(url)
    assert result.exit_code == 1
    assert f"a server must answer at {url}/v1/models" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rate", "2", "--concurrency", "3"], "give --rate or --concurrency"),
        (["--prompt-tokens", "many"], "must be a number of tokens (128), a range"),
        (["--param", "stop"], "must be NAME=JSON"),
        (["--param", "stop=x"], "must be NAME=JSON"),
        (["--json", "no/such/folder/x.json"], "must be a folder that exists"),
        (["--rate", "0"], "--rate"),
    ],
)
def test_a_mistake_in_the_flags_ends_with_2_before_anything_is_sent(arguments, told):
    result = invoke("http://127.0.0.1:9", *arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
