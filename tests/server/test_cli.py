"""The command line, as far as it needs no model."""

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


@pytest.mark.parametrize("command", ["chat", "plan"])
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
