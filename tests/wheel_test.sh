#!/bin/bash
# Builds the wheel, installs it into a fresh environment, runs the README's first Python example word for word, then
# builds and runs tests/outside_project against the installed wheel.
# PYTHON is the interpreter that builds; it needs torch 2.13 and scikit-build-core.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "wheel: build"
"$python" -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$work/dist" .
wheel=$(echo "$work"/dist/weft-*.whl)
names=$("$python" -m zipfile -l "$wheel")
for name in 'weft/_C\.[^ ]*so' weft/lib/libweft.so weft/lib/cmake/weft/weftConfig.cmake weft/include/weft/ \
            weft/py.typed weft/_C.pyi weft/ops.pyi weft/compat/__main__.py LICENSE; do
  grep -q -- "$name" <<<"$names" || { echo "wheel: $name is not in $(basename "$wheel")" >&2; exit 1; }
done

echo "wheel: install $(basename "$wheel") into a fresh environment"
"$python" -m venv "$work/env"
fresh=$work/env/bin/python
"$fresh" -m pip install -qq --disable-pip-version-check torch==2.13.0
"$fresh" -m pip install -qq --disable-pip-version-check "$wheel"

echo "wheel: run the README's first example"
"$fresh" - README.md >"$work/readme.py" <<'PY'
import re, sys
block = re.search(r"^```python\n(.*?)^```", open(sys.argv[1]).read(), re.DOTALL | re.MULTILINE)
sys.exit("README.md has no ```python block") if not block else print(block[1], end="")
PY
(cd "$work" && "$fresh" readme.py)

if [[ ! -f tests/outside_project/CMakeLists.txt ]]; then
  echo "wheel: tests/outside_project is missing, skipped"
  exit 0
fi
echo "wheel: build and run tests/outside_project"
prefix=$("$fresh" -c 'import importlib.util as u; print(u.find_spec("weft").submodule_search_locations[0])')
cmake -S tests/outside_project -B "$work/outside" -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_PREFIX_PATH="$prefix" >"$work/configure.log" 2>&1 || { cat "$work/configure.log" >&2; exit 1; }
cmake --build "$work/outside"
programs=$(find "$work/outside" -maxdepth 1 -type f -executable)
[[ -n $programs ]] || { echo "wheel: tests/outside_project made no program" >&2; exit 1; }
for program in $programs; do "$program"; done
echo "wheel: all passed"
