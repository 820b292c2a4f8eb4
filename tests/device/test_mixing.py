"""Programs that mix devices: those that a GPU refuses raise torch's own error, the others equal the CPU.

`g`, `h` are on cuda:0, `o` on cuda:1, `c` on the CPU; each 4 x 4. `i` holds indices, `m` a mask, `s` has no dimensions.
"""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def tensors():
    torch.manual_seed(5)
    c, d = torch.rand(4, 4), torch.rand(4, 4)
    indices, mask = torch.tensor([2, 0, 1, 3]), torch.rand(4, 4) > 0.5
    return types.SimpleNamespace(
        c=c, d=d, g=c.cuda(), h=d.cuda(), o=c.cuda(1), i=indices, gi=indices.cuda(), m=mask, gm=mask.cuda(),
        s=torch.tensor(0.5), gs=torch.tensor(0.5, device="cuda"),
    )  # fmt: skip


def two(first="cuda:0", second="cpu"):
    return f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"


def argument(name, method, device="cpu", others="cuda:0"):
    return (
        f"Expected all tensors to be on the same device, but got {name} is on {device}, different from other tensors "
        f"on {others} (when checking argument in method wrapper_CUDA_{method})"
    )


WRONG = {
    # element by element: TensorIterator
    "add": (lambda t: t.g + t.c, two()),
    "radd": (lambda t: t.c + t.g, two()),
    "add_": (lambda t: t.g.add_(t.c), two()),
    "cpu.add_": (lambda t: t.c.add_(t.g), two()),
    "cpu scalar.add_": (lambda t: t.s.add_(t.gs), two()),
    "add.out": (lambda t: torch.add(t.g, t.h, out=t.c), two()),
    "mul": (lambda t: t.g * t.c, two()),
    "div": (lambda t: t.c / t.g, two()),
    "pow": (lambda t: t.g**t.c, two()),
    "maximum": (lambda t: torch.maximum(t.g, t.c), two()),
    "greater": (lambda t: t.g > t.c, two()),
    "logical_and": (lambda t: torch.logical_and(t.gm, t.m), two()),
    "atan2": (lambda t: torch.atan2(t.c, t.g), two()),
    "fmod": (lambda t: torch.fmod(t.g, t.c), two()),
    "lerp": (lambda t: torch.lerp(t.g, t.c, 0.5), two()),
    "addcmul": (lambda t: torch.addcmul(t.g, t.h, t.c), two()),
    "where": (lambda t: torch.where(t.gm, t.g, t.c), two()),
    "where condition": (lambda t: torch.where(t.m, t.g, t.h), two()),
    "outer": (lambda t: torch.outer(t.g[0], t.c[0]), two()),
    "allclose": (lambda t: torch.allclose(t.g, t.c), two()),
    "mse_loss": (lambda t: F.mse_loss(t.g, t.c), two()),
    "binary_cross_entropy": (lambda t: F.binary_cross_entropy(t.g, t.c), two()),
    "kl_div": (lambda t: F.kl_div(t.g, t.c, reduction="sum"), two()),
    "index_put values": (lambda t: t.g.index_put_((t.gi,), t.c), two()),
    "two scalars": (lambda t: torch.addcmul(t.g, t.s, t.s), "Trying to pass too many CPU scalars to non-CPU kernel!"),
    "other gpu": (lambda t: t.g + t.o, two(second="cuda:1")),
    "scalar of another gpu": (lambda t: t.g + t.o[0, 0], two(second="cuda:1")),
    # all arguments on one device: torch's generated check
    "mm": (lambda t: t.g @ t.c, argument("mat2", "mm")),
    "rmm": (lambda t: t.c @ t.g, argument("mat2", "mm", "cuda:0", "cpu")),
    "mm.out": (lambda t: torch.mm(t.g, t.h, out=t.c), argument("self", "mm_out_out", "cuda:0", "cpu")),
    "mm other gpu": (lambda t: t.g @ t.o, argument("mat2", "mm", "cuda:1")),
    "one by one mm": (lambda t: t.g[:1, :1] @ t.c[:1, :1], argument("mat2", "mm")),
    "linear": (lambda t: F.linear(t.g, t.c, t.c[0]), argument("mat1", "addmm", "cuda:0", "cpu")),
    "linear module": (lambda t: nn.Linear(4, 4)(t.g), argument("mat1", "addmm", "cuda:0", "cpu")),
    "bmm": (lambda t: torch.bmm(t.g[None], t.c[None]), argument("mat2", "bmm")),
    "dot": (lambda t: torch.dot(t.g[0], t.c[0]), argument("tensor", "_dot")),
    "cat": (lambda t: torch.cat([t.g, t.c]), argument("tensors", "cat")),
    "stack": (lambda t: torch.stack([t.g, t.c]), argument("tensors", "cat")),
    "cat other gpu": (lambda t: torch.cat([t.g, t.o]), argument("tensors", "cat", "cuda:1")),
    "index_select": (lambda t: t.g.index_select(0, t.i), argument("index", "_index_select")),
    "embedding": (lambda t: F.embedding(t.i, t.g), argument("index", "_index_select")),
    "embedding of the cpu": (lambda t: nn.Embedding(4, 2)(t.gi), argument("index", "_index_select", "cuda:0", "cpu")),
    "gather": (lambda t: t.g.gather(0, t.i[None]), argument("index", "gather")),
    "scatter": (lambda t: t.g.scatter(0, t.i[None], t.h), argument("index", "scatter_src")),
    "scatter_add": (lambda t: t.g.scatter_add(0, t.gi[None], t.c), argument("src", "scatter_add")),
    "index_add": (lambda t: t.g.index_add(0, t.gi, t.c), argument("source", "index_add")),
    "take": (lambda t: t.g.take(t.i), argument("index", "_take")),
    "nll_loss": (lambda t: F.nll_loss(t.g, t.i), argument("target", "nll_loss_forward")),
    "cross_entropy": (lambda t: F.cross_entropy(t.g, t.i), argument("target", "nll_loss_forward")),
    "layer_norm": (lambda t: F.layer_norm(t.g, (4,), t.c[0]), argument("weight", "_native_layer_norm")),
    "group_norm": (lambda t: F.group_norm(t.g, 2, t.c[0]), argument("weight", "_native_group_norm")),
    "clamp": (lambda t: t.g.clamp(min=t.s), argument("min", "clamp_Tensor")),
    "cross": (lambda t: torch.linalg.cross(t.g[:3], t.c[:3], dim=0), argument("other", "linalg_cross")),
    "solve": (lambda t: torch.linalg.solve(t.g, t.c), argument("B", "_linalg_solve_ex")),
    "bincount": (lambda t: torch.bincount(t.gi, t.c[0]), argument("weights", "_bincount")),
    "equal": (lambda t: torch.equal(t.g, t.c), argument("other", "_equal")),
    # checks of the operation itself
    "masked_fill": (
        lambda t: t.g.masked_fill(t.m, 0),
        "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
    ),
    "index of the cpu": (
        lambda t: t.c[t.gi],
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    ),
    "conv2d weight": (
        lambda t: F.conv2d(t.g[None, None], t.c[None, None]),
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
    ),
    "conv2d input": (
        lambda t: nn.Conv2d(1, 1, 2).cuda()(t.c[None, None]),
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
    ),
    "lstm": (
        lambda t: nn.LSTM(4, 2).cuda()(t.c),
        "not at the same device, found input tensor at cpu and parameter tensor at cuda:0",
    ),
    "sdpa": (
        lambda t: F.scaled_dot_product_attention(t.g[None, None], t.c[None, None], t.g[None, None]),
        "Expected query, key, and value to have the same device type, but got query.device: cuda:0 key.device: cpu",
    ),
    "grid_sample": (
        lambda t: F.grid_sample(t.g[None, None], t.c.view(1, 2, 4, 2)),
        argument("grid", "_grid_sampler_2d"),
    ),
    "quantile": (
        lambda t: t.g.quantile(t.s),
        "quantile() q tensor must be on the same device as the input tensor",
    ),
    "gradient": (
        lambda t: (t.g.requires_grad_() * 2).backward(t.c),
        "invalid gradient at index 0 - expected device cuda:0 but got cpu",
    ),
}  # fmt: skip

# Each takes a function that moves a tensor to the device, and tensors of the CPU.
LEGAL = {
    "add a scalar": lambda d, t: d(t.c) + t.s,
    "radd a scalar": lambda d, t: t.s + d(t.c),
    "sub": lambda d, t: t.s - d(t.c),
    "mul": lambda d, t: d(t.c) * t.s,
    "div": lambda d, t: d(t.c) / t.s,
    "rdiv": lambda d, t: t.s / d(t.c),
    "add_": lambda d, t: d(t.c).add_(t.s),
    "pow": lambda d, t: t.s ** d(t.c),
    "maximum": lambda d, t: torch.maximum(d(t.c), t.s),
    "fmod": lambda d, t: torch.fmod(d(t.c), t.s),
    "atan2": lambda d, t: torch.atan2(t.s, d(t.c)),
    "greater": lambda d, t: d(t.c) > t.s,
    "equal": lambda d, t: d(t.c) == t.s,
    "logical_and": lambda d, t: torch.logical_and(d(t.c), t.s),
    "addcmul": lambda d, t: torch.addcmul(d(t.c), d(t.d), t.s),
    "lerp": lambda d, t: torch.lerp(d(t.c), d(t.d), t.s),
    "integers": lambda d, t: d(t.i) + torch.tensor(2),
    "promotion": lambda d, t: d(t.i) * torch.tensor(1.5, dtype=torch.float64),
    "where a scalar": lambda d, t: torch.where(d(t.m), d(t.c), t.s),
    "where two scalars": lambda d, t: torch.where(d(t.m), t.s, t.s * 2),
    "index": lambda d, t: d(t.c)[t.i],
    "index a mask": lambda d, t: d(t.c)[t.m],
    "index two": lambda d, t: d(t.c)[t.i, t.i],
    "index both": lambda d, t: d(t.c)[d(t.i), t.i],
    "index a list": lambda d, t: d(t.c)[[1, 2]],
    "index a scalar": lambda d, t: d(t.c)[torch.tensor(1)],
    "set rows": lambda d, t: d(t.c).index_put_((t.i,), d(t.d)),
    "set a scalar": lambda d, t: d(t.c).index_put_((t.i,), t.s),
    "set a mask": lambda d, t: d(t.c).index_put_((t.m,), t.s),
    "accumulate": lambda d, t: d(t.c).index_put_((t.i,), d(t.d), accumulate=True),
    "masked_fill": lambda d, t: d(t.c).masked_fill(d(t.m), t.s),
    "fill_": lambda d, t: d(t.c).fill_(t.s),
    "copy_": lambda d, t: d(t.c).copy_(t.d),
    "copy_ back": lambda d, t: t.c.clone().copy_(d(t.d)),
    "copy_ converts": lambda d, t: d(t.c).half().copy_(t.d.double()),
    "to": lambda d, t: t.c.to(d(t.d)),
    "type_as": lambda d, t: t.i.type_as(d(t.d)),
    "data": lambda d, t: setattr(p := nn.Parameter(t.c.clone()), "data", d(t.d)) or p.detach(),
    "foreach scalar": lambda d, t: torch._foreach_mul([d(t.c), d(t.d)], t.s),
    "foreach pairs": lambda d, t: [x.cpu() for x in torch._foreach_add([d(t.c), t.c], [d(t.d), t.d])],
    "foreach norm": lambda d, t: [x.cpu() for x in torch._foreach_norm([d(t.c), t.c])],
    "clip gradients": lambda d, t: clipped([d(t.c), t.d]),
    "optimizer": lambda d, t: stepped([d(t.c), t.d]),
    "packed lengths": lambda d, t: nn.utils.rnn.pack_padded_sequence(d(t.c), torch.tensor([4, 3, 2, 1])).data,
    "ctc lengths": lambda d, t: F.ctc_loss(
        d(t.c.log_softmax(1)[:, None]), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    "repeat_interleave": lambda d, t: torch.repeat_interleave(d(t.c), 2, dim=0),
    "tensor_split": lambda d, t: torch.tensor_split(d(t.c), torch.tensor([1, 3])),
    "item": lambda d, t: t.c * d(t.d).sum().item(),
    "slices by a tensor": lambda d, t: d(t.c)[torch.tensor(1) :],
    "normal": lambda d, t: torch.full_like(d(t.c), t.s.item()),
    "gradient of a scalar": lambda d, t: gradient_of_scalar(d(t.c), t.s),
    "new tensor": lambda d, t: d(t.c).new_tensor([1.0, 2.0]) + d(t.c)[0, :2],
    "module buffer": lambda d, t: nn.BatchNorm1d(4).to(d(t.c).device).eval()(d(t.c)),
    "searchsorted": lambda d, t: torch.searchsorted(d(t.c[0].sort().values), 0.5),
}


def clipped(gradients):
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    norm = nn.utils.clip_grad_norm_(parameters, 0.1)
    return [norm.cpu(), *(p.grad.cpu() for p in parameters)]


def stepped(values):
    parameters = [nn.Parameter(v.clone()) for v in values]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for p in parameters:
        p.square().sum().backward()
    optimizer.step()
    return [p.detach().cpu() for p in parameters]


def gradient_of_scalar(x, scalar):
    scalar = scalar.clone().requires_grad_()
    (x * scalar).sum().backward()
    return scalar.grad


@pytest.mark.parametrize("program, message", WRONG.values(), ids=WRONG)
def test_wrong_mixing_raises_the_error_of_a_gpu(program, message):
    with pytest.raises(RuntimeError) as raised:
        program(tensors())
    assert message in str(raised.value)


@pytest.mark.parametrize("program", LEGAL.values(), ids=LEGAL)
def test_legal_mixing_equals_the_cpu(program):
    expected, found = program(lambda t: t.clone(), tensors()), program(lambda t: t.cuda(), tensors())
    pairs = zip(found, expected, strict=True) if isinstance(found, list | tuple) else [(found, expected)]
    for a, b in pairs:
        assert torch.equal(a.cpu(), b) and a.dtype == b.dtype


def test_counts():
    assert len(WRONG) >= 50 and len(LEGAL) >= 50
