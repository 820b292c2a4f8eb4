"""Adam with float32 state and master weights, on torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ._process_groups import is_dtensor

__all__ = ["FusedAdam"]

_INFINITE_STEP = float("inf")  # 1 - beta**step is 1: no bias correction
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # float32 holds their values
_OPTIONS = ("lr", "betas", "eps", "weight_decay")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATES = (*_MOMENTS, "master_param")
_CONVERT = "Convert it with .to(torch.float32), or use an optimizer of torch."


def _local(t: torch.Tensor) -> torch.Tensor:
    """Returns t, or the local tensor of a DTensor."""
    return t.detach().to_local() if is_dtensor(t) else t  # type: ignore[attr-defined]


def _dense(t: torch.Tensor) -> torch.Tensor:
    """Returns t as float32 in row-major order, which torch's kernels assume; t itself if it is."""
    return t.float().contiguous()


def _check_values(t: Any, who: Callable[[], str], cure: str) -> None:
    """Raises unless t is a dense tensor whose values float32 holds. `who` returns what messages call it."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"FusedAdam: {who()} is {t!r}, expected a tensor. {cure}")
    if t.dtype not in _DTYPES:
        raise TypeError(f"FusedAdam: {who()} is {t.dtype}, expected float32, bfloat16 or float16. {cure}")
    if t.layout != torch.strided:
        raise TypeError(f"FusedAdam: {who()} has layout {t.layout}, expected torch.strided. {cure}")


def _check_shape(t: torch.Tensor, p: torch.Tensor, who: Callable[[], str], cure: str) -> None:
    """Raises unless t has the shape and the placements of p; a tensor beside a DTensor has that of its local tensor."""
    shape = p.shape if is_dtensor(t) else _local(p).shape
    if t.shape != shape:
        raise ValueError(
            f"FusedAdam: {who()} has shape {list(t.shape)}, expected {list(shape)}, the shape of the parameter. {cure}"
        )
    of_t, of_p = (getattr(tensor, "placements", None) for tensor in (t, p))
    if is_dtensor(t) and of_t != of_p:
        raise ValueError(
            f"FusedAdam: {who()} has placements {of_t}, expected {of_p}, those of the parameter. Redistribute it."
        )


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with the arguments of Transformer Engine's FusedAdam.

    Parameters and gradients are dense and float32, bfloat16 or float16; moments are float32. The gradient of a
    parameter is its `grad`; it is `main_grad` if `grad` is None or `grad_added_to_main_grad` is true.
    :meth:`zero_grad` sets `main_grad` to zero.

    ``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` change `grad` only. Clip what
    :meth:`gradients` returns; the user guide has an example. ``GradScaler.step`` raises if the gradient of a
    parameter is `main_grad` or `decoupled_grad`.

    :meth:`load_state_dict` also loads the state of torch's AdamW, or of torch's Adam. These do not load the state of
    FusedAdam, which has one step per group instead of one per parameter, and raise a KeyError.

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
        self.adam_w_mode, self.master_weights = adam_w_mode, master_weights
        self.use_decoupled_grad, self.set_grad_none = use_decoupled_grad, set_grad_none is not False
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**options, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters; its first step is step 1.

        Args:
            param_group: `params`, and options that differ from those of the optimizer.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not group[name] >= 0:
                raise ValueError(f"FusedAdam: {name} is {group[name]}, expected 0 or more.")
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"FusedAdam: betas is {betas}, expected two numbers from 0 to below 1.")
        for p in group["params"]:
            self._check_parameter(p)

    def _check_parameter(self, p: torch.Tensor) -> None:
        _check_values(p, partial(self._name, p), _CONVERT)

    def _name(self, p: torch.Tensor, of: str = "") -> str:
        """Returns what messages call a parameter, or with `of` something that belongs to it."""
        for index, group in enumerate(self.param_groups):
            for i, other in enumerate(group["params"]):
                if other is p:
                    names = group.get("param_names")
                    return f"{of}parameter {names[i] if names else f'{i} of group {index}'}"
        return f"{of}a parameter of no group"

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
        found = [self._checked_gradients(group) for group in self.param_groups]  # raises before anything is updated
        for group, gradients in zip(self.param_groups, found, strict=True):
            group["step"] = group.get("step", 0) + 1
            if gradients:
                self._update(gradients, group)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether :meth:`step` divides gradients by the scale. ``GradScaler.step`` reads it before anything else.

        Raises:
            NotImplementedError: if :meth:`step` reads gradients that the scaler does not divide either.
        """
        for p in (p for group in self.param_groups for p in group["params"]):
            if (gradient := self._gradient(p)) is not None and gradient is not p.grad:
                name = "decoupled_grad" if self.use_decoupled_grad else "main_grad"
                raise NotImplementedError(
                    f"FusedAdam: GradScaler is not supported for {name}, the gradient of {self._name(p)}: it divides "
                    "only grad by the scale, and looks for infinities only there. Train in bfloat16 without a "
                    "GradScaler, or create the module without accumulate_into_main_grad (fuse_wgrad_accumulation)."
                )
        return False

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients that :meth:`step` reads, for functions that change them, such as clipping."""
        found = (self._gradient(p) for group in self.param_groups for p in group["params"])
        return [gradient for gradient in found if gradient is not None]

    def _gradient(self, p: torch.Tensor) -> torch.Tensor | None:
        if self.use_decoupled_grad:
            return getattr(p, "decoupled_grad", None)
        dummy = p.grad is None or getattr(p, "grad_added_to_main_grad", False)
        return getattr(p, "main_grad", p.grad) if dummy else p.grad

    def _checked_gradients(self, group: dict[str, Any]) -> dict[torch.Tensor, torch.Tensor]:
        """Returns the parameters of a group that have a gradient, and the gradients.

        Raises:
            TypeError: if a dtype or a layout is not supported.
            ValueError: if a gradient or a state has another shape than its parameter.
        """
        found: dict[torch.Tensor, torch.Tensor] = {}
        for p in group["params"]:
            if (gradient := self._gradient(p)) is None:
                continue
            self._check_parameter(p)
            who = partial(self._name, p, "the gradient of ")
            _check_values(gradient, who, "Convert it, or create it dense and float32.")
            if gradient is not p.grad and gradient.dim() == 1 and gradient.numel() == p.numel():
                gradient = gradient.reshape(p.shape)  # a linear adds to a flat main_grad, too
            _check_shape(gradient, p, who, "Create it with torch.zeros_like(parameter, dtype=torch.float32).")
            for key, state in self.state.get(p, {}).items():
                who = partial(self._name, p, f"{key} of ")
                _check_shape(state, p, who, "Create a new optimizer after changing the shape of a parameter.")
            found[p] = gradient
        return found

    def _state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[p]
        for name in _MOMENTS:
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
        self._check_parameter(param)
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
        _check_values(unscaled_state, partial(self._name, param, f"{state_name} of "), _CONVERT)
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
        # torch's fused kernels do not count what they change.
        torch.autograd.graph.increment_version([p for p in (*gradients, *params) if not p.is_inference()])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of FusedAdam, or of torch's AdamW or Adam. Moments and master weights stay float32 whatever
        the dtype of the parameter; missing master weights get the values of the parameter."""
        given: list[dict[str, Any]] = []  # after the hooks of others

        def convert(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            given.append(self._converted(state))
            return given[0]

        before = self.register_load_state_dict_pre_hook(convert)
        after = self.register_load_state_dict_post_hook(lambda _: self._restore_float32(given[0]), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _converted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a state dict with one step per group and none per parameter, without options of torch.

        Raises:
            NotImplementedError, TypeError, ValueError: if FusedAdam would not continue as the saved optimizer.
        """
        states, groups = dict(state_dict["state"]), []
        # torch raises later if the number of groups or parameters differs.
        for index, (given, own) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=False)):
            groups.append(self._converted_group(given, index))
            steps: set[int] = set()
            for i, p in zip(given["params"], own["params"], strict=False):
                if states.get(i):
                    state = {name: value for name, value in states[i].items() if value is not None}
                    if (step := state.pop("step", None)) is not None:
                        steps.add(int(step))
                    self._check_state(state, p)
                    states[i] = state
            if groups[-1].get("step") is not None:
                groups[-1]["step"] = int(groups[-1]["step"])
            elif len(steps) > 1:
                raise ValueError(
                    f"FusedAdam: the parameters of group {index} in the loaded state have made {sorted(steps)} steps, "
                    "expected one number, because FusedAdam has one step per group. Load it into torch.optim.AdamW."
                )
            elif steps:
                groups[-1]["step"] = steps.pop()
        groups.extend(state_dict["param_groups"][len(groups) :])
        return {**state_dict, "state": states, "param_groups": groups}

    def _converted_group(self, given: dict[str, Any], index: int) -> dict[str, Any]:
        who = f"FusedAdam: group {index} of the loaded state"
        if missing := [name for name in _OPTIONS if name not in given]:
            raise ValueError(
                f"{who} has no {', '.join(missing)}; expected the state of FusedAdam, torch's AdamW or torch's Adam."
            )
        for name in ("amsgrad", "maximize"):
            if given.get(name):
                raise NotImplementedError(f"{who} has {name}=True, which is not supported. Load it into torch's AdamW.")
        decoupled = given.get("decoupled_weight_decay", self.adam_w_mode)
        if decoupled != self.adam_w_mode and given["weight_decay"] != 0:
            raise ValueError(
                f"{who} has decoupled_weight_decay={decoupled}, expected {self.adam_w_mode}. "
                f"Create FusedAdam with adam_w_mode={decoupled}."
            )
        of_torch = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
        group = {name: value for name, value in given.items() if name not in of_torch}
        return {"bias_correction": True, **group}

    def _check_state(self, state: dict[str, Any], p: torch.Tensor) -> None:
        """Raises unless a loaded state is one of FusedAdam for this parameter."""
        if not set(_MOMENTS) <= set(state) <= set(_STATES):
            raise ValueError(
                f"FusedAdam: the loaded state of {self._name(p)} has {', '.join(sorted(state))}; expected "
                f"{', '.join(_MOMENTS)}, and master_param with master weights. Load the state of an Adam optimizer."
            )
        if "master_param" in state and p.dtype != torch.float32 and not self.master_weights:
            raise ValueError(
                f"FusedAdam: the loaded state of {self._name(p)} has a master_param, but master_weights is False. "
                "Create FusedAdam with master_weights=True, or remove master_param from the state."
            )
        for name, value in state.items():
            who = partial(self._name, p, f"the loaded {name} of ")
            _check_values(value, who, _CONVERT)
            _check_shape(value, p, who, "Load the state of an optimizer of this model.")

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
