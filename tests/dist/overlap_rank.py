"""One rank of test_overlap.py: runs every case overlapped and with plain collectives, on the same values.

    RANK=0 WORLD_SIZE=2 WEFT_TRANSPORT=shm python overlap_rank.py FOLDER

Writes FOLDER/rank<r>.json: the number of comparisons, and the differences.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import random
import re
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import torchweft
from torchweft import ops
from torchweft._delayed_scaling import state_of

TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
STEPS = 3


def case_module(mode: str, overlap: bool, width: int, hidden: int, **options) -> ops.Sequential:
    features = (width, hidden) if mode == "column" else (hidden, width)
    return ops.Sequential(ops.Linear(*features, tensor_parallel_mode=mode, overlap=overlap, **options))


def mlp(overlap: bool, width: int, hidden: int, **options) -> ops.Sequential:
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(width, dtype=options["dtype"]),
        ops.Linear(width, hidden, tensor_parallel_mode="column", overlap=overlap, **options),
        ops.GELU(),
        ops.Linear(hidden, width, tensor_parallel_mode="row", overlap=overlap, **options),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def module_pair(make, seed: int, frozen: bool, **options) -> tuple[ops.Sequential, ops.Sequential]:
    """The overlapped module and the plain one, with equal values."""
    pair = []
    for overlap in (True, False):
        torch.manual_seed(seed + dist.get_rank())
        module = make(overlap=overlap, **options)
        with torch.no_grad():
            for p in module.parameters():
                p.normal_(0, 0.3)
        for p in module.parameters():
            p.requires_grad_(not (frozen and p.dim() == 2))
            if options.get("accumulate_into_main_grad"):
                p.main_grad = torch.full(p.shape, 0.25)
        pair.append(module)
    return pair[0], pair[1]


def results(module: torch.nn.Module, x: torch.Tensor, dy_of, needs_input: bool) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_(needs_input)
    module.zero_grad()
    y = module(x)
    out = {"y": y.detach()}
    if y.requires_grad:
        y.backward(dy_of(y))
    if x.grad is not None:
        out["dx"] = x.grad
    for name, p in module.named_parameters():
        for what in ("grad", "main_grad"):
            if (value := getattr(p, what, None)) is not None:
                out[f"{name}.{what}"] = value.clone()
    return out


def differences(label: str, mine: dict, plain: dict, dtype: torch.dtype) -> list[str]:
    if mine.keys() != plain.keys():
        return [f"{label}: {sorted(mine)} against {sorted(plain)}"]
    rtol, atol = TOLERANCE[dtype]
    found = []
    for name in mine:
        scale = plain[name].abs().max().item() if plain[name].numel() else 0
        if not torch.allclose(mine[name], plain[name], rtol=rtol, atol=atol * max(scale, 1)):
            error = (mine[name] - plain[name]).abs().max().item()
            found.append(f"{label} {name}: off by {error:.3g} at {scale:.3g}")
    return found


def cases():
    for mode, sequence, bias, frozen in itertools.product(
        ("column", "row"), (True, False), (True, False), (True, False)
    ):
        for dtype in (torch.float64, torch.bfloat16):
            yield f"{mode}", {"mode": mode}, case_module, sequence, bias, frozen, dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        yield "mlp", {}, mlp, True, True, False, dtype
        yield "mlp", {}, mlp, False, False, False, dtype


def run(transport: str) -> dict:
    rank, size = dist.get_rank(), dist.get_world_size()
    rng = random.Random(11)  # the same sizes on every rank
    compared, wrong = 0, []
    for number, (kind, more, make, sequence, bias, frozen, dtype) in enumerate(cases()):
        width, hidden = rng.choice([(32 * size, 64 * size), (8 * size, 24 * size), (256 * size, 96 * size)])
        main_grad = dtype != torch.float64 and rng.random() < 0.5
        options = {**more, "width": width, "hidden": hidden, "bias": bias, "dtype": dtype}
        options |= {"sequence_parallel": sequence, "accumulate_into_main_grad": main_grad}
        overlapped, plain = module_pair(make, number, frozen, **options)
        for step in range(STEPS):
            tokens = rng.choice([1, 3, 40, 97, 200, 333]) * size
            label = f"{kind} sp={sequence} bias={bias} frozen={frozen} {dtype} {width}x{hidden} {tokens} tokens"
            local = tokens // size if sequence and kind != "row" else tokens
            features = hidden // size if kind == "row" else width
            replicated = not sequence and kind != "row"
            torch.manual_seed(1000 * number + step + (0 if replicated else rank))
            x = torch.randn(local, features, dtype=torch.float64).to(dtype)

            def dy_of(y, seed=number + step, same=kind != "column" and not sequence):
                if seed % 4 == 0:  # the gradient of a sum: one expanded value
                    return torch.ones((), dtype=y.dtype).expand(y.shape)
                torch.manual_seed(seed + (0 if same else rank))
                return torch.randn(y.shape, dtype=torch.float64).to(y.dtype)

            needs_input = rng.random() < 0.8 or frozen
            mine, theirs = (results(m, x, dy_of, needs_input) for m in (overlapped, plain))
            wrong += differences(label, mine, theirs, dtype)
            compared += len(mine)
        text = torchweft.explain(overlapped, x.clone().requires_grad_()).text
        passes = 1 if kind == "row" and not sequence else 2 if sequence else 1
        if text.count(f"overlapped over {transport}") < (passes if needs_input else 1):
            wrong.append(f"{label}: not overlapped\n{text}")
    return {"compared": compared, "wrong": wrong}


RECIPES = {
    "current": torchweft.recipe.Float8CurrentScaling(),
    "delayed": torchweft.recipe.DelayedScaling(amax_history_len=2, reduce_amax=False),
    "block": torchweft.recipe.Float8BlockScaling(),
    "mxfp8": torchweft.recipe.MXFP8BlockScaling(),
    "nvfp4": torchweft.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4, dequantized": torchweft.recipe.NVFP4BlockScaling(backward_override="dequantized"),
    # These rows are sent over the transport, but not multiplied as they arrive.
    "square blocks": torchweft.recipe.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "float32 scales": torchweft.recipe.Float8BlockScaling(use_f32_scales=True),
}


def rows_of_ranks(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Splits y into the rows of each rank, whose magnitudes differ."""
    blocks = {f"y of rank {i}": rows for i, rows in enumerate(found["y"].chunk(dist.get_world_size()))}
    return {**blocks, **{name: value for name, value in found.items() if name != "y"}}


def error_of(linear: torch.nn.Module, x: torch.Tensor, recipe: torchweft.recipe.Recipe) -> str:
    try:
        with torch.no_grad(), torchweft.autocast(recipe=recipe):
            linear(x)
    except Exception as error:  # noqa: BLE001 - its type is part of the text
        return f"{type(error).__name__}: {error}"
    return ""


def mismatches(linear: torch.nn.Module, x: torch.Tensor) -> list[str]:
    """Ranks that quantize differently raise, each of them; if they send as many bytes, the group stays usable."""
    first, mxfp8 = dist.get_rank() == 0, torchweft.recipe.MXFP8BlockScaling()
    delayed = torchweft.recipe.DelayedScaling(amax_history_len=2, reduce_amax=False)
    state_of(linear[0]._stages()[0], 2)[0][0, 0] = 2.0 if first else 4.0
    wrong = []
    for recipe, message in (
        (torchweft.recipe.Float8CurrentScaling(use_power_2_scales=first), "ValueError: .*another recipe"),
        (mxfp8, ""),
        (delayed, "ValueError: .*scale their rows by"),
        (mxfp8, ""),
        (mxfp8 if first else torchweft.recipe.Float8CurrentScaling(), "DistError: .*[Mm]ismatch"),  # fails the group
    ):
        dist.barrier()  # a failed group would also end the previous call of a slower rank
        start, error = time.monotonic(), error_of(linear, x, recipe)
        if not re.search(message or "^$", error, re.DOTALL) or time.monotonic() - start > 20:
            wrong.append(f"expected {message or 'no error'}, got {error or 'no error'}")
    return wrong


def run_quantized(transport: str) -> dict:
    """Column linears under each recipe; the rows of the ranks have different maxima."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rng = random.Random(12)
    compared, wrong = 0, []
    for number, (name, activation) in enumerate(itertools.product(RECIPES, (None, "GELU"))):
        width, hidden = rng.choice([(32 * size, 64 * size), (8 * size, 24 * size), (256 * size, 96 * size)])
        options = {"bias": rng.random() < 0.5, "dtype": torch.bfloat16, "sequence_parallel": True}

        def make(overlap, width=width, hidden=hidden, activation=activation, options=options):
            linear = ops.Linear(width, hidden, tensor_parallel_mode="column", overlap=overlap, **options)
            return ops.Sequential(linear, *([getattr(ops, activation)()] if activation else []))

        overlapped, plain = module_pair(make, number, frozen=False)
        for step in range(STEPS):
            tokens = rng.choice([16, 48, 208, 336])
            torch.manual_seed(1000 * number + step + rank)
            x = (torch.randn(tokens, width) * 4.0 ** (rank + step)).bfloat16()

            def dy_of(y, seed=number + step):
                torch.manual_seed(seed + rank)
                return torch.randn(y.shape).to(y.dtype)

            found = []
            for module in (overlapped, plain):
                with torchweft.autocast(recipe=RECIPES[name]):
                    found.append(results(module, x, dy_of, True))
            label = f"{name} {activation} {options} {width}x{hidden} {tokens} tokens, step {step}"
            wrong += differences(label, *map(rows_of_ranks, found), torch.bfloat16)
            compared += len(found[0])
            with torchweft.autocast(recipe=RECIPES[name]):
                text = torchweft.explain(overlapped, x.clone().requires_grad_()).text
            if f"overlapped over {transport}" not in text:
                wrong.append(f"{label}: not overlapped\n{text}")
    wrong += mismatches(overlapped, x)
    return {"compared": compared, "wrong": wrong}


def main() -> None:
    folder = pathlib.Path(os.sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    transport = os.environ["WEFT_TRANSPORT"]
    found, quantized = run(transport), run_quantized(transport)
    found = {key: found[key] + quantized[key] for key in found}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
