"""Sequential: consecutive operations run as pipelines, other modules are called between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch.nn.modules import module as torch_module

from . import _dispatcher
from ._arguments import checked_arguments
from ._operation import FusibleOperation
from ._segments import Entry, PipelineModule, Segment, Stage, call_segment

if TYPE_CHECKING:
    from ._dispatcher import Output
    from ._operation import Bindings

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def boundary_reason(module: torch.nn.Module) -> str | None:
    """Returns why a module must be called through ``__call__``, outside of any pipeline; None if it can be fused."""
    if not isinstance(module, FusibleOperation):
        if isinstance(module, Sequential):
            return "a nested Sequential is a separate pipeline (fuse_nested=True merges them)"
        return "not a weft operation"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "it has hooks, which run only when the module is called"
    if any(getattr(torch_module, "_global" + hooks) for hooks in _HOOKS):
        return "global module hooks are registered, which run only when modules are called"
    if "forward" in module.__dict__ or type(module).forward is not FusibleOperation.forward:
        return "it overrides forward"
    if _overrides_call(module):
        return "its class overrides __call__"
    return None


def _overrides_call(module: torch.nn.Module) -> bool:
    """Whether calling the module does more than torch.nn.Module.__call__."""
    plain, cls = torch.nn.Module, type(module)
    if module.__dict__.get("_compiled_call_impl") is not None:  # module.compile()
        return True
    # torch.export patches torch.nn.Module.__call__ to track the module stack; any other patch must run.
    call = plain.__call__ if torch.compiler.is_compiling() else plain._wrapped_call_impl
    return cls.__call__ is not call or cls._call_impl is not plain._call_impl


def _is_inlinable(module: Sequential) -> bool:
    """Whether a nested Sequential only runs its modules, so that they can be fused into the outer pipeline."""
    plain = type(module).forward is Sequential.forward and not _overrides_call(module)
    return plain and "forward" not in module.__dict__ and not any(getattr(module, hooks) for hooks in _HOOKS)


def _scoped(scope: str, bindings: Bindings) -> Bindings:
    """Prefixes the channel names with the Sequential in which they are used."""
    inputs, outputs = bindings
    return (
        [channel and scope + channel for channel in inputs],
        [(channel and scope + channel, to_caller) for channel, to_caller in outputs],
    )


class Sequential(PipelineModule):
    """Runs modules in order. Consecutive weft operations are fused and run as one pipeline with one autograd node.

    Operations may take extra inputs and return extra outputs. The call takes and returns them after the main tensor, in
    the order of the operations. Other modules are called between two pipelines.

    Args:
        *modules (torch.nn.Module | dict[str, torch.nn.Module]): The modules in order, or one dictionary of names to
            modules.
        fuse_nested (bool): Fuse the operations of nested Sequentials into the pipelines of this one; False makes a
            nested Sequential a separate pipeline. Default: ``False``.

    Shape:
        - Input: that of the first module.
        - Output: that of the last module.

    Example::

        >>> block = torchweft.Sequential(
        ...     torchweft.ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ...     torchweft.ops.RMSNorm(256),
        ...     torchweft.ops.Linear(256, 1024),
        ...     torchweft.ops.GELU(),
        ...     torchweft.ops.Linear(1024, 256),
        ...     torchweft.ops.AddExtraInput().set_extra_input_channel(0, "residual"),
        ... )
        >>> y = block(torch.randn(8, 256))
        >>> y.shape
        torch.Size([8, 256])
        >>> plan = block.explain(torch.randn(8, 256))
    """

    _modules: dict[str, torch.nn.Module]  # type: ignore[assignment]  # no child is None
    _label: str | None = None  # what errors call all operations; None: their index and class

    @checked_arguments
    def __init__(self, *modules: torch.nn.Module | dict[str, torch.nn.Module], fuse_nested: bool = False) -> None:
        super().__init__()
        self.fuse_nested = fuse_nested
        if len(modules) == 1 and isinstance(modules[0], dict):
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            self.extend(cast("tuple[torch.nn.Module, ...]", modules))

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Adds a module under a name."""
        if not isinstance(module, torch.nn.Module):
            cure = ""
            if isinstance(module, type):
                cure = f" Create an instance: {module.__name__}(...)."
            elif isinstance(module, list | tuple):
                cure = " Unpack the list: Sequential(*modules)."
            raise TypeError(f"Sequential: module {name!r} is {module!r}, expected a torch.nn.Module.{cure}")
        super().add_module(name, module)

    # ---- a list of modules ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules.values())

    def _key(self, index: int) -> str:
        keys = list(self._modules)
        if not isinstance(index, int):
            raise TypeError(f"Sequential: index is {index!r}, expected an int or a slice. Modules: {', '.join(keys)}.")
        if not -len(keys) <= index < len(keys):
            raise IndexError(f"Sequential: index {index} is out of range, expected an index below {len(keys)}.")
        return keys[index]

    @overload
    def __getitem__(self, index: int) -> torch.nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> Sequential: ...

    def __getitem__(self, index: int | slice) -> torch.nn.Module:
        if isinstance(index, slice):
            selected = Sequential(fuse_nested=self.fuse_nested)
            for key in list(self._modules)[index]:
                selected.add_module(key, self._modules[key])
            return selected
        return self._modules[self._key(index)]

    def __setitem__(self, index: int | slice, module: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
        if not isinstance(index, slice):
            self.add_module(self._key(index), cast("torch.nn.Module", module))
            return
        modules = list(self)
        modules[index] = cast("Iterable[torch.nn.Module]", module)
        self._assign_modules(modules)

    def __delitem__(self, index: int | slice) -> None:
        for key in list(self._modules)[index] if isinstance(index, slice) else [self._key(index)]:
            del self._modules[key]

    def _assign_modules(self, modules: list[torch.nn.Module]) -> None:
        """Assigns modules to the existing keys in order; appends or removes keys at the end."""
        keys = list(self._modules)
        for key in keys[len(modules) :]:
            del self._modules[key]
        for key, module in zip(keys, modules, strict=False):
            self.add_module(key, module)
        self.extend(modules[len(keys) :])

    def append(self, module: torch.nn.Module) -> Sequential:
        """Appends a module. Returns this Sequential."""
        numbers = [int(key) for key in self._modules if key.isdigit()]
        self.add_module(str(max(numbers, default=-1) + 1), module)
        return self

    def extend(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        """Appends several modules. Returns this Sequential."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: torch.nn.Module) -> Sequential:
        """Inserts a module before `index`. Returns this Sequential."""
        modules = list(self)
        modules.insert(index, module)
        self._assign_modules(modules)
        return self

    def pop(self, index: int | slice = -1) -> torch.nn.Module:
        """Removes and returns the module at `index`."""
        module = self[index]
        del self[index]
        return module

    def __iadd__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return self.extend(modules)

    def __add__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return self[:].extend(modules)

    # ---- segments -------------------------------------------------------------------------------------------------

    def _flat_modules(self, path: str = "", scope: str = "") -> list[tuple[torch.nn.Module, str, str]]:
        """Returns the modules to run, the scope of their channel names, and what errors call them, e.g. "Sequential[2]
        Linear". Inlines nested Sequentials if asked. `path`: what errors call this Sequential."""
        path = path or type(self).__name__
        flat_modules: list[tuple[torch.nn.Module, str, str]] = []
        for i, (key, module) in enumerate(self._modules.items()):
            if self.fuse_nested and isinstance(module, Sequential) and _is_inlinable(module):
                flat_modules.extend(module._flat_modules(f"{path}[{i}]", f"{scope}{key}/"))
            else:
                flat_modules.append((module, scope, self._label or f"{path}[{i}] {type(module).__name__}"))
        return flat_modules

    def _entries(self) -> list[Entry]:
        entries = []
        for module, scope, label in self._flat_modules():
            operations = module._stages() if isinstance(module, FusibleOperation) else []
            stages = [Stage(op, *_scoped(scope, op._bindings()), label) for op in operations]
            extras = (module.num_extra_inputs, module.num_extra_outputs) if isinstance(module, Sequential) else (0, 0)
            entries.append(Entry(module, boundary_reason(module), stages, extras))
        return entries

    def _single_runner_checks(self, segments: list[Segment]) -> dict[str, Any] | None:
        flat = all(not isinstance(module, Sequential) for module in self._modules.values())
        if len(segments) != 1 or segments[0].reason is not None or not flat:
            return None
        return {"bypassed": segments[0].modules, "children": self._modules.values()}

    @property
    def num_extra_inputs(self) -> int:
        """Number of extra inputs that a call takes."""
        return _dispatcher.num_caller_inputs(self._current_program().segments)

    @property
    def num_extra_outputs(self) -> int:
        """Number of extra outputs that a call returns."""
        return sum(to_caller for segment in self._current_program().segments for _, to_caller in segment.targets)

    # ---- the call -------------------------------------------------------------------------------------------------

    def forward(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, op_kwargs: dict[Any, dict[str, Any]] | None = None
    ) -> Output:
        """Runs the modules.

        Args:
            input: the main input.
            *extra_inputs: extra inputs, in the order of the operations.
            op_kwargs: keyword arguments for single operations, by index or by module, e.g.
                ``{2: {"output": buffer}}``.

        Returns:
            The output, or a tuple of the output and the extra outputs.
        """
        if op_kwargs is None and (output := self._run_unsegmented(input, extra_inputs)) is not None:
            return output
        segments = self._materialized_segments(input)
        keywords = self._keywords_by_module(op_kwargs)
        self._check_inputs(segments, input, extra_inputs)
        return _dispatcher.run_segments(segments, input, extra_inputs, partial(call_segment, keywords))

    def _keywords_by_module(self, op_kwargs: dict[Any, dict[str, Any]] | None) -> dict[int, dict[str, Any]]:
        keywords: dict[int, dict[str, Any]] = {}
        for target, kwargs in (op_kwargs or {}).items():
            module = self[target] if isinstance(target, int) else target
            if not any(module is contained for contained, *_ in self._flat_modules()):
                raise ValueError(
                    f"Sequential: op_kwargs has the key {target!r}, expected an index below {len(self)} or one of its "
                    "modules."
                )
            if not isinstance(module, FusibleOperation):
                raise ValueError(
                    f"Sequential: op_kwargs has arguments for {type(module).__name__}, which is not a weft operation. "
                    "Remove them."
                )
            keywords[id(module)] = kwargs
        return keywords
