#!/usr/bin/env python3
"""Writes docs/compat.md from the tables in weft.compat._namespace. With --check it only compares."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compat.md"
sys.path.insert(0, str(ROOT / "python"))

HEAD = """# Code written for Transformer Engine

<!-- written by tools/make_compat_page.py -->

Code that imports `transformer_engine` runs on weft, on a machine without a GPU, when it is told to:

```python
from weft.compat import transformer_engine

transformer_engine.install()
import transformer_engine.pytorch as te
```

or, with the script left as it is, `python -m weft.compat script.py arguments`. Nothing happens by itself: `import weft`
leaves the name alone. [te_in_ci.md](te_in_ci.md) is a whole example: a training script, its tests, and the workflow
that runs them.

| call | what it does |
|---|---|
| `install()` | `import transformer_engine` is weft in this process; ImportError where the real one is |
| `install(replace=True)` | the same even then; what was imported of the real package is put aside |
| `install(recipes="high_precision")` | quantized regions run unquantized, with one warning. By default they raise |
| a second `install()` | changes nothing, but `recipes` if it is given |
| after an import that failed | the same: a package that is installed but does not import is installed |
| in a subprocess | it is active where it was called only; a child that is started anew calls it again |
| `uninstall()` | the name is free again; what was put aside comes back |
| `python -m weft.compat` | `--replace` and `--high-precision` as above; `-m package.module` runs a module |

The real one counts as present where it is installed or was imported. A name that is absent raises AttributeError
(ImportError from `from … import`) with the reason given here, so that code which asks first goes on without it.

## How module classes behave

- Parameters, `state_dict` keys and arguments are the reference's: `weight`, `bias`, `layer_norm_weight`,
  `layer_norm_bias`, `fc1_weight`, `fc1_bias`, `fc2_weight`, `fc2_bias`, `weight0`, `bias0`, `query_weight`, …, and
  `_extra_state`, which is empty. A checkpoint without `_extra_state` loads.
- The default device is torch's, not CUDA.
- The bias of a row linear is one of all ranks, added after the sum. Under sequence parallelism it and the norms'
  Parameters carry `.sequence_parallel = True` and hold the gradient of this rank's rows; who trains sums them over the
  ranks, as Megatron does. (`weft.ops.Linear(replicated_bias=True)` sums by itself.)
- `fuse_wgrad_accumulation` adds weight gradients to `main_grad`; `is_first_microbatch=True` overwrites it in that call.
- `delay_wgrad_compute` leaves weight gradients to `backward_dw()`; biases get theirs in backward.
- `return_bias=True` hands out the Parameter itself, as the reference does; under FSDP2 its memory goes when the sharded
  module's forward ends, so shard a module that also adds it.
- Replaced Parameters count from the next call; `.to()`, `deepcopy` and FSDP see this module's Parameters only.
"""

MEGATRON = """
## Megatron-core

megatron-core 0.16.1, as it is in the registry, runs on the CPU:

```python
from weft.compat import megatron

megatron.install()  # before megatron.core is imported; transformer_engine is weft from here on, too
from megatron.core.models.gpt import GPTModel
```

or `python -m weft.compat --megatron script.py arguments`. `megatron.on_cpu()` is the same for a block, `uninstall()`
undoes it. It raises ImportError where megatron-core is not there, and RuntimeError where torch has CUDA. Groups are
Gloo's. To install: HOW_TO_INSTALL. `tests/dist/test_megatron.py` looks for it in the folder `$WEFT_MEGATRON`, too.

`F.gelu` is not the same with the op fuser: there it is the tanh form, in Megatron's own MLP it is not.
"""

RUNS = (
    (
        "loss and gradient norm within 1e-5 of one rank",
        "transformer layer (LayerNorm, GELU and biases; RMSNorm, SwiGLU and grouped queries); `GPTModel` in Megatron's "
        "DDP with `forward_backward_func` and Megatron's optimizer, clipped; tensor parallel 1, 2, and 2 with sequence "
        "parallelism; op fuser (`TEFusedMLP`) and `gradient_accumulation_fusion` on and off",
    ),
    (
        "the same",
        "that model with full and selective recomputation, `apply_rope_fusion`, the distributed optimizer, "
        "`overlap_grad_reduce` and `tp_comm_overlap`",
    ),
    (
        "loss within 1e-4 of the uninterrupted run",
        "50 steps of that model at tensor parallel 2 with sequence parallelism, `dist_checkpointing.save` of model and "
        "optimizer, `load` at tensor parallel 1, 5 more steps",
    ),
    (
        "runs; not compared",
        "dropout, bfloat16, mixtures of experts by the allgather dispatcher, `fp8` with "
        '`install(recipes="high_precision")`',
    ),
)

STOPS = (
    (
        '`moe_token_dispatcher_type="alltoall"`',
        "transformer/moe/token_dispatcher.py:445 makes a `torch.cuda.Stream`; with `moe_permute_fusion` line 405 makes "
        'a tensor on `torch.device("cuda")` before that',
    ),
    ("`fp8`", "transformer/transformer_block.py:733 enters `fp8_autocast`, which raises: weft computes unquantized"),
    ("`cuda_graph_impl`", "transformer/cuda_graphs.py:1406 wants a random number tracker of CUDA graphs"),
)


def two_column_table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join([f"\n| {left} | {right} |\n|---|---|", *(f"| {name} | {text} |" for name, text in rows)])


def megatron_section() -> str:
    from weft.compat import megatron

    command, _, imports = megatron.HOW_TO_INSTALL.partition(";")
    found = {f"{redirection.module}.{redirection.name}": redirection.why for redirection in megatron.REDIRECTIONS}
    lines = [(f"`{name}`", why) for name, why in (found | megatron.MODE_WHY).items()]
    return "\n".join(
        [
            MEGATRON.replace("HOW_TO_INSTALL", f"`{command}`;{imports}"),
            two_column_table("how well", "what runs", RUNS).lstrip(),
            two_column_table("what does not run", "which line stops it", STOPS),
            two_column_table("what is redirected", "which lines need it", lines),
        ]
    )


def table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| name | | |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {verdict} | {note} |" for name, verdict, note in rows)])


def rows(present: dict[str, str], absent: dict[str, str]) -> list[tuple[str, str, str]]:
    found = [
        (name, "same" if note == "same" else "differs", "" if note == "same" else note)
        for name, note in present.items()
    ]
    return sorted([*found, *((name, "absent", why) for name, why in absent.items())], key=lambda row: row[0].lower())


def page() -> str:
    from weft.compat import _namespace

    namespace = rows({name: note for name, (_, note) in _namespace.SUPPORTED.items()}, _namespace.UNSUPPORTED)
    operations = rows(
        {name: _namespace.OPS_DIFFERENCES.get(name, "same") for name in _namespace.TE_OPS}, _namespace.UNSUPPORTED_OPS
    )
    others = [
        (module, ", ".join(f"`{name}`" for name in sorted(held)))
        for module, held in _namespace.MODULES.items()
        if held and module not in ("transformer_engine.pytorch", "transformer_engine.pytorch.ops")
    ]
    return "\n".join(
        [
            HEAD,
            "## `transformer_engine.pytorch`\n",
            table(namespace),
            "\n## `transformer_engine.pytorch.ops`\n",
            table(operations),
            "\nWeft's own operations are there too. [from_te_ops.md](from_te_ops.md) lists the general differences.\n",
            "## Other modules\n",
            "| module | names |\n|---|---|",
            *(f"| `{module}` | {held} |" for module, held in others),
            megatron_section(),
            "",
        ]
    )


def main() -> None:
    text = page()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text() == text else f"{PAGE.relative_to(ROOT)} is old: run tools/make_compat_page.py")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
