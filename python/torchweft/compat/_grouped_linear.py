"""GroupedLinear: a linear per group of rows (expert)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from .. import ops
from .._grouped_parameters import to_layout
from .._native import on_meta
from ..recipe import DelayedScaling
from ._module import BoundSequential, CompatModule, divide_evenly


class GroupedLinear(CompatModule):
    """Applies one linear per group of rows: y[rows of g] = x[rows of g] W_gᵀ + b_g.

    The Parameters are `weight0`, `bias0`, `weight1`, …, or `weight` and `bias` of all groups; a checkpoint of either
    layout loads into the other. With `parallel_mode`, each rank holds its shard of every weight; the caller gathers
    inputs and reduces outputs.

    Args:
        num_gemms: number of groups.
        in_features: size of the last dimension of the input, over all ranks.
        out_features: size of the last dimension of the output, over all ranks.
        fuse_wgrad_accumulation: add weight gradients to ``main_grad``.
        tp_group, tp_size: tensor-parallel group, or the number of ranks.
        get_rng_state_tracker, rng_tracker_name: random states from which the weights are initialized.
        init_method: initializes a weight in place; None: normal with standard deviation 0.023.
        bias: add a bias to each group; requires ``tp_size=1``.
        return_bias: return (output, list of biases) instead of adding them.
        params_dtype, device: of the Parameters.
        parallel_mode: ``"column"``, ``"row"`` or None.
        delay_wgrad_compute: compute weight gradients in :meth:`backward_dw`.
        single_grouped_weight: hold all weights in one Parameter `weight` of shape [groups, out, in].
        single_grouped_bias: hold all biases in one Parameter `bias` of shape [groups, out].

    Shape:
        - inp: ``(*, in_features)``, with the rows of each group together, in the order of the groups.
        - m_splits: ``(num_gemms,)``, the number of rows of each group.
        - Output: ``(*, out_features)``.

        With `parallel_mode`, the sharded size is divided by the number of ranks.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
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
            unused=unused | ({} if rng_tracker_name is None else {"rng_tracker_name": rng_tracker_name}),
        )
        if isinstance(self._weight_copies.recipe, DelayedScaling):
            raise NotImplementedError("GroupedLinear: delayed scaling is not supported. Use Float8CurrentScaling.")
        if single_grouped_weight and self.primary_weights_in_fp8:
            raise NotImplementedError(
                "GroupedLinear: single_grouped_weight is not supported in quantized_model_init. Create the module with "
                "single_grouped_weight=False, or outside of quantized_model_init."
            )
        if self.tp_size > 1 and bias:
            raise RuntimeError("GroupedLinear: bias=True is not supported with tp_size > 1. Pass bias=False.")
        self.num_gemms, self.parallel_mode = num_gemms, parallel_mode
        self.in_features = divide_evenly(self, in_features, self.tp_size) if parallel_mode == "row" else in_features
        self.out_features = (
            divide_evenly(self, out_features, self.tp_size) if parallel_mode == "column" else out_features
        )
        self.use_bias, self.return_bias = bias, return_bias
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, bias and single_grouped_bias
        self.weight_names = ["weight"] if single_grouped_weight else [f"weight{g}" for g in range(num_gemms)]
        self.bias_names = ["bias"] if self.single_grouped_bias else [f"bias{g}" for g in range(num_gemms)]
        weight_shape = (*((num_gemms,) if single_grouped_weight else ()), self.out_features, self.in_features)
        bias_shape = (*((num_gemms,) if self.single_grouped_bias else ()), self.out_features)
        # Optimizer states are keyed by the order of the Parameters: weight0, bias0, weight1, …
        for weight, bias_name in zip_longest(self.weight_names, self.bias_names):
            if weight is not None:
                self._declare_weight(weight, weight_shape, init_method, parallel_mode)
            if bias_name is not None:
                self._declare_bias(bias_name, bias_shape, parallel_mode, bias)
        self.reset_parameters(defer_init=on_meta(self))

    @property
    def _scaled_weights(self) -> list[str]:
        return []  # no delayed scaling

    def _build(self) -> BoundSequential:
        adds_bias = self.use_bias and not self.return_bias
        op = ops.GroupedLinear(
            self.num_gemms,
            self.in_features,
            self.out_features,
            bias=adds_bias,
            device="meta",  # the operation reads the Parameters of this module
            dtype=self.params_dtype,
            accumulate_into_main_grad=self.fuse_wgrad_accumulation,
            delay_wgrad_compute=self.delay_wgrad_compute,
            single_grouped_weight=self.single_grouped_weight,
            single_grouped_bias=adds_bias and self.single_grouped_bias,
        )
        self._wgrad_ops.append(op)
        names = self.weight_names + (self.bias_names if adds_bias else [])
        pipeline = BoundSequential(self)
        pipeline.add(op, **{name: name for name in names})
        return pipeline

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict = dict(state_dict)
        to_layout(state_dict, prefix + "weight", self.num_gemms, self.single_grouped_weight)
        if self.use_bias:
            to_layout(state_dict, prefix + "bias", self.num_gemms, self.single_grouped_bias)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: torch.Tensor | Sequence[int],
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """Returns y, or with `return_bias` y and the list of biases, or the one bias of all groups.

        Args:
            inp: the rows of all groups, in the order of the groups.
            m_splits: number of rows of each group.
            is_first_microbatch: if True, weight gradients overwrite ``main_grad`` instead of being added to it.
        """
        splits = torch.as_tensor(m_splits)
        if splits.dtype not in (torch.int32, torch.int64):
            splits = splits.to(torch.int64)
        pipeline = self._get_pipelines(inp)
        with self._quantized_weights(is_first_microbatch):
            output = pipeline.sequential(inp.reshape(-1, inp.size(-1)), splits)
        self._first_microbatch(output, is_first_microbatch)
        output = output.reshape(*inp.shape[:-1], self.out_features)
        if not self.return_bias:
            return output
        return output, self.bias if self.single_grouped_bias else [getattr(self, name) for name in self.bias_names]
