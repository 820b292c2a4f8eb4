#!/bin/bash
# Builds weft with another version of torch, as `pip install torch==VERSION` gives it, and runs everything:
#   tests/torch_version_test.sh 2.15.0
# C++ and Python tests in a clean clone, then the wheel, the README's examples and the tutorials in a fresh environment.
# Takes about 40 minutes on 2 cores and downloads several GB: CUDA builds come with their libraries. The summary lines are
# stored in benchmarks/results/torch-versions.json.
set -euo pipefail
version=${1:?usage: tests/torch_version_test.sh VERSION}
cd "$(dirname "$0")/.."
work=$PWD/build/torch-$version
tree=$work/tree
python=$work/env/bin/python
unset PYTHONPATH
rm -rf "$tree"
mkdir -p "$work"
git clone -q . "$tree"
[[ -x $python ]] || python3 -m venv "$work/env"
"$python" -m pip install -qq --disable-pip-version-check "torch==$version" scikit-build-core pytest pytest-timeout \
  pytest-xdist numpy safetensors psutil matplotlib
"$python" -m pip install -qq --disable-pip-version-check --no-deps megatron-core==0.16.1
cd "$tree"

cmake --preset release -DPython3_EXECUTABLE="$python" -DWEFT_TEST_SHARDS=ON
cmake --build --preset release -j "${JOBS:-2}"
ctest --preset release -LE slow -j "${JOBS:-2}" 2>&1 | tee "$work/ctest.log"
"$python" -m pytest -n "${JOBS:-2}" --dist loadfile -m 'not slow and not serial' 2>&1 | tee "$work/pytest.log"
"$python" -m pytest -m 'serial and not slow' 2>&1 | tee "$work/pytest-serial.log"
PYTHON=$python tests/wheel_test.sh 2>&1 | tee "$work/wheel.log"

"$python" tools/store_torch_version.py "$work" "$OLDPWD/benchmarks/results/torch-versions.json"
