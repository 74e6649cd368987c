"""llama.cpp's own benchmarks, read: prefill from `llama-bench`, decode from `llama-batched-bench`.

    python -m benchmarks.inprocess_llamacpp FOLDER_OF_TOOLS MODEL.gguf --threads 2

The last line is JSON. Neither tool draws from the logits, so llama.cpp is spared that work here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path


def prefill(tools: Path, model: Path, threads: int, repeats: int) -> float:
    """Tokens a second of a prompt of 512."""
    output = _run(tools / "llama-bench", model, threads, "-p", "512", "-n", "0", "-r", str(repeats), "-o", "json")
    return float(json.loads(output)[0]["avg_ts"])


def decode(tools: Path, model: Path, threads: int, num_seqs: int) -> float:
    """Tokens a second of so many sequences, 128 tokens after a prompt of 128."""
    output = _run(
        *(tools / "llama-batched-bench", model, threads, "-c", str(256 * num_seqs), "-npp", "128", "-ntg", "128"),
        *("-npl", str(num_seqs), "-tb", str(threads), "--output-format", "jsonl"),
    )
    (line,) = (line for line in output.splitlines() if line.startswith('{"n_kv_max"'))
    return float(json.loads(line)["speed_tg"])


def _run(tool: Path, model: Path, threads: int, *args: str) -> str:
    command = [str(tool), "-m", str(model), "-t", str(threads), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    figures = {"prefill_512": prefill(args.tools, args.model, args.threads, args.repeats)}
    for num_seqs in args.batches:
        figures[f"decode_{num_seqs}"] = decode(args.tools, args.model, args.threads, num_seqs)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
