"""torch.library.opcheck on the dispatcher ops, with the calls of every operation and every fusion."""

from __future__ import annotations

import re

import pytest
import test_every_op
import test_fusions
import torch
from torch.utils._python_dispatch import TorchDispatchMode

FORWARD, BACKWARD = torch.ops.weft.pipeline_forward.default, torch.ops.weft.pipeline_backward.default
RANDOM_FORWARD = torch.ops.weft.pipeline_forward_random.default


class RecordedCalls(TorchDispatchMode):
    """Records the arguments of the dispatcher ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (FORWARD, RANDOM_FORWARD, BACKWARD):
            assert not kwargs
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def renewed(value, needs_grad: list[bool]):
    """Copies the tensors of an argument, as leaves that require grad where the call's text says so."""
    if isinstance(value, torch.Tensor):
        needed = needs_grad.pop(0) if needs_grad else False
        return value.detach().clone().requires_grad_(needed and value.is_floating_point())
    return [renewed(v, needs_grad) for v in value] if isinstance(value, list | tuple) else value


def needs_grad(text: str) -> list[bool]:
    """Whether the call's tensors require grad, in their order."""
    return ["g" in word.split(":")[2] for word in re.search(r'tensors="([^"]*)"', text)[1].split()]


def check_calls(module: torch.nn.Module, inputs: list[torch.Tensor]) -> int:
    with RecordedCalls() as recorded:
        torch.manual_seed(3)
        outputs = module(*inputs)
        outputs = [y for y in (outputs if isinstance(outputs, tuple) else [outputs]) if y.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    random = any(0 < getattr(m, "p", 0) < 1 for m in module.modules())
    for func, args in recorded.calls:
        text = next(a for a in args if isinstance(a, str))
        flags = [] if func is BACKWARD else needs_grad(text)
        if func is RANDOM_FORWARD:
            flags = flags[:1] + flags  # x is there twice
        tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
        if func is not BACKWARD and not random:  # compares a compiled call with an eager one
            tests.append("test_aot_dispatch_dynamic")
        arguments = tuple(renewed(a, flags) for a in args)
        assert not flags, "the text has more tensors than the call"
        torch.library.opcheck(func, arguments, test_utils=tests)
    return len(recorded.calls)


@test_every_op.every_case
def test_opcheck_of_every_operation(case):
    assert check_calls(case.build(torch.float32), case.inputs((2, 4), torch.float32)) == 2


@test_fusions.one_of_each
def test_opcheck_of_every_fusion(case):
    torch.manual_seed(1)
    sequential = case.build(torch.float32)
    inputs = test_fusions.leaves(test_fusions.make_inputs(sequential, case, (4, 8)), torch.float32)
    with test_fusions.only(case.rule):
        assert case.rule in str(sequential.explain(*inputs))
        assert check_calls(sequential, inputs) == 2


def test_a_wrong_size_is_found():
    """A fake implementation that disagrees with the real one fails."""
    call = 'GELU() @call(autocast=none, eval=0, tensors="cpu:float32:gc")'

    class OtherSize(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is FORWARD and not isinstance(out[0], torch._subclasses.FakeTensor):
                return [torch.cat([t, t]) if t.dim() else t for t in out]
            return out

    with OtherSize(), pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError):
        torch.library.opcheck(FORWARD, ([torch.randn(3, 4, requires_grad=True)], call), test_utils="test_faketensor")
