"""The safetensors loader: whole and sharded folders, and no input that ends in anything but a ModelError."""

import json
import random
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.hooks.errors import ModelError
from headrace.hooks.protocols import Artifact
from headrace.plugins.llama import Llama
from headrace.plugins.safetensors import SafetensorsLoader
from tests.model.tiny import open_checkpoint, transformers_model

CONFIG = {"architectures": ["LlamaForCausalLM"]}


def open_folder(folder):
    return SafetensorsLoader().open(Artifact(kind="safetensors", path=folder, name="x"))


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the tiny model that a test may break."""
    return shutil.copytree(tiny_folder, tmp_path / "tiny")


@pytest.fixture
def sharded(tmp_path):
    """The tiny model in several files."""
    transformers_model().save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def test_configs_and_shapes_are_read(folder):
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')

    checkpoint = open_folder(folder)

    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.metadata["hidden_size"] == 48
    assert checkpoint.shapes["model.layers.1.mlp.down_proj.weight"] == (48, 80)
    assert checkpoint.generation == {"temperature": 0.7}


def test_a_folder_without_generation_config_has_none(folder):
    (folder / "generation_config.json").unlink()

    assert open_folder(folder).generation == {}


def test_shards_are_read_as_one(sharded):
    tensors = transformers_model().state_dict()

    checkpoint = open_folder(sharded)

    assert set(checkpoint.shapes) == set(tensors)
    assert all(checkpoint.tensor(name).equal(tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_become_float32(dtype, tmp_path):
    weight = torch.randn(3, 4).to(dtype)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    tensor = open_folder(tmp_path).tensor("w")

    assert tensor.dtype == torch.float32
    assert tensor.equal(weight.to(torch.float32))


def test_a_tensor_outlives_its_file(folder):
    checkpoint = open_folder(folder)
    wanted = load_file(folder / "model.safetensors")["model.norm.weight"].clone()

    tensor = checkpoint.tensor("model.norm.weight")
    checkpoint.close()
    (folder / "model.safetensors").write_bytes(bytes(100_000))

    assert tensor.equal(wanted)


def test_a_file_cut_anywhere_is_refused(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()

    for cut in [*range(64), *range(64, len(data), 499), len(data) - 1]:
        path.write_bytes(data[:cut])
        with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read as safetensors"):
            open_folder(folder)


def test_flipped_bits_of_the_header_never_end_in_another_error(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header_size = 8 + struct.unpack_from("<Q", data)[0]
    draw = random.Random(5)
    refused = 0

    for _ in range(500):
        broken = bytearray(data)
        broken[draw.randrange(header_size)] ^= 1 << draw.randrange(8)
        path.write_bytes(broken)
        try:
            checkpoint = open_folder(folder)
            Llama().program(checkpoint)
            for name in checkpoint.shapes:
                checkpoint.tensor(name)
        except ModelError:
            refused += 1

    assert refused > 100


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff", "[" * 100_000])
def test_broken_json_is_refused_by_name(name, content, sharded):
    (sharded / name).write_text(content, encoding="latin-1")

    with pytest.raises(ModelError, match=name):
        open_folder(sharded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": None}, "list of one name, found None"),
        ({"architectures": []}, "list of one name"),
        ({"architectures": [1]}, "list of one name"),
    ],
)
def test_a_config_that_names_no_family_we_can_read_is_refused(change, message, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))

    with pytest.raises(ModelError, match=message):
        open_folder(folder)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4"])
@pytest.mark.parametrize("nest", [lambda part: part, lambda part: {"text_config": part}], ids=["plain", "nested"])
def test_a_quantized_checkpoint_is_refused_by_name(nest, method, folder):
    config = json.loads((folder / "config.json").read_text())
    change = nest({"quantization_config": {"quant_method": method}})
    (folder / "config.json").write_text(json.dumps(config | change))

    with pytest.raises(ModelError, match=f"quantized as {method}, .* use the model's folder in bf16"):
        open_folder(folder)


@pytest.mark.parametrize(("name", "method"), [("quantize_config.json", "gptq"), ("hf_quant_config.json", "modelopt")])
def test_a_quantized_checkpoint_is_known_by_the_file_beside_it(name, method, folder):
    (folder / name).write_text("{}")

    with pytest.raises(ModelError, match=f"{name}: the weights are quantized as {method}"):
        open_folder(folder)


def test_a_quantized_checkpoint_is_known_by_its_tensors(tmp_path):
    save_file({"q_proj.qweight": torch.zeros(2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    with pytest.raises(ModelError, match=r"q_proj\.qweight: the weights are quantized as gptq, awq"):
        open_folder(tmp_path)


def test_quantization_without_a_name_is_refused_too(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": [8]}))

    with pytest.raises(ModelError, match="an unnamed format"):
        open_folder(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.uint8])
def test_numbers_that_are_no_floats_never_reach_the_model(dtype, tmp_path):
    save_file({"w": torch.zeros(2).to(dtype)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    with pytest.raises(ModelError, match="w must be one of F64, F32, F16, BF16, found"):
        open_folder(tmp_path).tensor("w")


def test_a_missing_shard_is_named(sharded):
    first = sorted(sharded.glob("*.safetensors"))[0]
    first.unlink()

    with pytest.raises(ModelError, match=f"{first.name}: .* download it again"):
        open_folder(sharded)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"w": "../outside.safetensors"}, "must lie in a file of this folder"),
        ({"w": 7}, "must lie in a file of this folder"),
        ({"w": "none.safetensors"}, r"none\.safetensors: .* names this file, and it is missing; download it again"),
        ({"not there": "model-a.safetensors"}, "not there is here, and it is not"),
        ({}, "weight_map must be an object"),
        ("model-a.safetensors", "weight_map must be an object"),
    ],
)
def test_an_index_that_lies_is_refused(files, message, tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "model-a.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    with pytest.raises(ModelError, match=message):
        open_folder(tmp_path)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()

    with pytest.raises(ModelError, match=r"there must be model\.safetensors"):
        open_checkpoint(folder)


def test_a_tensor_of_integers_is_no_weight(tmp_path):
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    with pytest.raises(ModelError, match="w must be one of F64, F32, F16, BF16, found I8"):
        open_folder(tmp_path).tensor("w")


def test_an_unknown_tensor_is_named(folder):
    with pytest.raises(ModelError, match="no tensor lm_tail"):
        open_folder(folder).tensor("lm_tail")
