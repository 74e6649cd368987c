from pathlib import Path

import msgspec
import pytest

from headrace.hooks.config import Settings, documentation, flags, load, settings
from headrace.hooks.decode import convert

TEXTS = {
    "--kernels": "native",
    "--locked": "seed",
    "--log-format": "json",
    "--log-level": "debug",
    "--memory-headroom": "0.5",
    "--max-step-tokens": "64",
    "--metrics-compat": "vllm",
}
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_in_the_documentation_is_the_one_made_from_the_settings():
    assert PAGE.read_text(encoding="utf-8") == documentation(), (
        "write it anew: python -c 'from headrace.hooks.config import documentation as d; print(d(), end=\"\")'"
    )


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.key)
def test_a_setting_has_a_sentence_a_type_and_a_default(setting):
    assert setting.description.endswith(".")
    assert setting.accepts
    assert convert(msgspec.to_builtins(setting.default, enc_hook=int), setting.type) == setting.default


def test_flags_have_names_of_their_own():
    names = [flag.flag for flag in flags()]
    assert len(names) == len(set(names))
    assert {"--max-running", "--port", "--quantizer", "--plugins-allow"} < set(names)


@pytest.mark.parametrize("flag", flags(), ids=lambda flag: flag.flag)
def test_a_flag_reaches_its_setting(flag):
    loaded = load(flags={flag.key: "true" if flag.is_switch else TEXTS.get(flag.flag, "20")})
    assert loaded.origin(flag.key) == flag.flag


def test_switches_are_the_settings_that_are_true_or_false():
    assert {flag.key for flag in flags() if flag.is_switch} == {
        "model.use_generation_config",
        "line.prefix_cache",
        "plugins.strict",
    }


def test_a_variable_is_named_after_its_key():
    names = {setting.key: setting.environ for setting in settings()}
    assert names["line.max_running"] == "HEADRACE__LINE__MAX_RUNNING"
    assert names["profile"] == "HEADRACE__PROFILE"


def test_every_field_of_the_settings_is_documented():
    def leaves(kind, prefix=""):
        for field in msgspec.structs.fields(kind):
            if (
                isinstance(field.default, msgspec.Struct)
                and field.name not in ("use",)
                and not hasattr(field.default, "use")
            ):
                yield from leaves(type(field.default), f"{prefix}{field.name}.")
            else:
                yield prefix + field.name

    assert sorted(leaves(Settings)) == sorted(setting.key for setting in settings())
