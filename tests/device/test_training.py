"""Training on a device: the values of the CPU, and what training uses of `torch.cuda`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

GPU = torch.device("cuda", 1)


def both(model, x):
    """Runs a step on the CPU and on the device; returns their outputs and gradients."""
    found = []
    for place in ("cpu", GPU):
        m = copy.deepcopy(model).to(place)
        y = m(x.to(place).requires_grad_())
        y.square().mean().backward()
        found.append([y, *(p.grad for p in m.parameters())])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_transformer_layer_equals_the_cpu(dtype):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=dtype)
    for a, b in zip(*both(layer, torch.randn(2, 5, 16, dtype=dtype)), strict=True):
        assert b.device == GPU
        tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}  # of attention's order of sums
        torch.testing.assert_close(b.cpu(), a, **tolerance)


def test_convolutions_equal_the_cpu():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(8, 4, 2, 2),
        nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip
    for a, b in zip(*both(model, torch.randn(2, 3, 8, 8)), strict=True):
        assert torch.equal(a, b.cpu())


OPTIMIZERS = {
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=0.1, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.1, **k),
}


@pytest.mark.parametrize("kind", ["foreach", "fused", "plain"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_equal_the_cpu(optimizer, kind):
    options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "plain": {"foreach": False}}[kind]
    results = []
    for place in ("cpu", GPU):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(place)
        steps = optimizer(model.parameters(), **options)
        schedule = torch.optim.lr_scheduler.StepLR(steps, 2, 0.5)
        for i in range(4):
            steps.zero_grad()
            model(torch.full((3, 4), float(i), device=place)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            schedule.step()
        results.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_capturable_and_tensor_learning_rates():
    p = nn.Parameter(torch.ones(3, device=GPU))
    p.grad = torch.ones_like(p)
    for options in (
        {"capturable": True},
        {"lr": torch.tensor(0.1, device=GPU), "capturable": True, "foreach": True},
        {"lr": torch.tensor(0.1)},
    ):
        torch.optim.Adam([p], **options).step()
    assert p.device == GPU and (p < 1).all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.GELU()).to(GPU)
    x = torch.randn(3, 4, device=GPU, requires_grad=True)
    state = torch.cuda.get_rng_state(GPU)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.cuda.set_rng_state(state, GPU)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, expected), "dropout drew other numbers when it was computed again"


def test_hooks_and_save_on_cpu():
    x = torch.randn(3, 4, device=GPU, requires_grad=True)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.device) or t.cpu(), lambda t: t.to(GPU)):
        (x * x).sum().backward()
    assert set(seen) == {GPU} and torch.equal(x.grad, 2 * x)
    for pinned in (True, False):
        x.grad = None
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            (x * x).sum().backward()
        assert torch.equal(x.grad, 2 * x) and x.grad.device == GPU
    y = x * 2
    y.register_hook(lambda g: seen.append(g.device))
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.device))
    y.sum().backward()
    assert seen[-2:] == [GPU, GPU]


def test_second_derivatives():
    x = torch.randn(3, device=GPU, requires_grad=True)
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    g.sum().backward()
    torch.testing.assert_close(x.grad, 6 * x)
    assert torch.autograd.gradcheck(
        lambda a: F.gelu(a).sum(), torch.randn(3, device=GPU, dtype=torch.float64, requires_grad=True)
    )
    assert torch.autograd.functional.hessian(lambda a: (a**3).sum(), x.detach()).device == GPU


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_autocast(dtype):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(GPU), torch.randn(2, 8, device=GPU)
    with torch.autocast("cuda", dtype=dtype):
        y = model[0](x)
        assert y.dtype == (dtype or torch.float16) and model[1](y).dtype == torch.float32
        assert y.softmax(-1).dtype == torch.float32 and (x @ x.t()).dtype == y.dtype
        assert nn.Linear(8, 8)(x.cpu()).dtype == torch.float32, "autocast of cuda changed a tensor of the CPU"
    with torch.cuda.amp.autocast(enabled=False):
        assert model[0](x).dtype == torch.float32


def test_gradient_scaler():
    model = nn.Linear(4, 4).to(GPU)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    before = model.weight.detach().clone()
    with torch.autocast("cuda"):
        loss = model(torch.ones(2, 4, device=GPU)).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before) and scaler.get_scale() == 2.0**16
    model.weight.grad.fill_(float("inf"))
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(2, 4, device=GPU)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before) and scaler.get_scale() == 2.0**15, "a step with infinities was taken"


def test_threads_of_autograd_use_the_device_of_each_node():
    x = torch.randn(4, requires_grad=True)
    seen = []
    y = sum((x.cuda(i) * i).exp().cuda(0) for i in range(4))
    y.register_hook(lambda g: seen.append(torch.cuda.current_device()))
    y.sum().backward()
    torch.testing.assert_close(x.grad, sum(i * (x * i).exp() for i in range(4)).detach())


def test_profiler():
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        torch.ones(3, device=GPU) + 1
    assert "aten::add" in profile.key_averages().table()
