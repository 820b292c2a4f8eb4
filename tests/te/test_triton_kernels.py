"""Triton kernels that run as operations, against Triton's interpreter."""

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.triton import cross_entropy, permutation
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

from torchweft.te import _triton_kernels

KERNELS = [
    kernel
    for module in (permutation, cross_entropy)
    for name, kernel in vars(module).items()
    if name.endswith("_kernel")
]


def function_of(kernel):
    """The Python function below the decorators of Triton."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: function_of(kernel).__name__)
def test_kernels_of_this_release_are_known(kernel):
    assert _triton_kernels.known(function_of(kernel)) is not None


def test_a_changed_kernel_is_not_known():
    def _permute_kernel(input_ptr, output_ptr):
        pass

    assert _triton_kernels.known(_permute_kernel) is None


TOKENS, EXPERTS, WIDTH = 12, 5, 24


@pytest.fixture
def routes():
    """Which experts a token goes to, and with which probability."""
    torch.manual_seed(0)
    mask = torch.rand(TOKENS, EXPERTS) < 0.4
    mask[3], mask[4] = False, True
    probs = torch.rand(TOKENS, EXPERTS) * mask
    return mask.int().cuda(), probs.cuda()


def leaf(t):
    return t.detach().clone().requires_grad_()


def permute_and_merge(routes, dtype):
    mask, probs = routes
    x, weights = leaf(torch.randn(TOKENS, WIDTH, dtype=dtype).cuda()), leaf(probs)
    y, rows = te.moe_permute(x, mask, num_out_tokens=int(mask.sum()), map_type="mask")
    z = te.moe_unpermute(y * 2, rows, merging_probs=weights, restore_shape=x.shape, map_type="mask")
    z.backward(torch.randn_like(z))
    return y, rows, z, x.grad, weights.grad


def permute_with_probs(routes, dtype):
    mask, probs = routes
    x, weights = leaf(torch.randn(TOKENS, WIDTH, dtype=dtype).cuda()), leaf(probs)
    y, permuted, rows = te.moe_permute_with_probs(x, weights, mask, num_out_tokens=int(mask.sum()))
    (y * permuted[:, None]).sum().backward()
    return y, permuted, rows, x.grad, weights.grad


def permute_and_pad(routes, dtype):
    mask, probs = routes
    x, weights = leaf(torch.randn(TOKENS, WIDTH, dtype=dtype).cuda()), leaf(probs)
    y, permuted, rows, offsets, _ = te.moe_permute_and_pad_with_probs(x, weights, mask, mask.sum(0), 16)
    z = te.moe_unpermute(y * permuted[:, None].to(y), rows, restore_shape=x.shape, map_type="mask", pad_offsets=offsets)
    z.backward(torch.randn_like(z))
    return y, permuted, rows, z, x.grad, weights.grad


def sort_chunks(routes, dtype):
    x = leaf(torch.randn(TOKENS, WIDTH, dtype=dtype).cuda())
    sizes, order = torch.tensor([3, 0, 5, 4]).cuda(), torch.tensor([2, 3, 0, 1]).cuda()
    y, probs = te.moe_sort_chunks_by_index_with_probs(x, torch.rand(TOKENS).cuda(), sizes, order)
    y.backward(torch.randn_like(y))
    return y, probs, x.grad


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("call", (permute_and_merge, permute_with_probs, permute_and_pad, sort_chunks))
def test_permutation_is_that_of_the_kernels(call, dtype, routes, monkeypatch):
    torch.manual_seed(1)
    found = call(routes, dtype)
    monkeypatch.setattr(_triton_kernels, "known", lambda kernel: None)
    torch.manual_seed(1)
    for ours, theirs in zip(found, call(routes, dtype), strict=True):
        if ours.dim() == 2 and ours.shape[1] == 2 * EXPERTS + 1:  # a map, whose other elements are not written
            used = torch.arange(EXPERTS) < ours[:, -1:].cpu()
            used = torch.cat([used, used, torch.ones(TOKENS, 1, dtype=torch.bool)], 1)
            assert torch.equal(ours.cpu()[used], theirs.cpu()[used])
        elif ours.shape == (TOKENS, EXPERTS):  # sums of a row
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("smoothing", (0.0, 0.1))
@pytest.mark.parametrize("mean", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_cross_entropy(smoothing, mean, dtype, monkeypatch):
    monkeypatch.setattr(_triton_kernels, "_AT_ONCE", 100)  # several chunks of rows
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 33, dtype=dtype).transpose(0, 1)
    targets = torch.randint(0, 33, (4, 3))
    targets[1, 2] = -100
    scale = torch.randn(4, 3)

    def run(x, t, loss_of, scale):
        x = leaf(x)
        loss = loss_of(x, t)
        (loss if mean else loss * scale).sum().backward()
        return loss.detach().cpu().double(), x.grad.cpu().double()

    def plain(x, t):
        reduction = "mean" if mean else "none"
        loss = torch.nn.functional.cross_entropy(
            x.reshape(-1, 33), t.reshape(-1), label_smoothing=smoothing, reduction=reduction
        )
        return loss if mean else loss.view(t.shape)

    def ours(x, t):
        return parallel_cross_entropy(x, t, smoothing, mean, None)

    exact = run(logits.double(), targets, plain, scale.double())
    found = run(logits.cuda(), targets.cuda(), ours, scale.cuda())
    monkeypatch.setattr(_triton_kernels, "known", lambda kernel: None)
    interpreted = run(logits.cuda(), targets.cuda(), ours, scale.cuda())
    near = 2e-6 if dtype == torch.float32 else 1e-2
    for a, b, c in zip(found, interpreted, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-6)
        torch.testing.assert_close(a.reshape(c.shape), c, rtol=near, atol=near)
