"""What an operation costs on a simulated device beyond the CPU's: 8 x 8 float32, one thread, thread CPU time.

    python benchmarks/python/device_overhead.py            prints a table
    python benchmarks/python/device_overhead.py --json F   also as JSON

Both sides run alternately in one process. The figure is the median of the differences over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from torchweft.device import simulate

ROUNDS, CALLS, LIST = 41, 400, 64
AT_MOST = 2.0  # microseconds per operation, and per tensor of a foreach


def problems(device: str) -> dict[str, tuple[Callable[[], object], int]]:
    """Calls, and how many operations or tensors each has."""
    a, b, out = (torch.ones(8, 8, device=device) for _ in range(3))
    many = [torch.ones(8, device=device) for _ in range(LIST)]
    return {
        "out of place": (lambda: a.mul(b), 1),
        "in place": (lambda: a.mul_(b), 1),
        "out=": (lambda: torch.mul(a, b, out=out), 1),
        "GEMM": (lambda: torch.mm(a, b), 1),
        "reduction": (lambda: a.sum(), 1),
        "copy": (lambda: a.copy_(b), 1),
        "empty": (lambda: torch.empty_like(a), 1),
        "view": (lambda: a.view(64), 1),
        "item": (lambda: out[0, 0].item(), 2),
        "foreach": (lambda: torch._foreach_mul(many, 2.0), LIST),
        "foreach in place": (lambda: torch._foreach_mul_(many, 1.0), LIST),
    }


def microseconds(call: Callable[[], object], operations: int) -> float:
    count = max(1, CALLS // operations)
    start = time.thread_time()
    for _ in range(count):
        call()
    return 1e6 * (time.thread_time() - start) / (count * operations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    path = parser.parse_args().json
    simulate()
    torch.set_num_threads(1)
    figures = []
    host, device = problems("cpu"), problems("cuda")
    print(f"{'':18}{'CPU':>8}{'device':>8}{'more':>8}   microseconds per operation")
    with torch.inference_mode():
        for name in host:
            rounds = [(microseconds(*host[name]), microseconds(*device[name])) for _ in range(ROUNDS + 2)][2:]
            cpu, gpu = (statistics.median(side) for side in zip(*rounds, strict=True))
            more = statistics.median(b - a for a, b in rounds)
            print(f"{name:18}{cpu:8.2f}{gpu:8.2f}{more:8.2f}")
            figures.append({"name": f"device overhead, {name}", "value": more, "at_most": AT_MOST})
    if path:
        with open(path, "w") as file:
            json.dump({"figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
