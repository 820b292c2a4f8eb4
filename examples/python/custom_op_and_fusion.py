"""An operation and a fusion written in Python: softsign, y = x / (1 + |x|), fused with the ConstantScale after it."""

import torch

from torchweft import ops


class Softsign(ops.BasicOperation):
    def op_forward(self, ctx, input_, **unused):
        divisor = 1 + input_.abs()
        if ctx.requires_grad:
            ctx.save_for_backward(divisor)
        return input_ / divisor

    def op_backward(self, ctx, grad_output):
        (divisor,) = ctx.saved_tensors
        return grad_output / divisor.square(), ()  # gradient of the input; there are no parameters


class SoftsignScale(ops.FusedOperation):
    """The forward of both operations. It saves what they would save, so their unfused backward can run."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        divisor = 1 + input_.abs()
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(divisor)
        return self.basic_ops[1].scale * input_ / divisor, [(), ()]  # the output; no extra outputs


def fuse(pipeline, *, recipe=None):
    """Gets the operations of a pipeline in order and returns them with pairs replaced."""
    out = []
    for op in pipeline:
        if out and isinstance(out[-1], Softsign) and isinstance(op, ops.ConstantScale):
            out[-1] = SoftsignScale([out[-1], op])
        else:
            out.append(op)
    return out


module = ops.Sequential(ops.Linear(8, 8), Softsign(), ops.ConstantScale(0.5)).double()
x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
expected = module(x)
assert torch.autograd.gradcheck(module, (x,))

with ops.register_forward_fusion(fuse):
    print(module.explain(x))
    assert "SoftsignScale" in str(module.explain(x))
    torch.testing.assert_close(module(x), expected)
    assert torch.autograd.gradcheck(module, (x,))
assert "SoftsignScale" not in str(module.explain(x))  # the with block removed the fusion
