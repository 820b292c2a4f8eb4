#!/bin/bash
# Builds the ranks-as-threads tests with a planted race (a count of rows published without release) and runs one of them
# ten times under the thread sanitizer, which must find it each time.
#   tools/planted_race.sh [times]
set -euo pipefail
cd "$(dirname "$0")/.."
times=${1:-10}
python=${PYTHON:-$PWD/.venv/bin/python}
cmake --preset tsan-race -DPython3_EXECUTABLE="$python" >/dev/null
cmake --build --preset tsan-race -j "${JOBS:-2}" --target weft_tests >/dev/null
found=0
for ((i = 0; i < times; ++i)); do
  report=$(TSAN_OPTIONS=halt_on_error=1 build/tsan-race/weft_tests --gtest_filter='SharedLink.EveryRankReads*' 2>&1) ||
    { grep -q 'ThreadSanitizer: data race' <<<"$report" && found=$((found + 1)); }
done
echo "planted race found $found of $times"
[[ $found == "$times" ]]
