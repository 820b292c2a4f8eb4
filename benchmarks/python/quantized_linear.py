"""A linear under each recipe, forward and backward, over the same linear in bfloat16; and over what torch offers.

    python benchmarks/python/quantized_linear.py              1024 x 1024 x 4096 and 4096 x 2048 x 8192
    python benchmarks/python/quantized_linear.py --quick      the first
    python benchmarks/python/quantized_linear.py --threads 2 --json FILE

`emulated`: forward of an MXFP8 linear that quantizes and decodes both operands and multiplies with torch.mm, as
emulations of these formats do; `_scaled_mm`: the multiplication of torch alone, of 64 rows, since it takes minutes for
more. All sides run interleaved in one process (measure.py); tools/claims.py compares with the bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import torch
from measure import Meter
from problems import main

import torchweft
from torchweft import ops, recipe

RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "MXFP8": recipe.MXFP8BlockScaling(),
    "NVFP4": recipe.NVFP4BlockScaling(),
}
QUANTIZED, NVFP4 = 1.5, 1.8  # largest time / bfloat16
EMULATED = 8  # least time of an emulation / weft
FEW_ROWS = 64


class Problem(NamedTuple):
    rows: int
    features: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.features} x {self.outputs}"


def training_pass(p: Problem, used: recipe.Recipe | None) -> Callable[[], None]:
    linear = ops.Linear(p.features, p.outputs, bias=False, dtype=torch.bfloat16)
    x = torch.randn(p.rows, p.features).bfloat16().requires_grad_()
    dy = torch.randn(p.rows, p.outputs).bfloat16()

    def run() -> None:
        x.grad = linear.weight.grad = None
        with torchweft.autocast(used is not None, recipe=used):
            y = linear(x)
        y.backward(dy)

    return run


def forwards(p: Problem) -> dict[str, Callable[[], object]]:
    """An MXFP8 linear, forward: weft's and an emulation; and torch's multiplication of few rows in FP8."""
    used = RECIPES["MXFP8"]
    linear = ops.Linear(p.features, p.outputs, bias=False, dtype=torch.bfloat16)
    x, few = torch.randn(p.rows, p.features).bfloat16(), torch.randn(FEW_ROWS, p.features).bfloat16()
    quantizer = torchweft.quantization.Quantizer("mxfp8")

    def run(given: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torchweft.autocast(recipe=used):
            return linear(given)

    a, b = few.to(torch.float8_e4m3fn), linear.weight.detach().to(torch.float8_e4m3fn)
    one = torch.ones(())

    def emulated() -> torch.Tensor:
        weight = quantizer.quantize(linear.weight.detach()).dequantize()
        return quantizer.quantize(x).dequantize() @ weight.t()

    return {
        "weft": lambda: run(x),
        "emulated": emulated,
        "few rows": lambda: run(few),
        "_scaled_mm": lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16),
    }


def measure(p: Problem, meter: Meter) -> dict[str, object]:
    figures = []
    rows = {}
    for name, used in RECIPES.items():
        found = meter.measure({"quantized": training_pass(p, used), "bfloat16": training_pass(p, None)}, "bfloat16")
        what = f"{p}: {name} / bfloat16"
        figures.append(found.figure(what, "bfloat16", NVFP4 if name == "NVFP4" else QUANTIZED))
        rows[what] = asdict(found)
        value = figures[-1]
        print(f"{what} {value['value']:.2f} [{value['interval'][0]:.2f}, {value['interval'][1]:.2f}]", flush=True)
    every = forwards(p)
    for first, other in (("weft", "emulated"), ("few rows", "_scaled_mm")):
        found = meter.measure({name: every[name] for name in (first, other)}, control=first)
        figures.append(found.inverse(f"{p}: {other} / weft, forward", other, EMULATED))
        print(f"{figures[-1]['name']} {figures[-1]['value']:.1f}", flush=True)
    return {"problem": str(p), "threads": meter.threads, "times": rows, "figures": figures}


def problems(dtype: torch.dtype) -> list[Problem]:
    return [Problem(1024, 1024, 4096), Problem(4096, 2048, 8192)]


if __name__ == "__main__":
    main(__doc__, problems, measure)
