"""Calls through torch's dispatcher, for torch.compile, torch.export, fake tensors and dispatch modes.

In eager mode a module calls its C++ runner directly. Under a compiler or a ``TorchDispatchMode`` (selective
checkpointing, FLOP counting, make_fx) the same pipeline is one call of ``weft::pipeline_forward``, which takes the
pipeline as text and can be traced, or of ``pipeline_forward_random`` or ``pipeline_forward_with_handles``, which a
compiler must not merge with an equal call. The gradient is ``weft::pipeline_backward`` or one of its variants.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.utils.flop_counter import register_flop_formula

from . import _C, _autocast
from ._process_groups import is_dtensor

if TYPE_CHECKING:
    from ._segments import PipelineModule, Segment

    AnySegment = TypeVar("AnySegment", "Segment", "TracedSegment")
    Tensors = list[torch.Tensor]
    Gradients = list[torch.Tensor | None]
    Output = torch.Tensor | tuple[torch.Tensor, ...]

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def evaluated_when_traced(function: AnyFunction) -> AnyFunction:
    """Makes the compiler call a function while it traces and take the result as a constant. Same as
    torch.compiler.assume_constant_result, without the slow import of the compiler."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class TracedSegment(NamedTuple):
    """A `_segments.Segment` as constants."""

    text: str | None  # None: a separately called module, whose path is slots[0][0]
    slots: tuple[tuple[str, str], ...]  # path of the module and name of each parameter
    accumulates: tuple[bool, ...]  # whether the gradient of each parameter is accumulated into main_grad
    modes: tuple[str, ...]  # paths of the operations that depend on training mode
    sources: tuple[str | None, ...]
    targets: tuple[tuple[str | None, bool], ...]


@evaluated_when_traced
def _joint_rules() -> str:
    """Returns the joint fusions of a program, fixed when it is traced: they determine what is saved."""
    return _C.enabled_joint_rules()


_call_numbers = itertools.count(1)


@evaluated_when_traced
def _call_number() -> int:
    """Returns a number that no other call has."""
    return next(_call_numbers)


def applies(module: PipelineModule, x: Any) -> bool:
    """Whether a call must go through the dispatcher.

    True when the call is compiled, x is a fake tensor or a dispatch mode is active. False if an operation in `module`
    is written in Python, reads the Parameters of a module above it, delays weight gradients, which the observer would
    not see, or accumulates the gradient of a weight that is not a Parameter."""
    observed = torch.compiler.is_compiling() or _C.dispatch_mode_active()
    if not observed and type(x).__name__ != "FakeTensor":
        return False
    differentiates = observed and torch.is_grad_enabled() and not torch.compiler.is_exporting()
    for child in module.modules():
        if getattr(child, "_written_in_python", False) or getattr(child, "_is_component", False):
            return False
        if differentiates and getattr(child, "_delays_wgrad", False):
            return False
    if differentiates and torch.compiler.is_compiling():
        return module._give_handles(_guarded_state(module))
    return True


def run(module: PipelineModule, x: torch.Tensor, extra_inputs: tuple[torch.Tensor, ...]) -> Output:
    """Calls a module through the dispatcher. The compiler traces this function: use only what Dynamo supports."""

    def call(segment: TracedSegment, x: torch.Tensor, inputs: Tensors) -> Any:
        if segment.text is None:
            return module.get_submodule(segment.slots[0][0])(x, *inputs)
        params = [_local(module.get_submodule(path), name) for path, name in segment.slots]
        eval_mask = sum(1 << bit for bit, path in enumerate(segment.modes) if not module.get_submodule(path).training)
        outputs = _call(x, params, inputs, segment, eval_mask)
        return outputs[: 1 + len(segment.targets)] if segment.targets else outputs[0]

    return run_segments(module._traced_segments(_guarded_state(module)), x, extra_inputs, call)


def give_handle(param: torch.nn.Parameter) -> None:
    """Gives a Parameter its main_grad handle, as an attribute, so that the compiler finds it."""
    param.__dict__["_main_grad_handle"] = _C.main_grad_handle(param)


def discard_handles(module: torch.nn.Module) -> None:
    """Discards the main_grad handles of Parameters that were pickled with them: they name other Parameters."""
    for param in module._parameters.values():
        if param is not None:
            param.__dict__.pop("_main_grad_handle", None)


def _guarded_state(module: torch.nn.Module) -> tuple[Any, ...]:
    """Returns what the segments of a module depend on, besides its tree of classes. The compiler guards on what it
    reads here, so that a program is used again for another module of the same kind, and not if something changed."""
    state: list[Any] = []
    for child in module.modules():
        if hasattr(child, "_traced_segments"):  # a PipelineModule
            state.append(getattr(child, "_description_text", None))
            state.append(getattr(child, "fuse_nested", None))
            state.append(getattr(child, "_patch_id", 0))
    return tuple(state)


def _local(owner: torch.nn.Module, name: str) -> Any:
    """Returns what kernels read: a Parameter, or of a DTensor (torchweft.parallel) its local tensor."""
    param = getattr(owner, name)
    if not is_dtensor(param):
        return param
    if torch.compiler.is_compiling():
        return param.to_local()
    from .parallel import local_shard

    return local_shard(owner, name, param)


def num_caller_inputs(segments: Sequence[AnySegment]) -> int:
    """Returns how many extra inputs of the segments the caller passes."""
    return sum(source is None for segment in segments for source in segment.sources)


def run_segments(
    segments: Sequence[AnySegment],
    x: torch.Tensor,
    extra_inputs: Sequence[torch.Tensor],
    call: Callable[[AnySegment, torch.Tensor, Tensors], Any],
) -> Output:
    """Calls the segments in order and routes their extra tensors. `call(segment, x, inputs)` returns the output of a
    segment, followed by its extra outputs if it has targets. The compiler traces this function, too."""
    channels: dict[str, torch.Tensor] = {}
    returned: list[torch.Tensor] = []
    expected = num_caller_inputs(segments)
    if len(extra_inputs) != expected:
        raise ValueError(f"weft: expected {expected} extra inputs, got {len(extra_inputs)}. Pass them after the input.")
    remaining = iter(extra_inputs)
    for segment in segments:
        inputs = [next(remaining) if source is None else channels[source] for source in segment.sources]
        result = call(segment, x, inputs)
        x, *outputs = result if segment.targets else (result,)
        for (channel, to_caller), tensor in zip(segment.targets, outputs, strict=True):
            if to_caller:
                returned.append(tensor)
            if channel is not None:
                channels[channel] = tensor
    return (x, *returned) if returned else x


def _call(x: torch.Tensor, params: Tensors, extras: Tensors, segment: TracedSegment, eval_mask: int) -> Any:
    device = x.device.type
    autocast = "none"
    if torch.is_autocast_enabled(device):
        autocast = f'"{_NAMES[torch.get_autocast_dtype(device)]}"'
    grad = torch.is_grad_enabled()
    inputs = [x, *extras, *params]
    if not torch.compiler.is_compiling():
        _C.check_transforms(inputs)
    metas = [_tensor_meta(t, grad) for t in inputs]
    recipe = _autocast.active.text
    call = f'autocast={autocast}{recipe}, eval={eval_mask}, joint="{_joint_rules()}", tensors="{" ".join(metas)}"'
    text = f"{segment.text} @call({call})"
    handles, dummies = _main_grad_handles(params, segment.accumulates)
    if handles:
        op = torch.ops.weft.pipeline_forward_with_handles
        return op(x, inputs, handles, dummies, text, _call_number())
    some_train = eval_mask != (1 << len(segment.modes)) - 1  # dropout; and a recipe may round stochastically
    if some_train or recipe:
        return torch.ops.weft.pipeline_forward_random(x, inputs, text, _call_number())
    return torch.ops.weft.pipeline_forward(inputs, text)


def _main_grad_handles(params: list[Any], accumulates: tuple[bool, ...]) -> tuple[Tensors, list[bool]]:
    """Returns the handles of the Parameters whose main_grad backward of a compiled call changes, and whether it sets
    their .grad to a dummy."""
    handles: Tensors = []
    dummies: list[bool] = []
    if torch.compiler.is_compiling() and torch.is_grad_enabled() and not torch.compiler.is_exporting():
        for param, accumulated in zip(params, accumulates, strict=True):
            if accumulated and param.requires_grad:
                handles.append(param._main_grad_handle)
                dummies.append(hasattr(param, "grad_added_to_main_grad"))
    return handles, dummies


def _tensor_meta(t: torch.Tensor, grad: bool) -> str:
    flags = ("g" if grad and t.requires_grad else "") + ("c" if t.is_contiguous() else "")
    return f"{t.device.type}:{_NAMES[t.dtype]}:{flags}"


# ---- fake kernels and autograd formulas of the dispatcher ops -----------------------------------------------------


def _spec(t: torch.Tensor) -> tuple[Any, torch.dtype]:
    return tuple(t.shape), t.dtype


def _forward_fake(inputs: Tensors, text: str) -> Tensors:
    x = inputs[0]

    def make(spec: _C.Spec | None) -> torch.Tensor:
        return x.new_empty([0]) if spec is None else x.new_empty(spec[0], dtype=spec[1])

    return [make(spec) for spec in _C.infer(text, [_spec(t) for t in inputs])]


def _backward_fake(grads: Gradients, inputs_and_saved: Tensors, text: str) -> Tensors:
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if needs_grad else t.new_empty([0])
        for t, (_, needs_grad, _) in zip(inputs_and_saved, _C.gradients(text), strict=False)
    ]


def _backward_into_fake(
    grads: Gradients, inputs_and_saved: Tensors, params: Tensors, main_grads: Tensors, text: str
) -> Tensors:
    found = _backward_fake(grads, inputs_and_saved, text)
    gradient_info = zip(found, _C.gradients(text), strict=True)
    return [grad.new_empty([0]) if accumulated else grad for grad, (_, _, accumulated) in gradient_info]


def _forward_random_fake(x: torch.Tensor, inputs: Tensors, text: str, call: int) -> Tensors:
    return _forward_fake(inputs, text)


def _forward_with_handles_fake(
    x: torch.Tensor, inputs: Tensors, handles: Tensors, dummies: list[bool], text: str, call: int
) -> Tensors:
    return _forward_fake(inputs, text)


def _backward_with_handles_fake(
    grads: Gradients, inputs_and_saved: Tensors, handles: Tensors, dummies: list[bool], text: str, call: int
) -> Tensors:
    found = _backward_fake(grads, inputs_and_saved, text)
    returned = iter(dummies)
    for i, (_, needs_grad, accumulated) in enumerate(_C.gradients(text)):
        if needs_grad and accumulated and not next(returned):
            found[i] = found[i].new_empty([0])
    return [*found, *(torch.empty_like(handle) for handle in handles)]


torch.library.register_fake("weft::pipeline_forward", _forward_fake)
torch.library.register_fake("weft::pipeline_forward_random", _forward_random_fake)
torch.library.register_fake("weft::pipeline_forward_with_handles", _forward_with_handles_fake)
torch.library.register_fake("weft::pipeline_backward_with_handles", _backward_with_handles_fake)
torch.library.register_fake("weft::pipeline_backward", _backward_fake)
torch.library.register_fake("weft::pipeline_backward_into", _backward_into_fake)


def _save(ctx: Any, text: str, tensors: Tensors, handles: Tensors, output: Tensors) -> None:
    ctx.text = text
    required = _C.outputs_require_grad(text)
    ctx.num_inputs, ctx.num_params, ctx.num_outputs = len(tensors), _C.num_params(text), len(required)
    if any(required):  # else the program has no backward, which raises by name
        ctx.mark_non_differentiable(*(t for t, needed in zip(output, required, strict=False) if not needed))
    ctx.num_handles = len(handles)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*handles, *tensors, *output[ctx.num_outputs :])


def _setup_context(ctx: Any, inputs: tuple[Tensors, str], output: Tensors) -> None:
    tensors, text = inputs
    _save(ctx, text, tensors, [], output)


def _setup_context_random(ctx: Any, inputs: tuple[torch.Tensor, Tensors, str, int], output: Tensors) -> None:
    _, tensors, text, _ = inputs
    _save(ctx, text, tensors, [], output)


def _setup_context_with_handles(
    ctx: Any, inputs: tuple[torch.Tensor, Tensors, Tensors, list[bool], str, int], output: Tensors
) -> None:
    _, tensors, handles, ctx.dummies, text, ctx.call = inputs
    _save(ctx, text, tensors, handles, output)


def _check_planned(needed: list[bool], gradient_info: list[tuple[str, bool, bool]]) -> None:
    for (name, planned, _), need in zip(gradient_info, needed, strict=True):
        if need and not planned:
            raise RuntimeError(
                f"weft: the gradient of {name} is needed, but the program was exported or compiled without it. Export "
                "it again with gradients enabled (outside torch.no_grad()) and requires_grad=True on that tensor."
            )


def _gradients(ctx: Any, grads: Gradients, needed: bool | Sequence[bool]) -> tuple[Gradients, Tensors]:
    """Returns the gradients of the inputs (None: not needed, or accumulated into main_grad) and of the handles."""
    needed = list(needed) if isinstance(needed, (list, tuple)) else [bool(needed)] * ctx.num_inputs
    saved = list(ctx.saved_tensors)  # read once: checkpointing raises if it is read again
    handles, tensors = saved[: ctx.num_handles], saved[ctx.num_handles :]
    gradient_info = _C.gradients(ctx.text)
    _check_planned(needed, gradient_info)
    grads = list(grads[: ctx.num_outputs])
    if handles:
        op = torch.ops.weft.pipeline_backward_with_handles
        found = op(grads, tensors, handles, ctx.dummies, ctx.text, ctx.call)
    elif any(needs_grad and accumulated for _, needs_grad, accumulated in gradient_info):
        if torch._guards.TracingContext.try_get() is not None:
            raise NotImplementedError(
                "weft: an exported program that accumulates into main_grad cannot be compiled for training: it has no "
                "Parameters. Compile the module instead of the exported program."
            )
        nodes = ctx.next_functions[-ctx.num_inputs :]  # x may come first once more
        leaves = [getattr(node, "variable", t) for t, (node, _) in zip(tensors, nodes, strict=False)]
        main_grads = [
            getattr(t, "main_grad", None) for t, (*_, into) in zip(leaves, gradient_info, strict=True) if into
        ]
        main_grads = [t for t in main_grads if t is not None]
        params = leaves[ctx.num_inputs - ctx.num_params :]
        found = torch.ops.weft.pipeline_backward_into(grads, tensors, params, main_grads, ctx.text)
    else:
        found = torch.ops.weft.pipeline_backward(grads, tensors, ctx.text)
    # An empty tensor: the gradient was accumulated into main_grad.
    rows = zip(found, tensors, needed, strict=False)
    of_inputs = [grad if need and grad.shape == t.shape else None for grad, t, need in rows]
    return of_inputs[: ctx.num_inputs], list(found[ctx.num_inputs :])


def _backward(ctx: Any, grads: Gradients) -> tuple[Gradients, None]:
    return _gradients(ctx, grads, ctx.needs_input_grad[0])[0], None


def _backward_random(ctx: Any, grads: Gradients) -> tuple[None, Gradients, None, None]:
    return None, _gradients(ctx, grads, ctx.needs_input_grad[1])[0], None, None


def _backward_with_handles(ctx: Any, grads: Gradients) -> tuple[None, Gradients, Tensors, None, None, None]:
    return None, *_gradients(ctx, grads, ctx.needs_input_grad[1]), None, None, None


torch.library.register_autograd("weft::pipeline_forward", _backward, setup_context=_setup_context)
torch.library.register_autograd("weft::pipeline_forward_random", _backward_random, setup_context=_setup_context_random)
torch.library.register_autograd(
    "weft::pipeline_forward_with_handles", _backward_with_handles, setup_context=_setup_context_with_handles
)


def _reject_double_backward(ctx: Any, grads: Any) -> None:
    raise RuntimeError(
        "weft: differentiating twice through a pipeline is not supported. Use torch operations where you need second "
        "derivatives."
    )


torch.library.register_autograd("weft::pipeline_backward", _reject_double_backward)
torch.library.register_autograd("weft::pipeline_backward_with_handles", _reject_double_backward)


# ---- FLOPs of the GEMMs, for torch.utils.flop_counter --------------------------------------------------------------


def _flops(shapes: list[Any], text: str) -> tuple[int, int]:
    return _C.flops(text, [tuple(shape) for shape in shapes])


@register_flop_formula(torch.ops.weft.pipeline_forward)
def _forward_flops(inputs: list[Any], text: str, **_: Any) -> int:
    return _flops(inputs, text)[0]


@register_flop_formula(torch.ops.weft.pipeline_forward_random)
def _forward_random_flops(x: Any, inputs: list[Any], text: str, call: int, **_: Any) -> int:
    return _flops(inputs, text)[0]


@register_flop_formula(torch.ops.weft.pipeline_forward_with_handles)
def _forward_with_handles_flops(
    x: Any, inputs: list[Any], handles: Any, dummies: Any, text: str, call: int, **_: Any
) -> int:
    return _flops(inputs, text)[0]


@register_flop_formula([torch.ops.weft.pipeline_backward, torch.ops.weft.pipeline_backward_into])
def _backward_flops(grads: Any, inputs_and_saved: list[Any], *rest: Any, **_: Any) -> int:
    text: str = rest[-1]
    return _flops(inputs_and_saved[: len(_C.gradients(text))], text)[1]


@register_flop_formula(torch.ops.weft.pipeline_backward_with_handles)
def _backward_with_handles_flops(
    grads: Any, inputs_and_saved: list[Any], handles: Any, dummies: Any, text: str, call: int, **_: Any
) -> int:
    return _backward_flops(grads, inputs_and_saved, text)
