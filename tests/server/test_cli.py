"""The command line, as far as it needs no model."""

import json
import os
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from headrace.hooks import config
from headrace.server.cli import main


def run(*arguments: str, **environ: str):
    return CliRunner().invoke(main, arguments, env=environ)


def test_every_setting_with_a_flag_is_a_flag_of_serve():
    text = run("serve", "--help").output
    missing = [s.flag for s in config.flags() if s.flag not in text and s.key != "model.uri"]
    assert missing == []


@pytest.mark.parametrize("command", ["chat", "complete", "plan"])
def test_the_other_commands_have_no_flags_of_the_server(command):
    text = run(command, "--help").output
    assert "--max-running" in text
    assert "--port" not in text


def test_the_version_is_the_packages():
    assert run("--version").output.startswith("headrace, version ")


def test_a_wrong_setting_ends_with_2_and_names_its_flag():
    result = run("serve", "--max-running", "none")
    assert result.exit_code == 2
    assert "--max-running" in result.output


def test_all_wrong_settings_are_told_at_once():
    output = run("serve", "--set", "line.max_runing=3", HEADRACE__SERVER__PORT="x").output
    assert "max_runing" in output
    assert "HEADRACE__SERVER__PORT" in output


def test_a_configuration_file_that_is_missing_is_told():
    result = run("serve", "--config", "no-such.toml")
    assert result.exit_code == 2
    assert "no-such.toml" in result.output


def test_a_port_in_use_ends_with_1_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as owner:
        result = run("serve", "--port", str(owner.getsockname()[1]))
    assert result.exit_code == 1
    assert "is in use" in result.output
    assert "Traceback" not in result.output


def test_a_url_where_nobody_answers_ends_with_1():
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
    result = run("chat", "--url", f"http://127.0.0.1:{port}")
    assert result.exit_code == 1
    assert "no model answers" in result.output


def test_help_needs_no_torch():
    program = "import sys; import headrace.server.cli; sys.exit('torch' in sys.modules or 'hypercorn' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_plugins_are_listed_with_their_slots_and_states():
    lines = run("plugins", "list", "--plugins-disable", "top-k").output.splitlines()
    by_id = {line.split()[0]: line for line in lines if line}
    assert "loaded" in by_id["static-keys"]
    assert "auth: static-keys" in by_id["static-keys"]
    assert "skipped" in by_id["top-k"]
    assert "disabled by plugins.disable" in by_id["top-k"]


def test_plugins_are_listed_for_machines_too():
    infos = [json.loads(line) for line in run("plugins", "list", "--json").output.splitlines()]
    assert {"id", "state", "slots", "reason"} <= infos[0].keys()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_that_calls_headrace(shell):
    result = run("completion", shell)
    assert result.exit_code == 0
    assert f"_HEADRACE_COMPLETE={shell}_complete" in result.output


def test_a_shells_completion_finds_commands():
    asked = {"_HEADRACE_COMPLETE": "bash_complete", "COMP_WORDS": "headrace pl", "COMP_CWORD": "1"}
    program = "from headrace.server.cli import main; main(prog_name='headrace')"
    found = subprocess.run([sys.executable, "-c", program], env={**os.environ, **asked}, capture_output=True, text=True)
    assert found.stdout.split() == ["plain,plan", "plain,plugins"]


def test_a_doctor_who_finds_a_problem_ends_with_1_and_marks_it():
    result = run("doctor", "/no/such/model", "--self-test-s", "0")
    assert result.exit_code == 1
    marked = [line for line in result.output.splitlines() if line.startswith("! memory")]
    assert len(marked) == 1
    assert "/no/such/model" in marked[0]


def test_a_model_to_complete_with_that_is_missing_ends_with_1():
    result = run("complete", "some text", "--model", "/no/such/model")
    assert result.exit_code == 1
    assert "/no/such/model" in result.output


def test_a_key_that_is_configured_and_missing_ends_before_anything_is_loaded():
    keys = '{use="static-keys", options={keys=[{name="a", key={env="NO_SUCH_KEY"}}]}}'
    result = run("serve", "--port", "0", "--set", f"server.auth={keys}")
    assert result.exit_code == 1
    assert "NO_SUCH_KEY must hold a key" in result.output
