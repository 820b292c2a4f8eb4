"""Which fusion ran, why another did not, what is kept for backward."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from . import _C
from .operation import FusibleOperation
from .sequential import Sequential


class Explanation:
    """The plan of one call. Print it, take its ``data``, or draw it with :meth:`save`."""

    def __init__(self, parts: list[tuple[str, _C.Explanation | None]]) -> None:
        self._parts = parts

    @property
    def data(self) -> list[dict[str, Any]]:
        """One dictionary per pipeline or separate module, in order."""
        return [{"module": title} if part is None else {"pipeline": title, **part.data} for title, part in self._parts]

    @property
    def text(self) -> str:
        if len(self._parts) == 1 and self._parts[0][1] is not None:
            return self._parts[0][1].text.rstrip()
        return "\n".join(f"== {title}\n{'' if part is None else part.text}" for title, part in self._parts)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def dot(self) -> str:
        """Graphviz source of the picture."""
        nodes, names = [], []
        for i, (title, part) in enumerate(self._parts):
            names.append(f"part{i}")
            if part is None:
                label = title.replace('"', "'")
                nodes.append(f'  part{i} [label="{label}", shape=box, style=rounded, margin=0.15];')
            else:
                body = part.dot
                nodes.append(body[body.index("  plan [") : body.rindex("}")].replace("  plan [", f"  part{i} [", 1))
        edges = "" if len(names) < 2 else "  " + " -> ".join(names) + ' [color="#7a8793"];\n'
        style = "  graph [bgcolor=white, pad=0.3];\n  node [fontname=Helvetica, fontsize=11, shape=plain];\n"
        return "digraph weft {\n" + style + "\n".join(nodes) + "\n" + edges + "}\n"

    def save(self, path: str | Path) -> Path:
        """Draws the plan; the suffix chooses the form: .svg, .png, .pdf, or .dot for the source."""
        path = Path(path)
        if path.suffix == ".dot":
            path.write_text(self.dot())
            return path
        if shutil.which("dot") is None:
            raise RuntimeError("Drawing needs Graphviz's 'dot' (apt-get install graphviz), or save to a .dot file")
        subprocess.run(
            ["dot", f"-T{path.suffix[1:]}", "-Gdpi=110", "-o", str(path)], input=self.dot(), text=True, check=True
        )
        return path


def explain(module: torch.nn.Module, *inputs: torch.Tensor) -> Explanation:
    """Explains a call ``module(*inputs)`` of an operation or a Sequential.

    It shows the forward and the backward plan, refused fusions with their reasons, copies made because of aliasing, and
    what is kept for backward with its bytes. A Sequential of several pipelines is run once, forward, to learn what
    reaches each of them.
    """
    if not inputs:
        raise TypeError("explain() needs the inputs of a call, e.g. explain(module, x): the plan depends on them")
    if isinstance(module, Sequential):
        return Explanation(_explain_groups(module, *inputs))
    if isinstance(module, FusibleOperation):
        return Explanation([(type(module).__name__, module._fresh_runner(inputs[0]).explain(*inputs))])
    raise TypeError(f"explain() takes a weft operation or Sequential, got {type(module).__name__}")


def _explain_groups(module: Sequential, input: torch.Tensor, *extra_inputs: torch.Tensor):
    from .sequential import run_groups

    parts: list[tuple[str, _C.Explanation | None]] = []

    def look(group, x, inputs):
        if group.runner is None:
            parts.append((f"{type(group.modules[0]).__name__}, called on its own: {group.reason}", None))
        else:
            title = ", ".join(type(m).__name__ for m in group.modules)
            parts.append((title, group.runner.explain(x, *inputs)))

    groups = module._fresh_groups()
    if len(groups) == 1:
        look(groups[0], input, list(extra_inputs))
    else:
        run_groups(groups, input, list(extra_inputs), {}, before=look)
    return parts
