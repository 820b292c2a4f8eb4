"""Where the time of a training step goes: the steps of weft's plans, the optimizer, and the rest.

    python benchmarks/python/step_profile.py              the preset nano, two threads
    python benchmarks/python/step_profile.py tiny --threads 1
    python benchmarks/python/step_profile.py --json FILE  also as a table for tools/make_tables.py

The ranges are those that torch.profiler shows; a range includes the ATen calls inside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from gpt_models import PRESETS
from gpt_training import Training

OTHERS = {
    "Optimizer.step#AdamW.step": "AdamW",
    "aten::_foreach_norm": "gradient norm and clipping",
    "aten::_foreach_mul_": "gradient norm and clipping",
    "aten::embedding": "embedding",
    "aten::embedding_backward": "embedding",
}
COLUMNS = ["part", "ms", "share of the step"]


def parts_of_step(training: Training) -> tuple[Counter[str], float]:
    """Returns the milliseconds of each part, and of the step."""
    training.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        start = time.perf_counter()
        training.step()
        step = (time.perf_counter() - start) * 1e3
    found: Counter[str] = Counter()
    for event in profile.key_averages():
        name = event.key.removeprefix("weft::")
        if name != event.key and not name.startswith("pipeline"):
            found[f"`{name}`"] += event.cpu_time_total / 1e3
        elif event.key in OTHERS:
            found[OTHERS[event.key]] += event.cpu_time_total / 1e3
    assert sum(found.values()) <= step, "a part was counted twice"
    found["the rest"] = step - sum(found.values())
    return found, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="nano", choices=PRESETS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found, step = parts_of_step(Training(PRESETS[arguments.preset], "weft", "bf16"))
    rows = [[name, f"{ms:.1f}", f"{ms / step:.1%}"] for name, ms in found.most_common()]
    for row in [COLUMNS, *rows, ["step", f"{step:.1f}", ""]]:
        print(f"{row[0]:40} {row[1]:>10} {row[2]:>20}")
    if arguments.json:
        command = " ".join(["benchmarks/python/step_profile.py", *sys.argv[1:]])
        made = {"date": datetime.date.today().isoformat(), "command": command}
        arguments.json.write_text(json.dumps({**made, "columns": COLUMNS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
