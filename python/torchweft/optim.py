"""Adam with float32 state and master weights, on torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._process_groups import is_dtensor

__all__ = ["FusedAdam"]

_INFINITE_STEP = float("inf")  # 1 - beta**step is 1: no bias correction


def _local(t: torch.Tensor) -> torch.Tensor:
    """Returns t, or the local tensor of a DTensor."""
    return t.detach().to_local() if is_dtensor(t) else t  # type: ignore[attr-defined]


def _dense(t: torch.Tensor) -> torch.Tensor:
    """Returns t as float32 in row-major order, which torch's kernels assume; t itself if it is."""
    return t.float().contiguous()


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with the arguments of Transformer Engine's FusedAdam.

    Moments are float32 for parameters of any dtype. The gradient of a parameter is its `grad`; it is `main_grad` if
    `grad` is None or `grad_added_to_main_grad` is true. :meth:`zero_grad` sets `main_grad` to zero.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta**step.
        betas: factors of the running averages of the gradient and of its square.
        eps: added to the square root of the second moment.
        adam_w_mode: decouple weight decay from the gradient (AdamW); False adds it to the gradient (Adam).
        weight_decay: factor of the weight decay.
        amsgrad: not supported.
        set_grad_none: None or True: :meth:`zero_grad` sets `grad` to None; False: to zero.
        capturable: not supported.
        master_weights: keep a float32 copy of each parameter that is not float32, update it, and round it to the
            parameter. Otherwise each step rounds the parameter itself.
        master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype: only ``torch.float32`` is supported.
        use_decoupled_grad: read `decoupled_grad` instead of `grad` and `main_grad`.
        store_param_remainders: not supported.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        set_grad_none: bool | None = None,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        unsupported = {"amsgrad": amsgrad, "capturable": capturable, "store_param_remainders": store_param_remainders}
        for name, value in unsupported.items():
            if value:
                raise NotImplementedError(f"FusedAdam: {name}=True is not supported. Leave it out.")
        dtypes = {
            "master_weight_dtype": master_weight_dtype,
            "exp_avg_dtype": exp_avg_dtype,
            "exp_avg_sq_dtype": exp_avg_sq_dtype,
        }
        for name, dtype in dtypes.items():
            if dtype != torch.float32:
                raise NotImplementedError(f"FusedAdam: {name} is {dtype}, expected torch.float32.")
        for name, number in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if number < 0:
                raise ValueError(f"FusedAdam: {name} is {number}, expected 0 or more.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"FusedAdam: betas is {betas}, expected two numbers from 0 to below 1.")
        self.adam_w_mode, self.master_weights = adam_w_mode, master_weights
        self.use_decoupled_grad, self.set_grad_none = use_decoupled_grad, set_grad_none is not False
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**options, "weight_decay": weight_decay})

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Removes the gradients, and sets `main_grad` to zero."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
        gradients = (getattr(p, "main_grad", None) for group in self.param_groups for p in group["params"])
        if found := [g for g in gradients if g is not None]:
            torch._foreach_zero_(found)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. Returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            gradients = {p: g for p in group["params"] if (g := self._gradient(p)) is not None}
            if gradients:
                self._update(gradients, group)
        return loss

    def _gradient(self, p: torch.Tensor) -> torch.Tensor | None:
        if self.use_decoupled_grad:
            return getattr(p, "decoupled_grad", None)
        dummy = p.grad is None or getattr(p, "grad_added_to_main_grad", False)
        return getattr(p, "main_grad", p.grad) if dummy else p.grad

    def _state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[p]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(p, dtype=torch.float32, memory_format=torch.contiguous_format)
        if self.master_weights and p.dtype != torch.float32 and "master_param" not in state:
            state["master_param"] = _dense(p.detach())
        return state

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        """Creates the state of a parameter: its moments are zero, its master weight is its value.

        Args:
            param: parameter of this optimizer.
            store_param_remainders: not supported.
        """
        if store_param_remainders:
            raise NotImplementedError("FusedAdam: store_param_remainders=True is not supported. Leave it out.")
        self._state(param)

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """Returns a state of a parameter, ``"exp_avg"``, ``"exp_avg_sq"`` or ``"master_param"``; none has a scale."""
        if state_name not in self.state.get(param, {}):
            raise ValueError(f"FusedAdam: the parameter has no state {state_name!r}. Call initialize_state first.")
        state: torch.Tensor = self.state[param][state_name]
        return state

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Copies `unscaled_state` to a state of a parameter.

        Args:
            param: parameter of this optimizer.
            state_name: as in :meth:`get_unscaled_state`.
            unscaled_state: its value, of the shape of the parameter.
        """
        state = self._state(param)
        if state_name not in state or unscaled_state.shape != param.shape:
            raise ValueError(
                f"FusedAdam: state {state_name!r} of shape {list(unscaled_state.shape)} for a parameter of shape "
                f"{list(param.shape)}; expected its shape, and one of {', '.join(state)}."
            )
        state[state_name].copy_(unscaled_state)

    def _update(self, gradients: dict[torch.Tensor, torch.Tensor], group: dict[str, Any]) -> None:
        params = [_local(p) for p in gradients]
        states = [{name: _local(t) for name, t in self._state(p).items()} for p in gradients]
        weights = [_dense(state.get("master_param", p)) for p, state in zip(params, states, strict=True)]
        step = torch.tensor(group["step"] if group["bias_correction"] else _INFINITE_STEP, dtype=torch.float32)
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        kernel(
            weights,
            [_dense(_local(g)) for g in gradients.values()],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        copied = [i for i, (p, w) in enumerate(zip(params, weights, strict=True)) if w is not p]
        if copied:
            torch._foreach_copy_([params[i] for i in copied], [weights[i] for i in copied])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; moments and master weights stay float32 whatever the dtype of the parameter."""
        given: list[dict[str, Any]] = []  # after the hooks of others
        before = self.register_load_state_dict_pre_hook(lambda _, state: given.append(state))
        after = self.register_load_state_dict_post_hook(lambda _: self._restore_float32(given[0]), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _restore_float32(self, state_dict: dict[str, Any]) -> None:
        """Replaces the state that torch has cast to the dtypes of the parameters."""
        identifiers = (i for group in state_dict["param_groups"] for i in group["params"])
        parameters = (p for group in self.param_groups for p in group["params"])
        for i, p in zip(identifiers, parameters, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                self.state[p][name] = _dense(value.to(p.device)).clone()

    def __getstate__(self) -> dict[str, Any]:
        names = ("adam_w_mode", "master_weights", "use_decoupled_grad", "set_grad_none")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}
