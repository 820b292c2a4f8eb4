"""Converts checkpoints of Megatron and Transformer Engine to and from safetensors with torch's names.

  python -m torchweft.convert SOURCE TARGET --to safetensors    torch's names: one module per norm and linear
  python -m torchweft.convert SOURCE TARGET --to torch_dist     Megatron's distributed checkpoint, for any group size
  python -m torchweft.convert SOURCE TARGET --to te             names of transformer_engine.pytorch.TransformerLayer
  python -m torchweft.convert SOURCE TARGET --to pt             one file, or mp_rank_XX/model_optim_rng.pt for each rank
  python -m torchweft.convert SOURCE TARGET --to hf             a folder that transformers loads: Llama, GPT-2
  python -m torchweft.convert inspect SOURCE                    list the contents of a checkpoint
  python -m torchweft.convert verify TARGET                     compare a converted checkpoint with its report
  python -m torchweft.convert verify ONE OTHER                  compare two checkpoints of any formats
  python -m torchweft.convert names                             print the name table, in the format that --names reads

The format of SOURCE is detected. The target is written to TARGET.partial and renamed when it is complete. A report with
the sha256 of every tensor, conversion.json, is written with it.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Sequence

from . import ConversionError, compare, convert, inspect, verify
from ._convert import SHARD_SIZE, TARGETS
from ._name_table import LAYOUTS, read_names

PROGRAM = "python -m torchweft.convert"


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as 500MB; units are powers of 1000."""
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", text, re.IGNORECASE)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; expected a number such as 500MB or 4GB")
    return int(found[1]) * int(1000 ** " KMGT".index(found[2].upper() or " "))


def convert_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=(__doc__ or "").replace(PROGRAM, program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="a file, a folder, or a folder of iterations")
    parser.add_argument("target", metavar="TARGET", help="a folder, or a file that ends in .safetensors or .pt")
    parser.add_argument("--to", required=True, choices=TARGETS)
    parser.add_argument("--layout", choices=LAYOUTS, help="names to write; default: those of --to")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="write the shards of N ranks")
    parser.add_argument(
        "--unstacked", action="store_true", help="torch_dist: one tensor per layer instead of stacked layers"
    )
    parser.add_argument("--split-qkv", action="store_true", help="write query, key and value as separate matrices")
    parser.add_argument("--heads", type=int, help="attention heads, if the source does not store them")
    parser.add_argument(
        "--groups", type=int, help="query groups, if the source does not store them (default: as many as heads)"
    )
    parser.add_argument("--names", metavar="FILE", help="JSON file with name rules that take precedence over the table")
    parser.add_argument("--strict", action="store_true", help="reject names that match no rule instead of keeping them")
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET when the conversion is complete")
    parser.add_argument(
        "--shard-size",
        type=parse_size,
        default=SHARD_SIZE,
        metavar="SIZE",
        help="maximum size of a file in a folder (4GB)",
    )
    parser.add_argument("--no-check", action="store_true", help="do not verify the checksums in torch's files")
    parser.add_argument("--quiet", action="store_true", help="print no progress and no summary")
    return parser


def run_convert(argv: list[str], program: str) -> None:
    args = vars(convert_parser(program).parse_args(argv))
    args |= {"split": args.pop("split_qkv"), "check": not args.pop("no_check")}
    report = convert(**args)
    if args["quiet"]:
        return
    print(f"{args['target']}: {report['tensors']} tensors, {report['bytes'] / 1e6:.1f} MB")
    reasons: dict[str, list[str]] = {}
    for name, reason in report["skipped"].items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        print(f"skipped {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}")
    if report["unknown"]:
        more = f" and {len(report['unknown']) - 3} more" if report["unknown"][3:] else ""
        replicated = ", replicated on each rank" if args["tensor_parallel"] > 1 else ""
        print(f"matched no rule, names kept{replicated}: {', '.join(report['unknown'][:3])}{more}")


def run_inspect(argv: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(prog=f"{program} inspect")
    parser.add_argument("source", metavar="SOURCE")
    found = inspect(parser.parse_args(argv).source)
    size = f"{found['count']} tensors, {found['bytes'] / 1e6:.1f} MB"
    print(f"{found['format']} with {found['layout']} names: {size}")
    for name, (dtype, shape) in found["tensors"].items():
        print(f"  {name}  {dtype} {shape}")
    for name, size in found["raw"].items():
        print(f"  {name}  {size} bytes, opaque object")
    if found["common"]:
        print(f"  values: {', '.join(found['common'])}")
    for reason in dict.fromkeys(found["skipped"].values()):
        print(f"  {sum(r == reason for r in found['skipped'].values())} entries: {reason}")


def run_verify(argv: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(prog=f"{program} verify")
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("other", metavar="OTHER", nargs="?")
    parser.add_argument("--names", metavar="FILE")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args(argv)
    if args.other is None:
        differences, summary = verify(args.target, quiet=args.quiet), "matches its report"
    else:
        count, differences = compare(args.target, args.other, args.names, quiet=args.quiet)
        summary = f"{count} tensors, all equal"
    print("\n".join(differences) if differences else f"{args.target}: {summary}")
    sys.exit(1 if differences else 0)


def ignore_closed_pipe() -> None:
    """Discards what would be printed when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> None:
    """Runs a command.

    Args:
        argv: the arguments; those of the process by default.
        program: how errors and usage call it.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may contain characters that a terminal cannot show
    commands: dict[str, Callable[[list[str], str], None]]
    commands = {"inspect": run_inspect, "verify": run_verify, "names": lambda *_: print(read_names(None).as_json())}
    try:
        if argv and argv[0] in commands:
            commands[argv[0]](argv[1:], program)
        else:
            run_convert(argv, program)
    except BrokenPipeError:  # the reader closed the pipe, e.g. head
        ignore_closed_pipe()
    except (ConversionError, OSError) as error:
        sys.exit(f"{program}: {error}.")
    except KeyboardInterrupt:
        sys.exit(f"{program}: interrupted; no target was written")


if __name__ == "__main__":
    main()
