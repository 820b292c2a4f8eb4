"""Sequential: consecutive operations run as pipelines, other modules are called between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch.nn.modules import module as torch_module

from . import _C, _dispatcher
from ._arguments import checked_arguments
from ._operation import FusibleOperation, build_runner, check_keywords, materialize, traced_segment

if TYPE_CHECKING:
    from ._dispatcher import Output, TracedSegment
    from ._explain import Explanation
    from ._operation import Bindings, Stage

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


class _IdentityKey:
    """Compares an object by identity and keeps it alive."""

    def __init__(self, object: Any) -> None:
        self.object = object

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _IdentityKey) and self.object is other.object


@dataclass
class _Segment:
    """A pipeline (`runner`) or one separately called module, with the routing of its extra tensors."""

    modules: list[torch.nn.Module]
    runner: _C.Runner | None = None
    stages: list[Stage] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)  # per extra input: its channel; None: the caller
    targets: list[tuple[str | None, bool]] = field(default_factory=list)  # per extra output: channel, output_to_caller
    reason: str | None = None
    labels: list[str] = field(default_factory=list)  # what errors call each stage


class Sequential(torch.nn.Module):
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

        >>> block = weft.Sequential(
        ...     weft.ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ...     weft.ops.RMSNorm(256),
        ...     weft.ops.Linear(256, 1024),
        ...     weft.ops.GELU(),
        ...     weft.ops.Linear(1024, 256),
        ...     weft.ops.AddExtraInput().set_extra_input_channel(0, "residual"),
        ... )
        >>> y = block(torch.randn(8, 256))
        >>> y.shape
        torch.Size([8, 256])
        >>> plan = block.explain(torch.randn(8, 256))
    """

    _runner: _C.Runner | None = None
    _module_id: int
    _modules: dict[str, torch.nn.Module]  # type: ignore[assignment]  # no child is None
    _label: str | None = None  # what errors call all operations; None: their index and class

    @checked_arguments
    def __init__(self, *modules: torch.nn.Module | dict[str, torch.nn.Module], fuse_nested: bool = False) -> None:
        super().__init__()
        _dispatcher.register_module(self)
        self.fuse_nested = fuse_nested
        if len(modules) == 1 and isinstance(modules[0], dict):
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            self.extend(cast("tuple[torch.nn.Module, ...]", modules))

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Adds a module under a name."""
        if not isinstance(module, torch.nn.Module | None):
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

    def __getstate__(self) -> dict[str, Any]:
        return {
            k: v
            for k, v in self.__dict__.items()
            if k not in ("_runner", "_single_runner", "_segments", "_built_signature", "_materialized", "_module_id")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _dispatcher.register_module(self)

    # ---- segments -------------------------------------------------------------------------------------------------

    def _flat_modules(self, scope: str = "") -> list[tuple[torch.nn.Module, str]]:
        """Returns the modules to run with the scope of their channel names; inlines nested Sequentials if asked."""
        flat_modules: list[tuple[torch.nn.Module, str]] = []
        for key, module in self._modules.items():
            if self.fuse_nested and isinstance(module, Sequential) and _is_inlinable(module):
                flat_modules.extend(module._flat_modules(f"{scope}{key}/"))
            else:
                flat_modules.append((module, scope))
        return flat_modules

    def _labels(self, path: str) -> dict[int, str]:
        """Returns what errors call each module, by id: \"Sequential[2] Linear\"."""
        labels: dict[int, str] = {}
        for i, module in enumerate(self):
            if isinstance(module, Sequential):
                labels |= module._labels(f"{path}[{i}]")
            labels[id(module)] = self._label or f"{path}[{i}] {type(module).__name__}"
        return labels

    def _signature(self) -> Any:
        entries: list[Any] = []
        for module, scope in self._flat_modules():
            stages = module._stages() if isinstance(module, FusibleOperation) else []
            extras = (module.num_extra_inputs, module.num_extra_outputs) if isinstance(module, Sequential) else None
            # Setting a field makes a new description. The signature keeps the old one alive, so comparing ids is safe.
            operations = [(_IdentityKey(op._description()), op._bindings()) for op in stages]
            entries.append((_IdentityKey(module), scope, boundary_reason(module), extras, operations))
        return entries

    def _current_segments(self) -> list[_Segment]:
        """Returns the segments; rebuilds them if modules, hooks, fields or channels have changed."""
        version = _C.modules_version()  # read first: changes made meanwhile by other threads count at the next call
        signature = self._signature()
        segments: list[_Segment] | None = self.__dict__.get("_segments")
        if segments is not None and self.__dict__.get("_built_signature") == signature:
            if self._runner is not None:
                self._runner.revalidate(version)
            return segments
        segments = _connect_channels(_partition(self._flat_modules(), self._labels(type(self).__name__)))
        flat = all(not isinstance(module, Sequential) for module in self._modules.values())
        single = len(segments) == 1 and segments[0].reason is None and flat
        for segment in segments:
            if segment.reason is None:
                bypassed, children = (segment.modules, self._modules.values()) if single else ((), None)
                segment.runner = build_runner(self, segment.stages, version, bypassed, children, segment.labels)
        object.__setattr__(self, "_materialized", False)
        # forward() sets _runner, the fast path, once Parameters on the meta device have been allocated.
        object.__setattr__(self, "_runner", None)
        object.__setattr__(self, "_single_runner", segments[0].runner if single else None)
        object.__setattr__(self, "_segments", segments)
        object.__setattr__(self, "_built_signature", signature)  # last: other threads that see it use the rest
        return segments

    @property
    def num_extra_inputs(self) -> int:
        """Number of extra inputs that a call takes."""
        return sum(source is None for segment in self._current_segments() for source in segment.sources)

    @property
    def num_extra_outputs(self) -> int:
        """Number of extra outputs that a call returns."""
        return sum(to_caller for segment in self._current_segments() for _, to_caller in segment.targets)

    def _traced_segments(self) -> tuple[TracedSegment, ...]:
        """Returns its segments for `_dispatcher.run`, as constants."""
        paths = {id(module): path for path, module in self.named_modules()}
        segments: list[TracedSegment] = []
        for segment in self._current_segments():
            connections = tuple(segment.sources), tuple(segment.targets)
            if segment.runner is None:
                segments.append((None, ((paths[id(segment.modules[0])], ""),), (), *connections))
            else:
                segments.append((*traced_segment(self, segment.stages, segment.runner.text)[:3], *connections))
        return tuple(segments)

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
        if torch.compiler.is_compiling() and op_kwargs is None and _dispatcher.applies(self, input):
            return _dispatcher.run(self, input, extra_inputs)
        runner = self._runner
        if runner is not None and op_kwargs is None:
            output: Output = runner(self, input, *extra_inputs)
            if output is not NotImplemented:
                return output
        if op_kwargs is None and _dispatcher.applies(self, input):
            return _dispatcher.run(self, input, extra_inputs)
        segments = self._current_segments()
        if not self.__dict__.get("_materialized") and isinstance(input, torch.Tensor):
            materialize(self, input)
            object.__setattr__(self, "_materialized", True)
            object.__setattr__(self, "_runner", self._single_runner)
        keywords = self._keywords_by_module(op_kwargs)
        expected = sum(source is None for segment in segments for source in segment.sources)
        if len(extra_inputs) != expected:
            takers = [f"Sequential[{i}] {type(m).__name__}" for i, m in enumerate(self) if _num_caller_inputs(m)]
            raise ValueError(
                f"Sequential: expected {expected} extra input{'' if expected == 1 else 's'}"
                f"{' (' + ', '.join(takers) + ')' if takers else ''}, got {len(extra_inputs)}. "
                "Pass the extra inputs after the main input: block(x, *extra_inputs)."
            )
        return run_segments(segments, input, list(extra_inputs), keywords)

    def _keywords_by_module(self, op_kwargs: dict[Any, dict[str, Any]] | None) -> dict[int, dict[str, Any]]:
        keywords: dict[int, dict[str, Any]] = {}
        flat_modules = self._flat_modules()
        for target, kwargs in (op_kwargs or {}).items():
            module = self[target] if isinstance(target, int) else target
            if not any(module is contained for contained, _ in flat_modules):
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

    def explain(self, *inputs: torch.Tensor) -> Explanation:
        """Explains the plan of a call with these inputs; see :func:`weft.explain`."""
        from ._explain import explain

        return explain(self, *inputs)


def _num_caller_inputs(module: torch.nn.Module) -> int:
    """Returns how many extra inputs of a module come from the caller of the Sequential that contains it."""
    if isinstance(module, Sequential):
        return module.num_extra_inputs
    operations = module._stages() if isinstance(module, FusibleOperation) else []
    return sum(channel is None for op in operations for channel in op._bindings()[0])


def _partition(flat_modules: list[tuple[torch.nn.Module, str]], labels: dict[int, str]) -> list[_Segment]:
    """Groups consecutive fusible operations into segments; every other module is a segment by itself."""
    segments: list[_Segment] = []
    for module, scope in flat_modules:
        reason = boundary_reason(module)
        operations = module._stages() if isinstance(module, FusibleOperation) else []
        stages = [(op, _scoped(scope, op._bindings())) for op in operations]
        if reason is None and segments and segments[-1].reason is None:
            segments[-1].modules.append(module)
            segments[-1].stages.extend(stages)
        else:
            segments.append(_Segment([module], stages=stages, reason=reason))
        segments[-1].labels.extend([labels[id(module)]] * len(stages))
    return segments


def _producers(segments: list[_Segment]) -> dict[str, int]:
    """Returns the index of the segment that produces each channel."""
    producers: dict[str, int] = {}
    first: dict[str, str] = {}
    for g, segment in enumerate(segments):
        for (_, (_, outputs)), label in zip(segment.stages, segment.labels, strict=True):
            for channel in (channel for channel, _ in outputs if channel is not None):
                if channel in producers:
                    raise ValueError(
                        f"Channel '{channel}' has multiple producers: {first[channel]} and {label}. Give each its own "
                        "name."
                    )
                producers[channel], first[channel] = g, label
    return producers


def _is_external(channel: str | None, g: int, segment: _Segment, label: str, producers: dict[str, int]) -> bool:
    """Whether an extra input of segment g comes from outside. If not, the segment's pipeline routes the channel."""
    if channel is None:
        return True
    if channel not in producers:
        raise ValueError(
            f"Channel '{channel}' has no producer; {label} reads it.{_C.did_you_mean(channel, list(producers))} "
            f"Produced: {', '.join(producers) or 'none'}. Set one with set_extra_output_channel."
        )
    if producers[channel] == g and segment.reason is None:
        return False
    if producers[channel] >= g:
        raise ValueError(f"Channel '{channel}' has no earlier producer; {label} reads it. Put the producer first.")
    return True


def _connect_channels(segments: list[_Segment]) -> list[_Segment]:
    """Turns channels between segments into extra inputs and outputs; channels inside a segment stay in its pipeline."""
    producers = _producers(segments)
    read_by = [
        (channel, g) for g, segment in enumerate(segments) for _, (inputs, _) in segment.stages for channel in inputs
    ]
    crossing = {channel for channel, g in read_by if channel is not None and producers.get(channel, g) != g}
    for g, segment in enumerate(segments):
        first = segment.modules[0]
        if isinstance(first, Sequential):
            segment.sources = [None] * first.num_extra_inputs
            segment.targets = [(None, True)] * first.num_extra_outputs
        alone = segment.reason is not None  # a separately called module returns all its extra outputs
        stages = []
        for (op, (inputs, outputs)), label in zip(segment.stages, segment.labels, strict=True):
            external = [_is_external(channel, g, segment, label, producers) for channel in inputs]
            segment.sources += [channel for channel, is_external in zip(inputs, external, strict=True) if is_external]
            segment.targets += [out for out in outputs if alone or out[1] or out[0] in crossing]
            bound = [None if is_external else channel for channel, is_external in zip(inputs, external, strict=True)]
            named = [(channel, to_caller or channel in crossing) for channel, to_caller in outputs]
            stages.append((op, (bound, named)))
        segment.stages = stages
    return segments


def run_segments(
    segments: list[_Segment],
    x: torch.Tensor,
    extras: list[torch.Tensor],
    keywords: dict[int, dict[str, Any]],
    before: Callable[[_Segment, torch.Tensor, list[torch.Tensor]], None] | None = None,
) -> Output:
    """Calls the segments in order. `before`, if given, is called with each segment and its inputs."""
    channels: dict[str, torch.Tensor] = {}
    returned: list[torch.Tensor] = []
    extras.reverse()
    for segment in segments:
        inputs = [extras.pop() if source is None else channels[source] for source in segment.sources]
        if before is not None:
            before(segment, x, inputs)
        if segment.runner is not None:
            operations = (m for m in segment.modules if isinstance(m, FusibleOperation))
            kwargs = [keywords.get(id(m), {}) if i == 0 else {} for m in operations for i in range(len(m._stages()))]
            stages = [op for op, _ in segment.stages]
            result: Any = segment.runner.call_with(check_keywords(stages, kwargs), x, *inputs)
        else:
            result = segment.modules[0](x, *inputs, **keywords.get(id(segment.modules[0]), {}))
        if not segment.targets:
            x = result
            continue
        x, *outputs = result
        for (channel, to_caller), tensor in zip(segment.targets, outputs, strict=True):
            if to_caller:
                returned.append(tensor)
            if channel is not None:
                channels[channel] = tensor
    return (x, *returned) if returned else x
