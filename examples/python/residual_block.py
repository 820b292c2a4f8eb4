"""A norm-MLP block with its residual in a named channel, its plan, and the same computation in plain torch."""

import torch

from torchweft import ops

HIDDEN, INNER = 64, 256


def block() -> ops.Sequential:
    """y = x + W2 swiglu(W1 norm(x)), as one pipeline with one autograd node."""
    return ops.Sequential(
        ops.MakeExtraOutput(in_place=True).set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(HIDDEN),
        ops.Linear(HIDDEN, 2 * INNER, bias=False),
        ops.SwiGLU(),
        ops.Linear(INNER, HIDDEN, bias=False),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def plain(module: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
    gamma, w1, w2 = module.parameters()
    h = torch.nn.functional.rms_norm(x, (HIDDEN,), gamma, eps=1e-5)
    a, b = torch.nn.functional.linear(h, w1).chunk(2, dim=-1)
    return x + torch.nn.functional.linear(torch.nn.functional.silu(a) * b, w2)


torch.manual_seed(0)
module = block()
x = torch.randn(16, HIDDEN, requires_grad=True)
print(module.explain(x))

y = module(x)
assert y.grad_fn is not None
print("autograd node:", y.grad_fn.name())
y.square().mean().backward()
ours = [x.grad, *(p.grad for p in module.parameters())]

x.grad = None
module.zero_grad()
plain(module, x).square().mean().backward()
eager = [x.grad, *(p.grad for p in module.parameters())]
for one, other in zip(ours, eager, strict=True):
    assert one is not None and other is not None
    torch.testing.assert_close(one, other)
print("all gradients match plain torch")
