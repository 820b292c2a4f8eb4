# What the parts of CI share. A part sources this file, defines functions and runs steps; it stops at the first that fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$PWD/.venv/bin/python
jobs=${JOBS:-2}
logs=build/ci
part=$(basename "$0")
mkdir -p "$logs"
: >"$logs/times-$part"

# step <name> <command...>: heading, command, seconds taken
step() {
  local start=$SECONDS
  current=$1
  printf '\n==== %s\n' "$current"
  "${@:2}"
  printf '%5d s  %s\n' $((SECONDS - start)) "$current" >>"$logs/times-$part"
}
trap '(($?)) && echo "==== FAILED in: ${current:-setup}" >&2' EXIT

packages() {
  local missing=() name
  for name in g++ git cmake ninja-build ccache clang-format-19 clang-tidy-19 libgtest-dev libgmock-dev libucx-dev \
      iproute2 graphviz valgrind; do
    dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || missing+=("$name")
  done
  if ((${#missing[@]})); then
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
  fi
}

# Python's packages, unless another part has installed them.
environment() {
  local stamp=build/ci/environment
  [[ -x $python ]] && cmp -s .ci/common.sh "$stamp" && return
  [[ -x $python ]] || python3 -m venv .venv
  local pip=("$python" -m pip install -qq --disable-pip-version-check)
  "${pip[@]}" torch==2.13.0  # first and exact: an unpinned torch is a CUDA build of several GB
  "${pip[@]}" scikit-build-core pytest pytest-timeout pytest-xdist numpy safetensors ruff mypy matplotlib
  "${pip[@]}" psutil && "${pip[@]}" --no-deps megatron-core==0.16.1 ||
    echo "no megatron-core here: tests with Megatron will be skipped"
  [[ -d build/te/transformer_engine ]] ||  # in a folder of its own: most tests run without it
    "${pip[@]}" --no-deps --target build/te transformer_engine==2.20.2 annotated-types einops ml_dtypes nvdlfw-inspect onnx \
      onnx-ir onnxscript protobuf pydantic pydantic-core triton typing-inspection accelerate==1.15.0 lightning==2.6.6 \
      lightning-utilities torchmetrics 'huggingface_hub<1' requests urllib3 certifi \
      charset-normalizer idna pyyaml tqdm filelock fsspec packaging ||
    echo "no transformer_engine here: tests with it will be skipped"
  [[ -d build/te/megatron ]] ||
    "${pip[@]}" --no-deps --target build/te megatron-bridge==0.3.1 transformers==4.57.6 tokenizers==0.22.2 regex omegaconf \
      hydra-core==1.3.2 antlr4-python3-runtime==4.9.3 rich six ||
    echo "no transformers and megatron-bridge here: tests with them will be skipped"
  "${pip[@]}" sphinx myst-parser furo sphinx-copybutton || echo "no Sphinx here: the documentation site will not be built"
  "$python" -c 'import torch; print("torch", torch.__version__)'
  cp .ci/common.sh "$stamp"
}

configure() { cmake --fresh --preset "$1" -DPython3_EXECUTABLE="$python" "${@:2}"; }

# build <preset> [targets]
build() {
  configure "$1" -DWEFT_TEST_SHARDS=ON -DWEFT_UNITY=ON
  cmake --build --preset "$1" -j "$jobs" ${2:+--target "${@:2}"}
}

# A test that skips itself must be in tests/allowed_skips.txt, here and in pytest.
cpp_tests() {
  ctest --preset "$1" -LE slow -j "$jobs" "${@:2}" 2>&1 | tee "$logs/ctest-$1.log"
  "$python" tools/skips.py "build/$1/Testing/Temporary/LastTest.log"
}

step 'Debian packages' packages
step 'Python environment' environment
