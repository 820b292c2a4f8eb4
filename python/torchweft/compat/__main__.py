"""``python -m torchweft.compat [--high-precision] [--replace] script.py …`` runs a script
in which ``import transformer_engine`` resolves to weft. Pass ``-m package.module …`` instead of the script to run a
module."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from . import transformer_engine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torchweft.compat", description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--high-precision", action="store_true", help="run quantized regions unquantized")
    parser.add_argument("--replace", action="store_true", help="replace Transformer Engine even if it is installed")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module instead of a file")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = os.getcwd() if args.module else os.path.dirname(os.path.abspath(args.script))
    recipes = "high_precision" if args.high_precision else None
    try:
        transformer_engine.install(recipes, args.replace)
    except (ImportError, RuntimeError) as error:
        hint = " On the command line, pass --replace." if "replace=True" in str(error) else ""
        sys.exit(f"python -m torchweft.compat: {error}{hint}")
    if args.module:
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    main()
