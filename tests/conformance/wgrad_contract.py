#!/usr/bin/env python3
"""Checks how a linear hands over the gradient of its weight, for libraries that share `main_grad` with a framework.

    python wgrad_contract.py torchweft.ops:Linear
    python wgrad_contract.py my_package:make_linear --accumulate fuse_wgrad_accumulation
    python wgrad_contract.py my_package:make_linear --json report.json

Needs torch only, so that it can be copied; tensors are on the device of the weight, `main_grad` is float32. The
argument is a class or function that is called as ``make(in_features,
out_features, bias=False, **options)``, where the options that are on are the names given by ``--accumulate`` and
``--delay``. It returns a module with a Parameter `weight` and, if gradients are delayed, a method `backward_dw()`.
Prints one line per check and exits with 1 if one fails. docs/wgrad_contract.md has the rule.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

IN, OUT, TOKENS, FILL = 24, 40, 16, 0.5
NOT_A_NUMBER = float("nan")


@dataclass(frozen=True)
class Row:
    """A row of the table: what is set, and thereby what must happen."""

    number: int
    accumulate: bool  # the option of the linear
    delay: bool  # the option of the linear
    flag: bool  # the weight has the attribute grad_added_to_main_grad
    overwrite: bool  # weight.overwrite_main_grad is true

    def __str__(self) -> str:
        names = [name for name in ("accumulate", "delay", "flag", "overwrite") if getattr(self, name)]
        return f"row {self.number} ({', '.join(names) or 'plain'})"


PLAIN, DELAYED = Row(1, False, False, False, False), Row(2, False, True, False, False)
MAIN_GRAD_ROWS = [
    Row(3 + 4 * delay + 2 * flag + overwrite, True, bool(delay), bool(flag), bool(overwrite))
    for delay in (0, 1)
    for flag in (0, 1)
    for overwrite in (0, 1)
]
ROWS = [PLAIN, DELAYED, *MAIN_GRAD_ROWS]


@dataclass(frozen=True)
class Library:
    """The linear under test and the names of its two options."""

    make: Callable[..., torch.nn.Module]
    accumulate: str
    delay: str

    def linear(self, row: Row) -> torch.nn.Module:
        options = {self.accumulate: row.accumulate, self.delay: row.delay}
        return self.make(IN, OUT, bias=False, **{name: True for name, on in options.items() if on})

    def prepared(self, row: Row) -> torch.nn.Module:
        """A linear with the attributes that a framework sets on its weight."""
        linear = self.linear(row)
        if row.accumulate:
            weight = linear.weight
            weight.main_grad = old_value(weight, row)
            if row.flag:
                weight.grad_added_to_main_grad = False
            if row.overwrite:
                weight.overwrite_main_grad = True
        return linear


def old_value(weight: torch.nn.Parameter, row: Row) -> torch.Tensor:
    """What main_grad holds before a backward."""
    return torch.full(weight.shape, NOT_A_NUMBER if row.overwrite else FILL, device=weight.device)


def forward(linear: torch.nn.Module, seed: int, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of a call, and the gradient that its weight must get."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    x, dy = torch.randn(2, tokens, max(IN, OUT), generator=generator).to(linear.weight)
    x, dy = x[:, :IN].contiguous(), dy[:, :OUT].contiguous()
    y = linear(x)
    y = y[0] if isinstance(y, tuple) else y
    return (y * dy).sum(), dy.float().t() @ x.float()


def close(got: torch.Tensor | None, expected: torch.Tensor) -> bool:
    tolerance = 1e-4 if got is None or got.dtype == torch.float32 else 3e-2
    return got is not None and torch.allclose(got.float(), expected, rtol=tolerance, atol=tolerance)


def share_memory(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


# ---- checks: each yields what is wrong ------------------------------------------------------------------------------


def check_row(library: Library, row: Row) -> Iterator[str]:
    """One backward, and backward_dw: what is written, returned and flagged."""
    linear = library.prepared(row)
    weight = linear.weight
    loss, dw = forward(linear, 1)
    if row.accumulate and weight.main_grad.isfinite().all() != (not row.overwrite):
        yield "forward writes main_grad"
    loss.backward()
    if row.delay:
        if row.accumulate and not torch.equal(weight.main_grad.isnan(), old_value(weight, row).isnan()):
            yield "backward writes main_grad before backward_dw"
        if row.accumulate and not row.overwrite and not close(weight.main_grad, torch.full_like(dw, FILL)):
            yield "backward adds to main_grad before backward_dw"
        if not row.accumulate and weight.grad is not None:
            yield "weight.grad is set before backward_dw"
        if row.flag and weight.grad_added_to_main_grad is not True:
            yield "grad_added_to_main_grad is not set by backward; a hook may add the dummy"
        linear.backward_dw()
    if not row.accumulate:
        if not close(weight.grad, dw):
            yield "weight.grad is not the gradient"
        return
    if not close(weight.main_grad, dw if row.overwrite else dw + FILL):
        yield "main_grad is not " + ("the gradient" if row.overwrite else "its old value and the gradient")
    if (weight.grad is not None) != row.flag:
        yield "weight.grad must be " + ("a dummy" if row.flag else "None")
    if hasattr(weight, "grad_added_to_main_grad") != row.flag:
        yield "grad_added_to_main_grad appears"
    if row.flag and weight.grad_added_to_main_grad is not True:
        yield "grad_added_to_main_grad is not True"
    if share_memory(weight.grad, weight.main_grad):
        yield "weight.grad shares memory with main_grad"


def check_micro_batches(library: Library, row: Row) -> Iterator[str]:
    """Three micro-batches. A hook, as frameworks have one, sees the flag in each and takes it back."""
    linear = library.prepared(row)
    weight, total, seen = linear.weight, 0.0 if row.overwrite or not row.accumulate else FILL, []

    def hook(param: torch.nn.Parameter) -> None:
        seen.append(getattr(param, "grad_added_to_main_grad", None))
        param.grad_added_to_main_grad, param.grad = False, None

    if row.flag:
        weight.register_post_accumulate_grad_hook(hook)
    for seed in (1, 2, 3):
        loss, dw = forward(linear, seed)
        loss.backward()
        if row.delay:
            linear.backward_dw()
        total = dw if row.overwrite else total + dw
    if not close(weight.main_grad if row.accumulate else weight.grad, total):
        yield "the result is not " + ("the last gradient" if row.overwrite else "the sum of the gradients")
    if row.flag and seen[:3] != [True] * 3:
        yield f"a hook on the weight saw grad_added_to_main_grad {seen}, expected True in each backward"


def check_pending(library: Library, row: Row) -> Iterator[str]:
    """Two backwards, then backward_dw() twice, as pipeline schedules do: the oldest first."""
    linear = library.prepared(row)
    weight, (first, dw), (second, other) = linear.weight, forward(linear, 1), forward(linear, 2)
    first.backward()
    second.backward()
    linear.backward_dw()
    linear.backward_dw()
    start = FILL if row.accumulate else 0.0
    if not close(weight.main_grad if row.accumulate else weight.grad, other if row.overwrite else start + dw + other):
        yield "of two pending gradients one is lost, or they are in the wrong order"


def check_used_twice(library: Library, row: Row) -> Iterator[str]:
    """A weight that is used twice in one backward: both gradients count, also if main_grad is to be overwritten."""
    linear = library.prepared(row)
    weight, (first, dw), (second, other) = linear.weight, forward(linear, 1), forward(linear, 2)
    (first + second).backward()
    if row.delay:
        linear.backward_dw()
    start = FILL if row.accumulate and not row.overwrite else 0.0
    if not close(weight.main_grad if row.accumulate else weight.grad, start + dw + other):
        yield "of two uses in one backward one is lost"


def check_frozen(library: Library, row: Row) -> Iterator[str]:
    """A frozen weight needs no main_grad; if it has one, nothing is written."""
    for linear in (library.linear(row), library.prepared(row)):
        weight = linear.weight.requires_grad_(False)
        before = {name: value.clone() for name, value in vars(weight).items() if isinstance(value, torch.Tensor)}
        x = torch.randn(TOKENS, IN).to(weight).requires_grad_()
        y = linear(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
        if weight.grad is not None or getattr(weight, "grad_added_to_main_grad", False):
            yield "a frozen weight got a gradient"
        if hasattr(weight, "main_grad") != ("main_grad" in before) or not all(
            torch.equal(getattr(weight, name).nan_to_num(7), value.nan_to_num(7)) for name, value in before.items()
        ):
            yield "main_grad of a frozen weight was written"
        if not close(x.grad, weight.float().sum(0).expand(TOKENS, IN)):
            yield "the gradient of the input is wrong"


def check_no_rows(library: Library, row: Row) -> Iterator[str]:
    """Without rows, adding leaves main_grad as it is and overwriting makes it zero."""
    linear = library.prepared(row)
    forward(linear, 1, tokens=0)[0].backward()
    if row.delay:
        linear.backward_dw()
    expected = torch.full_like(linear.weight.main_grad, 0.0 if row.overwrite else FILL)
    if not torch.equal(linear.weight.main_grad, expected):
        yield "main_grad is wrong after a call without rows"


def check_fetched(library: Library, row: Row) -> Iterator[str]:
    """A sharded weight: main_grad is fetched for each gradient, never in forward; an older main_grad is not used."""
    linear = library.prepared(row)
    weight, buffers, calls = linear.weight, [], []
    weight.__fsdp_param__ = True
    weight.get_main_grad = lambda: (calls.append(1), buffers[-1])[1]
    for seed in (1, 2):
        buffers.append(old_value(weight, row))
        calls.clear()
        loss, dw = forward(linear, seed)
        if calls:
            yield "get_main_grad() is called in forward"
        loss.backward()
        if row.delay:
            linear.backward_dw()
        if not close(buffers[-1], dw if row.overwrite else dw + FILL):
            yield "the tensor of get_main_grad() did not get the gradient"


def check_zero_dummy(library: Library, row: Row) -> Iterator[str]:
    """With zero_out_wgrad the dummy is zero, every time."""
    for _ in range(2):
        linear = library.prepared(row)
        linear.weight.zero_out_wgrad = True
        forward(linear, 1)[0].backward()
        if linear.weight.grad is None or linear.weight.grad.any():
            yield "the dummy is not zero"
        else:
            linear.weight.grad.fill_(7)  # a shared dummy must be cleared again


def check_rejected(library: Library, row: Row) -> Iterator[str]:
    """A main_grad that is missing, too small or not contiguous raises instead of losing the gradient."""
    wrong = {"missing": None, "too small": torch.zeros(OUT, IN - 1), "not contiguous": torch.zeros(IN, OUT).t()}
    for what, main_grad in wrong.items():
        linear = library.prepared(row)
        del linear.weight.main_grad
        if main_grad is not None:
            linear.weight.main_grad = main_grad.to(linear.weight.device)
        loss, _ = forward(linear, 1)
        try:
            loss.backward()
        except Exception:  # whatever the library raises
            continue
        yield f"a main_grad that is {what} raises no error in backward"


def checks(library: Library) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each check and what is wrong."""
    for row in ROWS:
        yield f"{row}: one backward", run(check_row, library, row)
        yield f"{row}: three micro-batches", run(check_micro_batches, library, row)
        yield f"{row}: used twice in a backward", run(check_used_twice, library, row)
        if row.delay:
            yield f"{row}: two pending backwards", run(check_pending, library, row)
    for row in MAIN_GRAD_ROWS:
        yield f"{row}: no rows", run(check_no_rows, library, row)
        yield f"{row}: get_main_grad()", run(check_fetched, library, row)
    for row in ROWS:
        yield f"{row}: frozen weight", run(check_frozen, library, row)
    for row in MAIN_GRAD_ROWS:
        if row.flag:
            yield f"{row}: zero_out_wgrad", run(check_zero_dummy, library, row)
        yield f"{row}: wrong main_grad", run(check_rejected, library, row)


def run(check: Callable[[Library, Row], Iterator[str]], library: Library, row: Row) -> list[str]:
    try:
        return list(check(library, row))
    except Exception as error:  # a check that cannot run has failed
        return [f"{type(error).__name__}: {error}"]


def load(name: str) -> Callable[..., torch.nn.Module]:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("linear", help="module:name")
    parser.add_argument("--accumulate", default="accumulate_into_main_grad", help="name of the option")
    parser.add_argument("--delay", default="delay_wgrad_compute", help="name of the option")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    sys.path.insert(0, "")
    torch.manual_seed(0)
    report = dict(checks(Library(load(arguments.linear), arguments.accumulate, arguments.delay)))
    for name, wrong in report.items():
        print(f"{'failed' if wrong else 'passed'}  {name}" + "".join(f"\n        {text}" for text in wrong))
    failed = sum(bool(wrong) for wrong in report.values())
    print(f"{arguments.linear}: {len(report) - failed} of {len(report)} checks passed")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
