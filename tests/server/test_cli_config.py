"""`headrace config`: what the settings are, who said so, and everything that is wrong with them."""

import json
import tomllib

import pytest
from click.testing import CliRunner

from headrace.server.cli import main


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder with a headrace.toml."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, toml="", **environ):
        (tmp_path / "headrace.toml").write_text(toml, encoding="utf-8")
        return CliRunner().invoke(main, ["config", *arguments], env=environ)

    return run


def test_config_show_prints_a_configuration_file(run):
    result = run("show", toml='[line]\nmax_running = 7\npolicy = { use = "x", options = { a = 1 } }')
    assert result.exit_code == 0
    shown = tomllib.loads(result.output)
    assert shown["line"]["max_running"] == 7
    assert shown["line"]["policy"] == {"use": "x", "options": {"a": 1}}
    assert shown["server"]["port"] == 8000


def test_config_show_says_who_said_so(run):
    toml = "[line]\nmax_running = 7\nmax_waiting = 9\n"
    result = run("show", "--origin", "--port", "9000", "-m", "x", toml=toml, HEADRACE__LINE__MAX_WAITING="3")
    origins = {line.split(" = ")[0]: line.rpartition("# ")[2] for line in result.output.splitlines()}
    assert origins["line.max_running"] == "headrace.toml:2:1"
    assert origins["line.max_waiting"] == "HEADRACE__LINE__MAX_WAITING"
    assert origins["server.port"] == "--port"
    assert origins["line.block_size"] == "default"
    assert "# line.kv_blocks is unset" in result.output


def test_config_show_speaks_to_machines_too(run):
    lines = [json.loads(line) for line in run("show", "--json", toml="[line]\nmax_running = 7").output.splitlines()]
    assert {"key": "line.max_running", "value": 7, "origin": "headrace.toml:2:1"} in lines
    assert {"key": "line.kv_blocks", "value": None, "origin": "default"} in lines


def test_config_check_is_content_with_what_is_right(run):
    result = run("check", toml='[sampling]\nlocked = ["temperature", "logits.top-k.k"]')
    assert result.exit_code == 0, result.output
    assert result.output.startswith("headrace.toml: right; ")


def test_config_check_tells_all_that_is_wrong_at_once_each_with_its_place(run):
    toml = """
[line]
max_runing = 3
policy = "fcsf"
[sampling]
locked = ["temprature", "logits.top-k.kk"]
extra_processors = [
  { use = "top-q" },
]
[sampling.sampler]
use = "categorical"
options = { a = 1 }
[plugins]
disable = ["nobody"]
"""
    result = run("check", "--set", "line.policy.options={}", toml=toml, HEADRACE__SERVER__PORT="x")
    assert result.exit_code == 2
    found = result.stderr.splitlines()
    assert "headrace.toml:3:1: line.max_runing: unknown; did you mean max_running?" in found
    assert "headrace.toml:6:1: sampling.locked.0: no parameter called 'temprature'; did you mean temperature?" in found
    assert "HEADRACE__SERVER__PORT: server.port: must be integer >= 0 and <= 65535, got 'x'" in found
    assert any(line.startswith("headrace.toml:14:1: plugins.disable") and "nobody" in line for line in found)


def test_config_check_looks_at_components_and_their_options(run):
    toml = """
[line]
policy = "fcsf"
[sampling]
locked = ["logits.top-k.kk"]
extra_processors = [{ use = "top-q" }]
sampler = { use = "categorical", options = { a = 1 } }
"""
    result = run("check", toml=toml)
    assert result.exit_code == 2
    found = result.stderr.splitlines()
    assert any(
        line.startswith("headrace.toml:3:1: line.policy: no scheduler policy called 'fcsf'; did you mean fcfs?")
        for line in found
    )
    assert any(
        line.startswith("headrace.toml:6:1: sampling.extra_processors.0: no logits processor called 'top-q'")
        for line in found
    )
    assert "headrace.toml:7:1: sampling.sampler.options: categorical takes no options, got a" in found
    assert "headrace.toml:5:1: sampling.locked.0: top-k has no 'kk'; did you mean k? (fields: k)" in found
    assert len(found) == 4


def test_a_file_that_is_no_toml_is_told_with_what_else_is_wrong(run):
    result = run("check", "--set", "line.max_running=x", toml="[line\n")
    assert result.exit_code == 2
    assert "headrace.toml:1:6: not TOML: " in result.stderr
    assert "--set: line.max_running: must be integer" in result.stderr
