"""One rank of test_compat_parallel.py: compares tensor-parallel compat modules with one process.

RANK=0 WORLD_SIZE=2 python compat_rank.py FOLDER
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from torchweft.compat import transformer_engine

transformer_engine.install()
import transformer_engine.pytorch as te  # noqa: E402

ROWS, BATCH, HIDDEN = 8, 2, 16


class Pair(torch.nn.Module):
    """A column-parallel LayerNormLinear and a row-parallel Linear."""

    def __init__(self, set_parallel_mode=False, **options):
        super().__init__()
        column, row = ("column", "row") if set_parallel_mode else (None, None)
        self.up = te.LayerNormLinear(HIDDEN, 32, parallel_mode=column, **options)
        self.down = te.Linear(32, HIDDEN, parallel_mode=row, **options)

    def forward(self, x, **more):
        return self.down(self.up(x, **more), **more)


MAKERS = {
    "pair": Pair,
    "mlp": lambda **options: te.LayerNormMLP(HIDDEN, 32, **options),
    "layer": lambda **options: te.TransformerLayer(
        HIDDEN, 32, 4, hidden_dropout=0.0, attention_dropout=0.0, num_gqa_groups=2, **options
    ),
}


def shard(value: torch.Tensor, like: torch.nn.Parameter) -> torch.Tensor:
    """This rank's shard of a full Parameter or gradient, by the attributes of `like`."""
    if not getattr(like, "tensor_model_parallel", False):
        return value
    return value.chunk(dist.get_world_size(), like.partition_dim)[dist.get_rank()]


def rows(x: torch.Tensor, sequence: bool) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()] if sequence else x


def check(make, sequence: bool, fused: bool) -> None:
    torch.manual_seed(7)
    whole = make(params_dtype=torch.float64)
    parallel = {"tp_group": dist.group.WORLD, "tp_size": dist.get_world_size(), "set_parallel_mode": True}
    mine = make(params_dtype=torch.float64, sequence_parallel=sequence, fuse_wgrad_accumulation=fused, **parallel)
    with torch.no_grad():
        for name, p in whole.named_parameters():
            p.copy_(torch.randn_like(p) * 0.5)
            mine.get_parameter(name).copy_(shard(p, mine.get_parameter(name)))
    for p in mine.parameters() if fused else ():
        p.main_grad, p.grad_added_to_main_grad = torch.full_like(p, float("nan")), False
    x, dy = torch.randn(2, ROWS, BATCH, HIDDEN, dtype=torch.float64)
    expected_x, mine_x = x.clone().requires_grad_(), rows(x, sequence).clone().requires_grad_()
    expected, got = whole(expected_x), mine(mine_x, is_first_microbatch=True)
    expected.backward(dy)
    got.backward(rows(dy, sequence))
    torch.testing.assert_close(got, rows(expected, sequence))
    torch.testing.assert_close(mine_x.grad, rows(expected_x.grad, sequence))
    for name, p in mine.named_parameters():
        grad = p.main_grad if getattr(p, "grad_added_to_main_grad", False) else p.grad
        if getattr(p, "sequence_parallel", False):  # as Megatron does after backward
            dist.all_reduce(grad)
        assert getattr(p, "sequence_parallel", False) is sequence or hasattr(p, "partition_dim"), name
        torch.testing.assert_close(
            grad, shard(whole.get_parameter(name).grad, p), msg=lambda text, n=name: f"{n}: {text}"
        )


def check_sum() -> None:
    """AllReduce of the compatibility layer passes dy through, although reduce_in_backward is True by default."""
    x = torch.full([4], 1.0 + dist.get_rank(), requires_grad=True)
    y = te.ops.Sequential(te.ops.AllReduce(dist.group.WORLD))(x)
    y.backward(torch.arange(4.0))
    assert y.tolist() == [3.0] * 4 and x.grad.tolist() == [0.0, 1.0, 2.0, 3.0], (y, x.grad)


def main() -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{sys.argv[1]}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    check_sum()
    for name, make in MAKERS.items():
        for sequence in (False, True):
            for fused in (False, True):
                print(name, sequence, fused, flush=True)
                check(make, sequence, fused)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
