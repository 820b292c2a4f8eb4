#!/bin/bash
# Repairs a wheel with auditwheel: repair_wheel.sh FOLDER WHEEL. torch brings its libraries and the OpenMP runtime; UCX is
# loaded at run time, if the machine has it.
set -euo pipefail
excluded=()
for name in libtorch.so libtorch_cpu.so libtorch_python.so libc10.so 'libgomp*.so*' 'libuc[pst].so*' 'libucm.so*'; do
  excluded+=(--exclude "$name")
done
"${PYTHON:-python}" -m auditwheel repair "${excluded[@]}" -w "$1" "$2"
