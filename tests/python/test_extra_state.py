"""Any damaged `_extra_state` is ignored with a warning and never executed, and Parameters load unchanged."""

import io
import pickle
import random
import warnings

import pytest
import torch

import torchweft
from torchweft import ops
from torchweft._delayed_scaling import is_empty

WIDTH = 4


def operations() -> torch.nn.Module:
    inner = ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.GroupedLinear(2, WIDTH, WIDTH))
    return torchweft.checkpoint.set_te_keys(torch.nn.Sequential(ops.Linear(WIDTH, WIDTH), inner))


class MaliciousPickle:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def blobs(rng: random.Random, mark):
    """Mutated states as versions of Transformer Engine write them: tensors of bytes, bytes, BytesIO, pickles."""
    state = {"recipe": "DelayedScaling", "scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(1024, 3)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    seeds = [buffer.getvalue(), pickle.dumps(state), pickle.dumps(MaliciousPickle(mark)), b"", b"\x80\x04."]
    while True:
        raw = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(8) if raw else 0):
            at = rng.randrange(len(raw))
            raw[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
            raw = raw or bytearray(b"\0")
        raw = raw[: rng.choice((len(raw), rng.randrange(len(raw) + 1)))]
        forms = (
            lambda raw=raw: torch.tensor(list(raw[:4096]), dtype=torch.uint8),
            lambda raw=raw: bytes(raw),
            lambda raw=raw: io.BytesIO(bytes(raw)),
            lambda raw=raw: {"state": bytes(raw), 3: None},
            lambda raw=raw: [torch.tensor(list(raw[:16]), dtype=torch.uint8), object()],
            lambda: rng.choice((None, 7, float("nan"), "text", torch.empty(0), torch.empty(3, device="meta"))),
            lambda: torch.sparse_coo_tensor([[0]], [1.0], (3,)),
        )
        yield rng.choice(forms)()


def load_mutated(count: int, mark) -> None:
    module, rng = operations(), random.Random(5)
    expected = {name: torch.randn_like(param) for name, param in module.named_parameters()}
    module.load_state_dict(expected)
    state = module.state_dict()
    keys = [key for key in state if key.endswith("_extra_state")]
    source = blobs(rng, mark)
    for number in range(count):
        key = rng.choice(keys)
        mutated = {**state, key: next(source)}
        if ".basic_ops." in key and rng.random() < 0.3:  # as many as for another number of ranks
            mutated[key.replace("basic_ops.0", f"basic_ops.{rng.randrange(10**9)}")] = next(source)
        changed = [k for k, value in mutated.items() if value is not state.get(k) and not is_empty(value)]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert module.load_state_dict(mutated, strict=True) == ([], []), number
        assert len(warned) == len(changed), (number, mutated, warned)
    for name, param in module.named_parameters():
        assert torch.equal(param, expected[name]), name
    assert not mark.exists(), "a pickle was executed"


def test_mutated_extra_state_is_ignored(tmp_path):
    load_mutated(300, tmp_path / "mark")


@pytest.mark.slow
def test_mutated_extra_state_is_ignored_10000_times(tmp_path):
    load_mutated(10_000, tmp_path / "mark")


def test_key_that_resembles_extra_state_is_unexpected():
    for key in ("_extra_stat", "x._extra_state", "basic_ops.0._extra_state.x", "basic_ops.-1._extra_state"):
        with pytest.raises(RuntimeError, match="Unexpected key"):
            ops.Linear(WIDTH, WIDTH).load_state_dict(ops.Linear(WIDTH, WIDTH).state_dict() | {key: torch.zeros(1)})
