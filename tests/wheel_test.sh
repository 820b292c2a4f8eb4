#!/bin/bash
# Builds the wheel, installs it into a fresh environment, runs the README's first Python example and the five minutes of
# docs/start.md as printed, trains a GPT, then builds and runs the C++ projects of the docs as printed against the
# installed wheel.
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
wheel=$(echo "$work"/dist/torchweft-*.whl)
names=$("$python" -m zipfile -l "$wheel")
for name in 'torchweft/_C\.[^ ]*so' 'torchweft/_device\.[^ ]*so' 'torchweft/te/transformer_engine_torch\.[^ ]*so' \
            torchweft/lib/libweft.so torchweft/lib/libweft_device.so torchweft/lib/cmake/weft/weftConfig.cmake \
            torchweft/include/weft/ torchweft/py.typed torchweft/_C.pyi torchweft/ops.pyi torchweft/te/__main__.py LICENSE; do
  grep -q -- "$name" <<<"$names" || { echo "wheel: $name is not in $(basename "$wheel")" >&2; exit 1; }
done

"$python" tests/wheel_names.py "$wheel"

echo "wheel: install $(basename "$wheel") into a fresh environment"
"$python" -m venv "$work/env"
fresh=$work/env/bin/python
torch=$("$python" -c 'import torch; print(torch.__version__.partition("+")[0])')
"$fresh" -m pip install -qq --disable-pip-version-check "torch==$torch"
"$fresh" -m pip install -qq --disable-pip-version-check "$wheel"

# python_blocks <page> <count>: the first Python blocks of a page, as one program
python_blocks() {
  "$fresh" - "$@" <<'PY'
import re, sys
blocks = re.findall(r"^```python\n(.*?)^```", open(sys.argv[1]).read(), re.DOTALL | re.MULTILINE)
sys.exit(f"{sys.argv[1]} has no ```python block") if not blocks else print("\n".join(blocks[: int(sys.argv[2])]))
PY
}
echo "wheel: run the README's first example, docs/start.md and torchweft info"
python_blocks README.md 1 >"$work/readme.py"
python_blocks docs/start.md 99 >"$work/start.py"
(cd "$work" && "$fresh" readme.py && "$fresh" start.py && "$work/env/bin/torchweft" info)

echo "wheel: a script on a simulated device, and with Transformer Engine if it is in build/te"
echo 'import torch; print(torch.ones(2, device="cuda").sum())' >"$work/device.py"
echo 'import torch, transformer_engine.pytorch as te; print(te.Linear(16, 16)(torch.ones(8, 16, device="cuda")).device)' >"$work/te.py"
(cd "$work" && "$fresh" -m torchweft.device device.py)
if [[ -d build/te ]]; then
  "$fresh" -m pip install -qq --disable-pip-version-check numpy packaging
  (te=$PWD/build/te && cd "$work" && PYTHONPATH=$te "$fresh" -m torchweft.te te.py)
fi

echo "wheel: train a GPT for a few steps"
(cd "$work" && "$fresh" "$OLDPWD/examples/python/train_gpt.py" --steps 3 >train_gpt.log && tail -n 1 train_gpt.log)

echo "wheel: build and run the C++ projects of the docs"
PATH=$work/env/bin:$PATH CMAKE_GENERATOR=Ninja "$fresh" tests/documented_projects.py "$work/projects"
echo "wheel: all passed"
