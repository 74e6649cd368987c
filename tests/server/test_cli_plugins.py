"""`headrace plugins list`, `doctor` and `bench`, with strangers' distributions on a path of their own."""

import pytest
from click.testing import CliRunner

from headrace.server.cli import main
from tests.integration import strangers

GOOD = """
from msgspec import Struct
from headrace.hooks.registry import plugin

class Params(Struct, forbid_unknown_fields=True):
    a: float = 1.0

class Good:
    phase = "truncate"
    def __init__(self, context, options): ...
    def admit(self, slot, params, admitted): return params.a > 0
    def apply(self, logits, rows): return logits.mul_(1.5)

@plugin
def register_logits_processor(register): register("good", Good, params=Params)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs plugins, name → source, until the test ends."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def install(**sources):
        for name, source in sources.items():
            strangers.install(tmp_path, name, source)

    yield install
    import sys

    for name in [name for name in sys.modules if name.startswith("stranger_")]:
        del sys.modules[name]


def run(*arguments, **environ):
    return CliRunner().invoke(main, ["plugins", *arguments], env=environ)


def test_list_shows_the_order_of_the_configured_chain(install):
    install(good=GOOD)
    lines = run("list", "--json").output.splitlines()
    assert any('"id":"good"' in line for line in lines)
    result = run("list", HEADRACE__SAMPLING__EXTRA_PROCESSORS="good")
    order = result.output.partition("order of sampling:\n")[2].splitlines()
    assert [line.split()[0] for line in order] == ["bias", "penalty", "mask", "temperature", "truncate", "draw"]
    assert order[4].split(None, 1)[1] == "top-k → top-p → min-p → good"
    assert order[5].split() == ["draw", "categorical"]
    (good,) = [line for line in result.output.splitlines() if line.startswith("good ")]
    assert "selected" in good


def test_list_says_why_the_configured_chain_cannot_run(install):
    result = run("list", HEADRACE__SAMPLING__EXTRA_PROCESSORS="nobody")
    assert "cannot run" in result.output
    assert "no logits processor called 'nobody'" in result.output


BROKEN = {
    "a missing module": ("import nowhere_at_all", "install what brings the module nowhere_at_all"),
    "an error on import": ("1 / 0", "report this to the author of stranger-bad"),
    "a misspelt hook": (
        "from headrace import plugin\n@plugin\ndef register_smapler(register): ...",
        "its author must rename the function",
    ),
    "a wrong argument": (
        "from headrace import plugin\n@plugin\ndef register_sampler(register, order): ...",
        "its author must write `def register_SLOT(register): …`",
    ),
    "another API": ("headrace_api = 7", "install a version of stranger-bad that was made for this Headrace"),
    "no hook": ("x = 1", "its author must mark the function with @headrace.plugin"),
    "a hook that fails": (
        "from headrace import plugin\n@plugin\ndef register_sampler(register): 1 / 0",
        "report this to the author of stranger-bad",
    ),
}


@pytest.mark.parametrize(("source", "advice"), BROKEN.values(), ids=list(BROKEN))
def test_doctor_says_why_a_plugin_failed_and_what_would_mend_it(install, source, advice):
    install(bad=source)
    result = run("doctor")
    assert result.exit_code == 1
    text = result.output.partition("! plugin bad (stranger-bad 1.0)")[2]
    assert "failed: " in text
    assert f"to mend it: {advice}" in text


def test_doctor_finds_nothing_where_nothing_is_wrong(install):
    install(good=GOOD)
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "from Headrace and 1 other" in result.output


@pytest.mark.parametrize(
    ("arguments", "environ", "text", "code"),
    [
        (["--plugins-disable", "good"], {}, "to mend it: take good out of plugins.disable", 0),
        (["--plugins-strict"], {}, "to mend it: add stranger-good to plugins.allow, if you trust it", 0),
        ([], {"HEADRACE_PLUGINS": "off"}, "to mend it: unset HEADRACE_PLUGINS, or add good to it", 0),
        (["--policy", "fcsf"], {}, "no scheduler policy called 'fcsf'; did you mean fcfs?", 1),
    ],
)
def test_doctor_knows_switches_and_choices(install, arguments, environ, text, code):
    install(good=GOOD)
    result = run("doctor", *arguments, **environ)
    assert text in result.output
    assert result.exit_code == code


def test_doctor_tells_of_opt_in_slots_and_of_names_that_two_offer(install):
    middleware = "from headrace import plugin\n@plugin\ndef register_middleware(register): register('mw', print)\n"
    install(good=GOOD, other=GOOD + middleware)
    result = run("doctor")
    assert "2 plugins offer the logits_processor good: choose good/good or other/good" in result.output
    assert "may not fill middleware" in result.output
    assert result.exit_code == 0


def test_doctor_sees_a_package_that_forgot_its_entry_point(install, tmp_path):
    install()
    info = tmp_path / "headrace_lost-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-lost\nVersion: 1.0\n")
    assert "package headrace-lost is installed and has no entry point" in run("doctor").output


def test_bench_gives_a_row_for_each_batch(install):
    install(good=GOOD)
    result = run("bench", "good", "--seconds", "0", "--vocab-size", "100")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["1", "8", "64"]
    assert all(float(row[1]) > 0 for row in rows)


def test_bench_says_when_parameters_change_nothing(install):
    install(good=GOOD)
    result = run("bench", "good", "--seconds", "0", "--vocab-size", "100", "--params", "{ a = 0 }")
    assert "these parameters change nothing" in result.output


@pytest.mark.parametrize("name", ["categorical", "fcfs"])
def test_bench_measures_samplers_and_policies_too(name):
    result = run("bench", name, "--seconds", "0", "--vocab-size", "100")
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == 6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gguf"], "bench measures logits_processor, sampler, scheduler_policy; the slot of gguf is weight_loader"),
        (["min-q"], "no component called 'min-q' is installed; did you mean min-p?"),
        (["min-p", "--params", "{ q = 1 }"], "--params.q: unknown"),
        (["min-p", "--params", "3"], "--params: must be a TOML inline table"),
    ],
)
def test_bench_says_what_it_cannot_measure(arguments, text):
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert text in result.output
