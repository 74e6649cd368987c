#!/usr/bin/env bash
# transformers with its server in an environment of its own. PIP_ARGS can name an index with CPU builds of torch.
#   setup/transformers.sh FOLDER
set -euo pipefail
folder=$(realpath -m "${1:?the folder of the peers}")
python3 -m venv "$folder/transformers"
# shellcheck disable=SC2086
"$folder/transformers/bin/pip" install -q ${PIP_ARGS:-} torch==2.13.0 "transformers[serving]==${TRANSFORMERS:-5.24.0}" \
  gguf safetensors accelerate
