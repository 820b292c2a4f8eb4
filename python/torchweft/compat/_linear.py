"""Linear and LayerNormLinear: a linear, optionally with a norm before it, as one pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import ops
from .._native import on_meta
from ._module import BoundSequential, CompatModule, divide_evenly, reject_gathered_output, reject_quantized


class _SplitLinear(CompatModule):
    """A linear whose output features may be split into several Parameters (`parameters_split`)."""

    return_bias: bool

    def _declare_splits(
        self,
        in_features: int,
        out_features: int,
        split: dict[str, int] | Sequence[str] | None,
        bias: bool,
        mode: str | None,
        init: Callable[[torch.Tensor], Any] | None,
    ) -> None:
        if mode not in (None, "column", "row"):
            raise ValueError(f"{type(self).__name__}: parallel_mode is {mode!r}, expected None, 'column' or 'row'.")
        self.in_features, self.out_features, self.parallel_mode = in_features, out_features, mode
        self.use_bias, self.parameters_split = bias, split
        sizes = _split_sizes(type(self).__name__, split, out_features)
        ranks = self.tp_size
        local_in = divide_evenly(self, in_features, ranks) if mode == "row" else in_features
        self._splits = [(f"{name}weight", f"{name}bias", size) for name, size in sizes.items()]
        self.weight_names = [weight for weight, *_ in self._splits]
        self.bias_names = [bias for _, bias, _ in self._splits]
        for weight, _, size in self._splits:
            self._declare_weight(
                weight, (divide_evenly(self, size, ranks) if mode == "column" else size, local_in), init, mode
            )
        for _, name, size in self._splits:
            self._declare_bias(name, (divide_evenly(self, size, ranks) if mode == "column" else size,), mode, bias)

    def _needs_group(self) -> bool:
        return self.parallel_mode is not None

    def _te_linears(self) -> int:
        return 1  # for all splits

    def _build_splits(self) -> list[BoundSequential]:
        adds_bias, pipelines = self.use_bias and not self.return_bias, []
        for weight, bias, size in self._splits:
            pipelines.append(BoundSequential(self))
            features = self.in_features, size
            self._add_linear(pipelines[-1], features, self.parallel_mode, weight, bias if adds_bias else None)
        return pipelines

    def _run_splits(self, pipelines: list[BoundSequential], x: torch.Tensor, first: bool | None) -> torch.Tensor:
        with self._quantized_weights(first):
            outputs = [pipeline.sequential(x) for pipeline in pipelines]
        for output in outputs[:1] if self.delay_wgrad_compute else outputs:  # backward_dw() computes all splits at once
            self._first_microbatch(output, first)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def _all_biases(self) -> torch.Tensor:
        biases = [getattr(self, name) for name in self.bias_names]
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
        return text if self.tp_size == 1 else f"{text}, parallel_mode={self.parallel_mode}, tp_size={self.tp_size}"


def _split_sizes(owner: str, split: dict[str, int] | Sequence[str] | None, out_features: int) -> dict[str, int]:
    """Returns {name prefix of each split: its output features}."""
    if not split:
        return {"": out_features}
    if not isinstance(split, dict):
        split = {name: out_features // len(split) for name in split}
    if sum(split.values()) != out_features:
        raise ValueError(f"{owner}: parameters_split is {split}, expected sizes that sum to {out_features} features.")
    return {name.rstrip("_") + "_": size for name, size in split.items()}


class Linear(_SplitLinear):
    """Applies y = x Wᵀ + b.

    The Parameters are `weight` and `bias`, or with `parameters_split` `<name>_weight` and `<name>_bias` of each split.

    Args:
        in_features: size of the last dimension of the input, over all ranks.
        out_features: size of the last dimension of the output, over all ranks.
        sequence_parallel: the input of a column linear and the output of a row linear are sharded by their first
            dimension.
        fuse_wgrad_accumulation: add weight gradients to ``main_grad``.
        tp_group, tp_size: tensor-parallel group, or the number of ranks.
        get_rng_state_tracker: returns the random states from which the weight is initialized.
        init_method: initializes a weight in place; None: normal with standard deviation 0.023.
        bias: add a bias.
        return_bias: return (output, bias) instead of adding it.
        params_dtype, device: of the Parameters.
        parallel_mode: ``"column"``, ``"row"`` or None.
        parameters_split: names of the splits, or a dictionary of names to output features.
        delay_wgrad_compute: compute weight gradients in :meth:`backward_dw`.

    Arguments about GPU buffers are accepted and ignored.

    Shape:
        - inp: ``(*, in_features)``; in row mode over p ranks ``(*, in_features / p)``.
        - Output: ``(*, out_features)``; in column mode over p ranks ``(*, out_features / p)``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: dict[str, int] | Sequence[str] | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        **unused: Any,
    ) -> None:
        self._setup(
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            params_dtype=params_dtype,
            device=device,
            delay_wgrad_compute=delay_wgrad_compute,
            unused=unused,
        )
        self.return_bias = return_bias
        self._declare_splits(in_features, out_features, parameters_split, bias, parallel_mode, init_method)
        self.reset_parameters(defer_init=on_meta(self))

    def _build(self) -> list[BoundSequential]:
        return self._build_splits()

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Returns y, or (y, bias) with `return_bias`.

        Args:
            inp: the input.
            is_first_microbatch: if True, weight gradients overwrite ``main_grad`` instead of being added to it, and
                the weight is quantized once, for all calls with False that follow; None: for this call.
            fp8_output, fp8_grad: not supported.
        """
        reject_quantized(self, fp8_output=fp8_output, fp8_grad=fp8_grad)
        output = self._run_splits(self._get_pipelines(inp), inp, is_first_microbatch)
        return (output, self._all_biases()) if self.return_bias else output


class LayerNormLinear(_SplitLinear):
    """Applies y = norm(x) Wᵀ + b.

    The Parameters are those of :class:`Linear`, `layer_norm_weight` and `layer_norm_bias`.

    Args:
        eps: of the norm.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        return_layernorm_output: also return the output of the norm.
        return_layernorm_output_gathered: not supported under sequence parallelism.
        zero_centered_gamma: the norm scales by 1 + gamma.

    The other arguments are those of :class:`Linear`.

    Shape:
        - inp: ``(*, in_features)``.
        - Output: ``(*, out_features)``; in column mode over p ranks ``(*, out_features / p)``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: dict[str, int] | Sequence[str] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        **unused: Any,
    ) -> None:
        self._setup(
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            params_dtype=params_dtype,
            device=device,
            delay_wgrad_compute=delay_wgrad_compute,
            unused=unused,
        )
        self.normalization, self.eps, self.zero_centered_gamma = normalization, eps, zero_centered_gamma
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        reject_gathered_output(self, return_layernorm_output_gathered)
        self._declare_norm(normalization, in_features, zero_centered_gamma)
        self._declare_splits(in_features, out_features, parameters_split, bias, parallel_mode, init_method)
        self.reset_parameters(defer_init=on_meta(self))

    def _build(self) -> tuple[BoundSequential | None, list[BoundSequential]]:
        """Builds (pipeline of the norm or None, pipelines of the linears). With a single linear the norm is part of its
        pipeline, and the norm's output is an extra output if requested."""
        pipelines = self._build_splits()
        norm, names = self._norm()
        if len(pipelines) > 1:
            norm_pipeline = BoundSequential(self)
            norm_pipeline.add(norm, **names)
            return norm_pipeline, pipelines
        pipeline = BoundSequential(self)
        pipeline.add(norm, **names)
        if self.return_layernorm_output:
            pipeline.add(ops.MakeExtraOutput())
        pipeline.extend(pipelines[0])
        return None, [pipeline]

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_grad: bool = False,
        fp8_output: bool = False,
    ) -> Any:
        """Returns y, with `return_bias` also the bias, with `return_layernorm_output` also norm(x).

        The arguments are those of :meth:`Linear.forward`.
        """
        reject_quantized(self, fp8_output=fp8_output, fp8_grad=fp8_grad)
        norm_pipeline, pipelines = self._get_pipelines(inp)
        if norm_pipeline is not None:
            normed = norm_pipeline.sequential(inp)
            output = self._run_splits(pipelines, normed, is_first_microbatch)
        else:
            with self._quantized_weights(is_first_microbatch):
                output = pipelines[0].sequential(inp)
            output, normed = output if self.return_layernorm_output else (output, None)
            self._first_microbatch(output, is_first_microbatch)
        results: tuple[Any, ...] = (output,)
        if self.return_bias:
            results += (self._all_biases(),)
        if self.return_layernorm_output:
            results += (normed,)
        return results if len(results) > 1 else output
