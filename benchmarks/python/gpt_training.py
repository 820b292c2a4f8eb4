"""Training steps of the models of gpt_models.py: forward, backward, gradient clipping and AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpt_models import Config, Model, copy_parameters, initialize, plain_model, weft_model

PRECISIONS = ("bf16", "main_grad", "fp32")
VARIANTS = ("eager", "compile", "weft", "weft compiled")
MAX_NORM = 1.0


@dataclass(frozen=True)
class Step:
    """What a step computed before it updated the parameters."""

    loss: float
    norm: float  # of all gradients


class Training:
    """A model with its optimizer; each step draws new random tokens, the same for every variant.

    bf16, fp32: parameters, gradients and optimizer state have this dtype.
    main_grad: parameters are bf16. Gradients are added to a float32 `main_grad` per parameter, and AdamW updates
    float32 master weights. weft's linears add their weight gradients inside the GEMM; a hook adds all others.
    """

    def __init__(self, c: Config, variant: str, precision: str) -> None:
        self.config, self.main_grad = c, precision == "main_grad"
        self.model = build_model(c, variant, precision)
        self.call = torch.compile(self.model) if "compile" in variant else self.model
        self.parameters = list(self.model.parameters())
        self.trained = [make_master(p) for p in self.parameters] if self.main_grad else self.parameters
        adamw = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        self.optimizer = torch.optim.AdamW(self.trained, **adamw)
        self.generator = torch.Generator().manual_seed(1)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        text = torch.randint(c.vocabulary, (c.batch, c.tokens + 1), generator=self.generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step(self) -> Step:
        self.optimizer.zero_grad(set_to_none=not self.main_grad)
        loss = self.call(*self.batch())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained, MAX_NORM)
        self.optimizer.step()
        if self.main_grad:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.trained)
        return Step(loss.item(), norm.item())

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that a step allocates and the next one frees."""
        return 0 if self.main_grad else sum(p.nbytes for p in self.parameters)


def build_model(c: Config, variant: str, precision: str) -> Model:
    """Returns the model of a variant; the parameters are the same for every variant."""
    torch.manual_seed(0)
    plain = plain_model(c)
    initialize(plain)
    model = plain
    if variant.startswith("weft"):
        model = weft_model(c, precision == "main_grad")
        copy_parameters(plain, model)
    return model.to(torch.float32 if precision == "fp32" else torch.bfloat16)


def make_master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Returns the float32 master weight of a parameter; its gradient is the parameter's main_grad."""
    master = torch.nn.Parameter(parameter.detach().float())
    parameter.main_grad = master.grad = torch.zeros_like(master)
    parameter.register_post_accumulate_grad_hook(add_to_main_grad)
    return master


def add_to_main_grad(parameter: torch.nn.Parameter) -> None:
    if parameter.grad is not None:  # None if weft added the gradient itself
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
