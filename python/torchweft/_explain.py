"""explain(): which fusions run, why others were rejected, and what is saved for backward."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import _C, _dispatcher
from ._segments import PipelineModule, Segment, call_segment, materialize

# Title and plan of a pipeline; the plan is None for a module that is called between pipelines.
Section = tuple[str, _C.Explanation | None]
SUFFIXES = (".svg", ".png", ".pdf", ".dot")


class Explanation:
    """The plan of one call. Print it, read its :attr:`data`, or draw it with :meth:`save`."""

    def __init__(self, sections: list[Section]) -> None:
        self._sections = sections

    @property
    def data(self) -> list[dict[str, Any]]:
        """A list with one dictionary per pipeline or separately called module, in order."""
        return [
            {"module": title} if section is None else {"pipeline": title, **section.data}
            for title, section in self._sections
        ]

    @property
    def text(self) -> str:
        """The plan as text, as ``print`` shows it."""
        if len(self._sections) == 1 and self._sections[0][1] is not None:
            return self._sections[0][1].text.rstrip()
        return "\n".join(f"== {title}\n{'' if section is None else section.text}" for title, section in self._sections)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def dot(self) -> str:
        """Returns the plan as Graphviz source."""
        nodes, names = [], []
        for i, (title, section) in enumerate(self._sections):
            names.append(f"section{i}")
            if section is None:
                label = title.replace('"', "'")
                nodes.append(f'  section{i} [label="{label}", shape=box, style=rounded, margin=0.15];')
            else:
                body = section.dot  # a graph with one node, `plan`
                nodes.append(body[body.index("  plan [") : body.rindex("}")].replace("  plan [", f"  section{i} [", 1))
        edges = "" if len(names) < 2 else "  " + " -> ".join(names) + ' [color="#7a8793"];\n'
        style = "  graph [bgcolor=white, pad=0.3];\n  node [fontname=Helvetica, fontsize=11, shape=plain];\n"
        return "digraph weft {\n" + style + "\n".join(nodes) + "\n" + edges + "}\n"

    def save(self, path: str | Path) -> Path:
        """Draws the plan with Graphviz.

        Args:
            path: output file. The suffix selects the format: ``.svg``, ``.png``, ``.pdf``, or ``.dot`` for the source,
                which does not require Graphviz.

        Returns:
            ``path`` as a :class:`pathlib.Path`.
        """
        path = Path(path)
        if path.suffix not in SUFFIXES:
            raise ValueError(
                f"Explanation.save: '{path}' has suffix '{path.suffix}', expected one of {', '.join(SUFFIXES)}."
            )
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"Explanation.save: there is no folder '{path.parent}' for '{path.name}'. Create it first."
            )
        if path.suffix == ".dot":
            path.write_text(self.dot())
            return path
        if shutil.which("dot") is None:
            raise RuntimeError(
                "Explanation.save: Graphviz's 'dot' was not found. Install it (apt-get install graphviz), or save to a "
                ".dot file."
            )
        subprocess.run(
            ["dot", f"-T{path.suffix[1:]}", "-Gdpi=110", "-o", str(path)], input=self.dot(), text=True, check=True
        )
        return path


def explain(module: torch.nn.Module, *inputs: torch.Tensor) -> Explanation:
    """Explains the plan of the call ``module(*inputs)``.

    The explanation shows the forward and backward plans with the kernels that compute them, rejected fusions with the
    reason, copies made because of aliasing, and the tensors saved for backward with their sizes. A Sequential that
    consists of several pipelines, or a model that contains Sequentials, is run forward once, to find the inputs of each
    pipeline; afterwards its buffers and the state of the CPU's random generator are restored.

    Args:
        module: a weft operation, a :class:`Sequential`, or a model that contains some; each is explained by name.
        *inputs: the inputs of the call: the main tensor, then the extra inputs.

    Returns:
        An :class:`Explanation`: print it, read its ``data``, or draw it with ``save("plan.png")``.

    Example::

        >>> print(torchweft.explain(block, x))
    """
    if not inputs:
        raise TypeError(
            "explain: expected the inputs of a call, got none. The plan depends on them: explain(module, x)."
        )
    if isinstance(module, PipelineModule):
        return Explanation(_explain_segments(module, *inputs))
    return Explanation(_explain_model(module, inputs))


@contextmanager
def _state_restored(module: torch.nn.Module) -> Iterator[None]:
    """Restores on exit the buffers of a module (e.g. batch-norm statistics) and the state of the CPU's random
    generator."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _explain_model(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[Section]:
    """Calls the model once and explains each outermost weft operation and Sequential in it, by name."""
    names: list[str] = []
    for name, child in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        inside = any(name.startswith(outer + ".") for outer in names)
        if isinstance(child, PipelineModule) and not inside:
            names.append(name)
    if not names:
        raise TypeError(
            f"explain: got {_named(model)}, expected a weft operation, a Sequential or a torch.nn.Module that contains "
            f"some.{_cure(model)}"
        )
    sections: list[Section] = []

    def record(name: str) -> Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            args = (kwargs["input"], *args) if "input" in kwargs else args
            sections.extend((f"{name}: {title}", plan) for title, plan in explain(module, *args)._sections)

        return hook

    modules = [(name, model.get_submodule(name)) for name in names]
    hooks = [module.register_forward_pre_hook(record(name), with_kwargs=True) for name, module in modules]
    try:
        with _state_restored(model):
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return sections


def _named(model: Any) -> str:
    kind = model if isinstance(model, type) else type(model)
    what = f"torch.nn.{kind.__name__}" if getattr(torch.nn, kind.__name__, None) is kind else kind.__name__
    return f"the class {what}" if isinstance(model, type) else what


def _cure(model: Any) -> str:
    """Returns how to get a module that can be explained."""
    from . import ops

    if isinstance(model, type):
        return f" Create an instance: {model.__name__}(...)."
    if not isinstance(model, torch.nn.Module):
        return ""
    names = {type(child).__name__ for child in model.modules()} & set(ops.__all__)
    use = f"Use torchweft.ops.{min(names)}" if names else "Use operations of torchweft.ops"
    return f" {use} instead of torch's module: docs/from_torch_nn.md lists what replaces what."


def _explain_segments(module: PipelineModule, input: torch.Tensor, *extra_inputs: torch.Tensor) -> list[Section]:
    """Explains each segment of a module; calls the segments if there are several, since each takes the output of the
    previous one."""
    sections: list[Section] = []

    def record_plan(segment: Segment, x: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        if segment.runner is None:
            sections.append((f"{type(segment.modules[0]).__name__}, called separately: {segment.reason}", None))
        else:
            title = ", ".join(type(m).__name__ for m in segment.modules)
            sections.append((title, segment.runner.explain(x, *inputs)))

    def record_and_call(segment: Segment, x: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Any:
        record_plan(segment, x, inputs)
        return call_segment({}, segment, x, inputs)

    segments = module._current_program().segments
    materialize(module, input)
    if len(segments) == 1:
        record_plan(segments[0], input, extra_inputs)
    else:
        with _state_restored(module):
            _dispatcher.run_segments(segments, input, extra_inputs, record_and_call)
    return sections
