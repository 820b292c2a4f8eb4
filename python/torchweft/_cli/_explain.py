"""``torchweft explain``: the plan of a call of a module that is named on the command line."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

import torchweft

from ._error import CommandError, describe

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def add_explain(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="the plan of a call: which fusions run, and why others do not",
        description="Explains the plan of a call with random inputs.",
        epilog="example: torchweft explain 'torchweft.ops:Linear(256, 1024)' --shape 64,256 --save plan.svg",
    )
    parser.add_argument(
        "object",
        metavar="MODULE:OBJECT",
        help="a module, or a function or class that returns one, in a Python module or a file; may have arguments that "
        "are literals: 'train.py:Block(256)'",
    )
    parser.add_argument(
        "--shape",
        action="append",
        required=True,
        type=_parse_shape,
        metavar="N,N,…",
        help="of an input; once per input",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="of the inputs; default: that of the module's Parameters")
    parser.add_argument("--no-grad", action="store_true", help="explain a call without gradients")
    parser.add_argument("--save", metavar="FILE", help="also draw the plan: .svg, .png, .pdf or .dot")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _parse_shape(text: str) -> tuple[tuple[int, ...], bool]:
    """Returns the sizes of an input, and whether it holds integers."""
    sizes, _, dtype = text.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = (-1,)
    if any(not 0 <= size < 1 << 63 for size in shape) or dtype not in ("", "int64"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; expected sizes such as 64,256 or 64:int64")
    return shape, dtype == "int64"


def _make_input(shape: tuple[int, ...], integers: bool, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    try:
        if integers:
            return torch.zeros(shape, dtype=torch.int64)
        return torch.randn(shape).to(dtype).requires_grad_(requires_grad)
    except RuntimeError as error:
        raise CommandError(f"cannot create an input of shape {list(shape)} and {dtype}: {describe(error)}") from None


def run(arguments: argparse.Namespace) -> None:
    paths = sys.path[:]
    try:
        _run(arguments)
    finally:
        sys.path[:] = paths  # `load` extends it, for what the object imports now or in its calls


def _run(arguments: argparse.Namespace) -> None:
    module = load(arguments.object)
    first = next(module.parameters(), torch.empty(0))
    dtype = _DTYPES[arguments.dtype] if arguments.dtype else first.dtype
    with torch.set_grad_enabled(not arguments.no_grad):
        inputs = [_make_input(shape, integers, dtype, not arguments.no_grad) for shape, integers in arguments.shape]
        explanation = torchweft.explain(module, *inputs)
    print(json.dumps(explanation.data, indent=1, default=str) if arguments.json else explanation)
    if arguments.save:
        explanation.save(arguments.save)


def load(text: str) -> torch.nn.Module:
    """Returns the module that `MODULE:OBJECT` names; an object that is not a module is called."""
    module, colon, expression = text.partition(":")
    if not colon or not module or not expression:
        example = "torchweft.ops:Linear(256, 1024)"
        raise CommandError(f"{text!r} names no object; expected MODULE:OBJECT, such as '{example}'.")
    name, arguments, keywords = _parse_call(expression)
    found: Any = _import(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise CommandError(f"{module} has no {name!r}.")
        found = getattr(found, part)
    if arguments is not None or (callable(found) and not isinstance(found, torch.nn.Module)):
        try:
            found = found(*arguments or (), **keywords)
        except (Exception, SystemExit) as error:
            raise CommandError(f"{text!r} failed: {describe(error)}") from None
    if not isinstance(found, torch.nn.Module):
        raise CommandError(f"{text!r} is {type(found).__name__}, expected a torch.nn.Module or what returns one.")
    return found


def _parse_call(expression: str) -> tuple[str, list[Any] | None, dict[str, Any]]:
    """Returns the name of an object and its arguments, which are literals; None for an object that is not called."""
    try:
        tree = ast.parse(expression, mode="eval").body
        call = tree if isinstance(tree, ast.Call) else None
        name = ast.unparse(call.func if call else tree)
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(name)
        if call is None:
            return name, None, {}
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if None in keywords:
            raise ValueError("**")
        arguments = [ast.literal_eval(argument) for argument in call.args]
        return name, arguments, {str(key): value for key, value in keywords.items()}
    except (SyntaxError, ValueError) as error:
        raise CommandError(
            f"{expression!r} is not a name, optionally with literals as arguments: 'Block(256)'."
        ) from error


def _import(name: str) -> Any:
    """Imports a module by its name, or a file by its path."""
    try:
        if not name.endswith(".py"):
            sys.path.insert(0, os.getcwd())
            return importlib.import_module(name)
        path = Path(name).resolve()
        sys.path.insert(0, str(path.parent))  # for what the file imports
        spec = spec_from_file_location("_weft_explain_" + re.sub(r"\W", "_", str(path)), path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        raise CommandError(f"cannot import {name}: {describe(error).rstrip('.')}.") from None
