"""`torch.compile` of functions on a device."""

import pytest
import torch
from torch import nn

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", "aot_eager_decomp_partition"])
def test_backends_without_a_compiler_are_exact(backend):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)).to(GPU)
    x = torch.randn(4, 8, device=GPU)
    model(x).sum().backward()
    expected = [model(x), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    y = compiled(x)
    y.sum().backward()
    exact = backend != "aot_eager_decomp_partition"
    for a, b in zip([y, *(p.grad for p in model.parameters())], expected, strict=True):
        assert a.device == GPU
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if exact else {}))


def test_dynamic_shapes_and_breaks():
    @torch.compile(backend="aot_eager", dynamic=True)
    def f(x):
        y = x * 2
        if y.sum() > 0:
            y = y + torch.ones_like(y)
        return y

    for rows in (2, 3, 5):
        x = torch.full((rows, 2), 1.0, device=GPU)
        assert torch.equal(f(x), x * 3)


def test_inductor_runs_the_graph_as_it_is():
    def f(x):
        return (x * 2 + 1).softmax(-1)

    x = torch.randn(4, device=GPU)
    assert torch.equal(torch.compile(f)(x), f(x))
    assert torch.equal(torch.compile(f, mode="reduce-overhead")(x), f(x))
    assert torch.compile(lambda: torch.ones(2, device=GPU) + 1)().tolist() == [2, 2]


def test_export():
    layer = nn.Linear(4, 4).to(GPU)
    program = torch.export.export(layer, (torch.ones(2, 4, device=GPU),))
    x = torch.randn(2, 4, device=GPU)
    assert torch.equal(program.module()(x), layer(x))
