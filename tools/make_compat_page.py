#!/usr/bin/env python3
"""Generates docs/compat.md from the tables in torchweft.compat._namespace. With --check it only compares."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compat.md"
sys.path.insert(0, str(ROOT / "python"))

HEAD = """# Code written for Transformer Engine

<!-- written by tools/make_compat_page.py -->

Code that imports `transformer_engine` runs on weft, on a machine without a GPU, after one call:

```python
from torchweft.compat import transformer_engine

transformer_engine.install()
import transformer_engine.pytorch as te
```

To run a script unchanged, use `python -m torchweft.compat script.py arguments`. `import torchweft` alone does not
change what `import transformer_engine` finds. [te_in_ci.md](te_in_ci.md) is a complete example: a training script, its
tests, and the workflow that runs them.

| call | what it does |
|---|---|
| `install()` | `import transformer_engine` resolves to weft in this process. ImportError if the real package exists |
| `install(replace=True)` | does not raise; modules of the real package that were already imported are replaced |
| `install(recipes="high_precision")` | regions run unquantized, with one warning. By default linears are quantized |
| `install(cuda="cpu")` | code that asks for CUDA runs on the CPU, in this thread; RuntimeError if torch has CUDA |
| a second `install()` | only sets `recipes` and `cuda`, if given |
| `install()` after a failed import | raises if the real package is installed, even though it cannot be imported |
| `install()` and subprocesses | affects only the process that calls it; a child process must call it again |
| `uninstall()` | undoes `install()`. What another library has wrapped since stays, without weft's effect |
| `python -m torchweft.compat` | `--replace`, `--high-precision`, `--cuda-on-cpu` as above; `-m module` runs a module |

`cuda="cpu"` redirects `device="cuda"` and `.to("cuda")` in calls of torch, also in backward, `.cuda()` and
`.pin_memory()`, which return the tensor itself, `torch.autocast("cuda")`, `torch.load`, `torch.set_default_device`,
device meshes, process groups with the backend `nccl`, which use Gloo, and the functions of `torch.cuda` for seeds and
random states, memory and devices. Streams, events and `synchronize` do nothing, except that an event stores its time:
wait for the handles of asynchronous collectives. Not redirected: graphs, `torch.Stream` and `torch.Generator("cuda")`.
`torch.cuda.is_available()` stays False.

The real package exists if it is installed or was imported. A name that is not supported raises AttributeError
(ImportError from `from … import`) with the reason listed here, so code that tests for a name with `hasattr` or `try`
falls back as usual.

## How module classes behave

- Parameters, `state_dict` keys and arguments are Transformer Engine's: `weight`, `bias`, `layer_norm_weight`,
  `layer_norm_bias`, `fc1_weight`, `fc1_bias`, `fc2_weight`, `fc2_bias`, `weight0`, `bias0`, `query_weight`, …, and
  `_extra_state`, which is empty. A checkpoint without `_extra_state` loads.
- The default device is torch's, not CUDA.
- The bias of a row linear is replicated and added after the reduction. Under sequence parallelism this bias and the
  Parameters of norms have `.sequence_parallel = True`, and their gradients cover this rank's rows only: the training
  loop must all-reduce them, as Megatron does. (`torchweft.ops.Linear(replicated_bias=True)` reduces them itself.)
- `fuse_wgrad_accumulation` adds weight gradients to `main_grad`; `is_first_microbatch=True` overwrites it in that call,
  and under a recipe quantizes weights for this and the following micro-batches.
- `delay_wgrad_compute` defers weight gradients to `backward_dw()`; bias gradients are computed in backward.
- `return_bias=True` returns the Parameter itself, as Transformer Engine does. Under FSDP2 its memory is freed when the
  sharded module's forward ends, so apply `fully_shard` to a module that also adds the bias.
- Replaced Parameters take effect at the next call. `.to()`, `deepcopy` and FSDP see this module's Parameters only.
- Modules compile with `fullgraph=True`, also with `fuse_wgrad_accumulation`. `delay_wgrad_compute`, context parallelism
  and, with `fuse_wgrad_accumulation`, `is_first_microbatch=True` break the graph.
- Context parallelism gathers all keys and values on each rank. Without AMX, causal attention to more keys than queries
  is computed by ATen calls (tier `ref`).
"""

MEGATRON = """
## Megatron-core

megatron-core 0.16.1, unmodified from PyPI, runs on the CPU:

```python
from torchweft.compat import megatron

megatron.install()  # before megatron.core is imported; also makes transformer_engine resolve to weft
from megatron.core.models.gpt import GPTModel
```

or `python -m torchweft.compat --megatron script.py arguments`. CUDA is redirected as by `install(cuda="cpu")`.
`megatron.on_cpu()` is a context manager that does the same; `uninstall()` undoes it. `install()` raises ImportError if
megatron-core is not installed, and RuntimeError if torch has CUDA. To install: HOW_TO_INSTALL.
`tests/dist/test_megatron.py` also searches the folder `$WEFT_MEGATRON`.

With the op fuser `F.gelu` is the tanh approximation; in Megatron's own MLP it is exact.
"""

RUNS = (
    (
        "loss and gradient norm within 1e-5 of one rank",
        "transformer layer (LayerNorm, GELU and biases; RMSNorm, SwiGLU and grouped-query attention); `GPTModel` in "
        "Megatron's DDP with `forward_backward_func` and Megatron's optimizer with clipping; tensor parallel 1, 2, and "
        "2 with sequence parallelism; op fuser (`TEFusedMLP`) and `gradient_accumulation_fusion` on and off",
    ),
    (
        "the same",
        "that model with full and selective recomputation, `apply_rope_fusion`, the distributed optimizer, "
        '`overlap_grad_reduce`, `tp_comm_overlap` and `cross_entropy_fusion_impl="te"`',
    ),
    (
        "the same, three steps over two ranks",
        "context parallelism, every `cp_comm_type` but `a2a+p2p`; expert parallelism with "
        '`moe_token_dispatcher_type="alltoall"`, `moe_permute_fusion` on and off; `TorchFullyShardedDataParallel`; the '
        "distributed optimizer over data-parallel ranks",
    ),
    (
        "bit-equal to the uninterrupted run",
        "checkpoints of the distributed optimizer in bfloat16 over one and two ranks, formats `fully_reshardable`, "
        "`dp_reshardable` and `dp_zero_gather_scatter`",
    ),
    (
        "loss within 1e-4 of the uninterrupted run",
        "50 steps of that model at tensor parallel 2 with sequence parallelism, `dist_checkpointing.save` of model and "
        "optimizer, `load` at tensor parallel 1, 5 more steps",
    ),
    (
        "loss of one step within 2 % of bfloat16",
        '`fp8="hybrid"` with `fp8_recipe` `delayed`, `tensorwise`, `blockwise` and `mxfp8`',
    ),
    (
        "runs; not compared",
        "dropout, bfloat16, mixtures of experts with the allgather dispatcher, also with `fp8_recipe` `tensorwise`, "
        "`blockwise` and `mxfp8`",
    ),
)

STOPS = (
    ('`cp_comm_type="a2a+p2p"`', "hierarchical context parallelism is not supported"),
    (
        "`finalize_model_grads` with `TorchFullyShardedDataParallel`",
        "distributed/finalize_model_grads.py:443 passes an argument that `finish_grad_sync` does not have there. "
        "FSDP2 has reduced the gradients: leave `finalize_model_grads_func` None",
    ),
    (
        "the format `fully_sharded_model_space`; `dp_zero_gather_scatter` with float32 Parameters",
        "dist_checkpointing/mapping.py:134 rejects its flattened tensors; optimizer/distrib_optimizer.py:940 copies to "
        "a view of a Parameter",
    ),
    ("`cuda_graph_impl`", "transformer/cuda_graphs.py:1406 requires a random number tracker for CUDA graphs"),
)


def two_column_table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join([f"\n| {left} | {right} |\n|---|---|", *(f"| {name} | {text} |" for name, text in rows)])


def megatron_section() -> str:
    from torchweft.compat import megatron

    command, _, imports = megatron.HOW_TO_INSTALL.partition(";")
    found = {f"{redirection.module}.{redirection.name}": redirection.why for redirection in megatron.REDIRECTIONS}
    lines = [(f"`{name}`", why) for name, why in (found | megatron.MODE_WHY).items()]
    return "\n".join(
        [
            MEGATRON.replace("HOW_TO_INSTALL", f"`{command}`;{imports}"),
            two_column_table("tested accuracy", "configuration", RUNS).lstrip(),
            two_column_table("not supported", "because of", STOPS),
            two_column_table("redirected to the CPU", "needed by", lines),
        ]
    )


def table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| name | status | difference or reason |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {verdict} | {note} |" for name, verdict, note in rows)])


def rows(supported: dict[str, str], unsupported: dict[str, str]) -> list[tuple[str, str, str]]:
    found = [
        (name, "same" if note == "same" else "differs", "" if note == "same" else note)
        for name, note in supported.items()
    ]
    missing = ((name, "not supported", why) for name, why in unsupported.items())
    return sorted([*found, *missing], key=lambda row: row[0].lower())


def page() -> str:
    from torchweft.compat import _namespace

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
        stale = f"{PAGE.relative_to(ROOT)} is out of date: run tools/make_compat_page.py"
        sys.exit(0 if PAGE.read_text() == text else stale)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
