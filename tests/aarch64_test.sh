#!/bin/bash
# Cross-compiles the library and its C++ tests for AArch64 and runs the tests under QEMU:
#   apt-get install g++-aarch64-linux-gnu qemu-user-static googletest
#   tests/aarch64_test.sh [GoogleTest filter]
# Downloads 450 MB: torch's wheel for AArch64, which is a CUDA build, and the two CUDA libraries that its libtorch_cpu
# loads. Building takes about 7 minutes on 2 cores, all tests an hour of CPU time.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/aarch64
root=$work/root
torch_version=$(sed -n 's/.*torch==\([0-9.]*\).*/\1/p' .ci/common.sh | head -1)
site=$work/site-$torch_version

if [[ ! -e $site/torch/lib/libtorch_cpu.so ]]; then
  platforms=(--platform manylinux2014_aarch64)
  for minor in {17..39}; do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
  python3 -m pip install -qq --disable-pip-version-check --no-deps --target "$site" "${platforms[@]}" \
    --python-version 3.11 --only-binary=:all: "torch==$torch_version" nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85
fi

# QEMU shows programs the host's /proc/cpuinfo, in which torch finds no Arm CPU and crashes. Files under $root have
# precedence over the host's.
mkdir -p "$root/proc"
ln -sfn /usr/aarch64-linux-gnu/lib "$root/lib"
for cpu in $(seq 0 $(($(nproc) - 1))); do
  printf 'processor\t: %d\nFeatures\t: fp asimd fphp asimdhp asimddp\nCPU implementer\t: 0x41\n' "$cpu"
  printf 'CPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n'  # Neoverse N1
done > "$root/proc/cpuinfo"

cmake -G Ninja -B "$work/build" --toolchain cmake/aarch64.cmake -DCMAKE_PREFIX_PATH="$site/torch" \
  -DWEFT_UCX=OFF -DWEFT_UNITY=ON -DWEFT_GTEST_SOURCE=/usr/src/googletest
cmake --build "$work/build" -j "${JOBS:-2}" --target weft_tests
QEMU_CPU=neoverse-n1 qemu-aarch64-static -L "$root" "$work/build/weft_tests" --gtest_brief=1 \
  --gtest_filter="${1:--*Slow*}"
