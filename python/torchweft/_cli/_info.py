"""``torchweft info``: what this machine has, what is slow on it, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import torchweft

from .. import _C, _built_with

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")
_LOW_SHARED_MEMORY = 1 << 30


def add_info(commands: Any) -> None:
    parser = commands.add_parser("info", help="what this machine has, and what is slow or missing on it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    facts, advice = collect(), find_advice()
    if arguments.json:
        print(json.dumps({**facts, "advice": advice}, indent=1))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")
    print("\nWhat is slow or missing here:" if advice else "\nNothing is known to be slow here.")
    for problem, remedy in advice:
        print(f"- {problem}\n  {remedy}")


def collect() -> dict[str, str]:
    """Returns what is printed, by name."""
    return {
        "weft": f"{torchweft.__version__}, built with torch {_built_with.TORCH}",
        "torch": f"{torch.__version__}, Python {platform.python_version()}",
        "CPU": f"{_cpu_name()}, {_usable_cores()} cores usable",
        "kernels": _kernels(),
        "threads": str(torch.get_num_threads()),
        "allocator": _allocator(),
        "huge pages": _huge_pages(),
        "shared memory": _shared_memory(),
        "UCX": _C.ucx_unavailable_reason() or "available",
        "pictures": ", ".join(
            f"{name} {'found' if found else 'missing'}"
            for name, found in (("Graphviz", _graphviz()), ("matplotlib", _matplotlib()))
        ),
    }


def find_advice() -> list[tuple[str, str]]:
    """Returns pairs of what is slow or missing, and what to do."""
    checks: list[Callable[[], tuple[str, str] | None]] = [
        _check_tier, _check_threads, _check_allocator, _check_huge_pages, _check_shared_memory, _check_pictures
    ]  # fmt: skip
    return [found for check in checks if (found := check()) is not None]


# ---- processor ----------------------------------------------------------------------------------------------------


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _bfloat16_tier() -> str:
    """The tier of a bfloat16 linear."""
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    plan = torchweft.explain(torchweft.ops.BasicLinear(64, 64, dtype=torch.bfloat16), x).data[0]
    return str(plan["forward"][0]["tier"])


def _kernels() -> str:
    tier = os.environ.get("WEFT_TIER")
    return f"{_bfloat16_tier()} for bfloat16 linears" + (f"; WEFT_TIER={tier}" if tier else "")


def _best_tier() -> str:
    """The tier of this CPU, whatever WEFT_TIER is."""
    if torch.cpu.get_capabilities().get("amx_bf16"):
        return "amx"
    if platform.machine() == "aarch64":
        return "neon"
    names = {"AVX512": "avx512", "AVX2": "avx2"}
    return names.get(torch.backends.cpu.get_cpu_capability(), "ref")


def _check_tier() -> tuple[str, str] | None:
    tier, best = _bfloat16_tier(), _best_tier()
    if os.environ.get("WEFT_TIER") and tier != best:
        return f"WEFT_TIER={os.environ['WEFT_TIER']} excludes the {best} kernels of this CPU.", "Unset WEFT_TIER."
    if best == "amx":
        return None
    return (
        "This CPU has no AMX: bfloat16 linears are slower than float32 ones.",
        "Train in float32, or use a CPU with AMX (Xeon of the 4th generation or later).",
    )


def _check_threads() -> tuple[str, str] | None:
    threads, cores = torch.get_num_threads(), _usable_cores()
    if threads <= cores:
        return None
    return (
        f"{threads} threads share {cores} cores.",
        f"Set OMP_NUM_THREADS={cores}, or call torch.set_num_threads({cores}).",
    )


# ---- memory -------------------------------------------------------------------------------------------------------


def _allocator() -> str:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return "unknown"
    return next((name for name in _ALLOCATORS if name in maps), "malloc of the C library")


def _check_allocator() -> tuple[str, str] | None:
    thresholds = os.environ.get("MALLOC_MMAP_THRESHOLD_") and os.environ.get("MALLOC_TRIM_THRESHOLD_")
    if _allocator() in _ALLOCATORS or thresholds or platform.system() != "Linux":
        return None
    return (
        "malloc maps new memory for each result above 32 MB and zeroes it page by page.",
        "Set MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000, or preload tcmalloc or jemalloc.",
    )


def _huge_pages() -> str:
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]


def _check_huge_pages() -> tuple[str, str] | None:
    if _huge_pages() != "never":
        return None
    return "Huge pages are off: large results take more page faults.", f"As root: echo madvise > {_HUGE_PAGES}"


def _free_shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def _shared_memory() -> str:
    free = _free_shared_memory()
    return "not available" if free is None else f"{free / 2**30:.1f} GiB free in /dev/shm"


def _check_shared_memory() -> tuple[str, str] | None:
    free = _free_shared_memory()
    if free is None or free >= _LOW_SHARED_MEMORY:
        return None
    return (
        f"/dev/shm has {free >> 20} MiB free: ranks that do not fit use slower collectives.",
        "Enlarge it: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm.",
    )


# ---- optional parts -----------------------------------------------------------------------------------------------


def _graphviz() -> bool:
    return shutil.which("dot") is not None


def _matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def _check_pictures() -> tuple[str, str] | None:
    if not _graphviz():
        return "Explanation.save() and torchweft explain --save need Graphviz.", "apt-get install graphviz"
    if not _matplotlib():
        return "Plots need matplotlib.", "pip install matplotlib"
    return None
