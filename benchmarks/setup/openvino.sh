#!/usr/bin/env bash
# OpenVINO GenAI in an environment of its own.   setup/openvino.sh FOLDER
set -euo pipefail
folder=$(realpath -m "${1:?the folder of the peers}")
python3 -m venv "$folder/openvino"
"$folder/openvino/bin/pip" install -q "openvino-genai${OPENVINO_GENAI:+==$OPENVINO_GENAI}"
