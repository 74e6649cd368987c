"""Small checkpoints, hundreds of ways to break them, and a process that opens every one with little memory and time.

Run as `python -m tests.model.hostile gguf|safetensors FOLDER`; what became of each is written to results.json there.
"""

from __future__ import annotations

import json
import math
import random
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

MEMORY_BYTES = 512 << 20
SECONDS = 5.0
FORMATS = {bool: (7, "<?"), int: (10, "<Q"), float: (6, "<f")}
U64 = (0, 1, 2, 255, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
WRONG = (
    0,
    1,
    1 << 31,
    (1 << 64) - 1,
    -1.0,
    0.5,
    math.nan,
    math.inf,
    "",
    "x",
    "none",
    True,
    [],
    [1],
    [0.5],
    ["a"],
    [["a"]],
)
SIZES = {"V": 262, "D": 8, "F": 12}
SHAPES = {
    "token_embd": "VD",
    "output_norm": "D",
    "blk.0.attn_norm": "D",
    "blk.0.attn_q": "DD",
    "blk.0.attn_k": "DD",
    "blk.0.attn_v": "DD",
    "blk.0.attn_output": "DD",
    "blk.0.ffn_norm": "D",
    "blk.0.ffn_gate": "FD",
    "blk.0.ffn_up": "FD",
    "blk.0.ffn_down": "DF",
}
MODEL = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 4,
    "llama.vocab_size": 262,
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTES, "a", "b", "ab"],
    "tokenizer.ggml.scores": [0.0] * 259 + [-2.0, -3.0, -1.0],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1, 1, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.ggml.add_bos_token": True,
}
BPE = {
    **SPM,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.merges": ["a b"],
}


# ── GGUF ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value: Any) -> tuple[int, bytes]:
    """The number of a value's type, and the value."""
    if isinstance(value, str):
        return 8, text(value)
    if isinstance(value, list):
        parts = [typed(part) for part in value]
        kind = parts[0][0] if parts else 4
        return 9, struct.pack("<IQ", kind, len(parts)) + b"".join(part for _, part in parts)
    number, form = FORMATS[type(value)]
    return number, struct.pack(form, value)


def write(metadata: Mapping[str, Any], shapes: Mapping[str, str] = SHAPES, kind: int = 0) -> bytes:
    """A GGUF file of that metadata, whose tensors hold ones."""
    parts, data = [b"GGUF", struct.pack("<IQQ", 3, len(shapes), len(metadata))], b""
    for key, value in metadata.items():
        number, raw = typed(value)
        parts += text(key), struct.pack("<I", number), raw
    for name, letters in shapes.items():
        sizes = [SIZES[letter] for letter in letters]
        place = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *reversed(sizes), kind, len(data))
        parts += text(f"{name}.weight"), place
        data += (struct.pack("<f", 1.0) * math.prod(sizes)).ljust(-(-math.prod(sizes) * 4 // 32) * 32, b"\0")
    header = b"".join(parts)
    return header.ljust(-(-len(header) // 32) * 32, b"\0") + data


def gguf_mutations() -> Iterator[tuple[str, bytes]]:
    for kind, words in (("spm", SPM), ("bpe", BPE)):
        metadata = {**MODEL, **words}
        whole = write(metadata)
        yield f"{kind} whole", whole
        header_size = whole.rindex(b"blk.0.ffn_down.weight") + 60
        yield from bent(kind, whole, header_size)
        for key in metadata if kind == "spm" else words:
            yield f"{kind} without {key}", write({other: value for other, value in metadata.items() if other != key})
            for value in WRONG:
                yield f"{kind} {key}={value!r}", write({**metadata, key: value})
    for number in range(48):
        yield f"all tensors of type {number}", write({**MODEL, **SPM}, kind=number)
    for name in SHAPES:
        yield f"without {name}", write({**MODEL, **SPM}, {other: SHAPES[other] for other in SHAPES if other != name})
        yield f"{name} turned", write({**MODEL, **SPM}, {**SHAPES, name: SHAPES[name][::-1] + "F"})


def bent(kind: str, whole: bytes, header_size: int) -> Iterator[tuple[str, bytes]]:
    """Cuts, numbers put over what was there, and flipped bits."""
    for cut in range(0, len(whole), len(whole) // 40):
        yield f"{kind} cut at {cut}", whole[:cut]
    for place in range(0, header_size - 8, max(1, header_size // 90)):
        value = U64[place % len(U64)]
        yield f"{kind} {value} at {place}", whole[:place] + struct.pack("<Q", value) + whole[place + 8 :]
    draw = random.Random(3)
    for _ in range(90):
        flipped = bytearray(whole)
        place = draw.randrange(header_size)
        flipped[place] ^= 1 << draw.randrange(8)
        yield f"{kind} bit of {place}", bytes(flipped)


# ── safetensors ───────────────────────────────────────────────────────────────────────────────────────────────────

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 262,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "blk.": "model.layers.",
}
WRONG_ENTRIES = {
    "dtype": ["F64", "F16", "I32", "U8", "F8_E4M3", "BOOL", "X", "", 5, None, []],
    "shape": [[], [0], [-1], [1 << 63], [1 << 64], [1 << 32, 1 << 32], [1.5], ["a"], "x", None, [1] * 1000, [8, 8, 1]],
    "data_offsets": [[0, 0], [4, 0], [-4, 4], [0, 1 << 63], [1 << 63, 1 << 64], [0], [1, 33], [0, 4, 8], "x", None, 7],
}
WRONG_HEADERS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"{}",
    b"\xff\xfe",
    b"[" * 20000,
    b'{"a":' * 20000,
    b'{"__metadata__": 5}',
    b"0" * 99,
]


def entries() -> dict[str, Any]:
    """The header's table."""
    table, start = {}, 0
    for name, letters in SHAPES.items():
        for short, word in HF_NAMES.items():
            name = name.replace(short, word)
        shape = [SIZES[letter] for letter in letters]
        table[f"{name}.weight"] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [start, start + 4 * math.prod(shape)],
        }
        start += 4 * math.prod(shape)
    return table


def pack(header: bytes, *, length: int | None = None) -> bytes:
    num_values = sum(math.prod(SIZES[letter] for letter in letters) for letters in SHAPES.values())
    return struct.pack("<Q", len(header) if length is None else length) + header + struct.pack("<f", 1.0) * num_values


def safetensors_mutations() -> Iterator[tuple[str, dict[str, bytes]]]:
    table, config = entries(), json.dumps(CONFIG).encode()
    header = json.dumps(table).encode()
    whole = pack(header)
    yield "whole", {"model.safetensors": whole, "config.json": config}
    for what, data in (*bent("file", whole, len(header) + 8), *wrong_tables(table)):
        yield what, {"model.safetensors": data, "config.json": config}
    for length in U64:
        yield f"length {length}", {"model.safetensors": pack(header, length=length), "config.json": config}
    for key in CONFIG:
        for value in (None, -1, {}, {"a": []}, *WRONG):
            changed = json.dumps({**CONFIG, key: value}).encode()
            yield f"{key}={value!r}", {"model.safetensors": whole, "config.json": changed}
    for files in (
        {},
        [],
        "x",
        {"w": "../a"},
        {"w": "/etc/passwd"},
        {"w": None},
        {"w": "a.safetensors"},
        {"w": "config.json"},
    ):
        index = json.dumps({"weight_map": files}).encode()
        yield f"index {files!r}", {"model.safetensors.index.json": index, "config.json": config}


def wrong_tables(table: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    for raw in WRONG_HEADERS:
        yield f"header {raw[:20]!r}", pack(raw)
    for name in list(table)[:3]:
        yield f"without {name}", pack(json.dumps({other: table[other] for other in table if other != name}).encode())
        for field, values in WRONG_ENTRIES.items():
            for value in values:
                changed = {**table, name: {**table[name], field: value}}
                yield f"{name} {field}={value!r:.40}", pack(json.dumps(changed).encode())


# ── opening them ──────────────────────────────────────────────────────────────────────────────────────────────────


def open_all(path: Path, *, with_tokenizer: bool) -> None:
    """What the engine does with a checkpoint before it serves, but for the model itself."""
    from headrace.core.model.load import check
    from headrace.hooks.protocols import Context
    from headrace.plugins.gguf import GGUFLoader
    from headrace.plugins.llama import Llama
    from headrace.plugins.safetensors import SafetensorsLoader
    from headrace.plugins.sources import FileSource
    from headrace.plugins.tokenizer import tokenizer

    artifact = FileSource().resolve(str(path), lambda *progress: None)
    checkpoint = (GGUFLoader() if artifact.kind == "gguf" else SafetensorsLoader()).open(artifact)
    try:
        program = Llama().program(checkpoint)
        check(program, checkpoint)
        for name in checkpoint.shapes:
            checkpoint.tensor(name)
        if with_tokenizer:
            tokenizer(Context(checkpoint=checkpoint), None).encode("ab é<s>", parse_special=True, add_special=True)
    finally:
        checkpoint.close()


class TooLong(BaseException):
    """Raised by the alarm."""


def outcome(open_one: Callable[[], None]) -> str:
    from headrace.hooks.errors import ModelError

    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        open_one()
    except ModelError as error:
        return "refused" if 20 <= len(str(error)) <= 1500 else f"an error of {len(str(error))} characters"
    except BaseException as error:  # A panic of a library in Rust is no Exception.
        return f"{type(error).__name__}: {error!s:.300}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "loaded"


def stop(*_: object) -> None:
    raise TooLong


def main(kind: str, folder: Path) -> None:
    results: dict[str, str] = {}
    path = folder / "x.gguf"
    path.write_bytes(write({**MODEL, **SPM}))
    open_all(path, with_tokenizer=True)  # Imports everything, before memory is counted.
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, stop)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "gguf":
        for what, data in gguf_mutations():
            path.write_bytes(data)
            results[what] = outcome(lambda: open_all(path, with_tokenizer=True))
    else:
        for number, (what, files) in enumerate(safetensors_mutations()):
            place = folder / str(number)
            place.mkdir()
            for name, data in files.items():
                (place / name).write_bytes(data)
            results[what] = outcome(lambda place=place: open_all(place, with_tokenizer=False))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    (folder / "results.json").write_text(json.dumps({"results": results, "grown_kib": grown}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
