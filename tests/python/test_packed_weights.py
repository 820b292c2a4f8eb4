"""Weights are packed in each call; packed copies of frozen weights are kept. A result never uses an old weight, unless
a frozen one was changed without its version counter.

The reference is the same call on clones of the weights, which are not frozen. Results must be equal bitwise.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import torchweft
from torchweft import _C, ops

pytestmark = pytest.mark.skipif(_C.machine_tier() != "amx", reason="weights are packed by the amx tier only")

SIZE, ROWS = 512, 256
BYTES = SIZE * SIZE * 2
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_copies():
    limit = torchweft.packing_limit()
    gc.collect()
    assert torchweft.packed_bytes() == 0
    yield
    torchweft.set_packing_limit(limit)


def linear(**options):
    return ops.Linear(SIZE, SIZE, bias=False, dtype=BF16, **options)


def residual_block(in_place=False):
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(SIZE, dtype=BF16),
        ops.Linear(SIZE, 2 * SIZE, dtype=BF16),
        ops.SwiGLU(),
        ops.Linear(SIZE, SIZE, dtype=BF16),
        ops.AddExtraInput(in_place=in_place).set_extra_input_channel(0, "residual"),
    )


MODULES = {
    "linear": linear,
    "pair": lambda: ops.Sequential(ops.Linear(SIZE, SIZE, dtype=BF16), ops.GELU(), linear()),
    "block": residual_block,
    "in_place": lambda: residual_block(in_place=True),
}


def batch(rows=ROWS):
    return torch.randn(rows, SIZE, dtype=BF16)


def weight_of(module):
    return next(m.weight for m in module.modules() if isinstance(m, ops.Linear))


def results(module, x):
    """Returns the output, the gradient of x and the gradients of the parameters."""
    x = x.detach().requires_grad_()
    y = module(x)
    grads = torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))
    return [y.detach(), *grads]


def is_right(module, x):
    return all(torch.equal(a, b) for a, b in zip(results(module, x), results(copy.deepcopy(module), x), strict=True))


def counted(module, x):
    """Counts what a forward call does with packed copies."""
    before = _C.packing_counts()
    with torch.no_grad():
        module(x)
    return {name for name, count in _C.packing_counts().items() if count > before[name]}


# ---- Ways to change a weight -----------------------------------------------------------------------------------------


def by_optimizer(optimizer):
    def change(module):
        for param in module.parameters():
            param.grad = torch.randn_like(param)
        optimizer(module.parameters()).step()

    return change


def by_numpy(module):
    weight_of(module).detach().view(torch.int16).numpy()[3, 5] ^= 0x4000


def by_vector(module):
    vector = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector.neg(), module.parameters())


@torch.no_grad()
def by_swapped_rows(module):
    weight = weight_of(module)
    weight[[7, 300]] = weight[[300, 7]]


@torch.no_grad()
def by_operator(module):
    for param in module.parameters():
        param.mul_(-1.5)


def by_new_data(module):
    weight_of(module).data = torch.randn_like(weight_of(module))


def by_new_parameter(module):
    owner = next(m for m in module.modules() if isinstance(m, ops.Linear))
    owner.weight = torch.nn.Parameter(torch.randn_like(owner.weight))


def by_storage(module):
    weight = weight_of(module)
    weight.untyped_storage().copy_(torch.randn_like(weight).untyped_storage())


def by_loading(assign):
    def change(module):
        state = {k: -v if isinstance(v, torch.Tensor) else v for k, v in module.state_dict().items()}
        module.load_state_dict(state, assign=assign)

    return change


RECORDED = {  # by the weight's version counter
    "AdamW": by_optimizer(lambda p: torch.optim.AdamW(p, lr=0.1)),
    "AdamW foreach": by_optimizer(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True)),
    "SGD": by_optimizer(lambda p: torch.optim.SGD(p, lr=0.1)),  # with fused=True, torch 2.13 does not update bfloat16
    "operator under no_grad": by_operator,
    "load_state_dict": by_loading(assign=False),
    "swapped rows": by_swapped_rows,
}
UNRECORDED = {
    "AdamW fused": by_optimizer(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)),
    "Adagrad fused": by_optimizer(lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True)),
    "data.copy_": lambda m: weight_of(m).data.copy_(torch.randn(SIZE, SIZE).repeat(len(weight_of(m)) // SIZE, 1)),
    "numpy": by_numpy,
    "storage": by_storage,
}
REPLACED = {  # another tensor, which is not frozen
    "data = other": by_new_data,
    "a new Parameter": by_new_parameter,
    "load_state_dict, assigned": by_loading(assign=True),
    "vector_to_parameters": by_vector,
}
CHANGES = RECORDED | UNRECORDED | REPLACED


# ---- Weights that are not frozen -------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weight_is_used_at_next_call(change, module):
    module, x = MODULES[module](), batch()
    for _ in range(3):
        results(module, x)
    for _ in range(2):
        before = results(module, x)[0]
        CHANGES[change](module)
        assert is_right(module, x)
        assert not torch.equal(before, results(module, x)[0])
    assert torchweft.packed_bytes() == 0


@torch.no_grad()
def test_structured_changes_are_used():
    """Changes that do not change sums over the weight."""
    identity = torch.eye(SIZE, dtype=BF16)
    dense = torch.randn(SIZE, SIZE).to(BF16)
    for start in (2 * identity, dense):
        swapped_rows, swapped_columns, signs, blocks = (start.clone() for _ in range(4))
        swapped_rows[[1, 3]] = start[[3, 1]]
        swapped_columns[:, [1, 3]] = start[:, [3, 1]]
        signs[[1, 2], [1, 2]] *= -1
        blocks[:256, :256], blocks[256:, 256:] = start[256:, 256:], start[:256, :256]
        moved = (start.roll(1, 0), start.roll(32, 1), start.flip(0))
        for changed in (swapped_rows, swapped_columns, signs, blocks, *moved):
            module, x = linear(), batch()
            module.weight.copy_(start)
            for _ in range(6):
                module(x)
            module.weight.copy_(changed)
            assert torch.equal(module(x), copy.deepcopy(module)(x))


def test_unfrozen_weights_keep_no_packed_copy():
    module, x = linear(), batch()
    assert [counted(module, x) for _ in range(4)] == [set()] * 4
    assert torchweft.packed_bytes() == 0


# ---- Frozen weights --------------------------------------------------------------------------------------------------


def test_frozen_weight_is_packed_once():
    module = torchweft.prepack(linear())
    assert [counted(module, batch(rows)) for rows in (ROWS, 33, 1024, 64)] == [{"packed"}, *[{"reused"}] * 3]
    assert is_right(module, batch()) and is_right(module, batch(40))
    torchweft.prepack(module, frozen=False)
    assert counted(module, batch()) == set() and torchweft.packed_bytes() == 0


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("change", RECORDED)
def test_recorded_change_of_frozen_weight_raises(change, module):
    module, x = torchweft.prepack(MODULES[module]()), batch()
    for _ in range(2):
        results(module, x)
        CHANGES[change](module)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="weight was changed in place while it was frozen"):
                module(x)
        torchweft.prepack(module)
        assert is_right(module, x)


def test_error_names_weight():
    model = torch.nn.ModuleDict({"mlp": MODULES["pair"]()})
    torchweft.prepack(model)
    with torch.no_grad():
        model["mlp"](batch())
        model["mlp"][2].weight.neg_()
        with pytest.raises(RuntimeError, match=r"prepack: mlp\.2\.weight was changed"):
            model["mlp"](batch())


@pytest.mark.parametrize("change", UNRECORDED)
def test_unrecorded_change_takes_effect_after_prepack(change):
    module, x = torchweft.prepack(linear()), batch()
    before = results(module, x)[0]
    CHANGES[change](module)
    assert torch.equal(results(module, x)[0], before)
    torchweft.prepack(module)
    assert is_right(module, x)


@pytest.mark.parametrize("change", REPLACED)
def test_replaced_weight_is_not_frozen(change):
    module, x = torchweft.prepack(linear()), batch()
    results(module, x)
    CHANGES[change](module)
    for _ in range(3):
        assert is_right(module, x)
        by_numpy(module)


def test_change_after_unfreezing_takes_effect():
    module, x = torchweft.prepack(linear()), batch()
    results(module, x)
    torchweft.prepack(module, frozen=False)
    by_numpy(module)
    assert is_right(module, x)


def test_other_weights_in_same_storage_may_change():
    both, x = torch.randn(2, SIZE, SIZE, dtype=BF16), batch()
    teacher, student = linear(), linear()
    teacher.weight, student.weight = (torch.nn.Parameter(w) for w in both)
    torchweft.prepack(teacher)
    for _ in range(3):
        assert is_right(teacher, x) and is_right(student, x)
        both[1] *= 2  # moves the version counter of all three


def test_weight_with_row_stride_can_be_frozen():
    module, x = linear(), batch()
    wide = torch.randn(SIZE, SIZE + 24, dtype=BF16)
    module.weight = torch.nn.Parameter(wide[:, 8 : 8 + SIZE])
    torchweft.prepack(module)
    assert is_right(module, x)
    wide[:, :8] += 1  # not part of it
    assert is_right(module, x)
    wide[SIZE - 1, SIZE + 7] += 64  # the last value
    with pytest.raises(RuntimeError, match="was changed in place"):
        module(x)


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))))
def test_copy_of_frozen_module_is_not_frozen(copied):
    module, x = torchweft.prepack(MODULES["pair"]()), batch()
    results(module, x)
    other = copied(module)
    by_operator(other)
    assert is_right(other, x) and is_right(module, x)


def test_reused_weight_memory_is_not_frozen():
    x, module, reused = batch(), linear(), 0
    for _ in range(20):
        module.weight = torch.nn.Parameter(torch.randn(SIZE, SIZE).to(BF16))
        results(torchweft.prepack(module), x)
        place = module.weight.data_ptr()
        values = torch.randn(SIZE, SIZE)
        module.weight = None
        weight = torch.empty(SIZE, SIZE, dtype=BF16)
        reused += weight.data_ptr() == place
        module.weight = torch.nn.Parameter(weight.copy_(values))
        assert is_right(module, x)
    assert reused > 0


def test_inference_mode_weight_can_be_frozen():
    with torch.inference_mode():
        module, x = torchweft.prepack(linear()), batch()
        assert [counted(module, x) for _ in range(2)] == [{"packed"}, {"reused"}]
        reused = module(x)
        assert torch.equal(reused, torchweft.prepack(module, frozen=False)(x))


def test_meta_weight_cannot_be_frozen():
    with pytest.raises(ValueError, match="Materialize it before prepack"):
        torchweft.prepack(linear(device="meta"))


def test_prepack_rejects_non_modules():
    with pytest.raises(TypeError, match="expected a torch.nn.Module"):
        torchweft.prepack(torch.zeros(2))


# ---- Threads, processes, FSDP2 ---------------------------------------------------------------------------------------


def in_threads(*tasks):
    errors = []

    def run(task):
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "threads wait for each other"
    if errors:
        raise errors[0]


def test_threads_share_frozen_weights_and_train_their_own():
    teacher, x = torchweft.prepack(MODULES["block"]()), batch()
    truth = results(copy.deepcopy(teacher), x)

    def use():
        torch.set_num_threads(1)
        student = MODULES["pair"]()
        for _ in range(8):
            assert all(torch.equal(a, b) for a, b in zip(results(teacher, x), truth, strict=True))
            by_operator(student)
            assert is_right(student, x)

    in_threads(use, use)


def test_python_only_storage_does_not_deadlock():
    """Such a storage cannot be accessed without the GIL, which another thread may hold while it requests counts."""
    x = batch()
    old = [torchweft.prepack(linear()) for _ in range(4)]
    for module in old:
        results(module, x)
    storages = [module.weight.untyped_storage() for module in old]
    del old, module
    done = threading.Event()

    def ask():
        while not done.is_set():
            torchweft.packed_bytes()

    def use():
        for _ in range(100):
            with torch.no_grad():
                torchweft.prepack(linear())(x)
        done.set()

    in_threads(use, ask)
    assert len(storages) == 4


RANK = """
import sys, torch, torchweft
from torchweft import ops

def product():
    with torch.no_grad():
        return float(module(x).float().sum())

weight = torch.from_file(sys.argv[1], shared=True, size=4096, dtype=torch.bfloat16).view(64, 64)
module = ops.Linear(64, 64, bias=False, dtype=torch.bfloat16)
module.weight = torch.nn.Parameter(weight)
x = torch.ones(64, 64, dtype=torch.bfloat16)
torchweft.prepack(module)
for line in sys.stdin:
    if line.strip() == "prepack":
        torchweft.prepack(module)
    print(product(), flush=True)
"""


def test_processes_freeze_shared_weight_independently(tmp_path):
    file = str(tmp_path / "weight")
    weight = torch.from_file(file, shared=True, size=64 * 64, dtype=BF16).fill_(1)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, file],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]

    def ask(rank, word):
        rank.stdin.write(word + "\n")
        rank.stdin.flush()
        return float(rank.stdout.readline())

    try:
        one = 64.0**3
        assert [ask(rank, "run") for rank in ranks] == [one, one]
        weight.fill_(2)
        assert [ask(rank, word) for rank, word in zip(ranks, ("prepack", "run"), strict=True)] == [2 * one, one]
        assert [ask(rank, "prepack") for rank in ranks] == [2 * one, 2 * one]
    finally:
        for rank in ranks:
            rank.stdin.close()
            rank.stdout.close()
            assert rank.wait(timeout=60) == 0


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_weight_cannot_be_frozen(one_rank):
    with pytest.raises(ValueError, match="Do not prepack sharded modules"):
        torchweft.prepack(fully_shard(linear()))


# ---- Memory ----------------------------------------------------------------------------------------------------------


def test_frozen_model_beyond_the_limit_keeps_what_fits():
    torchweft.set_packing_limit(3 * BYTES)
    modules, x = [torchweft.prepack(linear()) for _ in range(5)], batch()
    for _ in range(2):
        for module in modules:
            counted(module, x)
            assert torchweft.packed_bytes() <= 3 * BYTES
    assert [counted(module, x) for module in modules] == [*[{"reused"}] * 3, set(), set()]
    assert all(torch.equal(module(x), copy.deepcopy(module)(x)) for module in modules)
    del modules[0], module
    gc.collect()
    assert [counted(module, x) for module in modules] == [{"reused"}, {"reused"}, {"packed"}, set()]


def test_smaller_limit_takes_effect_immediately():
    modules, x = [torchweft.prepack(linear()) for _ in range(3)], batch()
    for module in modules:
        counted(module, x)
    torchweft.set_packing_limit(2 * BYTES)
    assert torchweft.packed_bytes() == 2 * BYTES
    torchweft.set_packing_limit(0)
    assert torchweft.packed_bytes() == 0
    assert counted(modules[0], x) == set()


def test_packed_copies_are_freed_with_weights():
    module, x = torchweft.prepack(MODULES["block"]()), batch()
    results(module, x)
    assert torchweft.packed_bytes() > 0
    del module
    gc.collect()
    assert torchweft.packed_bytes() == 0


def test_negative_limit_is_rejected():
    with pytest.raises(ValueError, match="expected a number of bytes, 0 or more"):
        torchweft.set_packing_limit(-1)


@pytest.mark.parametrize(
    "word, printed", (("0", "0"), ("12345", "12345"), ("1G", "expected a number"), ("-1", "0 or more"))
)
def test_limit_is_read_from_environment(word, printed):
    done = subprocess.run(
        [sys.executable, "-c", "import torchweft; print(torchweft.packing_limit())"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WEFT_PACKED_BYTES": word},
        capture_output=True,
        text=True,
    )
    assert printed in done.stdout + done.stderr
    assert (done.returncode == 0) == word.isdigit()


def test_explain_reports_packed_bytes():
    module, x = linear(), batch()
    assert "packed weights" not in module.explain(x).text
    results(torchweft.prepack(module), x)
    assert module.explain(x).text.count("packed weights: 1 MiB cached (limit 1 GiB)") == 1
    assert module.explain(x).data[0]["packed_bytes"] == 2 * BYTES
