"""The way through the dispatcher, for torch.compile, torch.export and fake tensors.

In eager mode a module hands its pipeline to C++ directly. While a compiler looks on, the same pipeline is called as the
dispatcher op ``weft::pipeline_forward`` with its text, which the compiler can record; its gradient is
``weft::pipeline_backward``.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from . import _C

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES}

# Modules by number: a compiler takes a number for a constant where it would not take a module.
_numbers = itertools.count()
_modules: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()


def enroll(module: torch.nn.Module) -> None:
    """Gives a module the number under which a compiler finds what it consists of."""
    number = next(_numbers)
    object.__setattr__(module, "_number", number)
    _modules[number] = module


def _program(number: int, edition: int):
    """The groups of a module as constants: text or None, paths and names of parameters, paths of the operations that
    differ in evaluation, sources, targets. `edition` changes with them, so that the compiler asks again."""
    return _modules[number]._compiled_groups()


# torch.compiler.assume_constant_result(_program), without importing the compiler, which takes a second.
_program._dynamo_marked_constant = True


def applies(module: torch.nn.Module, x: Any) -> bool:
    """Whether a call goes this way: a compiler looks on or x is fake, no operation below is written in Python, and no
    weight gradient goes elsewhere than to autograd, which a compiler would take for dead code."""
    compiling = torch.compiler.is_compiling()
    if not compiling and type(x).__name__ != "FakeTensor":
        return False
    differentiates = compiling and torch.is_grad_enabled() and not torch.compiler.is_exporting()
    for part in module.modules():
        if getattr(part, "_written_in_python", False):
            return False
        if differentiates and getattr(part, "_own_wgrad", False):
            return False
    return True


def run(module: torch.nn.Module, x: torch.Tensor, extra_inputs: tuple[torch.Tensor, ...]):
    """Calls a module through the dispatcher. Traced by the compiler, so it stays with what one can trace."""
    channels: dict[str, torch.Tensor] = {}
    returned: list[torch.Tensor] = []
    given = 0
    edition = 0
    for part in module.modules():
        edition += getattr(part, "_edition", 0)
    for text, slots, modes, sources, targets in _program(module._number, edition):
        inputs = []
        for source in sources:
            if source is None:
                inputs.append(extra_inputs[given])
                given += 1
            else:
                inputs.append(channels[source])
        if text is None:
            result = module.get_submodule(slots[0][0])(x, *inputs)
            outputs = list(result) if targets else [result]
        else:
            params = [getattr(module.get_submodule(path), name) for path, name in slots]
            evaluating = sum(1 << bit for bit, path in enumerate(modes) if not module.get_submodule(path).training)
            outputs = _call(x, params, inputs, text, evaluating)
        x = outputs[0]
        for (channel, to_caller), tensor in zip(targets, outputs[1:], strict=True):
            if to_caller:
                returned.append(tensor)
            if channel is not None:
                channels[channel] = tensor
    return (x, *returned) if returned else x


def _call(x: torch.Tensor, params: list[torch.Tensor], extras: list[torch.Tensor], text: str, evaluating: int):
    device = x.device.type
    autocast = "none"
    if torch.is_autocast_enabled(device):
        autocast = f'"{_NAMES[torch.get_autocast_dtype(device)]}"'
    grad = torch.is_grad_enabled()
    words = [_word(t, grad) for t in [x, *extras, *params]]
    call = f'{text} @call(autocast={autocast}, eval={evaluating}, tensors="{" ".join(words)}")'
    return torch.ops.weft.pipeline_forward(x, params, extras, call)[0]


def _word(t: torch.Tensor, grad: bool) -> str:
    flags = ("g" if grad and t.requires_grad else "") + ("c" if t.is_contiguous() else "")
    return f"{t.device.type}:{_NAMES[t.dtype]}:{flags}"


# ---- what the dispatcher needs to know about the ops ------------------------------------------------------


def _spec(t: torch.Tensor) -> tuple[Any, torch.dtype]:
    return tuple(t.shape), t.dtype


@torch.library.register_fake("weft::pipeline_forward")
def _forward_fake(x, params, extras, text):
    outputs, saved = _C.infer(text, _spec(x), [_spec(p) for p in params], [_spec(e) for e in extras])

    def make(spec):
        return x.new_empty([0]) if spec is None else x.new_empty(spec[0], dtype=spec[1])

    return [make(spec) for spec in outputs], [make(spec) for spec in saved]


@torch.library.register_fake("weft::pipeline_backward")
def _backward_fake(grads, saved, x, params, extras, text):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in [x, *params, *extras]]


def _setup_context(ctx, inputs, output) -> None:
    x, params, extras, text = inputs
    ctx.counts, ctx.text = (len(params), len(extras)), text
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *params, *extras, *output[1])


def _backward(ctx, grad_outputs, grad_saved):
    num_params, num_extras = ctx.counts
    x, *rest = ctx.saved_tensors
    params, extras, saved = (
        rest[:num_params],
        rest[num_params : num_params + num_extras],
        rest[num_params + num_extras :],
    )
    grads = torch.ops.weft.pipeline_backward(list(grad_outputs), saved, x, params, extras, ctx.text)
    needs_x, needs_params, needs_extras, _ = ctx.needs_input_grad

    def keep(found, needs):
        return [g if need else None for g, need in zip(found, needs, strict=True)]

    wanted_params = needs_params if isinstance(needs_params, (list, tuple)) else [needs_params] * num_params
    wanted_extras = needs_extras if isinstance(needs_extras, (list, tuple)) else [needs_extras] * num_extras
    return (
        grads[0] if needs_x else None,
        keep(grads[1 : 1 + num_params], wanted_params),
        keep(grads[1 + num_params :], wanted_extras),
        None,
    )


torch.library.register_autograd("weft::pipeline_forward", _backward, setup_context=_setup_context)


def _refuse_twice(ctx, grads):
    raise RuntimeError(
        "weft: differentiating twice through a pipeline is not supported. Use plain torch operations where you need "
        "second derivatives."
    )


torch.library.register_autograd("weft::pipeline_backward", _refuse_twice)
