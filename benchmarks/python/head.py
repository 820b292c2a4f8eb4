"""Head and loss of a language model, forward and backward: weft's fusion linear_cross_entropy, the same operations
unfused, and eager torch.

    python benchmarks/python/head.py                vocabularies of 8,192 and 50,304, 1,024 and 4,096 rows, bf16
    python benchmarks/python/head.py --quick        the smallest
    python benchmarks/python/head.py --dtype float32 --threads 2
    python benchmarks/python/head.py --json FILE    also as JSON

loss = mean cross entropy of x Wᵀ in float32; x [rows, 768], W [classes, 768]. Extra memory is the peak of a pass less
the gradients of x and W. All sides run interleaved in one process (measure.py); tools/claims.py compares with the
bounds. Exits with 1 if results are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measure import Meter
from memory import peak_bytes
from problems import exit_unless_close, main, print_speedups

from torchweft import fusion, ops

FEATURES = 768
MIN_SPEEDUP = {8192: 2.6, 50304: 3.5}  # time of eager / weft, with bf16
MAX_EXTRA_MIB = 16


class Problem(NamedTuple):
    classes: int
    rows: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.classes} classes, {self.rows} rows, {str(self.dtype)[6:]}"


class Pass:
    """A forward and backward pass of each side on the same x, W and targets."""

    def __init__(self, p: Problem) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(p.rows, FEATURES).to(p.dtype).requires_grad_()
        self.targets = torch.randint(p.classes, (p.rows,))
        self.head = ops.Sequential(ops.BasicLinear(FEATURES, p.classes, dtype=p.dtype), ops.CrossEntropy())
        self.weight = self.head[0].weight

    def run(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.x.grad = self.weight.grad = None
        found = loss()
        found.backward()
        return found.detach()

    def weft(self) -> torch.Tensor:
        return self.run(lambda: self.head(self.x, self.targets))

    def unfused(self) -> torch.Tensor:
        with fusion.without_rules("linear_cross_entropy"):
            return self.weft()

    def eager(self) -> torch.Tensor:
        return self.run(lambda: F.cross_entropy((self.x @ self.weight.t()).float(), self.targets))

    def sides(self) -> dict[str, Callable[[], torch.Tensor]]:
        return {"weft": self.weft, "eager": self.eager, "unfused": self.unfused}

    def gradient_bytes(self) -> int:
        return self.x.nbytes + self.weight.nbytes


def check(p: Problem, one: Pass) -> None:
    """Exits unless loss and gradients agree with eager's."""
    found = {}
    for name, run in one.sides().items():
        loss = run()
        found[name] = [loss, one.x.grad, one.weight.grad]
    for name in ("weft", "unfused"):
        exit_unless_close(p, name, found[name], found["eager"])


def measure(p: Problem, meter: Meter) -> dict[str, object]:
    one = Pass(p)
    check(p, one)
    extra = {name: (peak_bytes(run) - one.gradient_bytes()) / 2**20 for name, run in one.sides().items()}
    found = meter.measure(one.sides(), control="eager")
    print_speedups(p, found)
    print(f"{p}: extra memory " + ", ".join(f"{name} {mib:.1f} MiB" for name, mib in extra.items()), flush=True)
    bound = MIN_SPEEDUP.get(p.classes) if p.dtype == torch.bfloat16 else None
    figures = [
        found.inverse(f"{p}: eager / weft", "eager", bound),
        found.inverse(f"{p}: unfused / weft", "unfused"),
        {"name": f"{p}: extra memory, MiB", "value": extra["weft"], "at_most": MAX_EXTRA_MIB, "exact": True},
    ]
    return {"problem": str(p), "threads": meter.threads, **asdict(found), "extra_mib": extra, "figures": figures}


def problems(dtype: torch.dtype) -> list[Problem]:
    return [Problem(classes, rows, dtype) for classes in MIN_SPEEDUP for rows in (1024, 4096)]


if __name__ == "__main__":
    main(__doc__, problems, measure)
