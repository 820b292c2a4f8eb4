"""A micro-batch with `is_first_microbatch=False` multiplies by the current weight, however it has changed since the
first one. The exceptions are the rows of a table in docs/quantization.md.

The reference is a copy of the module, which has no quantized weights yet.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchweft
from torchweft.compat import transformer_engine as te_compat
from torchweft.optim import FusedAdam
from torchweft.recipe import DelayedScaling, Float8CurrentScaling

SIZE, RECIPE = 64, Float8CurrentScaling()
Change = Callable[[torch.nn.Module], object]


@pytest.fixture(name="te")
def installed() -> Iterator:
    te_compat.install()
    import transformer_engine.pytorch as te

    yield te
    te_compat.uninstall()


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def call(module: torch.nn.Module, first: bool | None, recipe=RECIPE) -> torch.Tensor:
    x = torch.randn(32, SIZE, generator=torch.Generator().manual_seed(5)).to(module.weight.dtype)
    with torchweft.autocast(recipe=recipe):
        return module(x, is_first_microbatch=first).detach()


def new() -> torch.Tensor:
    return torch.randn(SIZE, SIZE)


# ---- changes --------------------------------------------------------------------------------------------------------


def step_of(make: Callable[..., torch.optim.Optimizer], **options) -> Change:
    def change(module: torch.nn.Module) -> None:
        module.weight.grad = torch.randn_like(module.weight)
        make([module.weight], lr=0.5, **options).step()

    return change


class Halfway(torch.optim.Optimizer):
    """Changes `.data`, then raises."""

    def __init__(self, params, lr: float, fails: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.fails = fails

    def step(self, closure=None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(3)
        if self.fails:
            raise RuntimeError("halfway")


def step_that_raises(module: torch.nn.Module) -> None:
    with pytest.raises(RuntimeError, match="halfway"):
        Halfway([module.weight], 0.1, fails=True).step()


def step_with_closure(module: torch.nn.Module) -> None:
    Halfway([module.weight], 0.1).step(lambda: call(module, True))


def compiled_step(module: torch.nn.Module) -> None:
    module.weight.grad = torch.randn_like(module.weight)
    optimizer = torch.optim.AdamW([module.weight], lr=torch.tensor(0.5))
    torch.compile(optimizer.step, backend="aot_eager")()
    torch._dynamo.reset()


def step_of_a_flat_buffer(module: torch.nn.Module) -> None:
    flat = torch.nn.Parameter(module.weight.data.view(-1))
    flat.grad = torch.randn_like(flat)
    torch.optim.SGD([flat], lr=0.5, fused=True).step()


def main_grad_step(module: torch.nn.Module) -> None:
    module.weight.main_grad = torch.randn(SIZE, SIZE)
    FusedAdam(module.parameters(), lr=0.5).step()


def master_weight_step(module: torch.nn.Module) -> None:
    module.bfloat16()
    call(module, True)
    step_of(FusedAdam, master_weights=True)(module)


def round_trip(dtype: torch.dtype) -> Change:
    return lambda module: module.to(dtype).to(torch.float32)


def swapped(change: Change) -> Change:
    def with_swap(module: torch.nn.Module) -> None:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            change(module)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return with_swap


def load(module: torch.nn.Module, **options) -> None:
    module.load_state_dict({**module.state_dict(), "weight": new()}, **options)


def replaced_twice(module: torch.nn.Module) -> None:
    """The last Parameter may have the address, the memory and the version of the first."""
    for _ in range(2):
        module.weight = torch.nn.Parameter(module.weight.data.mul_(3))


def vector(module: torch.nn.Module) -> None:
    values = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    torch.nn.utils.vector_to_parameters(values.neg(), module.parameters())


def no_grad(change: Change) -> Change:
    return torch.no_grad()(change)


OPTIMIZERS = {name: getattr(torch.optim, name) for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD",
              "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")}  # fmt: skip
NOTICED: dict[str, Change] = {
    **{name: step_of(make) for name, make in OPTIMIZERS.items()},
    **{f"{name}(foreach=True)": step_of(make, foreach=True) for name, make in OPTIMIZERS.items()},
    **{f"{n}(fused=True)": step_of(OPTIMIZERS[n], fused=True) for n in ("Adagrad", "Adam", "AdamW", "SGD")},
    "Muon": step_of(torch.optim.Muon),
    "Adafactor": step_of(torch.optim.Adafactor),
    "FusedAdam": step_of(FusedAdam),
    "FusedAdam on main_grad": main_grad_step,
    "FusedAdam with master weights": master_weight_step,
    "step on .data": step_of(Halfway),
    "step that raises": step_that_raises,
    "step with a closure": step_with_closure,
    "compiled step": compiled_step,
    "step of a flat buffer": step_of_a_flat_buffer,
    "to(bfloat16).to(float32)": round_trip(torch.bfloat16),
    "to(float16).to(float32)": round_trip(torch.float16),
    "to, swapping": swapped(round_trip(torch.bfloat16)),
    "load_state_dict": load,
    "load_state_dict, assigning": lambda m: load(m, assign=True),
    "load_state_dict, swapping": swapped(load),
    "copy_": no_grad(lambda m: m.weight.copy_(new())),
    "detach().add_": lambda m: m.weight.detach().add_(1),
    "an element": no_grad(lambda m: m.weight[3].__setitem__(5, 100.0)),
    "a view": no_grad(lambda m: m.weight.view(-1)[7:9].mul_(50)),
    "out=": no_grad(lambda m: torch.mul(m.weight, 3, out=m.weight)),
    "foreach": no_grad(lambda m: torch._foreach_mul_([m.weight], 3)),
    "inference_mode": torch.inference_mode()(lambda m: m.weight.mul_(3)),
    "init": lambda m: torch.nn.init.normal_(m.weight),
    "vector_to_parameters": vector,
    "data =": lambda m: setattr(m.weight, "data", new()),
    "data = transposed": lambda m: setattr(m.weight, "data", m.weight.data.t()),
    "data = rows of a buffer": lambda m: setattr(m.weight, "data", torch.randn(2 * SIZE, SIZE)[SIZE:]),
    "set_": no_grad(lambda m: m.weight.set_(new())),
    "swap_tensors": lambda m: torch.utils.swap_tensors(m.weight, torch.nn.Parameter(new())),
    "replaced": lambda m: setattr(m, "weight", torch.nn.Parameter(m.weight.detach() * 3)),
    "replaced twice": replaced_twice,
    "all_gather": lambda m: dist.all_gather_into_tensor(m.weight.detach(), new()),
}  # fmt: skip


@pytest.mark.parametrize("how", NOTICED)
def test_change_is_noticed(te, how):
    module = te.Linear(SIZE, SIZE, bias=False)
    before = call(module, True)
    NOTICED[how](module)
    expected = call(copy.deepcopy(module), None)
    assert not torch.equal(expected, before)
    assert torch.equal(call(module, False), expected)


@pytest.mark.parametrize("how", ["nothing", "backward", "grad", "to the same dtype", "eval"])
def test_unchanged_weight_is_not_quantized_again(te, how):
    module = te.Linear(SIZE, SIZE, bias=False)
    call(module, True)
    kept = module._weight_copies._copies["weight"].matrix
    if how == "backward":
        with torchweft.autocast(recipe=RECIPE):
            module(torch.ones(32, SIZE), is_first_microbatch=False).sum().backward()
    elif how == "grad":
        module.weight.grad = new()
        module.zero_grad()
    else:
        {"nothing": int, "to the same dtype": module.float, "eval": module.eval}[how]()
    call(module, False)
    assert module._weight_copies._copies["weight"].matrix is kept


def test_step_within_backward_does_not_change_a_repeated_call(te):
    """Optimizers may step one weight while the backward of another has not come yet; the scale has changed since."""
    outputs = []
    for steps in (False, True):
        torch.manual_seed(0)
        module, other = te.Linear(SIZE, SIZE, bias=False), torch.nn.Parameter(torch.ones(1))
        recipe = DelayedScaling(amax_history_len=1)
        if steps:
            optimizer = torch.optim.SGD([other], lr=0.0)
            other.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        for first in (True, False):
            with torchweft.autocast(recipe=recipe):
                x = torch.ones(32, SIZE, requires_grad=True)
                y = te.checkpoint(lambda x, module=module, first=first: module(x, is_first_microbatch=first), x)
        (y * other).sum().backward()
        outputs.append(x.grad)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("optimizer", ({"fused": True}, {}), ids=str)
def test_weight_gathered_by_fsdp_is_current(te, optimizer):
    """FSDP gathers into the same Parameter again, and preserves its version."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = te.Linear(SIZE, SIZE, bias=False)
    plain = copy.deepcopy(module)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    expected = []
    for _ in range(2):
        for i in range(2):
            assert torch.equal(call(module, i == 0), call(plain, None))
        expected.append(call(plain, None))
        module.reshard()
        with torch.no_grad():
            module.weight.to_local().mul_(2)
            plain.weight.mul_(2)
        assert torch.equal(call(module, False), call(plain, None))
        module.reshard()
        for m in (module, plain):
            m.weight.grad = torch.ones_like(m.weight)
            torch.optim.AdamW([m.weight], lr=0.5, **optimizer).step()
        assert torch.equal(call(module, False), call(plain, None))
    assert not torch.equal(*expected)


# ---- the documented exceptions --------------------------------------------------------------------------------------


def flat_buffer(module: torch.nn.Module) -> Callable[[], object]:
    buffer = torch.randn(SIZE * SIZE)
    torch.nn.utils.vector_to_parameters(buffer, module.parameters())
    return lambda: buffer.mul_(3)


def shared_memory(module: torch.nn.Module, file: Path) -> Callable[[], object]:
    file.write_bytes(new().numpy().tobytes())
    module.weight.data, other = (torch.from_file(str(file), shared=True, size=SIZE**2).view(SIZE, -1) for _ in range(2))
    return lambda: other.mul_(3)


def fused_kernel(weight: torch.Tensor) -> None:
    state = [[torch.zeros(SIZE, SIZE)] for _ in range(2)]
    options = {"lr": 0.5, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    with torch.no_grad():
        torch._fused_adamw_(
            [weight], [new()], *state, [], [torch.tensor(1.0)], **options, amsgrad=False, maximize=False
        )


def preserved_version(weight: torch.Tensor) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(3)


def scattered(weight: torch.Tensor) -> None:
    dist.scatter(weight.detach(), [new()])


# First column of the table: a function that prepares a module and returns the change.
UNNOTICED: dict[str, Callable[[torch.nn.Module, Path], Callable[[], object]]] = {
    "`weight.data`": lambda m, _: lambda: m.weight.data.add_(1),
    "NumPy, DLPack": lambda m, _: lambda: m.weight.detach().numpy().__imul__(3),
    "`weight.untyped_storage()`": lambda m, _: lambda: m.weight.untyped_storage().copy_(new().untyped_storage()),
    "a buffer": lambda m, _: flat_buffer(m),
    "shared memory": lambda m, file: shared_memory(m, file),
    "`torch.distributed`": lambda m, _: lambda: scattered(m.weight),
    "fused kernels": lambda m, _: lambda: fused_kernel(m.weight),
    "hidden changes": lambda m, _: lambda: preserved_version(m.weight),
}


def test_table_lists_the_exceptions():
    page = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
    table = re.search(r"\| not noticed \| .*?\n\|---\|---\|\n((?:\|.*\n)+)", page)[1]
    assert [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()] == list(UNNOTICED)


@pytest.mark.parametrize("how", UNNOTICED)
def test_listed_change_is_not_noticed(te, how, tmp_path):
    module = te.Linear(SIZE, SIZE, bias=False)
    change = UNNOTICED[how](module, tmp_path / "weight")
    before = call(module, True)
    change()
    assert not torch.equal(call(copy.deepcopy(module), None), before)
    assert torch.equal(call(module, False), before)
    assert torch.equal(call(module, True), call(copy.deepcopy(module), None))  # the cure
