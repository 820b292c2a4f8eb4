"""torch's own samples of inputs (OpInfo), drawn for 200 of its operations: a device gives the results and the gradients
of the CPU. 40 of them here, the others with ``-m slow``."""

import itertools
import random
import sys
import types
import unittest
import warnings

import pytest
import torch

try:
    import expecttest  # noqa: F401
except ImportError:  # torch's tests import it; these do not use it
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase
    sys.modules["expecttest"].ACCEPT = False

from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCUDA, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.utils._pytree import tree_flatten, tree_map

DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
SAMPLES = 12  # of each operation
# Their values are not determined: uninitialized memory, or the order of the draws.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
             "resize_as_", "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d"}  # fmt: skip


def dtype_of(op):
    return next((d for d in DTYPES if d in op.supported_dtypes("cuda") and d in op.supported_dtypes("cpu")), None)


def drawn():
    known = {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}
    fit = sorted(
        name for name, op in known.items() if dtype_of(op) and op.name not in UNDEFINED and "sparse" not in name
    )
    random.Random(31).shuffle(fit)
    return {name: known[name] for name in fit[:200]}


DRAWN = drawn()


def tensors_of(result):
    return [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]


def run(op, sample, place):
    """The outputs of a sample, and the gradients of its inputs."""

    def move(value):
        if isinstance(value, torch.Tensor):
            return value.detach().to(place).requires_grad_(value.requires_grad)
        return torch.device(place) if isinstance(value, torch.device) else value

    arguments = tree_map(move, (sample.input, sample.args, sample.kwargs))
    if "device" in arguments[2]:
        arguments[2]["device"] = place
    torch.manual_seed(7)
    outputs = tensors_of(op(arguments[0], *arguments[1], **arguments[2]))
    leaves = [t for t in tensors_of(arguments) if t.requires_grad]
    differentiable = [y for y in outputs if y.requires_grad]
    gradients = []
    if leaves and differentiable:
        total = sum(y.abs().sum() if y.is_complex() else y.double().sum() for y in differentiable)
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return [*outputs, *(g for g in gradients if g is not None)]


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, id=name, marks=[pytest.mark.slow] if i >= 40 else [])
        for i, (name, op) in enumerate(DRAWN.items())
    ],
)
def test_an_operation_equals_the_cpu(op):
    dtype = dtype_of(op)
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    samples = list(itertools.islice(op.sample_inputs("cuda:1", dtype, requires_grad=differentiable), SAMPLES))
    assert samples
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in samples:
            if sample.kwargs.get("dropout_p"):
                continue  # attention draws in another order
            try:
                expected = run(op, sample, "cpu")
            except RuntimeError as error:
                assert "not implemented on the CPU" in str(error)
                continue
            found = run(op, sample, "cuda:1")
            assert len(expected) == len(found)
            for a, b in zip(expected, found, strict=True):
                assert str(b.device) == "cuda:1" or a.device == b.device
                torch.testing.assert_close(b.cpu(), a, rtol=2e-6, atol=2e-6, equal_nan=True)


class TestDeviceType(TestCase):
    """torch's own machinery takes the device for a GPU."""

    @onlyCUDA
    @ops([op for op in op_db if op.name in ("add", "softmax", "nn.functional.linear")], allowed_dtypes=(torch.float32,))
    def test_samples(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            result = op(sample.input, *sample.args, **sample.kwargs)
            self.assertTrue(result.is_cuda)


instantiate_device_type_tests(TestDeviceType, globals(), only_for="cuda")
