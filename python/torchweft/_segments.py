"""Segments: the pipelines of a module, and the modules that are called between them.

A module builds its segments once and again after it changed. Eager calls and `_dispatcher` use the same segments.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from . import _C, _dispatcher, _log
from ._arguments import reject_unknown
from ._process_groups import is_dtensor

if TYPE_CHECKING:
    from ._dispatcher import Output
    from ._explain import Explanation
    from ._operation import BasicOperation, FusibleOperation

_MATERIALIZE_LOCK = Lock()  # threads that call a new module at the same time initialize it once


class Stage(NamedTuple):
    """An operation with its channels."""

    op: BasicOperation
    inputs: list[str | None]  # channel of each extra input; None: the caller passes it
    outputs: list[tuple[str | None, bool]]  # channel and output_to_caller of each extra output
    label: str  # names it in errors, e.g. "Sequential[2] Linear"

    def described(self) -> _C.Stage:
        return self.op._description(), self.inputs, self.outputs, self.label


class Entry(NamedTuple):
    """A module to run: why it is called separately (None: it is fused), its operations, and if it is a nested
    Sequential, the number of its extra inputs and outputs."""

    module: torch.nn.Module
    reason: str | None
    stages: list[Stage]
    num_extras: tuple[int, int] = (0, 0)

    def signature(self) -> Any:
        # A program keeps its modules and operations alive, so comparing ids is safe.
        stages = [(id(stage.op), stage.described()) for stage in self.stages]
        return id(self.module), self.reason, self.num_extras, stages


@dataclass
class Segment:
    """A pipeline (`runner`) or one separately called module, with the routing of its extra tensors."""

    modules: list[torch.nn.Module]
    stages: list[Stage]
    reason: str | None
    sources: list[str | None]  # as Stage.inputs, for the tensors that the segment takes
    targets: list[tuple[str | None, bool]]  # as Stage.outputs, for the tensors that it returns
    runner: _C.Runner | None = None

    def takers(self) -> list[str]:
        """Returns what takes each extra input that the caller passes."""
        labels = [stage.label for stage in self.stages for channel in stage.inputs if channel is None]
        labels = labels or [type(self.modules[0]).__name__] * len(self.sources)
        return [label for label, source in zip(labels, self.sources, strict=True) if source is None]

    def as_constants(self, paths: dict[int, str]) -> _dispatcher.TracedSegment:
        connections = tuple(self.sources), tuple(self.targets)
        if self.runner is None:
            return _dispatcher.TracedSegment(None, ((paths[id(self.modules[0])], ""),), (), (), *connections)
        slots = tuple((paths[id(module)], name) for module, name in self.runner.parameter_slots)
        accumulates = tuple(_C.accumulates_into_main_grad(self.runner.text))
        modes = tuple(paths[id(op)] for op in self.runner.modes)
        return _dispatcher.TracedSegment(self.runner.text, slots, accumulates, modes, *connections)


@dataclass
class Program:
    """The segments of a module, with what they were built from."""

    signature: Any
    segments: list[Segment]
    single: _C.Runner | None  # runs the whole call
    materialized: bool = False


def _patching(register: Callable[..., Any]) -> Any:
    """A method of torch.nn.Module that registers hooks, which also makes a PipelineModule one of a kind."""

    @functools.wraps(register)
    def register_and_mark(self: PipelineModule, *args: Any, **kwargs: Any) -> Any:
        handle = register(self, *args, **kwargs)
        self._update_patch_id()
        remove, module = handle.remove, weakref.ref(self)

        def remove_and_mark() -> None:
            remove()
            if (owner := module()) is not None:
                owner._update_patch_id()

        handle.remove = remove_and_mark
        return handle

    return register_and_mark


class PipelineModule(torch.nn.Module):
    """A module that runs as segments. Subclasses define `_entries` and `_single_runner_checks`."""

    # Not 0: it has hooks or an own forward. The compiler, which does not guard on these, guards on the id, so that a
    # program of other modules of the class is not used for this one.
    _patch_id = 0
    register_forward_hook = _patching(torch.nn.Module.register_forward_hook)
    register_forward_pre_hook = _patching(torch.nn.Module.register_forward_pre_hook)
    register_backward_hook = _patching(torch.nn.Module.register_backward_hook)
    register_full_backward_hook = _patching(torch.nn.Module.register_full_backward_hook)
    register_full_backward_pre_hook = _patching(torch.nn.Module.register_full_backward_pre_hook)

    _runner: _C.Runner | None = None  # `Program.single`, once Parameters on the meta device have been allocated
    _program: Program | None = None
    _not_copied = frozenset({"_runner", "_program"})  # attributes that a copy makes for itself

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("forward", "_compiled_call_impl"):
            self._update_patch_id()

    def _update_patch_id(self) -> None:
        hooks = self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks
        patched = any(hooks) or "forward" in self.__dict__ or "_compiled_call_impl" in self.__dict__
        self._patch_id = secrets.randbits(62) if patched else 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _dispatcher.discard_handles(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._not_copied}

    def _materialize(self, device: torch.device) -> None:
        """Allocates and initializes on ``device`` the Parameters that are still on the meta device."""

    def _entries(self) -> list[Entry]:
        """Returns the modules to run, in order."""
        raise NotImplementedError

    def _single_runner_checks(self, segments: list[Segment]) -> dict[str, Any] | None:
        """Returns None if one runner cannot run the whole call, else what that runner must check: arguments of
        `_build_runner`."""
        raise NotImplementedError

    def _current_program(self) -> Program:
        """Returns the program; rebuilds it if modules, hooks, fields or channels have changed."""
        version = _C.modules_version()  # read first: changes made meanwhile by other threads count at the next call
        entries = self._entries()
        _reject_sharded_gates(stage.op for entry in entries for stage in entry.stages)
        # With its id, because a replica of a module has the attributes of its original.
        signature = [id(self), *(entry.signature() for entry in entries)]
        program = self._program
        if program is not None and program.signature == signature:
            if program.single is not None:
                program.single.revalidate(version)
            return program
        segments = _connect_channels(_partition(entries))
        _log.log_segments(self, segments)
        checks = self._single_runner_checks(segments)
        for segment in segments:
            if segment.reason is None:
                segment.runner = _build_runner(self, segment.stages, version, **(checks or {}))
        program = Program(signature, segments, None if checks is None else segments[0].runner)
        object.__setattr__(self, "_runner", None)
        object.__setattr__(self, "_program", program)
        return program

    def _materialized_segments(self, input: torch.Tensor) -> list[Segment]:
        """Returns the segments, after the Parameters on the meta device have been allocated on the input's device."""
        program = self._current_program()
        if not program.materialized and isinstance(input, torch.Tensor) and input.device.type != "meta":
            materialize(self, input)
            program.materialized = True
        if program.materialized and self._runner is not program.single:
            object.__setattr__(self, "_runner", program.single)
        return program.segments

    def _run_unsegmented(self, input: torch.Tensor, extra_inputs: tuple[torch.Tensor, ...]) -> Output | None:
        """Runs the call through the dispatcher or with a single runner. Returns None if neither applies: the caller
        then calls the segments in order."""
        if torch.compiler.is_compiling() and _dispatcher.applies(self, input):
            return _dispatcher.run(self, input, extra_inputs)
        if (runner := self._runner) is not None:
            output: Output = runner(self, input, *extra_inputs)
            if output is not NotImplemented:
                return output
        return _dispatcher.run(self, input, extra_inputs) if _dispatcher.applies(self, input) else None

    def _check_inputs(self, segments: list[Segment], input: Any, extra_inputs: Sequence[Any]) -> None:
        """Raises for the output of an operation with extra outputs, and for another number of extra inputs."""
        name = type(self).__name__
        if isinstance(input, tuple):
            raise TypeError(
                f"{name}: the input must be a torch.Tensor, got a tuple of {len(input)}. Operations with extra outputs "
                "return one. Put them and their readers into one torchweft.Sequential, not torch.nn.Sequential: it "
                "passes extra tensors on."
            )
        expected = _dispatcher.num_caller_inputs(segments)
        if len(extra_inputs) == expected:
            return
        takers = [taker for segment in segments for taker in segment.takers()]
        stages = [stage for segment in segments for stage in segment.stages]
        cures = ["Pass extra inputs after the input, in this order."] if expected else []
        channels = [channel for stage in stages for channel in stage.op._bindings()[0] if channel is not None]
        if len(extra_inputs) < expected and channels and len(stages) == 1:
            cures.append(
                f"Channel {channels[0]!r} connects operations of one torchweft.Sequential, not of torch.nn.Sequential: "
                "put both into it."
            )
        masked = [stage.label for stage in stages if hasattr(stage.op, "attn_mask_type")]
        if len(extra_inputs) > expected and masked:
            cures.append(
                f"{masked[0]} takes no mask: set attn_mask_type or window_size, and for sequences of different lengths "
                "qkv_format='thd'."
            )
        raise ValueError(
            f"{name}: expected {expected} extra input{'' if expected == 1 else 's'}"
            f"{' (' + ', '.join(takers) + ')' if takers else ''}, got {len(extra_inputs)}. "
            + (" ".join(cures) or "Call it with the input only.")
        )

    @_dispatcher.evaluated_when_traced
    def _traced_segments(self, state: object = None) -> tuple[_dispatcher.TracedSegment, ...]:
        """Returns its segments for `_dispatcher.run`, as constants. They depend on `state`."""
        paths = {id(module): path for path, module in self.named_modules()}
        return tuple(segment.as_constants(paths) for segment in self._current_program().segments)

    @_dispatcher.evaluated_when_traced
    def _give_handles(self, state: object) -> bool:
        """Gives Parameters that are accumulated into main_grad their handles. Returns False if the gradient of
        something else is accumulated."""
        runners = [segment.runner for segment in self._current_program().segments if segment.runner is not None]
        for runner in runners:
            accumulates = _C.accumulates_into_main_grad(runner.text)
            for owner, name in itertools.compress(runner.parameter_slots, accumulates):
                param = getattr(owner, name)
                if not isinstance(param, torch.nn.Parameter) or not param.is_leaf or is_dtensor(param):
                    return False
                _dispatcher.give_handle(param)
        return True

    def explain(self, *inputs: torch.Tensor) -> Explanation:
        """Explains the plan of a call with these inputs; see :func:`torchweft.explain`."""
        from ._explain import explain

        return explain(self, *inputs)


def materialize(module: torch.nn.Module, input: torch.Tensor) -> None:
    """Allocates the meta-device Parameters of weft operations in `module` on the input's device."""
    if isinstance(input, torch.Tensor) and input.device.type != "meta":
        with _MATERIALIZE_LOCK:
            for child in module.modules():
                if isinstance(child, PipelineModule):
                    child._materialize(input.device)


def _reject_sharded_gates(operations: Iterable[BasicOperation]) -> None:
    """Raises if a GLU follows a linear whose weight is a DTensor over its output features: the first ranks would hold
    all gates, the last ones all values."""
    sharded = False
    for op in operations:
        if not getattr(op, "_native", False):
            continue
        weights = [module._parameters.get(name) for module, name in op._parameter_slots() if name == "weight"]
        fields = op._description().fields()
        if weights:
            sharded = is_dtensor(weights[0]) and fields.get("tensor_parallel_mode") == "column"
        if sharded and type(op).__name__.endswith("GLU") and not fields.get("glu_interleave_size"):
            raise NotImplementedError(
                f"{type(op).__name__}: the weight of the linear before it is a DTensor over its output features, which "
                "are two stacked tensors. Interleave them: torchweft.interleave_glu(weight, n), glu_interleave_size=n."
            )


def _partition(entries: list[Entry]) -> list[Segment]:
    """Groups consecutive fusible operations into segments; every other module is a segment by itself."""
    segments: list[Segment] = []
    for module, reason, stages, (num_inputs, num_outputs) in entries:
        if reason is None and segments and segments[-1].reason is None:
            segments[-1].modules.append(module)
            segments[-1].stages.extend(stages)
        else:
            segments.append(Segment([module], list(stages), reason, [None] * num_inputs, [(None, True)] * num_outputs))
    return segments


def _connect_channels(segments: list[Segment]) -> list[Segment]:
    """Turns channels between segments into extra inputs and outputs; channels inside a segment stay in its pipeline."""
    stages = [(g, stage) for g, segment in enumerate(segments) for stage in segment.stages]
    _C.check_channels([stage.described() for _, stage in stages])
    producer = {channel: g for g, stage in stages for channel, _ in stage.outputs if channel is not None}
    crossing = {channel for g, stage in stages for channel in stage.inputs if channel and producer[channel] != g}
    for g, segment in enumerate(segments):
        # Called alone, an operation ignores its channels.
        alone = segment.reason is not None and len(segment.stages) == 1
        for i, stage in enumerate(segment.stages):
            inner = [channel if channel and producer[channel] == g else None for channel in stage.inputs]
            segment.sources += [channel for channel, same in zip(stage.inputs, inner, strict=True) if same is None]
            segment.targets += [out for out in stage.outputs if alone or out[1] or out[0] in crossing]
            outputs = [(channel, to_caller or channel in crossing) for channel, to_caller in stage.outputs]
            segment.stages[i] = stage._replace(inputs=inner, outputs=outputs)
    return segments


def _build_runner(
    owner: torch.nn.Module,
    stages: Sequence[Stage],
    version: int,
    bypassed: Iterable[torch.nn.Module] = (),
    children: Iterable[torch.nn.Module] | None = None,
) -> _C.Runner:
    """Builds the C++ runner of a pipeline.

    Args:
        owner: the module that calls the runner.
        stages: the operations with their channels.
        version: `_C.modules_version()` before the modules were read.
        bypassed: modules whose ``__call__`` the runner replaces.
        children: the children that `owner` must still have for the runner to be valid; None: not checked.
    """
    return _C.Runner(
        stages=[stage.described() for stage in stages],
        owner=owner,
        ops=[stage.op for stage in stages],
        params=[slot for stage in stages for slot in stage.op._parameter_slots()],
        modules_version=version,
        bypassed=list(bypassed),
        expected=None if children is None else list(children),
    )


def call_segment(
    keywords: dict[int, dict[str, Any]], segment: Segment, x: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> Any:
    """Calls one segment. `keywords` has the keyword arguments of a module, by its id."""
    if segment.runner is None:
        return segment.modules[0](x, *inputs, **keywords.get(id(segment.modules[0]), {}))
    modules = cast("list[FusibleOperation]", segment.modules)
    kwargs = [keywords.get(id(m), {}) if i == 0 else {} for m in modules for i in range(len(m._stages()))]
    for stage, given in zip(segment.stages, kwargs, strict=True):
        if not given:
            continue
        native = getattr(stage.op, "_native", False)
        allowed = ["output", "grad_input"] if native and stage.op._description().takes_buffers else []
        for name in given if native else ():
            if name not in allowed:
                reject_unknown(f"{type(stage.op).__name__}.forward()", name, allowed)
    return segment.runner.call_with(kwargs, x, *inputs)
