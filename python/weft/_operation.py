"""Base classes of operations: torch.nn.Modules that can be part of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import torch

from . import _C, _dispatcher
from ._arguments import reject_unknown
from ._state_keys import StateKeys

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._dispatcher import Output, TracedSegment
    from ._explain import Explanation

    Bindings = tuple[list[str | None], list[tuple[str | None, bool]]]  # of extra inputs, of extra outputs
    Stage = tuple["BasicOperation", Bindings]
    Gradients = Iterable[torch.Tensor | None]
    Contexts = list["OperationContext"]
    Extras = list[tuple[torch.Tensor | None, ...]]  # extra tensors of each operation

_MATERIALIZE_LOCK = Lock()  # threads that call a new module at the same time initialize it once
# Attributes that belong to the module's own pipeline; a copy builds its own.
_NOT_COPIED = {"_runner", "_built_signature", "_custom", "_components", "_module_id", "_wgrad_hooks"}


class OperationContext:
    """State that the forward of one operation passes to its backward, like ``ctx`` of torch.autograd.Function.

    Save tensors with :meth:`save_for_backward` and read them in backward from ``saved_tensors``. Other values may be
    set as attributes.

    Args:
        requires_grad: whether backward of this operation will run.
        training: whether the operation is in training mode.
    """

    def __init__(self, requires_grad: bool, training: bool = True) -> None:
        self.requires_grad = requires_grad
        self.training = training
        self.to_save: tuple[torch.Tensor | None, ...] = ()
        self.saved_tensors: tuple[torch.Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Saves tensors for backward, where they are ``saved_tensors``. A second call replaces them."""
        self.to_save = tensors

    def _take_saved(self) -> tuple[torch.Tensor | None, ...]:
        taken, self.to_save = tuple(self.to_save), ()
        return taken


class FusibleOperation(StateKeys):
    """Base class of everything a pipeline can contain: basic operations, and operations that consist of several.

    Calling one outside a :class:`Sequential` runs it as its own pipeline, which is kept between calls.
    """

    _runner: _C.Runner | None = None
    _module_id: int
    _description_version = 0  # counts changes of fields and channels; compiled code depends on it
    is_fused_op = False

    def __init__(self) -> None:
        super().__init__()
        _dispatcher.register_module(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _dispatcher.register_module(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # Parameters are read in each call, so replacing one (as FSDP does) does not invalidate runners.
        replaces_parameter = value is not None and self.__dict__.get("_parameters", {}).get(name) is not None
        super().__setattr__(name, value)
        if not replaces_parameter:
            _C.invalidate_runners()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _C.invalidate_runners()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}

    def _materialize(self, device: torch.device) -> None:
        """Allocates and initializes on ``device`` the Parameters that are still on the meta device."""

    def _stages(self) -> list[BasicOperation]:
        """Returns the basic operations that it consists of, in order."""
        raise NotImplementedError(
            f"{type(self).__name__} does not implement _stages(). Subclass BasicOperation or FusedOperation."
        )

    def _bound_stages(self) -> list[Stage]:
        """Returns its basic operations with their channels. A single operation ignores its channels: all its extra
        tensors are arguments and results of the call."""
        stages = self._stages()
        if len(stages) == 1:
            return [(stages[0], caller_bindings(stages[0]))]
        return [(op, op._bindings()) for op in stages]

    def _signature(self) -> Any:
        """What its pipeline is built from; compared after an attribute changed."""
        return [(op._description(), bindings) for op, bindings in self._bound_stages()]

    def _current_runner(self, input: torch.Tensor) -> _C.Runner:
        runner: _C.Runner | None = self.__dict__.get("_runner")
        version = _C.modules_version()  # read first: changes made meanwhile by other threads count at the next call
        signature = self._signature()
        if runner is not None and runner.belongs_to(self) and self.__dict__.get("_built_signature") == signature:
            runner.revalidate(version)
            return runner
        if isinstance(input, torch.Tensor):
            materialize(self, input)
        runner = build_runner(self, self._bound_stages(), version)
        object.__setattr__(self, "_runner", runner)
        object.__setattr__(self, "_built_signature", signature)
        return runner

    def _traced_segments(self) -> tuple[TracedSegment, ...]:
        """Returns its segments for `_dispatcher.run`, as constants."""
        runner = build_runner(self, self._bound_stages(), _C.modules_version())
        return (traced_segment(self, self._bound_stages(), runner.text),)

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Output:
        """Runs the operation.

        Args:
            input: the main input.
            *extra_inputs: extra inputs, in the order of the basic operations.
            **kwargs: keyword arguments for the first basic operation.

        Returns:
            The output, or a tuple of the output and the extra outputs.
        """
        if torch.compiler.is_compiling() and not kwargs and _dispatcher.applies(self, input):
            return _dispatcher.run(self, input, extra_inputs)
        runner = self._runner
        if runner is not None and not kwargs:
            output: Output = runner(self, input, *extra_inputs)
            if output is not NotImplemented:
                return output
        if not kwargs and _dispatcher.applies(self, input):
            return _dispatcher.run(self, input, extra_inputs)
        runner = self._current_runner(input)
        keywords = check_keywords(self._stages(), [kwargs] + [{}] * (len(self._stages()) - 1))
        return runner.call_with(keywords, input, *extra_inputs)

    def explain(self, *inputs: torch.Tensor) -> Explanation:
        """Explains the plan of a call with these inputs; see :func:`weft.explain`."""
        from ._explain import explain

        return explain(self, *inputs)


class BasicOperation(FusibleOperation):
    """The smallest unit of a pipeline. Subclass it to write an operation in Python.

    An operation without extra tensors implements :meth:`op_forward` and :meth:`op_backward`. An operation with extra
    tensors sets ``num_extra_inputs`` and ``num_extra_outputs`` and implements :meth:`fuser_forward` and
    :meth:`fuser_backward`.

    Example::

        >>> class Square(weft.ops.BasicOperation):
        ...     def op_forward(self, ctx, input_, **unused):
        ...         ctx.save_for_backward(input_)
        ...         return input_.square()
        ...
        ...     def op_backward(self, ctx, grad_output):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * x * grad_output, ()
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    _written_in_python = True

    def _stages(self) -> list[BasicOperation]:
        return [self]

    def _te_op_prefixes(self) -> list[str]:
        return [""]

    # ---- channels -------------------------------------------------------------------------------------------------

    def set_extra_input_channel(self, index: int, channel: str | None) -> Self:
        """Connects an extra input to a channel of the pipeline.

        Args:
            index: index of the extra input.
            channel: name of the channel, or None to take the extra input from the caller again.

        Returns:
            This operation.
        """
        self._check_channel(index, self.num_extra_inputs, "input", channel)
        self._edit_channels("_input_channels", index, channel)
        return self

    def set_extra_output_channel(self, index: int, channel: str | None, *, output_to_caller: bool = True) -> Self:
        """Sends an extra output to a channel of the pipeline.

        Args:
            index: index of the extra output.
            channel: name of the channel, or None to disconnect it.
            output_to_caller: if False, the extra output is not returned to the caller.

        Returns:
            This operation.

        Example::

            >>> fork = ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False)
            >>> join = ops.AddExtraInput().set_extra_input_channel(0, "residual")
        """
        self._check_channel(index, self.num_extra_outputs, "output", channel)
        if not isinstance(output_to_caller, bool):
            raise TypeError(
                f"{type(self).__name__}: output_to_caller must be a bool, got {type(output_to_caller).__name__}."
            )
        self._edit_channels("_output_channels", index, None if channel is None else (channel, output_to_caller))
        return self

    def _check_channel(self, index: int, count: int, kind: str, channel: str | None) -> None:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(
                f"{type(self).__name__}: index of the extra {kind} is {index!r}, expected an int. "
                f'The index comes first: set_extra_{kind}_channel(0, "name").'
            )
        if not 0 <= index < count:
            raise IndexError(
                f"{type(self).__name__}: extra {kind} {index} is out of range, expected an index below {count}."
            )
        if channel is not None and (not isinstance(channel, str) or not channel):
            raise ValueError(f"{type(self).__name__}: channel is {channel!r}, expected a non-empty string or None.")

    def _edit_channels(self, table: str, index: int, binding: Any) -> None:
        bindings = dict(self.__dict__.get(table, {}))
        bindings[index] = binding
        setattr(self, table, bindings)
        self._description_version += 1

    def _bindings(self) -> Bindings:
        """Returns (channel of each extra input, (channel, output_to_caller) of each extra output)."""
        inputs, outputs = self.__dict__.get("_input_channels", {}), self.__dict__.get("_output_channels", {})
        return (
            [inputs.get(i) for i in range(self.num_extra_inputs)],
            [outputs.get(i) or (None, True) for i in range(self.num_extra_outputs)],
        )

    # ---- description for the pipeline -----------------------------------------------------------------------------

    def _description(self) -> _C.Op:
        names = [name for name, _ in self.named_parameters()]
        cached = self.__dict__.get("_custom")
        if cached is None or cached[0] != names:
            op = _C.make_custom_op(self, names, self.num_extra_inputs, self.num_extra_outputs)
            cached = (names, op)
            object.__setattr__(self, "_custom", cached)
        return cached[1]

    def _parameter_slots(self) -> list[tuple[torch.nn.Module, str]]:
        slots = []
        for name, _ in self.named_parameters():
            path, _, leaf = name.rpartition(".")
            slots.append((self.get_submodule(path), leaf))
        return slots

    # ---- forward and backward of operations written in Python -----------------------------------------------------

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **unused: Any) -> torch.Tensor:
        """Computes the output. Override it in an operation without extra tensors.

        Args:
            ctx: saves tensors and values for :meth:`op_backward`.
            input_: the input.
            **unused: ``prev_op_grad_output_quantizer`` and ``next_op_input_quantizer``, both None, and the keyword
                arguments of the call.

        Returns:
            The output.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not implement op_forward. Define op_forward(self, ctx, input_, **unused)."
        )

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, Gradients]:
        """Computes the gradients. Override it in an operation without extra tensors.

        Args:
            ctx: the context that :meth:`op_forward` filled.
            grad_output: gradient of the output.

        Returns:
            A tuple (gradient of the input, gradients of the Parameters in the order of ``named_parameters``).
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not implement op_backward. Define op_backward(self, ctx, grad_output)."
        )

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor | None, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        """Computes the output and the extra outputs. Override it in an operation with extra tensors.

        Args:
            basic_op_ctxs: a list with the context of this operation.
            input_: the input.
            basic_op_extra_inputs: a list with the tuple of extra inputs.
            prev_op_grad_output_quantizer: None.
            next_op_input_quantizer: None.
            basic_op_kwargs: a list with the keyword arguments of the call.

        Returns:
            A tuple (output, list with the extra outputs).
        """
        self._needs_no_extra_tensors("fuser_forward")
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Gradients], Iterable[Gradients]]:
        """Computes the gradients. Override it in an operation with extra tensors.

        Args:
            basic_op_ctxs: a list with the context of this operation.
            grad_output: gradient of the output.
            basic_op_grad_extra_outputs: a list with the gradients of the extra outputs.

        Returns:
            A tuple (gradient of the input, list with the gradients of the Parameters, list with the gradients of the
            extra inputs).
        """
        self._needs_no_extra_tensors("fuser_backward")
        grad_input, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [grad_params], [()]

    def _needs_no_extra_tensors(self, method: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise RuntimeError(
                f"{type(self).__name__} has {self.num_extra_inputs} extra inputs and {self.num_extra_outputs} extra "
                f"outputs, so it must implement {method}."
            )


class FusedOperation(FusibleOperation):
    """Replaces consecutive basic operations in a plan. Subclass it to write a fused operation in Python.

    Functions passed to :func:`weft.fusion.register_forward_fusion` and its siblings return instances. A subclass
    implements :meth:`fuser_forward`, :meth:`fuser_backward` or both, depending on how it is registered; their lists
    have one entry per basic operation.

    Args:
        basic_ops: the operations it replaces, in order.
    """

    is_fused_op = True

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        if not basic_ops:
            raise ValueError(f"{type(self).__name__}: basic_ops is empty, expected at least one basic operation.")
        self.basic_ops = torch.nn.ModuleList(basic_ops)

    def _stages(self) -> list[BasicOperation]:
        return cast("list[BasicOperation]", list(self.basic_ops))

    def fuser_forward(self, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, **kwargs: Any) -> Any:
        """Computes the forward of all basic operations; see :meth:`BasicOperation.fuser_forward`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement fuser_forward.")

    def fuser_backward(self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **kwargs: Any) -> Any:
        """Computes the backward of all basic operations; see :meth:`BasicOperation.fuser_backward`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement fuser_backward.")


# ---- building and calling pipelines -------------------------------------------------------------------------------


def caller_bindings(op: BasicOperation) -> Bindings:
    """Returns the bindings of an operation whose extra tensors all come from and go to the caller."""
    return [None] * op.num_extra_inputs, [(None, True)] * op.num_extra_outputs


def build_runner(
    owner: torch.nn.Module,
    stages: Sequence[Stage],
    version: int,
    bypassed: Iterable[torch.nn.Module] = (),
    children: Iterable[torch.nn.Module] | None = None,
    labels: Sequence[str] | None = None,
) -> _C.Runner:
    """Builds the C++ runner of a pipeline.

    Args:
        owner: the module that calls the runner.
        stages: the operations with their channel bindings.
        version: `_C.modules_version()` before the modules were read.
        bypassed: modules whose ``__call__`` the runner replaces.
        children: the children that `owner` must still have for the runner to be valid; None: not checked.
        labels: what errors call each operation; None: the class of `owner`.
    """
    labels = labels or [type(owner).__name__] * len(stages)
    return _C.Runner(
        stages=[
            (op._description(), list(inputs), list(outputs), label)
            for (op, (inputs, outputs)), label in zip(stages, labels, strict=True)
        ],
        owner=owner,
        ops=[op for op, _ in stages],
        params=[slot for op, _ in stages for slot in op._parameter_slots()],
        modules_version=version,
        bypassed=list(bypassed),
        expected=None if children is None else list(children),
    )


def traced_segment(root: torch.nn.Module, stages: Sequence[Stage], text: str) -> TracedSegment:
    """Returns one pipeline for `_dispatcher.run`: its text, the paths below `root` of its parameters and of the
    operations that depend on training mode, and one entry per extra tensor that it takes and returns."""
    paths = {id(module): path for path, module in root.named_modules()}
    slots = tuple((paths[id(module)], name) for op, _ in stages for module, name in op._parameter_slots())
    modes = tuple(paths[id(op)] for op, _ in stages if op._description().depends_on_training)
    sources = tuple(None for _, (inputs, _) in stages for channel in inputs if channel is None)
    targets = tuple((None, True) for _, (_, outputs) in stages for _, to_caller in outputs if to_caller)
    return text, slots, modes, sources, targets


def check_keywords(stages: Sequence[BasicOperation], keywords: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises TypeError for a keyword argument that a native operation does not take; returns `keywords`."""
    for op, kwargs in zip(stages, keywords, strict=True):
        native = getattr(op, "_native", False)
        allowed = ("output", "grad_input") if native and op._description().takes_buffers else ()
        for name in kwargs if native else ():
            if name not in allowed:
                reject_unknown(f"{type(op).__name__}.forward()", name, list(allowed))
    return keywords


def materialize(module: torch.nn.Module, input: torch.Tensor) -> None:
    """Allocates the meta-device Parameters of weft operations in `module` on the input's device."""
    if input.device.type != "meta":
        with _MATERIALIZE_LOCK:
            for child in module.modules():
                if isinstance(child, FusibleOperation):
                    child._materialize(input.device)


def _run_forward(
    op: BasicOperation | FusedOperation, ctxs: Contexts, input_: torch.Tensor, extra_inputs: Extras, keywords: Any
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    output, extra_outputs = op.fuser_forward(
        ctxs,
        input_,
        basic_op_extra_inputs=extra_inputs,
        prev_op_grad_output_quantizer=None,
        next_op_input_quantizer=None,
        basic_op_kwargs=keywords,
    )
    basic_ops = op._stages()
    rows = [tuple(outputs or ()) for outputs in (extra_outputs or [()] * len(basic_ops))]
    if len(rows) != len(basic_ops):
        raise RuntimeError(
            f"{type(op).__name__}: fuser_forward returned extra outputs for {len(rows)} operations, expected "
            f"{len(basic_ops)}."
        )
    for basic_op, outputs in zip(basic_ops, rows, strict=True):
        if len(outputs) != basic_op.num_extra_outputs:
            raise RuntimeError(
                f"{type(op).__name__}: fuser_forward returned {len(outputs)} extra outputs for "
                f"{type(basic_op).__name__}, expected {basic_op.num_extra_outputs}."
            )
    return output, rows


def _run_backward(
    op: BasicOperation | FusedOperation,
    ctxs: Contexts,
    grad_output: torch.Tensor,
    grad_extra_outputs: Extras,
    param_counts: list[int],
    extra_counts: list[int],
) -> tuple[torch.Tensor | None, list[Gradients], list[Gradients]]:
    grad_input, grad_params, grad_extra_inputs = op.fuser_backward(
        ctxs, grad_output, basic_op_grad_extra_outputs=grad_extra_outputs
    )

    def fill_missing(kind: str, rows: Iterable[Gradients] | None, counts: list[int]) -> list[Gradients]:
        tuples = [tuple(row or ()) for row in (rows or [()] * len(counts))]
        for i, (row, count) in enumerate(zip(tuples, counts, strict=True)):
            if row and len(row) != count:
                raise RuntimeError(
                    f"{type(op).__name__}: fuser_backward returned {len(row)} {kind} gradients for operation {i}, "
                    f"expected {count}."
                )
        return [row or (None,) * count for row, count in zip(tuples, counts, strict=True)]

    return (
        grad_input,
        fill_missing("parameter", grad_params, param_counts),
        fill_missing("extra input", grad_extra_inputs, extra_counts),
    )


_C.set_bridge(OperationContext, _run_forward, _run_backward)
