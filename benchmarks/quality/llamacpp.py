"""The same figures of llama.cpp: its quantized files against its own float32 of the same weights, on the same texts.

`python -m benchmarks.quality.llamacpp --tools DIR` needs `llama-quantize` and `llama-perplexity` in DIR. The float32
run is of the checkpoint dequantized, with a float32 KV cache; the others run as llama.cpp does when nothing is said
(float16 KV cache). What it keeps of the float32 run is 16 bits a logit, so divergences below 1e-5 mean nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from . import contexts as c
from .divergence import Summary
from .kl import arguments
from .report import RESULTS, table, write

NUMBER = r"(-?[\d.]+)"
FLOAT32_KV = ("-ctk", "f32", "-ctv", "f32")


class Perplexity:
    """Runs `llama-perplexity` over one text.

    Args:
        folder: where the float32 run of the text is kept: a hundred kilobytes a row.
    """

    def __init__(self, tools: Path, folder: Path, threads: int | None, num_contexts: int | None) -> None:
        self._program = tools / "llama-perplexity"
        self._logits = folder / "float32.logits"
        self._common = [
            # A text is text: without this a backslash and an n in it would become the end of a line.
            "--no-escape",
            *("-c", str(c.LENGTH)),
            *(("-t", str(threads)) if threads else ()),
            *(("--chunks", str(num_contexts)) if num_contexts else ()),
        ]

    def keep(self, model: Path, text: Path) -> None:
        """Run the float32 *model* and keep what it says."""
        self._run("-m", str(model), "-f", str(text), *FLOAT32_KV)

    def compare(self, model: Path) -> Summary:
        """Run *model* over the text kept last."""
        return read(self._run("-m", str(model), "--kl-divergence"))

    def _run(self, *more: str) -> str:
        command = [str(self._program), "--kl-divergence-base", str(self._logits), *self._common, *more]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} must end with 0, got {ended.returncode}:\n{ended.stdout[-2000:]}")
        return ended.stdout


def read(output: str) -> Summary:
    """What `llama-perplexity --kl-divergence` printed.

    Raises:
        ValueError: a line is missing.
    """

    def value(pattern: str) -> tuple[float, ...]:
        found = re.search(pattern, output)
        if found is None:
            raise ValueError(f"the output must have a line like {pattern!r}, found none in:\n{output[-2000:]}")
        return tuple(map(float, found.groups()))

    (num_contexts,) = value(r"computing over (\d+) chunks")
    mean, error = value(rf"Mean +KLD: +{NUMBER} ± +{NUMBER}")
    return Summary(
        num_positions=int(num_contexts) * (c.LENGTH - 1 - c.LENGTH // 2),
        mean_kl=mean,
        mean_kl_error=error,
        p99_kl=value(rf"99\.0% +KLD: +{NUMBER}")[0],
        max_kl=value(rf"Maximum KLD: +{NUMBER}")[0],
        top1=value(rf"Same top p: +{NUMBER}")[0] / 100,
    )


def quantized(tools: Path, source: Path, kind: str, folder: Path) -> Path:
    """*source* in llama.cpp's format *kind*, such as `Q4_0`, in *folder*."""
    target = folder / f"{kind}.gguf"
    command = [str(tools / "llama-quantize"), "--allow-requantize", str(source), str(target), kind]
    subprocess.run(command, check=True, capture_output=True)
    return target


def main() -> None:
    """The command line."""
    parser = arguments("KL divergence of llama.cpp's quantized files from its float32.")
    parser.add_argument("--tools", type=Path, required=True, metavar="DIR", help="where llama.cpp's programs are")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for `headrace serve --set`")
    given = parser.parse_args()
    with c.opened(c.settings(*given.set)) as opened:
        shipped = opened.checkpoint.artifact.path
    with tempfile.TemporaryDirectory() as name:
        found = measure(given, shipped, Path(name))
    write(given.out or RESULTS / "quality-llamacpp.json", found, version=_version(given.tools))
    print(table(found))


def measure(given: argparse.Namespace, shipped: Path, folder: Path) -> dict[str, dict[str, Summary]]:
    """Make the files in *folder* and run each over each text."""
    kinds = {f"llama.cpp, {kind}": quantized(given.tools, shipped, kind, folder) for kind in ("Q8_0", "Q4_0")}
    models = {"llama.cpp, the file as shipped": shipped, **kinds}
    float32 = quantized(given.tools, shipped, "F32", folder)
    found: dict[str, dict[str, Summary]] = {name: {} for name in models}
    run = Perplexity(given.tools, folder, given.threads, given.contexts)
    for text in given.text or c.NAMES:
        run.keep(float32, c.TEXTS / f"{text}.txt")
        for label, model in models.items():
            found[label][text] = run.compare(model)
            print(text, label, found[label][text], flush=True)
    return found


def _version(tools: Path) -> str:
    shown = subprocess.run([str(tools / "llama-perplexity"), "--version"], capture_output=True, text=True)
    return (shown.stdout + shown.stderr).strip()


if __name__ == "__main__":
    main()
