"""The header of a GGUF file: its metadata and its table of tensors, read with every step checked.

A count or a length is compared with what is left of the file before anything is made of it, so that a cut or corrupt
file ends in a ModelError and never in a crash or a large allocation.

Source of the format: docs/gguf.md in ggml-org/ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from struct import Struct as Format
from typing import Any

from msgspec import Struct

from ...hooks.errors import ModelError

STRING, ARRAY = 8, 9
SCALARS = {
    number: Format(f"<{letter}")
    for number, letter in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
U32, U64 = SCALARS[4], SCALARS[10]
MAX_ELEMENTS = 1 << 24
"""Of one array. The largest are vocabularies of some 300,000; a list of numbers takes many times their bytes."""
MAX_DIMENSIONS = 4
MAX_NESTING = 4


class TensorInfo(Struct, frozen=True, kw_only=True):
    """Where a tensor lies. *shape* is torch's; *start* and *size* are bytes in the file."""

    shape: tuple[int, ...]
    type: int
    start: int
    size: int


class Reader:
    """Walks over a GGUF header. Every method reads at `offset` and moves on."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path = path
        self.data = data
        self.offset = 0

    def wrong(self, expected: str, found: object, offset: int | None = None) -> ModelError:
        """The error for what stands at *offset*, or where the reader is."""
        at = self.offset if offset is None else offset
        return ModelError(f"{self.path}: at byte {at}: expected {expected:.200}, found {found!s:.200}")

    def room(self, count: int, size: int, what: str) -> None:
        """Refuse *count* things of at least *size* bytes each where less is left."""
        left = len(self.data) - self.offset
        if count * size > left:
            found = f"{left} bytes to the end of the file: it is cut or corrupt"
            raise self.wrong(f"{what:.100} ({count * size} bytes at least)", found)

    def number(self, form: Format, what: str) -> Any:
        """One scalar."""
        self.room(1, form.size, what)
        (value,) = form.unpack_from(self.data, self.offset)
        self.offset += form.size
        return value

    def string(self, what: str) -> str:
        """A length and as many bytes of UTF-8."""
        length = self.number(U64, f"the length of {what}")
        self.room(length, 1, what)
        raw = self.data[self.offset : self.offset + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what} in UTF-8", repr(raw[:40])) from error
        self.offset += length
        return text

    def value(self, kind: int, what: str, nesting: int = 0) -> Any:
        """A value of the metadata: a scalar, a string or a list."""
        if kind in SCALARS:
            return self.number(SCALARS[kind], what)
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY and nesting < MAX_NESTING:
            return self._array(what, nesting)
        raise self.wrong(f"the type of {what}, 0 to 12", f"{kind}, {nesting} arrays deep")

    def _array(self, what: str, nesting: int) -> list[Any]:
        kind = self.number(U32, f"the element type of {what}")
        count = self.number(U64, f"the element count of {what}")
        if count > MAX_ELEMENTS:
            raise self.wrong(f"at most {MAX_ELEMENTS} elements in {what}", count)
        if form := SCALARS.get(kind):
            self.room(count, form.size, what)
            values = Format(f"<{count}{form.format[1:]}").unpack_from(self.data, self.offset)
            self.offset += count * form.size
            return list(values)
        self.room(count, U64.size, what)
        if kind == STRING:
            return self._strings(count, what)
        return [self.value(kind, what, nesting + 1) for _ in range(count)]

    def _strings(self, count: int, what: str) -> list[str]:
        """Like *count* times `string`, without a call each: a vocabulary and its merges are 100,000 of them."""
        data, end, unpack, found = self.data, len(self.data), U64.unpack_from, []
        for _ in range(count):
            start = self.offset + 8
            if start > end or (stop := start + unpack(data, self.offset)[0]) > end:
                return [self.string(what)]  # Fails, and says why.
            try:
                found.append(data[start:stop].decode())
            except UnicodeDecodeError:
                return [self.string(what)]
            self.offset = stop
        return found


def read_header(path: Path, data: mmap.mmap | bytes) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The metadata and the tensors of the GGUF file *data*; *path* is for errors.

    Raises:
        ModelError: cut, corrupt, or of another version; says at which byte, what was expected and what was found.
    """
    reader = Reader(path, data)
    num_tensors, num_values = _read_counts(reader)
    metadata = _read_metadata(reader, num_values)
    return metadata, _read_tensors(reader, num_tensors, _alignment(reader, metadata))


def _read_counts(reader: Reader) -> tuple[int, int]:
    reader.room(1, 24, "a GGUF header")
    magic = bytes(reader.data[:4])
    if magic != b"GGUF":
        raise reader.wrong("b'GGUF'", repr(magic))
    reader.offset = 4
    version = reader.number(U32, "the version")
    if version not in (2, 3):
        found = "a big-endian file" if version & 0xFFFF == 0 and version else version
        raise reader.wrong("version 2 or 3", found, 4)
    num_tensors, num_values = reader.number(U64, "the tensor count"), reader.number(U64, "the metadata count")
    # A name's length, its dimensions' count, one dimension, type, offset; a key's length, a type, a byte of value.
    reader.room(num_tensors, 32, f"{num_tensors} tensors")
    reader.room(num_values, 13, f"{num_values} keys")
    return num_tensors, num_values


def _read_metadata(reader: Reader, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(count):
        start = reader.offset
        key = reader.string("a key")
        if key in found:
            raise reader.wrong("each key once", f"{key!r} again", start)
        found[key] = reader.value(reader.number(U32, f"the type of {key}"), key)
    return found


def _alignment(reader: Reader, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ModelError(
            f"{reader.path}: general.alignment must be a power of two from 8 to 1048576, found {alignment!r}"
        )
    return alignment


def _read_tensors(reader: Reader, count: int, alignment: int) -> dict[str, TensorInfo]:
    """The table of tensors; offsets in it count from its end, rounded up."""
    table = [(reader.offset, *_read_tensor(reader)) for _ in range(count)]
    data_start = -(-reader.offset // alignment) * alignment
    found: dict[str, TensorInfo] = {}
    for place, name, shape, kind, offset in table:
        start, size = data_start + offset, _size_bytes(reader, place, name, shape, kind)
        if name in found:
            raise reader.wrong("each tensor once", f"{name!r} again", place)
        if offset % alignment:
            raise reader.wrong(f"an offset of {name} that is a multiple of {alignment}", offset, place)
        if start + size > len(reader.data):
            ends = f"the end of the file at {len(reader.data)}: it is cut or corrupt"
            raise reader.wrong(f"{name} to end at byte {start + size}", ends, place)
        found[name] = TensorInfo(shape=shape, type=kind, start=start, size=size)
    return found


def _read_tensor(reader: Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string("a tensor's name")
    num_dimensions = reader.number(U32, f"the number of dimensions of {name}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise reader.wrong(f"1 to {MAX_DIMENSIONS} dimensions of {name}", num_dimensions)
    shape = tuple(reader.number(U64, f"a dimension of {name}") for _ in range(num_dimensions))[::-1]
    kind, offset = reader.number(U32, f"the type of {name}"), reader.number(U64, f"the offset of {name}")
    return name, shape, kind, offset


def _size_bytes(reader: Reader, place: int, name: str, shape: tuple[int, ...], kind: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_size, type_size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise reader.wrong(f"a type of {name} that the gguf package knows", kind, place) from error
    if 0 in shape or shape[-1] % block_size:
        raise reader.wrong(f"rows of {name} in whole blocks of {block_size}", f"the shape {list(shape)}", place)
    return math.prod(shape) // block_size * type_size
