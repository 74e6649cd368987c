"""Who is measured and how each is started: Headrace, and the peers that are found in one folder.

The folder is what the scripts in setup/ fill, each a part of its own:

    llamacpp/bin/           llama-server, llama-bench, llama-batched-bench
    llamacpp/bin-vnni/      the same without AMX, where the processor has it
    models/                 default-{q4_0,q4_1,q8_0}.gguf and the folder default-fp32/
    openvino/ transformers/ vllm/    virtual environments

A `Subject` is one engine in one setting. Which settings are best differs between machines: `sweep` has all that are
worth a try, `chosen` those that were best in a sweep.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .machine import machine
from .metrics import SELF

HERE: Final = Path(__file__).parent
INPROCESS: Final = "inprocess"
THREADS: Final = len(os.sched_getaffinity(0))
AMX: Final = "amx_bf16" in machine()["flags"]  # type: ignore[operator]
"""Whether some peers have two ways to compute here, of which now one is faster and now the other."""
LOADS: Final = ("http_1", "http_8", "http_32", "shared", "pause", "sampling_1", "sampling_32")
COMPARED: Final = ("http_1", "http_8", "http_32", "shared")
CONTEXT: Final = 640
"""Tokens a slot of llama.cpp: what a request of any load but `pause` needs."""


class Subject(NamedTuple):
    """An engine in one setting.

    Attributes:
        loads: what is measured; `inprocess` alone: *command* measures itself and prints figures as its last line.
        needs: must exist, or the peer is named as not run.
        ready_path: of a server.
        extra: fields its requests need, or with None do not have.
        sampling: its words for temperature 0.8, top-p 0.95, top-k 40, repetition penalty 1.1.
        slow_start: kept, but held still, between rounds.
    """

    engine: str
    setting: str
    command: Sequence[str]
    loads: Sequence[str]
    needs: Path
    env: Mapping[str, str] = {}
    ready_path: str = "/health"
    extra: Mapping[str, Any] = {}
    sampling: Mapping[str, Any] = {}
    slow_start: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine}: {self.setting}"


SAMPLING: Final = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1, "seed": 1}


def headrace(model: str, sets: Sequence[str], loads: Sequence[str] = LOADS) -> Iterator[Subject]:
    """The engine of this checkout: its steps alone, then served."""
    flags = [word for item in sets for word in ("--set", item)]
    setting = " ".join(sets) or "defaults"
    script = (sys.executable, "-m", "benchmarks.inprocess_headrace", model, *flags)
    yield Subject(SELF, setting, script, (INPROCESS,), HERE)
    serve = (sys.executable, "-m", "headrace", "serve", model, "--port", "{port}", *flags)
    yield Subject(SELF, f"{setting}, served", serve, loads, HERE, ready_path="/ready", sampling=SAMPLING)


def llamacpp_inprocess(folder: Path, quant: str, threads: int, *, amx: bool = True) -> Subject:
    tools, model = _tools(folder, amx), folder / "models" / f"default-{quant.lower()}.gguf"
    script = (sys.executable, "-m", "benchmarks.inprocess_llamacpp", str(tools), str(model), "--threads", str(threads))
    setting = f"{quant}, {threads} threads" + ("" if amx else ", without AMX")
    return Subject("llama.cpp", setting, script, (INPROCESS,), tools / "llama-bench")


def _tools(folder: Path, amx: bool) -> Path:
    return folder / "llamacpp" / ("bin" if amx else "bin-vnni")


def llamacpp(
    folder: Path,
    quant: str,
    slots: int,
    threads: int,
    loads: Sequence[str],
    *,
    unified: bool = False,
    amx: bool = True,
) -> Subject:
    """`llama-server`. *unified*: all slots share one pool of tokens. *amx*: where the processor has it."""
    server, model = _tools(folder, amx) / "llama-server", folder / "models" / f"default-{quant.lower()}.gguf"
    context = max(slots * CONTEXT, 4 * 2048 + CONTEXT if "pause" in loads else 0)
    command = (
        *(str(server), "-m", str(model), "--host", "127.0.0.1", "--port", "{port}", "--no-webui"),
        *("-t", str(threads), "-tb", str(threads), "-np", str(slots), "-c", str(context)),
        "--kv-unified" if unified else "--no-kv-unified",
    )
    words = {**SAMPLING, "repeat_penalty": SAMPLING["repetition_penalty"]}
    setting = f"{quant}, {slots} slots, {threads} threads" + (", one pool" if unified else "")
    setting += "" if amx else ", without AMX"
    return Subject("llama.cpp", setting, command, loads, server, sampling=words)


def openvino(folder: Path, threads: int, step_tokens: int, *options: str) -> Subject:
    """OpenVINO GenAI has no server of its own in its package: in process only, on the GGUF as shipped."""
    python = folder / "openvino" / "bin" / "python"
    model = folder / "models" / "default-q4_1.gguf"
    flags = [word for option in options for word in ("--option", option)]
    setting = ", ".join((f"{threads} threads", f"steps of {step_tokens}", *options))
    command = (str(python), str(HERE / "inprocess_openvino.py"), str(model), "--threads", str(threads))
    return Subject("OpenVINO", setting, (*command, "--step-tokens", str(step_tokens), *flags), (INPROCESS,), python)


def transformers(folder: Path, threads: int, loads: Sequence[str]) -> Subject:
    """`transformers serve` in float32, the faster one on a CPU without bf16 instructions."""
    program = folder / "transformers" / "bin" / "transformers"
    model = str(folder / "models" / "default-fp32")
    command = (
        *(str(program), "serve", model, "--device", "cpu", "--dtype", "float32", "--continuous-batching"),
        *("--host", "127.0.0.1", "--port", "{port}"),
    )
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    # It has no ignore_eos; without an end token an answer goes on to its length.
    extra = {"ignore_eos": None, "generation_config": '{"eos_token_id": -1, "do_sample": false}'}
    return Subject("transformers", f"fp32, {threads} threads", command, loads, program, env, "/health", extra)


def vllm(folder: Path, threads: int, loads: Sequence[str], dtype: str = "float32") -> Subject:
    """vLLM for CPUs, of which those with bfloat16 instructions may be faster in that."""
    program = folder / "vllm" / "bin" / "vllm"
    command = (
        *(str(program), "serve", str(folder / "models" / "default-fp32"), "--served-model-name", "default"),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", dtype, "--max-model-len", "2048"),
        *("--max-num-seqs", "32"),
    )
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": str(threads),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
    }
    return Subject(
        "vLLM", f"{dtype}, {threads} threads", command, loads, program, env, sampling=SAMPLING, slow_start=True
    )


def chosen(folder: Path) -> Iterator[Subject]:
    """The peers in the settings that were best in a sweep."""
    yield llamacpp_inprocess(folder, "Q4_0", THREADS)
    yield openvino(folder, THREADS, 512)
    yield llamacpp(folder, "Q4_0", 4, THREADS, ("http_1",))
    yield llamacpp(folder, "Q4_0", 32, THREADS, ("http_8", "http_32", "shared"))
    if AMX:
        yield llamacpp_inprocess(folder, "Q4_0", THREADS, amx=False)
        yield openvino(folder, THREADS, 512, "INFERENCE_PRECISION_HINT=f32")
        yield llamacpp(folder, "Q4_0", 32, THREADS, ("http_8", "http_32", "shared"), amx=False)
    yield vllm(folder, THREADS, ("http_32", "shared"), "bfloat16" if AMX else "float32")


def sweep(folder: Path) -> Iterator[Subject]:
    """All settings worth a try."""
    for threads in sorted({1, THREADS}):
        for quant in ("Q4_0", "Q4_1", "Q8_0"):
            for amx in {True, not AMX}:
                yield llamacpp_inprocess(folder, quant, threads, amx=amx)
                yield llamacpp(folder, quant, 4, threads, ("http_1",), amx=amx)
                yield llamacpp(folder, quant, 8, threads, ("http_8",), amx=amx)
                yield llamacpp(folder, quant, 32, threads, COMPARED, amx=amx)
        yield openvino(folder, threads, 512)
    yield llamacpp(folder, "Q4_0", 32, THREADS, (*COMPARED, "pause"), unified=True)
    yield openvino(folder, THREADS, 256)
    yield openvino(folder, THREADS, 2048)
    yield openvino(folder, THREADS, 512, "KV_CACHE_PRECISION=f16")
    yield openvino(folder, THREADS, 512, "INFERENCE_PRECISION_HINT=f32")
    yield transformers(folder, THREADS, COMPARED)
    for dtype in ("float32", "bfloat16"):
        yield vllm(folder, THREADS, (*COMPARED, "pause"), dtype)
