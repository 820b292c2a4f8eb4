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
    "last": "keeps only the last of several delayed gradients",
    "late": "checks main_grad only in backward_dw()",
    "none": "returns None where a hook needs a dummy",
    "noise": "does not clear the dummy",
    "once": "sets grad_added_to_main_grad in the first backward only",
    "sets": "a delayed gradient replaces weight.grad",
    "silent": "loses the gradient if main_grad is missing",
    "stale": "keeps the first tensor that get_main_grad() returned",
    "twice": "overwrites main_grad at each use of the weight in a backward",
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
        self.queue: list[tuple[int, torch.Tensor]] = []  # (number of the backward, gradient)
        self.written = -1  # number of the backward whose gradient main_grad has
        self.flagged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "fetches":
            self.main_grad()
        return Product.apply(x, self.weight, self)

    def backward_dw(self) -> None:
        """Computes the gradients of the oldest backward that waits."""
        oldest = self.queue[0][0]
        while self.queue and self.queue[0][0] == oldest:
            number, dw = self.queue.pop(0)
            if self.accumulate:
                self.write(number, dw)
            else:
                add = self.weight.grad is not None and self.fault != "sets"
                self.weight.grad = self.weight.grad + dw if add else dw

    def main_grad(self) -> torch.Tensor | None:
        if getattr(self.weight, "__fsdp_param__", False) and not (self.fault == "stale" and self.written >= 0):
            self.weight.main_grad = self.weight.get_main_grad()
        return getattr(self.weight, "main_grad", None)

    def check(self, main_grad: torch.Tensor | None) -> torch.Tensor | None:
        valid = main_grad is not None and main_grad.numel() == self.weight.numel() and main_grad.is_contiguous()
        if not valid and self.fault != "silent":
            raise RuntimeError("main_grad is missing, or has another number of elements, or is not contiguous")
        return main_grad if valid else None

    def write(self, number: int, dw: torch.Tensor) -> None:
        main_grad = self.check(self.main_grad())
        if main_grad is None:
            return
        overwrite = getattr(self.weight, "overwrite_main_grad", False) and self.fault != "adds"
        if overwrite and (self.written != number or self.fault == "twice"):
            main_grad.copy_(dw)
        else:
            main_grad.add_(dw)
        self.written = number

    def gradient(self, dw: torch.Tensor) -> torch.Tensor | None:
        """What autograd gets."""
        weight, number = self.weight, torch._C._current_graph_task_id()
        now = not self.delay or self.fault == "early"
        fetched = getattr(weight, "__fsdp_param__", False)
        if self.accumulate and not fetched and self.fault != "late":
            self.check(self.main_grad())
        if self.delay:
            kept = [] if self.fault == "last" else self.queue
            self.queue = [*kept, (number, torch.zeros_like(dw) if self.fault == "early" else dw)]
        if not self.accumulate:
            return dw if now else None
        if now:
            self.write(number, dw)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        if self.fault != "unflagged" and not (self.fault == "once" and self.flagged):
            weight.grad_added_to_main_grad = self.flagged = True
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
