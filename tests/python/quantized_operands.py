"""What the quantized linears of a pipeline read: reported by weft, checked bit by bit, and given to the reference.

Quantization is not continuous: operands that differ by one rounding may have codes that differ by 1/8. So the reference
of a quantized pipeline multiplies the operands that weft quantized, and then

- the codes and scales of each operand are those of quantization_reference.py, bit by bit, with the seed of stochastic
  rounding that plain torch draws at this place;
- each operand before quantization (`Trace.tensors`) is compared as an output is: with float64, within the tolerance.

Together this checks a whole pipeline, and nothing that is compared has a jump. weft's linears report their operands to
the observer of QuantizationInspector. `GroupedLinear` does not: the modules `Seen` before and after it record its input
and the gradient of its output, and the reference quantizes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import plain
import quantization_reference
import torch

from torchweft import _C


@dataclass
class Operand:
    matrix: torch.Tensor  # before quantization
    quantized: Any = None  # a QuantizedMatrix
    scale: float | None = None  # of delayed scaling


@dataclass
class Linear:
    """The operands of one call of a linear."""

    weight: int | None  # address of the Parameter; None: of experts, and only x and the gradients are known
    x: Operand
    w: Operand | None = None
    gradients: dict[int, Operand] = field(default_factory=dict)  # of the output, by pass


class Seen(torch.nn.Module):
    """Returns its input. Records it, or with `gradient` the gradient of its output, as an operand of experts."""

    trace: Trace | None = None  # of the calls being recorded

    def __init__(self, gradient: bool) -> None:
        super().__init__()
        self.gradient = gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trace = Seen.trace
        if trace is None or torch.compiler.is_compiling():
            return x
        if not self.gradient:
            trace.linears.append(Linear(None, Operand(rows(x).clone())))
            return x
        linear, y = trace.linears[-1], x.view_as(x)
        if y.requires_grad:
            y.register_hook(lambda dy: linear.gradients.update({trace.number: Operand(rows(dy).clone())}))
        return y


def rows(t: torch.Tensor) -> torch.Tensor:
    return t.detach().reshape(-1, t.shape[-1])


@dataclass
class Trace:
    """The quantized linears of one run, in the order of their calls."""

    linears: list[Linear] = field(default_factory=list)
    number: int = 0  # of the current backward pass
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # the operands before quantization, by name

    @contextmanager
    def observe(self, states: dict[int, list[torch.Tensor]]) -> Iterator[None]:
        """Records what weft's linears report. `states`: of delayed scaling, by the address of the weight."""
        by_call: dict[int, Linear] = {}

        def scale(w: int, part: int, column: int) -> float | None:
            return states[w][part][0, column].item() if w in states else None

        def forward(call, parameter, x, q_x, w, q_w):
            at = parameter.data_ptr()
            operands = Operand(x.detach().clone(), q_x, scale(at, 0, 0)), Operand(w.clone(), q_w, scale(at, 0, 1))
            self.linears.append(Linear(at, *operands))
            by_call[call] = self.linears[-1]

        def backward(call, dy, q_dy):
            linear = by_call[call]
            linear.gradients[self.number] = Operand(dy.detach().clone(), q_dy, scale(linear.weight, 1, 0))

        _C.set_quantization_observer(forward, backward)
        Seen.trace = self
        try:
            yield
        finally:
            _C.set_quantization_observer(None, None)
            Seen.trace = None
            for i, linear in enumerate(self.linears):
                self.tensors[f"input of linear {i}"] = linear.x.matrix
                for number, dy in linear.gradients.items():
                    self.tensors[gradient_name(i, number)] = dy.matrix


def gradient_name(linear: int, number: int) -> str:
    return f"gradient of the output of linear {linear}, pass {number}"


@dataclass
class Reference(Trace):
    """The linears of plain torch, which multiply the operands of `weft`."""

    weft: Trace = field(default_factory=Trace)
    checks: bool = False  # the codes
    neighbour: int | None = None
    count: int = 0
    wrong: list[str] = field(default_factory=list)

    def gemm(self, op: torch.nn.Module, recipe: Any):
        """Returns the product of a linear that is called now."""
        i, self.count = self.count, self.count + 1
        if i >= len(self.weft.linears):
            raise AssertionError(f"linear {i}, {op}, was not quantized")
        seen = self.weft.linears[i]
        grouped = hasattr(op, "num_groups")
        if seen.weight != (None if grouped else op.weight.data_ptr()):
            raise AssertionError(f"linear {i} is {op}, but weft quantized the operands of another one")
        call = _Call(self, i, seen, recipe, grouped, _draw_seed(recipe))
        weights = plain.members(op, "weight", lambda p: p.detach()) if grouped else []
        start = 0

        def multiply(x: torch.Tensor, w: torch.Tensor, group: int = 0) -> torch.Tensor:
            nonlocal start
            part = slice(start, start + rows(x).shape[0])
            start = part.stop
            return _Quantized.apply(x, w, _Part(call, part, group, weights[group] if grouped else None))

        return multiply

    def add(self, name: str, size: tuple[int, int], part: slice, t: torch.Tensor) -> None:
        """Adds rows of an operand before quantization; rows of no group are not compared."""
        if name not in self.tensors:
            seen = self.weft.tensors.get(name)
            self.tensors[name] = torch.zeros(size, dtype=t.dtype) if seen is None else seen.to(t.dtype, copy=True)
        self.tensors[name][part] = rows(t)


def _draw_seed(recipe: Any) -> int:
    """Draws the seed of stochastic rounding as weft does: in each call, whether or not a gradient is needed."""
    if recipe.backward_override is not None or not recipe.grad_output.fields()["stochastic_rounding"]:
        return 0
    return int.from_bytes(torch.empty(8, dtype=torch.uint8).random_().numpy().tobytes(), "little")


@dataclass
class _Call:
    """One call of a linear."""

    run: Reference
    index: int
    seen: Linear
    recipe: Any
    grouped: bool
    seed: int


@dataclass
class _Part:
    """The rows of one group, or of all of a linear."""

    call: _Call
    rows: slice
    group: int
    weight: torch.Tensor | None  # of experts

    def input(self) -> Any:
        return self._quantized(self.call.seen.x, self.call.recipe.input, "input")

    def parameter(self) -> Any:
        seen, quantizer = self.call.seen.w, self.call.recipe.weight
        if seen is None:
            return quantizer.quantize(self.weight, columnwise=True)
        return self._quantized(seen, quantizer, "weight")

    def gradient(self, dy: torch.Tensor) -> Any:
        seen = self.call.seen.gradients.get(self.call.run.number)
        if seen is None:
            if dy.count_nonzero():
                raise AssertionError(f"linear {self.call.index} got no gradient in pass {self.call.run.number}")
            return None
        return self._quantized(seen, self.call.recipe.grad_output, "gradient")

    def _quantized(self, operand: Operand, quantizer: Any, what: str) -> Any:
        fields, seed = quantizer.fields(), self.call.seed
        stochastic = {"seed": seed, "offset": self.group} if fields["stochastic_rounding"] else {}
        if self.call.grouped:
            part = operand.matrix[self.rows]
            columnwise = not fields["random_hadamard_transform"] or len(part) % 16 == 0
            return quantizer.quantize(part, columnwise=columnwise, **stochastic)
        if self.call.run.checks:
            self._check(operand, fields, what, **stochastic)
        return operand.quantized

    def _check(self, operand: Operand, fields: dict, what: str, **stochastic) -> None:
        """Compares codes, scales and maxima of the copies that exist with the reference."""
        q, x = operand.quantized, operand.matrix
        if q.columnwise_data is None:
            fields = fields | {"random_hadamard_transform": False}  # of the columnwise copy, for rows in groups of 16
        scale = operand.scale if fields["scaling"] == "delayed" else None
        expected = quantization_reference.quantize(x, fields, scale=scale, **stochastic)
        made = [q.rowwise_data is not None, q.columnwise_data is not None]
        expected = [copy if exists else None for copy, exists in zip(expected, made, strict=True)]
        differ = quantization_reference.differences(q, expected) if x.numel() else []
        if differ or not any(made):
            self.call.run.wrong.append(f"{what} of linear {self.call.index} has wrong {', '.join(differ) or 'copies'}")


class _Quantized(torch.autograd.Function):
    """x wᵀ of quantized operands, and the gradients that a recipe prescribes. Products are rounded once."""

    @staticmethod
    def forward(ctx, x, w, part: _Part):
        call = part.call
        call.run.add(f"input of linear {call.index}", call.seen.x.matrix.shape, part.rows, x)
        ctx.part, ctx.x, ctx.w = part, x, w
        ctx.q_x, ctx.q_w = part.input(), part.parameter()
        y = multiply(values(ctx.q_x), values(ctx.q_w).T, x.dtype, call.run.neighbour)
        return y.reshape(*x.shape[:-1], len(w))

    @staticmethod
    def backward(ctx, dy):
        part, recipe, dtype = ctx.part, ctx.part.call.recipe, dy.dtype
        call = part.call
        size = (len(call.seen.x.matrix), dy.shape[-1])
        override = recipe.backward_override
        if override is None:
            q_dy = part.gradient(dy)
            if q_dy is None:
                return torch.zeros_like(ctx.x), torch.zeros_like(ctx.w), None
            call.run.add(gradient_name(call.index, call.run.number), size, part.rows, dy)
        flat, dx, dw = rows(dy), None, None
        if ctx.needs_input_grad[0]:
            a, b = {
                None: lambda: (values(q_dy), values(ctx.q_w, columnwise=True)),
                "dequantized": lambda: (flat, ctx.q_w.dequantize()),
                "high_precision": lambda: (flat, ctx.w),
            }[override]()
            dx = multiply(a, b, dtype, call.run.neighbour).reshape(ctx.x.shape)
        if ctx.needs_input_grad[1]:
            a, b = {
                None: lambda: (values(q_dy, columnwise=True), values(ctx.q_x, columnwise=True)),
                "dequantized": lambda: (flat, ctx.q_x.dequantize()),
                "high_precision": lambda: (flat, rows(ctx.x)),
            }[override]()
            dw = multiply(a.T, b, dtype, call.run.neighbour)
        return dx, dw, None


def values(q: Any, columnwise: bool = False) -> torch.Tensor:
    return q.dequantize(columnwise=columnwise, dtype=torch.float32)


def multiply(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, neighbour: int | None = None) -> torch.Tensor:
    """a b, added in float32, or exact in float64. For a neighbour sums move as if they were added in another order."""
    if dtype == torch.float64:
        return a.double() @ b.double()
    a, b = a.float(), b.float()
    y = a @ b
    if neighbour is not None:
        move = torch.rand(y.shape, generator=torch.Generator().manual_seed(neighbour)) * 2 - 1
        y = y + move * torch.finfo(torch.float32).eps * (a.abs() @ b.abs())
    return y.to(dtype)
