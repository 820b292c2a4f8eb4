#!/usr/bin/env python3
"""Measures what weft claims, anew, and says which claims hold.

    tools/claims.py core                 every row of the core; exits 0 only if all hold
    tools/claims.py core --row 5 --row 6 these rows
    tools/claims.py core --quick         CI size: minutes
    tools/claims.py core --json FILE     also as JSON
    tools/claims.py kernels              the same for the kernels and fusions
    tools/claims.py parallel             the same for linears over ranks and their communication
    tools/claims.py grouped              the same for groups of rows
    tools/claims.py compat               the same for code written for Transformer Engine

A row is a claim and the commands that show it: tests, a benchmark with a bound, or a script. This file only runs them
and compares. Needs the Python of the environment that has torch; builds what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": "python", "PYTHON": sys.executable}
TIERS = {"amx": "amx_bf16", "avx512": "avx512dq", "avx2": "avx2", "ref": ""}  # and the CPU's flag for it


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in the repository; its output is shown only if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        print(f"---- {' '.join(command)}: exit status {done.returncode}\n{done.stdout[-8000:]}", file=sys.stderr)
    return done


# ---- checks: each returns (measured, holds) when called with `quick` ------------------------------------------------

Check = Callable[[bool], tuple[str, bool]]


def build(preset: str) -> bool:
    """Brings build/<preset> up to date."""
    configure = ["cmake", "--preset", preset, "-DWEFT_TEST_SHARES=OFF"]  # tests are asked for by name
    if not (ROOT / "build" / preset / "CMakeCache.txt").exists():
        configure.append(f"-DPython3_EXECUTABLE={sys.executable}")
    configured = not run(configure).returncode
    return configured and not run(["cmake", "--build", "--preset", preset, "-j", str(os.cpu_count())]).returncode


def pytest(*arguments: str, slow: bool = False, figure: str | None = None) -> Check:
    """Tests by path and -k; with `slow` also those marked so, unless --quick. `figure` is a pattern in their output."""

    def check(quick: bool) -> tuple[str, bool]:
        marks = "slow or not slow" if slow and not quick else "not slow"
        done = run([sys.executable, "-m", "pytest", "-q", "-rP", "-m", marks, *arguments])
        last = done.stdout.rstrip().rpartition("\n")[2]
        counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|errors?|xfailed)", last)}
        measured = ", ".join(f"{count} {word}" for word, count in counts.items()) or "no test ran"
        if figure:
            measured += "".join(f"; {found}" for found in re.findall(figure, done.stdout))
        return measured, not done.returncode and set(counts) == {"passed"}

    return check


def ctest(preset: str, pattern: str = ".") -> Check:
    """C++ tests whose name matches."""

    def check(quick: bool) -> tuple[str, bool]:
        if not build(preset):
            return f"{preset} does not build", False
        labels = ["-LE", "slow"] if quick else []
        done = run(["ctest", "--preset", preset, "-R", pattern, *labels, "--no-tests=error", "-j", str(os.cpu_count())])
        summary = re.search(r"(\d+) tests failed out of (\d+)", done.stdout)
        measured = f"{int(summary[2]) - int(summary[1])} of {summary[2]} passed" if summary else "no test ran"
        return f"C++ ({preset}): {measured}", not done.returncode

    return check


def every_tier(check: Check) -> Check:
    """The same check with each tier of kernels this machine has, forced; with --quick the best and the plainest."""

    def checked(quick: bool) -> tuple[str, bool]:
        flags = Path("/proc/cpuinfo").read_text().split()
        tiers = [tier for tier, flag in TIERS.items() if flag in (*flags, "")]
        found = []
        for tier in (tiers[0], tiers[-1]) if quick else tiers:
            before = dict(ENVIRONMENT)
            ENVIRONMENT["WEFT_TIER"] = tier
            found.append((tier, *check(quick)))
            ENVIRONMENT.pop("WEFT_TIER")
            ENVIRONMENT.update(before)
        return "; ".join(f"{tier}: {measured}" for tier, measured, _ in found), all(holds for *_, holds in found)

    return checked


def rows_of(*command: str) -> tuple[list[dict], bool]:
    """The rows that a benchmark, a script or a program, writes with --json, and whether it ended well."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        runner = [sys.executable] if command[0].endswith(".py") else []
        done = run([*runner, *command, "--json", str(out)])
        content = json.loads(out.read_text()) if out.exists() else []
        return (content if isinstance(content, list) else content["rows"]), not done.returncode


def instructions_at_most(bounds: dict[str, int]) -> Check:
    """Instructions of one forward and backward pass of benchmarks/framework_cost.py."""

    def check(quick: bool) -> tuple[str, bool]:
        if not build("release"):
            return "release does not build", False
        counts = {row["problem"]: row["weft"] for row in rows_of("benchmarks/framework_cost.py", *bounds)[0]}
        measured = ", ".join(f"{name} {count / 1000:.1f}k" for name, count in counts.items())
        return measured, set(counts) == set(bounds) and all(counts[name] <= bounds[name] for name in bounds)

    return check


def suite(file: str, quick_only: str, threads: tuple[int, ...] = (1,)) -> Check:
    """The problems of a file, timed by weft_bench, which holds each to the bound in its line. With --quick only lines
    that contain `quick_only`."""

    def check(quick: bool) -> tuple[str, bool]:
        if not build("release"):
            return "release does not build", False
        words, fine = [], True
        for count in threads:
            only = ["--rounds", "9", "--only", quick_only] if quick else []
            command = ["build/release/weft_bench", "suite", "--time", "--threads", str(count), *only]
            rows, well = rows_of(*command, f"benchmarks/problems/{file}.txt")
            fine = fine and well and bool(rows)
            words += [in_words(row, several=len(threads) > 1) for row in rows]
        return ", ".join(words), fine

    return check


def sweep(shapes: int, quick_shapes: int) -> Check:
    """Random shapes by `weft_bench sweep`; with --quick fewer and smaller ones."""

    def check(quick: bool) -> tuple[str, bool]:
        if not build("release"):
            return "release does not build", False
        how_many = ["--shapes", str(quick_shapes), "--flop", "1e9"] if quick else ["--shapes", str(shapes)]
        rows, well = rows_of("build/release/weft_bench", "sweep", *how_many)
        slower = [f"{row['rule']} {row['m']}x{row['h']}x{row['f']} {row['ratio']:.2f}" for row in rows if row["slower"]]
        return f"{len(rows)} shapes, {len(slower)} slower {', '.join(slower)}".rstrip(), well and bool(rows)

    return check


def in_words(row: dict, several: bool) -> str:
    """A problem without its bound, and the figure that the bound is about."""
    bound = row["target"]
    (ratio,) = (peer["ratio"] for peer in row["versus"] if peer["against"] == bound["against"])
    fields = " ".join(word for word in row["problem"].split() if not word.startswith(("at_", "against=")))
    where = f" on {row['threads']}" if several else ""
    return f"{fields}{where}: {1 / ratio if bound['inverse'] else ratio:.2f}{'' if bound['holds'] else ' (!)'}"


def block(*arguments: str) -> Check:
    """benchmarks/python/block.py, which holds its figures to bounds of its own."""

    def check(quick: bool) -> tuple[str, bool]:
        if not build("release"):
            return "release does not build", False
        small = ["--quick", "--rounds", "9"] if quick else []
        rows, well = rows_of("benchmarks/python/block.py", *small, *arguments)
        words = []
        for row in rows:
            figures = {name: peer["ratio"] for name, peer in row["versus"].items()} if "versus" in row else row
            shown = {name: value for name, value in figures.items() if isinstance(value, float)}
            words.append(f"{row['problem']}: " + ", ".join(f"{name} {value:.2f}" for name, value in shown.items()))
        return "; ".join(words), well and bool(rows)

    return check


def instructions(bound: float) -> Check:
    """Ratios of benchmarks/framework_cost.py against the bound and, by its own gate, against the stored ones."""

    def check(quick: bool) -> tuple[str, bool]:
        if not build("release"):
            return "release does not build", False
        rows, gate = rows_of("benchmarks/framework_cost.py", "--gate")
        measured = ", ".join(f"{row['problem']} {row['ratio']:.3f}" for row in rows)
        return measured, gate and bool(rows) and all(row["ratio"] <= bound for row in rows)

    return check


def times(bounds: dict[str, float]) -> Check:
    """Ratios of benchmarks/python/framework.py. One is over its bound if the lower end of its interval is, twice."""

    def check(quick: bool) -> tuple[str, bool]:
        found, over = {}, list(bounds)
        for _ in range(2):
            for row in rows_of("benchmarks/python/framework.py", *over)[0] if over else []:
                found[row["problem"]] = row
            over = [name for name in bounds if name not in found or found[name]["interval"][0] > bounds[name]]
        measured = ", ".join(f"{name} {row['ratio']:.2f}" for name, row in found.items())
        return measured, not over

    return check


def script(*command: str, figure: str, if_quick: tuple[str, ...] = ()) -> Check:
    """A command that must end with status 0; `figure` is a pattern in its output. `if_quick`: more words if --quick."""

    def check(quick: bool) -> tuple[str, bool]:
        done = run([*command, *(if_quick if quick else ())])
        return "; ".join(re.findall(figure, done.stdout)) or f"exit status {done.returncode}", not done.returncode

    return check


def program(*arguments: str, figure: str, if_quick: tuple[str, ...] = ()) -> Check:
    """A subcommand of weft_bench that must end with status 0."""

    def check(quick: bool) -> tuple[str, bool]:
        if not build("release"):
            return "release does not build", False
        done = run(["build/release/weft_bench", *arguments, *(if_quick if quick else ())])
        found = re.findall(figure, done.stdout)
        words = (" ".join(part for part in match if part) if isinstance(match, tuple) else match for match in found)
        return "; ".join(words) or f"exit status {done.returncode}", not done.returncode

    return check


def files_of(word: str, folder: str, count: int) -> Check:
    """Code, build and generic tests know this word in `count` files of a folder and nowhere else."""

    def check(quick: bool) -> tuple[str, bool]:
        places = ["weft", "python", "tests/cpp", "tests/python", "CMakeLists.txt", "pyproject.toml"]
        found = run(["git", "grep", "-il", word, "--", *places]).stdout.split()
        inside = [path for path in found if path.startswith(folder)]
        return f"{len(inside)} new, {len(found) - len(inside)} edited", len(inside) == len(found) == count

    return check


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    number: int
    claim: str
    checks: tuple[Check, ...]


ALONE = {f"{name} alone": 1.05 for name in ("Linear", "GELU", "LayerNorm", "RMSNorm")}
HABITS = "checkpointing or saved_tensor or save_on_cpu or assigned"

CLAIMS = {
    "core": (
        Row(1, "every op: fp64 gradcheck; fp32, bf16, fp16 near fp64; from Python and from C++",
            (pytest("tests/python/test_every_op.py"), ctest("release", r"^EveryOp\."))),
        Row(2, "random pipelines equal plain autograd: 2,000 (200 in CI)",
            (pytest("tests/python/test_random_pipelines.py", slow=True, figure=r"\d+ pipelines, \d+ wrong"),)),
        Row(3, "every rough edge has the right behaviour",
            (pytest("tests/python/test_rough_edges.py"),)),
        Row(4, "an unchanged call plans nothing, a changed one is never stale",
            (pytest("tests/python/test_plans.py"),)),
        Row(5, "C++ framework cost, instructions / by hand: <= 1.10",
            (instructions(1.10),)),
        Row(6, "from Python / eager: Linear-GELU-Linear <= 0.70, one op alone <= 1.05",
            (times({"Linear-GELU-Linear": 0.70, **ALONE}),)),
        Row(7, "resident size after 1,000 steps is that after 100, within 1 %",
            (pytest("tests/python/test_memory.py", figure=r"resident [^\n]*"),)),
        Row(8, "FSDP2, DDP, checkpointing, offload hooks, assigned state: gradients equal the plain ones",
            (pytest("tests/dist/test_data_parallel.py"), pytest("tests/python/test_habits.py", "-k", HABITS))),
        Row(9, "an outside C++ project trains; a fresh environment runs the README",
            (script("bash", "tests/wheel_test.sh", figure=r"outside: [^\n]*|wheel: all passed"),)),
        Row(10, "clean under ASan and UBSan; unsupported transforms raise or are right",
            (ctest("asan"), pytest("tests/python/test_transforms.py"))),
        Row(11, "one more op: 2 new files, 0 edited",
            (files_of("soft_*cap", "weft/ops/", 2),)),
    ),
    "kernels": (
        Row(1, "every rule takes its sample, equals its parts in values and gradients, fits any backward; every tier",
            (every_tier(ctest("release", r"EveryRule|^Fusions")), every_tier(pytest("tests/python/test_fusions.py")))),
        Row(2, "linear+add backward accumulates into a residual gradient nobody else reads: 0 temporaries of its size",
            (pytest("tests/python/test_fusions.py", "-k", "linear_add", figure=r"temporaries [^\n]*"),)),
        Row(3, "every row of the weight-gradient contract, for Linear and each fusion with one, from Python and C++",
            (pytest("tests/python/test_wgrad.py"), ctest("release", r"^Wgrad"))),
        Row(4, "linear+bias+GELU / bare mm_out: <= 0.80 with the pre-activation stored, <= 0.68 without",
            (suite("linear_gelu", quick_only="m=512"),)),
        Row(5, "at::mm / weft: K <= 1024 >= 1.6, K = 4096 >= 1.45, dgrad >= 1.5; changed weights are never missed",
            (suite("gemm", quick_only="m=512"), pytest("tests/python/test_packed_weights.py"))),
        Row(6, "mm + add_ / weight gradient into float32 main_grad: >= 2.3; dy handed over in tiles: >= 2.8",
            (suite("wgrad", quick_only="m=256"),)),
        Row(7, "block forward+backward / its six bare products <= 0.70, and ahead of eager and torch.compile",
            (block(),)),
        Row(8, "bytes saved for backward by the block / eager's: <= 0.5",
            (block("--memory"),)),
        Row(9, "five-op pipeline on 8x8, forward+backward: <= 130k instructions",
            (instructions_at_most({"five": 130_000}),)),
        Row(10, "no shape of 200 (12 in CI) where a fused plan is more than 2 % slower than the plan without the rule",
            (sweep(shapes=200, quick_shapes=12),)),
        Row(11, "error of fused bf16 and fp16 results and gradients against float64 / eager's: <= 1.02",
            (pytest("tests/python/test_numerics_low.py"),)),
        Row(12, "one and two threads; bf16 as above, fp16 and fp32 not behind eager",
            (suite("precisions", quick_only="linear_gelu", threads=(1, 2)),)),
    ),
    "parallel": (
        Row(1, "every mode, sequence parallel or not, bias, 1 to 4 ranks: values and gradients of one process, fp64",
            (ctest("release", r"Parallel|^Group"), pytest("tests/dist/test_tensor_parallel.py"))),
        Row(2, "overlapped equals plain: both transports, every kind of linear, rows that change every step",
            (pytest("tests/dist/test_overlap.py", figure=r"\d+ tensors compared [^\n]*"),
             ctest("release", r"Overlap|Pieces|Schedule"))),
        Row(3, "two blocks with TP 2 and sequence parallelism train 300 steps (20 in CI) as one process does",
            (pytest("tests/dist/test_training.py", slow=True),)),
        Row(4, "shared memory, schedule / product alone: gather <= 1.02, scatter <= 1.03 (1.10 at 128 rows)",
            (program("overlap", "benchmarks/problems/overlap.txt", if_quick=("--rounds", "7", "--only", "t=512"),
                     figure=r"(?m)^(\S+ t=\d+ k=\d+ n=\d+(?: placed=1)?).*?(?:\n +.*?)?(\d\.\d+) \["),
             program("signals", figure=r"(?m)^.*µs.*$"))),
        Row(5, "two namespaces over UCX at balance: time / max(product, blocks) <= 1.10 at 0.3 and 1 Gb/s",
            (script(sys.executable, "benchmarks/network.py", figure=r"(?m)^ *\d.*Gb/s.*$|skipped: .*",
                    if_quick=("--rates", "1", "--rounds", "5")),)),
        Row(6, "what the planner chooses / the plain path, few rows and many, several rates: <= 1.02",
            (script(sys.executable, "benchmarks/python/parallel.py", "--planner", figure=r"(?m)^.*planned / plain.*$",
                    if_quick=("--quick",)),)),
        Row(7, "a block's training step against Gloo's plain collectives: reported",
            (script(sys.executable, "benchmarks/python/parallel.py", figure=r"(?m)^.*overlapped / plain.*$",
                    if_quick=("--quick",)),)),
        Row(8, "a rank killed or stopped: every survivor raises in time; main_grad whole, flags true to it",
            (pytest("tests/dist/test_failures.py", "-k", "survivor or hundred or left", slow=True),
             pytest("tests/dist/test_shared_link.py", "-k", "survivor or drills", slow=True),
             pytest("tests/dist/test_ucx.py", "-k", "survivors or dies"))),
        Row(9, "ranks that disagree, full memory, other users and jobs: an error on every rank, no abort",
            (pytest("tests/dist/test_failures.py", "-k", "disagree"),
             pytest("tests/dist/test_shared_link.py", "-k", "not survivor and not drills"),
             script(sys.executable, "benchmarks/python/parallel.py", "--check-cost", figure=r"(?m)^.*WEFT_CHECK.*$"))),
        Row(10, "ranks as threads under the thread sanitizer: clean, and a planted race found 10 of 10",
            (ctest("tsan-comm"), script("bash", "tools/planted_race.sh", figure=r"planted race .*"))),
        Row(11, "DeviceMesh groups, DDP around a parallel block, FSDP2 on a 2 x 2 mesh: gradients of one process",
            (pytest("tests/dist/test_tensor_parallel.py", "-k", "mesh or ddp or fsdp or data_parallel"),)),
    ),
    "grouped": (
        Row(1, "grouped linear and MLP, every option: values and gradients of plain float64",
            (pytest("tests/python/test_grouped.py", "tests/python/test_grouped_mlp.py"),
             ctest("release", r"KernelsGrouped"))),
        Row(2, "every row of the weight-gradient contract: grouped linears, both layers of the fused MLP, both layouts",
            (pytest("tests/python/test_grouped_wgrad.py"),)),
        Row(3, "random splits against a loop of plain linears in float64: 5,000 (300 in CI), 0 wrong",
            (pytest("tests/python/test_grouped_random.py", slow=True, figure=r"\d+ cases, \d+ wrong"),)),
        Row(4, "bad splits and buffers raise; rows of no group are 0 in fresh memory, untouched in the caller's",
            (pytest("tests/python/test_grouped.py", "-k", "bad or tail or padded or buffer or alias"),)),
        Row(5, "no split is read outside a kernel: meta device, shut page, replay; each proof fails if one is",
            (every_tier(ctest("release", r"GraphSafety")),)),
        Row(6, "grouped forward / one dense at::mm, rate: 8x128 >= 1.0, 32x32 >= 0.6, 64x8 >= 0.2, Zipf >= 0.8",
            (suite("grouped", quick_only="at_least"),)),
        Row(7, "grouped SwiGLU MLP into main_grad, eager loop / weft and _grouped_mm / weft: >= 3",
            (script(sys.executable, "benchmarks/python/grouped.py", figure=r"(?m)^.*/ weft.*$",
                    if_quick=("--quick",)),)),
        Row(8, "64 tiny experts, a step: <= 100 µs with packed weights, <= 1.15 of a bare node with 128 Parameters",
            (script(sys.executable, "benchmarks/python/grouped.py", "--host", figure=r"(?m)^.*µs.*$"),)),
        Row(9, "the mixture of experts trains; 2 and 4 ranks equal one process",
            (pytest("tests/dist/test_moe.py"),)),
        Row(10, "peak memory of a step / eager's: <= 0.6; allocations do not grow with experts",
            (script(sys.executable, "benchmarks/python/grouped.py", "--memory",
                    figure=r"(?m)^.*(?:peak|allocations).*$", if_quick=("--quick",)),)),
    ),
    "compat": (
        Row(1, "unmodified megatron-core, TP 1, 2, 2 + SP, op fuser and fused accumulation on, off: one rank's <= 1e-5",
            (pytest("tests/dist/test_megatron.py", "-k", "one_rank or limits", figure=r"off one rank .*"),)),
        Row(2, "a GPTModel, TP 2 + SP, 50 steps, saved, goes on at TP 1 with the loss of the uninterrupted run",
            (pytest("tests/dist/test_megatron.py", "-k", "checkpoint", figure=r"loss off .*"),)),
        Row(3, "every unquantized name of the reference's pytorch.ops resolves and behaves; the rest is listed",
            (pytest("tests/python/test_compat.py", "-k", "name or page or megatron"),
             pytest("tests/python/test_every_op.py"))),
        Row(4, "module face: parameter names, shapes, state_dict keys, main_grad handshake, values and gradients",
            (pytest("tests/python/test_compat.py", "-k", "module or attention or layer or permute or router"),
             pytest("tests/dist/test_compat_parallel.py"))),
        Row(5, "a 2 GB checkpoint (CI 0.1) killed half-way, repeated and back: bit-equal, <= 300 MB; read by Megatron",
            (pytest("tests/python/test_convert.py", "tests/dist/test_convert_megatron.py", slow=True,
                    figure=r"[\d.]+ GB, \d+ MB above [^\n]*"),)),
        Row(6, "install(): real package present, twice, after a failed import, in a subprocess, under pytest",
            (pytest("tests/python/test_compat.py", "-k", "install or script or recipes or high_precision"),)),
    ),
}  # fmt: skip


@dataclass
class Result:
    row: int
    claim: str
    measured: str
    holds: bool
    seconds: int


def measure(row: Row, quick: bool) -> Result:
    start = time.monotonic()
    found = [check(quick) for check in row.checks]
    measured, verdicts = zip(*found, strict=True)
    return Result(row.number, row.claim, "; ".join(measured), all(verdicts), round(time.monotonic() - start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CLAIMS)
    parser.add_argument("--row", type=int, action="append", help="only this row; may be repeated")
    parser.add_argument("--quick", action="store_true", help="CI size")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    known = {row.number: row for row in CLAIMS[arguments.name]}
    chosen = arguments.row or list(known)
    if unknown := set(chosen) - set(known):
        parser.error(f"{arguments.name} has rows {min(known)} to {max(known)}, not {sorted(unknown)}")

    print("row | claim | measured | verdict\n--- | --- | --- | ---", flush=True)
    results = []
    for number in chosen:
        result = measure(known[number], arguments.quick)
        results.append(result)
        verdict = "holds" if result.holds else "DOES NOT HOLD"
        print(f"{result.row} | {result.claim} | {result.measured} | {verdict}", flush=True)
    if arguments.json:
        where = {"machine": platform.platform(), "python": platform.python_version(), "quick": arguments.quick}
        arguments.json.write_text(json.dumps({**where, "rows": [asdict(r) for r in results]}, indent=1) + "\n")
    sys.exit(0 if all(result.holds for result in results) else 1)


if __name__ == "__main__":
    main()
