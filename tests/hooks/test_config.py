"""From files, variables and flags to settings with origins. Profiles are in test_profiles.py."""

from pathlib import Path
from textwrap import dedent

import pytest

from headrace.hooks.config import Settings, Use, load
from headrace.hooks.errors import ConfigError


@pytest.fixture
def toml(tmp_path, monkeypatch):
    """Writes headrace.toml into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        Path("headrace.toml").write_text(dedent(text).lstrip("\n"))
        return Path("headrace.toml")

    return write


def problems(**sources):
    with pytest.raises(ConfigError) as error:
        load(profile_entry_points=[], **sources)
    return str(error.value).splitlines()


def test_without_any_source_there_are_the_defaults():
    loaded = load(profile_entry_points=[])
    assert loaded.settings == Settings()
    assert loaded.origin("line.max_running") == "default"


def test_later_sources_win_and_each_value_has_its_origin(toml):
    file = toml("""
        [line]
        max_running = 1
        max_waiting = 1
        block_size = 8
        kv_blocks = 1
    """)
    environ = {"HEADRACE__LINE__MAX_WAITING": "2", "HEADRACE__LINE__BLOCK_SIZE": "2", "HEADRACE_OTHER": "x"}
    flags = {"line.block_size": "3", "line.kv_blocks": "3"}
    loaded = load(file=file, environ=environ, flags=flags, sets=["line.kv_blocks=4"])
    line = loaded.settings.line
    assert (line.max_running, line.max_waiting, line.block_size, line.kv_blocks) == (1, 2, 3, 4)
    assert [loaded.origin(f"line.{name}") for name in ("max_running", "max_waiting", "block_size", "kv_blocks")] == [
        "headrace.toml:2:1",
        "HEADRACE__LINE__MAX_WAITING",
        "--block-size",
        "--set",
    ]


def test_tables_merge_and_arrays_replace(toml):
    file = toml("""
        observers = ["a", "b"]
        [sampling.defaults]
        top_p = 0.9
    """)
    environ = {"HEADRACE__OBSERVERS": '["c"]', "HEADRACE__SAMPLING__DEFAULTS__TOP_K": "40"}
    settings = load(file=file, environ=environ).settings
    assert settings.observers == (Use(use="c"),)
    assert settings.sampling.defaults == {"top_p": 0.9, "top_k": 40}


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ('policy = "fair"', Use(use="fair")),
        ('policy = { use = "fair", options = { weight = 2 } }', Use(use="fair", options={"weight": 2})),
        ('[line.policy]\nuse = "fair"\noptions.weight = 2', Use(use="fair", options={"weight": 2})),
        ("policy.options = { weight = 2 }", Use(use="fcfs", options={"weight": 2})),
    ],
)
def test_a_component_is_a_name_or_a_table(toml, text, policy):
    assert load(file=toml(f"[line]\n{text}")).settings.line.policy == policy


@pytest.mark.parametrize(
    ("environ", "policy"),
    [
        ({"HEADRACE__LINE__POLICY__OPTIONS__AGE": "3"}, Use(use="fair", options={"weight": 2, "age": 3})),
        ({"HEADRACE__LINE__POLICY__USE": "fair"}, Use(use="fair", options={"weight": 2})),
        ({"HEADRACE__LINE__POLICY__USE": "fcfs"}, Use(use="fcfs")),
        ({"HEADRACE__LINE__POLICY": "fcfs"}, Use(use="fcfs")),
    ],
)
def test_options_stay_with_the_component_they_were_written_for(toml, environ, policy):
    file = toml("""
        [line.policy]
        use = "fair"
        options = { weight = 2 }
    """)
    assert load(file=file, environ=environ).settings.line.policy == policy


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("line.max_running", "7", 7),
        ("line.memory_headroom", "0.5", 0.5),
        ("line.prefix_cache", "false", False),
        ("line.kv_memory", "2GiB", 2 * 1024**3),
        ("line.kv_memory", "1024", 1024),
        ("server.max_body_bytes", '"1MiB"', 1024**2),
        ("model.name", "tiny", "tiny"),
        ("model.name", '"tiny"', "tiny"),
        ("model.name", "7", "7"),
        ("model.name", "2024-01-01", "2024-01-01"),
        ("model.name", "true", "true"),
        ("model.name", "a\nb = 1", "a\nb = 1"),
        ("model.quantizer", "int4", Use(use="int4")),
        ("model.quantizer", "4", Use(use="4")),
        ("model.quantizer", '{ use = "int4", options = { group = 32 } }', Use(use="int4", options={"group": 32})),
        ("server.log_format", "json", "json"),
        ("server.cors_origins", "http://a, http://b", ("http://a", "http://b")),
        ("server.cors_origins", '["http://a"]', ("http://a",)),
        ("server.cors_origins", "", ()),
        ("observers", "log, trace", (Use(use="log"), Use(use="trace"))),
        ("sampling.defaults", "{ top_k = 5 }", {"top_k": 5}),
    ],
)
def test_text_is_read_as_the_setting_asks_for(key, text, value):
    section, _, name = key.rpartition(".")
    for source in (
        {"environ": {"HEADRACE__" + key.replace(".", "__").upper(): text}},
        {"flags": {key: text}},
        {"sets": [f"{key}={text}"]},
    ):
        settings = load(**source).settings
        assert getattr(getattr(settings, section) if section else settings, name) == value


def test_sampling_defaults_are_kept_as_a_request_would_have_them(toml):
    file = toml("""
        [sampling.defaults]
        temperature = 1
        logit_bias = { 5 = 2 }
        stop = ["END"]
    """)
    assert load(file=file).settings.sampling.defaults == {
        "temperature": 1.0,
        "logit_bias": {5: 2.0},
        "stop": ("END",),
    }


def test_all_problems_are_reported_at_once_each_with_its_place(toml):
    file = toml("""
        nonsense = 1
        [line]
        max_runing = 3
        policy = { us = "x" }
        [server]
          port = "80"
        cors_origins = [
          "a", 3,
        ]
        [sampling.defaults]
        temprature = 3
        top_p = 3.0
        [[sampling.phases]]
        phase = "bais"
        processors = ["a", { use = 3 }]
        [model]
        max_model_len = 0
    """)
    found = problems(
        file=file,
        environ={"HEADRACE__LINE__MAX_WAITING": "-4", "HEADRACE__LINE__NO__SUCH": "1"},
        flags={"line.block_size": "x"},
        sets=["plain", "model.nam=x", "=1"],
    )
    assert sorted(found) == sorted(
        [
            "--set plain: must be KEY=VALUE, such as line.max_running=32",
            "--set =1: must be KEY=VALUE, such as line.max_running=32",
            "--set: model.nam: unknown; did you mean name?",
            "--block-size: line.block_size: must be integer >= 1 and <= 1024, got 'x'",
            "HEADRACE__LINE__MAX_WAITING: line.max_waiting: must be integer >= 0, got -4",
            "HEADRACE__LINE__NO__SUCH: line.no: unknown",
            "headrace.toml:1:1: nonsense: unknown",
            "headrace.toml:3:1: line.max_runing: unknown; did you mean max_running?",
            "headrace.toml:4:1: line.policy.us: unknown; did you mean use?",
            "headrace.toml:6:3: server.port: must be integer >= 0 and <= 65535, got '80'",
            "headrace.toml:7:1: server.cors_origins.1: must be text, got 3",
            "headrace.toml:11:1: sampling.defaults.temprature: unknown; did you mean temperature?",
            "headrace.toml:12:1: sampling.defaults.top_p: must be number >= 0 and <= 1, got 3.0",
            "headrace.toml:14:1: sampling.phases.0.phase: "
            "must be one of bias, mask, penalty, temperature, truncate, got 'bais'",
            "headrace.toml:15:1: sampling.phases.0.processors.1.use: must be text, got 3",
            "headrace.toml:17:1: model.max_model_len: must be integer >= 1, got 0",
        ]
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[line]\nmax_running = = 3", "headrace.toml:2:15"),
        ("x = 1\nx = 2", "headrace.toml:2:6"),
        ('x = """never', "headrace.toml:1:13"),
    ],
)
def test_what_is_not_toml_has_a_position_too(toml, text, place):
    (problem,) = problems(file=toml(text))
    assert problem.startswith(f"{place}: not TOML: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    missing, binary = tmp_path / "missing.toml", tmp_path / "binary.toml"
    binary.write_bytes(b"\xff")
    assert problems(file=missing)[0].startswith(f"{missing}: cannot be read: ")
    assert problems(file=binary)[0].startswith(f"{binary}: cannot be read: ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "[line]\nmax_step_tokens = 8\nmax_running = 4",
            "headrace.toml:2:1: line.max_step_tokens: max_step_tokens must be >= block_size (16), got 8",
        ),
        (
            "[line]\nblock_size = 1024",
            "headrace.toml:2:1: line.block_size: max_step_tokens must be >= block_size (1024), got 512",
        ),
        (
            "[line]\nmax_running = 600",
            "headrace.toml:2:1: line.max_running: max_step_tokens must be >= max_running (600), got 512",
        ),
        (
            '[line]\nkv_blocks = 8\nkv_memory = "1GiB"',
            "headrace.toml:2:1: line.kv_blocks: kv_memory and kv_blocks say the same thing; set one of them",
        ),
        (
            "[line]\nplugin_stall_s = 1",
            "headrace.toml:2:1: line.plugin_stall_s: plugin_stall_s must be >= watchdog_s (2), got 1",
        ),
        (
            "[line]\nmax_prompt_tokens = 100\n[model]\nmax_model_len = 200",
            "headrace.toml:2:1: line.max_prompt_tokens: must be >= model.max_model_len (200), got 100",
        ),
        (
            '[sampling]\nextra_processors = ["acme/top-p"]',
            "headrace.toml:2:1: sampling.extra_processors.0: the processor top-p already stands in this chain",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(toml, text, problem):
    assert problems(file=toml(text)) == [problem]


def test_a_place_is_told_for_keys_that_the_registry_will_check(toml):
    file = toml("""
        [line.policy]
        use = "fair"
        [line.policy.options]
        weigth = 2
    """)
    where = load(file=file).where("line.policy") / "options" / "weigth"
    assert str(where) == "headrace.toml:4:1: line.policy.options.weigth"
