"""install(cuda="cpu"): scripts that ask for CUDA run on the CPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import torchweft
from torchweft.compat import _cuda_on_cpu
from torchweft.compat import transformer_engine as te_compat

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch has CUDA")
DEVICES = ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 1))
SCRIPT = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

layer = te.LayerNormMLP(64, 128).cuda()
x = torch.randn(32, 64, device="cuda", requires_grad=True)
with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(margin=0, interval=1, fp8_format=Format.HYBRID)):
    y = layer(x)
y.sum().backward()
torch.cuda.synchronize()
print(x.grad.shape, y.device, torch.cuda.current_device())
"""


@pytest.fixture
def te():
    te_compat.install(cuda="cpu")
    yield importlib.import_module("transformer_engine.pytorch")
    te_compat.uninstall()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_devices_of_calls(te, device):
    x = torch.ones(2, device=device)
    assert x.device.type == "cpu" and x.to(device).device.type == "cpu" and x.to(device, torch.bfloat16).is_cpu
    assert torch.zeros_like(x, device=device).is_cpu and torch.tensor([1.0], device=device).is_cpu
    assert torch.device(torch.cuda.current_device()).type == "cpu" and te.Linear(2, 2, device=0).weight.is_cpu
    assert x.cuda() is x and torch.nn.Linear(2, 2).to(device).cuda(0).weight.is_cpu
    assert te.Linear(2, 2, device=device).weight.is_cpu
    with torch.device(device):
        assert torch.empty(3).is_cpu and te.Linear(2, 2).weight.is_cpu


def test_backward_of_functions_in_python(te):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * torch.full((), 2.0, device="cuda") + torch.zeros((), device=torch.cuda.current_device())

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        Function.apply(x).sum().backward()
    assert x.grad.tolist() == [4, 4]
    assert torch.autograd.grad(Function.apply(x).sum(), x)[0].tolist() == [2, 2]


def test_backward_after_one_of_two_redirections_is_removed(te):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            seen.append(dy.type())
            return dy

    class TypeMode(_cuda_on_cpu.CudaToCpuMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return "redirected" if func is torch.Tensor.type else super().__torch_function__(func, types, args, kwargs)

    seen, x = [], torch.ones(2, requires_grad=True)
    first = _cuda_on_cpu.CudaOnCpu(TypeMode())
    second = _cuda_on_cpu.CudaOnCpu()
    Function.apply(x).sum().backward()
    first.remove()
    Function.apply(x).sum().backward()
    second.remove()
    assert seen == ["redirected", "torch.FloatTensor"]


def test_removing_in_another_thread_raises_and_changes_nothing(te):
    found = []

    def remove():
        with pytest.raises(RuntimeError, match="another thread"):
            te_compat.uninstall()
        found.append(te_compat.installed())

    thread = threading.Thread(target=remove)
    thread.start()
    thread.join()
    assert found == [True] and torch.ones(1, device="cuda").is_cpu


BACKWARDS = [(owner, "_engine_run_backward") for owner in (torch.autograd, torch.autograd.graph)]
# A name may occur twice, as torch.cuda.random is where torch.cuda's functions come from.
ATTRIBUTES = [(owner, name) for owner, name, _ in _cuda_on_cpu._attributes()] + BACKWARDS
NAMES = [f"{owner.__name__}.{name}" for owner, name in ATTRIBUTES]


def own_values():
    """The attributes that each object has itself, without inherited ones."""
    return [vars(owner).get(name, "inherited") for owner, name in ATTRIBUTES]


def are_same(values, others):
    return all(one is other for one, other in zip(values, others, strict=True))


@pytest.mark.parametrize("order", ["first second", "second first"])
def test_every_attribute_is_restored_or_inherited_again(order):
    before = own_values()
    assert "inherited" in before
    redirections = {"first": _cuda_on_cpu.CudaOnCpu(), "second": _cuda_on_cpu.CudaOnCpu()}
    assert not any(old is new for old, new in zip(before, own_values(), strict=True))
    for name in order.split():
        redirections[name].remove()
    assert are_same(before, own_values()) and not _cuda_on_cpu._replacements


@pytest.mark.parametrize("owner, name", ATTRIBUTES, ids=NAMES)
def test_wrapper_of_another_library_stays_and_calls_the_original(monkeypatch, owner, name):
    calls = []
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: calls.append((args, kwargs)))
    before = own_values()
    te_compat.install(cuda="cpu")
    redirected = vars(owner)[name]

    def wrapper(*args, **kwargs):
        return redirected(*args, **kwargs)

    setattr(owner, name, wrapper)
    te_compat.uninstall()
    assert vars(owner)[name] is wrapper
    wrapper("cuda", device="cuda")
    assert calls == [(("cuda",), {"device": "cuda"})], "it redirects nothing"
    mine = ATTRIBUTES.index((owner, name))
    assert are_same(*(values[:mine] + values[mine + 1 :] for values in (before, own_values())))
    # What the wrapper held in place goes with the next removal.
    setattr(owner, name, redirected)
    te_compat.install(cuda="cpu")
    te_compat.uninstall()
    assert are_same(before, own_values()) and not _cuda_on_cpu._replacements


@pytest.mark.parametrize("order", ["first second", "second first"])
def test_wrapper_between_two_redirections_stays(order):
    before = own_values()
    first = _cuda_on_cpu.CudaOnCpu()
    inner = torch.load
    torch.load = wrapper = lambda *args, **kwargs: inner(*args, **kwargs)
    redirections = {"first": first, "second": _cuda_on_cpu.CudaOnCpu()}
    try:
        assert torch.load is not wrapper
        for name in order.split():
            redirections[name].remove()
        assert torch.load is wrapper
    finally:
        torch.load = inner
        _cuda_on_cpu.CudaOnCpu().remove()
    assert are_same(before, own_values())


def test_attribute_deleted_by_another_library_stays_deleted():
    original = vars(torch.nn.Module)["cuda"]
    te_compat.install(cuda="cpu")
    try:
        del torch.nn.Module.cuda
        te_compat.uninstall()
        assert not hasattr(torch.nn.Module, "cuda")
    finally:
        torch.nn.Module.cuda = original
        _cuda_on_cpu._replacements.clear()


def test_kept_objects_have_no_effect_after_uninstall():
    te_compat.install(cuda="cpu")
    mode = torch.overrides._get_current_function_mode()
    cuda, device, event, stream = torch.Tensor.cuda, torch.cuda.device, torch.cuda.Event, torch.cuda.Stream
    synchronize, x = torch.cuda.synchronize, torch.ones(1)
    assert isinstance(event(), event) and isinstance(torch.cuda.current_stream(), stream) and cuda(x) is x
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    with device(0):
        te_compat.uninstall()
    errors = (AssertionError, RuntimeError)
    for call in (lambda: cuda(x), synchronize, event, stream):
        with pytest.raises(errors, match=r"CUDA|dummy base class"):
            call()
    assert isinstance(device(0), torch.cuda.device)
    with mode, pytest.raises(errors, match="CUDA"):
        torch.ones(1, device="cuda")


def test_mode_removed_by_another_library():
    te_compat.install(cuda="cpu")
    with torch.overrides.TorchFunctionMode():
        mode = torch.overrides._get_current_function_mode_stack()[0]
        _cuda_on_cpu.remove_mode(mode)
        te_compat.uninstall()
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
    assert torch.overrides._get_current_function_mode() is None


def test_streams_and_events(te):
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    x = torch.ones(3)
    start.record()
    with torch.cuda.stream(stream), stream:
        stream.wait_stream(torch.cuda.current_stream())
        x.record_stream(stream)
        y = x + 1
    torch.cuda.current_stream().wait_event(stream.record_event())
    end.record(stream)
    end.synchronize()
    stream.synchronize()
    assert y.tolist() == [2, 2, 2] and end.query() and stream.query() and start.elapsed_time(end) > 0
    assert not torch.ones(1, pin_memory=True).is_pinned()


def test_process_group_with_nccl(te, tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group(
        "nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda")
    )
    try:
        assert torch.distributed.get_backend() == "gloo"
        assert torch.distributed.get_backend(torch.distributed.new_group([0], backend="nccl")) == "gloo"
        mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (1,))
        assert mesh.device_type == "cpu"
    finally:
        torch.distributed.destroy_process_group()


def test_other_strings_stay(te):
    assert torch.nn.functional.pad(torch.ones(1, 2), (1, 1), mode="constant").shape == (1, 4)
    assert torch.einsum("ab,bc->ac", torch.ones(2, 2), torch.ones(2, 2)).shape == (2, 2)


def test_autocast(te):
    linear, x = te.Linear(16, 16), torch.randn(4, 16)
    for region, dtype in (
        (torch.autocast("cuda", torch.bfloat16), torch.bfloat16),
        (torch.autocast("cuda"), torch.float16),
        (torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16), torch.bfloat16),
        (torch.autocast("cpu", torch.bfloat16), torch.bfloat16),
        (torch.autocast("cuda", torch.bfloat16, enabled=False), torch.float32),
    ):
        with region:
            assert linear(x).dtype == dtype and (x @ x.t()).dtype == dtype


def test_seeds(te):
    torch.cuda.manual_seed(5)
    first = torch.rand(3, device="cuda")
    torch.cuda.manual_seed_all(5)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    assert type(torch.cuda.current_device()) is int and torch.cuda.memory_allocated() == 0
    current = torch.cuda.current_device()
    assert torch.ones(1, device=current).is_cpu and torch.ones(1).to(current).is_cpu
    assert torch.nn.Linear(1, 1).to(current).weight.is_cpu and torch.nn.Linear(1, 1).to(device=current).weight.is_cpu
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first) and torch.cuda.device_count() == 1


def test_files_and_default_device(te, tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    for device in DEVICES:
        assert torch.load(tmp_path / "x.pt", map_location=device)["x"].is_cpu
    torch.set_default_device("cuda")
    try:
        assert torch.ones(1).is_cpu and te.Linear(2, 2).weight.is_cpu
    finally:
        torch.set_default_device(None)


def test_uninstall_restores():
    before = torch.Tensor.cuda, torch.nn.Module.cuda, torch.cuda.synchronize, torch.autocast.__init__
    te_compat.install(cuda="cpu")
    te_compat.install(cuda="cpu")  # the second call changes nothing
    te_compat.uninstall()
    assert before == (torch.Tensor.cuda, torch.nn.Module.cuda, torch.cuda.synchronize, torch.autocast.__init__)
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        torch.ones(1, device="cuda")


ORDER = """
import torch
from torchweft.compat import megatron, transformer_engine

def patched():
    functions = (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.manual_seed, torch.cuda.get_rng_state)
    return [torch.Tensor.cuda, torch.nn.Module.to, torch.load, *functions, torch.overrides._get_current_function_mode()]

before = patched()
for word in "{order}".split():
    owner, call = word.split(".")
    if owner == "te":
        transformer_engine.install(cuda="cpu") if call == "install" else transformer_engine.uninstall()
    else:
        getattr(megatron, call)()
transformer_engine.uninstall()
print(patched() == before)
"""


def last_line_with_megatron(code):
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        pytest.skip("megatron.core is not installed")
    environment = {**os.environ, "PYTHONPATH": str(Path(torchweft.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "order",
    [
        "te.install megatron.install te.uninstall megatron.uninstall",
        "megatron.install te.install megatron.uninstall te.uninstall",
    ],
)
def test_order_of_uninstall_does_not_matter(order):
    assert last_line_with_megatron(ORDER.format(order=order)) == "True"


def test_on_cpu_ends_only_what_it_began():
    code = """
from torchweft.compat import megatron

states = []
with megatron.on_cpu():
    with megatron.on_cpu():
        pass
    states.append(megatron.installed())
states.append(megatron.installed())
print(*states)
"""
    assert last_line_with_megatron(code) == "True False"


def test_mode_below_another_is_removed():
    te_compat.install(cuda="cpu")
    with torch.device("meta"):
        te_compat.uninstall()
        assert torch.empty(1).is_meta
    assert torch.empty(1).is_cpu and torch.overrides._get_current_function_mode() is None


def test_mistakes(monkeypatch):
    with pytest.raises(ValueError, match="cuda is 'gpu', expected 'cpu' or None"):
        te_compat.install(cuda="gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="only on machines without a GPU"):
        te_compat.install(cuda="cpu")
    assert not te_compat.installed()


def test_script_on_the_command_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(torchweft.__file__).parent.parent)}
    command = [sys.executable, "-m", "torchweft.compat", "--cuda-on-cpu", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "torch.Size([32, 64]) cpu 0\n", done.stderr
    without = subprocess.run(
        [c for c in command if c != "--cuda-on-cpu"], env=environment, capture_output=True, text=True
    )
    assert without.returncode and "CUDA" in without.stderr
