"""Common uses of torch modules with the module classes of torchweft.compat: threads, replaced submodules, patches."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch
from torch.func import functional_call
from torch.nn.utils import parametrize

from torchweft import ops
from torchweft.compat import (
    _grouped_linear,
    _layernorm_mlp,
    _linear,
    _multihead_attention,
    _norm,
    _transformer_layer,
)

ROWS, WIDTH, THREADS = 6, 8, 8

MODULES = {
    "Linear": lambda **o: _linear.Linear(WIDTH, WIDTH, **o),
    "Linear in parts": lambda **o: _linear.Linear(WIDTH, WIDTH, parameters_split=("q", "k"), **o),
    "LayerNormLinear": lambda **o: _linear.LayerNormLinear(WIDTH, WIDTH, **o),
    "LayerNormLinear in parts": lambda **o: _linear.LayerNormLinear(WIDTH, WIDTH, parameters_split=("q", "k"), **o),
    "LayerNormMLP": lambda **o: _layernorm_mlp.LayerNormMLP(WIDTH, 16, **o),
    "checkpointed LayerNormMLP": lambda **o: _layernorm_mlp.LayerNormMLP(WIDTH, 16, checkpoint=True, **o),
    "GroupedLinear": lambda **o: _grouped_linear.GroupedLinear(2, WIDTH, WIDTH, **o),
    "LayerNorm": lambda **o: _norm.LayerNorm(WIDTH, **o),
    "MultiheadAttention": lambda **o: _multihead_attention.MultiheadAttention(WIDTH, 2, attention_dropout=0.0, **o),
    "TransformerLayer": lambda **o: _transformer_layer.TransformerLayer(
        WIDTH, 16, 2, hidden_dropout=0.0, attention_dropout=0.0, **o
    ),
}
modules = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
# Modules that hold Parameters and run a pipeline. Norms are operations themselves.
HOLDERS = {name: make for name, make in MODULES.items() if "Linear" in name or "MLP" in name or "Norm" in name}
holders = pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)


def call(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, *([[4, 2]] if isinstance(module, _grouped_linear.GroupedLinear) else []))


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, 1, WIDTH, generator=torch.Generator().manual_seed(seed))


def other_values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(param) for name, param in module.named_parameters()}


def with_values(make, values: dict[str, torch.Tensor], x: torch.Tensor):
    """Returns output and gradients of a new module with these values."""
    module = make()
    module.load_state_dict(values)
    y = call(module, x)
    return y, torch.autograd.grad(y.sum(), list(module.parameters()))


def run_in_threads(functions):
    """Calls each function in its own thread at the same time and returns their results."""
    barrier, interval = Barrier(len(functions)), sys.getswitchinterval()

    def run(function):
        barrier.wait()
        return function()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(functions)) as pool:
            return list(pool.map(run, functions))
    finally:
        sys.setswitchinterval(interval)


# ---- threads ----


OPERATIONS = {
    "ops.Linear": lambda **o: ops.Linear(WIDTH, WIDTH, **o),
    "ops.Sequential": lambda **o: ops.Sequential(ops.RMSNorm(WIDTH, **o), ops.Linear(WIDTH, WIDTH, **o), ops.GELU()),
}


@pytest.mark.parametrize("make", (MODULES | OPERATIONS).values(), ids=MODULES | OPERATIONS)
@pytest.mark.parametrize("device", (None, "meta"))
def test_concurrent_first_calls_build_module_once(make, device):
    for _ in range(10):
        module = make(device=device)
        inputs = [rows(i) for i in range(THREADS)]
        found = run_in_threads([partial(call, module, x) for x in inputs])
        for x, y in zip(inputs, found, strict=True):
            torch.testing.assert_close(y, call(module, x), rtol=0, atol=0)


@holders
def test_replicas_in_threads_use_their_own_parameters(make):
    """Replicas as torch.nn.DataParallel makes them: the same attributes, different Parameters."""
    module, x = make(), rows()
    call(module, x)
    replicas, expected = [], []
    for _ in range(THREADS):
        replica = module._replicate_for_data_parallel()
        values = other_values(module)
        replica._parameters.update({name: torch.nn.Parameter(value) for name, value in values.items()})
        replicas.append(replica)
        expected.append(with_values(make, values, x))

    def work(replica):
        found = []
        for _ in range(20):
            y = call(replica, x)
            found.append((y, torch.autograd.grad(y.sum(), list(replica._parameters.values()), allow_unused=True)))
        return found

    for found, (y, grads) in zip(run_in_threads([partial(work, r) for r in replicas]), expected, strict=True):
        for each, each_grads in found:
            torch.testing.assert_close(each, y, rtol=0, atol=0)
            torch.testing.assert_close(each_grads, grads, rtol=0, atol=0)


# ---- replaced and patched modules ----


@holders
@pytest.mark.parametrize("called", (False, True))
def test_replaced_parameter_dict_is_used(make, called):
    module, x = make(), rows()
    if called:
        call(module, x)
    values = other_values(module)
    for prefix, child in module.named_modules():
        names = [name for name, _ in child.named_parameters(recurse=False)]
        own = {name: torch.nn.Parameter(values[f"{prefix}.{name}" if prefix else name]) for name in names}
        child._parameters = dict(child._parameters) | own
    y, grads = with_values(make, values, x)
    found = call(module, x)
    torch.testing.assert_close(found, y, rtol=0, atol=0)
    params = [module.get_parameter(name) for name in values]
    torch.testing.assert_close(torch.autograd.grad(found.sum(), params), grads, rtol=0, atol=0)


@modules
def test_functional_call_uses_given_parameters(make):
    module, x = make(), rows()
    before = call(module, x)
    values = {name: value.requires_grad_() for name, value in other_values(module).items()}
    extra = ([4, 2],) if isinstance(module, _grouped_linear.GroupedLinear) else ()
    found = functional_call(module, values, (x, *extra))
    y, grads = with_values(make, {name: value.detach() for name, value in values.items()}, x)
    torch.testing.assert_close(found, y, rtol=0, atol=0)
    if not getattr(module, "checkpoint", False):  # the recomputation in backward reads the module, as in torch
        torch.testing.assert_close(torch.autograd.grad(found.sum(), list(values.values())), grads, rtol=0, atol=0)
    torch.testing.assert_close(call(module, x), before, rtol=0, atol=0)


@modules
def test_patched_forward_is_called(make):
    module, x = make(), rows()
    y, forward = call(module, x), module.forward
    module.forward = lambda *args: 2 * forward(*args)
    torch.testing.assert_close(call(module, x), 2 * y, rtol=0, atol=0)
    if not isinstance(module, _grouped_linear.GroupedLinear):
        torch.testing.assert_close(torch.nn.Sequential(module)(x), 2 * y, rtol=0, atol=0)
    del module.forward
    torch.testing.assert_close(call(module, x), y, rtol=0, atol=0)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@holders
def test_parametrized_parameter_is_used(make):
    module, x = make(), rows()
    call(module, x)
    name, param = next(iter(module.named_parameters()))
    values = {key: value.detach().clone() for key, value in module.named_parameters()} | {name: 2 * param.detach()}
    parametrize.register_parametrization(module, name, Doubled())
    torch.testing.assert_close(call(module, x), with_values(make, values, x)[0], rtol=0, atol=0)
