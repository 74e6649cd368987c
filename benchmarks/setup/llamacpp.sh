#!/usr/bin/env bash
# llama.cpp's server and benchmarks, built for this processor from the source that llama-cpp-python's source distribution
# carries. 10 to 20 minutes on two cores.   setup/llamacpp.sh FOLDER
set -euo pipefail
folder=$(realpath -m "${1:?the folder of the peers}")
version=${LLAMA_CPP_PYTHON:-0.3.36}
mkdir -p "$folder/llamacpp"
cd "$folder/llamacpp"
[ -x build-env/bin/cmake ] || { python3 -m venv build-env && build-env/bin/pip install -q cmake ninja scikit-build-core; }
export PATH="$PWD/build-env/bin:$PATH"
if [ ! -d source ]; then
  pip download -q --no-deps --no-binary :all: --no-build-isolation -d . "llama-cpp-python==$version"
  mkdir source.new
  tar xzf "llama_cpp_python-$version.tar.gz" -C source.new --strip-components 1
  # It names a repository that is not in the archive, and CMake would configure anew each time it looks for it.
  rm -f source.new/vendor/llama.cpp/.git
  mv source.new source
fi
# GCC 12 believes that a tile configuration is read to its eighth byte only, and leaves out the rest of it: without this,
# processors with AMX end the program.
sed -i 's/^    _tile_loadconfig(&tc);/    asm volatile("" :: "r"(\&tc) : "memory"); _tile_loadconfig(\&tc);/' source/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp
# As the processor is; and without AMX where it has that, for either is faster at something.
build() {
  cmake -S source/vendor/llama.cpp -B "$1" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "${@:2}"
  cmake --build "$1" -j "${JOBS:-2}" \
    --target llama-quantize llama-perplexity llama-bench llama-batched-bench llama-server
}
build build -DGGML_NATIVE=ON
ln -sfn build/bin bin
if grep -qw amx_int8 /proc/cpuinfo; then
  build build-vnni -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON \
    -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON
  ln -sfn build-vnni/bin bin-vnni
fi
