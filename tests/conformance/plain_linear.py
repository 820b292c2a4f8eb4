"""A linear in plain torch that keeps the weight-gradient contract, and one for each way to break it (FAULTS)."""

from __future__ import annotations

from functools import partial

import torch

FAULTS = {
    "adds": "adds to main_grad although it is to be overwritten",
    "alias": "returns main_grad itself as the gradient",
    "early": "computes a delayed gradient in backward",
    "fetches": "fetches main_grad in forward",
    "frozen": "computes the gradient of a frozen weight",
    "none": "returns None where a hook needs a dummy",
    "noise": "does not clear the dummy",
    "silent": "loses the gradient if main_grad is missing",
    "unflagged": "does not set grad_added_to_main_grad",
}


class Linear(torch.nn.Module):
    def __init__(
        self, inputs: int, outputs: int, bias: bool = False, accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False, fault: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs))
        self.accumulate, self.delay, self.fault = accumulate_into_main_grad, delay_wgrad_compute, fault
        self.queue: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "fetches":
            self.main_grad()
        return Product.apply(x, self.weight, self)

    def backward_dw(self) -> None:
        dw = self.queue.pop(0)
        if self.accumulate:
            self.write(dw)
        else:
            self.weight.grad = dw if self.weight.grad is None else self.weight.grad + dw

    def main_grad(self) -> torch.Tensor | None:
        if getattr(self.weight, "__fsdp_param__", False):
            self.weight.main_grad = self.weight.get_main_grad()
        return getattr(self.weight, "main_grad", None)

    def check(self) -> torch.Tensor | None:
        main_grad = self.main_grad()
        valid = main_grad is not None and main_grad.shape == self.weight.shape and main_grad.is_contiguous()
        if not valid and self.fault != "silent":
            raise RuntimeError("main_grad is missing, or has another shape, or is not contiguous")
        return main_grad if valid else None

    def write(self, dw: torch.Tensor) -> None:
        main_grad = self.check()
        if main_grad is None:
            return
        if getattr(self.weight, "overwrite_main_grad", False) and self.fault != "adds":
            main_grad.copy_(dw)
        else:
            main_grad.add_(dw)

    def gradient(self, dw: torch.Tensor) -> torch.Tensor | None:
        """What autograd gets."""
        weight, now = self.weight, not self.delay or self.fault == "early"
        if self.accumulate:
            self.check()
        if self.delay:
            self.queue.append(torch.zeros_like(dw) if self.fault == "early" else dw)
        if not self.accumulate:
            return dw if now else None
        if now:
            self.write(dw)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = self.fault != "unflagged"
        if self.fault in ("alias", "none"):
            return weight.main_grad if self.fault == "alias" else None
        zero = getattr(weight, "zero_out_wgrad", False) and self.fault != "noise"
        return torch.zeros_like(weight) if zero else torch.ones_like(weight)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, linear):
        ctx.save_for_backward(x, weight)
        ctx.linear = linear
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        dw = ctx.linear.gradient(dy.t() @ x) if wanted or ctx.linear.fault == "frozen" else None
        return dy @ weight, dw if wanted else None, None


for name in FAULTS:
    globals()[name] = partial(Linear, fault=name)
