"""QuantizationInspector: what quantization does to the tensors and gradients of linears."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from . import _C
from ._autocast import called_in_backward

_CLIPPED = 1 + 2**-8  # a value this much larger than its quantized value was clipped, not rounded
_TENSORS = ("input", "weight", "grad_output")
_GRADIENTS = ("grad_input", "grad_weight")


@dataclass(frozen=True)
class TensorStatistics:
    """What quantization did to a tensor of a linear, over all calls.

    Values that are NaN or infinite, before or after quantization, are counted in `nonfinite` only. The other fields are
    of the finite values.

    For the gradients that the linear computes (``"grad_input"``, ``"grad_weight"``), `snr_db` and `cosine` compare the
    quantized GEMM with one of unquantized operands, and the other fields are NaN.

    Args:
        linear: name of the linear.
        tensor: ``"input"``, ``"weight"``, ``"grad_output"``, ``"grad_input"`` or ``"grad_weight"``.
        calls: number of quantized tensors.
        amax: largest magnitude.
        scale_min: smallest scale that codes are multiplied by.
        scale_max: largest one.
        underflow: share of values that became 0.
        saturated: share of values that were clipped to the largest code.
        subnormal: share of values with a subnormal code.
        snr_db: signal-to-noise ratio 10 log₁₀(Σ x² / Σ (x - Q(x))²).
        cosine: of the angle between the tensor and its quantized values.
        nonfinite: share of values that are NaN or infinite, before or after quantization.
    """

    linear: str
    tensor: str
    calls: int
    amax: float
    scale_min: float
    scale_max: float
    underflow: float
    saturated: float
    subnormal: float
    snr_db: float
    cosine: float
    nonfinite: float


@dataclass
class _Sums:
    """Sums over the values of all calls."""

    calls: int = 0
    values: int = 0  # finite ones
    nonfinite: int = 0
    amax: float = -math.inf
    scale_min: float = math.inf
    scale_max: float = 0.0
    underflow: int = 0
    saturated: int = 0
    subnormal: int = 0
    signal: float = 0.0
    noise: float = 0.0
    quantized: float = 0.0
    product: float = 0.0

    def add(self, exact: torch.Tensor, quantized: torch.Tensor, matrix: _C.QuantizedMatrix | None = None) -> None:
        """Adds the error of the finite values of a tensor, and of a quantized `matrix` their range and how they are
        coded."""
        finite = exact.isfinite() & quantized.isfinite()
        self.calls += 1
        self.nonfinite += finite.numel() - int(finite.sum())
        exact, quantized = exact[finite], quantized[finite]
        self.values += exact.numel()
        if matrix is not None and exact.numel():
            self._add_codes(exact.float().abs(), quantized.abs(), matrix.codes()[finite].abs(), matrix)
        exact, quantized = exact.double(), quantized.double()
        self.signal += exact.square().sum().item()
        self.noise += (exact - quantized).square().sum().item()
        self.quantized += quantized.square().sum().item()
        self.product += (exact * quantized).sum().item()

    def _add_codes(
        self, exact: torch.Tensor, quantized: torch.Tensor, codes: torch.Tensor, matrix: _C.QuantizedMatrix
    ) -> None:
        """Adds the range of magnitudes, and how they are coded."""
        self.amax = max(self.amax, exact.max().item())
        self.underflow += int(((codes == 0) & (exact > 0)).sum())
        self.saturated += int(((codes == matrix.max_code) & (exact > quantized * _CLIPPED)).sum())
        self.subnormal += int(((codes > 0) & (codes < matrix.min_normal_code)).sum())
        if (used := codes > 0).any():
            scales = quantized[used] / codes[used]
            self.scale_min = min(self.scale_min, scales.min().item())
            self.scale_max = max(self.scale_max, scales.max().item())

    def _snr_db(self) -> float:
        if not self.values:
            return math.nan
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    def statistics(self, linear: str, tensor: str) -> TensorStatistics:
        coded = tensor in _TENSORS

        def share(count: int) -> float:
            return count / self.values if coded and self.values else math.nan

        length = math.sqrt(self.signal * self.quantized)
        return TensorStatistics(
            linear=linear,
            tensor=tensor,
            calls=self.calls,
            amax=self.amax if self.amax >= 0 else math.nan,
            scale_min=self.scale_min if self.scale_max else math.nan,
            scale_max=self.scale_max or math.nan,
            underflow=share(self.underflow),
            saturated=share(self.saturated),
            subnormal=share(self.subnormal),
            snr_db=self._snr_db(),
            cosine=self.product / length if length else math.nan,
            nonfinite=self.nonfinite / (self.nonfinite + self.values) if self.nonfinite else 0.0,
        )


class _Call(NamedTuple):
    """What a forward leaves for its backward."""

    linear: str
    input: torch.Tensor
    weight: torch.Tensor
    q_input: _C.QuantizedMatrix
    q_weight: _C.QuantizedMatrix

    def has(self, x: torch.Tensor) -> bool:
        return self.input.shape == x.shape and torch.allclose(self.input, x, rtol=0, atol=0, equal_nan=True)


@dataclass(eq=False)
class QuantizationInspector:
    """Context manager that reports what quantization does to each linear that is called, in all threads.

    It reports the input, the weight and the gradient of the output of each linear, and the gradients that the linear
    computes, compared with those of unquantized operands. Results do not change. It keeps copies of inputs and weights
    until their backward, and computes each GEMM of backward three times. Linears of experts (`GroupedLinear`) are not
    reported. With sequence parallelism a rank reports the rows that it quantizes: its own, or those of all ranks where
    they are gathered first; ``"grad_weight"`` only in the latter case.

    Args:
        model: linears are named after its Parameters; None: ``"linear 0"``, ``"linear 1"``, … in the order of calls.
        gradients: whether to compare the gradients.

    Example::

        >>> from torchweft import ops
        >>> model = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64))
        >>> with torchweft.quantization.QuantizationInspector(model) as inspector:
        ...     with torchweft.autocast(recipe=torchweft.recipe.MXFP8BlockScaling()):
        ...         y = model(torch.randn(32, 64))
        ...     y.square().sum().backward()
        >>> [(row.linear, row.tensor) for row in inspector.statistics()][:3]
        [('0', 'input'), ('0', 'weight'), ('0', 'grad_output')]
    """

    model: torch.nn.Module | None = None
    gradients: bool = True
    _sums: defaultdict[tuple[str, str], _Sums] = field(default_factory=lambda: defaultdict(_Sums), repr=False)
    _names: dict[int, str] = field(default_factory=dict, repr=False)
    _calls: dict[int, _Call] = field(default_factory=dict, repr=False)

    def __enter__(self) -> QuantizationInspector:
        with _lock:
            _inspectors.append(self)
            _C.set_quantization_observer(_observe_forward, _observe_backward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _inspectors.remove(self)
            if self not in _inspectors:
                self._calls.clear()
            if not _inspectors:
                _C.set_quantization_observer(None, None)

    def statistics(self) -> list[TensorStatistics]:
        """Returns the statistics of each tensor, in the order of the linears' first calls."""
        tensors = (*_TENSORS, *_GRADIENTS)
        with _lock:
            order = {name: i for i, name in enumerate(dict.fromkeys(linear for linear, _ in self._sums))}
            keys = sorted(self._sums, key=lambda key: (order[key[0]], tensors.index(key[1])))
            return [self._sums[key].statistics(*key) for key in keys]

    def data(self) -> list[dict[str, Any]]:
        """Returns the statistics as dictionaries, for ``json`` or a table; None for NaN and infinity."""

        def plain(value: Any) -> Any:
            return value if not isinstance(value, float) or math.isfinite(value) else None

        return [{name: plain(value) for name, value in asdict(row).items()} for row in self.statistics()]

    def __str__(self) -> str:
        rows = self.statistics()
        if not rows:
            return "QuantizationInspector: no linear was quantized. Call them within torchweft.autocast(recipe=...)."
        head = ("linear", "tensor", "amax", "scale", "underflow", "saturated", "subnormal", "SNR dB", "cosine")
        table = [head, *map(_cells, rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in table
        ]
        lines += [
            f"{row.linear} {row.tensor}: {100 * row.nonfinite:.3g} % of its values are NaN or infinite, left out above."
            for row in rows
            if row.nonfinite
        ]
        return "\n".join(line.rstrip() for line in lines)

    def save(self, path: str | Path) -> None:
        """Saves a picture: the signal-to-noise ratio of each tensor, and the cosine of each gradient.

        Args:
            path: of a file that matplotlib can write, such as ``"quantization.png"``.

        Raises:
            ImportError: without matplotlib.
            ValueError: if no linear was quantized.
        """
        from ._inspector_plot import save_picture

        rows = self.statistics()
        if not rows:
            raise ValueError(str(self))
        save_picture(rows, Path(path))

    # ---- what linears report ----

    def _name(self, parameter: torch.Tensor) -> str:
        key = parameter.data_ptr()
        for name, param in self.model.named_parameters() if self.model is not None else ():
            if param.data_ptr() == key:  # FSDP may have another weight there in the next call
                return name.removesuffix(".weight")
        return self._names.setdefault(key, f"linear {len(self._names)}")

    def _add(self, linear: str, tensor: str, exact: torch.Tensor, matrix: _C.QuantizedMatrix) -> None:
        self._sums[linear, tensor].add(exact, matrix.dequantize(dtype=torch.float32), matrix)

    def _forward(
        self,
        call: int,
        parameter: torch.Tensor,
        x: torch.Tensor,
        q_x: _C.QuantizedMatrix,
        w: torch.Tensor,
        q_w: _C.QuantizedMatrix,
    ) -> None:
        linear = self._name(parameter)
        if not called_in_backward():
            self._add(linear, "input", x, q_x)
            self._add(linear, "weight", w, q_w)
        else:  # gradient checkpointing repeats the call, and backward reads what this one saves
            first = (n for n, old in reversed(self._calls.items()) if old.linear == linear and old.has(x))
            self._calls.pop(next(first, 0), None)
        if call and self.gradients:
            self._calls[call] = _Call(linear, x.clone(), w.clone(), q_x, q_w)

    def _backward(self, call: int, dy: torch.Tensor, q_dy: _C.QuantizedMatrix) -> None:
        saved = self._calls.pop(call, None)
        if saved is None or q_dy.rowwise_data is None:
            return
        self._add(saved.linear, "grad_output", dy, q_dy)
        exact = dy.float()
        if saved.q_weight.columnwise_data is not None:
            found = _C.quantized_gemm(q_dy, saved.q_weight, b_columnwise=True, dtype=torch.float32)
            self._sums[saved.linear, "grad_input"].add(exact @ saved.weight.float(), found)
        same_rows = len(saved.input) == len(dy)  # otherwise one of them was gathered over ranks
        if same_rows and saved.q_input.columnwise_data is not None and q_dy.columnwise_data is not None:
            found = _C.quantized_gemm(q_dy, saved.q_input, a_columnwise=True, b_columnwise=True, dtype=torch.float32)
            self._sums[saved.linear, "grad_weight"].add(exact.T @ saved.input.float(), found)


_inspectors: list[QuantizationInspector] = []  # those that are open; one that was entered twice is there twice
_lock = threading.RLock()


def _observe_forward(*event: Any) -> None:
    with torch.no_grad(), _lock:
        for inspector in dict.fromkeys(_inspectors):
            inspector._forward(*event)


def _observe_backward(*event: Any) -> None:
    with torch.no_grad(), _lock:
        for inspector in dict.fromkeys(_inspectors):
            inspector._backward(*event)


def _cells(row: TensorStatistics) -> tuple[str, ...]:
    def share(value: float) -> str:
        return "" if math.isnan(value) else f"{100 * value:.2f} %"

    def number(value: float) -> str:
        return "" if math.isnan(value) else f"{value:.3g}"

    scale = " to ".join(dict.fromkeys((number(row.scale_min), number(row.scale_max))))
    shares = (share(row.underflow), share(row.saturated), share(row.subnormal))
    return (row.linear, row.tensor, number(row.amax), scale, *shares, f"{row.snr_db:.1f}", f"{row.cosine:.5f}")
