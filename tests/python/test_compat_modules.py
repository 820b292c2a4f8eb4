"""Module classes of torchweft.compat: dtypes, autocast, the meta device, compilation."""

import copy
import inspect

import pytest
import torch
import torch._dynamo.testing

from torchweft import _C, ops
from torchweft.compat import (
    _cross_entropy,
    _grouped_linear,
    _layernorm_mlp,
    _linear,
    _multihead_attention,
    _norm,
    _permutation,
    _router,
    _transformer_layer,
)

# ---- dtypes ----


@pytest.mark.parametrize("kind", ("RMSNorm", "LayerNorm", "L2Normalization"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
@pytest.mark.parametrize("before", (False, True))
def test_query_and_key_norms_follow_params_dtype(kind, dtype, before):
    module = _multihead_attention.MultiheadAttention(
        16, 4, params_dtype=dtype, qk_norm_type=kind, qk_norm_before_rope=before, attention_dropout=0.0
    )
    assert {param.dtype for param in module.parameters()} == {dtype}
    assert {"q_norm._extra_state", "k_norm._extra_state"} <= set(module.state_dict())
    x = torch.randn(8, 2, 16, dtype=dtype, requires_grad=True)
    y = module(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert all(param.grad is not None for param in module.parameters())


LAYERS = {
    "encoder": {},
    "decoder": {"layer_type": "decoder"},
    "output norm": {"output_layernorm": True},
    "residual after the norm": {"apply_residual_connection_post_layernorm": True},
    "parallel": {"parallel_attention_mlp": True},
    "drop path": {"drop_path_rate": 0.5},
    "query and key norms": {"qk_norm_type": "RMSNorm"},
    "RMSNorm, no bias": {"normalization": "RMSNorm", "bias": False},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("training", (True, False))
def test_layer_returns_autocast_dtype(options, dtype, training):
    module = _transformer_layer.TransformerLayer(16, 32, 4, **options).train(training)
    x = torch.randn(8, 2, 16, requires_grad=True)
    given = {"encoder_output": torch.randn(8, 2, 16)} if options.get("layer_type") else {}
    with torch.autocast("cpu", dtype):
        y = module(x, **given)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(param.grad.dtype == torch.float32 for param in module.parameters())
    assert module(x, **given).dtype == torch.float32, "no cast without autocast"


def test_layer_under_autocast_equals_cast_input():
    module = _transformer_layer.TransformerLayer(16, 32, 4, hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(8, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), module(x.bfloat16()))


# ---- the meta device ----

SHELLS = {
    "compat.Linear": lambda **o: _linear.Linear(8, 8, **o),
    "compat.Linear in parts": lambda **o: _linear.Linear(8, 8, parameters_split=("q", "k"), **o),
    "compat.LayerNormLinear": lambda **o: _linear.LayerNormLinear(8, 8, **o),
    "compat.LayerNormMLP": lambda **o: _layernorm_mlp.LayerNormMLP(8, 32, **o),
    "compat.GroupedLinear": lambda **o: _grouped_linear.GroupedLinear(2, 8, 8, **o),
    "compat.LayerNorm": lambda **o: _norm.LayerNorm(8, **o),
    "compat.RMSNorm": lambda **o: _norm.RMSNorm(8, **o),
    "compat.MultiheadAttention": lambda **o: _multihead_attention.MultiheadAttention(
        16, 4, qk_norm_type="RMSNorm", **o
    ),
    "compat.TransformerLayer": lambda **o: _transformer_layer.TransformerLayer(16, 32, 4, output_layernorm=True, **o),
    "ops.Linear": lambda **o: ops.Linear(8, 8, **o),
    "ops.GroupedLinear": lambda **o: ops.GroupedLinear(2, 8, 8, **o),
    "single ops.GroupedLinear": lambda **o: ops.GroupedLinear(2, 8, 8, single_grouped_weight=True, **o),
}


def native(name: str):
    sample = next(row[-1] for row in _C.op_types() if row[0] == name)
    known = inspect.signature(ops.native_classes[name]).parameters
    given = {k: v for k, v in sample.fields().items() if k in known and k != "dtype" and v is not None}
    return lambda **o: ops.native_classes[name](**given, **o)


SHELLS |= {f"ops.{name}": native(name) for name, *_, sample in _C.op_types() if sample.params()}
shells = pytest.mark.parametrize("make", SHELLS.values(), ids=SHELLS)


def reset(module: torch.nn.Module) -> None:
    for child in module.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


@shells
@pytest.mark.parametrize("by_context", (False, True))
def test_reset_parameters_materializes_meta_module(make, by_context):
    if by_context:
        with torch.device("meta"):
            module = make()
    else:
        module = make(device="meta")
    assert all(param.is_meta for param in module.parameters()), "the constructor allocates nothing"
    marks = {name: param.__dict__ for name, param in module.named_parameters()}
    next(iter(module.parameters())).requires_grad_(False)
    torch.manual_seed(3)
    reset(module)
    assert {param.device.type for param in module.parameters()} == {"cpu"}
    assert not next(iter(module.parameters())).requires_grad
    assert {name: param.__dict__ for name, param in module.named_parameters()} == marks
    other = make()
    torch.manual_seed(3)
    reset(other)
    torch.testing.assert_close(values(module), values(other), rtol=0, atol=0)


@shells
def test_reset_parameters_uses_default_device(make):
    module = make(device="meta")
    with torch.device("meta"):
        reset(module)
    assert all(param.is_meta for param in module.parameters())
    real = make()
    before = {name: id(param) for name, param in real.named_parameters()}
    reset(real)
    assert {name: id(param) for name, param in real.named_parameters()} == before, "Parameters with values are kept"


def test_defer_init_keeps_meta_device():
    for module in (_linear.Linear(8, 8, device="meta"), _norm.LayerNorm(8, device="meta")):
        module.reset_parameters(defer_init=True)
        assert all(param.is_meta for param in module.parameters())


# ---- compilation ----

TOKENS, EXPERTS, TOPK, HIDDEN = 16, 4, 2, 8


def routing(map_type: str, dropped: int = 0) -> torch.Tensor:
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(TOKENS)])
    if map_type == "index":
        chosen[:dropped] = -1
        return chosen
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.int32).scatter(1, chosen, 1)
    mask[:dropped] = 0
    return mask


def plain_permute(x: torch.Tensor, routing_map: torch.Tensor, map_type: str, count: int) -> torch.Tensor:
    """Permutes expert by expert, token by token."""
    places = [
        (expert, token)
        for expert in range(EXPERTS)
        for token in range(TOKENS)
        if (routing_map[token, expert] if map_type == "mask" else expert in routing_map[token])
    ]
    rows = [x[token] for _, token in places[:count]] + [torch.zeros_like(x[0])] * max(0, count - len(places))
    return torch.stack(rows)


def there_and_back(x, probs, routing_map, count, map_type):
    permuted, rows = _permutation.moe_permute(x, routing_map, num_out_tokens=count, map_type=map_type)
    return permuted, _permutation.moe_unpermute(permuted.sin(), rows, merging_probs=probs, restore_shape=x.shape)


def with_probs(x, probs, routing_map, count, map_type):
    permuted, chosen, rows = _permutation.moe_permute_with_probs(x, probs, routing_map, num_out_tokens=count)
    return permuted, chosen, _permutation.moe_unpermute(permuted * chosen.unsqueeze(-1), rows)


def check_compiled(function, *arguments, backend: str = "aot_eager"):
    """Asserts that outputs and gradients of the compiled function match eager mode."""
    inputs = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    torch.compiler.reset()
    found = torch.compile(function, fullgraph=True, backend=backend)(*arguments)
    expected = function(*arguments)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    grads = [torch.randn_like(w) for w in expected]
    torch.testing.assert_close(torch.autograd.grad(found, inputs, grads), torch.autograd.grad(expected, inputs, grads))
    return expected


@pytest.mark.parametrize("map_type", ("mask", "index"))
@pytest.mark.parametrize("count", (TOKENS * TOPK, 11, 40))
@pytest.mark.parametrize("dropped", (0, 3))
def test_permute_and_unpermute_compile_fullgraph(map_type, count, dropped):
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    routing_map = routing(map_type, dropped)
    probs = torch.rand(routing_map.shape, dtype=torch.float64, requires_grad=True)
    permuted, _ = check_compiled(there_and_back, x, probs, routing_map, count, map_type)
    assert torch.equal(permuted, plain_permute(x, routing_map, map_type, count))
    if map_type == "mask":
        check_compiled(with_probs, x, probs, routing_map, count, map_type)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_permute_without_count_compiles_with_scalar_outputs():
    x, routing_map = torch.randn(TOKENS, HIDDEN, requires_grad=True), routing("mask", 3)

    def function(x):
        return (_permutation.moe_permute(x, routing_map)[0],)

    check_compiled(function, x)
    assert torch.equal(function(x)[0], plain_permute(x, routing_map, "mask", (TOKENS - 3) * TOPK))


@pytest.mark.parametrize("as_tensor", (False, True))
@pytest.mark.parametrize("sizes, order", [([1, 3, 0, 2], [2, 0, 3, 1]), ([6], [0]), ([2, 2, 2], [2, 1, 0])])
def test_sorting_chunks_compiles_fullgraph(sizes, order, as_tensor):
    x = torch.randn(6, HIDDEN, requires_grad=True)
    probs = torch.rand(6, requires_grad=True)
    given = (torch.tensor(sizes), torch.tensor(order)) if as_tensor else (sizes, order)

    def function(x, probs):
        y, q = _permutation.moe_sort_chunks_by_index_with_probs(x, probs, *given)
        return y, q, _permutation.moe_sort_chunks_by_index(x, *given)

    y, q, again = check_compiled(function, x, probs)
    chunks = x.split(sizes)
    assert torch.equal(y, torch.cat([chunks[i] for i in order])) and torch.equal(again, y)
    assert torch.equal(q, torch.cat([probs.split(sizes)[i] for i in order]))


def test_mismatched_row_id_maps_raise():
    x = torch.randn(6, HIDDEN)
    for sizes, order in (([1, 2], [1, 0]), ([3, 3], [0, 0]), ([6], [0, 1])):
        with pytest.raises(ValueError, match="each chunk once and 6 rows"):
            _permutation.moe_sort_chunks_by_index(x, sizes, order)
    permuted, rows = _permutation.moe_permute(x, torch.ones(6, 2, dtype=torch.bool), num_out_tokens=12)
    with pytest.raises(ValueError, match="has row 11, inp has 9 rows"):
        _permutation.moe_unpermute(permuted[:9], rows)


def test_permutation_of_other_sizes_raises():
    x, mask = torch.randn(6, HIDDEN), torch.ones(6, 2, dtype=torch.bool)
    for wrong in (mask[:5], torch.ones(7, 2, dtype=torch.bool), mask[:, 0]):
        with pytest.raises(ValueError, match="expected a map of two dimensions with one row per token"):
            _permutation.moe_permute(x, wrong)
    for wrong in (torch.rand(6, 3), torch.rand(7, 2), torch.rand(5, 2), torch.rand(6)):
        with pytest.raises(ValueError, match=r"probs has shape .*, expected \[6, 2\]"):
            _permutation.moe_permute_with_probs(x, wrong, mask)
    permuted, rows = _permutation.moe_permute(x, mask)
    for wrong in (torch.rand(6, 3), torch.rand(7, 2), torch.rand(6), torch.rand(1, 2)):
        with pytest.raises(ValueError, match=r"merging_probs has shape .*, expected \[6, 2\]"):
            _permutation.moe_unpermute(permuted, rows, wrong)
    for wrong in ((7, HIDDEN), (5, HIDDEN), (6, HIDDEN + 1), (6, 1, HIDDEN)):
        with pytest.raises(ValueError, match=f"restore_shape is .*, expected .6, {HIDDEN}."):
            _permutation.moe_unpermute(permuted, rows, restore_shape=wrong)
    with pytest.raises(ValueError, match="expected two dimensions each"):
        _permutation.moe_unpermute(permuted, rows[0])
    for wrong in (torch.rand(5), torch.rand(7), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="expected one probability for each of 6 rows"):
            _permutation.moe_sort_chunks_by_index_with_probs(x, wrong, [2, 4], [1, 0])


def test_router_of_other_sizes_raises():
    logits = torch.randn(3, 8)

    def route(topk=2, groups=None, chosen_groups=None, bias=None):
        return _router.fused_topk_with_score_function(logits, topk, False, groups, chosen_groups, None, "softmax", bias)

    for topk in (0, -1, 9):
        for call in (lambda k: route(k), lambda k: _router.fused_compute_score_for_moe_aux_loss(logits, k, "softmax")):
            with pytest.raises(ValueError, match=f"topk is {topk}, expected 1 to 8"):
                call(topk)
    for groups, chosen in ((3, 1), (4, 5), (2, 4), (-4, 1), (4, 3), (8, 1)):
        with pytest.raises(ValueError, match=f"num_groups is {groups}, group_topk is {chosen}"):
            route(2, groups, chosen)
    assert (route(3, 4, 2)[1].sum(-1) == 3).all()
    for shape in ((1,), (7,), (3, 8), ()):
        with pytest.raises(ValueError, match=r"expert_bias has shape .*, expected \[8\]"):
            route(bias=torch.zeros(shape))
    for shape in ((1,), (7,), (3, 8), ()):
        with pytest.raises(ValueError, match=r"tokens_per_expert has shape .*, expected \[8\]"):
            _router.fused_moe_aux_loss(logits, torch.ones(shape), 3, 8, 2, 0.1)


def test_targets_in_another_order_raise():
    logits = torch.randn(3, 5, 7)
    for shape in ((5, 3), (3, 5, 1), (1, 15), (3, 4)):
        with pytest.raises(ValueError, match=r"expected one class index per token, \[3, 5\] or \[15\]"):
            _cross_entropy.parallel_cross_entropy(logits, torch.zeros(shape, dtype=torch.int64))


def test_empty_rows_do_not_affect_results():
    x = torch.full((2, 3), float("nan")).index_fill(0, torch.tensor([1]), 1.0).requires_grad_()
    permuted, rows = _permutation.moe_permute(x, torch.tensor([[0], [1]]), num_out_tokens=3)
    assert torch.equal(permuted, torch.tensor([[1.0] * 3, [0.0] * 3, [0.0] * 3]))
    permuted.sum().backward()
    assert torch.equal(x.grad, torch.tensor([[0.0] * 3, [1.0] * 3]))
    back = _permutation.moe_unpermute(permuted.detach().index_fill(0, torch.tensor([1, 2]), float("nan")), rows)
    assert torch.equal(back, torch.tensor([[0.0] * 3, [1.0] * 3]))


# ---- compiled modules ----

NO_DROPOUT = {"attention_dropout": 0.0}
COMPILED = {
    "Linear": lambda: _linear.Linear(16, 32),
    "Linear, split": lambda: _linear.Linear(16, 32, parameters_split=("query", "key")),
    "LayerNormLinear": lambda: _linear.LayerNormLinear(16, 32),
    "LayerNormMLP": lambda: _layernorm_mlp.LayerNormMLP(16, 32),
    "MultiheadAttention": lambda: _multihead_attention.MultiheadAttention(16, 4, **NO_DROPOUT),
    "TransformerLayer": lambda: _transformer_layer.TransformerLayer(16, 32, 4, hidden_dropout=0.0, **NO_DROPOUT),
}


@pytest.mark.parametrize("name", COMPILED)
def test_modules_compile_fullgraph(name):
    """A new module compiles without a graph break, twice for five batch sizes, with the gradients of eager mode."""
    torch.compiler.reset()
    module = COMPILED[name]()
    twin = copy.deepcopy(module)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for batch in (2, 3, 4, 5, 6):
        x = torch.randn(4, batch, 16, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        for model, given in ((compiled, x), (twin, other)):
            model(given).square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
    assert counter.frame_count <= 2
    for param, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad)


def test_compiled_module_follows_its_group_and_copies():
    torch.compiler.reset()
    module = _linear.Linear(16, 32)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 16)
    torch.testing.assert_close(compiled(x), module(x))
    module.set_tensor_parallel_group(None)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()
    torch.testing.assert_close(compiled(x), module(x))
    torch.testing.assert_close(torch.compile(other, backend="aot_eager", fullgraph=True)(x), other.bias.expand(4, 32))
