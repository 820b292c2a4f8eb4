"""``python -m weft.compat [--high-precision] [--replace] [--megatron] script.py …`` runs a script with
`transformer_engine` as weft; ``-m package.module …`` instead of the script runs a module."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from . import megatron, transformer_engine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m weft.compat", description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--high-precision", action="store_true", help="run quantized regions unquantized")
    parser.add_argument("--replace", action="store_true", help="stand in even where the real package is installed")
    parser.add_argument("--megatron", action="store_true", help="let megatron-core compute on the CPU as well")
    parser.add_argument("-m", dest="module", action="store_true", help="what follows is a module, not a file")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = os.getcwd() if args.module else os.path.dirname(os.path.abspath(args.script))
    recipes = "high_precision" if args.high_precision else None
    try:
        (megatron if args.megatron else transformer_engine).install(recipes=recipes, replace=args.replace)
    except ImportError as error:
        hint = " Here that is --replace." if "replace=True" in str(error) else ""
        sys.exit(f"python -m weft.compat: {error}{hint}")
    if args.module:
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    main()
