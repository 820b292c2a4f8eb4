"""The command line, ``torchweft`` or ``python -m torchweft``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torchweft

from ..convert.__main__ import ignore_closed_pipe
from ..convert.__main__ import main as run_convert
from ._bench import add_bench
from ._error import CommandParser, describe
from ._explain import add_explain
from ._info import add_info

_EPILOG = """examples:
  torchweft info                                                 what this machine has, and what is slow on it
  torchweft explain 'torchweft.ops:Linear(256, 1024)' --shape 64,256  the plan of a call
  torchweft bench                                                weft, eager and torch.compile on this machine
  torchweft convert inspect checkpoint/iter_0000100              convert, inspect and compare checkpoints
"""


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="torchweft",
        description="Fused transformer operations on CPUs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torchweft {torchweft.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_info, add_explain, add_bench):
        add(commands)
    # Its arguments are parsed by torchweft.convert.
    commands.add_parser("convert", help="convert, inspect and compare checkpoints", add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command.

    Args:
        argv: the arguments; those of the process by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["convert"]:
        run_convert(arguments[1:], "torchweft convert")
        return
    parsed = make_parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except BrokenPipeError:  # the reader closed the pipe, e.g. head
        ignore_closed_pipe()
    except KeyboardInterrupt:
        sys.exit(f"torchweft {parsed.command}: interrupted")
    except Exception as error:
        sys.exit(f"torchweft {parsed.command}: {describe(error)}")
