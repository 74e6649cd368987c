#!/usr/bin/env bash
# The same weights for everybody: the GGUF as shipped (Q4_1), quantized again for llama.cpp's faster kernels, and in float32
# as a checkpoint for transformers and vLLM where their environments are.   setup/models.sh FOLDER FILE.gguf
set -euo pipefail
folder=$(realpath -m "${1:?the folder of the peers}")
gguf=$(realpath "${2:?the GGUF in Q4_1}")
here=$(dirname "$(realpath "$0")")
mkdir -p "$folder/models"
cd "$folder/models"
ln -sfn "$gguf" default-q4_1.gguf
for type in q4_0 q8_0; do
  [ -s "default-$type.gguf" ] || "$folder/llamacpp/bin/llama-quantize" --allow-requantize "$gguf" "default-$type.gguf" "$type"
done
if [ -x "$folder/transformers/bin/python" ] && [ ! -d default-fp32 ]; then
  "$folder/transformers/bin/python" "$here/checkpoint.py" "$gguf" default-fp32
fi
