"""Experts: GroupedLinear, scaled activation, GroupedLinear, fused and unfused."""

from __future__ import annotations

import pytest
import torch
from experts import (
    ACTIVATIONS,
    GATED,
    GROUPS,
    ROWS,
    SPLITS,
    assert_near,
    collect,
    compare,
    layer,
    leaf,
    mlp,
    run,
    saved_tensors,
    scaled_activation,
    splits_of,
    truth,
    unfused,
    uniform,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import torchweft
from torchweft import ops

K, HIDDEN, N = 12, 32, 10
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_weight = pytest.mark.parametrize("single", (False, True), ids=("discrete", "single"))
with_bias = pytest.mark.parametrize("bias", (True, False), ids=("bias", "no bias"))


def inputs(model, rows: int = ROWS, dtype=torch.float32, probs_dtype=None) -> list[torch.Tensor]:
    """x, splits, probabilities, splits and, if the last bias is scaled, the same probabilities."""
    probs = torch.rand(rows, dtype=torch.float64).to(probs_dtype or dtype).requires_grad_()
    splits = splits_of()
    return [leaf(rows, K, dtype=dtype), splits, probs, splits, *[probs] * (model[2].num_extra_inputs - 1)]


def shared_gradients(found: dict, given: list[torch.Tensor]) -> dict:
    """In the reference every extra input is a separate leaf; a tensor passed twice gets the sum."""
    found = dict(found)
    if len(given) == 5 and given[2] is given[4] and found["gradient of extra 1"] is not None:
        both = found["gradient of extra 1"] + found["gradient of extra 3"]
        found["gradient of extra 1"] = found["gradient of extra 3"] = both
    return found


def names_of_steps(model, given) -> tuple[list[str], list[str]]:
    data = torchweft.explain(model, *given).data[0]
    return [s["name"] for s in data["forward"]], [s["name"] for s in data["backward"]]


def check(model, given, dtype, rows: int = ROWS) -> dict:
    dy = uniform(rows, N, dtype=dtype)
    found = run(model, dy, *given)
    compare(found, shared_gradients(truth(model, dy, *given), given), dtype)
    return found


# ---- values and gradients -------------------------------------------------------------------------------------------


@each_dtype
@each_activation
@with_bias
@each_weight
@pytest.mark.parametrize("interleave", (None, 32))
def test_values_and_gradients_match_loop(dtype, activation, bias, single, interleave):
    if interleave and activation not in GATED:
        pytest.skip("has no halves")
    model = mlp(activation, K, HIDDEN, N, interleave=interleave, dtype=dtype, bias=bias, single_grouped_weight=single)
    given = inputs(model, dtype=dtype)
    assert names_of_steps(model, given) == (["grouped_mlp"], ["grouped_mlp"])
    check(model, given, dtype)


@each_dtype
@each_activation
@with_bias
def test_fused_and_unfused_agree(dtype, activation, bias):
    model = mlp(activation, K, HIDDEN, N, dtype=dtype, bias=bias)
    given, dy = inputs(model, dtype=dtype), uniform(ROWS, N, dtype=dtype)
    fused = run(model, dy, *given)
    with unfused():
        assert names_of_steps(model, given)[0] == ["GroupedLinear", activation, "GroupedLinear"]
        parts = run(model, dy, *given)
    compare(fused, {name: t if t is None else t.double() for name, t in parts.items()}, dtype)


@each_activation
@each_dtype
def test_layouts_and_runs_agree_bitwise(activation, dtype):
    models = [
        mlp(activation, K, HIDDEN, N, dtype=dtype, single_grouped_weight=s, single_grouped_bias=s)
        for s in (False, True)
    ]
    models[1].load_state_dict(models[0].state_dict())
    given, dy = inputs(models[0], dtype=dtype), uniform(ROWS, N, dtype=dtype)
    results = []
    for model in (*models, models[0]):
        found = run(model, dy, *given)
        packed = {}
        for kind in ("0.weight", "0.bias", "2.weight", "2.bias"):
            grads = [p.grad for name, p in model.named_parameters() if name.startswith(kind)]
            packed[kind] = grads[0] if len(grads) == 1 else torch.stack(grads)
        results.append([found["y"], given[0].grad, given[2].grad, *packed.values()])
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


@pytest.mark.parametrize(
    "activation, options",
    [
        ("ScaledSiTUGLU", {"beta1": 2.0, "beta2": 8.0}),
        ("ScaledClampedQGeGLU", {"limit": 0.6, "alpha": 1.0, "glu_linear_offset": 0.0}),
        ("ScaledClampedQGeGLU", {"limit": 5.0}),
    ],
)
@pytest.mark.parametrize("groups", (1, 3))
def test_activation_constants_take_effect(activation, options, groups):
    model = mlp(activation, K, HIDDEN, N, groups=groups, act_options=options)
    given = inputs(model)
    given[1] = given[3] = splits_of([ROWS, 0, 0][:groups])
    found = check(model, given, torch.float32)
    usual = mlp(activation, K, HIDDEN, N, groups=groups)
    usual.load_state_dict(model.state_dict())
    assert not torch.equal(usual(*given), found["y"]) or options == {"limit": 5.0}


@pytest.mark.parametrize("interleave", (None, 32))
@pytest.mark.parametrize("shape", ((71, 192), (5, 7, 128)), ids=str)
@pytest.mark.parametrize("x_needs_grad, p_needs_grad", ((True, True), (True, False), (False, True)))
@each_activation
def test_scaled_activations_run_alone(activation, shape, interleave, x_needs_grad, p_needs_grad):
    op = scaled_activation(activation, interleave)
    x, probs = leaf(*shape).requires_grad_(x_needs_grad), leaf(*shape[:-1]).requires_grad_(p_needs_grad)
    dy = uniform(*shape[:-1], shape[-1] // (2 if activation in GATED else 1), dtype=torch.float32)
    compare(run(op, dy, x, probs), truth(op, dy, x, probs), torch.float32)


@pytest.mark.parametrize("rows", (0, 1, 13, 129))
def test_any_number_of_rows_is_fused(rows):
    model = mlp(k=K, n=N, groups=3)
    given = inputs(model, rows)
    splits = splits_of((rows // 3, 0, rows - rows // 3))
    given[1] = given[3] = splits
    assert names_of_steps(model, given)[0] == ["grouped_mlp"]
    check(model, given, torch.float32, rows)


@pytest.mark.parametrize("widths", ((1, 2, 1), (3, 5, 7), (64, 96, 33)), ids=str)
def test_any_widths_are_fused(widths):
    k, hidden, n = widths
    model = mlp(k=k, hidden=hidden, n=n)
    given = inputs(model)
    given[0] = leaf(ROWS, k)
    assert names_of_steps(model, given)[0] == ["grouped_mlp"]
    dy = uniform(ROWS, n)
    compare(run(model, dy, *given), shared_gradients(truth(model, dy, *given), given), torch.float32)


def test_one_group_equals_plain_mlp():
    model = mlp(k=K, n=N, groups=1)
    given = inputs(model)
    given[1] = given[3] = splits_of([ROWS])
    check(model, given, torch.float32)


@each_dtype
def test_padded_tail_with_nan_is_ignored(dtype):
    model = mlp(k=K, n=N, dtype=dtype)
    x, dy = (uniform(ROWS + 7, w, dtype=dtype) for w in (K, N))
    probs = torch.rand(ROWS + 7).to(dtype)
    for t in (x, dy, probs):
        t[ROWS:] = float("nan")
    splits = splits_of()
    given = [x.requires_grad_(), splits, probs.requires_grad_(), splits, probs]
    found = run(model, dy, *given)
    for name in ("y", "gradient of x", "gradient of extra 1"):
        assert not found[name][ROWS:].any(), name
        found[name] = found[name][:ROWS]
    found["gradient of extra 3"] = found["gradient of extra 1"]
    probs = probs.detach()[:ROWS].requires_grad_()
    given = [x.detach()[:ROWS].requires_grad_(), splits, probs, splits, probs]
    compare(found, shared_gradients(truth(model, dy[:ROWS], *given), given), dtype)


def test_leading_dimensions_count_as_rows():
    model = mlp(k=K, n=N)
    splits, probs = splits_of(), torch.rand(2, 12, requires_grad=True)
    given = [leaf(2, 12, K), splits, probs, splits, probs]
    dy = uniform(2, 12, N)
    found = run(model, dy, *given)
    assert found["y"].shape == (2, 12, N) and probs.grad.shape == (2, 12)
    compare(found, shared_gradients(truth(model, dy, *given), given), torch.float32)


# ---- probabilities --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, probs_dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@each_activation
def test_probabilities_of_another_dtype(dtype, probs_dtype, activation):
    model = mlp(activation, K, HIDDEN, N, dtype=dtype)
    given = inputs(model, dtype=dtype, probs_dtype=probs_dtype)
    assert names_of_steps(model, given)[0] == ["grouped_mlp"]
    found = check(model, given, torch.bfloat16)
    assert found["gradient of extra 1"].dtype == probs_dtype and found["y"].dtype == dtype


@pytest.mark.parametrize("fused", (True, False), ids=("fused", "unfused"))
def test_float32_probabilities_keep_precision_in_low_precision_model(fused):
    """The GEMMs are exact: x selects a column of W1, and W2 is the identity. The result is p·f(h), rounded once; with a
    probability rounded to bfloat16 first the error would be twice as large."""
    width = 16
    model = torchweft.Sequential(
        layer(width, width, groups=2, bias=False, dtype=torch.bfloat16),
        ops.ScaledSReLU(),
        layer(width, width, groups=2, bias=False, dtype=torch.bfloat16),
    )
    with torch.no_grad():
        model[2].weight0.copy_(torch.eye(width))
        model[2].weight1.copy_(torch.eye(width))
        model[0].weight0.copy_(torch.where(model[0].weight0 > 0, 1.5, 0.75))
        model[0].weight1.copy_(torch.where(model[0].weight1 > 0, 1.75, 1.25))
    x = torch.eye(width, dtype=torch.bfloat16).repeat(64, 1)
    probs, splits = torch.rand(x.shape[0]) + 0.5, splits_of((500, 524))
    if fused:
        y = model(x, splits, probs, splits)
    else:
        with unfused():
            y = model(x, splits, probs, splits)
    exact = truth(model, y.detach(), x, splits, probs, splits)["y"]
    error = ((y.double() - exact) / exact).abs().max().item()
    assert error <= 2**-8 * 1.01
    rounded = truth(model, y.detach(), x, splits, probs.bfloat16(), splits)["y"]
    assert ((rounded.bfloat16().double() - exact) / exact).abs().max() > 2**-8 * 1.5, "the test sees rounding"


@pytest.mark.parametrize("fused", (True, False), ids=("fused", "unfused"))
def test_each_extra_input_has_its_own_gradient(fused):
    """The scales of the activation and of the last bias may be different tensors, and so may the splits."""
    model = mlp(k=K, n=N)
    probs, scales = leaf(ROWS), leaf(ROWS)
    given = [leaf(ROWS, K), splits_of(), probs, splits_of(dtype=torch.int32), scales]
    if fused:
        assert names_of_steps(model, given)[0] == ["grouped_mlp"]
        found = check(model, given, torch.float32)
    else:
        with unfused():
            found = check(model, given, torch.float32)
    assert not torch.equal(found["gradient of extra 1"], found["gradient of extra 3"])


@pytest.mark.parametrize("fused", (True, False), ids=("fused", "unfused"))
def test_layers_may_have_different_splits(fused):
    """Unusual, but well defined."""
    model = mlp(k=K, n=N, groups=3)
    probs = leaf(ROWS)
    given = [leaf(ROWS, K), splits_of((4, 0, 20)), probs, splits_of((10, 10, 4)), probs]
    if fused:
        check(model, given, torch.float32)
    else:
        with unfused():
            check(model, given, torch.float32)


def test_only_some_scales_require_grad():
    model = mlp(k=K, n=N)
    for first, last in ((True, False), (False, True), (False, False)):
        given = [
            leaf(ROWS, K), splits_of(), leaf(ROWS).requires_grad_(first), splits_of(), leaf(ROWS).requires_grad_(last)
        ]  # fmt: skip
        check(model, given, torch.float32)


# ---- frozen layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", ((0,), (2,), (0, 2)), ids=str)
@pytest.mark.parametrize("x_needs_grad", (True, False), ids=("x", "no x"))
@pytest.mark.parametrize("p_needs_grad", (True, False), ids=("probs", "no probs"))
@each_weight
@with_bias
def test_each_layer_may_be_frozen(frozen, x_needs_grad, p_needs_grad, single, bias):
    model = mlp(k=K, n=N, single_grouped_weight=single, bias=bias)
    for i in frozen:
        model[i].requires_grad_(False)
    given = inputs(model)
    given[0].requires_grad_(x_needs_grad)
    given[2].requires_grad_(p_needs_grad)
    if not (x_needs_grad or p_needs_grad or len(frozen) == 1):
        assert not model(*given).requires_grad
        return
    assert names_of_steps(model, given)[0] == ["grouped_mlp"]
    check(model, given, torch.float32)


@pytest.mark.parametrize("frozen", (0, 2))
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
@each_weight
def test_frozen_layer_leaves_main_grad_alone(frozen, delay, single):
    for there in (False, True):
        model = mlp(k=K, n=N, accumulate_into_main_grad=True, delay_wgrad_compute=delay, single_grouped_weight=single)
        trained = 2 - frozen
        model[frozen].requires_grad_(False)
        for i in (trained, *([frozen] if there else [])):
            for name, p in model[i].named_parameters():
                if "weight" in name:
                    p.main_grad, p.grad_added_to_main_grad = torch.full_like(p, 0.5), False
        given, dy = inputs(model), uniform(ROWS, N, dtype=torch.float32)
        expected = truth(model, dy, *given)
        run(model, dy, *given)
        for i in (2, 0):
            assert model[i].pending_backward_dw == (delay and i == trained)
            model[i].backward_dw()
        for name, p in model[trained].named_parameters():
            if "weight" in name:
                assert_near(p.main_grad, expected[f"gradient of {trained}.{name}"] + 0.5, torch.float32, name)
                assert p.grad_added_to_main_grad
        for name, p in model[frozen].named_parameters():
            assert p.grad is None
            if there and "weight" in name:
                assert torch.equal(p.main_grad, torch.full_like(p, 0.5)) and p.grad_added_to_main_grad is False


# ---- saved tensors --------------------------------------------------------------------------------------------------


def kept_bytes(model, given) -> int:
    own = {t.untyped_storage().data_ptr() for t in (*given, *model.parameters())}
    kept = {t.untyped_storage().data_ptr(): t for t in saved_tensors(lambda: model(*given))}
    return sum(t.nbytes for pointer, t in kept.items() if pointer not in own)


def test_only_pre_activation_is_saved():
    model = mlp(k=K, hidden=HIDDEN, n=N)
    given = inputs(model)
    assert kept_bytes(model, given) == ROWS * 2 * HIDDEN * 4
    with unfused():
        assert kept_bytes(model, given) == ROWS * 3 * HIDDEN * 4


def test_nothing_is_saved_without_grad():
    model = mlp(k=K, n=N)
    given = inputs(model)
    with torch.no_grad():
        assert saved_tensors(lambda: model(*given)) == []
    model.eval().requires_grad_(False)
    quiet = [t.detach() for t in given]
    assert saved_tensors(lambda: model(*quiet)) == []
    torch.testing.assert_close(model(*quiet), model(*given), rtol=0, atol=0)


def test_frozen_layers_save_less():
    model = mlp(k=K, n=N)
    given = inputs(model)
    x = given[0].data_ptr()
    assert x in {t.data_ptr() for t in saved_tensors(lambda: model(*given))}
    model[0].requires_grad_(False)
    assert x not in {t.data_ptr() for t in saved_tensors(lambda: model(*given))}
    given[0].requires_grad_(False)
    given[2].requires_grad_(False)
    assert kept_bytes(model, given) == ROWS * 32 * 4, "only the input of the last layer"


# ---- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "last, splits, reason",
    [
        (
            lambda: layer(HIDDEN, N, groups=GROUPS + 1),
            (*SPLITS, 0),
            f"num_groups of the linears differ: {GROUPS} and {GROUPS + 1}",
        ),
        (lambda: layer(HIDDEN, N, dtype=torch.bfloat16), SPLITS, "computes in"),
    ],
    ids=("groups", "dtype"),
)
def test_unfused_cases_are_explained(last, splits, reason):
    model = torchweft.Sequential(layer(K, 2 * HIDDEN), ops.ScaledSwiGLU(), last())
    text = torchweft.explain(model, leaf(ROWS, K), splits_of(), leaf(ROWS), splits_of(splits)).text
    assert "grouped_mlp" in text and reason in text


def test_mixed_dtypes_run_unfused_and_correct():
    model = torchweft.Sequential(layer(K, 2 * HIDDEN), ops.ScaledSwiGLU(), layer(HIDDEN, N, dtype=torch.bfloat16))
    given = [leaf(ROWS, K), splits_of(), leaf(ROWS), splits_of()]
    dy = uniform(ROWS, N, dtype=torch.bfloat16)
    compare(run(model, dy, *given), truth(model, dy, *given), torch.bfloat16)


def test_plan_has_one_step_for_both_passes():
    model = mlp(k=K, n=N)
    data = torchweft.explain(model, *inputs(model)).data[0]
    for name in ("forward", "backward"):
        assert [(s["name"], s["count"], s["min_rows"]) for s in data[name]] == [("grouped_mlp", 3, 0)]
    assert "grouped_mlp" in torchweft.explain(model, *inputs(model)).text


def test_surrounding_ops_are_kept():
    model = torchweft.Sequential(ops.RMSNorm(K), *mlp(k=K, n=K), ops.GELU())
    given = inputs(mlp(k=K, n=K))
    assert "grouped_mlp" in names_of_steps(model, given)[0]
    dy = uniform(ROWS, K)
    compare(run(model, dy, *given), shared_gradients(truth(model, dy, *given), given), torch.float32)


def test_autocast_is_fused_and_correct():
    model = mlp(k=K, n=N)
    given, dy = inputs(model), uniform(ROWS, N)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(*given)
        assert names_of_steps(model, given)[0] == ["grouped_mlp"]
    assert y.dtype == torch.bfloat16
    found = collect(model, y, dy, *given)
    compare(found, shared_gradients(truth(model, dy, *given), given), torch.bfloat16)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


# ---- buffers of the caller ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", (True, False), ids=("fused", "unfused"))
def test_results_are_written_into_given_tensors(fused):
    model = mlp(k=K, n=N)
    given, dy = inputs(model, ROWS + 3), uniform(ROWS + 3, N, dtype=torch.float32)

    def check_buffers():
        expected = run(model, dy, *given)
        output, grad_input = torch.full((ROWS + 3, N), 7.0), torch.full((ROWS + 3, K), 7.0)
        y = model(*given, op_kwargs={0: {"grad_input": grad_input}, -1: {"output": output}})
        (dx,) = torch.autograd.grad(y, given[0], dy)
        assert y.data_ptr() == output.data_ptr() and dx.data_ptr() == grad_input.data_ptr()
        assert torch.equal(y[:ROWS], expected["y"][:ROWS])
        assert torch.equal(dx[:ROWS], expected["gradient of x"][:ROWS])
        assert (output[ROWS:] == 7).all() and (grad_input[ROWS:] == 7).all()

    if fused:
        check_buffers()
    else:
        with unfused():
            check_buffers()


def test_buffers_inside_fused_mlp_are_rejected_with_advice():
    model = mlp(k=K, n=N)
    given = inputs(model)
    with pytest.raises(ValueError, match="'output'.*first.*last"):
        model(*given, op_kwargs={0: {"output": torch.empty(ROWS, 64)}})
    with pytest.raises(ValueError, match="'grad_input'.*last.*first"):
        model(*given, op_kwargs={2: {"grad_input": torch.empty(ROWS, 32)}})
    with pytest.raises(ValueError, match="output.*expected"):
        model(*given, op_kwargs={2: {"output": torch.empty(ROWS, N + 1)}})


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_bad_splits_and_scales_raise():
    model = mlp(k=K, n=N)
    x, splits, probs, *_ = inputs(model)
    bad = splits_of((7, 0, 12, 1, 0, 5))
    for first, last in ((bad, splits), (splits, bad), (splits[1:], splits), (splits, splits[1:])):
        with pytest.raises(ValueError, match="split"):
            model(x, first, probs, last, probs)
    with pytest.raises(TypeError, match="integers"):
        model(x, splits, probs, splits.float(), probs)
    for p, q in ((probs[1:], probs), (probs, probs[1:])):
        with pytest.raises(ValueError, match=r"\[23\]"):
            model(x, splits, p, splits, q)
    with pytest.raises(ValueError, match="4 extra inputs.*, got 3"):
        model(x, splits, probs, splits)
    check(model, [x, splits, probs, splits, probs], torch.float32)


# ---- recomputed activation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ("ScaledSReLU", "ScaledTanhSReLU"))
def test_recomputed_activation_runs_fused_only(activation):
    model = mlp(activation, K, HIDDEN, N, act_options={"activation_recompute_in_mlp": True})
    given = inputs(model)
    assert names_of_steps(model, given)[0] == ["grouped_mlp"]
    check(model, given, torch.float32)
    with unfused(), pytest.raises(RuntimeError, match="activation_recompute_in_mlp"):
        model(*given)
    with pytest.raises(RuntimeError, match="activation_recompute_in_mlp"):
        model[1](leaf(2, 4), leaf(2))


@pytest.mark.parametrize("activation", GATED)
def test_gated_activations_reject_recomputation(activation):
    with pytest.raises(ValueError, match="recomputation"):
        getattr(ops, activation)(activation_recompute_in_mlp=True)


# ---- interleaved rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", (1, 2, 32))
def test_deinterleave_inverts_interleave(size):
    for rows in (torch.randn(64 * 2, 5), torch.arange(128)):
        there = torchweft.interleave_glu(rows, size)
        assert there.shape == rows.shape
        assert torch.equal(torchweft.deinterleave_glu(there, size), rows)
        assert torch.equal(torchweft.interleave_glu(torchweft.deinterleave_glu(rows, size), size), rows)
    order = torchweft.interleave_glu(torch.arange(128), size).tolist()
    assert order[: 2 * size] == [*range(size), *range(64, 64 + size)]


@pytest.mark.parametrize("size", (0, -1, 3, 128))
def test_interleave_size_must_divide_rows(size):
    for change in (torchweft.interleave_glu, torchweft.deinterleave_glu):
        with pytest.raises(ValueError, match=str(size)):
            change(torch.zeros(128, 4), size)
    with pytest.raises(ValueError):
        torchweft.interleave_glu(torch.tensor(1.0), 1)


@pytest.mark.parametrize("activation", GATED)
def test_interleaved_weights_and_activation_give_same_result(activation):
    plain_model = mlp(activation, K, 64, N)
    blocks = mlp(activation, K, 64, N, interleave=32)
    state = plain_model.state_dict()
    for name in list(state):
        if name.startswith(("0.weight", "0.bias")):
            state[name] = torchweft.interleave_glu(state[name], 32)
    blocks.load_state_dict(state)
    given, dy = inputs(plain_model), uniform(ROWS, N, dtype=torch.float32)
    expected, found = run(plain_model, dy, *given), run(blocks, dy, *given)
    assert_near(found["y"], expected["y"].double(), torch.float32)
    for name in expected:
        if name.startswith(("gradient of 0.weight", "gradient of 0.bias")):
            assert_near(torchweft.deinterleave_glu(found[name], 32), expected[name].double(), torch.float32, name)


# ---- other ways to call it ------------------------------------------------------------------------------------------


@each_activation
@each_weight
def test_meta_tensors_have_right_sizes(activation, single):
    model = mlp(activation, K, HIDDEN, N, single_grouped_weight=single, device="meta")
    x = torch.empty(2, 9, K, device="meta", requires_grad=True)
    splits = torch.empty(GROUPS, dtype=torch.int32, device="meta")
    probs = torch.empty(2, 9, device="meta", requires_grad=True)
    y = model(x, splits, probs, splits, probs)
    assert y.is_meta and y.shape == (2, 9, N)
    y.sum().backward()
    for t in (x, probs, *model.parameters()):
        assert t.grad.is_meta and t.grad.shape == t.shape


@each_weight
def test_compiled_grouped_mlp_matches_eager(single):
    torch._dynamo.reset()
    model = mlp(k=K, n=N, single_grouped_weight=single)
    given, dy = inputs(model), uniform(ROWS, N, dtype=torch.float32)
    expected = run(model, dy, *given)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = collect(model, compiled(*given), dy, *given)
    compare(found, {name: t if t is None else t.double() for name, t in expected.items()}, torch.float32)


def test_one_graph_handles_any_number_of_rows():
    torch._dynamo.reset()
    model = mlp(k=K, n=N, groups=3)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for rows in (20, 30, 41):
        x, probs, splits = leaf(rows, K), leaf(rows), splits_of((8, 0, rows - 8))
        torch.testing.assert_close(compiled(x, splits, probs, splits, probs), model(x, splits, probs, splits, probs))
    assert counter.frame_count == 1


def test_export_and_fake_tensors_have_right_sizes():
    model = mlp(k=K, n=N).eval()
    given = tuple(t.detach() for t in inputs(model))
    torch.testing.assert_close(torch.export.export(model, given).module()(*given), model(*given))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in given]
        assert mlp(k=K, n=N)(*fakes).shape == (ROWS, N)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_model_can_be_cast(dtype):
    model = mlp(k=K, n=N).to(dtype)
    check(model, inputs(model, dtype=dtype), dtype)


def test_optimizer_may_step_inside_backward():
    """Weights of one operation initially share a storage; a step of one does not change the others."""
    model = mlp(k=K, n=N)
    given, dy = inputs(model), uniform(ROWS, N, dtype=torch.float32)
    expected = truth(model, dy, *given)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(p):
        with torch.no_grad():
            p.sub_(p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    model(*given).backward(dy)
    for name, p in model.named_parameters():
        assert_near(before[name] - p.detach(), expected[f"gradient of {name}"], torch.float32, name, floor=1.0)


def test_retained_graph_runs_twice():
    model = mlp(k=K, n=N)
    given, dy = inputs(model), uniform(ROWS, N, dtype=torch.float32)
    y = model(*given)
    y.backward(dy, retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    y.backward(dy)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, 2 * once[name])


def test_changed_splits_are_detected_in_backward():
    model = mlp(k=K, n=N)
    given = inputs(model)
    y = model(*given)
    given[1][0] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_match_finite_differences():
    model = mlp(k=3, hidden=2, n=2, groups=3, dtype=torch.float64)
    x, probs, scales = leaf(6, 3, dtype=torch.float64), *(leaf(6, dtype=torch.float64) for _ in range(2))
    splits = splits_of((2, 0, 3))
    inputs = (x, probs, scales, *model.parameters())
    assert torch.autograd.gradcheck(lambda *_: model(x, splits, probs, splits, scales), inputs)


def test_model_checkpoints_load_across_layouts():
    models = [
        torchweft.Sequential(ops.RMSNorm(K), mlp(k=K, n=N, single_grouped_weight=s, single_grouped_bias=s))
        for s in (False, True)
    ]
    given = [t.detach() for t in inputs(mlp(k=K, n=N))]
    for source, target in (models, models[::-1]):
        with torch.no_grad():
            for p in source.parameters():
                p.add_(0.1)
        result = target.load_state_dict(source.state_dict(), strict=True)
        assert not result.missing_keys and not result.unexpected_keys
        assert torch.equal(source(*given), target(*given))
