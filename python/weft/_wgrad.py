"""Weight gradients that leave autograd's way: into ``main_grad``, or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import _C

if TYPE_CHECKING:
    from ._native import NativeOperation


class WgradModule(torch.nn.Module):
    """A module with weights and the fields `accumulate_into_main_grad` and `delay_wgrad_compute`.

    With `accumulate_into_main_grad` the GEMM adds the gradient to ``weight.main_grad``. Attributes of the weight
    that it reads then: ``overwrite_main_grad`` (written instead of added), ``grad_added_to_main_grad`` (if it exists it
    becomes True and ``weight.grad`` a dummy, else ``weight.grad`` stays as it is), ``zero_out_wgrad`` (the dummy is
    zero), ``get_main_grad()`` if there is ``__fsdp_param__`` too. With `delay_wgrad_compute` the GEMM waits for
    :meth:`backward_dw`.
    """

    _wgrad_bypasses_autograd = False  # the weight gradient does something that a compiler would not see
    _delays_wgrad = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mark_weight()

    def _wgrad_op(self) -> NativeOperation:
        """The operation that has the fields."""
        return self

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for :meth:`backward_dw`."""
        return self._wgrad_op()._op.fields()["delay_wgrad_compute"]

    def backward_dw(self) -> None:
        """Computes the weight gradients that the oldest backward delayed, then runs the hooks; does nothing if none are
        pending. Call it once after each backward, however often the module was used in it."""
        op = self._wgrad_op()
        params = [getattr(owner, name) for owner, name in op._parameter_slots()]
        if self.need_backward_dw() and _C.backward_dw(op._op, params):
            for hook in self.__dict__.get("_wgrad_hooks", ()):
                hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """``hook`` runs after each :meth:`backward_dw` that computed something."""
        object.__setattr__(self, "_wgrad_hooks", [*self.__dict__.get("_wgrad_hooks", ()), hook])

    @property
    def pending_backward_dw(self) -> int:
        """How many calls of :meth:`backward_dw` are due: one for each backward."""
        return _C.pending_dw(getattr(self, self._weight_names()[0]))

    # ---- frameworks find on the weight whose turn its hook is -----------------------------------------------------

    def _mark_weight(self) -> None:
        fields = self._wgrad_op()._op.fields()
        delay, before = fields["delay_wgrad_compute"], self._delays_wgrad
        object.__setattr__(self, "_wgrad_bypasses_autograd", delay or fields["accumulate_into_main_grad"])
        object.__setattr__(self, "_delays_wgrad", delay)
        for name in self._weight_names() if delay or before else ():
            self._mark(self._parameters.get(name), delay)

    def _main_grad_parameters(self) -> list[torch.nn.Parameter | None]:
        """The Parameters whose gradients go to ``main_grad``."""
        accumulates = self._wgrad_op()._op.fields()["accumulate_into_main_grad"]
        return [self._parameters.get(name) for name in self._weight_names()] if accumulates else []

    def _weight_names(self) -> list[str]:
        return [name for name, *_, main_grad in self._wgrad_op()._op.params() if main_grad]

    def _mark(self, weight: Any, delay: bool) -> None:
        if weight is None:
            return
        if delay and type(weight).__name__ == "DTensor":
            raise NotImplementedError(
                f"{type(self).__name__}: delay_wgrad_compute is on, but the weight is a DTensor; a sharded weight "
                "takes its gradient in backward. Make the module with delay_wgrad_compute=False"
            )
        weight.skip_backward_post_hook = delay

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_description_version" or (
            self._delays_wgrad and name in self._weight_names()
        ):  # a field or the weight was set
            self._mark_weight()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_weight()

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is not None:
            self._mark_weight()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True):
        super()._apply(fn, recurse)
        self._mark_weight()
        return self

    def reset_parameters(self, device: torch.device | str | None = None) -> None:
        super().reset_parameters(device)
        self._mark_weight()
