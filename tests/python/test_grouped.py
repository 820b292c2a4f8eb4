"""GroupedLinear: one linear per group of rows."""

from __future__ import annotations

import copy
import io
import math
import random
import threading
from contextlib import contextmanager

import pytest
import torch
from experts import (
    GROUPS,
    ROWS,
    SPLITS,
    assert_near,
    collect,
    compare,
    layer,
    leaf,
    run,
    saved_tensors,
    splits_of,
    truth,
    uniform,
)

import torchweft
from torchweft import ops

K, N = 20, 12
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BIASES = {"no bias": {"bias": False}, "bias": {}, "scaled bias": {"scale_bias": True}}
LAYOUTS = {
    "discrete": {},
    "single weight": {"single_grouped_weight": True},
    "single bias": {"single_grouped_bias": True},
    "single both": {"single_grouped_weight": True, "single_grouped_bias": True},
}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_bias = pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_path = pytest.mark.parametrize("split_path", (False, True), ids=("grouped", "split"))
each_weight = pytest.mark.parametrize("single", (False, True), ids=("discrete", "single"))


def extras_of(op, splits, rows: int = ROWS, dtype=torch.float32) -> list[torch.Tensor]:
    return [splits, leaf(rows, dtype=dtype)] if op.num_extra_inputs == 2 else [splits]


# ---- values and gradients -------------------------------------------------------------------------------------------


@each_dtype
@each_bias
@each_layout
@each_path
def test_values_and_gradients_match_loop(dtype, bias, layout, split_path):
    op = layer(K, N, dtype=dtype, split_path=split_path, **bias, **layout)
    x, dy = leaf(ROWS, K, dtype=dtype), uniform(ROWS, N, dtype=dtype)
    given = (x, *extras_of(op, splits_of(), dtype=dtype))
    compare(run(op, dy, *given), truth(op, dy, *given), dtype)


@pytest.mark.parametrize("input_needs_grad", (True, False), ids=("input", "no input"))
@pytest.mark.parametrize("weight_needs_grad", (True, False), ids=("weights", "frozen"))
@pytest.mark.parametrize("delay", (True, False), ids=("delayed", "now"))
@each_path
@each_weight
def test_gradients_exist_only_where_required(input_needs_grad, weight_needs_grad, delay, split_path, single):
    op = layer(K, N, scale_bias=True, split_path=split_path, single_grouped_weight=single, delay_wgrad_compute=delay)
    op.requires_grad_(weight_needs_grad)
    x, dy = leaf(ROWS, K).requires_grad_(input_needs_grad), uniform(ROWS, N, dtype=torch.float32)
    given = (x, *extras_of(op, splits_of()))
    found, expected = run(op, dy, *given), truth(op, dy, *given)
    if delay and weight_needs_grad:
        assert all(found[f"gradient of {name}"] is None for name, _ in op.named_parameters() if "weight" in name)
        assert op.pending_backward_dw == 1
        op.backward_dw()
        found |= {f"gradient of {name}": p.grad for name, p in op.named_parameters()}
    assert op.pending_backward_dw == 0
    compare(found, expected, torch.float32)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@each_path
def test_splits_in_any_order_and_integer_dtype(dtype, split_path):
    op = layer(K, N, groups=4, split_path=split_path)
    sizes = [0, 9, 18, 27]
    for seed in range(4):
        random.Random(seed).shuffle(sizes)
        x, dy, splits = leaf(54, K), uniform(54, N), splits_of(sizes, dtype)
        compare(run(op, dy, x, splits), truth(op, dy, x, splits), torch.float32)


@each_path
def test_strided_and_multidimensional_splits_are_read(split_path):
    op = layer(K, N, split_path=split_path)
    x = uniform(ROWS, K, dtype=torch.float32)
    expected = op(x, splits_of())
    for given in (
        splits_of().repeat_interleave(2)[::2],
        splits_of().view(2, 3),
        splits_of((1, *SPLITS))[1:],
        splits_of(dtype=torch.int16),
    ):
        assert torch.equal(op(x, given), expected)


@pytest.mark.parametrize("groups", (1, 65, 300))
def test_any_number_of_groups(groups):
    op = layer(5, 3, groups=groups, scale_bias=True)
    sizes = [g % 3 for g in range(groups)]
    rows = sum(sizes)
    x, dy = leaf(rows, 5), uniform(rows, 3)
    given = (x, *extras_of(op, splits_of(sizes), rows))
    compare(run(op, dy, *given), truth(op, dy, *given), torch.float32)


@each_path
@each_weight
@pytest.mark.parametrize("shape", ((2, 3, 4), (1, 24), (24,), (4, 6)), ids=str)
def test_leading_dimensions_count_as_rows(shape, split_path, single):
    op = layer(K, N, scale_bias=True, split_path=split_path, single_grouped_weight=single)
    x, dy, scales = leaf(*shape, K), uniform(*shape, N), leaf(*shape)
    found = run(op, dy, x, splits_of(), scales)
    assert found["y"].shape == (*shape, N) and scales.grad.shape == shape
    compare(found, truth(op, dy, x, splits_of(), scales), torch.float32)


@each_path
@each_bias
@each_dtype
def test_no_rows_at_all(split_path, bias, dtype):
    op = layer(K, N, dtype=dtype, split_path=split_path, **bias)
    x = leaf(0, K, dtype=dtype)
    found = run(op, uniform(0, N), x, *extras_of(op, splits_of([0] * GROUPS), 0, dtype))
    assert found["y"].shape == (0, N) and x.grad.shape == (0, K)
    for p in op.parameters():
        assert torch.equal(p.grad, torch.zeros_like(p))


@each_path
@each_dtype
@each_weight
def test_padded_tail_is_ignored(split_path, dtype, single):
    """Rows after the last group may contain anything, including NaN."""
    op = layer(K, N, dtype=dtype, scale_bias=True, split_path=split_path, single_grouped_weight=single)
    x, dy, scales = (uniform(ROWS + 9, *s, dtype=dtype) for s in ((K,), (N,), ()))
    for t in (x, dy, scales):
        t[ROWS:] = float("nan")
    x.requires_grad_()
    scales.requires_grad_()
    found = run(op, dy, x, splits_of(), scales)
    for name in ("y", "gradient of x", "gradient of extra 1"):
        assert not found[name][ROWS:].any(), name
        found[name] = found[name][:ROWS]
    given = (x.detach()[:ROWS].requires_grad_(), splits_of(), scales.detach()[:ROWS].requires_grad_())
    compare(found, truth(op, dy[:ROWS], *given), dtype)


@each_path
def test_tail_with_infinities_keeps_delayed_gradients_correct(split_path):
    op = layer(K, N, bias=False, split_path=split_path, delay_wgrad_compute=True)
    x = uniform(ROWS + 5, K, dtype=torch.float32)
    x[ROWS:] = float("inf")
    dy = uniform(ROWS + 5, N, dtype=torch.float32)
    op(x, splits_of()).backward(dy)
    op.backward_dw()
    expected = truth(op, dy[:ROWS], x[:ROWS], splits_of())
    for name, p in op.named_parameters():
        assert_near(p.grad, expected[f"gradient of {name}"], torch.float32, name)


@each_path
@each_dtype
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("width", (20, 64))
def test_groups_do_not_affect_each_other(split_path, dtype, value, width):
    """Kernels process rows in blocks that end at the end of a group."""
    op = layer(width, width, groups=4, dtype=dtype, scale_bias=True, split_path=split_path)
    x, dy, scales = (uniform(60, *s, dtype=dtype) for s in ((width,), (width,), ()))
    given = (x.requires_grad_(), splits_of((21, 5, 33, 1)), scales.requires_grad_())
    expected = truth(op, dy, *given)
    bad = slice(21, 26)
    x.data[bad], dy[bad] = value, value
    found = run(op, dy, *given)
    for name in expected:
        if name == "gradient of extra 0" or name.endswith("1") and name != "gradient of extra 1":
            continue  # splits have no gradient; weight1 and bias1 belong to the group
        got, exact = found[name], expected[name]
        if got.shape[0] == 60:
            assert not got[bad].isfinite().any(), name
            got, exact = (torch.cat([t[: bad.start], t[bad.stop :]]) for t in (got, exact))
        assert_near(got, exact, dtype, name)


def test_strides_of_x_and_dy_do_not_matter():
    op = layer(K, N, scale_bias=True)
    x, dy, scales = uniform(ROWS, K), uniform(ROWS, N), uniform(ROWS)
    expected = truth(op, dy, x.requires_grad_(), splits_of(), scales.requires_grad_())
    for layout in (lambda t: t.t().contiguous().t(), lambda t: t.repeat_interleave(3, 0)[::3], lambda t: t.clone()):
        for given_dy in (layout(dy.float()), dy.float()):
            a, s = (layout(t.detach().float()).requires_grad_() for t in (x, scales))
            compare(run(op, given_dy, a, splits_of(), s), expected, torch.float32)
    broadcast = torch.ones(()).expand(ROWS, N)  # the gradient of a sum
    compare(
        run(op, broadcast, x.detach().float().requires_grad_(), splits_of(), scales.detach().float().requires_grad_()),
        truth(op, broadcast, x, splits_of(), scales),
        torch.float32,
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("scale_dtype", (torch.float32, torch.bfloat16, torch.float64))
@each_path
def test_scales_of_another_dtype_keep_precision(dtype, scale_dtype, split_path):
    """With a zero GEMM result the output is s·b, rounded once."""
    op = layer(K, N, dtype=dtype, scale_bias=True, split_path=split_path)
    x, scales = torch.zeros(ROWS, K, dtype=dtype), leaf(ROWS, dtype=scale_dtype)
    dy = uniform(ROWS, N, dtype=dtype)
    found, expected = run(op, dy, x, splits_of(), scales), truth(op, dy, x, splits_of(), scales)
    assert scales.grad.dtype == scale_dtype
    error = (found["y"].double() - expected["y"]).abs() / expected["y"].abs().clamp_min(1e-30)
    assert error.max() <= (2**-8 if dtype == torch.bfloat16 else 2**-22) * 1.01
    compare(found, expected, torch.bfloat16 if torch.bfloat16 in (dtype, scale_dtype) else torch.float32)


@each_dtype
def test_both_paths_agree(dtype):
    ways = [layer(64, 48, groups=4, dtype=dtype, split_path=split) for split in (False, True)]
    ways[1].load_state_dict(ways[0].state_dict())
    x, dy, splits = leaf(100, 64, dtype=dtype), uniform(100, 48, dtype=dtype), splits_of((17, 33, 0, 50))
    first, second = (run(op, dy, x, splits) for op in ways)
    compare(first, {name: t if t is None else t.double() for name, t in second.items()}, dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_split_path_matches_separate_linears(dtype):
    op = layer(K, N, dtype=dtype, split_path=True)
    x, dy = leaf(ROWS, K, dtype=dtype), uniform(ROWS, N, dtype=dtype)
    found = run(op, dy, x, splits_of())
    parts, start = [], 0
    for g, rows in enumerate(SPLITS):
        linear = ops.Linear(K, N, dtype=dtype)
        linear.load_state_dict({"weight": op.get_parameter(f"weight{g}"), "bias": op.get_parameter(f"bias{g}")})
        part = x.detach()[start : start + rows].requires_grad_()
        parts.append(run(linear, dy[start : start + rows], part))
        start += rows
    assert torch.equal(found["y"], torch.cat([p["y"] for p in parts]))
    assert torch.equal(found["gradient of x"], torch.cat([p["gradient of x"] for p in parts]))
    for g, part in enumerate(parts):
        assert torch.equal(found[f"gradient of weight{g}"], part["gradient of weight"])
        assert_near(found[f"gradient of bias{g}"], part["gradient of bias"].double(), dtype)


@each_dtype
@each_path
def test_layouts_and_runs_agree_bitwise(dtype, split_path):
    source = layer(K, N, dtype=dtype, scale_bias=True)
    x, dy, scales = leaf(ROWS, K, dtype=dtype), uniform(ROWS, N, dtype=dtype), leaf(ROWS)
    results = []
    for layout in (*LAYOUTS.values(), LAYOUTS["discrete"]):
        op = layer(K, N, dtype=dtype, scale_bias=True, split_path=split_path, **layout)
        op.load_state_dict(source.state_dict())
        found = run(op, dy, x, splits_of(), scales)
        weights = [p.grad if p.dim() == 3 else p.grad[None] for n, p in op.named_parameters() if "weight" in n]
        biases = [p.grad if p.dim() == 2 else p.grad[None] for n, p in op.named_parameters() if "bias" in n]
        results.append([found["y"], x.grad, scales.grad, torch.cat(weights), torch.cat(biases)])
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_parameters_may_be_anywhere_in_memory():
    """Users replace parameters: nothing relies on their initial layout."""
    op = layer(K, N)
    for g in range(GROUPS):
        weight = uniform(K, N, dtype=torch.float32).t() if g % 2 else uniform(N, K, dtype=torch.float32)
        setattr(op, f"weight{g}", torch.nn.Parameter(weight))
    op.bias2 = torch.nn.Parameter(torch.stack([uniform(N, dtype=torch.float32)] * 2, 1)[:, 0])
    x, dy = leaf(ROWS, K), uniform(ROWS, N)
    compare(run(op, dy, x, splits_of()), truth(op, dy, x, splits_of()), torch.float32)
    single = layer(K, N, single_grouped_weight=True)
    single.weight = torch.nn.Parameter(uniform(N, GROUPS, K, dtype=torch.float32).transpose(0, 1))
    compare(run(single, dy, x, splits_of()), truth(single, dy, x, splits_of()), torch.float32)


def test_parameter_shared_by_two_groups_gets_both_gradients():
    op = layer(K, N)
    op.weight3 = op.weight0
    x, dy = leaf(ROWS, K), uniform(ROWS, N)
    compare(run(op, dy, x, splits_of()), truth(op, dy, x, splits_of()), torch.float32)


@each_weight
def test_one_op_used_twice(single):
    op = layer(K, K, scale_bias=True, single_grouped_weight=single)
    both = torchweft.Sequential(op, ops.GELU(), op)
    x, dy, scales = leaf(ROWS, K), uniform(ROWS, K), leaf(ROWS)
    given = (x, splits_of(), scales, splits_of(), scales)
    found, expected = run(both, dy, *given), truth(both, dy, *given)
    expected["gradient of extra 1"] = expected["gradient of extra 1"] + expected["gradient of extra 3"]
    expected["gradient of extra 3"] = expected["gradient of extra 1"]  # one tensor, one .grad
    compare(found, expected, torch.float32)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@each_path
@each_weight
def test_autocast_dtype_and_gradient_dtypes(dtype, split_path, single):
    op = layer(K, N, scale_bias=True, split_path=split_path, single_grouped_weight=single)
    x, dy, scales = leaf(ROWS, K), uniform(ROWS, N), leaf(ROWS)
    with torch.autocast("cpu", dtype=dtype):
        y = op(x, splits_of(), scales)
    assert y.dtype == dtype
    y.backward(dy.to(dtype))
    expected = truth(op, dy, x, splits_of(), scales)
    assert_near(y, expected["y"], dtype)
    for name, t in (("x", x), ("extra 1", scales), *op.named_parameters()):
        assert t.grad.dtype == torch.float32
        assert_near(t.grad, expected[f"gradient of {name}"], dtype, name)


# ---- saved tensors --------------------------------------------------------------------------------------------------


@each_path
def test_nothing_is_saved_that_no_gradient_reads(split_path):
    op = layer(K, N, split_path=split_path)
    x = leaf(ROWS, K)

    def kept(x) -> set[int]:
        return {t.data_ptr() for t in saved_tensors(lambda: op(x, splits_of()))}

    assert x.data_ptr() in kept(x)
    with torch.no_grad():
        assert kept(x) == set()
    op.requires_grad_(False)
    assert x.data_ptr() not in kept(x)
    assert kept(x.detach()) == set()
    op.requires_grad_(True)
    weights = {op.get_parameter(f"weight{g}").data_ptr() for g in range(GROUPS)}
    assert not weights & kept(x.detach())


# ---- parameters -----------------------------------------------------------------------------------------------------

NAMES = {
    "discrete": ["weight0", "bias0", "weight1", "bias1"],  # the order by which optimizer states are keyed
    "single weight": ["bias0", "bias1", "weight"],
    "single bias": ["weight0", "weight1", "bias"],
    "single both": ["weight", "bias"],
}


@pytest.mark.parametrize("name", NAMES)
def test_parameter_names_order_and_shapes(name):
    op = ops.GroupedLinear(2, K, N, **LAYOUTS[name])
    assert [n for n, _ in op.named_parameters()] == NAMES[name]
    shapes = {"weight": (2, N, K), "bias": (2, N)} | {f"weight{g}": (N, K) for g in (0, 1)}
    shapes |= {f"bias{g}": (N,) for g in (0, 1)}
    for n, p in op.named_parameters():
        assert tuple(p.shape) == shapes[n] and p.dtype == torch.float32 and p.requires_grad
    without = ops.GroupedLinear(2, K, N, bias=False, **LAYOUTS[name])
    assert [n for n, _ in without.named_parameters()] == [n for n in NAMES[name] if "weight" in n]


@each_layout
def test_empty_slots_are_none(layout):
    op = ops.GroupedLinear(2, K, N, **layout)
    single_weight, single_bias = "single_grouped_weight" in layout, "single_grouped_bias" in layout
    for kind, single in (("weight", single_weight), ("bias", single_bias)):
        for g in (0, 1):
            assert (getattr(op, f"{kind}{g}") is None) == single
    if single_weight:
        assert isinstance(op.weight, torch.nn.Parameter)
    if single_bias:
        assert isinstance(op.bias, torch.nn.Parameter)
    without = ops.GroupedLinear(2, K, N, bias=False, **layout)
    assert without.bias0 is None and without.bias1 is None


@each_weight
def test_initial_weights_are_bounded_and_biases_zero(single):
    op = ops.GroupedLinear(3, 16, 400, single_grouped_weight=single, single_grouped_bias=single)
    weights = list(op.weight) if single else [op.weight0, op.weight1, op.weight2]
    for w in weights:
        assert w.abs().max() <= 1 / math.sqrt(16) and w.abs().max() > 0.95 / math.sqrt(16)
        assert abs(w.mean()) < 0.02
    assert not torch.equal(weights[0], weights[1])
    assert not any(p.any() for n, p in op.named_parameters() if "bias" in n)


@each_weight
def test_rng_tracker_is_forked_once_per_expert(single):
    forks = []

    class Tracker:
        @contextmanager
        def fork(self):
            forks.append(1)
            yield

    ops.GroupedLinear(5, K, N, bias=False, single_grouped_weight=single, rng_state_tracker_function=Tracker)
    assert len(forks) == 5


@pytest.mark.parametrize("single", (False, True), ids=("discrete", "single"))
def test_one_seed_gives_same_weights_in_every_layout(single):
    torch.manual_seed(3)
    op = ops.GroupedLinear(3, K, N, single_grouped_weight=single)
    torch.manual_seed(3)
    blocks = [torch.nn.init.uniform_(torch.empty(N, K), -1 / math.sqrt(K), 1 / math.sqrt(K)) for _ in range(3)]
    found = op.weight if single else torch.stack([op.weight0, op.weight1, op.weight2])
    assert torch.equal(found, torch.stack(blocks))


def test_members_are_contiguous_at_first():
    op = ops.GroupedLinear(3, K, N)
    for kind, size in (("weight", N * K), ("bias", N)):
        members = [op.get_parameter(f"{kind}{g}") for g in range(3)]
        assert len({p.untyped_storage().data_ptr() for p in members}) == 1
        assert [p.data_ptr() - members[0].data_ptr() for p in members] == [4 * size * g for g in range(3)]


def test_single_parameter_is_used():
    op = layer(K, N, single_grouped_weight=True, single_grouped_bias=True)
    x = uniform(ROWS, K, dtype=torch.float32)
    with torch.no_grad():
        op.weight.zero_()
        op.bias.fill_(2.5)
    assert torch.equal(op(x, splits_of()), torch.full((ROWS, N), 2.5))
    assert dict(op.named_parameters())["bias"] is op.bias and op.bias.requires_grad


@each_layout
def test_copies_and_pickles_give_same_results(layout):
    op = layer(K, N, scale_bias=True, **layout)
    x, scales = uniform(ROWS, K, dtype=torch.float32), uniform(ROWS, dtype=torch.float32)
    buffer = io.BytesIO()
    torch.save(op, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(op), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x, splits_of(), scales), op(x, splits_of(), scales))
        assert [n for n, _ in other.named_parameters()] == [n for n, _ in op.named_parameters()]
        assert repr(other) == repr(op)
        with torch.no_grad():
            for p in other.parameters():
                p.add_(1)
        assert not torch.equal(other(x, splits_of(), scales), op(x, splits_of(), scales))


@pytest.mark.parametrize("single", (False, True), ids=("discrete", "single"))
def test_meta_module_adopts_existing_parameters(single):
    shell = ops.GroupedLinear(
        GROUPS, K, N, bias=False, single_grouped_weight=single, delay_wgrad_compute=True, device="meta"
    )
    real = layer(K, N, bias=False, single_grouped_weight=single)
    for name, p in real.named_parameters():
        p.main_grad = torch.ones(1)
        shell.register_parameter(name, p)
    x = uniform(ROWS, K, dtype=torch.float32)
    assert torch.equal(shell(x, splits_of()), real(x, splits_of()))
    for name, p in real.named_parameters():
        assert shell.get_parameter(name) is p and p.skip_backward_post_hook is True and hasattr(p, "main_grad")


@each_layout
def test_meta_module_materializes_at_first_call(layout):
    op = ops.GroupedLinear(GROUPS, K, N, device="meta", **layout)
    assert all(p.is_meta for p in op.parameters())
    y = op(uniform(ROWS, K, dtype=torch.float32), splits_of())
    assert y.isfinite().all() and not any(p.is_meta for p in op.parameters())
    y.sum().backward()
    assert all(p.grad is not None for p in op.parameters())


def test_delayed_weights_are_always_marked():
    op = ops.GroupedLinear(2, K, N, delay_wgrad_compute=True)
    assert op.weight0.skip_backward_post_hook and op.weight1.skip_backward_post_hook
    assert not hasattr(op.bias0, "skip_backward_post_hook")
    op.weight1 = torch.nn.Parameter(torch.zeros(N, K))
    assert op.weight1.skip_backward_post_hook
    assert all(p.skip_backward_post_hook for n, p in copy.deepcopy(op).named_parameters() if "weight" in n)
    assert not hasattr(ops.GroupedLinear(2, K, N).weight0, "skip_backward_post_hook")


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def same(a: ops.GroupedLinear, b: ops.GroupedLinear) -> bool:
    x, scales = uniform(ROWS, K, dtype=torch.float32), uniform(ROWS, dtype=torch.float32)
    return torch.equal(a(x, splits_of(), scales), b(x, splits_of(), scales))


@pytest.mark.parametrize("nested", (False, True), ids=("alone", "in a Sequential"))
@pytest.mark.parametrize("target", LAYOUTS.values(), ids=LAYOUTS)
@each_layout
def test_checkpoint_of_one_layout_loads_into_any_other(layout, target, nested):
    source, other = (layer(K, N, scale_bias=True, **options) for options in (layout, target))
    if nested:
        models = [torchweft.Sequential(ops.Identity(), torch.nn.Sequential(op)) for op in (source, other)]
    else:
        models = [source, other]
    state = models[0].state_dict()
    keys, values = list(state), [t.clone() for t in state.values()]
    result = models[1].load_state_dict(state, strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert same(source, other)
    assert list(state) == keys and all(map(torch.equal, state.values(), values)) and hasattr(state, "_metadata")
    again = layer(K, N, scale_bias=True, **layout)
    again.load_state_dict(other.state_dict())
    for a, b in zip(source.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_packed_bias_may_have_middle_dimension_of_one():
    source = layer(K, N, scale_bias=True, single_grouped_bias=True)
    state = source.state_dict()
    state["bias"] = state["bias"].unsqueeze(1)
    for layout in LAYOUTS.values():
        other = layer(K, N, scale_bias=True, **layout)
        other.load_state_dict(state)
        assert same(source, other)


def test_both_layouts_in_one_checkpoint_load():
    single, discrete = layer(K, N, bias=False, single_grouped_weight=True), layer(K, N, bias=False)
    state = {**single.state_dict(), **discrete.state_dict()}
    for source in (single, discrete):
        other = layer(K, N, bias=False, single_grouped_weight=source is single)
        other.load_state_dict(state, strict=True)
        assert all(map(torch.equal, other.parameters(), source.parameters()))


def test_incomplete_members_are_reported():
    state = layer(K, N).state_dict()
    del state["weight3"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight3"'):
        layer(K, N).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight"'):
        layer(K, N, single_grouped_weight=True).load_state_dict(state)
    result = layer(K, N, single_grouped_weight=True).load_state_dict(state, strict=False)
    assert result.missing_keys == ["weight"] and "weight0" in result.unexpected_keys


def test_checkpoint_of_other_group_count_is_rejected():
    for source_single in (False, True):
        for target_single in (False, True):
            source = layer(K, N, groups=3, single_grouped_weight=source_single)
            with pytest.raises(RuntimeError):
                layer(K, N, groups=4, single_grouped_weight=target_single).load_state_dict(source.state_dict())
            source = layer(K, N, groups=5, single_grouped_weight=source_single)
            with pytest.raises(RuntimeError):
                layer(K, N, groups=4, single_grouped_weight=target_single).load_state_dict(source.state_dict())


def test_assign_and_meta_load_across_layouts():
    source = layer(K, N, scale_bias=True, single_grouped_weight=True)
    other = ops.GroupedLinear(GROUPS, K, N, scale_bias=True, device="meta")
    other.load_state_dict(source.state_dict(), assign=True)
    assert same(source, other)


# ---- buffers of the caller ------------------------------------------------------------------------------------------

SENTINEL = 7.0


@each_path
@each_dtype
def test_results_are_written_into_given_tensors(split_path, dtype):
    op = layer(K, N, dtype=dtype, split_path=split_path)
    x, dy, splits = leaf(ROWS + 5, K, dtype=dtype), uniform(ROWS + 5, N, dtype=dtype), splits_of()
    plain_y = op(x, splits)
    plain_y.backward(dy)
    plain_dx, x.grad = x.grad, None
    output, grad_input = (torch.full((ROWS + 5, w), SENTINEL, dtype=dtype) for w in (N, K))
    for _ in range(2):  # reused: a detached alias
        y = op(x, splits, output=output.detach(), grad_input=grad_input.detach())
        assert y.data_ptr() == output.data_ptr() and y.requires_grad
        (dx,) = torch.autograd.grad(y, x, dy)
        assert dx.data_ptr() == grad_input.data_ptr()
        assert torch.equal(y[:ROWS], plain_y[:ROWS]) and torch.equal(dx[:ROWS], plain_dx[:ROWS])
        for buffer in (output, grad_input):
            assert torch.equal(buffer[ROWS:], torch.full_like(buffer[ROWS:], SENTINEL))
    with torch.no_grad():
        assert op(x, splits, output=output).data_ptr() == output.data_ptr()


def test_buffers_keep_leading_dimensions():
    op = layer(K, N)
    x = leaf(2, 12, K)
    output, grad_input = torch.empty(2, 12, N), torch.empty(2, 12, K)
    y = op(x, splits_of(), output=output, grad_input=grad_input)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == (2, 12, N) and dx.shape == x.shape
    assert y.data_ptr() == output.data_ptr() and dx.data_ptr() == grad_input.data_ptr()


def test_sequential_passes_buffers_to_named_ops():
    first, last = layer(K, 8), layer(8, N)
    model = torchweft.Sequential(first, ops.GELU(), last)
    x, dy = leaf(ROWS, K), uniform(ROWS, N, dtype=torch.float32)
    given = (splits_of(), splits_of())
    expected = model(x, *given)
    (expected_dx,) = torch.autograd.grad(expected, x, dy)
    output, grad_input = torch.empty(ROWS, N), torch.empty(ROWS, K)
    y = model(x, *given, op_kwargs={0: {"grad_input": grad_input}, last: {"output": output}})
    (dx,) = torch.autograd.grad(y, x, dy)
    assert y.data_ptr() == output.data_ptr() and dx.data_ptr() == grad_input.data_ptr()
    assert torch.equal(y, expected) and torch.equal(dx, expected_dx)
    middle = torch.empty(ROWS, 8)
    model(x, *given, op_kwargs={0: {"output": middle}})
    assert torch.equal(middle, first(x, splits_of()))
    with pytest.raises(TypeError, match="output"):
        model(x, *given, op_kwargs={1: {"output": middle}})
    with pytest.raises(ValueError, match="expected an index below 3 or one of its"):
        model(x, *given, op_kwargs={layer(K, 8): {"output": middle}})


BAD_BUFFERS = {
    "rows": (lambda n: torch.empty(ROWS + 1, n), r"\[24, .*\[25|\[25, .*\[24"),
    "columns": (lambda n: torch.empty(ROWS, n + 1), "expected"),
    "dimensions": (lambda n: torch.empty(ROWS * n), "expected"),
    "dtype": (lambda n: torch.empty(ROWS, n, dtype=torch.bfloat16), "bfloat16.*expected.*float32"),
    "device": (lambda n: torch.empty(ROWS, n, device="meta"), "meta"),
    "strides": (lambda n: torch.empty(n, ROWS).t(), "contiguous"),
    "requires grad": (lambda n: torch.empty(ROWS, n, requires_grad=True), "requires"),
}


@pytest.mark.parametrize("what", ("output", "grad_input"))
@pytest.mark.parametrize("case", BAD_BUFFERS)
def test_mismatched_buffer_is_rejected_with_both_values(case, what):
    op = layer(K, N)
    make, message = BAD_BUFFERS[case]
    with pytest.raises(ValueError, match=message) as caught:
        op(leaf(ROWS, K), splits_of(), **{what: make(N if what == "output" else K)})
    assert what in str(caught.value) and "GroupedLinear" in str(caught.value)


def test_buffer_aliasing_operand_is_rejected():
    op = layer(K, K)
    x = leaf(ROWS, K)
    memory = torch.empty(2 * ROWS, K)
    half = memory[:ROWS].detach()
    shifted = memory.view(-1)[K // 2 : K // 2 + ROWS * K].view(ROWS, K)
    for what in ("output", "grad_input"):
        with pytest.raises(ValueError, match="shares memory"):
            op(x, splits_of(), **{what: x.detach()})
        with pytest.raises(ValueError, match="shares memory"):
            op(half.requires_grad_(), splits_of(), **{what: shifted})
    wide = layer(4, 4, groups=1)
    with pytest.raises(ValueError, match="shares memory"):
        wide(leaf(4, 4), splits_of([4]), output=wide.weight0.detach())


def test_result_in_memory_of_scales_or_splits_is_rejected():
    op = layer(K, N, groups=1, scale_bias=True)
    memory = torch.zeros(ROWS * N)
    with pytest.raises(ValueError, match="shares memory"):
        op(leaf(ROWS, K), splits_of([ROWS]), memory[:ROWS], output=memory.view(ROWS, N))


def test_buffers_for_op_without_buffers_are_rejected():
    with pytest.raises(TypeError, match="output"):
        ops.Linear(4, 4)(torch.ones(2, 4), output=torch.ones(2, 4))
    with pytest.raises(TypeError, match="'out'"):
        layer(K, N)(leaf(ROWS, K), splits_of(), out=torch.ones(ROWS, N))
    with pytest.raises(TypeError):
        layer(K, N)(leaf(ROWS, K), splits_of(), output=[1.0])


def test_writing_output_buffer_bumps_version():
    op = layer(K, N)
    output = torch.zeros(ROWS, N)
    saved = (output * leaf(ROWS, N)).sum()  # keeps the buffer for its gradient
    op(uniform(ROWS, K, dtype=torch.float32), splits_of(), output=output)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@each_path
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
def test_dy_in_memory_of_dx_is_correct_or_rejected(split_path, delay):
    """A framework may use one buffer for both."""
    op = layer(K, K, split_path=split_path, delay_wgrad_compute=delay)
    x, memory = leaf(ROWS, K), uniform(ROWS, K, dtype=torch.float32)
    expected = truth(op, memory.clone(), x, splits_of())
    try:
        found = collect(op, op(x, splits_of(), grad_input=memory.detach()), memory, x, splits_of())
        op.backward_dw()
    except (RuntimeError, ValueError) as error:
        assert "grad_input" in str(error) or "in place" in str(error)
        return
    found |= {f"gradient of {name}": p.grad for name, p in op.named_parameters()}
    compare(found, expected, torch.float32)


def test_buffer_reused_too_early_is_detected():
    """Autograd, and a pending weight gradient, detect that a saved tensor was overwritten."""
    first, last = layer(K, K), layer(K, K, delay_wgrad_compute=True)
    x, output = uniform(ROWS, K, dtype=torch.float32), torch.empty(ROWS, K)
    y = first(x, splits_of(), output=output.detach())
    kept = (y.square().sum(), last(y, splits_of()).sum())
    first(2 * x, splits_of(), output=output.detach())
    for loss in kept:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    last(first(x, splits_of(), output=output.detach()), splits_of()).sum().backward()
    first(2 * x, splits_of(), output=output.detach())
    with pytest.raises(RuntimeError, match="modified in place"):
        last.backward_dw()


def test_delayed_gradient_detects_overwritten_memory():
    first, last = layer(K, K, delay_wgrad_compute=True), layer(K, K)
    grad_input = torch.empty(ROWS, K)
    for _ in range(2):
        x = uniform(ROWS, K, dtype=torch.float32)
        last(first(x, splits_of()), splits_of(), grad_input=grad_input.detach()).backward(x)
    with pytest.raises(RuntimeError, match="modified in place"):
        first.backward_dw()


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, value",
    [((0, 4, 4), "num_groups is 0"), ((2, -3, 4), "in_features is -3"), ((2, 4, 0), "out_features is 0")],
)
def test_sizes_must_be_positive(sizes, value):
    with pytest.raises(ValueError, match=value):
        ops.GroupedLinear(*sizes)


@pytest.mark.parametrize("groups", [1, 3])
def test_num_groups_cannot_change(groups):
    op = ops.GroupedLinear(2, 4, 4)
    with pytest.raises(ValueError, match=f"num_groups is 2 and cannot become {groups}.*new GroupedLinear"):
        op.num_groups = groups
    op.num_groups = 2
    assert op.num_groups == 2 and op(torch.ones(3, 4), torch.tensor([1, 2])).shape == (3, 4)


def test_dtype_must_be_floating_point():
    for dtype in (torch.int32, torch.complex64, torch.bool):
        with pytest.raises(ValueError, match=str(dtype).removeprefix("torch.")):
            ops.GroupedLinear(2, 4, 4, dtype=dtype)


def broken(change) -> ops.GroupedLinear:
    op = layer(K, N)
    with torch.no_grad():
        change(op)
    return op


def set_parameter(name: str, value):
    return lambda op: setattr(op, name, None if value is None else torch.nn.Parameter(value))


INCONSISTENT = {
    "dtype of a weight": (set_parameter("weight2", torch.zeros(N, K).bfloat16()), "weight 2.*bfloat16.*float32"),
    "a frozen weight": (lambda op: op.weight4.requires_grad_(False), "weight 4 does not require"),
    "the first weight frozen": (lambda op: op.weight0.requires_grad_(False), "weight 1 requires a gradient"),
    "a frozen bias": (lambda op: op.bias3.requires_grad_(False), "bias 3 does not require"),
    "biases wanted, weights frozen": (
        lambda op: [op.get_parameter(f"weight{g}").requires_grad_(False) for g in range(GROUPS)],
        "bias 0 requires a gradient",
    ),
    "dtype of a bias": (set_parameter("bias5", torch.zeros(N).double()), "bias 5.*float64.*float32"),
}


@pytest.mark.parametrize("case", INCONSISTENT)
def test_inconsistent_parameters_are_rejected_by_index(case):
    change, message = INCONSISTENT[case]
    with pytest.raises(RuntimeError, match=message):
        broken(change)(leaf(ROWS, K), splits_of())


def test_missing_parameter_is_named():
    for name in ("bias1", "weight3"):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=name):
            broken(set_parameter(name, None))(leaf(ROWS, K), splits_of())


@pytest.mark.parametrize(
    "options, name",
    [
        ({"bias": False}, "bias0"),
        ({"bias": False}, "bias"),
        ({"single_grouped_weight": True}, "weight0"),
        ({"single_grouped_bias": True}, "bias1"),
        ({}, "weight"),
        ({}, f"weight{GROUPS}"),
    ],
)
def test_unused_parameter_is_rejected(options, name):
    op = layer(K, N, **options)
    with pytest.raises(ValueError, match=f"GroupedLinear has no parameter '{name}'"):
        setattr(op, name, torch.nn.Parameter(torch.zeros(N)))
    assert name not in dict(op.named_parameters())
    op(leaf(ROWS, K), splits_of()).sum().backward()


def test_parameter_of_wrong_shape_is_rejected():
    for name, value in (("weight1", torch.zeros(K, N)), ("weight1", torch.zeros(N, K + 1)), ("bias0", torch.zeros(1))):
        with pytest.raises((RuntimeError, ValueError), match=r"shape|values"):
            broken(set_parameter(name, value))(leaf(ROWS, K), splits_of())
    op = layer(K, N, single_grouped_weight=True)
    for shape in ((GROUPS - 1, N, K), (GROUPS * N, K), (GROUPS, K, N)):
        op.weight = torch.nn.Parameter(torch.zeros(shape))
        with pytest.raises((RuntimeError, ValueError), match="shape"):
            op(leaf(ROWS, K), splits_of())


BAD_SPLITS = {
    "too few": (torch.tensor(SPLITS[1:]), ValueError, "expected 6 split sizes.*got 5"),
    "too many": (torch.tensor([*SPLITS, 0]), ValueError, "expected 6 split sizes.*got 7"),
    "none": (torch.tensor([], dtype=torch.int64), ValueError, "expected 6 split sizes.*got 0"),
    "negative": (torch.tensor([7, -1, 12, 1, 0, 4]), ValueError, "split 1 of 6 is -1"),
    "negative int32": (torch.tensor([7, 0, 12, 1, 0, -4], dtype=torch.int32), ValueError, "split 5 of 6 is -4"),
    "too large a sum": (torch.tensor([7, 0, 12, 1, 1, 4]), ValueError, "has 24"),
    "float": (torch.tensor(SPLITS).float(), TypeError, "float32.*expected integers"),
    "bool": (torch.ones(GROUPS, dtype=torch.bool), TypeError, "bool.*expected integers"),
    "on meta": (torch.tensor(SPLITS, device="meta"), ValueError, "meta.*cpu"),
    "past 2^31": (torch.tensor([2**40, 0, 0, 0, 0, 0]), ValueError, str(2**40)),
    "largest": (torch.tensor([2**63 - 1] * 6), ValueError, str(2**63 - 1)),
    "wraps around": (torch.tensor([2**62, 2**62, 2**62, 2**62, 0, 24]), ValueError, str(2**62)),
    "smallest": (torch.tensor([-(2**63)] * 6), ValueError, "split 0"),
}


@each_path
@each_weight
@pytest.mark.parametrize("case", BAD_SPLITS)
def test_bad_splits_raise_without_side_effects(case, split_path, single):
    splits, error, message = BAD_SPLITS[case]
    op = layer(K, N, split_path=split_path, single_grouped_weight=single)
    x, output = leaf(ROWS, K), torch.full((ROWS, N), SENTINEL)
    for keywords in ({}, {"output": output}):
        with pytest.raises(error, match=message):
            op(x, splits, **keywords)
    assert torch.equal(output, torch.full_like(output, SENTINEL))
    dy = uniform(ROWS, N)
    compare(run(op, dy, x, splits_of()), truth(op, dy, x, splits_of()), torch.float32)  # the next call works


@each_path
def test_splits_made_bad_before_backward_raise(split_path):
    op = layer(K, N, split_path=split_path, bias=False)
    splits = splits_of()
    y = op(leaf(ROWS, K), splits)
    splits[0] = 2**40
    with pytest.raises((ValueError, RuntimeError), match="inplace|sum to"):
        y.sum().backward()


def test_other_invalid_arguments_are_named():
    op = layer(K, N, scale_bias=True)
    x = leaf(ROWS, K)
    with pytest.raises(ValueError, match=r"\[24, 19\].*20 features"):
        op(x[:, 1:], splits_of(), leaf(ROWS))
    with pytest.raises(ValueError, match=r"\[23\].*24 rows"):
        op(x, splits_of(), leaf(ROWS - 1))
    with pytest.raises(ValueError, match="2 extra inputs .*, got 1"):
        op(x, splits_of())
    with pytest.raises(ValueError, match="1 extra input .*, got 2"):
        layer(K, N)(x, splits_of(), leaf(ROWS))
    with pytest.raises(TypeError):
        layer(K, N)(x, list(SPLITS))
    with pytest.raises((RuntimeError, NotImplementedError), match="GroupedLinear"):
        op.op_forward(None, x)


# ---- other ways to call it ------------------------------------------------------------------------------------------


@each_weight
@each_bias
@each_path
def test_meta_tensors_have_right_sizes(single, bias, split_path):
    op = ops.GroupedLinear(4, K, N, single_grouped_weight=single, device="meta", split_path=split_path, **bias)
    x = torch.empty(2, 9, K, device="meta", requires_grad=True)
    scales = [torch.empty(2, 9, device="meta", requires_grad=True)] if op.num_extra_inputs == 2 else []
    y = op(x, torch.empty(4, dtype=torch.int64, device="meta"), *scales)
    assert y.is_meta and y.shape == (2, 9, N)
    y.sum().backward()
    assert x.grad.is_meta and x.grad.shape == x.shape
    for p in (*op.parameters(), *scales):
        assert p.grad.is_meta and p.grad.shape == p.shape


@each_weight
def test_compiled_grouped_linear_matches_eager(single):
    torch._dynamo.reset()
    op = layer(K, N, scale_bias=True, single_grouped_weight=single)
    x, dy, scales = leaf(ROWS, K), uniform(ROWS, N, dtype=torch.float32), leaf(ROWS)
    expected = run(op, dy, x, splits_of(), scales)
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    found = collect(op, compiled(x, splits_of(), scales), dy, x, splits_of(), scales)
    assert all(found[name] is t is None or torch.equal(found[name], t) for name, t in expected.items())
    output = torch.zeros(ROWS, N)
    y = torch.compile(lambda *t: op(*t, output=output), backend="aot_eager")(x, splits_of(), scales)
    assert torch.equal(output, y), "the buffer is used under a compiler"


def test_checkpointing_and_functional_calls_work():
    op = layer(K, N)
    x, dy = leaf(ROWS, K), uniform(ROWS, N, dtype=torch.float32)
    expected = truth(op, dy, x, splits_of())
    for call in (
        lambda: torch.utils.checkpoint.checkpoint(op, x, splits_of(), use_reentrant=False),
        lambda: torch.func.functional_call(op, dict(op.named_parameters()), (x, splits_of())),
    ):
        for t in (x, *op.parameters()):
            t.grad = None
        call().backward(dy)
        assert_near(x.grad, expected["gradient of x"], torch.float32)
        for name, p in op.named_parameters():
            assert_near(p.grad, expected[f"gradient of {name}"], torch.float32, name)


def test_gradients_match_finite_differences():
    op = layer(3, 2, groups=3, dtype=torch.float64, scale_bias=True)
    x, scales, splits = leaf(6, 3, dtype=torch.float64), leaf(6, dtype=torch.float64), splits_of((2, 0, 3))
    assert torch.autograd.gradcheck(lambda *_: op(x, splits, scales), (x, scales, *op.parameters()))


def test_prepacked_weights_work():
    for single in (False, True):
        op = layer(64, 64, dtype=torch.bfloat16, single_grouped_weight=single)
        x = uniform(ROWS, 64, dtype=torch.bfloat16)
        expected = op(x, splits_of())
        torchweft.prepack(op)
        assert torch.equal(op(x, splits_of()), expected)
        torchweft.prepack(op, frozen=False)


def test_threads_may_share_module():
    op = layer(K, N)
    x = uniform(ROWS, K, dtype=torch.float32)
    expected, wrong = op(x, splits_of()), []

    def work():
        for _ in range(50):
            if not torch.equal(op(x, splits_of()), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_explain_names_op_and_options():
    op = layer(K, N, split_path=True)
    text = torchweft.explain(op, leaf(ROWS, K), splits_of()).text
    assert "GroupedLinear" in text and "split_path=true" in text
