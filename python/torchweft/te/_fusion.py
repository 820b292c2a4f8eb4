"""Transformer Engine's own fuser with weft's plans.

Its fuser lets a fusion replace consecutive operations by one that computes their forward and backward
(`register_forward_backward_fusion`, since 2.17). The one registered here replaces each run of operations that weft has
by a pipeline of weft: weft fuses them, and Parameters, their names, checkpoints and `main_grad` stay Transformer
Engine's. An operation that weft cannot take ends a run; `explain` says why.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._process_groups import resolve_parallel

PACKAGE, OPS = "transformer_engine.", "transformer_engine.pytorch.ops"


class _Rejected(Exception):
    """Why an operation is not part of a run."""


# ---- operations as weft's text ------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, torch.dtype):
        return f'"{str(value).removeprefix("torch.")}"'
    if isinstance(value, (tuple, list, torch.Size)):
        return f"[{', '.join(_text(item) for item in value)}]"
    return repr(value)


def _same(*names: str) -> Callable[[Any], dict[str, Any]]:
    """Fields that the operation has as attributes of these names."""
    return lambda op: {name.removeprefix("_"): getattr(op, name) for name in names}


def _norm(op: Any) -> dict[str, Any]:
    fields = _same("eps", "zero_centered_gamma")(op)
    return {"normalized_shape": op.weight.shape, "dtype": op.weight.dtype} | fields


def _over_ranks(op: Any, *names: str) -> dict[str, Any]:
    """Fields of an operation over ranks, with the name and the size of its group."""
    fields = _same(*names)(op)
    resolve_parallel(type(op).__name__, fields)
    return fields


def _linear(op: Any) -> dict[str, Any]:
    fields = _same("in_features", "out_features", "_accumulate_into_main_grad")(op) | {"dtype": op.weight.dtype}
    return fields | _over_ranks(op, "tensor_parallel_mode", "tensor_parallel_group", "sequence_parallel")


def _all_reduce(op: Any) -> dict[str, Any]:
    return _over_ranks(op, "process_group") | {"reduce_in_backward": False}  # Transformer Engine never does


def _grouped_linear(op: Any) -> dict[str, Any]:
    if op.wgrad_store.delay_wgrad_compute():
        raise _Rejected("it has delay_wgrad_compute")
    weight = next(op.parameters(recurse=False))
    fields = _same("num_groups", "in_features", "out_features", "_accumulate_into_main_grad", "_scale_bias")(op)
    return {"bias": op.use_bias, "dtype": weight.dtype} | fields


def _added(op: Any) -> dict[str, Any]:
    if op._in_place:
        raise _Rejected("it writes into its extra input")
    return {}


def _clamped(op: Any) -> dict[str, Any]:
    return _same("glu_interleave_size")(op) | _same("limit", "alpha", "glu_linear_offset")(op._clamped)


_LINEARS = ("BasicLinear", "GroupedLinear")
_ACTIVATIONS = ("GELU", "GEGLU", "GLU", "QGELU", "QGEGLU", "ReLU", "ReGLU", "SReLU", "SReGLU", "SiLU")
_FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(_ACTIVATIONS, _same("cache_quantized_input")),
    "SwiGLU": _same("cache_quantized_input", "glu_interleave_size"),
    "SiTUGLU": _same("beta1", "beta2", "cache_quantized_input", "glu_interleave_size"),
    "ClampedSwiGLU": _same("limit", "alpha", "glu_linear_offset", "cache_quantized_input", "glu_interleave_size"),
    "ScaledSwiGLU": _same("glu_interleave_size"),
    "ScaledSiTUGLU": _same("beta1", "beta2", "glu_interleave_size"),
    "ScaledClampedQGeGLU": _clamped,
    "ScaledSReLU": _same(),
    "ScaledTanhSReLU": _same("tanh_clamp_scale"),
    "RMSNorm": _norm,
    "LayerNorm": _norm,
    "L2Normalization": _same("eps"),
    "BasicLinear": _linear,
    "GroupedLinear": _grouped_linear,
    "Bias": lambda op: {"size": op.bias.numel(), "dtype": op.bias.dtype},
    "AllReduce": _all_reduce,
    "AllGather": lambda op: _over_ranks(op, "process_group"),
    "ReduceScatter": lambda op: _over_ranks(op, "process_group"),
    "ConstantScale": _same("scale"),
    "Dropout": lambda op: {"p": op.dropout_probability},
    "Identity": _same(),
    "Reshape": _same("_shape"),
    "Quantize": lambda op: {"forward": op._quantize_forward, "backward": op._quantize_backward},
    "AddExtraInput": _added,
    "MakeExtraOutput": _same("_in_place"),
}


def _described(op: Any, recipe: Any) -> str:
    """Returns the operation in weft's text. Raises _Rejected."""
    name = type(op).__name__
    if not type(op).__module__.startswith(PACKAGE):
        raise _Rejected("it is not an operation of Transformer Engine")
    if name not in _FIELDS:
        raise _Rejected("weft's plans have no such operation here")
    for key in ("weight", "bias"):
        if isinstance(getattr(op, key, None), torch.Tensor) and key not in op._parameters:
            raise _Rejected(f"its {key} is not a Parameter of it")
    for key, parameter in op.named_parameters(recurse=False):
        if type(parameter) is not torch.nn.Parameter:
            _check_quantized(op, key, parameter, recipe)
    if name in _LINEARS and recipe is not None:
        _recipe_text(op, recipe)
    fields = ", ".join(f"{key}={_text(value)}" for key, value in _FIELDS[name](op).items())
    return f"{name}({fields})"


def _check_quantized(op: Any, key: str, parameter: Any, recipe: Any) -> None:
    """Raises _Rejected unless weft takes this Parameter of another class."""
    what = f"its {key} is a {type(parameter).__name__}"
    if not hasattr(parameter, "_quantizer") or (recipe is not None and type(op).__name__ != "BasicLinear"):
        raise _Rejected(what)
    if op._accumulate_into_main_grad:
        raise _Rejected(f"{what} whose gradient is added to main_grad")


def _is_linear(op: Any) -> bool:
    return type(op).__name__ in _LINEARS


def _quantizes(op: Any) -> bool:
    """Whether it is a `Quantize` that does something under a recipe. Its quantizers run after those of the plan."""
    return type(op).__name__ == "Quantize" and (op._quantize_forward or op._quantize_backward)


def _changes_rows(op: Any) -> bool:
    return type(op).__name__ in ("Reshape", "AllGather", "ReduceScatter") or getattr(op, "sequence_parallel", False)


def _quantizers(linear: Any, group: int = 0) -> list[Any]:
    """Returns the quantizers of input, weight and output gradient."""
    places = (("forward", 2 * group), ("forward", 2 * group + 1), ("backward", group))
    return [linear.get_quantizer(which, i) for which, i in places]


def _recipe_text(linear: Any, recipe: Any) -> str:
    """Returns the recipe of a linear in weft's text. Raises _Rejected."""
    texts = set()
    for group in range(getattr(linear, "num_groups", 1)):
        quantizers = _quantizers(linear, group)
        if any(quantizer is None for quantizer in quantizers):
            raise _Rejected("the recipe leaves some of its tensors unquantized")
        try:
            texts.add(_extension()._recipe_text(*quantizers, recipe.backward_override))
        except (NotImplementedError, ValueError) as error:
            raise _Rejected(str(error).partition("\n")[0]) from None
    if len(texts) > 1:
        raise _Rejected("its groups have different recipes")
    if recipe.delayed() and type(linear).__name__ == "GroupedLinear":
        raise _Rejected("weft has no delayed scaling of groups")
    text: str = texts.pop()
    return text


def _extension() -> Any:
    return sys.modules["transformer_engine_torch"]


# ---- runs ---------------------------------------------------------------------------------------------------------


def _input_channels(op: Any) -> list[str | None]:
    return getattr(op, "_extra_input_channels", [None] * op.num_extra_inputs)


def _output_channels(op: Any) -> list[tuple[str | None, bool]]:
    channels = getattr(op, "_extra_output_channels", [None] * op.num_extra_outputs)
    return list(zip(channels, getattr(op, "_extra_output_to_caller", [True] * len(channels)), strict=True))


def _channel_text(
    ops: Sequence[Any], descriptions: Sequence[str], read_later: set[str | None]
) -> tuple[str, list[tuple[int, int]]]:
    """Returns a run as weft's text, and the (operation, index) of the extra outputs that leave the run. `read_later`:
    channels that operations after the run read."""
    made = list(dict.fromkeys(channel for op in ops for channel, _ in _output_channels(op) if channel is not None))
    text_of = {channel: _text(f"c{i}") for i, channel in enumerate(made)}  # a name may have any characters
    read = {channel for op in ops for channel in _input_channels(op) if channel is not None}
    outputs, words = [], []
    for i, (op, description) in enumerate(zip(ops, descriptions, strict=True)):
        text = description
        for channel in _input_channels(op):
            text += f" <{text_of[channel]}" if channel in text_of else " <-"
        for k, (channel, to_caller) in enumerate(_output_channels(op)):
            leaves = channel is None or to_caller or channel in read_later
            if leaves:
                outputs.append((i, k))
            if channel in read:
                text += f" >{text_of[channel]}" if leaves else f" >>{text_of[channel]}"
        words.append(text)
    return "; ".join(words), outputs


def _make_class() -> Any:
    """Returns the class of runs; it derives from a class of Transformer Engine, which is imported now."""
    from transformer_engine.pytorch.ops import FusedOperation
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    def plain(t: Any) -> Any:
        return t.dequantize() if isinstance(t, QuantizedTensorStorage) else t

    class WeftRun(FusedOperation):  # type: ignore[misc]
        """Consecutive operations as one pipeline of weft."""

        def __init__(self, ops: Sequence[Any], texts: list[str], read_later: set[str | None]) -> None:
            super().__init__(ops)
            self._read_later = read_later
            self._describe(texts)
            made = {channel for op in ops for channel, _ in _output_channels(op)} - {None}
            self._inputs = [
                (i, k) for i, op in enumerate(ops) for k, name in enumerate(_input_channels(op)) if name not in made
            ]
            self._linears = [(i, op) for i, op in enumerate(ops) if _is_linear(op)]
            self._first, self._last = (op if _quantizes(op) else None for op in (ops[0], ops[-1]))

        def __reduce__(self) -> Any:
            return _made_again, (list(self.basic_ops), self._texts, self._read_later)

        def _describe(self, texts: list[str]) -> None:
            self._texts = texts
            text, self._outputs = _channel_text(self.basic_ops, texts, self._read_later)
            self._run = _extension()._FusedRun(text)

        def _follow_changes(self) -> None:
            """Takes the attributes that operations have now, such as the probability of a dropout."""
            try:
                texts = [_described(op, None) for op in self.basic_ops]
            except _Rejected as reason:
                raise NotImplementedError(
                    f"torchweft.te: an operation that runs in a plan of weft has changed: {reason}. Create the module "
                    "anew, or call torchweft.te.install(fusion=False) and create it anew."
                ) from None
            if texts != self._texts:
                self._describe(texts)

        def fuser_forward(
            self,
            basic_op_ctxs: list[Any],
            input_: Any,
            *,
            basic_op_extra_inputs: Sequence[Sequence[torch.Tensor | None]],
            basic_op_kwargs: Sequence[dict[str, Any]],
            **unused: Any,
        ) -> tuple[torch.Tensor, list[tuple[torch.Tensor | None, ...]]]:
            given = [(i, kwargs) for i, kwargs in enumerate(basic_op_kwargs) if kwargs]
            buffers = [(i, kwargs.get("output"), kwargs.get("grad_input")) for i, kwargs in given]
            extras = [plain(basic_op_extra_inputs[i][k]) for i, k in self._inputs]
            extras = [t if t.is_floating_point() else t.to(input_.device) for t in extras]
            params = [p for op in self.basic_ops for p in op.parameters(recurse=False)]
            needs = [basic_op_ctxs[0].requires_grad]
            needs += [basic_op_ctxs[i].requires_grad for i, _ in self._inputs]
            for ctx, op in zip(basic_op_ctxs, self.basic_ops, strict=True):
                needs += [ctx.requires_grad and p.requires_grad for p in op.parameters(recurse=False)]
            evaluated = [i for i, op in enumerate(self.basic_ops) if not op.training]
            active = FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None
            recipe: str | None = None
            quantizers: list[tuple[int, list[Any]]] = []
            if self._linears and active is not None:
                recipe, quantizers = self._quantization(active)
                rows = input_.numel() // max(input_.shape[-1], 1)
                owners = [-1, *(i for i, _ in self._inputs)]
                owners += [i for i, op in enumerate(self.basic_ops) for _ in op.parameters(recurse=False)]
                first = min((i for i, needed in zip(owners, needs, strict=True) if needed), default=len(self.basic_ops))
                for (i, op), (_, its) in zip(self._linears, quantizers, strict=True):
                    if type(op).__name__ == "BasicLinear" and rows:
                        features = reversed(op.weight.shape)
                        _extension()._check_linear_sizes(its[0], rows, *features, first <= i, input_.dtype)
            self._follow_changes()
            if self._first is not None:
                input_ = self._quantized(self._first, basic_op_ctxs[0], input_)
            x = plain(input_)
            results, call = self._run.forward(x, extras, params, needs, evaluated, recipe, quantizers, buffers)
            y, *more = (_view_of_source(t, [x, *extras]) for t in results)
            basic_op_ctxs[0].weft_call = call
            if self._last is not None:
                y = self._quantized(self._last, basic_op_ctxs[-1], y)
            outputs: list[list[torch.Tensor | None]] = [[None] * op.num_extra_outputs for op in self.basic_ops]
            for (i, k), t in zip(self._outputs, more, strict=True):
                outputs[i][k] = t
            return y, [tuple(ts) for ts in outputs]

        @staticmethod
        def _quantized(op: Any, ctx: Any, x: Any) -> Any:
            no_extras: dict[str, Any] = {"basic_op_extra_inputs": [()], "basic_op_kwargs": [{}]}
            neighbours = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
            return op.fuser_forward([ctx], x, **no_extras, **neighbours)[0]

        @staticmethod
        def _quantized_gradient(op: Any, ctx: Any, grad: Any) -> Any:
            return op.fuser_backward([ctx], grad, basic_op_grad_extra_outputs=[()])[0]

        def _quantization(self, recipe: Any) -> tuple[str, list[tuple[int, list[Any]]]]:
            """Returns the recipe, and (operation, its quantizers) for each linear."""
            name = type(self._linears[0][1]).__name__
            try:
                texts = {_recipe_text(op, recipe) for _, op in self._linears}
                if len(texts) > 1:
                    raise _Rejected("its linears have different recipes")
                return texts.pop(), [(i, _quantizers(op)) for i, op in self._linears]
            except _Rejected as reason:  # another recipe of the same class: Transformer Engine does not fuse anew
                raise NotImplementedError(
                    f"torchweft.te: {name} runs in a plan of weft, which cannot take the recipe "
                    f"of this call: {reason}. Create the module anew for this recipe, or call "
                    "torchweft.te.install(fusion=False) and create it anew."
                ) from None

        def fuser_backward(
            self,
            basic_op_ctxs: list[Any],
            grad_output: Any,
            *,
            basic_op_grad_extra_outputs: Sequence[Sequence[torch.Tensor | None]],
        ) -> tuple[torch.Tensor | None, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
            if self._last is not None:
                grad_output = self._quantized_gradient(self._last, basic_op_ctxs[-1], grad_output)
            grads = [plain(grad_output), *(plain(basic_op_grad_extra_outputs[i][k]) for i, k in self._outputs)]
            dx, *others = self._run.backward(basic_op_ctxs[0].weft_call, grads)
            if self._first is not None and dx is not None:
                dx = self._quantized_gradient(self._first, basic_op_ctxs[0], dx)
            of_params = []
            for op in self.basic_ops:
                count = sum(1 for _ in op.parameters(recurse=False))
                of_params.append(tuple(others[:count]))
                others = others[count:]
            of_extras: list[list[torch.Tensor | None]] = [[None] * op.num_extra_inputs for op in self.basic_ops]
            for (i, k), grad in zip(self._inputs, others, strict=True):
                of_extras[i][k] = grad
            return dx, of_params, [tuple(ts) for ts in of_extras]

    return WeftRun


def _made_again(ops: Sequence[Any], texts: list[str], read_later: set[str | None]) -> Any:
    """A run that was copied or pickled."""
    global _run_class
    _run_class = _run_class or _make_class()
    return _run_class(ops, texts, read_later)


def _view_of_source(y: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
    """Returns `y`; if it has the memory of one of `sources`, that tensor or a view of it, so that torch notices changes
    in place."""
    for source in sources:
        if y.numel() == 0 or y.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
            continue
        if (y.shape, y.stride(), y.storage_offset()) == (source.shape, source.stride(), source.storage_offset()):
            return source
        return source.as_strided(y.shape, y.stride(), y.storage_offset())
    return y


# ---- the fusion ---------------------------------------------------------------------------------------------------


def _one_pass_fusions() -> list[str]:
    """Returns the user's own fusions of one pass. Transformer Engine applies them after those of both passes, and what
    they would take is not known before, so weft takes nothing while there is one."""
    from transformer_engine.pytorch.ops.fuser import OperationFuser

    functions = [*OperationFuser.forward_fusion_functions, *OperationFuser.backward_fusion_functions]
    return [function.__qualname__ for function in functions if not function.__module__.startswith(PACKAGE)]


def _begins_another(run: Sequence[Any], op: Any, recipe: Any) -> bool:
    """Whether `op` cannot follow `run` in one plan: under a recipe its linears have the same one and as many rows as
    its input, and quantized tensors only enter and leave it."""
    if recipe is None or not run:
        return False
    if _is_linear(op):
        linear = next(filter(_is_linear, run), None)
        if linear is not None and _recipe_text(linear, recipe) != _recipe_text(op, recipe):
            return True
        if any(map(_changes_rows, run)):
            return True
    return len(run) > 1 and _quantizes(run[-1])


def _split(ops: Sequence[Any], recipe: Any) -> Iterable[tuple[list[Any], list[str]] | tuple[Any, str]]:
    """Yields (operations, their texts) for each run, and (operation, reason) for each other one."""
    others = _one_pass_fusions()
    run: list[Any] = []
    texts: list[str] = []

    def finished() -> Iterable[tuple[list[Any], list[str]] | tuple[Any, str]]:
        nonlocal run, texts
        if recipe is not None and run and all(map(_quantizes, run)):
            yield from ((op, "there is nothing to fuse it with") for op in run)
        elif run:
            yield run, texts
        run, texts = [], []

    for op in ops:
        try:
            if op.is_fused_op:
                raise _Rejected("a fusion of Transformer Engine or of the user takes it")
            if others:
                raise _Rejected(f"{others[0]} is registered for one pass and comes first")
            text = _described(op, recipe)
        except _Rejected as reason:
            yield from finished()
            yield op, str(reason)
            continue
        if _begins_another(run, op, recipe):
            yield from finished()
        run, texts = [*run, op], [*texts, text]
    yield from finished()


enabled = False  # set by install
_run_class: Any = None
_reasons: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # of operations outside of runs


def fuse(ops: list[Any], *, recipe: Any = None, **unused: Any) -> list[Any]:
    """The fusion: returns `ops` with its runs replaced."""
    from transformer_engine.pytorch.ops.fuser import OperationFuser

    global _run_class
    if not enabled:
        return ops
    functions = OperationFuser.forward_backward_fusion_functions
    if functions[-1] is not fuse:  # the user's own come first: the loop over this list comes to its new end
        functions.append(fuse)
        return ops
    _run_class = _run_class or _make_class()
    fused: list[Any] = []
    done = 0
    for part, how in _split(ops, recipe):
        if isinstance(how, str):
            _reasons[part] = how
            fused.append(part)
            done += 1
            continue
        done += len(part)
        later = {channel for op in ops[done:] if not op.is_fused_op for channel in _input_channels(op)}
        later |= {c for op in ops[done:] if op.is_fused_op for o in op.basic_ops for c in _input_channels(o)}
        fused.append(_run_class(part, how, later))
    return fused


def explain(module: torch.nn.Module) -> str:
    """Returns how the operations of `transformer_engine.pytorch.ops` in a module ran in its last call.

    For each run of weft its operations and the steps that weft fused them to, forward and backward; for each other
    operation why it is not part of one.
    """
    lines = []
    for name, sequential in module.named_modules():
        for group in getattr(sequential, "_module_groups", None) or ():
            for op, indices in getattr(group, "_forward_ops", None) or ():
                place = f"{name}." if name else ""
                span = f"{place}{indices[0]}" + f"..{indices[-1]}" * (len(indices) > 1)
                if type(op) is not _run_class:
                    lines.append(f"{span}: {type(op).__name__}: {_reasons.get(op, 'the fusion was off')}")
                    continue
                forward, backward = op._run.steps()
                lines.append(f"{span}: weft: {', '.join(type(part).__name__ for part in op.basic_ops)}")
                lines.append(f"    forward: {', '.join(forward)}")
                lines.append(f"    backward: {', '.join(backward)}")
    if not lines:
        raise ValueError("torchweft.te.explain: none of its transformer_engine.pytorch.ops has run. Call it first.")
    return "\n".join(lines)


def register() -> None:
    """Registers the fusion; `transformer_engine.pytorch.ops` is imported."""
    ops = sys.modules[OPS]
    add = getattr(ops, "register_forward_backward_fusion", None)
    if add is not None:  # since 2.17
        add(fuse)
