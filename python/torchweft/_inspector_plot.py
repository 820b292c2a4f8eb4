"""The picture of a QuantizationInspector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._inspector import TensorStatistics

_COLORS = {
    "input": "#3f7fbf",
    "weight": "#8c8c8c",
    "grad_output": "#d98c3f",
    "grad_input": "#3f7fbf",
    "grad_weight": "#8c8c8c",
}


def save_picture(rows: Sequence[TensorStatistics], path: Path) -> None:
    """Draws the signal-to-noise ratio of each tensor as bars, and the cosine of each gradient as points."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("QuantizationInspector.save requires matplotlib. Run: pip install matplotlib") from error
    linears = list(dict.fromkeys(row.linear for row in rows))
    figure = Figure(figsize=(max(6.0, 1.2 + 0.5 * len(linears)), 6.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for tensor, places, found in _series(rows, linears, ("input", "weight", "grad_output")):
        upper.bar(places, [row.snr_db for row in found], 0.27, color=_COLORS[tensor], label=tensor)
    for tensor, places, found in _series(rows, linears, ("grad_input", "grad_weight")):
        lower.plot(places, [row.cosine for row in found], "o", color=_COLORS[tensor], label=tensor)
    upper.set_ylabel("signal to noise, dB")
    lower.set_ylabel("cosine to the gradient\nwithout quantization")
    for axes in (upper, lower):
        axes.grid(axis="y", alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    tilted: dict[str, Any] = {"rotation": 45, "ha": "right"} if len(linears) > 6 else {}
    lower.set_xticks(range(len(linears)), linears, **tilted)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def _series(
    rows: Sequence[TensorStatistics], linears: list[str], tensors: tuple[str, ...]
) -> list[tuple[str, list[float], list[TensorStatistics]]]:
    """Returns for each tensor its name, its places on the x axis, side by side, and its rows. Exact tensors, whose
    ratio is infinite, are left out."""
    shown = [row for row in rows if math.isfinite(row.snr_db) and math.isfinite(row.cosine)]
    found = {tensor: [row for row in shown if row.tensor == tensor] for tensor in tensors}
    shifts = [(i - (len(tensors) - 1) / 2) * 0.27 for i in range(len(tensors))]
    return [
        (tensor, [linears.index(row.linear) + shift for row in found[tensor]], found[tensor])
        for tensor, shift in zip(tensors, shifts, strict=True)
    ]
