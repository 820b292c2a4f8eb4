"""What weft does not support raises an error that names it; every returned result is correct."""

import contextlib
import warnings

import pytest
import torch
from plain import apply
from torch.autograd import forward_ad

from torchweft import ops

WIDTH = 4
REJECTIONS = (NotImplementedError, RuntimeError, TypeError, ValueError)


def rows(count: int = 3, **options) -> torch.Tensor:
    return torch.randn(count, WIDTH, **options)


def mlp() -> ops.Sequential:
    return ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Linear(WIDTH, WIDTH))


def plain(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    for op in module if isinstance(module, ops.Sequential) else [module]:
        x, _ = apply(op, x)
    return x


MODULES = {
    "Linear": lambda: ops.Linear(WIDTH, WIDTH),
    "GELU": ops.GELU,
    "RMSNorm": lambda: ops.RMSNorm(WIDTH),
    "Identity": ops.Identity,
    "ConstantScale": lambda: ops.ConstantScale(3.0),
    "Sequential": mlp,
}
modules = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def correct_or_rejected(call, reference, naming: str = "weft") -> bool:
    """Runs `call`. It may raise an error that names weft or the operation; otherwise it must equal `reference`."""
    try:
        result = call()
    except REJECTIONS as error:
        assert naming in str(error), f"the error does not name weft: {error}"
        return False
    torch.testing.assert_close(result, reference())
    return True


# ---- differentiating twice ----


@modules
def test_double_backward_raises_for_input(make):
    module, x = make(), rows(requires_grad=True)
    (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(plain(module, x).square().sum(), x)
    torch.testing.assert_close(dx.detach(), expected)
    with pytest.raises(RuntimeError, match="weft.*twice"):
        torch.autograd.grad(dx.sum(), x)


@pytest.mark.parametrize("which", ["weight of the first", "weight of the last"])
def test_double_backward_raises_for_parameters(which):
    module = mlp()
    param = module[0 if "first" in which else 2].weight
    (dw,) = torch.autograd.grad(module(rows()).square().sum(), param, create_graph=True)
    with pytest.raises(RuntimeError, match="weft.*twice"):
        dw.square().sum().backward()


def test_gradient_penalty_raises():
    module, x = mlp(), rows(requires_grad=True)
    y = module(x).sum() + x.pow(3).sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="weft.*twice"):
        (y + dx.norm()).backward()


def test_gradient_with_respect_to_dy_raises():
    module, x = mlp(), rows(requires_grad=True)
    weights = rows(requires_grad=True)
    (dx,) = torch.autograd.grad(module(x), x, weights, create_graph=True)
    with pytest.raises(RuntimeError, match="weft.*twice"):
        torch.autograd.grad(dx.sum(), weights)


def test_create_graph_alone_changes_no_gradient():
    module, x = mlp(), rows(requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module(x).square().sum().backward(create_graph=True)
    expected = torch.autograd.grad(plain(module, x).square().sum(), [x, *module.parameters()])
    got = [x.grad, *(p.grad for p in module.parameters())]
    torch.testing.assert_close([g.detach() for g in got], list(expected))


def test_hessians_and_hvp_raise():
    module, x = mlp(), rows(1)
    for second in (
        lambda f: torch.autograd.functional.hessian(f, x),
        lambda f: torch.autograd.functional.hvp(f, x, x),
        lambda f: torch.autograd.functional.vhp(f, x, x),
    ):
        with pytest.raises(RuntimeError, match="weft"):
            second(lambda t: module(t).square().sum())


def test_gradcheck_holds_and_gradgradcheck_raises():
    module = mlp().double()
    x = rows(dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, [x])
    with pytest.raises(RuntimeError, match="weft.*twice"):
        torch.autograd.gradgradcheck(module, [x])


# ---- function transforms ----


def scalar(f):
    return lambda x: f(x).square().sum()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(scalar(f))(x),
    "grad_and_value": lambda f, x: torch.func.grad_and_value(scalar(f))(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](torch.ones_like(x)),
    "vmap": lambda f, x: torch.vmap(f)(x),
    "vmap over dim 1": lambda f, x: torch.vmap(f, in_dims=1)(torch.stack([x, 2 * x], 1)),
    "chunked vmap": lambda f, x: torch.vmap(f, chunk_size=2)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(scalar(f))(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda t: torch.func.grad(scalar(f))(t).sum())(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(scalar(f)))(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x),
    "vectorized jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
    "forward jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    "functional vjp": lambda f, x: torch.autograd.functional.vjp(f, x, torch.ones_like(x)),
    "functional jvp": lambda f, x: torch.autograd.functional.jvp(f, x, torch.ones_like(x)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@modules
def test_transform_is_correct_or_rejected(name, make):
    module, x = make(), rows()
    transform = TRANSFORMS[name]
    correct_or_rejected(lambda: transform(module, x), lambda: transform(lambda t: plain(module, t), x))
    torch.testing.assert_close(module(x), plain(module, x))


@pytest.mark.parametrize("name", ["grad", "vjp", "jvp", "vmap", "jacrev", "functionalize"])
def test_torch_func_transforms_are_rejected(name):
    """None of these is implemented. If one is, move it to the supported ones."""
    module, x = mlp(), rows()
    assert not correct_or_rejected(lambda: TRANSFORMS[name](module, x), lambda: pytest.fail(f"{name} returned"))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_parameter_transforms_are_correct_or_rejected(transform):
    module, x = ops.Linear(WIDTH, WIDTH), rows()
    params = dict(module.named_parameters())

    def ours(p):
        return torch.func.functional_call(module, p, (x,)).square().sum()

    def theirs(p):
        return torch.nn.functional.linear(x, p["weight"], p["bias"]).square().sum()

    correct_or_rejected(lambda: transform(ours)(params), lambda: transform(theirs)(params))
    torch.testing.assert_close(module(x), plain(module, x))


@pytest.mark.parametrize("name", ["grad", "jvp", "vmap", "functionalize"])
def test_plain_tensors_inside_transform_are_correct_or_rejected(name):
    module, x, y = mlp(), rows(), rows()
    transform = TRANSFORMS[name]
    correct_or_rejected(
        lambda: transform(lambda t: t * module(y)[0].detach(), x),
        lambda: transform(lambda t: t * plain(module, y)[0].detach(), x),
    )


def test_dropout_inside_vmap_is_correct_or_rejected():
    op, x = ops.Dropout(0.5), torch.ones(3, 64)
    with pytest.raises(REJECTIONS):
        torch.vmap(op)(x)
    with pytest.raises(REJECTIONS, match="weft|random"):
        torch.vmap(lambda t: t + op(torch.ones(64)))(x)


def test_batched_dy_is_correct_or_rejected():
    module, x = mlp(), rows(requires_grad=True)
    weights = torch.randn(5, *x.shape)

    def grads(y):
        return torch.autograd.grad(y, [x, module[0].weight], weights, is_grads_batched=True)

    correct_or_rejected(lambda: grads(module(x)), lambda: grads(plain(module, x)))


def test_per_sample_gradients_are_correct_or_rejected():
    module, x = ops.Linear(WIDTH, WIDTH), rows()
    params = dict(module.named_parameters())

    def each(call):
        return lambda p, t: call(p, t[None]).square().sum()

    def ours(p, t):
        return torch.func.functional_call(module, p, (t,))

    def theirs(p, t):
        return torch.nn.functional.linear(t, p["weight"], p["bias"])

    def per_sample(call):
        return torch.vmap(torch.func.grad(each(call)), in_dims=(None, 0))(params, x)

    correct_or_rejected(lambda: per_sample(ours), lambda: per_sample(theirs))


# ---- forward mode ----


@modules
def test_dual_input_is_rejected(make):
    module = make()
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="weft: the input carries a forward-mode tangent"),
    ):
        module(forward_ad.make_dual(rows(), rows()))


@pytest.mark.parametrize("grad_mode", [True, False])
def test_dual_parameter_or_extra_input_is_rejected(grad_mode):
    module = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.AddExtraInput())
    with forward_ad.dual_level(), torch.set_grad_enabled(grad_mode):
        with pytest.raises(NotImplementedError, match="weft: extra input 0 carries"):
            module(rows(), forward_ad.make_dual(rows(), rows()))
        dual = forward_ad.make_dual(module[0].weight.detach(), torch.ones(WIDTH, WIDTH))
        with pytest.raises(NotImplementedError, match="weft: .*weight.* carries"):
            torch.func.functional_call(module, {"0.weight": dual}, (rows(), rows()))
        module(rows(), rows())


def test_dual_dy_is_correct_or_rejected():
    """jvp of a vjp: the tangent of the incoming gradient must not be dropped."""
    module, x = mlp(), rows(requires_grad=True)
    primal, tangent = rows(), rows()

    def tangent_of_dx(call):
        with forward_ad.dual_level():
            (dx,) = torch.autograd.grad(call(x), x, forward_ad.make_dual(primal, tangent))
            return forward_ad.unpack_dual(dx)

    correct_or_rejected(lambda: tuple(tangent_of_dx(module)), lambda: tuple(tangent_of_dx(lambda t: plain(module, t))))


# ---- kinds of tensors ----


UNUSUAL = {
    "sparse coo": lambda: rows().to_sparse(),
    "sparse csr": lambda: rows().to_sparse_csr(),
    "nested strided": lambda: torch.nested.nested_tensor([rows(2), rows(3)]),
    "nested jagged": lambda: torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged),
    "mkldnn": lambda: rows().to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(rows(), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize(
    "make", [ops.GELU, mlp, ops.Identity, lambda: ops.Bias(WIDTH)], ids=["GELU", "mlp", "Id", "Bias"]
)
def test_unusual_input_is_rejected(kind, make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = UNUSUAL[kind]()
        with pytest.raises((TypeError, NotImplementedError), match="the input (of .* )?is"):
            make()(x)


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_extra_input_or_parameter_is_rejected(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unusual = UNUSUAL[kind]()
        with pytest.raises((TypeError, NotImplementedError), match="(an )?extra input"):
            ops.AddExtraInput()(rows(), unusual)


def test_sparse_parameter_is_rejected():
    op = ops.BasicLinear(WIDTH, WIDTH)
    op.weight = torch.nn.Parameter(torch.eye(WIDTH).to_sparse())
    with pytest.raises((TypeError, NotImplementedError), match="weft: parameter 'weight'.*sparse"):
        op(rows())


def test_sparse_dy_is_correct_or_rejected():
    module, x = mlp(), rows(requires_grad=True)
    index = torch.tensor([[0], [2], [1]])

    def grads(y):
        return torch.autograd.grad(torch.gather(y, 1, index, sparse_grad=True).square().sum(), [x, module[0].weight])

    correct_or_rejected(lambda: grads(module(x)), lambda: grads(plain(module, x)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
@pytest.mark.parametrize("name", ["Linear", "GELU", "RMSNorm", "Sequential"])
def test_integer_inputs_are_rejected(dtype, name):
    module, x = MODULES[name](), torch.randint(0, 2, (3, WIDTH)).to(dtype)
    with pytest.raises(TypeError, match=rf"{name}.*: input is {str(dtype).removeprefix('torch.')}, expected float32"):
        module(x)


@pytest.mark.parametrize("name", ["Linear", "GELU", "RMSNorm", "Sequential"])
def test_complex_inputs_are_rejected(name):
    with pytest.raises(REJECTIONS, match="(?i)complex"):
        MODULES[name]()(torch.ones(3, WIDTH, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
@pytest.mark.parametrize(
    "make",
    [ops.Identity, lambda: ops.Reshape((-1,)), lambda: ops.ConstantScale(2.0), lambda: ops.Bias(WIDTH)],
    ids=["Identity", "Reshape", "ConstantScale", "Bias"],
)
def test_dtype_generic_ops_are_correct_or_rejected(dtype, make):
    module, x = make(), torch.ones(3, WIDTH).to(dtype)
    correct_or_rejected(lambda: module(x), lambda: plain(module, x), naming="expected float32")


def test_conj_and_neg_views_are_correct_or_rejected():
    x = torch.randn(3, WIDTH, dtype=torch.complex64)
    for op in (ops.Identity(), ops.ConstantScale(2.0)):
        correct_or_rejected(lambda op=op: op(x.conj()), lambda op=op: plain(op, x.conj()))
    negative = x.conj().imag
    assert negative.is_neg()
    module = mlp()
    correct_or_rejected(lambda: module(negative), lambda: plain(module, negative))


@pytest.mark.parametrize("device", ["meta"])
def test_meta_input_with_real_parameters_is_rejected(device):
    with pytest.raises(REJECTIONS, match="meta"):
        mlp()(rows(device=device))


class Logged(torch.Tensor):
    """A tensor subclass with its own dispatch, as quantization libraries have."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrapped = torch.utils._pytree.tree_map(lambda t: t.inner if isinstance(t, cls) else t, (args, kwargs or {}))
        result = func(*unwrapped[0], **unwrapped[1])
        return cls(result) if isinstance(result, torch.Tensor) else result


def test_tensor_subclass_with_dispatch_is_rejected():
    x = rows()
    with pytest.raises(NotImplementedError, match="Logged"):
        mlp()(Logged(x))
    with pytest.raises(NotImplementedError, match="Logged"):
        ops.AddExtraInput()(x, Logged(x))
    op = ops.BasicLinear(WIDTH, WIDTH)
    op.weight = torch.nn.Parameter(Logged(torch.eye(WIDTH)), requires_grad=False)
    with pytest.raises(NotImplementedError, match="Logged"):
        op(x)


def test_tensor_subclass_without_dispatch_is_accepted():
    class Named(torch.Tensor):
        pass

    x = rows()
    module = mlp()
    torch.testing.assert_close(torch.Tensor(module(x.as_subclass(Named))), plain(module, x))


def test_torch_function_modes_work():
    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    module, x = mlp(), rows()
    with Counting():
        y = module(x)
    torch.testing.assert_close(y, plain(module, x))


def test_dispatch_mode_sees_call_or_it_is_rejected():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Logging(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    module, x = mlp(), rows()
    with Logging():
        ran = correct_or_rejected(lambda: module(x), lambda: plain(module, x))
    assert not ran or seen


@pytest.mark.parametrize("real_parameters", [True, False])
def test_fake_tensors_have_right_sizes_or_are_rejected(real_parameters):
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = ops.Sequential(ops.Linear(WIDTH, 6), ops.GELU())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(rows()) if real_parameters else torch.empty(3, WIDTH)
        if not real_parameters:
            module = ops.Sequential(ops.Linear(WIDTH, 6), ops.GELU())
        try:
            y = module(fake)
        except REJECTIONS as error:
            assert "weft" in str(error)
        else:
            assert y.shape == (3, 6) and isinstance(y, torch._subclasses.FakeTensor)


@pytest.fixture
def one_rank():
    """A process group with one rank."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_dtensor_is_correct_or_rejected(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    module, x = mlp(), rows()
    replicated = distribute_tensor(x, mesh, [Replicate()])

    def local(y):
        return y.to_local() if isinstance(y, DTensor) else y

    correct_or_rejected(lambda: local(module(replicated)), lambda: plain(module, x), naming="dense tensor")
    op = ops.BasicLinear(WIDTH, WIDTH)
    expected = plain(op, x)
    op.weight = torch.nn.Parameter(distribute_tensor(op.weight.detach(), mesh, [Replicate()]))
    correct_or_rejected(lambda: local(op(x)), lambda: expected, naming="dense tensor")


# ---- tracing and compiling ----


@modules
def test_trace_is_correct_or_rejected(make):
    module, x, other = make(), rows(), rows(5)

    def traced():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.trace(module, x, check_trace=False)(other)

    correct_or_rejected(traced, lambda: plain(module, other), naming="")


def test_scripting_is_rejected():
    with warnings.catch_warnings(), pytest.raises(Exception, match="."):
        warnings.simplefilter("ignore")
        torch.jit.script(mlp())


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Linear(WIDTH, WIDTH)
        self.block = ops.Sequential(
            ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
            ops.RMSNorm(WIDTH),
            ops.Linear(WIDTH, WIDTH),
            ops.AddExtraInput().set_extra_input_channel(0, "r"),
        )
        self.after = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.after(self.block(torch.relu(self.before(x))))) + 1


@contextlib.contextmanager
def fresh_compiler():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_model_with_sequential_trains_correctly(backend):
    model = Model()
    with fresh_compiler():
        compiled = torch.compile(model, backend=backend)
        for count in (3, 3, 5):
            x = rows(count, requires_grad=True)
            y, expected = compiled(x), model(x)
            torch.testing.assert_close(y, expected)
            inputs = [x, *model.parameters()]
            torch.testing.assert_close(
                torch.autograd.grad(y.square().mean(), inputs), torch.autograd.grad(expected.square().mean(), inputs)
            )


def test_compiled_sequential_sees_changes():
    seq, x = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0)), rows()
    with fresh_compiler():
        compiled = torch.compile(seq, backend="eager")
        torch.testing.assert_close(compiled(x), 6 * x)
        seq[0].scale = 5.0
        torch.testing.assert_close(compiled(x), 15 * x)
        seq.append(ops.ConstantScale(2.0))
        torch.testing.assert_close(compiled(x), 30 * x)


def test_fullgraph_compile_is_correct_or_rejected():
    seq, x = mlp(), rows()
    with fresh_compiler():
        try:
            y = torch.compile(seq, backend="eager", fullgraph=True)(x)
        except Exception as error:
            assert type(error).__module__.startswith("torch._dynamo") or "weft" in str(error)
        else:
            torch.testing.assert_close(y, plain(seq, x))
