"""Settings as a list with origins, which is a file that says the same."""

import msgspec
import pytest

from headrace.hooks.config import load, settings
from headrace.hooks.config_show import as_toml, lines

FILE = """
observers = ["a", { use = "b", options = { "odd key" = "ü\\n" } }]
[line]
kv_memory = "2GiB"
policy = { use = "fair", options = { weight = 2 } }
[sampling]
extra_processors = [{ use = "top-a", options = { ratio = 0.5 } }]
[sampling.defaults]
temperature = 1
logit_bias = { 5 = 2 }
stop = ["END"]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "headrace.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", ["", FILE], ids=["defaults", "file"])
def test_what_is_shown_is_a_file_with_the_same_settings(tmp_path, text):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(text, encoding="utf-8")
    loaded = load(file=first)
    shown = [f"{line.key} = {as_toml(line.value)}" for line in lines(loaded) if line.value is not None]
    second.write_text("\n".join(shown), encoding="utf-8")
    again = load(file=second).settings
    assert msgspec.to_builtins(again, enc_hook=int) == msgspec.to_builtins(loaded.settings, enc_hook=int)


def test_every_setting_is_shown_with_who_said_so(file):
    environ = {"HEADRACE__LINE__POLICY__OPTIONS__AGE": "3"}
    shown = list(lines(load(file=file, environ=environ, flags={"line.block_size": "32"})))
    origins = {line.key: line.origin.rpartition("/")[2] for line in shown}
    keys = {line.key for line in shown}
    missing = [s.key for s in settings() if not any(key == s.key or key.startswith(s.key + ".") for key in keys)]
    assert missing == []
    assert origins["line.policy.use"] == "headrace.toml:5:1"
    assert origins["line.policy.options.age"] == "HEADRACE__LINE__POLICY__OPTIONS__AGE"
    assert origins["line.block_size"] == "--block-size"
    assert origins["sampling.defaults.stop"] == "headrace.toml:11:1"
    assert origins["server.port"] == "default"
