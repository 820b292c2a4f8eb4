"""Resharding of tensor-parallel state dicts, and random states; without process groups."""

import threading
import time

import pytest
import torch

import torchweft
from torchweft import ops
from torchweft.checkpoint import Placement, layout_of, merge, split


def model(replicated_bias: bool = False) -> ops.Sequential:
    return ops.Sequential(
        ops.RMSNorm(8), ops.Linear(8, 24), ops.SwiGLU(), ops.Linear(12, 8, replicated_bias=replicated_bias)
    )


MODES = {"1": "column", "3": "row"}


def te_keys(module: ops.Sequential) -> ops.Sequential:
    return torchweft.checkpoint.set_te_keys(module)


def random_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: torch.randn(value.shape) for key, value in module.state_dict().items()}


@pytest.mark.parametrize("keys", (lambda module: module, te_keys), ids=("own keys", "te_keys"))
@pytest.mark.parametrize("replicated_bias", (False, True))
def test_any_number_of_ranks_merges_to_same_state_dict(replicated_bias, keys):
    module = keys(model(replicated_bias))
    layout, whole = layout_of(module, modes=MODES, stacked={"1": 2}), random_state(module)
    two = split(whole, layout, 2)
    assert any(part.shape != whole[key].shape for key, part in two[0].items())
    four = split(merge(two, layout), layout, 4)
    again = merge(split(merge(four, layout), layout, 1), layout)
    assert again.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.equal(again[key], value), key
    module.load_state_dict(again)


def test_split_gives_each_rank_its_shards():
    module = model()
    whole = random_state(module)
    first, second = split(whole, layout_of(module, modes=MODES), 2)
    weight = whole["1.weight"]
    assert torch.equal(first["1.weight"], weight[:12]) and torch.equal(second["1.weight"], weight[12:])
    assert torch.equal(second["3.weight"], whole["3.weight"][:, 6:])
    assert torch.equal(first["3.bias"], whole["3.bias"])
    assert not second["3.bias"].any(), "the bias of a row linear is a sum: rank 0 holds it"
    assert second["0.weight"] is whole["0.weight"]


def test_replicated_bias_is_equal_on_all_ranks():
    module = model(replicated_bias=True)
    whole = random_state(module)
    for shard in split(whole, layout_of(module, modes=MODES), 4):
        assert torch.equal(shard["3.bias"], whole["3.bias"])


def test_row_parallel_biases_are_summed():
    module = model()
    layout = layout_of(module, modes=MODES)
    parts = split(random_state(module), layout, 2)
    for rank, part in enumerate(parts):
        part["3.bias"] = torch.full((8,), 1.0 + rank)
    assert torch.equal(merge(parts, layout)["3.bias"], torch.full((8,), 3.0))


def test_stacked_features_are_split_separately():
    gate, up = torch.arange(4), torch.arange(4) + 10
    parts = Placement(0, stacked=2).split("w", torch.cat([gate, up]), 2)
    assert parts[0].tolist() == [0, 1, 10, 11] and parts[1].tolist() == [2, 3, 12, 13]
    assert Placement(0, stacked=2).merge(parts).tolist() == [*gate.tolist(), *up.tolist()]


def test_impossible_layouts_raise():
    module = model()
    layout = layout_of(module, modes=MODES)
    with pytest.raises(ValueError, match=r"1\.weight: dimension 0 of \(24, 8\).*over 5 ranks"):
        split(random_state(module), layout, 5)
    with pytest.raises(ValueError, match="expected names of Linears"):
        layout_of(module, modes={"mlp": "column"})
    with pytest.raises(ValueError, match="stacked contain mlp, expected names of Linears"):
        layout_of(module, MODES, stacked={"mlp": 2})
    row = next(name for name, mode in MODES.items() if mode == "row")
    with pytest.raises(ValueError, match=f"stacked contain {row}, .*of column-parallel ones"):
        layout_of(module, MODES, stacked={row: 2})
    with pytest.raises(ValueError, match="ranks 0 and 1 have different keys: b"):
        merge([{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}], {})
    with pytest.raises(ValueError, match="one for each rank"):
        merge([], {})


# ---- random states ------------------------------------------------------------------------------------------------


def test_fork_draws_from_its_own_state():
    tracker = torchweft.RNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    torch.manual_seed(1)
    usual = torch.rand(3)
    torch.manual_seed(1)
    with tracker.fork():
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), usual)
    with tracker.fork():
        second = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3)) and torch.equal(second, torch.rand(3))


def test_linear_draws_weights_from_tracker():
    tracker = torchweft.RNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tracker.set_states({"model-parallel-rng": torch.Generator().manual_seed(5).get_state()})
        weights.append(ops.Linear(4, 4, rng_state_tracker_function=lambda: tracker).weight.detach().clone())
    assert torch.equal(*weights)


def test_tracker_states_are_saved_and_restored():
    tracker = torchweft.RNGStatesTracker()
    tracker.add("a", 1)
    states = tracker.get_states()
    with tracker.fork("a"):
        drawn = torch.rand(2)
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(2), drawn)


def test_threads_fork_one_after_the_other():
    trackers = [torchweft.RNGStatesTracker() for _ in range(2)]
    for tracker in trackers:
        tracker.add("a", 1)
    before, entered, drawn = torch.get_rng_state(), [threading.Event() for _ in range(2)], []

    def draw(tracker, who):
        if who == 1:
            entered[0].wait(10)
        with tracker.fork("a"):
            entered[who].set()
            entered[1].wait(0.2 * (1 - who))  # time for the second thread to enter before the first one leaves
            time.sleep(0.2 * who)
            drawn.append(torch.rand(3))

    threads = [threading.Thread(target=draw, args=(tracker, who)) for who, tracker in enumerate(trackers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(*drawn) and torch.equal(torch.get_rng_state(), before)


def test_tracker_rejects_duplicates_and_unknown_names():
    tracker = torchweft.RNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(RuntimeError, match="seed 1"):
        tracker.add("b", 1)
    with pytest.raises(RuntimeError, match="'a'"):
        tracker.add("a", 2)
    with pytest.raises(KeyError, match="nobody"), tracker.fork("nobody"):
        pass
    tracker.reset()
    tracker.add("a", 1)
