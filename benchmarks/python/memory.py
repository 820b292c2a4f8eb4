"""Bytes that a module saves for backward, and the peak memory of a pass."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch


def saved_bytes(module: torch.nn.Module, x: torch.Tensor) -> int:
    """Returns the bytes saved for backward: each storage once, without parameters and x."""
    held = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    del y  # alive until here, so that no two storages have the same address
    return sum(kept.values())


def peak_bytes(run: Callable[[], object]) -> int:
    """Returns the largest minus the smallest number of allocated bytes during a pass. A pass starts by freeing the
    gradients of the previous one, so its own gradients count."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    totals = list(accumulate((change for _, change in changes), initial=0))
    return max(totals) - min(totals)
