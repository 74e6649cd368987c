"""Makes what a plain copy of the files is not yet: the links of an editable install, and the compiled kernels.

Receives the kind of build from hatchling. An editable install gets links of the root folders in src/headrace/
(git-ignored), so that it sees one package; a wheel needs none, for pyproject.toml lists the folders under
force-include. Both get the library of core/kernels/native, where a C++ compiler is at hand; without one the reference
runs every model.
"""

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("core", "hooks", "plugins", "server")
NATIVE = Path("core", "kernels", "native")
LIBRARY = "_headrace.so"
# No sum may be contracted or reordered: the same row must give the same bits in every kernel.
# Where a loop happens to lie changes its speed by 5 %, so all begin a line.
FLAGS = "-std=c++20 -O3 -falign-loops=64 -ffp-contract=off -fPIC -fvisibility=hidden"
FLAGS += " -Wno-maybe-uninitialized -Wno-psabi"
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c"
X86 = {"avx2": "-mavx2 -mfma -mf16c", "avx512": AVX512}
# What a compiler may not know (GCC does from 12 on); the library has the others then.
OPTIONAL = {"amx": AVX512 + " -mavx512vbmi -mavx512bf16 -mavx512fp16 -mamx-tile -mamx-bf16"}


class BuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        # The library lies among the sources of core/, which go into the wheel as they are.
        if compile_kernels(root):
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
        if version == "editable":
            link_folders(root)


def link_folders(root: Path) -> None:
    package = root / "src" / "headrace"
    for name in FOLDERS:
        link, target = package / name, root / name
        if os.path.lexists(link):
            continue
        try:
            link.symlink_to(os.path.relpath(target, package), target_is_directory=True)
        except OSError:
            # Windows without developer mode forbids symlinks and allows junctions. Elsewhere this import fails, and
            # the error it chains to says why the link could not be made.
            import _winapi

            _winapi.CreateJunction(str(target), str(link))


def compile_kernels(root: Path, library: Path | None = None, flags: str = FLAGS) -> Path | None:
    """The library, made anew where a source is newer than it; None where there is no compiler or it fails."""
    sources = root / NATIVE / "src"
    library = library or root / NATIVE / LIBRARY
    newest = max(path.stat().st_mtime for path in [*sources.iterdir(), root / "hatch_build.py"])
    if library.exists() and library.stat().st_mtime >= newest:
        return library
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    try:
        with tempfile.TemporaryDirectory() as folder:
            known = {name: more for name, more in OPTIONAL.items() if x86 and _knows(compiler, more.split())}
            # The longest first.
            jobs = (known | X86 if x86 else {}) | dict.fromkeys(("engine", "team", "portable"), "")
            objects = [str(Path(folder, f"{name}.o")) for name in jobs]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                commands = [
                    [*compiler, *flags.split(), *more.split(), "-c", str(sources / f"{name}.cpp"), "-o", output]
                    for (name, more), output in zip(jobs.items(), objects, strict=True)
                ]
                list(pool.map(_run, commands))
            made = library.with_suffix(f".{os.getpid()}")
            _run([*compiler, *flags.split(), "-shared", "-pthread", *objects, "-o", str(made)])
            # At once, for a process may be about to load it.
            made.replace(library)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or ""
        print(f"headrace: the kernels were not compiled ({error})\n{said[-2000:]}", file=sys.stderr)
        return None
    return library


def _knows(compiler: list[str], flags: list[str]) -> bool:
    # -E would do for the compiler; the assembler has to know the instructions too.
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text('#include <immintrin.h>\nvoid f() { asm volatile("tilerelease"); }\n')
        try:
            _run([*compiler, *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))])
        except subprocess.CalledProcessError:
            return False
    return True


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
