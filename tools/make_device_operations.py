"""Writes the rows of weft/device/host_kernel.cpp: which operations of torch a GPU has, and how it checks their devices.

    python tools/make_device_operations.py --torchgen FOLDER --out FILE

Read from torchgen's native_functions.yaml, which torch installs, by the lines of an entry: its name, its `dispatch`,
its `structured_delegate` and its `device_check`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

# The kernels of these check what they mix, or call operations that do.
INDICES = {"index.Tensor", "index.Tensor_out", "_index_put_impl_", "_unsafe_index.Tensor"}
# The mask must be on the device of self; a value without dimensions may be on the CPU.
MASK = {"masked_fill_.Scalar", "masked_fill_.Tensor"}
# TensorIterator's check after tensors of the CPU without dimensions have been moved.
SCALARS = {"where.self", "where.self_out"}
# Composite operations that choose a kernel by the device: one for the CPU serves the simulated device.
ON_HOST = {"convolution", "convolution_backward"}


def dispatch_of(block: str) -> dict[str, str]:
    """Returns the kernel by dispatch key of an entry."""
    found = {}
    section = re.search(r"\n  dispatch:((?:\n    .*|\n\s*#.*)*)", block)
    for line in section[1].splitlines() if section else ():
        keys, colon, kernel = line.split("#")[0].partition(":")
        if colon:
            found.update({key.strip(): kernel.strip() for key in keys.split(",")})
    if "\n  ufunc_inner_loop:" in block:  # torchgen writes the kernels of these two
        found.update({"CPU": "ufunc", "CUDA": "ufunc"})
    return found


def entries(text: str) -> dict[str, dict]:
    found = {}
    for block in re.split(r"\n(?=- func:)", text):
        match = re.match(r"- func: *(([\w.]+)\(.*)", block)
        if not match:
            continue
        delegate = re.search(r"\n  structured_delegate: *(\S+)", block)
        check = re.search(r"\n  device_check: *(.*)", block)
        found[match[2]] = {
            "dispatch": dispatch_of(block),
            "delegate": delegate[1] if delegate else None,
            "structured": bool(delegate) or "\n  structured: True" in block,
            "check": check[1] if check else "",
            "out": bool(re.search(r"Tensor\([a-z]!\)(\[\])? out", match[1].split("->")[0])),
        }
    return found


def method_name(name: str, entry: dict) -> str:
    """Returns the name that torchgen gives the wrapper of CUDA's kernel, which its errors print."""
    base, _, overload = name.partition(".")
    suffix = "_out" if entry["out"] else ""
    if entry["structured"]:
        return f"wrapper_CUDA_{base}{suffix}" + (f"_{overload}" if overload else "")
    return f"wrapper_CUDA_{overload}_{base}{suffix}"


def mixing_of(name: str, entry: dict) -> str:
    if name in INDICES:
        return "indices"
    if name in MASK:
        return "mask"
    if name in SCALARS:
        return "scalars"
    if name in ON_HOST:
        return "weights"
    if name.startswith("_foreach_"):
        return "parts"
    if "TensorIterator" in entry["check"] or (name.startswith("special_") and "NoCheck" in entry["check"]):
        return "iterator"
    return "any" if "NoCheck" in entry["check"] else "same"


def rows(text: str) -> list[str]:
    found = []
    every = entries(text)
    for name, entry in every.items():
        dispatch = every[entry["delegate"]]["dispatch"] if entry["delegate"] else entry["dispatch"]
        if "CUDA" not in dispatch and name not in ON_HOST:
            continue
        on_host = "CPU" in dispatch or any(key.startswith("Composite") for key in entry["dispatch"])
        if on_host and "CPU" not in dispatch and mixing_of(name, entry) not in ("parts", "weights"):
            continue  # the composite kernel calls operations that are registered
        found.append(
            f'{{"{name}", Mixing::{mixing_of(name, entry)}, "{method_name(name, entry)}", {str(on_host).lower()}}},'
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchgen", required=True, type=Path, help="the folder of the torchgen package")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    found = rows((arguments.torchgen / "packaged/ATen/native/native_functions.yaml").read_text())
    if len(found) < 500:
        raise SystemExit(f"make_device_operations: found only {len(found)} operations in native_functions.yaml.")
    arguments.out.write_text("\n".join(found) + "\n")


if __name__ == "__main__":
    main()
