"""Norm, MLP and residual add, forward and backward: weft, eager torch.nn, torch.compile and the six GEMMs alone.

    python benchmarks/python/block.py                     times at all shapes, bf16, gelu and swiglu
    python benchmarks/python/block.py --quick             two small shapes
    python benchmarks/python/block.py --memory            bytes saved for backward and peak memory instead
    python benchmarks/python/block.py --json FILE         also as JSON

All sides run interleaved in one process (measure.py); tools/claims.py compares with the bounds. Exits with 1 if results
are wrong. y = x + W2 act(W1 rms_norm(x) + b1) + b2, f = 4h; with SwiGLU the first linear has 2f columns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import torch
from measure import Meter
from memory import peak_bytes, saved_bytes

from torchweft import ops

SHAPES = [(128, 512), (512, 1024), (1024, 1024), (4096, 2048)]  # tokens, hidden
QUICK = [(128, 512), (256, 512)]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BOUNDS = {"six mm_out": 0.70, "eager": 1.0, "compile": 1.0}
MEMORY_BOUND = 0.5


class Problem(NamedTuple):
    tokens: int
    hidden: int
    activation: str
    dtype: torch.dtype
    main_grad: bool

    @property
    def inner(self) -> int:
        return 4 * self.hidden

    @property
    def columns(self) -> int:
        """Output columns of the first linear."""
        return 2 * self.inner if self.activation == "swiglu" else self.inner

    def __str__(self) -> str:
        return f"block {self.tokens}x{self.hidden} {self.activation} {str(self.dtype)[6:]}"


class SwiGLU(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.nn.functional.silu(a) * b


class Eager(torch.nn.Module):
    def __init__(self, p: Problem) -> None:
        super().__init__()
        activation = SwiGLU() if p.activation == "swiglu" else torch.nn.GELU(approximate="tanh")
        self.body = torch.nn.Sequential(
            torch.nn.RMSNorm(p.hidden, eps=1e-5),
            torch.nn.Linear(p.hidden, p.columns),
            activation,
            torch.nn.Linear(p.inner, p.hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def by_weft(p: Problem) -> ops.Sequential:
    accumulate = {"accumulate_into_main_grad": True} if p.main_grad else {}
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(p.hidden),
        ops.Linear(p.hidden, p.columns, **accumulate),
        ops.SwiGLU() if p.activation == "swiglu" else ops.GELU(),
        ops.Linear(p.inner, p.hidden, **accumulate),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def modules(p: Problem) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Returns weft's block and eager's with equal parameters."""
    torch.manual_seed(0)
    ours, eager = by_weft(p).to(p.dtype), Eager(p).to(p.dtype)
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
            theirs.copy_(mine)
    for module in (ours, eager) if p.main_grad else ():
        for weight in (w for w in module.parameters() if w.dim() == 2):
            weight.main_grad = torch.zeros(weight.shape)
            weight.grad_added_to_main_grad = False
    return ours, eager


def training_pass(p: Problem, module: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    """Returns a function that runs forward and backward. Gradients are reset each time; with main_grad weight gradients
    are added to main_grad."""
    held = [x, *module.parameters()]
    main_grad_weights = [w for w in module.parameters() if p.main_grad and w.dim() == 2]

    def run() -> None:
        for t in held:
            t.grad = None
        module(x).backward(dy)
        for w in main_grad_weights:
            if not w.grad_added_to_main_grad:
                w.main_grad.add_(w.grad)

    return run


def six_gemms(p: Problem) -> Callable[[], None]:
    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns).to(p.dtype)

    x, dy, a = random(p.tokens, p.hidden), random(p.tokens, p.hidden), random(p.tokens, p.inner)
    du = random(p.tokens, p.columns)
    w1, w2 = random(p.columns, p.hidden), random(p.hidden, p.inner)
    u, y, da, dx = (torch.empty_like(t) for t in (du, dy, a, x))
    dw1, dw2 = torch.empty_like(w1), torch.empty_like(w2)

    def run() -> None:
        torch.mm(x, w1.t(), out=u)
        torch.mm(a, w2.t(), out=y)
        torch.mm(dy, w2, out=da)
        torch.mm(dy.t(), a, out=dw2)
        torch.mm(du, w1, out=dx)
        torch.mm(du.t(), x, out=dw1)

    return run


def worst_error(p: Problem, ours: torch.nn.Module, eager: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> float:
    """Returns the largest relative Frobenius error of y and all gradients between the two, in units of the dtype's
    epsilon."""
    results = []
    for module in (ours, eager):
        leaf = x.detach().clone().requires_grad_()
        y = module(leaf)
        results.append([y, *torch.autograd.grad(y, [leaf, *module.parameters()], dy)])
    pairs = zip(*results, strict=True)
    errors = [(torch.linalg.vector_norm(a.float() - b.float()) / torch.linalg.vector_norm(b.float())) for a, b in pairs]
    return max(errors).item() / torch.finfo(p.dtype).eps


def time_problem(p: Problem, meter: Meter, compiled: bool) -> dict[str, object]:
    ours, eager = modules(p)
    x, dy = torch.randn(p.tokens, p.hidden).to(p.dtype).requires_grad_(), torch.randn(p.tokens, p.hidden).to(p.dtype)
    error = 0.0 if p.main_grad else worst_error(p, ours, eager, x, dy)
    if not error <= 16:
        sys.exit(f"{p}: weft and eager differ by {error:.1f} epsilon; nothing was timed")
    sides = {"weft": training_pass(p, ours, x, dy), "six mm_out": six_gemms(p)}
    sides["eager"] = training_pass(p, eager, x, dy)
    if compiled:
        torch._dynamo.reset()
        sides["compile"] = training_pass(p, torch.compile(eager), x, dy)
    found = meter.measure(sides, control="six mm_out")
    figures = [found.figure(f"{p} / {name}", name, BOUNDS[name]) for name in found.versus]
    return {"problem": str(p), "threads": meter.threads, **asdict(found), "roundings": error, "figures": figures}


def measure_memory(p: Problem) -> dict[str, object]:
    ours, eager = modules(p)
    x, dy = torch.randn(p.tokens, p.hidden).to(p.dtype).requires_grad_(), torch.randn(p.tokens, p.hidden).to(p.dtype)
    row: dict[str, object] = {"problem": str(p)}
    for name, module in (("weft", ours), ("eager", eager)):
        run = training_pass(p, module, x, dy)
        row[name] = {"saved": saved_bytes(module, x), "peak": peak_bytes(run)}
    row |= {what: row["weft"][what] / row["eager"][what] for what in ("saved", "peak")}
    return {**row, "figures": [{"name": f"{p} saved", "value": row["saved"], "at_most": MEMORY_BOUND, "exact": True}]}


def show_times(row: dict) -> None:
    print(f"{row['problem']}: weft {row['ms']:.2f} ms", end="")
    for name, r in row["versus"].items():
        print(f"  / {name} {r['ratio']:.2f} [{r['interval'][0]:.2f}, {r['interval'][1]:.2f}]", end="")
    print(f"  control {row['control']:.3f}  kept {row['kept']} of {row['rounds']}", flush=True)


def show_memory(row: dict) -> None:
    for what in ("saved", "peak"):
        mine, theirs = row["weft"][what] / 2**20, row["eager"][what] / 2**20
        print(f"{row['problem']}: {what} {mine:.2f} MiB, eager {theirs:.2f} MiB, ratio {row[what]:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small shapes, gelu only")
    parser.add_argument("--memory", action="store_true", help="bytes instead of times")
    parser.add_argument("--shape", action="append", help="tokens x hidden, e.g. 1024x1024; may be repeated")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--activation", choices=("gelu", "swiglu"))
    parser.add_argument("--main-grad", action="store_true", help="add weight gradients to float32 main_grad")
    parser.add_argument("--no-compile", action="store_true", help="omit torch.compile")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", help="write the rows to this file")
    a = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in a.shape or ()] or (QUICK if a.quick else SHAPES)
    activations = [a.activation] if a.activation else ["gelu"] if a.quick else ["gelu", "swiglu"]
    problems = [Problem(m, h, act, DTYPES[a.dtype], a.main_grad) for m, h in shapes for act in activations]

    meter, rows = Meter(a.threads, a.rounds, 3 * a.rounds), []
    for p in problems:
        rows.append(measure_memory(p) if a.memory else time_problem(p, meter, not a.no_compile))
        (show_memory if a.memory else show_times)(rows[-1])
    if a.json:
        with open(a.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
