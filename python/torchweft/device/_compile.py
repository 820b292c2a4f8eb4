"""`torch.compile` with Inductor, which would compile kernels for a GPU: graphs on a device run as they are."""

from __future__ import annotations

from typing import Any

import torch


def _uses_a_device(graph: torch.fx.GraphModule, inputs: list[Any]) -> bool:
    values = [*inputs, *(node.meta.get("example_value") for node in graph.graph.nodes)]
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)


def install() -> None:
    inductor: Any = torch._TorchCompileInductorWrapper
    compile_graph = inductor.__call__

    def call(self: Any, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        if not _uses_a_device(graph, inputs):
            return compile_graph(self, graph, inputs, **options)
        from torch._dynamo.backends.debugging import aot_eager

        backend: Any = aot_eager
        return backend(graph, inputs)

    inductor.__call__ = call
