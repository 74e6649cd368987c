"""Building a Stack beside the one that serves: what may change, what is taken over, what the fingerprint tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.parts import Restacked
from headrace.core.restack import SWAPPED, Restack, changes
from headrace.hooks.decode import Use
from headrace.hooks.errors import ConfigError, StartError
from headrace.hooks.messages import ChatPrompt
from headrace.hooks.origins import no_origin
from headrace.hooks.protocols import Context, SamplingContext
from headrace.hooks.reimport import Code
from headrace.hooks.settings import SECTIONS, Line, Model, Plugins, Sampling, Server, Settings
from headrace.hooks.stack import Stack
from tests.fakes import NumberTokenizer, bound, make_stack

PLAIN = Settings(model=Model(chat_template=Use(use="plain")))


@pytest.fixture
def restack() -> Restack:
    context = Context(
        tokenizer=NumberTokenizer(),  # type: ignore[arg-type]
        checkpoint=object(),  # type: ignore[arg-type]
        sampling=SamplingContext(vocab_size=1000, num_slots=4),
    )
    return Restack(context, bound("numbers", NumberTokenizer()), {"temperature": 0.6}, Code())


def rebuild(restack: Restack, settings: Settings, old: Stack | None = None, before: Settings = PLAIN) -> Restacked:
    return restack(settings, before, no_origin, old or make_stack())


def keys() -> Iterator[str]:
    for field in msgspec.structs.fields(Settings):
        if field.name in SECTIONS:
            yield from (f"{field.name}.{each.name}" for each in msgspec.structs.fields(field.type))
        else:
            yield field.name


def test_what_can_be_swapped_are_settings() -> None:
    assert set(keys()) >= SWAPPED


def test_changes_are_named_by_their_keys() -> None:
    after = Settings(
        line=Line(policy=Use(use="priority"), max_running=3),
        server=Server(port=1),
        observers=(Use(use="jsonl"),),
    )
    assert list(changes(Settings(), after)) == ["observers", "line.max_running", "line.policy", "server.port"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (Settings(model=Model(uri="elsewhere", chat_template=Use(use="plain"))), "model.uri"),
        (Settings(model=PLAIN.model, server=Server(host="0.0.0.0")), "server.host"),
        (Settings(model=PLAIN.model, plugins=Plugins(quarantine_after=1)), "plugins.quarantine_after"),
        (Settings(model=PLAIN.model, line=Line(block_size=32)), "line.block_size"),
    ],
)
def test_what_cannot_be_swapped_is_refused_by_name(restack: Restack, settings: Settings, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: cannot be changed while it serves; it needs a restart$"):
        rebuild(restack, settings)


def test_all_reasons_are_told_at_once(restack: Restack) -> None:
    settings = Settings(
        model=Model(uri="elsewhere", chat_template=Use(use="plian")),
        line=Line(policy=Use(use="nobody"), admission=(Use(use="concurrency", options={"lots": 1}),)),
        sampling=Sampling(sampler=Use(use="dice"), extra_processors=(Use(use="nothing"),)),
    )
    with pytest.raises(ConfigError) as caught:
        rebuild(restack, settings)
    places = {line.partition(":")[0] for line in str(caught.value).splitlines()}
    assert places >= {
        "model.uri",
        "model.chat_template.use",
        "line.policy.use",
        "sampling.sampler.use",
        "sampling.extra_processors.0.use",
    }
    assert any(place.startswith("line.admission.0.options") for place in places)


def test_a_stack_on_which_a_plain_request_would_be_refused_is_not_built(restack: Restack) -> None:
    settings = Settings(model=PLAIN.model, sampling=Sampling(phases=()))
    with pytest.raises(StartError, match="a request that sets nothing would be refused: temperature needs the logits"):
        rebuild(restack, settings)


def test_each_stack_has_the_next_revision_in_all_its_components(restack: Restack) -> None:
    first = rebuild(restack, PLAIN).stack
    second = rebuild(restack, PLAIN, first).stack
    assert (first.revision, second.revision) == (1, 2)
    revisions = {slot: each.revision for slot, each in second.bounds}
    assert revisions.pop("tokenizer") == 0
    assert set(revisions.values()) == {2}


# ── what is taken over ────────────────────────────────────────────────────────────────────────────────────────────


def guarded(**options: int) -> Settings:
    return Settings(model=PLAIN.model, line=Line(admission=(Use(use="concurrency", options=options),)))


def test_admission_of_which_nothing_has_changed_is_taken_over_with_what_it_remembers(restack: Restack) -> None:
    first = rebuild(restack, guarded(max_requests_per_tenant=3)).stack
    same = rebuild(restack, guarded(max_requests_per_tenant=3), first).stack
    other = rebuild(restack, guarded(max_requests_per_tenant=4), first).stack
    assert same.admission[0].component is first.admission[0].component
    assert other.admission[0].component is not first.admission[0].component


def watched(path: Path) -> Settings:
    return Settings(model=PLAIN.model, observers=(Use(use="jsonl", options={"path": str(path)}),) * 2)


def test_each_observer_is_taken_over_once_and_the_spare_ones_are_closed(restack: Restack, tmp_path: Path) -> None:
    first = rebuild(restack, watched(tmp_path / "a")).stack
    second = rebuild(restack, watched(tmp_path / "a"), first).stack
    third = rebuild(restack, watched(tmp_path / "b"), second).stack
    assert [id(each.component) for each in first.observers] == [id(each.component) for each in second.observers]
    assert not {id(each.component) for each in third.observers} & {id(each.component) for each in second.observers}
    for each in (*first.observers, *third.observers):
        each.component.close()


def test_processors_are_always_new(restack: Restack) -> None:
    first = rebuild(restack, PLAIN).stack
    second = rebuild(restack, PLAIN, first).stack
    assert first.fingerprint == second.fingerprint
    assert all(new.component is not old.component for new, old in zip(second.processors, first.processors, strict=True))


# ── defaults and fingerprints ─────────────────────────────────────────────────────────────────────────────────────


def test_the_defaults_of_requests_are_part_of_the_fingerprint(restack: Restack) -> None:
    plain = rebuild(restack, PLAIN)
    colder = rebuild(restack, Settings(model=PLAIN.model, sampling=Sampling(defaults={"temperature": 0.1})))
    assert (plain.defaults, colder.defaults) == ({"temperature": 0.6}, {"temperature": 0.1})
    assert plain.stack.fingerprint != colder.stack.fingerprint


def test_a_template_file_is_read_again_and_its_text_is_part_of_the_fingerprint(
    restack: Restack, tmp_path: Path
) -> None:
    file = tmp_path / "chat.jinja"
    template: Any = Use(use="jinja", options={"file": str(file)})
    settings = Settings(model=Model(chat_template=template))
    file.write_text("1 {{ messages[0].content }}")
    first = rebuild(restack, settings, before=settings).stack
    file.write_text("2 {{ messages[0].content }}")
    second = rebuild(restack, settings, first, before=settings).stack
    prompt = ChatPrompt(messages=({"role": "user", "content": "7"},))
    assert [each.chat_template.component.render(prompt).text for each in (first, second)] == ["1 7", "2 7"]
    assert first.fingerprint != second.fingerprint
