#!/usr/bin/env python3
"""Generates docs/compat.md from the tables in torchweft.compat._namespace. With --check it only compares."""

from __future__ import annotations

import sys
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
| a second `install()` | only sets `recipes`, if given |
| `install()` after a failed import | raises if the real package is installed, even though it cannot be imported |
| `install()` and subprocesses | affects only the process that calls it; a child process must call it again |
| `uninstall()` | undoes `install()`. What another library has wrapped since stays, without weft's effect |
| `python -m torchweft.compat` | `--replace`, `--high-precision` as above; `-m module` runs a module |

Code that asks for CUDA runs on [simulated devices](device.md); this layer has none. Megatron-core needs
[the real package](transformer_engine.md#megatron-core).

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
