"""``python -m torchweft.device [options] (script.py | -m module) [arguments]``: see ``--help``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from ._simulate import VARIABLES, from_environment


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torchweft.device",
        usage="%(prog)s [options] (script.py | -m module) [arguments]",
        description="Runs a script or a module with simulated CUDA devices.",
        allow_abbrev=False,
    )
    for option, default, what in (
        ("devices", "1", "how many"),
        ("capability", "9.0", "their compute capability"),
        ("memory", "80GiB", "the memory of each"),
    ):
        given = os.environ.get(VARIABLES[option], default)
        parser.add_argument(f"--{option}", default=given, help=f"{what} ({default}; or set {VARIABLES[option]})")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.program:
        parser.error("expected a script, or -m and a module")
    os.environ.update({variable: getattr(arguments, option) for option, variable in VARIABLES.items()})
    try:
        from_environment()
    except ValueError as error:
        parser.error(str(error))
    sys.argv = arguments.program
    if arguments.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments.program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments.program[0]))
        runpy.run_path(arguments.program[0], run_name="__main__")


if __name__ == "__main__":
    main()
