"""state_dict keys: the names of Parameters by default, Transformer Engine's with te_keys."""

import copy
import inspect
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.optim.swa_utils import AveragedModel

import torchweft
from torchweft import _C, ops

WIDTH = 8


class Scale(ops.BasicOperation):
    """y = a x, an operation written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((1,), 2.0))

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(input_)
        return self.a * input_

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return self.a * grad_output, [(grad_output * x).sum().reshape(1)]


def nested() -> torch.nn.Module:
    inner = ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU())
    fused = ops.FusedOperation([ops.BasicLinear(WIDTH, WIDTH), ops.Bias(WIDTH)])
    return torch.nn.Sequential(ops.Linear(WIDTH, WIDTH, bias=False), inner, fused, torch.nn.Linear(WIDTH, WIDTH))


MODELS = {
    "Linear": lambda: ops.Linear(WIDTH, WIDTH),
    "Linear without bias": lambda: ops.Linear(WIDTH, WIDTH, bias=False),
    "LayerNorm": lambda: ops.LayerNorm(WIDTH),
    "GroupedLinear": lambda: ops.GroupedLinear(2, WIDTH, WIDTH),
    "single GroupedLinear": lambda: ops.GroupedLinear(2, WIDTH, WIDTH, single_grouped_weight=True),
    "written in Python": Scale,
    "nested": nested,
}
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
CALLABLE = {key: make for key, make in MODELS.items() if "Grouped" not in key}
callable_models = pytest.mark.parametrize("make", CALLABLE.values(), ids=CALLABLE)


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return module


def assert_same_parameters(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, param in ours.items():
        assert torch.equal(param, theirs[name]), name


# ---- Parameter names ----


@pytest.mark.parametrize("name", [name for name, *_ in _C.op_types()])
def test_every_op_saves_its_parameter_names(name):
    sample = next(row[-1] for row in _C.op_types() if row[0] == name)
    cls = ops.native_classes[name]
    known = inspect.signature(cls).parameters
    module = cls(**{k: v for k, v in sample.fields().items() if k in known and k != "dtype" and v is not None})
    assert list(module.state_dict()) == [key for key, _ in module.named_parameters()]
    module.te_keys = True
    assert set(module.state_dict()) == {*(key for key, _ in module.named_parameters()), "_extra_state"}
    assert module.load_state_dict(module.state_dict()) == ([], [])


@models
def test_state_dict_has_parameter_names(make):
    module = make()
    assert list(module.state_dict()) == [name for name, _ in module.named_parameters()]


@models
@pytest.mark.parametrize("te_keys", (False, True))
def test_either_kind_of_keys_loads(make, te_keys):
    source, target = torchweft.checkpoint.set_te_keys(randomized(make()), te_keys), make()
    assert target.load_state_dict(source.state_dict(), strict=True) == ([], [])
    assert_same_parameters(source, target)
    state = {key: value for key, value in source.state_dict().items() if not key.endswith("_extra_state")}
    target = make()
    assert target.load_state_dict(state, strict=True) == ([], [])
    assert_same_parameters(source, target)


@pytest.mark.filterwarnings("ignore:.*is ignored, so delayed scaling starts with scales of 1")
def test_transformer_engine_extra_state_is_ignored():
    target = nested()
    state = torchweft.checkpoint.set_te_keys(nested()).state_dict()
    keys = [key for key in state if key.endswith("_extra_state")]
    for key in keys:
        state[key] = torch.randint(0, 255, (64,), dtype=torch.uint8)
    with pytest.warns(UserWarning) as warned:
        assert target.load_state_dict(state, strict=True) == ([], [])
    assert sorted(str(warning.message).split()[0] for warning in warned) == sorted(keys)


def test_unknown_keys_are_unexpected():
    linear = ops.Linear(WIDTH, WIDTH)
    state = linear.state_dict() | {
        "basic_ops.0.weight": torch.zeros(WIDTH, WIDTH),  # the weight already exists
        "basic_ops.7.weight": torch.zeros(1),
        "_extra_states": torch.zeros(1),
        "basic_ops.x._extra_state": torch.zeros(1),
    }
    missing, unexpected = linear.load_state_dict(state, strict=False)
    assert missing == []
    assert sorted(unexpected) == sorted(state.keys() - {"weight", "bias"})


# ---- Transformer Engine's names ----


def linear_keys(prefix: str, bias: bool = True) -> set[str]:
    keys = {"basic_ops.0.weight", "basic_ops.0._extra_state"}
    keys |= {"basic_ops.1.bias", "basic_ops.1._extra_state"} if bias else set()
    return {prefix + key for key in keys}


def test_te_keys_is_set_per_module():
    seq = ops.Sequential(
        ops.Linear(2, 2, te_keys=True), ops.Linear(2, 2), ops.RMSNorm(2, te_keys=True), ops.GELU(te_keys=True)
    )
    expected = {*linear_keys("0."), "1.weight", "1.bias", "2.weight", "2._extra_state", "3._extra_state"}
    assert set(seq.state_dict()) == expected
    seq[0].te_keys = False
    assert set(seq.state_dict()) == (expected - linear_keys("0.")) | {"0.weight", "0.bias"}


def test_set_te_keys_is_recursive_and_reversible():
    module = nested()
    own = list(module.state_dict())
    assert torchweft.checkpoint.set_te_keys(module) is module
    linears = linear_keys("0.", bias=False) | linear_keys("1.1.") | linear_keys("2.") | {"3.weight", "3.bias"}
    assert set(module.state_dict()) == linears | {"1.0.weight", "1.0._extra_state", "1.2._extra_state"}
    extra = [value for key, value in module.state_dict().items() if key.endswith("_extra_state")]
    assert all(t.dtype == torch.uint8 and t.numel() == 0 for t in extra)
    torchweft.checkpoint.set_te_keys(module, False)
    assert list(module.state_dict()) == own


@pytest.mark.parametrize("make_copy", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))), ids=("copy", "pickle"))
def test_copy_keeps_te_keys(make_copy):
    module = torchweft.checkpoint.set_te_keys(nested())
    assert set(make_copy(module).state_dict()) == set(module.state_dict())


class Counting(ops.RMSNorm):
    """Has extra state in addition to its Parameters."""

    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("te_keys", (False, True))
def test_subclass_saves_own_extra_state(te_keys):
    source, target = Counting(WIDTH, te_keys=te_keys), Counting(WIDTH)
    source.count = 3
    target.load_state_dict(source.state_dict())
    assert target.count == 3
    with pytest.raises(RuntimeError, match="_extra_state"):
        target.load_state_dict({"weight": torch.ones(WIDTH)})


# ---- tools that use names ----


@models
def test_averaged_parameters_load(make):
    module, average = make(), {}
    for name, param in module.named_parameters():
        average[name] = 0.5 * param.detach()
    assert module.load_state_dict(average, strict=True) == ([], [])


@callable_models
def test_swa_utils_average_model(make):
    module = make()
    averaged = AveragedModel(module, use_buffers=True)
    averaged.update_parameters(module)
    other = AveragedModel(make())
    other.load_state_dict(averaged.state_dict())
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(other(x), module(x))


def trained(module: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    for param in module.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@models
@pytest.mark.parametrize("full", (False, True))
def test_distributed_checkpoint_helpers_work(make, full):
    options = StateDictOptions(full_state_dict=full)
    source, target = randomized(make()), make()
    names = [name for name, _ in source.named_parameters()]
    state = get_model_state_dict(source, options=options)
    assert sorted(state) == sorted(names)
    set_model_state_dict(target, state, options=options)
    assert_same_parameters(source, target)

    optimizers = trained(source), trained(target)
    state = get_optimizer_state_dict(source, optimizers[0], options=options)
    assert sorted(state["state"]) == sorted(names)
    set_optimizer_state_dict(target, optimizers[1], state, options=options)
    both = get_state_dict(source, optimizers[0], options=options)
    set_state_dict(target, optimizers[1], model_state_dict=both[0], optim_state_dict=both[1], options=options)
    assert_same_parameters(source, target)
    for one, other in zip(*(optimizer.state_dict()["state"].values() for optimizer in optimizers), strict=True):
        torch.testing.assert_close(one, other)


def test_distributed_checkpoint_saves_and_loads_files(tmp_path):
    source, target = randomized(nested()), nested()
    torch.distributed.checkpoint.save(source.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = target.state_dict()
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    target.load_state_dict(state)
    assert_same_parameters(source, target)


@models
@pytest.mark.parametrize("te_keys", (False, True))
def test_safetensors_round_trip(make, te_keys, tmp_path):
    source, target = torchweft.checkpoint.set_te_keys(randomized(make()), te_keys), make()
    save_file({key: value.contiguous() for key, value in source.state_dict().items()}, tmp_path / "model.safetensors")
    target.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert_same_parameters(source, target)


def test_pipelining_tracer_splits_model():
    first = torch.nn.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU())
    model = torch.nn.Sequential(first, ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH)))
    x = torch.randn(4, WIDTH)
    pipe = pipeline(model, (x,), split_spec={"1": SplitPoint.BEGINNING})
    stages = [pipe.get_stage_module(i) for i in range(pipe.num_stages)]
    assert [set(stage.state_dict()) for stage in stages] == [
        {"0.0.weight", "0.0.bias"},
        {"1.0.weight", "1.1.weight", "1.1.bias"},
    ]
    torch.testing.assert_close(stages[1](stages[0](x)), model(x))
