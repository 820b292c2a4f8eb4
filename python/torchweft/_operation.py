"""Base classes of operations: torch.nn.Modules that can be part of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from . import _C
from ._segments import Entry, PipelineModule, Segment, Stage, call_segment
from ._state_keys import StateKeys

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._dispatcher import Output

    Bindings = tuple[list[str | None], list[tuple[str | None, bool]]]  # of extra inputs, of extra outputs
    Gradients = Iterable[torch.Tensor | None]
    Contexts = list["OperationContext"]
    Extras = list[tuple[torch.Tensor | None, ...]]  # extra tensors of each operation


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
        # What the gradients must have; None and empty where forward did not run in Python with this context.
        self._input_shape: torch.Size | None = None
        self._extra_input_shapes: list[torch.Size | None] = []

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Saves tensors for backward, where they are ``saved_tensors``. A second call replaces them."""
        self.to_save = tensors

    def _take_saved(self) -> tuple[torch.Tensor | None, ...]:
        taken, self.to_save = tuple(self.to_save), ()
        return taken


class FusibleOperation(PipelineModule, StateKeys):
    """Base class of everything a pipeline can contain: basic operations, and operations that consist of several.

    Calling one outside a :class:`Sequential` runs it as its own pipeline, which is kept between calls.
    """

    _description_text = ""  # fields and channels; the compiler guards on it
    is_fused_op = False
    _is_component = False  # a component of Linear, which reads Linear's Parameters
    _not_copied = PipelineModule._not_copied | {"_custom", "_components", "_wgrad_hooks"}

    def __setattr__(self, name: str, value: Any) -> None:
        # Parameters are read in each call, so replacing one (as FSDP does) does not invalidate runners.
        replaces_parameter = value is not None and self.__dict__.get("_parameters", {}).get(name) is not None
        super().__setattr__(name, value)
        if not replaces_parameter:
            _C.invalidate_runners()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _C.invalidate_runners()

    def _update_description(self) -> None:
        """Called after fields or channels have changed."""
        channels = self.__dict__.get("_input_channels", {}), self.__dict__.get("_output_channels", {})
        self._description_text = f"{self._fields_text()} {channels}"  # __setattr__ also invalidates all runners

    def _fields_text(self) -> str:
        return ""

    def _stages(self) -> list[BasicOperation]:
        """Returns the basic operations that it consists of, in order."""
        raise NotImplementedError(
            f"{type(self).__name__} does not implement _stages(). Subclass BasicOperation or FusedOperation."
        )

    def _entries(self) -> list[Entry]:
        operations, label = self._stages(), type(self).__name__
        if len(operations) != 1:
            return [Entry(self, None, [Stage(op, *op._bindings(), label) for op in operations])]
        # A single operation ignores its channels: all its extra tensors are arguments and results of the call.
        (op,) = operations
        bindings: Bindings = [None] * op.num_extra_inputs, [(None, True)] * op.num_extra_outputs
        return [Entry(self, None, [Stage(op, *bindings, label)])]

    def _single_runner_checks(self, segments: list[Segment]) -> dict[str, Any]:
        return {}

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Output:
        """Runs the operation.

        Args:
            input: the main input.
            *extra_inputs: extra inputs, in the order of the basic operations.
            **kwargs: keyword arguments for the first basic operation.

        Returns:
            The output, or a tuple of the output and the extra outputs.
        """
        if not kwargs and (output := self._run_unsegmented(input, extra_inputs)) is not None:
            return output
        (segment,) = segments = self._materialized_segments(input)
        self._check_inputs(segments, input, extra_inputs)
        result: Output = call_segment({id(self): kwargs}, segment, input, extra_inputs)
        return result


class BasicOperation(FusibleOperation):
    """The smallest unit of a pipeline. Subclass it to write an operation in Python.

    An operation without extra tensors implements :meth:`op_forward` and :meth:`op_backward`. An operation with extra
    tensors sets ``num_extra_inputs`` and ``num_extra_outputs`` and implements :meth:`fuser_forward` and
    :meth:`fuser_backward`.

    Example::

        >>> class Square(torchweft.ops.BasicOperation):
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
        self._update_description()

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

    Functions passed to :func:`torchweft.fusion.register_forward_fusion` and its siblings return instances. A subclass
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


# ---- calls from C++ --------------------------------------------------------------------------------------------------


def _run_forward(
    op: BasicOperation | FusedOperation, ctxs: Contexts, input_: torch.Tensor, extra_inputs: Extras, keywords: Any
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    ctxs[0]._input_shape = input_.shape
    for ctx, extras in zip(ctxs, extra_inputs, strict=True):
        ctx._extra_input_shapes = [None if t is None else t.shape for t in extras]
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

    grads_of_extras = fill_missing("extra input", grad_extra_inputs, extra_counts)
    _check_gradient(op, "the input", grad_input, ctxs[0]._input_shape)
    for ctx, row in zip(ctxs, grads_of_extras, strict=True):
        for i, (grad, shape) in enumerate(zip(row, ctx._extra_input_shapes, strict=False)):
            _check_gradient(op, f"extra input {i}", grad, shape)
    return grad_input, fill_missing("parameter", grad_params, param_counts), grads_of_extras


def _check_gradient(op: torch.nn.Module, what: str, grad: Any, shape: torch.Size | None) -> None:
    """The operations before this one read as much of a gradient as their output has."""
    if shape is not None and isinstance(grad, torch.Tensor) and grad.shape != shape:
        raise RuntimeError(
            f"{type(op).__name__}: backward returned a gradient of shape {list(grad.shape)} for {what}, expected "
            f"{list(shape)}, the shape of {what}."
        )


_C.set_bridge(OperationContext, _run_forward, _run_backward)
