"""Transformer Engine compatibility: installation, names, and modules that compute the same as plain torch."""

import copy
import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import torchweft
from torchweft import ops
from torchweft.compat import _distributed, _namespace, _recipes
from torchweft.compat import transformer_engine as te_compat

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def te():
    """transformer_engine.pytorch, implemented by weft, for one test."""
    te_compat.install()
    yield importlib.import_module("transformer_engine.pytorch")
    te_compat.uninstall()


@pytest.fixture
def real(tmp_path, monkeypatch):
    """A folder on sys.path with a package called transformer_engine."""
    folder = tmp_path / "transformer_engine"
    folder.mkdir()
    (folder / "__init__.py").write_text("real = True\n")
    (folder / "pytorch.py").write_text("raise OSError('libcuda.so.1 is missing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    te_compat.uninstall()
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(torchweft.__file__).parent.parent)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


# ---- install ------------------------------------------------------------------------------------------------------


def test_install_is_never_implicit():
    done = run("-c", "import torchweft.ops, sys; print('torchweft.compat' in sys.modules); import transformer_engine")
    assert done.stdout.strip() == "False" and "No module named 'transformer_engine'" in done.stderr


def test_install_twice_and_uninstall():
    before = list(sys.meta_path)
    te_compat.install()
    te_compat.install()
    import transformer_engine

    assert len(sys.meta_path) == len(before) + 1 and te_compat.installed()
    assert transformer_engine.pytorch.ops.Linear is ops.Linear
    assert tuple(int(part) for part in transformer_engine.__version__.split("+")[0].split(".")) >= (2, 9)
    te_compat.uninstall()
    te_compat.uninstall()
    assert sys.meta_path == before and not te_compat.installed()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine")


def test_install_rejects_real_package(real):
    with pytest.raises(ImportError, match=r"transformer_engine is installed in .*replace=True"):
        te_compat.install()
    assert importlib.import_module("transformer_engine").real
    with pytest.raises(ImportError, match=r"was already imported from .*replace=True"):
        te_compat.install(recipes="high_precision")
    assert not te_compat.installed() and _recipes._policy == "quantize"


def test_install_with_replace_is_undone_by_uninstall(real):
    mine = importlib.import_module("transformer_engine")
    te_compat.install(replace=True)
    assert importlib.import_module("transformer_engine.pytorch").ops.Linear is ops.Linear
    assert not hasattr(sys.modules["transformer_engine"], "real")
    te_compat.uninstall()
    assert importlib.import_module("transformer_engine") is mine


def test_uninstall_takes_back_only_its_own_modules(real):
    te_compat.install(replace=True)
    import transformer_engine
    import transformer_engine.pytorch

    wrapper, own = ModuleType("transformer_engine.pytorch"), transformer_engine.pytorch
    sys.modules["transformer_engine.pytorch"] = wrapper
    sys.modules["transformer_engine.plugin"] = plugin = ModuleType("transformer_engine.plugin")
    te_compat.uninstall()
    assert sys.modules.pop("transformer_engine.pytorch") is wrapper is not own
    assert sys.modules.pop("transformer_engine.plugin") is plugin
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]


def test_kept_finder_finds_nothing_after_uninstall():
    """Another library may wrap the finders of sys.meta_path."""

    class Wrapper:
        def __init__(self, finder):
            self.find_spec = finder.find_spec

    te_compat.install()
    sys.meta_path[0] = wrapper = Wrapper(sys.meta_path[0])
    try:
        import transformer_engine.pytorch as te

        te_compat.install()
        assert sys.modules["transformer_engine.pytorch"] is te, "the second call keeps the modules"
        te_compat.uninstall()
        assert wrapper in sys.meta_path and importlib.util.find_spec("transformer_engine") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("transformer_engine")
    finally:
        sys.meta_path.remove(wrapper)
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]


def test_install_after_failed_import(real):
    with pytest.raises(OSError, match="libcuda"):
        importlib.import_module("transformer_engine.pytorch")
    with pytest.raises(ImportError, match="replace=True"):
        te_compat.install()
    te_compat.install(replace=True)
    assert importlib.import_module("transformer_engine.pytorch").Linear


def test_install_after_failed_lookup():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine.pytorch")
    te_compat.install()
    assert importlib.import_module("transformer_engine.pytorch").Linear
    te_compat.uninstall()


def test_install_rejects_blocked_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ImportError, match="blocked"):
        te_compat.install()


def test_install_is_per_process():
    script = (
        "import subprocess, sys\nfrom torchweft.compat import transformer_engine\ntransformer_engine.install()\n"
        "import transformer_engine.pytorch as te\nprint(te.Linear(2, 2).weight.shape)\n"
        "child = subprocess.run([sys.executable, '-c', 'import transformer_engine'], capture_output=True)\n"
        "print(child.returncode)\n"
    )
    done = run("-c", script)
    assert done.stdout.split("\n")[:2] == ["torch.Size([2, 2])", "1"], done.stderr


def test_install_in_conftest(tmp_path):
    (tmp_path / "conftest.py").write_text("from torchweft.compat import transformer_engine as te\nte.install()\n")
    (tmp_path / "test_it.py").write_text(
        "import transformer_engine.pytorch as te\n\ndef test_it():\n    assert te.Linear(2, 3).weight.shape == (3, 2)\n"
    )
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


SCRIPT = """
import sys
import beside
import transformer_engine.pytorch as te
with te.fp8_autocast(enabled="fp8" in sys.argv):
    print(__name__, sys.argv[1:], te.Linear(2, beside.WIDTH).weight.shape[0])
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a script and a module that it imports."""
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def test_script_runs_unmodified(folder):
    done = run("-m", "torchweft.compat", str(folder / "script.py"), "a", "--b")
    assert done.stdout.strip() == "__main__ ['a', '--b'] 3", done.stderr


@pytest.fixture
def compat_main(monkeypatch):
    """Runs ``python -m torchweft.compat`` in this process."""
    from torchweft.compat.__main__ import main

    def call(*arguments):
        monkeypatch.setattr(sys, "path", ["", *sys.path])
        monkeypatch.setattr(sys, "argv", ["torchweft.compat", *map(str, arguments)])
        main()

    yield call
    te_compat.uninstall()
    sys.modules.pop("beside", None)


def test_script_with_quantized_region(folder, compat_main, capsys, monkeypatch):
    compat_main(folder / "script.py", "fp8")
    assert capsys.readouterr().out.strip() == "__main__ ['fp8'] 3"
    monkeypatch.chdir(folder)
    with pytest.warns(UserWarning, match="runs unquantized"):
        compat_main("--high-precision", "-m", "script", "fp8")
    assert capsys.readouterr().out.strip() == "__main__ ['fp8'] 3"


def test_script_next_to_real_package(real, folder, compat_main, capsys):
    with pytest.raises(SystemExit, match="transformer_engine is installed.*--replace"):
        compat_main(folder / "script.py")
    compat_main("--replace", folder / "script.py")
    assert capsys.readouterr().out.strip() == "__main__ [] 3"


# ---- names --------------------------------------------------------------------------------------------------------


def test_every_name_resolves(te):
    for module, held in _namespace.MODULES.items():
        imported = importlib.import_module(module)
        for name, value in held.items():
            assert getattr(imported, name) is value
        assert importlib.reload(imported) is imported
    for name in _namespace.SUPPORTED:
        assert hasattr(te, name), name
    for name in set(_namespace.TE_OPS) - {"AllReduce"}:
        assert getattr(te.ops, name) is getattr(ops, name)
    assert issubclass(te.ops.AllReduce, ops.AllReduce) and not te.ops.AllReduce(None, True).reduce_in_backward
    assert not set(_namespace.SUPPORTED) & set(_namespace.UNSUPPORTED) and not set(_namespace.TE_OPS) & set(
        _namespace.UNSUPPORTED_OPS
    )


def test_unsupported_name_gives_reason(te):
    with pytest.raises(AttributeError, match=r"pytorch\.make_graphed_callables is not supported: .*CUDA graphs"):
        te.make_graphed_callables  # noqa: B018
    with pytest.raises(AttributeError, match="unknown name"):
        te.no_such_thing  # noqa: B018
    with pytest.raises(ImportError):
        from transformer_engine.pytorch import onnx_export  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="torchweft.compat replaces"):
        importlib.import_module("transformer_engine.jax")
    for name in _namespace.UNSUPPORTED:
        assert not hasattr(te, name)


def test_megatron_imports_resolve(te):
    from transformer_engine.common.recipe import DelayedScaling  # noqa: F401
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy  # noqa: F401
    from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, activation_recompute_forward  # noqa: F401
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast  # noqa: F401
    from transformer_engine.pytorch.ops import FusibleOperation, Sequential  # noqa: F401
    from transformer_engine.pytorch.router import (  # noqa: F401
        fused_compute_score_for_moe_aux_loss,
        fused_moe_aux_loss,
        fused_topk_with_score_function,
    )
    from transformer_engine.pytorch.tensor import QuantizedTensor

    assert not isinstance(torch.ones(1), QuantizedTensor) and not FP8GlobalStateManager.is_fp8_enabled()
    assert CudaRNGStatesTracker is torchweft.RNGStatesTracker


def test_page_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import make_compat_page

    assert make_compat_page.PAGE.read_text() == make_compat_page.page(), "run tools/make_compat_page.py"


def test_documented_example_runs(tmp_path):
    text = (ROOT / "docs/from_te_ops.md").read_text().partition("## Code that imports Transformer Engine")[2]
    (tmp_path / "example.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    done = run("example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text.partition("```text\n")[2].partition("```")[0]


# ---- recipes ------------------------------------------------------------------------------------------------------


def test_recipes_quantize_or_raise(te):
    from transformer_engine.common import recipe

    made = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16)
    assert made.amax_history_len == 16 and made.delayed() and made.fp8_format.value.max_bwd == 57344
    derived = type("OwnScaling", (recipe.DelayedScaling,), {})(margin=1, of_another_release=2)
    assert derived.margin == 1 and derived.delayed() and not hasattr(derived, "of_another_release")
    linear, x = te.Linear(32, 16, params_dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    plain = linear(x)
    for kind in ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"):
        made = getattr(recipe, kind)()
        with torchweft.autocast(recipe=made):
            inner = linear(x)
        for region in (te.autocast(recipe=made), te.fp8_autocast(fp8_recipe=made)):
            with region:
                assert torch.equal(linear(x), inner) and not torch.equal(inner, plain)
    with pytest.raises(TypeError, match="qfactory returned None"), te.autocast(recipe=recipe.CustomRecipe(print)):
        pass
    for available in (te.is_fp8_available, te.is_mxfp8_available, te.is_nvfp4_available):
        assert available() is True and "emulated" in available(return_reason=True)[1]
    with pytest.raises(NotImplementedError, match="fp8_output"):
        te.Linear(2, 2)(torch.ones(1, 2), fp8_output=True)


def test_checkpoint_recomputes_with_the_recipe(te):
    torch.manual_seed(0)
    mlp, x = te.LayerNormMLP(32, 64, params_dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)

    def gradients(call):
        inner = x.clone().requires_grad_()
        torch.manual_seed(1)  # of stochastic rounding
        with te.autocast(recipe=torchweft.recipe.NVFP4BlockScaling()):
            y = call(inner)
        y.sum().backward()
        return inner.grad

    assert torch.equal(gradients(partial(te.checkpoint, mlp)), gradients(mlp))


def test_threads_repeat_a_checkpointed_call_at_the_same_time(te):
    linear, x = te.Linear(32, 16), torch.randn(4, 32)
    current, mxfp8 = torchweft.recipe.Float8CurrentScaling(), torchweft.recipe.MXFP8BlockScaling()
    with te.autocast(recipe=mxfp8):
        expected, repeated = linear(x), _distributed._RepeatedCall(None)
    with te.autocast(recipe=current):
        outer = linear(x)
    found, barrier = {}, threading.Barrier(2, timeout=10)

    def repeat(who):
        with te.autocast(recipe=current):
            if who == "second":
                barrier.wait()
            with repeated:
                if who == "first":
                    barrier.wait()
                    barrier.wait()
                found[who] = linear(x)
                if who == "second":
                    barrier.wait()
            found[who + ", after"] = linear(x)

    threads = [threading.Thread(target=repeat, args=(who,)) for who in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for name, value in found.items():
        assert torch.equal(value, outer if "after" in name else expected), name


def test_regions_keep_the_defaults_of_the_reference(te):
    linear, x = te.Linear(32, 16), torch.randn(4, 32)
    with te.autocast(recipe=torchweft.recipe.Float8CurrentScaling()):
        expected = linear(x)
    for region in (te.autocast, te.fp8_autocast):
        with region():
            assert torch.equal(linear(x), expected)
        with pytest.raises(TypeError, match=r"enabled is torch.bfloat16.*use torch\.autocast"):
            region(torch.bfloat16)
    with pytest.raises(TypeError, match=r"quantized_model_init: enabled is torch.bfloat16"):
        te.fp8_model_init(torch.bfloat16)
    assert not torch.equal(linear(x), expected)


def test_high_precision_warns_once(te):
    with pytest.raises(ValueError, match="expected 'quantize' or 'high_precision'"):
        te_compat.install(recipes="fp8")
    te_compat.install(recipes="high_precision")
    te_compat.install()  # does not change it
    linear, x = te.Linear(4, 3), torch.randn(2, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with te.fp8_autocast(enabled=True), te.fp8_model_init():
                y = linear(x)
    assert len(caught) == 1 and "runs unquantized" in str(caught[0].message)
    assert torch.equal(y, linear(x))


# ---- modules: names, shapes, keys ---------------------------------------------------------------------------------

NORMED = {"layer_norm_weight": (8,), "layer_norm_bias": (8,)}
SHAPES = {
    "Linear": (lambda te: te.Linear(8, 12), {"weight": (12, 8), "bias": (12,)}),
    "Linear without bias": (lambda te: te.Linear(8, 12, bias=False), {"weight": (12, 8)}),
    "Linear in parts": (
        lambda te: te.Linear(8, 12, parameters_split={"query": 8, "key_": 4}),
        {"query_weight": (8, 8), "key_weight": (4, 8), "query_bias": (8,), "key_bias": (4,)},
    ),
    "Linear of two ranks, row": (
        lambda te: te.Linear(8, 12, tp_size=2, parallel_mode="row"),
        {"weight": (12, 4), "bias": (12,)},
    ),
    "LayerNormLinear": (lambda te: te.LayerNormLinear(8, 12), NORMED | {"weight": (12, 8), "bias": (12,)}),
    "LayerNormLinear, RMSNorm, column": (
        lambda te: te.LayerNormLinear(8, 12, normalization="RMSNorm", tp_size=2, parallel_mode="column"),
        {"layer_norm_weight": (8,), "weight": (6, 8), "bias": (6,)},
    ),
    "LayerNormMLP": (
        lambda te: te.LayerNormMLP(8, 32, activation="swiglu"),
        NORMED | {"fc1_weight": (64, 8), "fc1_bias": (64,), "fc2_weight": (8, 32), "fc2_bias": (8,)},
    ),
    "GroupedLinear": (
        lambda te: te.GroupedLinear(2, 8, 12),
        {"weight0": (12, 8), "bias0": (12,), "weight1": (12, 8), "bias1": (12,)},
    ),
    "LayerNorm": (lambda te: te.LayerNorm(8), {"weight": (8,), "bias": (8,)}),
    "RMSNorm": (lambda te: te.RMSNorm(hidden_size=8), {"weight": (8,)}),
    "DotProductAttention": (lambda te: te.DotProductAttention(4, 2), {}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_module_parameters_and_keys(te, case):
    make, shapes = SHAPES[case]
    module = make(te)
    # Optimizer states are keyed by this order.
    assert [(name, tuple(p.shape)) for name, p in module.named_parameters()] == list(shapes.items())
    assert set(module.state_dict()) == {*shapes, "_extra_state"}
    assert module.state_dict()["_extra_state"].numel() == 0
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    module.load_state_dict(state)  # _extra_state may be missing
    other = make(te)
    other.load_state_dict(module.state_dict())
    assert all(torch.equal(p, state[name]) for name, p in other.named_parameters())


def test_module_state_dict_keys_of_transformer_layer(te):
    def keys(**options):
        return {key for key in te.TransformerLayer(16, 32, 4, **options).state_dict() if "_extra_state" not in key}

    normed = {"layer_norm_weight", "layer_norm_bias"}
    mlp = {f"layernorm_mlp.{name}" for name in (*normed, "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")}
    proj = {"self_attention.proj.weight", "self_attention.proj.bias"}
    split = {f"{part}_{kind}" for part in ("query", "key", "value") for kind in ("weight", "bias")}
    assert keys() == mlp | proj | {f"self_attention.layernorm_qkv.{name}" for name in normed | split}
    fused = {f"self_attention.layernorm_qkv.{name}" for name in normed | {"weight", "bias"}}
    assert keys(fuse_qkv_params=True) == mlp | proj | fused
    out = {"layernorm.weight", "layernorm.bias", "self_attention.qkv.weight", "self_attention.qkv.bias"}
    assert keys(fuse_qkv_params=True, output_layernorm=True) == mlp | proj | out
    cross = {"inter_attention.proj.weight", "inter_attention.proj.bias"}
    cross |= {f"inter_attention.layernorm_query.{name}" for name in normed | {"query_weight", "query_bias"}}
    cross |= {f"inter_attention.key_value.{name}" for name in split if not name.startswith("query")}
    assert keys(fuse_qkv_params=False, layer_type="decoder") - keys() == cross


def test_module_sets_parameter_attributes(te, monkeypatch):
    row = te.Linear(8, 12, tp_size=2, parallel_mode="row", sequence_parallel=True)
    assert row.bias.sequence_parallel is True and row.weight.partition_dim == 1 and row.weight.tensor_model_parallel
    normed = te.LayerNormLinear(8, 12, tp_size=2, parallel_mode="column", sequence_parallel=True)
    assert normed.layer_norm_weight.sequence_parallel is True and normed.layer_norm_bias.sequence_parallel is True
    assert normed.weight.partition_dim == 0 and not hasattr(normed.bias, "sequence_parallel")
    assert te.LayerNorm(8, sequence_parallel=True).bias.sequence_parallel is True
    assert te.RMSNorm(8, sequence_parallel=False).weight.sequence_parallel is False
    assert te.Linear(8, 12, bias=False).bias.numel() == 0
    assert te.Linear(8, 12, delay_wgrad_compute=True).weight.skip_backward_post_hook is True
    with pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        row(torch.ones(2, 4))
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        te.Linear(8, 12, colour="red")
    te.Linear(8, 12, ub_overlap_rs=True, ub_name="proj", symmetric_ar_type=None)


def test_module_initialization_and_meta_device(te):
    linear = te.Linear(200, 100, init_method=lambda w: torch.nn.init.constant_(w, 3.0))
    assert (linear.weight == 3).all() and (linear.bias == 0).all()
    assert abs(te.Linear(200, 300).weight.std().item() - 0.023) < 1e-3
    tracker = torchweft.RNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    state = torch.get_rng_state()
    drawn = te.Linear(8, 8, get_rng_state_tracker=lambda: tracker).weight
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(drawn, te.Linear(8, 8).weight)
    empty = te.LayerNormMLP(8, 16, device="meta", zero_centered_gamma=True)
    assert all(p.is_meta for p in empty.parameters())
    empty(torch.randn(2, 8)).sum().backward()
    assert (
        all(not p.is_meta and p.grad is not None for p in empty.parameters()) and (empty.layer_norm_weight == 0).all()
    )


# ---- modules: values and gradients --------------------------------------------------------------------------------


def same(got, expected, what=""):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}")


def randomize(module):
    """Fills Parameters with values other than zeros and ones, in float64."""
    module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    return module


class WithArguments:
    """A module with arguments filled in."""

    def __init__(self, module, *arguments, **keywords):
        self.module, self.arguments, self.keywords = module, arguments, keywords
        self.named_parameters = module.named_parameters

    def __call__(self, x):
        return self.module(x, *self.arguments, **self.keywords)


def check(module, plain, *inputs):
    """Asserts that `plain(parameters, *inputs)` in torch gives the same values and gradients."""
    mine = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    theirs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    params = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    got, expected = module(*mine), plain(params, *theirs)
    got, expected = (r if isinstance(r, tuple) else (r,) for r in (got, expected))
    loss_got = expected_loss = 0
    for one, other in zip(got, expected, strict=True):
        same(one, other, "output")
        dy = torch.randn_like(other)
        loss_got, expected_loss = loss_got + (one * dy).sum(), expected_loss + (other * dy).sum()
    loss_got.backward()
    expected_loss.backward()
    for one, other in zip(mine, theirs, strict=True):
        if one.is_floating_point():
            same(one.grad, other.grad, "gradient of an input")
    for name, p in module.named_parameters():
        same(p.grad, params[name].grad, f"gradient of {name}")


def normed(p, x, kind="LayerNorm", zero_centered=False, eps=1e-5):
    gamma = p["layer_norm_weight"] + (1 if zero_centered else 0)
    if kind == "LayerNorm":
        return F.layer_norm(x, (x.size(-1),), gamma, p["layer_norm_bias"], eps)
    return F.rms_norm(x, (x.size(-1),), gamma, eps)


def test_module_linear(te):
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    check(randomize(te.Linear(8, 12)), lambda p, x: F.linear(x, p["weight"], p["bias"]), x)
    check(randomize(te.Linear(8, 12, bias=False)), lambda p, x: F.linear(x, p["weight"]), x)
    returned = randomize(te.Linear(8, 12, return_bias=True))
    check(returned, lambda p, x: (F.linear(x, p["weight"]), p["bias"]), x)
    parts = randomize(te.Linear(8, 12, parameters_split=("a", "b", "c")))
    names_ = [f"{part}_{kind}" for kind in ("weight", "bias") for part in "abc"]
    check(
        parts, lambda p, x: F.linear(x, torch.cat([p[n] for n in names_[:3]]), torch.cat([p[n] for n in names_[3:]])), x
    )
    empty = te.Linear(8, 12, bias=False, return_bias=True)(x.float())[1]
    assert empty.numel() == 0


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_module_layernorm_linear(te, kind, zero_centered):
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    options = {"normalization": kind, "zero_centered_gamma": zero_centered, "eps": 0.1}

    def plain(p, x):
        return F.linear(normed(p, x, kind, zero_centered, 0.1), p["weight"], p["bias"])

    check(randomize(te.LayerNormLinear(8, 12, **options)), plain, x)
    all_of_it = randomize(te.LayerNormLinear(8, 12, return_bias=True, return_layernorm_output=True, **options))

    def plain_all(p, x):
        n = normed(p, x, kind, zero_centered, 0.1)
        return F.linear(n, p["weight"]), p["bias"], n

    check(all_of_it, plain_all, x)
    parts = te.LayerNormLinear(8, 12, parameters_split=["a", "b"], return_layernorm_output=True, **options)

    def plain_parts(p, x):
        n = normed(p, x, kind, zero_centered, 0.1)
        return torch.cat([F.linear(n, p[f"{k}_weight"], p[f"{k}_bias"]) for k in "ab"], -1), n

    check(randomize(parts), plain_parts, x)


def glu(f):
    return lambda x: f(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
    "glu": glu(torch.sigmoid),
    "geglu": glu(lambda x: F.gelu(x, approximate="tanh")),
    "qgeglu": glu(lambda x: x * torch.sigmoid(1.702 * x)),
    "reglu": glu(F.relu),
    "sreglu": glu(lambda x: F.relu(x) ** 2),
    "swiglu": glu(F.silu),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_module_layernorm_mlp(te, activation):
    x = torch.randn(3, 5, 8, dtype=torch.float64)

    def plain(p, x):
        hidden = ACTIVATIONS[activation](F.linear(normed(p, x), p["fc1_weight"], p["fc1_bias"]))
        return F.linear(hidden, p["fc2_weight"], p["fc2_bias"])

    check(randomize(te.LayerNormMLP(8, 16, activation=activation)), plain, x)


def test_module_layernorm_mlp_options(te):
    x = torch.randn(3, 5, 8, dtype=torch.float64)

    def plain(p, x):
        n = normed(p, x, "RMSNorm", True)
        return F.linear(F.silu(F.linear(n, p["fc1_weight"], p["fc1_bias"])), p["fc2_weight"]), p["fc2_bias"], n

    options = {"activation": "silu", "normalization": "RMSNorm", "zero_centered_gamma": True, "return_bias": True}
    check(randomize(te.LayerNormMLP(8, 16, return_layernorm_output=True, **options)), plain, x)
    check(randomize(te.LayerNormMLP(8, 16, return_layernorm_output=True, checkpoint=True, **options)), plain, x)
    clamped = te.LayerNormMLP(8, 16, activation="clamped_swiglu", activation_params={"limit": 2.0}, bias=False)
    assert set(dict(clamped.named_parameters())) == {*NORMED, "fc1_weight", "fc2_weight"}
    assert clamped(x.float()).shape == x.shape
    with pytest.raises(ValueError, match="activation is 'mish'"):
        te.LayerNormMLP(8, 16, activation="mish")


def test_module_grouped_linear(te):
    x, splits = torch.randn(9, 8, dtype=torch.float64), [4, 0, 5]

    def plain(p, x):
        return torch.cat([F.linear(r, p[f"weight{g}"], p[f"bias{g}"]) for g, r in enumerate(x.split(splits))])

    module = randomize(te.GroupedLinear(3, 8, 6))
    for given in (splits, torch.tensor(splits), torch.tensor(splits, dtype=torch.int32)):
        module.zero_grad()
        check(WithArguments(module, given), plain, x)
    output, biases = te.GroupedLinear(3, 8, 6, return_bias=True)(x.float(), splits)
    assert output.shape == (9, 6) and [tuple(b.shape) for b in biases] == [(6,)] * 3


@pytest.mark.parametrize("single_bias", [False, True])
@pytest.mark.parametrize("single_weight", [False, True])
def test_module_grouped_linear_with_one_parameter(te, single_weight, single_bias):
    x, splits = torch.randn(9, 8, dtype=torch.float64), [4, 0, 5]
    options = {"single_grouped_weight": single_weight, "single_grouped_bias": single_bias}

    def member(p, kind, g):
        return p[kind][g] if kind in p else p[f"{kind}{g}"]

    def plain(p, x):
        groups = enumerate(x.split(splits))
        return torch.cat([F.linear(rows, member(p, "weight", g), member(p, "bias", g)) for g, rows in groups])

    module = randomize(te.GroupedLinear(3, 8, 6, **options))
    assert set(dict(module.named_parameters())) == {
        *(["weight"] if single_weight else ["weight0", "weight1", "weight2"]),
        *(["bias"] if single_bias else ["bias0", "bias1", "bias2"]),
    }
    check(WithArguments(module, splits), plain, x)
    # Either layout loads into the other.
    for other in (te.GroupedLinear(3, 8, 6), te.GroupedLinear(3, 8, 6, **options)):
        other = other.double()
        other.load_state_dict(module.state_dict())
        torch.testing.assert_close(other(x, splits), module(x, splits))
        back = te.GroupedLinear(3, 8, 6, **options).double()
        back.load_state_dict(other.state_dict())
        torch.testing.assert_close(back(x, splits), module(x, splits))
    _, biases = te.GroupedLinear(3, 8, 6, return_bias=True, **options)(x.float(), splits)
    assert isinstance(biases, torch.nn.Parameter if single_bias else list)


def test_one_grouped_weight_is_initialized_like_its_members(te):
    torch.manual_seed(0)
    many = te.GroupedLinear(3, 8, 6, parallel_mode="row")
    torch.manual_seed(0)
    one = te.GroupedLinear(3, 8, 6, parallel_mode="row", single_grouped_weight=True)
    assert torch.equal(one.weight, torch.stack([many.weight0, many.weight1, many.weight2]))
    assert (many.weight0.partition_dim, one.weight.partition_dim) == (1, 2)
    meta = te.GroupedLinear(3, 8, 6, single_grouped_weight=True, device="meta")
    assert meta(torch.randn(4, 8), [1, 1, 2]).shape == (4, 6)
    with te.quantized_model_init(enabled=True), pytest.raises(NotImplementedError, match="single_grouped_weight=False"):
        te.GroupedLinear(3, 32, 32, single_grouped_weight=True)


def test_module_norms(te):
    x = torch.randn(4, 8, dtype=torch.float64)
    layer = randomize(te.LayerNorm(8, eps=0.1, zero_centered_gamma=True))
    check(layer, lambda p, x: F.layer_norm(x, (8,), p["weight"] + 1, p["bias"], 0.1), x)
    check(randomize(te.RMSNorm(8, eps=0.1)), lambda p, x: F.rms_norm(x, (8,), p["weight"], 0.1), x)
    assert isinstance(layer, ops.LayerNorm)


def test_modules_copy_pickle_and_replace_parameters(te):
    x = torch.randn(4, 8)
    module = te.LayerNormMLP(8, 16)
    y = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), y)
        assert not {id(p) for p in other.parameters()} & {id(p) for p in module.parameters()}
        other(x).sum().backward()
        assert other.fc1_weight.grad is not None and module.fc1_weight.grad is None
    module.fc2_weight = torch.nn.Parameter(torch.zeros(8, 16))
    module(x).sum().backward()
    assert (module(x) == module.fc2_bias).all() and module.fc2_weight.grad is not None
    half = module.to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    called = torch.func.functional_call(te.Linear(8, 8), {"weight": torch.zeros(8, 8), "bias": torch.ones(8)}, (x,))
    assert (called == 1).all()


# ---- main_grad ----------------------------------------------------------------------------------------------------

FUSED = {
    "Linear": lambda te, **o: te.Linear(8, 6, **o),
    "Linear in parts": lambda te, **o: te.Linear(8, 6, parameters_split=["a", "b"], **o),
    "LayerNormLinear": lambda te, **o: te.LayerNormLinear(8, 6, **o),
    "LayerNormMLP": lambda te, **o: te.LayerNormMLP(8, 16, **o),
    "GroupedLinear": lambda te, **o: te.GroupedLinear(2, 8, 6, **o),
    "GroupedLinear, one weight": lambda te, **o: te.GroupedLinear(2, 8, 6, single_grouped_weight=True, **o),
}


def arguments_of(module):
    return ([3, 2],) if hasattr(module, "num_gemms") else ()


def weights_of(module):
    return {name: p for name, p in module.named_parameters() if "weight" in name and "norm" not in name}


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("case", FUSED)
def test_module_main_grad_handshake(te, case, flag, delay):
    x = torch.randn(5, 8)
    plain = FUSED[case](te)
    fused = FUSED[case](te, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    fused.load_state_dict(plain.state_dict())
    called = []
    fused.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    for p in weights_of(fused).values():
        p.main_grad = torch.full_like(p, 0.5)
        if flag:
            p.grad_added_to_main_grad = False
    plain(x, *arguments_of(plain)).square().sum().backward()
    fused(x, *arguments_of(fused)).square().sum().backward()
    if delay:
        assert all((p.main_grad == 0.5).all() for p in weights_of(fused).values())
        fused.backward_dw()
        fused.backward_dw()  # nothing is pending
    assert called == [1] * delay and fused.need_backward_dw() is delay
    for name, p in fused.named_parameters():
        expected = dict(plain.named_parameters())[name].grad
        if name not in weights_of(fused):
            torch.testing.assert_close(p.grad, expected)
            continue
        torch.testing.assert_close(p.main_grad - 0.5, expected, rtol=1e-4, atol=1e-5)
        assert (p.grad is not None) is flag and getattr(p, "grad_added_to_main_grad", None) is (True if flag else None)
        assert p.grad is None or p.grad.data_ptr() != p.main_grad.data_ptr()


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("case", FUSED)
def test_module_first_microbatch_overwrites(te, case, delay):
    module = FUSED[case](te, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    plain = FUSED[case](te)
    plain.load_state_dict(module.state_dict())
    for p in weights_of(module).values():
        p.main_grad = torch.full_like(p, float("nan"))
    batches = [torch.randn(5, 8) for _ in range(3)]
    for i, x in enumerate(batches):
        plain(x, *arguments_of(plain)).square().sum().backward()
        module(x, *arguments_of(module), is_first_microbatch=i == 0).square().sum().backward()
    for _ in batches:
        module.backward_dw()
    for name, p in weights_of(module).items():
        torch.testing.assert_close(p.main_grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-4)
        assert not hasattr(p, "overwrite_main_grad")


def test_module_reports_missing_main_grad(te):
    with pytest.raises(RuntimeError, match="main_grad"):
        te.Linear(4, 4, fuse_wgrad_accumulation=True)(torch.ones(2, 4)).sum().backward()


def test_module_stops_overwriting_after_failed_backward(te):
    linear = te.Linear(4, 4, fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match="main_grad"):
        linear(torch.ones(2, 4), is_first_microbatch=True).sum().backward()
    linear.weight.main_grad = torch.ones(4, 4)
    linear(torch.ones(2, 4), is_first_microbatch=False).sum().backward()
    assert (linear.weight.main_grad == 3).all()


def test_module_first_microbatch_with_recomputation(te):
    mlp = te.LayerNormMLP(8, 16, fuse_wgrad_accumulation=True)
    x = torch.randn(5, 8, requires_grad=True)
    for p in weights_of(mlp).values():
        p.main_grad = torch.full_like(p, float("nan"))
    te.checkpoint(mlp, x, is_first_microbatch=True).sum().backward()
    assert all(p.main_grad.isfinite().all() for p in weights_of(mlp).values())


# ---- attention ----------------------------------------------------------------------------------------------------


def plain_attention(q, k, v, hidden=None, scale=None, bias=0):
    """Attention of [b, s, h, d] written out; `hidden` is True where a key is masked."""
    k, v = (t.repeat_interleave(q.size(2) // t.size(2), 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.size(-1) ** -0.5) + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("groups", [4, 2])
def test_attention(te, layout, groups):
    q = torch.randn(2, 5, 4, 3, dtype=torch.float64)
    k, v = torch.randn(2, 2, 5, groups, 3, dtype=torch.float64)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]], dtype=torch.bool)[:, None, None, :]
    arbitrary = torch.rand(2, 1, 5, 5) < 0.3
    arbitrary[..., 0] = False
    bias = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    cases = [
        ({"attn_mask_type": "causal"}, causal, 0),
        ({"attn_mask_type": "no_mask"}, None, 0),
        ({"attn_mask_type": "padding", "attention_mask": padding}, padding, 0),
        ({"attn_mask_type": "padding_causal", "attention_mask": padding}, padding | causal, 0),
        ({"attn_mask_type": "arbitrary", "attention_mask": arbitrary}, arbitrary, 0),
        ({"attn_mask_type": "causal", "window_size": (1, 0)}, causal | torch.ones(5, 5).tril(-2).bool(), 0),
        (
            {"attn_mask_type": "causal", "core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias},
            causal,
            bias,
        ),
        ({"attn_mask_type": "causal", "checkpoint_core_attention": True}, causal, 0),
    ]
    module = te.DotProductAttention(4, 3, num_gqa_groups=groups, qkv_format=layout)
    for options, hidden, extra in cases:
        mine, theirs = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
        turn = (lambda t: t.transpose(0, 1)) if layout == "sbhd" else (lambda t: t)
        got = turn(module(*[turn(t) for t in mine], **options))
        expected = plain_attention(*theirs, hidden, bias=extra)
        same(got, expected, str(options))
        dy = torch.randn_like(expected)
        got.backward(dy)
        expected.backward(dy)
        for one, other in zip(mine, theirs, strict=True):
            same(one.grad, other.grad, str(options))


def test_attention_options(te):
    q, k = torch.randn(2, 4, 2, 3, dtype=torch.float64), torch.randn(2, 6, 2, 3, dtype=torch.float64)
    module = te.DotProductAttention(2, 3, qkv_format="bshd", softmax_scale=0.3, attention_dropout=0.5)
    module.eval()
    same(module(q, k, k, attn_mask_type="no_mask"), plain_attention(q, k, k, scale=0.3))
    first = torch.ones(4, 6, dtype=torch.bool)
    same(module(q, k, k, attn_mask_type="causal"), plain_attention(q, k, k, first.triu(1), 0.3))
    same(module(q, k, k, attn_mask_type="causal_bottom_right"), plain_attention(q, k, k, first.triu(3), 0.3))
    module.train()
    assert not torch.equal(module(q, k, k), module(q, k, k))
    for options in ({"alibi_slopes": torch.ones(2)}, {"core_attention_bias_type": "alibi"}, {"qkv_format": "bhsd"}):
        with pytest.raises(NotImplementedError, match="DotProductAttention"):
            module(q, k, k, **options)
    module.eval()
    without_effect = {"cu_seqlens_q": None, "max_seqlen_q": 4}
    same(module(q, k, k, attn_mask_type="no_mask", **without_effect), plain_attention(q, k, k, scale=0.3))
    layer = te.TransformerLayer(8, 16, 2)
    for call in (partial(module, q, k, k), partial(layer, torch.randn(4, 1, 8))):
        with pytest.raises(TypeError, match="unexpected keyword argument 'atention_mask'.*'attention_mask'"):
            call(atention_mask=None)
    with pytest.raises(ValueError, match="attention_mask is not given"):
        module(q, k, k, attn_mask_type="padding")


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_attention_of_packed_sequences(te, mask):
    heads, groups, channels = 4, 2, 3
    queries, keys = torch.tensor([0, 4, 4, 9], dtype=torch.int32), torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    module = te.DotProductAttention(heads, channels, groups, qkv_format="thd", attn_mask_type=mask)
    given = [
        torch.randn(rows, count, channels, dtype=torch.float64, requires_grad=True)
        for rows, count in ((9, heads), (12, groups), (12, groups))
    ]
    got = module(*given, cu_seqlens_q=queries, cu_seqlens_kv=keys, max_seqlen_q=5, max_seqlen_kv=6)
    dense = te.DotProductAttention(
        heads,
        channels,
        groups,
        qkv_format="bshd",
        attn_mask_type=mask.replace("padding_", "").replace("padding", "no_mask"),
    )
    parts = [
        dense(given[0][None, a:b], *(t[None, c:d] for t in given[1:]))[0]
        for a, b, c, d in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True)
        if b > a
    ]
    same(got, torch.cat(parts))
    dy = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad(got, given, dy), torch.autograd.grad(torch.cat(parts), given, dy), strict=True
    ):
        same(ours, theirs)


def test_attention_of_packed_sequences_raises_by_name(te):
    module = te.DotProductAttention(2, 4, qkv_format="thd")
    q, offsets = torch.randn(6, 2, 4), torch.tensor([0, 2, 6], dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    with pytest.raises(ValueError, match="qkv_format is 'thd', but cu_seqlens_kv is not given"):
        module(q, q, q, cu_seqlens_q=offsets)
    with pytest.raises(NotImplementedError, match="cu_seqlens is not supported with qkv_format 'bshd'"):
        module(q[None], q[None], q[None], qkv_format="bshd", **packed)
    with pytest.raises(ValueError, match=r"expected \(queries, 2, 4\), .* with qkv_format 'thd'"):
        module(q[None], q, q, **packed)
    with pytest.raises(NotImplementedError, match="no arbitrary mask and no bias"):
        module(q, q, q, attn_mask_type="arbitrary", **packed)
    with pytest.raises(NotImplementedError, match="cu_seqlens_q_padded is not supported"):
        module(q, q, q, cu_seqlens_q_padded=offsets, **packed)


def test_attention_rotary_positions(te):
    from transformer_engine.pytorch.attention import apply_rotary_pos_emb

    angles = te.RotaryPositionEmbedding(8)(6)
    assert angles.shape == (6, 1, 1, 8) and angles[3, 0, 0, 0] == 3
    t = torch.randn(6, 2, 4, 10)
    turned = apply_rotary_pos_emb(t, angles)
    pair = torch.complex(t[..., :4], t[..., 4:8]) * torch.polar(torch.ones(6, 1, 1, 4), angles[..., :4])
    torch.testing.assert_close(turned, torch.cat([pair.real, pair.imag, t[..., 8:]], -1))
    other = apply_rotary_pos_emb(t.transpose(0, 1), angles, tensor_format="bshd")
    torch.testing.assert_close(other.transpose(0, 1), turned)


@pytest.mark.parametrize("fused, interleaved", [(False, True), (True, True), (True, False)])
def test_attention_with_projections(te, fused, interleaved):
    """The projection orders heads as Transformer Engine does: by group if interleaved."""
    heads, groups, channels = 4, 2, 3
    module = te.MultiheadAttention(
        12, heads, kv_channels=channels, num_gqa_groups=groups, attention_dropout=0.0, input_layernorm=True,
        fuse_qkv_params=fused, qkv_weight_interleaved=interleaved, return_bias=True, qkv_format="bshd",
    )  # fmt: skip

    def project(p, n):
        if not fused:
            return [F.linear(n, p[f"layernorm_qkv.{k}_weight"], p[f"layernorm_qkv.{k}_bias"]) for k in names_]
        mixed = F.linear(n, p["layernorm_qkv.weight"], p["layernorm_qkv.bias"])
        if not interleaved:
            return mixed.split([heads * channels, groups * channels, groups * channels], -1)
        mixed = mixed.unflatten(-1, (groups, heads // groups + 2, channels))
        return [part.flatten(2) for part in mixed.split([heads // groups, 1, 1], 3)]

    names_ = ("query", "key", "value")
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)

    def plain(p, x):
        n = F.layer_norm(x, (12,), p["layernorm_qkv.layer_norm_weight"], p["layernorm_qkv.layer_norm_bias"])
        q, k, v = (t.unflatten(-1, (-1, channels)) for t in project(p, n))
        return F.linear(plain_attention(q, k, v, causal), p["proj.weight"]), p["proj.bias"]

    check(randomize(module), plain, torch.randn(2, 5, 12, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "L2Normalization"])
@pytest.mark.parametrize("before", [False, True])
def test_attention_with_normed_queries_and_keys(te, kind, before):
    from transformer_engine.pytorch.attention import apply_rotary_pos_emb

    options = {"qk_norm_type": kind, "qk_norm_before_rope": before, "qk_norm_eps": 0.1}
    module = te.MultiheadAttention(8, 2, attention_dropout=0.0, qkv_format="bshd", fuse_qkv_params=False, **options)
    angles = te.RotaryPositionEmbedding(4)(5)
    norms = {
        "RMSNorm": lambda p, n, t: F.rms_norm(t, (4,), p[f"{n}.weight"], 0.1),
        "LayerNorm": lambda p, n, t: F.layer_norm(t, (4,), p[f"{n}.weight"], p[f"{n}.bias"], 0.1),
        "L2Normalization": lambda p, n, t: t / (t.square().sum(-1, keepdim=True) + 0.1).sqrt(),
    }

    def plain(p, x):
        parts = [F.linear(x, p[f"qkv.{s}_weight"], p[f"qkv.{s}_bias"]) for s in ("query", "key", "value")]
        q, k, v = (t.unflatten(-1, (2, 4)) for t in parts)
        turn = lambda t: apply_rotary_pos_emb(t, angles, tensor_format="bshd")  # noqa: E731
        norm = lambda n, t: norms[kind](p, n, t)  # noqa: E731
        q, k = (turn(norm(n, t)) if before else norm(n, turn(t)) for n, t in (("q_norm", q), ("k_norm", k)))
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return F.linear(plain_attention(q, k, v, hidden), p["proj.weight"], p["proj.bias"])

    check(WithArguments(randomize(module), rotary_pos_emb=angles), plain, torch.randn(2, 5, 8, dtype=torch.float64))


def test_cross_attention(te):
    module = te.MultiheadAttention(8, 2, attention_type="cross", attn_mask_type="no_mask", attention_dropout=0.0)
    y = module(torch.randn(4, 2, 8), encoder_output=torch.randn(7, 2, 8))
    assert y.shape == (4, 2, 8) and {n for n, _ in module.named_children()} == {
        "query_layer", "key_value", "core_attention", "proj",
    }  # fmt: skip


# ---- TransformerLayer ---------------------------------------------------------------------------------------------


def layer_by_hand(p, x, post=False, parallel=False):
    causal = torch.ones(x.size(0), x.size(0), dtype=torch.bool).triu(1)
    a = {k.removeprefix("self_attention.layernorm_qkv."): v for k, v in p.items()}
    m = {k.removeprefix("layernorm_mlp."): v for k, v in p.items() if k.startswith("layernorm_mlp.")}
    n = normed(a, x)
    q, k, v = (F.linear(n, a[f"{s}_weight"], a[f"{s}_bias"]).unflatten(-1, (4, -1)) for s in ("query", "key", "value"))
    attended = plain_attention(*(t.transpose(0, 1) for t in (q, k, v)), causal).transpose(0, 1)
    attended = F.linear(attended, p["self_attention.proj.weight"], p["self_attention.proj.bias"])

    def mlp(x):
        n = normed(m, x)
        hidden = F.gelu(F.linear(n, m["fc1_weight"], m["fc1_bias"]), approximate="tanh")
        return F.linear(hidden, m["fc2_weight"], m["fc2_bias"]), n

    if parallel:
        return x + attended + mlp(x)[0]
    x = (n if post else x) + attended
    out, n = mlp(x)
    return (n if post else x) + out


@pytest.mark.parametrize("options", [{}, {"post": True}, {"parallel": True}], ids=str)
def test_layer_values(te, options):
    given = {
        "apply_residual_connection_post_layernorm": options.get("post", False),
        "parallel_attention_mlp": options.get("parallel", False),
    }
    module = te.TransformerLayer(16, 32, 4, hidden_dropout=0.0, attention_dropout=0.0, **given)
    check(randomize(module), lambda p, x: layer_by_hand(p, x, **options), torch.randn(5, 2, 16, dtype=torch.float64))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "fuse_qkv_params": True,
            "num_gqa_groups": 2,
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "bias": False,
        },
        {"layer_type": "decoder", "output_layernorm": True, "drop_path_rate": 0.1},
        {"attn_input_format": "bshd", "rotary": True},
    ],
    ids=str,
)
def test_layer_trains(te, options):
    options = dict(options)
    angles = te.RotaryPositionEmbedding(8)(6) if options.pop("rotary", False) else None
    module = te.TransformerLayer(32, 64, 4, hidden_dropout=0.05, attention_dropout=0.05, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    x = torch.randn(6, 6, 32)
    target, losses = x.roll(1, -1), []
    more = {"encoder_output": torch.randn(4, 6, 32)} if options.get("layer_type") == "decoder" else {}
    for _ in range(40):
        loss = F.mse_loss(module(x, rotary_pos_emb=angles, **more), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], (losses[0], losses[-1])


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_layer_drop_path_drops_whole_samples(te, layout):
    path = te.TransformerLayer(8, 16, 2, drop_path_rate=0.5, attn_input_format=layout).drop_path
    batch = layout.index("b")
    kept = path(torch.ones(40, 40, 8)).movedim(batch, 0).flatten(1)
    assert ((kept == 0).all(1) | (kept == 2).all(1)).all() and 0 < (kept[:, 0] == 0).sum() < 40
    assert (path.eval()(torch.ones(2, 3, 8)) == 1).all()


# ---- recomputation, permutation, router ---------------------------------------------------------------------------


def test_checkpoint_recomputes_with_same_random_numbers(te):
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    calls = []

    def f(x, factor=1):
        with tracker.fork():
            mask = torch.rand_like(x)
        calls.append(mask)
        return F.dropout(x * mask * factor, 0.5)

    x = torch.randn(20, requires_grad=True)
    y = te.checkpoint(f, x, get_rng_state_tracker=lambda: tracker, use_reentrant=True, factor=2)
    after = tracker.get_states()["model-parallel-rng"]
    y.sum().backward()
    assert len(calls) == 2 and torch.equal(calls[0], calls[1])
    assert torch.equal(tracker.get_states()["model-parallel-rng"], after)
    torch.testing.assert_close(x.grad * x.detach(), y.detach())
    with pytest.raises(NotImplementedError, match="distribute_saved_activations"):
        te.checkpoint(f, x, distribute_saved_activations=True)


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_permute_round_trip(te, map_type):
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(6)])
    mask = torch.zeros(6, 5, dtype=torch.bool).scatter(1, chosen, True)
    routing = mask if map_type == "mask" else chosen
    probs = torch.rand(routing.shape, dtype=torch.float64, requires_grad=True)
    permuted, row_ids = te.moe_permute(x, routing, num_out_tokens=12, map_type=map_type)
    assert torch.equal(permuted, torch.cat([x[mask[:, e]] for e in range(5)]))
    y = te.moe_unpermute(permuted, row_ids, merging_probs=probs, restore_shape=x.shape, map_type=map_type)
    weight = (probs * mask).sum(1) if map_type == "mask" else probs.sum(1)
    same(y, x * weight[:, None])
    same(te.moe_unpermute(permuted, row_ids, map_type=map_type), 2 * x)
    dy = torch.randn_like(y)
    dx, dp = torch.autograd.grad(y, (x, probs), dy, retain_graph=True)
    expected = torch.autograd.grad(x * weight[:, None], (x, probs), dy)
    same(dx, expected[0])
    same(dp, expected[1])


def test_permute_with_probs_drops_and_pads(te):
    x, mask = torch.randn(4, 3), torch.tensor([[1, 0], [1, 1], [0, 1], [0, 0]], dtype=torch.bool)
    probs = torch.rand(4, 2, requires_grad=True)
    permuted, chosen, row_ids = te.moe_permute_with_probs(x, probs, mask, num_out_tokens=4)
    assert torch.equal(permuted, x[[0, 1, 1, 2]]) and torch.equal(chosen, probs.T[mask.T])
    chosen.sum().backward()
    assert torch.equal(probs.grad, mask.float())
    fewer, _, row_ids = te.moe_permute_with_probs(x, probs, mask, num_out_tokens=3)
    assert torch.equal(fewer, x[[0, 1, 1]])
    assert torch.equal(te.moe_unpermute(fewer, row_ids, restore_shape=x.shape)[2:], torch.zeros(2, 3))
    more, row_ids = te.moe_permute(x, mask, num_out_tokens=6)
    assert more.shape == (6, 3) and torch.equal(te.moe_unpermute(more, row_ids)[1], 2 * x[1])
    with pytest.raises(ValueError, match="map_type"):
        te.moe_permute(x, mask, map_type="set")


def test_permute_sorts_chunks(te):
    x, p = torch.randn(6, 2, requires_grad=True), torch.rand(6)
    y, q = te.moe_sort_chunks_by_index_with_probs(x, p, torch.tensor([1, 3, 2]), torch.tensor([2, 0, 1]))
    order = [4, 5, 0, 1, 2, 3]
    assert torch.equal(y, x[order]) and torch.equal(q, p[order])
    assert torch.equal(te.moe_sort_chunks_by_index(x, [1, 3, 2], [2, 0, 1]), y)
    y[0].sum().backward()
    assert x.grad.sum() == 2 and (x.grad[4] == 1).all()


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("reduce_loss", (False, True))
def test_parallel_cross_entropy(te, reduce_loss, dtype):
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    assert te.parallel_cross_entropy is parallel_cross_entropy
    logits, target = (torch.randn(3, 5, 17) * 4).to(dtype).requires_grad_(), torch.randint(17, (3, 5))
    target[1, 2] = 16
    loss = parallel_cross_entropy(logits, target, 0.1, reduce_loss, None, 16, True)
    wide = logits.detach().double().requires_grad_()
    kind = "mean" if reduce_loss else "none"
    expected = F.cross_entropy(
        wide.flatten(0, 1), target.flatten(), label_smoothing=0.1, ignore_index=16, reduction=kind
    )
    expected = expected if reduce_loss else expected.view(3, 5)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and loss.shape == expected.shape
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    before = logits.detach().clone()
    loss.sum().backward()
    expected.sum().backward()
    tolerance = 8e-3 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=tolerance, atol=1e-6)
    assert torch.equal(logits, before), "the logits were overwritten"
    assert torch.equal(parallel_cross_entropy(logits, target.flatten(), 0.1, reduce_loss, ignore_idx=16), loss)
    with pytest.raises(ValueError, match=r"target has shape \[3\], inp has shape \[3, 5, 17\]; expected.*\[3, 5\]"):
        parallel_cross_entropy(logits, target[:, 0])


def test_router(te):
    from transformer_engine.pytorch import router

    logits = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    top = logits.topk(2, -1).indices
    probs, mask = router.fused_topk_with_score_function(logits, 2, False, None, None, None, "softmax", None)
    same(probs.gather(1, top), logits.gather(1, top).softmax(-1))
    assert mask.sum() == 14 and mask.gather(1, top).all() and (probs[~mask] == 0).all()
    probs, _ = router.fused_topk_with_score_function(logits, 2, True, None, None, 2.5, "softmax", None)
    same(probs.gather(1, top), 2.5 * logits.softmax(-1).gather(1, top))
    bias = torch.zeros(8)
    bias[3] = 100
    probs, mask = router.fused_topk_with_score_function(logits, 2, False, None, None, None, "sigmoid", bias)
    assert mask[:, 3].all()
    same(probs.sum(1), torch.ones(7, dtype=torch.float64))
    _, mask = router.fused_topk_with_score_function(logits, 2, True, 4, 1, None, "softmax", None)
    assert (mask.unflatten(1, (4, 2)).sum(-1).amax(1) == 2).all()
    chosen, scores = router.fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")
    same(scores, logits.softmax(-1))
    counts = chosen.sum(0)
    loss = router.fused_moe_aux_loss(scores, counts, 7, 8, 2, 0.1)
    same(loss, (scores.sum(0) * counts).sum() * (8 * 0.1 / (2 * 49)))
    loss.backward()
    assert logits.grad is not None


@pytest.mark.parametrize("recipe, align", [(None, 16), ("MXFP8BlockScaling", 32), ("NVFP4BlockScaling", 128)])
def test_padding_of_experts(te, recipe, align):
    from transformer_engine.common import recipe as recipes

    splits, x = [3, 0, align, align + 1], torch.randn(2 * align + 4, 5, dtype=torch.float64, requires_grad=True)
    padding, unpadding = te.Fp8Padding(4), te.Fp8Unpadding(4)
    with te.autocast(recipe is not None, recipe=getattr(recipes, recipe)() if recipe else None):
        padded, sizes = padding(x, splits)
        assert sizes == [align, 0, align, 2 * align] and padded.shape == (4 * align, 5)
        assert padded[3:align].eq(0).all() and torch.equal(padded[:3], x[:3])
        assert torch.equal(unpadding(padded, splits), x)
        assert torch.autograd.gradcheck(lambda t: unpadding(padding(t, splits)[0] * 2, splits), x)
        same, sizes = padding(padded, sizes)
        assert same.data_ptr() == padded.data_ptr()
        assert torch.equal(padding(x.reshape(-1, 2, 5), splits)[0], padded)
        padding.align_size = 1
        assert padding(x, splits)[1] == splits
        padding.align_size = None
        with pytest.raises(ValueError, match=r"Fp8Padding: m_splits is \[3\] for"):
            padding(x, [3])
        with pytest.raises(ValueError, match=r"Fp8Unpadding: m_splits is \[3, 0, .* when padded to"):
            unpadding(x, splits)


@pytest.mark.parametrize("experts", [8, 13])
def test_formats_of_routing_map(te, experts):
    from transformer_engine.pytorch.router import (
        RoutingMapFormat,
        fused_compute_score_for_moe_aux_loss,
        fused_topk_with_score_function,
    )

    logits = torch.randn(5, 2, experts)
    arguments = (logits, 3, False, None, None, None, "softmax", None)
    probs, mask = fused_topk_with_score_function(*arguments)
    for name in ("bitmap_u8", RoutingMapFormat.BITMAP_U8, 1):
        other, bits = fused_topk_with_score_function(*arguments, routing_map_format=name)
        assert torch.equal(other, probs) and bits.dtype == torch.uint8 and bits.shape == (5, 2, -(-experts // 8))
        for e in range(experts):
            assert torch.equal(bits[..., e // 8] >> (e % 8) & 1, mask[..., e].to(torch.uint8))
    for dtype in (torch.int16, torch.int32, torch.int64):
        indices = torch.empty(5, 2, 3, dtype=dtype)
        other, returned = fused_topk_with_score_function(*arguments, topk_indices=indices)
        assert returned is indices and torch.equal(other, probs)
        assert torch.equal(torch.zeros_like(mask).scatter(-1, indices.long(), True), mask)
    mask, scores = fused_compute_score_for_moe_aux_loss(logits, 3, "sigmoid")
    bits, other = fused_compute_score_for_moe_aux_loss(logits, 3, "sigmoid", "bitmap_u8")
    assert torch.equal(other, scores)
    for e in range(experts):
        assert torch.equal(bits[..., e // 8] >> (e % 8) & 1, mask[..., e].to(torch.uint8))
    with pytest.raises(ValueError, match="routing_map_format is 'bits', expected one of bytemap, bitmap_u8"):
        fused_topk_with_score_function(*arguments, routing_map_format="bits")
    with pytest.raises(ValueError, match=r"topk_indices has shape \[5, 3\]"):
        fused_topk_with_score_function(*arguments, topk_indices=torch.empty(5, 3, dtype=torch.int32))
