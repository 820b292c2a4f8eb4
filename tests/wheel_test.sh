#!/bin/bash
# Builds the wheel, installs it into a fresh environment, runs the README's first Python example as printed, then builds
# and runs the C++ projects of the docs as printed against the installed wheel.
# PYTHON is the interpreter that builds; it needs torch and scikit-build-core. The fresh environment gets the same torch.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "wheel: build"
# c++, as in every other build of this tree, so that ccache hits; scikit-build-core would use g++.
CXX=${CXX:-c++} "$python" -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$work/dist" .
wheel=$(echo "$work"/dist/weft-*.whl)
names=$("$python" -m zipfile -l "$wheel")
for name in 'weft/_C\.[^ ]*so' weft/lib/libweft.so weft/lib/cmake/weft/weftConfig.cmake weft/include/weft/ \
            weft/py.typed weft/_C.pyi weft/ops.pyi weft/compat/__main__.py LICENSE; do
  grep -q -- "$name" <<<"$names" || { echo "wheel: $name is not in $(basename "$wheel")" >&2; exit 1; }
done

echo "wheel: install $(basename "$wheel") into a fresh environment"
"$python" -m venv "$work/env"
fresh=$work/env/bin/python
torch=$("$python" -c 'import torch; print(torch.__version__.partition("+")[0])')
"$fresh" -m pip install -qq --disable-pip-version-check "torch==$torch"
"$fresh" -m pip install -qq --disable-pip-version-check "$wheel"

echo "wheel: run the README's first example"
"$fresh" - README.md >"$work/readme.py" <<'PY'
import re, sys
block = re.search(r"^```python\n(.*?)^```", open(sys.argv[1]).read(), re.DOTALL | re.MULTILINE)
sys.exit("README.md has no ```python block") if not block else print(block[1], end="")
PY
(cd "$work" && "$fresh" readme.py)

echo "wheel: build and run the C++ projects of the docs"
PATH=$work/env/bin:$PATH CMAKE_GENERATOR=Ninja "$fresh" tests/documented_projects.py "$work/projects"
echo "wheel: all passed"
