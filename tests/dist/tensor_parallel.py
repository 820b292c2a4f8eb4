"""One rank of test_tensor_parallel.py: runs the given situations and writes their errors.

    RANK=0 WORLD_SIZE=2 python tensor_parallel.py FOLDER SITUATION…

FOLDER/rank<r>.json holds for each situation "" or the traceback. Every rank computes the reference itself: the same
layers without parallelism, in float64.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchweft
from torchweft import ops
from torchweft._delayed_scaling import state_of
from torchweft.quantization import gemm

IN, OUT, ROWS = 24, 12, 12
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def close(got: torch.Tensor | None, expected: torch.Tensor, what: str, **tolerance: float | bool) -> None:
    assert got is not None, f"{what} is missing"
    torch.testing.assert_close(got, expected, **(tolerance or TOLERANCE), msg=lambda text: f"{what}: {text}")


def draw(*sizes: int) -> torch.Tensor:
    """Random values, the same on every rank."""
    return torch.randn(*sizes, dtype=torch.float64)


# ---- one linear ---------------------------------------------------------------------------------------------------


def check_linear(group: dist.ProcessGroup, mode: str, sequence: bool, bias: str, leading: tuple[int, ...]) -> None:
    ranks, rank = group.size(), group.rank()
    x, w = draw(*leading, IN).requires_grad_(), draw(OUT, IN).requires_grad_()
    biases = [draw(OUT) for _ in range(ranks)]
    b = {"none": None, "own": sum(biases) if mode == "row" else biases[0], "replicated": biases[0]}[bias]
    if b is not None:
        b = b.detach().requires_grad_()
    y = F.linear(x, w, b)
    dy = torch.randn_like(y)
    y.backward(dy)

    def shard(t, dim):
        return t.chunk(ranks, dim)[rank] if t.shape[dim] else t

    def rows(t):
        return shard(t, 0) if sequence else t

    column = mode == "column"
    cut_x = (lambda t: rows(t)) if column else (lambda t: shard(t, -1))
    cut_y = (lambda t: shard(t, -1)) if column else (lambda t: rows(t))
    linear = ops.Linear(
        IN,
        OUT,
        bias=bias != "none",
        dtype=torch.float64,
        tensor_parallel_mode=mode,
        tensor_parallel_group=group,
        sequence_parallel=sequence,
        replicated_bias=bias == "replicated",
    )
    with torch.no_grad():
        linear.weight.copy_(shard(w, 0 if column else 1))
        if bias != "none":
            linear.bias.copy_(shard(b, 0) if column else biases[rank] if bias == "own" else b)
    local = cut_x(x).detach().clone().requires_grad_()
    out = linear(local)
    close(out, cut_y(y), "y")
    out.backward(cut_y(dy).clone())
    close(local.grad, cut_x(x.grad), "dx")
    close(linear.weight.grad, shard(w.grad, 0 if column else 1), "dw")
    if bias != "none":
        close(linear.bias.grad, shard(b.grad, 0) if column else b.grad, "db")


def check_every_mode(group: dist.ProcessGroup, shapes=((ROWS,), (ROWS, 2), (0,))) -> None:
    torch.manual_seed(5)
    for case in itertools.product(("column", "row"), (False, True), ("none", "own", "replicated"), shapes):
        try:
            check_linear(group, *case)
        except Exception as error:
            raise AssertionError(f"{case} on {group.size()} ranks") from error


def every_mode() -> None:
    check_every_mode(dist.group.WORLD)


def non_adjacent_ranks() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for members in ([0, 2], [0, world - 1], [world - 1, 0, 1]):
        group = dist.new_group(sorted(set(members)))
        if rank in members:
            check_every_mode(group, shapes=((ROWS,),))


def single_rank_group() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    linear = ops.Linear(8, 4, tensor_parallel_mode="row", tensor_parallel_group=group, sequence_parallel=True)
    assert linear.tensor_parallel_mode is None and not linear.sequence_parallel and len(linear.basic_ops) == 2
    x = torch.rand(3, 8)
    assert ops.AllGather(group)(x) is x or torch.equal(ops.AllGather(group)(x), x)
    assert linear(x).shape == (3, 4)


def collectives() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    xs, dys = draw(world, 2 * world, 3), draw(world, 2 * world, 3)
    whole_dys = draw(world, 2 * world * world, 3)

    def run(op, dy):
        x = xs[rank].clone().requires_grad_()
        before = x.detach().clone()
        y = op(x)
        y.backward(dy)
        assert torch.equal(x.detach(), before), "the input was changed"
        return y.detach(), x.grad

    y, dx = run(ops.AllGather(), whole_dys[rank])
    close(y, xs.flatten(0, 1), "gathered")
    close(dx, whole_dys.sum(0).chunk(world)[rank], "its gradient")
    y, dx = run(ops.ReduceScatter(), dys[rank][:2])
    close(y, xs.sum(0).chunk(world)[rank], "scattered")
    close(dx, dys[:, :2].flatten(0, 1), "its gradient")
    y, dx = run(ops.AllReduce(), dys[rank])
    close(y, xs.sum(0), "reduced")
    close(dx, dys.sum(0), "its gradient")
    y, dx = run(ops.AllReduce(None, reduce_in_backward=False), dys[rank])
    close(y, xs.sum(0), "reduced")
    close(dx, dys[rank], "its gradient, not reduced")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        low = xs.to(dtype)
        total = low[0].float()
        for part in low[1:]:
            total = total + part.float()
        assert torch.equal(ops.AllReduce()(low[rank]), total.to(dtype)), "not the sum in the order of ranks"


# ---- a quantized linear ---------------------------------------------------------------------------------------------

QUANTIZED = {
    "current": torchweft.recipe.Float8CurrentScaling(),
    "block": torchweft.recipe.Float8BlockScaling(),
    "mxfp8": torchweft.recipe.MXFP8BlockScaling(),
    "nvfp4": torchweft.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "delayed": torchweft.recipe.DelayedScaling(),  # in its first step, with scales of 1
    "square": torchweft.recipe.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),  # over a rank's rows
    "current, dequantized": torchweft.recipe.Float8CurrentScaling(backward_override="dequantized"),
    "mxfp8, dequantized": torchweft.recipe.MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4, high_precision": torchweft.recipe.NVFP4BlockScaling(backward_override="high_precision"),
}


def quantized_gemms(recipe: torchweft.recipe.Recipe, x, w, dy) -> list[torch.Tensor]:
    """y, dx and dW of a linear, in float32."""
    quantizers, scale = recipe.quantizers(), torch.ones(1) if recipe.delayed() else None
    q_x = quantizers.input.quantize(x, columnwise=True, scale=scale)
    q_w = quantizers.weight.quantize(w, columnwise=True, scale=scale)
    y = gemm(q_x, q_w, dtype=torch.float32)
    if quantizers.backward_override is not None:
        dequantized = quantizers.backward_override == "dequantized"
        x, w = (q_x.dequantize(), q_w.dequantize()) if dequantized else (x, w)
        return [y, dy.float() @ w.float(), dy.float().t() @ x.float()]
    q_dy = quantizers.grad_output.quantize(dy, columnwise=True, scale=scale)
    return [
        y,
        gemm(q_dy, q_w, b_columnwise=True, dtype=torch.float32),
        gemm(q_dy, q_x, a_columnwise=True, b_columnwise=True, dtype=torch.float32),
    ]


def check_quantized_linear(group: dist.ProcessGroup, name: str, mode: str, sequence: bool) -> None:
    """Each rank computes what every rank multiplies, from whole tensors with maxima that differ from rank to rank."""
    ranks, rank = group.size(), group.rank()
    recipe, size, column = QUANTIZED[name], 64 * ranks, mode == "column"
    x = (draw(size, size) * torch.logspace(0, 2, size, dtype=torch.float64)[:, None]).bfloat16()
    dy = (draw(size, size) * torch.logspace(1, 0, size, dtype=torch.float64)).bfloat16()
    w = (draw(size, size) * torch.logspace(0, 1, size, dtype=torch.float64)[:, None]).bfloat16()
    shards_x, shards_dy = ([x] * ranks, dy.chunk(ranks, 1)) if column else (x.chunk(ranks, 1), [dy] * ranks)
    shards_w = w.chunk(ranks, 0 if column else 1)
    parts = [quantized_gemms(recipe, *operands) for operands in zip(shards_x, shards_w, shards_dy, strict=True)]
    y, dx, dw = parts[rank]
    if column:
        dx = sum(part[1] for part in parts)
    else:
        y = sum(part[0] for part in parts)
    parallel = {"tensor_parallel_mode": mode, "tensor_parallel_group": group, "sequence_parallel": sequence}
    linear = ops.Linear(size, size, bias=False, dtype=torch.bfloat16, **parallel)
    with torch.no_grad():
        linear.weight.copy_(shards_w[rank])
    rows = (lambda t: t.chunk(ranks)[rank]) if sequence else (lambda t: t)
    cut_x, cut_y = (rows, lambda t: t) if column else (lambda t: t, rows)
    local_x = cut_x(shards_x[rank]).contiguous().requires_grad_()
    with torchweft.autocast(recipe=recipe):
        got = linear(local_x)
    got.backward(cut_y(shards_dy[rank]).contiguous())
    plain = recipe.quantizers().backward_override is not None
    for what, value, expected, reduced in (
        ("y", got, cut_y(y), not column),
        ("dx", local_x.grad, cut_x(dx), column or plain),
        ("dw", linear.weight.grad, dw, plain),
    ):  # a sum over ranks is rounded once more, before it; bfloat16 GEMMs may add in another order
        tolerance = {"rtol": 2**-7, "atol": 2**-7 * expected.abs().max().item()} if reduced else {"rtol": 0, "atol": 0}
        close(value.float(), expected if reduced else expected.bfloat16().float(), what, **tolerance)


def quantized_linears() -> None:
    for case in itertools.product(QUANTIZED, ("column", "row"), (False, True)):
        torch.manual_seed(7)
        try:
            check_quantized_linear(dist.group.WORLD, *case)
        except Exception as error:
            raise AssertionError(f"{case}") from error


def delayed_linears() -> None:
    """Three steps of delayed scaling with sequence parallelism, whose rows have maxima that differ from rank to rank,
    without a reduction of maxima: each rank's y, dW and state are those of one process with its shard of the weight."""
    group = dist.group.WORLD
    ranks, rank = group.size(), group.rank()
    made = torchweft.recipe.DelayedScaling(amax_history_len=2, reduce_amax=False)
    for mode in ("column", "row"):
        torch.manual_seed(11)
        column, size = mode == "column", 32 * ranks
        parallel = {"tensor_parallel_mode": mode, "tensor_parallel_group": group, "sequence_parallel": True}
        linear = ops.Linear(size, size, bias=False, dtype=torch.bfloat16, **parallel)
        shape = (size, 32) if column else (32, size)  # features of one rank's shard
        plain = ops.Linear(*shape, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            plain.weight.copy_(linear.weight)
        for step in range(3):
            spread = torch.logspace(0, 2, size, dtype=torch.float64)[:, None] * 4.0**step
            x, dy = ((draw(size, width) * spread).bfloat16() for width in shape)
            rows = (lambda t: t.chunk(ranks)[rank].contiguous()) if column else (lambda t: t)
            local_x = rows(x).requires_grad_()
            with torchweft.autocast(recipe=made):
                y = linear(local_x)
            y.backward(dy if column else dy.chunk(ranks)[rank].contiguous())
            whole_x = x.detach().clone().requires_grad_()
            with torchweft.autocast(recipe=made):
                expected = plain(whole_x)
            expected.backward(dy)
            what = f"{mode}, step {step}"
            if column:  # y of a row linear is a sum over ranks, as dx of a column linear
                close(y.float(), expected.float(), f"y, {what}", rtol=0, atol=0)
            else:
                close(local_x.grad.float(), whole_x.grad.float(), f"dx, {what}", rtol=0, atol=0)
            close(linear.weight.grad.float(), plain.weight.grad.float(), f"dw, {what}", rtol=0, atol=0)
            linear.weight.grad = plain.weight.grad = None
            for part, other in zip(state_of(linear._stages()[0], 2), state_of(plain._stages()[0], 2), strict=True):
                close(part, other, f"state, {what}", rtol=0, atol=0)


def delayed_scaling() -> None:
    """Ranks with different rows share the maxima of each step, so their scales and histories are equal."""
    group = dist.group.WORLD
    torch.manual_seed(3)
    linear = ops.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    for step in range(3):
        x = torch.full([16, 64], 2.0 ** (step + dist.get_rank()), dtype=torch.bfloat16, requires_grad=True)
        with torchweft.autocast(recipe=torchweft.recipe.DelayedScaling(amax_history_len=4)):
            y = linear(x)
        y.backward(torch.full_like(y, 0.5 + dist.get_rank()))
    for part in state_of(linear._stages()[0], 4):
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part)
        for other in parts:
            close(other, part, "state of delayed scaling", rtol=0, atol=0)
    forward, backward = state_of(linear._stages()[0], 4)
    top = group.size() - 1
    close(forward[1:, 0], torch.tensor([0.0, 2.0**top, 2.0 ** (1 + top), 2.0 ** (2 + top)]), "history")
    close(backward[0], torch.tensor([57344 / (0.5 + top)]), "scale of the gradient", rtol=1e-6, atol=0)


# ---- a block ------------------------------------------------------------------------------------------------------


def block(group=None, sequence: bool = False, dtype=torch.float64, width: int = 24) -> ops.Sequential:
    """Norm, linear, activation, linear and residual, always from the same seed."""
    torch.manual_seed(11)

    def parallel(mode):
        if group is None:
            return {}
        return {"tensor_parallel_mode": mode, "tensor_parallel_group": group, "sequence_parallel": sequence}

    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(width, dtype=dtype),
        ops.Linear(width, 4 * width, dtype=dtype, **parallel("column")),
        ops.GELU(),
        ops.Linear(4 * width, width, dtype=dtype, replicated_bias=True, **parallel("row")),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def whole_block() -> tuple[ops.Sequential, dict]:
    """The block without parallelism, with nonzero biases, and its state dict."""
    model = block()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.uniform_(-1, 1)
    return model, model.state_dict()


def sum_norm_gradients(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Sums norm gradients over the ranks: a norm before a sequence-parallel linear sees only this rank's rows."""
    for module in model.modules():
        if isinstance(module, ops.RMSNorm):
            dist.all_reduce(module.weight.grad, group=group)


def whole_gradients(model: torch.nn.Module, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Full gradients of a parallel block: copies them into the Parameters and gathers the state dict."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.grad)
    return torchweft.checkpoint.gather_state_dict(model)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.grad)
    return model.state_dict()


def check_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        close(got[name], value, f"gradient of {name}")


def fused_block() -> None:
    group = dist.group.WORLD
    ranks, rank = group.size(), group.rank()
    for sequence in (False, True):
        truth, state = whole_block()
        model = block(group, sequence)
        model.load_state_dict(torchweft.checkpoint.shard_state_dict(state, model))
        x, dy = draw(ROWS, 3, 24), draw(ROWS, 3, 24)
        mine = (lambda t: t.chunk(ranks)[rank]) if sequence else (lambda t: t)
        whole_x, local_x = x.clone().requires_grad_(), mine(x).clone().requires_grad_()
        expected, got = truth(whole_x), model(local_x)
        expected.backward(dy)
        got.backward(mine(dy).clone())
        close(got, mine(expected), "y")
        close(local_x.grad, mine(whole_x.grad), "dx")
        if sequence:
            sum_norm_gradients(model, group)
        check_gradients(whole_gradients(model, group), gradients(truth))


def checkpointed_block() -> None:
    """Activation checkpointing repeats the collectives of forward in backward."""
    group = dist.group.WORLD
    x = draw(ROWS, 24).chunk(group.size())[group.rank()].clone()
    found = []
    for again in (False, True):
        model, local = block(group, True), x.clone().requires_grad_()
        y = checkpoint(model, local, use_reentrant=False) if again else model(local)
        y.square().sum().backward()
        found.append((y.detach(), local.grad, model[2].weight.grad, model[4].bias.grad))
    for plain, recomputed in zip(*found, strict=True):
        close(recomputed, plain, "recomputed")


# ---- the loss -----------------------------------------------------------------------------------------------------


def loss_results(op: ops.CrossEntropy, logits: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    loss = op(leaf, targets)
    dy = torch.rand(loss.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [loss.detach(), *torch.autograd.grad(loss, leaf, dy.to(loss.dtype))]


def sharded_loss() -> None:
    """The loss equals that of one process, bit for bit on all ranks; each rank gets its shard of the gradient."""
    group = dist.group.WORLD
    ranks, rank = group.size(), group.rank()
    shapes, losses = ((7,), (2, 3), (), (0,)), ({}, {"label_smoothing": 0.2, "z_loss": 0.01}, {"ignore_index": 4})
    for lead, options, reduction, share in itertools.product(shapes, losses, ("mean", "sum", "none"), (1, 5, 2100)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            x, targets = (draw(*lead, ranks * share) * 9).to(dtype), torch.randint(ranks * share, lead)
            if targets.dim() and len(targets) > 1:
                targets[1], x[0, ..., -share:] = options.get("ignore_index", -100), -torch.inf
            plain_op = ops.CrossEntropy(reduction=reduction, **options)
            op = ops.CrossEntropy(reduction=reduction, **options, tensor_parallel=True, tensor_parallel_group=group)
            assert op.tensor_parallel and op.tensor_parallel_group is group
            y, dx = loss_results(plain_op, x, targets)
            got_y, got_dx = loss_results(op, x.chunk(ranks, -1)[rank], targets)
            tolerance = TOLERANCE if dtype == torch.float64 else {"rtol": 2e-6, "atol": 1e-6}
            close(got_y, y, "loss", **tolerance, equal_nan=True)
            rounded = {"rtol": 8e-3, "atol": 1e-6} if dtype == torch.bfloat16 else tolerance
            close(got_dx, dx.chunk(ranks, -1)[rank], "dlogits", **rounded, equal_nan=True)
            everywhere = [torch.empty_like(got_y) for _ in range(ranks)]
            dist.all_gather(everywhere, got_y)
            assert all(torch.equal(t.nan_to_num(7), got_y.nan_to_num(7)) for t in everywhere)


def check_head_and_loss(rows: int, share: int, sequence_parallel: bool, fused: bool) -> None:
    """Compares a column-parallel head and the sharded loss, plain and compiled, with one process."""
    group = dist.group.WORLD
    ranks, rank = group.size(), group.rank()
    x, w = draw(rows * ranks, 24).requires_grad_(), draw(share * ranks, 24).requires_grad_()
    targets = torch.randint(share * ranks, (rows * ranks,))
    targets[::7] = -100
    F.cross_entropy(F.linear(x, w), targets, label_smoothing=0.1).backward()
    column = {"tensor_parallel_mode": "column", "tensor_parallel_group": group, "sequence_parallel": sequence_parallel}
    head = ops.BasicLinear(24, share * ranks, dtype=torch.float64, **column)
    with torch.no_grad():
        head.weight.copy_(w.chunk(ranks)[rank])
    model = ops.Sequential(head, ops.CrossEntropy(label_smoothing=0.1, tensor_parallel=True))
    shard = (lambda t: t.chunk(ranks)[rank]) if sequence_parallel else (lambda t: t)
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        leaf = shard(x).detach().clone().requires_grad_()
        head.weight.grad = None
        run(leaf, targets).backward()
        close(leaf.grad, shard(x.grad), "dx")
        close(head.weight.grad, w.grad.chunk(ranks)[rank], "dW")
    forward = model.explain(leaf, targets).data[0]["forward"]
    assert any(step["name"] == "linear_cross_entropy" for step in forward) == fused, forward
    leaf = shard(x).detach().clone().requires_grad_()
    close(*torch.autograd.grad(model(leaf, targets), leaf), shard(x.grad), "dx alone")
    torch._dynamo.reset()


def sharded_head_and_loss() -> None:
    check_head_and_loss(6, 5, sequence_parallel=False, fused=False)


def sharded_blocks_of_logits() -> None:
    """The logits of 4,100 classes per rank are computed by blocks."""
    for sequence_parallel in (False, True):
        check_head_and_loss(150, 4100, sequence_parallel, fused=True)


def sharded_loss_rejects_bad_targets() -> None:
    op = ops.CrossEntropy(tensor_parallel=True)
    classes = 5 * dist.get_world_size()
    logits = draw(3, 5)
    op(logits, torch.tensor([0, classes - 1, -100]))  # of any rank's shard
    for bad in (classes, -1):
        try:
            op(logits, torch.tensor([0, bad, 1]))
        except IndexError as error:
            assert f"target {bad} of row 1 is out of range; expected 0 to {classes - 1}" in str(error), error
        else:
            raise AssertionError("nothing raised")
    try:
        op(draw(3, 4 if dist.get_rank() == 0 else 5), torch.zeros(3, dtype=torch.long))
    except ValueError as error:
        assert "the ranks have logits of 4 to 5 classes, expected equal shards" in str(error), error
    else:
        raise AssertionError("nothing raised")
    targets = torch.tensor([0, 1, 2])
    targets[2] += dist.get_rank()
    for loss in (op, ops.Sequential(ops.Linear(5, 5, dtype=torch.float64), op)):
        for other in (targets, torch.where(targets > 2, -100, targets)):
            try:
                loss(logits, other)
            except ValueError as error:
                assert "the ranks have different targets in 1 of 3 rows, first in row 2;" in str(error), error
            else:
                raise AssertionError("nothing raised")
    assert op(logits, torch.tensor([0, 1, 2])).isfinite()  # the group stays usable


def compiled_block() -> None:
    group = dist.group.WORLD
    for sequence in (False, True):
        model = block(group, sequence)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        for rows in (group.size() * 2, group.size() * 3):
            x, y = draw(rows, 24).requires_grad_(), None
            for run in (model, compiled):
                x.grad = None
                out = run(x)
                out.square().sum().backward()
                if y is None:
                    y, grad = out.detach(), x.grad.clone()
            close(out, y, "y")
            close(x.grad, grad, "dx")
        torch._dynamo.reset()


# ---- with data parallelism ----------------------------------------------------------------------------------------


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def check_data_parallel(wrap, groups) -> None:
    """Compares a 2 x 2 mesh of data and tensor parallelism with one process that has all rows."""
    mesh = mesh_of_four()
    tp, data_rank = mesh["tp"].get_group(), mesh["dp"].get_local_rank()
    for sequence in (False, True):
        truth, state = whole_block()
        x, dy = draw(2 * ROWS, 24), draw(2 * ROWS, 24)
        truth(x).backward(dy / 2)  # data parallelism averages over its ranks
        model = block(groups(mesh), sequence)
        model.load_state_dict(torchweft.checkpoint.shard_state_dict(state, model))
        wrapped = wrap(model, mesh)

        def mine(t, sequence=sequence):
            t = t.chunk(2)[data_rank]
            return t.chunk(2)[tp.rank()].clone() if sequence else t

        wrapped(mine(x)).backward(mine(dy))
        inner = model
        grads = {}
        for name, param in inner.named_parameters():
            grad = param.grad
            grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        if sequence:
            dist.all_reduce(grads["1.weight"], group=tp)
        expected = torchweft.checkpoint.shard_state_dict(gradients(truth), block(tp, sequence))
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            close(grad, expected[name], f"gradient of {name}, sequence_parallel={sequence}")


def mesh_groups() -> None:
    mesh = mesh_of_four()
    check_every_mode(mesh["tp"].get_group(), shapes=((ROWS,),))
    linear = ops.Linear(8, 4, tensor_parallel_mode="column", tensor_parallel_group=mesh["tp"])
    assert linear.tensor_parallel_size == 2 and linear.tensor_parallel_group == mesh["tp"].get_group()
    try:
        ops.Linear(8, 4, tensor_parallel_mode="column", tensor_parallel_group=mesh)
    except ValueError as error:
        assert "2 dimensions" in str(error)
    else:
        raise AssertionError("a mesh of two dimensions was accepted")


def ddp() -> None:
    check_data_parallel(
        lambda model, mesh: DistributedDataParallel(model, process_group=mesh["dp"].get_group()),
        lambda mesh: mesh["tp"],
    )


def fsdp() -> None:
    check_data_parallel(lambda model, mesh: fully_shard(model, mesh=mesh["dp"]), lambda mesh: mesh["tp"].get_group())


# ---- mismatches and failures --------------------------------------------------------------------------------------


def raised(act) -> str:
    try:
        act()
    except dist.DistError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def mismatches() -> None:
    """Each mismatch raises the same error on every rank. Plain Gloo would abort the process."""
    world = dist.get_world_size()
    last = dist.get_rank() == world - 1
    x = torch.rand(2 * world, 4)

    def other(mine, of_last):
        return of_last if last else mine

    def layer(group):
        parallel = {"tensor_parallel_mode": "column", "tensor_parallel_group": group, "sequence_parallel": True}
        return ops.Linear(4, 2 * world, overlap=False, **parallel)

    def both(first, second):
        first(x)
        second(x)

    cases = {
        "columns": lambda g: ops.AllGather(g)(other(x, x[:, :3])),
        "rows": lambda g: ops.ReduceScatter(g)(other(x, x[:world])),
        "no rows": lambda g: ops.AllReduce(g)(other(x, x[:0])),
        "dtype": lambda g: ops.AllReduce(g)(other(x, x.bfloat16())),
        "dtype of the same size": lambda g: ops.AllGather(g)(other(x.half(), x.bfloat16())),
        "operation": lambda g: other(ops.AllGather(g), ops.ReduceScatter(g))(x),
        "order": lambda g: both(*other((ops.AllGather(g), ops.AllReduce(g)), (ops.AllReduce(g), ops.AllGather(g)))),
        "layer": lambda g: layer(g)(other(x, x[:world])),
    }
    for name, act in cases.items():
        group = dist.new_group()
        text = raised(lambda act=act, group=group: act(group))
        text = text[: text.rindex(" (")]  # without the operation that this rank ran
        texts = [None] * world
        dist.all_gather_object(texts, text)
        assert texts == [text] * world, f"{name}: {texts}"
        assert "rank 0: " in text and f"rank {world - 1}: " in text, f"{name}: {text}"
        assert "cannot be used any more" in raised(lambda group=group: ops.AllReduce(group)(x)), name


def missing_rank() -> None:
    """The other ranks raise at the timeout."""
    os.environ["WEFT_TIMEOUT"] = "1"
    group = dist.new_group()
    if dist.get_rank() != 0:
        begin = time.monotonic()
        text = raised(lambda: ops.AllReduce(group)(torch.rand(4, 4)))
        assert time.monotonic() - begin < 2, "too late"
        assert "all_reduce" in text, text
    del os.environ["WEFT_TIMEOUT"]
    time.sleep(2.5 if dist.get_rank() == 0 else 0)


# ---- weights ------------------------------------------------------------------------------------------------------


def initial_weights() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    features = 120 * world
    tracker = torchweft.RNGStatesTracker()
    tracker.add("model-parallel-rng", 100 + rank)
    before = torch.get_rng_state()
    for mode in ("column", "row"):
        linear = ops.Linear(features, features, tensor_parallel_mode=mode, rng_state_tracker_function=lambda: tracker)
        bound = features**-0.5
        largest = linear.weight.abs().max().item()
        assert 0.98 * bound < largest <= bound, f"{mode}: {largest}, expected {bound}"
        parts = [torch.empty_like(linear.weight) for _ in range(world)]
        dist.all_gather(parts, linear.weight.detach())
        assert not torch.equal(parts[0], parts[1]), "ranks drew the same weights"
    assert torch.equal(torch.get_rng_state(), before), "the default generator advanced"


def checkpoints() -> None:
    """Splits and merges a checkpoint of one process, by process group and from state dicts."""
    group = dist.group.WORLD
    truth, state = whole_block()
    model = block(group, True)
    model.load_state_dict(torchweft.checkpoint.shard_state_dict(state, model))
    whole = torchweft.checkpoint.gather_state_dict(model)
    block().load_state_dict(whole)
    for name, value in state.items():
        assert torch.equal(whole[name], value), name
    layout = torchweft.checkpoint.layout_of(model)
    parts: list = [None] * group.size()
    dist.all_gather_object(parts, model.state_dict())
    merged = torchweft.checkpoint.merge(parts, layout)
    for mine, cut in zip(parts, torchweft.checkpoint.split(merged, layout, group.size()), strict=True):
        assert mine.keys() == cut.keys()
        for name in mine:
            assert torch.equal(mine[name], cut[name]), name


def six_linears(group=None, replicated_bias: bool = False) -> ops.Sequential:
    """Three column-parallel and three row-parallel linears of equal shapes."""
    modes = [{"tensor_parallel_mode": m, "tensor_parallel_group": group} if group else {} for m in ("column", "row")]
    model = ops.Sequential()
    for _ in range(3):
        model.append(ops.Linear(24, 96, dtype=torch.float64, **modes[0]))
        model.append(ops.Linear(96, 24, dtype=torch.float64, replicated_bias=replicated_bias, **modes[1]))
    return model


def distributed_checkpoints() -> None:
    """torch.distributed.checkpoint saves a model of several ranks and loads it on one process, and the reverse."""
    group = dist.group.WORLD
    folders = [tempfile.mkdtemp() if group.rank() == 0 else None]
    dist.broadcast_object_list(folders)
    whole = {name: draw(*value.shape) for name, value in six_linears().state_dict().items()}
    for replicated_bias, sharded in itertools.product((False, True), (False, True)):
        model, other, single = six_linears(group, replicated_bias), six_linears(group, replicated_bias), six_linears()
        model.load_state_dict(torchweft.checkpoint.shard_state_dict(whole, model))
        folder = pathlib.Path(folders[0]) / f"{replicated_bias}-{sharded}"
        dcp.save(torchweft.checkpoint.distributed_state_dict(model) if sharded else whole, checkpoint_id=folder)
        state = torchweft.checkpoint.distributed_state_dict(other)
        dcp.load(state, checkpoint_id=folder)
        torchweft.checkpoint.load_distributed_state_dict(other, state)
        for name, value in other.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name
        state = single.state_dict()
        dcp.load(state, checkpoint_id=folder)
        for name, value in state.items():
            assert torch.equal(value, whole[name]), name
    stacked = {"0": 2, "2": 2, "4": 3}
    model.load_state_dict(torchweft.checkpoint.shard_state_dict(whole, model, stacked))
    state = torchweft.checkpoint.distributed_state_dict(model, stacked)
    assert all(torch.equal(state[f"{name}.weight"], whole[f"{name}.weight"]) for name in stacked)
    other = six_linears(group, True)
    torchweft.checkpoint.load_distributed_state_dict(other, state, stacked)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    parametrized = six_linears(group)
    torch.nn.utils.parametrizations.weight_norm(parametrized[0])
    for call, text in (
        (lambda: torchweft.checkpoint.load_distributed_state_dict(other, state), "0.weight is not a DTensor"),
        (lambda: torchweft.checkpoint.distributed_state_dict(parametrized), "has no 0.weight"),
    ):
        try:
            call()
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError("nothing raised")
    wrapped = ops.Sequential(checkpoint_wrapper(six_linears(group, True)))
    assert isinstance(torchweft.checkpoint.distributed_state_dict(wrapped)["0.0.weight"], DTensor)
    dist.barrier()
    if group.rank() == 0:
        shutil.rmtree(folders[0])


def invalid_arguments() -> None:
    world = dist.get_world_size()
    for mode, sizes, text in (
        ("column", (4, world + 1), f"out_features {world + 1} does not divide over {world} ranks"),
        ("row", (world + 1, 4), f"in_features {world + 1} does not divide over {world} ranks"),
    ):
        try:
            ops.Linear(*sizes, tensor_parallel_mode=mode)
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"{mode} {sizes} was accepted")
    linear = ops.Linear(4, world, tensor_parallel_mode="column", sequence_parallel=True)
    for x in (torch.rand(4), torch.rand(2, 5)):
        try:
            linear(x)
        except ValueError as error:
            assert str(list(x.shape)) in str(error), error
        else:
            raise AssertionError(f"{x.shape} was accepted")
    try:
        ops.ReduceScatter()(torch.rand(world + 1, 2))
    except ValueError as error:
        assert f"over {world} ranks" in str(error), error
    else:
        raise AssertionError("an uneven number of rows was accepted")


def main(known: dict[str, Any]) -> None:
    folder, *situations = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    found = {}
    for situation in situations:
        torch.manual_seed(3)
        begin = time.monotonic()
        try:
            known[situation]()
            found[situation] = ""
        except Exception:
            found[situation] = traceback.format_exc()
        print(f"{situation}: {time.monotonic() - begin:.2f} s {'failed' if found[situation] else ''}", flush=True)
        dist.barrier()
    (pathlib.Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(globals())
