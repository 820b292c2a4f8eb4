"""The claims of docs/reliability.md: correct results or errors, bounded waits, no aborts, and checks that can fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from checks import (
    ROOT,
    Check,
    Row,
    Settings,
    ctest,
    every_tier,
    figures,
    needs_build,
    pytest,
    rows_of,
    script,
    te_pytest,
    with_te,
)
from verdict import Figure, Outcome, Verdict, join_outcomes, judge_figures, judge_script

SCRIPT_SECONDS = 600  # timeout of a script
CI_MINUTES = 45
MAX_SLOWDOWN = 1.02
FAULTS = 40  # minimum number of planted faults


def at_least(count: int, what: str, check: Check, quick: int = 1) -> Check:
    """Requires a count of `what` in the check's output, such as `100000 fuzzed calls`; fewer are not measured."""

    def checked(settings: Settings) -> Outcome:
        found = check(settings)
        counts = [int(n.replace(",", "")) for n in re.findall(rf"(\d[\d,]*) {what}", found.measured)]
        required = quick if settings.quick else count
        if found.verdict is Verdict.HOLDS and sum(counts) < required:
            return Outcome(f"{found.measured}; {sum(counts)} of {required} {what}", Verdict.NOT_MEASURED)
        return found

    return checked


def counted(count: int, what: str, *arguments: str, quick: int = 1) -> Check:
    """Runs tests that print `<count> <what>…`; at full size also the slow ones."""
    return at_least(count, what, pytest(*arguments, slow=True, figure=rf"\d[\d,]* {what}[^\n]*"), quick)


def sized(full: tuple[str, ...], quick: tuple[str, ...]) -> Check:
    """Runs the tests `full`, or with --quick the tests `quick`."""

    def check(settings: Settings) -> Outcome:
        return pytest(*(quick if settings.quick else full), slow=True)(settings)

    return check


def judge_scripts(statuses: dict[str, int | None]) -> Outcome:
    """Judges the exit statuses by script; None: it timed out."""
    if not statuses:
        return Outcome("no scripts", Verdict.NOT_MEASURED)
    bad = [f"{name}: {'did not end' if s is None else f'status {s}'}" for name, s in statuses.items() if s != 0]
    words = ", ".join([f"{len(statuses) - len(bad)} of {len(statuses)} scripts end with status 0", *bad])
    return Outcome(words, Verdict.MISSED if bad else Verdict.HOLDS)


# Scripts that attack code written for Transformer Engine run on the real package, whose devices are simulated.
INSTALL = 'import torchweft.te; torchweft.te.install(); import torch; torch.set_default_device("cuda")'
REAL_PACKAGE = (  # what is replaced, and by what
    (r"from torchweft\.compat import transformer_engine\ntransformer_engine\.install\(\)", INSTALL),
    (r"import torchweft\.compat\.transformer_engine as compat\ncompat\.install\(\)", INSTALL),
    (r"torch\.Generator\(\)", 'torch.Generator("cuda")'),
    (r'torch\.autocast\("cpu"', 'torch.autocast("cuda"'),
    (r"\bweft\.recipe\.", "__import__('transformer_engine').common.recipe."),
)
NOT_RUN = {  # script: why
    "stale_after_fused_step": "is_first_microbatch=False means the older quantized weight in Transformer Engine",
    "uninstall_third_party": "what it attacks is removed",
}


def on_real_package(text: str) -> str:
    for pattern, replacement in REAL_PACKAGE:
        text = re.sub(pattern, replacement, text)
    return text


def defect_scripts(settings: Settings) -> Outcome:
    """Runs every script in the folder given by --defects."""
    folder = settings.defects
    if folder is None or not Path(folder).is_dir():
        why = "--defects not given" if folder is None else f"no folder {folder}"
        return Outcome(f"scripts skipped: {why}", Verdict.NOT_MEASURED)
    statuses: dict[str, int | None] = {}
    for path in sorted(Path(folder).resolve().glob("*.py")):
        if path.stem in NOT_RUN:
            continue
        try:
            text = path.read_text()
            if "torchweft.compat" in text:
                done = with_te(settings).run([sys.executable, "-c", on_real_package(text)], timeout=SCRIPT_SECONDS)
            else:
                done = settings.run([sys.executable, str(path)], timeout=SCRIPT_SECONDS)
        except subprocess.TimeoutExpired:
            statuses[path.stem] = None
            continue
        statuses[path.stem] = done.returncode
    outcome = judge_scripts(statuses)
    left_out = [f"not run: {name}, {why}" for name, why in NOT_RUN.items() if (Path(folder) / f"{name}.py").exists()]
    return replace(outcome, measured="; ".join([outcome.measured, *left_out]))


def judge_planted(output: str, status: int, quick: bool) -> Outcome:
    """All planted faults must be found; at full size there must be at least FAULTS."""
    outcome = judge_script(output, status, r"\d+ of \d+ (?:planted faults )?killed")
    found = re.search(r"(\d+) of (\d+) (?:planted faults )?killed", output)
    if found and int(found[1]) < int(found[2]):
        return Outcome(outcome.measured, Verdict.MISSED)
    if found and not quick and int(found[2]) < FAULTS:
        return Outcome(f"{outcome.measured}; fewer than {FAULTS} planted", Verdict.NOT_MEASURED)
    return outcome


def planted_faults(settings: Settings) -> Outcome:
    tool = ROOT / "tools/planted_faults.py"
    if not tool.exists():
        return Outcome(f"skipped: no {tool.relative_to(ROOT)}", Verdict.NOT_MEASURED)
    done = settings.run([sys.executable, str(tool), *(["--quick"] if settings.quick else [])])
    return judge_planted(done.stdout, done.returncode, settings.quick)


def old_program(old: Path) -> Path:
    """Returns weft_bench of the build to compare with."""
    return old / "weft_bench" if old.is_dir() else ROOT / "build/release/weft_bench"


def framework_cost(settings: Settings) -> Outcome:
    """Compares the instructions of weft's pipelines in this build with those of the old one."""
    if settings.old is None:
        return Outcome("framework cost skipped: --old not given", Verdict.NOT_MEASURED)
    old = Path(settings.old).resolve()
    library = old / "libweft.so" if old.is_dir() else old
    words = ["--driver", str(old_program(old)), "--library", str(library)]
    before = {row["problem"]: row["weft"] for row in rows_of(settings, "benchmarks/framework_cost.py", *words)[0]}
    after = {row["problem"]: row["weft"] for row in rows_of(settings, "benchmarks/framework_cost.py")[0]}
    found = [
        Figure(f"{name} new / old", round(after[name] / before[name], 4), at_most=MAX_SLOWDOWN, exact=True)
        for name in after
        if name in before
    ]
    return judge_figures(found, expected=2)


def kernel_times(settings: Settings) -> Outcome:
    if settings.old is None:
        return Outcome("kernel times skipped: --old not given", Verdict.NOT_MEASURED)
    command = ["benchmarks/old_against_new.py", "--old", str(Path(settings.old).resolve())]
    return figures(*command, if_quick=("--quick",))(settings)


def judge_ci(last: dict | None) -> Outcome:
    """Judges the record of the last .ci/run."""
    if last is None:
        return Outcome("skipped: .ci/run has not run here", Verdict.NOT_MEASURED)
    words = f"{last['seconds'] / 60:.1f} minutes, {last['status']}, {'cold' if last['cold'] else 'not cold'}"
    if not last["cold"] or last["status"] != "passed":
        return Outcome(words, Verdict.NOT_MEASURED)
    return Outcome(words, Verdict.HOLDS if last["seconds"] <= 60 * CI_MINUTES else Verdict.MISSED)


def ci_time(settings: Settings) -> Outcome:
    log = ROOT / "build/ci/last.json"
    return judge_ci(json.loads(log.read_text()) if log.exists() else None)


# For each script of --defects, by its name or the part of it before the first `_`: the tests of its class of defects.
# The class of a script without an entry is not measured.
PACKED = ctest("release", r"^KernelsPack|^PackedWeights")
ATTACKS = te_pytest("tests/te/test_user_code.py")
CHANGES = pytest("tests/python/test_right_or_raises.py")
DISPATCHER = pytest("tests/python/test_dispatcher.py")
CLASS_TESTS: dict[str, Check] = {
    **dict.fromkeys(("d1", "d1b"), PACKED),
    **dict.fromkeys(("u1", "d2", "d2b", "d2c", "d3", "d3b", "d3c", "d4", "d4b", "d5", "d6", "d7", "d8", "t1"), CHANGES),
    **dict.fromkeys(("e1", "e2", "e3", "e5", "e6", "r1"), DISPATCHER),
    **dict.fromkeys(("t2", "t3", "t4", "t5", "te"), ATTACKS),
    "e4": pytest("tests/python/test_state_keys.py"),
    "e7": pytest("tests/dist/test_main_grad.py"),
    "autocast": pytest("tests/python/test_recipes.py"),
    "delayed": pytest("tests/python/test_delayed_scaling.py", "tests/python/test_extra_state.py"),
    "fusedadam": pytest("tests/python/test_optim.py"),
    "inspector": pytest("tests/python/test_inspector.py"),
    "nan_query": pytest("tests/python/test_attention.py", "-k", "nan_scores"),
    "reentrant_dropout_nvfp4": pytest("tests/python/test_random_draws.py"),
}


def classes_of(names: Iterable[str], known: Mapping[str, Check]) -> tuple[list[str], list[Check]]:
    """Returns the scripts without an entry, and the checks of the others, each once."""
    keys = [name if name in known else name.partition("_")[0] for name in names]
    checks = dict.fromkeys(known[key] for key in keys if key in known)
    return [key for key in keys if key not in known], list(checks)


def class_tests(settings: Settings) -> Outcome:
    """Runs the tests of the class of each script; without --defects those of all classes."""
    folder = settings.defects
    found = [path.stem for path in Path(folder).glob("*.py")] if folder else CLASS_TESTS
    names = sorted(set(found) - NOT_RUN.keys())
    missing, known = classes_of(names, CLASS_TESTS)
    outcomes = [check(settings) for check in known]
    if missing or not outcomes:
        outcomes.append(Outcome(f"no class test named for {', '.join(missing) or 'any'}", Verdict.NOT_MEASURED))
    return join_outcomes(outcomes)


STATES = "tests/python/test_extra_state.py"
RANDOM = "tests/python/test_random_pipelines.py"
MISMATCH, UNTRUSTED = "tests/dist/test_mismatch.py", "tests/python/test_convert_untrusted.py"
FAILURES, SHARED, UCX = "tests/dist/test_failures.py", "tests/dist/test_shm_transport.py", "tests/dist/test_ucx.py"

FUZZED = script("build/asan/weft_tests", "--gtest_filter=FuzzedCalls.*", figure=r"\d+ fuzzed calls.*",
                if_quick=("--gtest_filter=FuzzedCalls.*-*Slow*",))  # fmt: skip

# Rows of the reliability suite. Numbers in parentheses apply to --quick.
RELIABILITY = (
    Row("3.1", "random pipelines of everything, 20,000 in each tier (60), 2,000 compiled: 0 wrong by their rule",
        (every_tier(counted(20_000, "pipelines", RANDOM, "-k", "not compiled", quick=60)),
         sized(full=(RANDOM, "-k", "compiled"), quick=(RANDOM, "-k", "fault")))),
    Row("3.2", "every fused operation against the operations it replaces",
        (ctest("release", r"EveryRule|^Fusions"), pytest("tests/python/test_fusions.py"))),
    Row("3.3", "gradcheck and opcheck for every operation; double backward and jvp raise",
        (pytest("tests/python/test_every_op.py", "tests/python/test_transforms.py", slow=True),
         pytest("tests/python/test_compile.py", "-k", "opcheck or second_derivatives"))),
    Row("3.4", "100,000 fuzzed calls under ASan and UBSan: 0 reports; each succeeds or raises by name",
        (at_least(100_000, "fuzzed calls", needs_build(FUZZED, "asan"), quick=1000),)),
    Row("3.5", "200 bad splits: an error or a defined result; tail rows are 0",
        (counted(200, "bad splits", "tests/python", "-k", "bad_splits", quick=200),)),
    Row("3.6", "thread sanitizer: 10,000 rounds of signals, ranks as threads; a planted race is found 10 of 10",
        (ctest("tsan-comm"), script("bash", "tools/planted_race.sh", figure=r"planted race .*"))),
    Row("3.7", "a rank killed, 200 drills (12): every survivor raises in time and names the rank; 0 hangs",
        (pytest(FAILURES, UCX, "-k", "SIGKILL or hundred or dies", slow=True),
         pytest(SHARED, "-k", "SIGKILL or kill", slow=True))),
    Row("3.8", "the same with a rank that is stopped",
        (pytest(FAILURES, SHARED, UCX, "-k", "SIGSTOP or stop", slow=True),)),
    Row("3.9", "main_grad after each of them: untouched, or with its whole contribution, as its flag says",
        (pytest(FAILURES, "-k", "survivor or main_grad", slow=True),)),
    Row("3.10", "50 mismatches between ranks, every transport: an exception on every rank, 0 aborts",
        (pytest(FAILURES, "-k", "mismatch"), sized(full=(MISMATCH, "-k", "fifty"), quick=(MISMATCH,)))),
    Row("3.11", "100 kills leave no memory and no socket; squatters, other users, wrong descriptors are refused",
        (counted(100, "kills", SHARED, "-k", "leave_nothing", quick=6), ctest("release", r"^HostRendezvous\."),
         pytest(SHARED, "-k", "another_user"))),
    Row("3.12", "full shared memory and memory limits: an error on every rank, 0 SIGBUS",
        (pytest(SHARED, "-k", "memory or limit"),)),
    Row("3.13", "a soak of 1,000 steps (100), 2 ranks: memory and descriptors constant, equal loss bits twice",
        (counted(1000, "steps", "tests/dist", "-k", "soak", quick=100),)),
    Row("3.14", "checkpoints round trip bit-equal; 50 kills during saves; 20,000 mutated blobs: 0 crashes, nothing run",
        (pytest("tests/python/test_checkpoint.py", "tests/python/test_convert.py", slow=True),
         sized(full=(UNTRUSTED, "-k", "conversion_is_killed and 52"), quick=(UNTRUSTED, "-k", "conversion_is_killed")),
         sized(full=(UNTRUSTED, "-k", "mutated_files and 7000"), quick=(UNTRUSTED, "-k", "mutated_files")),
         sized(full=(STATES, "-k", "mutated and 10_000"), quick=(STATES, "-k", "mutated")))),
    Row("3.15", "unmodified megatron-core, TP 1, 2, 2 with sequence parallelism: one rank's loss and norm, <= 1e-5",
        (pytest("tests/dist/test_megatron.py", figure=r"off one rank .*"),)),
)  # fmt: skip

TRUST = (
    Row("1", "every script of --defects ends with status 0, and the tests of their classes pass",
        (needs_build(defect_scripts), class_tests)),
    Row("2", "planted faults found by a test of their own layer: all of 40", (planted_faults,)),
    *RELIABILITY,
    Row("4", "a local stranger at every socket of a training, 60 s (5): right loss; UCX only if trusted",
        (sized(full=("tests/dist", "-k", "attacker and minute"), quick=("tests/dist", "-k", "attacker")),
         pytest("tests/dist", "-k", "trusted"), ctest("release", r"^Transports.*NotTrusted"))),
    Row("5", "framework cost, new / old <= 1.02; kernel times, lower end of the interval <= 1.02",
        (needs_build(framework_cost), needs_build(kernel_times))),
    Row("6", f".ci/run cold: <= {CI_MINUTES} minutes", (ci_time,)),
    Row("7", "our wheel and the other distribution `weft` share no file and no command; ours has no top-level weft",
        (script("bash", "tests/wheel_test.sh", figure=r".*no top-level weft.*"),)),
    Row("8", "no mistake of test_user_mistakes.py is silent: who, what was given, what is expected, the cure",
        (pytest("tests/python/test_user_mistakes.py"),)),
)  # fmt: skip
