"""Weight gradients that bypass autograd: accumulated into ``main_grad``, or computed later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from . import _C
from ._dispatcher import give_handle
from ._process_groups import is_dtensor

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._native import NativeOperation


class WgradModule(torch.nn.Module):
    """A module with weights and the fields `accumulate_into_main_grad` and `delay_wgrad_compute`.

    With `accumulate_into_main_grad` the GEMM adds the weight gradient to ``weight.main_grad``. It reads attributes of
    the weight: ``overwrite_main_grad`` (overwrite instead of add), ``grad_added_to_main_grad`` (if it exists, it is set
    to True and ``weight.grad`` becomes a dummy; otherwise ``weight.grad`` is not changed), ``zero_out_wgrad`` (the
    dummy is zero) and, if ``__fsdp_param__`` exists, ``get_main_grad()``. With `delay_wgrad_compute` the GEMM runs in
    :meth:`backward_dw`.
    """

    weight: torch.nn.Parameter
    _wgrad_bypasses_autograd = False  # whether the weight gradient is accumulated into main_grad or delayed
    _delays_wgrad = False
    _has_delayed_scaling = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mark_weight()

    def _wgrad_op(self) -> NativeOperation:
        """Returns the operation that has the fields."""
        return cast("NativeOperation", self)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients are computed in :meth:`backward_dw` instead of in backward."""
        return bool(self._wgrad_op()._op.fields()["delay_wgrad_compute"])

    def backward_dw(self) -> None:
        """Computes the weight gradients delayed by the oldest pending backward, then runs the hooks.

        Does nothing if none are pending. Call it once per backward, no matter how often the module was used in it.
        """
        op = self._wgrad_op()
        params = [getattr(owner, name) for owner, name in op._parameter_slots()]
        if self.need_backward_dw() and _C.backward_dw(op._op, params):
            for hook in self.__dict__.get("_wgrad_hooks", ()):
                hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Registers a hook that runs after each :meth:`backward_dw` that computed a gradient.

        Args:
            hook: called without arguments.
        """
        object.__setattr__(self, "_wgrad_hooks", [*self.__dict__.get("_wgrad_hooks", ()), hook])

    @property
    def pending_backward_dw(self) -> int:
        """Number of pending :meth:`backward_dw` calls: one per backward."""
        return _C.pending_dw(getattr(self, self._weight_names()[0]))

    # ---- attributes set on the weights, read by training frameworks -----------------------------------------------

    def _mark_weight(self) -> None:
        fields = self._wgrad_op()._op.fields()
        delay, before = fields["delay_wgrad_compute"], self._delays_wgrad
        object.__setattr__(self, "_wgrad_bypasses_autograd", delay or fields["accumulate_into_main_grad"])
        object.__setattr__(self, "_delays_wgrad", delay)
        for name in self._weight_names() if delay or before else ():
            self._mark(self._parameters.get(name), delay)
        for param in self._main_grad_parameters():
            if param is not None and not is_dtensor(param):
                give_handle(param)

    def _main_grad_parameters(self) -> list[torch.nn.Parameter | None]:
        """Returns the Parameters whose gradients go to ``main_grad``."""
        accumulates = self._wgrad_op()._op.fields()["accumulate_into_main_grad"]
        return [self._parameters.get(name) for name in self._weight_names()] if accumulates else []

    def _weight_names(self) -> list[str]:
        return [name for name, *_, main_grad in self._wgrad_op()._op.params() if main_grad]

    def _mark(self, weight: Any, delay: bool) -> None:
        if weight is None:
            return
        if delay and is_dtensor(weight):
            raise NotImplementedError(
                f"{type(self).__name__}: delay_wgrad_compute is not supported for a sharded weight (DTensor). Create "
                "the module with delay_wgrad_compute=False."
            )
        weight.skip_backward_post_hook = delay

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_description_text" or (
            self._delays_wgrad and name in self._weight_names()
        ):  # a field or a weight was set
            self._mark_weight()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_weight()

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is not None:
            self._mark_weight()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_weight()
        return self
