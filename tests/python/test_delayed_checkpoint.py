"""Checkpoints of delayed scaling: the states of operations, and Transformer Engine's own pickles."""

from __future__ import annotations

import copy
import enum
import io
import pickle
import random
import struct
import sys
import time
import tracemalloc
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.checkpoint import checkpoint

import torchweft
from torchweft import ops
from torchweft.convert import ConversionError
from torchweft.convert._extra_state import read_extra_state
from torchweft.recipe import DelayedScaling


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    HYBRID = _FormatHelper(448, 57344)


@dataclass
class TeDelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_compute_algo: str = "max"


TE_NAMES = {"_FormatHelper": _FormatHelper, "Format": Format, "DelayedScaling": TeDelayedScaling}
for te_name, kind in TE_NAMES.items():
    kind.__module__, kind.__qualname__ = "transformer_engine.common.recipe", te_name


@pytest.fixture
def dumps(monkeypatch):
    """Pickles as Transformer Engine does, with its names of classes."""
    for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["transformer_engine.common.recipe"].__dict__.update(TE_NAMES)
    return pickle.dumps


def module_state(gemms, length=4):
    """The state of a module of Transformer Engine, with slots of input, weight, output; grad_output, grad_input."""
    return {
        "recipe": TeDelayedScaling(),
        "scale_fwd": torch.arange(1.0, 1 + 3 * gemms),
        "amax_history_fwd": torch.arange(3.0 * gemms * length).reshape(length, -1),
        "scale_bwd": torch.arange(100.0, 100 + 2 * gemms),
        "amax_history_bwd": torch.arange(2.0 * gemms * length).reshape(length, -1),
        "extra_fp8_variables": {"num_gemms": gemms, "fp8_checkpoint": True},
    }


def as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def load(linear: torch.nn.Module, saved: object) -> None:
    linear.load_state_dict(linear.state_dict() | {"_extra_state": saved})


def saved_states(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value for key, value in module.state_dict().items() if key.endswith("_extra_state")}


@pytest.mark.parametrize("gemms", [1, 2])
def test_reads_the_state_of_a_module(dumps, gemms):
    state = module_state(gemms)
    found = read_extra_state(dumps(state), "it")
    assert len(found) == gemms
    for i, (forward, backward) in enumerate(found):
        assert torch.equal(forward[0], state["scale_fwd"][3 * i : 3 * i + 2])
        assert torch.equal(forward[1:], state["amax_history_fwd"][:, 3 * i : 3 * i + 2])
        assert torch.equal(backward[0], state["scale_bwd"][2 * i : 2 * i + 1])
        assert torch.equal(backward[1:], state["amax_history_bwd"][:, 2 * i : 2 * i + 1])


def test_recipes_without_a_state_are_ignored(dumps):
    stateless = dumps({"recipe": TeDelayedScaling(), "extra_fp8_variables": {}})
    assert read_extra_state(stateless, "it") is None
    linear = ops.Linear(8, 8)
    for ignored in (as_tensor(stateless), torch.empty(0, dtype=torch.uint8), None):
        load(linear, ignored)
    assert not saved_states(linear)


def test_early_order_of_gradients_is_rejected(dumps):
    """Early releases of Transformer Engine 2 put the gradient of the second linear first."""
    state = module_state(2)
    state["amax_history_bwd"][:, 2:] = 0
    with pytest.raises(ConversionError, match="early release"):
        read_extra_state(dumps(state), "it")


def test_operations_load_transformer_engines_state(dumps):
    state = {
        "forward": {"scale_fwd": torch.tensor([2.0, 3.0]), "amax_history_fwd": torch.ones(5, 2)},
        "backward": {"scale_bwd": torch.tensor([4.0]), "amax_history_bwd": torch.ones(5, 1)},
    }
    linear = ops.Linear(8, 8, te_keys=True)
    linear.load_state_dict(linear.state_dict() | {"basic_ops.0._extra_state": as_tensor(dumps(state))})
    assert [part[0].tolist() for part in linear._delayed_scaling] == [[2, 3], [4]]
    two = {
        "forward": {"scale_fwd": torch.ones(4), "amax_history_fwd": torch.zeros(5, 4)},
        "backward": {"scale_bwd": torch.ones(2), "amax_history_bwd": torch.zeros(5, 2)},
    }
    with pytest.warns(UserWarning, match="states of 2 linears, expected 1"):
        linear.load_state_dict(linear.state_dict() | {"_extra_state": as_tensor(dumps(two))})


# ---- continuing a training ------------------------------------------------------------------------------------------

MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: ops.Linear(32, 32).bfloat16(),
    "mlp": lambda: ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)).bfloat16(),
}


def step(module, seed):
    """The output and weight gradients of one training step."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(16, 32, generator=generator) * 4.0 ** (seed % 3)).bfloat16()
    module.zero_grad()
    with torchweft.autocast(recipe=DelayedScaling(amax_history_len=4)):
        y = module(x)
    y.sum().backward()
    return [y.detach(), *(param.grad for param in module.parameters())]


@pytest.mark.parametrize("kind", MODULES)
def test_training_continues_bit_equal(kind, tmp_path):
    torch.manual_seed(0)
    module = MODULES[kind]()
    for seed in range(3):
        step(module, seed)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    loaded, copied, fresh = MODULES[kind](), copy.deepcopy(module), MODULES[kind]()
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    empty = dict.fromkeys(saved_states(module), torch.empty(0, dtype=torch.uint8))
    fresh.load_state_dict({**loaded.state_dict(), **empty})
    expected = step(module, 3)
    for other in (loaded, copied):
        for value, wanted in zip(step(other, 3), expected, strict=True):
            assert torch.equal(value, wanted)
    assert not torch.equal(step(fresh, 3)[0], expected[0])  # its scales start at 1
    assert_equal_states(loaded, module)


def assert_equal_states(module, other):
    found, expected = saved_states(module), saved_states(other)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_distributed_checkpoint_continues_bit_equal(make, tmp_path):
    module = make()
    for seed in range(3):
        step(module, seed)
    dcp.save(module.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    loaded = torchweft.checkpoint.create_delayed_states(make(), amax_history_len=4)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    loaded.load_state_dict(state)
    for value, wanted in zip(step(loaded, 3), step(module, 3), strict=True):
        assert torch.equal(value, wanted)


def test_empty_and_unreadable_states_start_anew(dumps):
    for saved in (torch.empty(0, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)):
        linear = MODULES["linear"]()
        step(linear, 0)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            load(linear, saved)
        assert not saved_states(linear) and len(warned) == bool(len(saved))
    step(linear, 0)
    with pytest.warns(UserWarning, match="the form of Transformer Engine 1"):
        load(linear, io.BytesIO(dumps(module_state(1))))
    assert not saved_states(linear)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(linear, io.BytesIO(dumps(None)))


# ---- gradient checkpointing -----------------------------------------------------------------------------------------


def checkpointed_step(module, seed, wrap):
    """Gradients of one step. The region ends, and updates the scales, before backward repeats the call."""
    x = (torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)) * 4.0 ** (seed % 3)).bfloat16()
    x.requires_grad_()
    module.zero_grad()
    with torchweft.autocast(recipe=DelayedScaling(amax_history_len=1)):
        y = wrap(module, x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    return [y.detach(), x.grad, *(param.grad for param in module.parameters())]


def recompute(function, x):
    return checkpoint(function, x, use_reentrant=False, context_fn=torchweft.recompute_contexts)


@pytest.mark.parametrize("nested", [False, True])
def test_repeated_calls_use_the_scales_of_the_first(nested):
    def wrap(module, x):
        if nested:
            return recompute(lambda t: recompute(module, t) + recompute(module, 3 * t), x)
        return recompute(lambda t: module(t) + module(3 * t), x)

    torch.manual_seed(0)
    plain = MODULES["mlp"]()
    module = copy.deepcopy(plain)
    for seed in range(4):
        expected = checkpointed_step(plain, seed, lambda module, x: module(x) + module(3 * x))
        for value, wanted in zip(checkpointed_step(module, seed, wrap), expected, strict=True):
            assert torch.equal(value, wanted), seed
    assert_equal_states(module, plain)


# ---- hostile bytes --------------------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_executed(dumps, tmp_path):
    content = dumps(module_state(1) | {"recipe": Malicious(tmp_path / "executed")})
    with pytest.warns(UserWarning, match="nothing was executed"):
        load(ops.Linear(8, 8), as_tensor(content))
    assert not list(tmp_path.iterdir())


def shared_storage(content: bytes) -> bytes:
    """Pickled: puts the function that reads a storage, and its argument, into the memo as 0 and 1."""
    return b"ctorch.storage\n_load_from_bytes\nq\x000B" + struct.pack("<I", len(content)) + content + b"q\x010"


def storage_bytes(count: int) -> bytes:
    function, (content,) = torch.zeros(count)._typed_storage().__reduce__()
    assert function.__name__ == "_load_from_bytes"
    return content


LONG_NAME = b"transformer_engine." + b"x" * (65536 - 19)
SHORT_NAME = LONG_NAME[:120]
STORAGES = b"](" + b"h\x00h\x01\x85R" * 1000 + b"e."
BOMBS = {
    "storages": ("more than 64 tensors", shared_storage(storage_bytes(1 << 16)) + STORAGES),
    "empty storages": ("more than 64 tensors", shared_storage(storage_bytes(0)) + STORAGES),
    "long names": (
        "has 131072 characters",
        b"X" + struct.pack("<I", len(LONG_NAME)) + LONG_NAME + b"q\x000](" + b"h\x00h\x00\x93" * 5000 + b"e.",
    ),
    "names": (
        "need more than 64 times",
        b"X" + struct.pack("<I", len(SHORT_NAME)) + SHORT_NAME + b"q\x000](" + b"h\x00h\x00\x93" * 50000 + b"e.",
    ),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_repeated_objects_are_bounded(kind):
    """Pickles that create the same large object again and again."""
    message, content = BOMBS[kind]
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(ConversionError, match=message):
        read_extra_state(b"\x80\x04" + content, "it")
    assert time.process_time() - start < 5 and tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["qint32", "quint8", "float8_e4m3fn", "HalfStorage"])
def test_other_dtypes_are_rejected(dumps, dtype):
    """torch.frombuffer makes invalid tensors of some dtypes."""
    content = dumps(module_state(1)).replace(b"ctorch\nFloatStorage", b"ctorch\n" + dtype.encode())
    with pytest.raises(ConversionError):
        read_extra_state(content, "it")


def test_states_without_tensors_are_rejected(dumps):
    state = module_state(1) | {"scale_bwd": torch.zeros(0), "amax_history_bwd": torch.zeros(4, 0)}
    with pytest.raises(ConversionError):
        read_extra_state(dumps(state), "it")
    state = module_state(1) | {"scale_bwd": torch.ones(1), "amax_history_bwd": torch.zeros(4, 1)}
    with pytest.raises(ConversionError, match="do not belong together"):
        read_extra_state(dumps(state), "it")


def test_mutated_bytes_load_or_warn(dumps):
    """Bytes changed, removed, repeated or inserted at random places."""
    count = 10_000
    good, rng, linear = dumps(module_state(1)), random.Random(0), ops.Linear(8, 8)
    loaded = 0
    for _ in range(count):
        content = bytearray(good)
        for _ in range(rng.randint(1, 8)):
            at, size = rng.randrange(len(content)), rng.randint(1, 16)
            kind = rng.randrange(4)
            if kind == 0:
                content[at] = rng.randrange(256)
            elif kind == 1:
                del content[at : at + size]
            elif kind == 2:
                content[at:at] = content[at : at + size]
            else:
                content[at:at] = rng.randbytes(size)
        linear.__dict__.pop("_delayed_scaling", None)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            load(linear, as_tensor(bytes(content)))
        found = linear.__dict__.get("_delayed_scaling", ())
        assert not (found and warned)
        assert all((part[0] > 0).all() and (part[1:] >= 0).all() for part in found)
        loaded += bool(found)
    assert 0 < loaded < count / 2
