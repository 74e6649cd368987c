"""The border to the compiled library: its structs, field by field as `src/abi.h` has them, and its functions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

VERSION = 8
LIBRARY = Path(os.environ.get("HEADRACE_KERNELS") or Path(__file__).with_name("_headrace.so"))
"""The environment may name another build, such as one with sanitizers."""

SMALL = 2.0**-112
"""What is smaller counts as 0 where it becomes integers; see `integers.h`."""


class Kind(IntEnum):
    """What an operation does; see `HrKind`."""

    EMBED = 0
    POSITION = 1
    NORM = 2
    LAYERNORM = 3
    QUANT = 4
    MATMUL = 5
    GATED = 6
    ACTIVATE = 7
    ADD = 8
    SCALE = 9
    SOFTCAP = 10
    TURNS = 11
    ROTATE = 12
    STORE = 13
    ATTEND = 14


class Domain(IntEnum):
    """What the rows of an operation are."""

    TOKENS = 0
    SAMPLES = 1


class Storage(IntEnum):
    """How a matrix lies in memory; see `HrStorage`."""

    F32 = 0
    BF16 = 1
    F16 = 2
    Q8 = 3
    Q4 = 4
    ROWS = 5


ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class Ref(Structure):
    """A buffer (-1: none) and the first column in it."""

    _fields_ = (("buf", c_int32), ("off", c_int32))


class Op(Structure):
    _fields_ = (
        ("kind", c_int32),
        ("domain", c_int32),
        ("gather", c_int32),
        ("act", c_int32),
        ("a", Ref),
        ("b", Ref),
        ("out", Ref),
        ("qin", c_int32),
        ("qout", c_int32),
        ("width", c_int32),
        ("inner", c_int32),
        ("matrix", c_int32),
        ("freq", c_int32),
        ("layer", c_int32),
        ("window", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("f0", c_float),
        ("f1", c_float),
        ("w0", c_void_p),
        ("w1", c_void_p),
    )


class Matrix(Structure):
    _fields_ = (
        ("storage", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("gated", c_int32),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class Buffer(Structure):
    _fields_ = (("data", c_void_p), ("stride", c_int64))


class Ints(Structure):
    _fields_ = (("q", c_void_p), ("scales", c_void_p), ("stride", c_int64), ("per_group", c_int64))


class Turn(Structure):
    _fields_ = (
        ("frequencies", c_void_p),
        ("pairs", c_int32),
        ("magnitude", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class Cache(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("layer_stride", c_int64),
        ("value_offset", c_int64),
        ("head_stride", c_int64),
        ("block_size", c_int32),
        ("bits", c_int32),
    )


class Program(Structure):
    _fields_ = (
        ("ops", POINTER(Op)),
        ("matrices", POINTER(Matrix)),
        ("buffers", POINTER(Buffer)),
        ("ints", POINTER(Ints)),
        ("turns", POINTER(Turn)),
        ("cache", Cache),
        ("num_ops", c_int32),
        ("num_matrices", c_int32),
        ("num_buffers", c_int32),
        ("num_ints", c_int32),
        ("num_turns", c_int32),
        ("scratch_floats", c_int32),
    )


class Step(Structure):
    _fields_ = (
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("cu_tokens", c_void_p),
        ("seq_lens", c_void_p),
        ("cu_blocks", c_void_p),
        ("tables", c_void_p),
        ("sample_rows", c_void_p),
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("num_samples", c_int32),
        ("pad", c_int32),
    )


class Draw(Structure):
    _fields_ = (
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("top_k", c_int32),
        ("uniform", c_double),
        ("seed", c_uint64),
        ("position", c_uint64),
        ("logits", c_void_p),
        ("token", c_int32),
        ("top", c_float),
        ("choice", c_uint32),
        ("num_prompt", c_int32),
        ("tokens", c_void_p),
        ("num_tokens", c_int32),
        ("repetition", c_float),
        ("presence", c_float),
        ("frequency", c_float),
    )


STRUCTS = (Ref, Op, Matrix, Buffer, Ints, Turn, Cache, Program, Step, Draw)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None where it was not built or was built from other sources."""
    try:
        lib = ctypes.CDLL(os.fspath(LIBRARY))
        version = lib.hr_abi()
    except (OSError, AttributeError):
        return None
    found = (c_int32 * len(STRUCTS))()
    lib.hr_sizes(found, len(STRUCTS))
    if version != VERSION or list(found) != [ctypes.sizeof(struct) for struct in STRUCTS]:
        return None
    lib.hr_dialect.restype = c_char_p
    lib.hr_dialect.argtypes = [c_char_p]
    lib.hr_create.restype = c_void_p
    lib.hr_create.argtypes = [POINTER(Program), c_char_p, c_int32, c_int32]
    lib.hr_destroy.restype = None
    lib.hr_destroy.argtypes = [c_void_p]
    lib.hr_draw.restype = None
    lib.hr_draw.argtypes = [c_void_p, c_void_p, c_int32, c_int32]
    lib.hr_draw_slots.restype = None
    lib.hr_draw_slots.argtypes = [c_void_p, *[c_void_p] * 4, c_int64, c_int32, c_int32, c_void_p]
    lib.hr_limits.restype = None
    lib.hr_limits.argtypes = [c_void_p, c_int64, c_int32, POINTER(c_double), POINTER(c_double)]
    lib.hr_run.restype = None
    lib.hr_run.argtypes = [c_void_p, POINTER(Step), c_int32, c_int32]
    return lib


@cache
def give_way() -> Callable[[int, bool], None]:
    """`hr_give_way(engine, wanted)`, called without letting go of the interpreter, which would take longer than it."""
    function = ctypes.PyDLL(os.fspath(LIBRARY)).hr_give_way
    function.restype = None
    function.argtypes = [c_void_p, c_int32]
    return function


def dialect(wanted: str = "") -> str | None:
    """The instruction set the library speaks here: `amx`, `avx512`, `avx2` or `portable`. None: there is no library.

    Args:
        wanted: only this one.
    """
    lib = library()
    if lib is None:
        return None
    name: bytes | None = lib.hr_dialect(wanted.encode())
    return None if name is None else name.decode()
