#!/bin/bash
# Plants a data race in a copy of the tree (a row count stored without release ordering), builds the tests that run ranks
# as threads and runs one of them ten times under ThreadSanitizer, which must report the race each time.
#   tools/planted_race.sh [times]
set -euo pipefail
cd "$(dirname "$0")/.."
times=${1:-10}
python=${PYTHON:-$PWD/.venv/bin/python}
mkdir -p build/race
git ls-files -z | xargs -0 cp -p --parents -t build/race
cd build/race
sed -i 's/word.store(word, std::memory_order_release)/word.store(word, std::memory_order_relaxed)/' weft/comm/signals.cpp
grep -q 'word.store(word, std::memory_order_relaxed)' weft/comm/signals.cpp  # the text is found
cmake --preset tsan-race -DPython3_EXECUTABLE="$python" >/dev/null
cmake --build --preset tsan-race -j "${JOBS:-2}" --target weft_tests >/dev/null
found=0
for ((i = 0; i < times; ++i)); do
  report=$(TSAN_OPTIONS=halt_on_error=1 build/tsan-race/weft_tests --gtest_filter='ShmTransport.EveryRankReads*' 2>&1) ||
    { grep -q 'ThreadSanitizer: data race' <<<"$report" && found=$((found + 1)); }
done
echo "planted race found $found of $times"
[[ $found == "$times" ]]
