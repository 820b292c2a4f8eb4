"""``python -m torchweft.device [options] (script.py | -m module) [arguments]``: see ``--help``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Mapping

from ._restart import start_again_if_late
from ._simulate import VARIABLES, from_environment


def launch(
    prog: str,
    description: str,
    start: Callable[[], object],
    capability: str = "9.0",
    more: Mapping[str, tuple[str, str, str]] | None = None,
) -> None:
    """Runs the program that the command line names, after `start`. Options become variables of the environment, so that
    the processes that the program starts have them, too. `more`: further options, each with its variable, its default
    and its help."""
    options = {
        "devices": (VARIABLES["devices"], "1", "how many"),
        "capability": (VARIABLES["capability"], capability, "their compute capability"),
        "memory": (VARIABLES["memory"], "80GiB", "the memory of each"),
        **(more or {}),
    }
    usage = "%(prog)s [options] (script.py | -m module) [arguments]"
    parser = argparse.ArgumentParser(prog=prog, usage=usage, description=description, allow_abbrev=False)
    for option, (variable, default, what) in options.items():
        given = os.environ.get(variable, default)
        parser.add_argument(f"--{option}", default=given, help=f"{what} ({default}; or set {variable})")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.program:
        parser.error("expected a script, or -m and a module")
    os.environ.update({variable: getattr(arguments, option) for option, (variable, *_) in options.items()})
    try:
        start_again_if_late(start, sys.orig_argv)
    except (ValueError, ImportError, RuntimeError) as error:
        parser.error(str(error))
    sys.argv = arguments.program
    if arguments.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments.program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments.program[0]))
        runpy.run_path(arguments.program[0], run_name="__main__")


if __name__ == "__main__":
    launch(
        "python -m torchweft.device",
        "Runs a script or a module with simulated CUDA devices.",
        from_environment,
    )
