"""Verdicts of claims, from fabricated outputs: a claim holds only if it was measured and is within its bound."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

import checks  # noqa: E402
import claims  # noqa: E402
import network  # noqa: E402
import old_against_new  # noqa: E402
import skips  # noqa: E402
import trust  # noqa: E402
from verdict import (  # noqa: E402
    MIN_ROUNDS,
    Figure,
    Outcome,
    Verdict,
    figure_from,
    join_outcomes,
    judge_ctest,
    judge_figures,
    judge_pytest,
    judge_script,
    overall,
    suite_figure,
)

HOLDS, MISSED, NOT_MEASURED = Verdict
TIMED = {"name": "gemm", "value": 0.78, "interval": (0.76, 0.79), "control": 1.0, "kept": 21, "at_most": 0.80}


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, HOLDS),
        ({"kept": MIN_ROUNDS}, HOLDS),
        ({"control": 1.019}, HOLDS),
        ({"at_most": None}, HOLDS),  # reported only
        ({"interval": (0.76, 0.81)}, MISSED),  # the median is within the bound, the upper end is not
        ({"value": 0.9, "interval": (0.85, 0.95)}, MISSED),
        ({"at_most": None, "at_least": 0.76}, HOLDS),
        ({"at_most": None, "at_least": 0.77}, MISSED),  # the lower end counts
        ({"kept": 0}, NOT_MEASURED),
        ({"kept": MIN_ROUNDS - 1}, NOT_MEASURED),
        ({"kept": None}, NOT_MEASURED),
        ({"control": 1.03}, NOT_MEASURED),
        ({"control": 0.97}, NOT_MEASURED),
        ({"control": None}, NOT_MEASURED),
        ({"control": float("nan")}, NOT_MEASURED),
        ({"interval": None}, NOT_MEASURED),
        ({"interval": (float("nan"), float("nan"))}, NOT_MEASURED),
        ({"value": None}, NOT_MEASURED),
        ({"skipped": "network namespaces need root"}, NOT_MEASURED),
        ({"control": 1.03, "interval": (0.9, 0.95)}, NOT_MEASURED),  # a noisy miss is not measured either
        ({"interval": (0.79, 0.85), "end": "favourable"}, HOLDS),
        ({"interval": (0.81, 0.85), "end": "favourable"}, MISSED),
    ],
)
def test_timed_figure(changed, verdict):
    assert Figure(**{**TIMED, **changed}).judge().verdict is verdict


def test_exact_figure_needs_no_interval():
    assert Figure("bytes", 0.31, at_most=0.5, exact=True).judge().verdict is HOLDS
    assert Figure("bytes", 0.51, at_most=0.5, exact=True).judge().verdict is MISSED
    assert Figure("bytes", None, at_most=0.5, exact=True).judge().verdict is NOT_MEASURED


def test_missing_figures_are_not_measured():
    held = Figure(**TIMED)
    assert judge_figures([]).verdict is NOT_MEASURED
    assert judge_figures([held], expected=2).verdict is NOT_MEASURED
    assert judge_figures([held, held], expected=2).verdict is HOLDS


def test_missed_outweighs_not_measured():
    assert overall([HOLDS, NOT_MEASURED, MISSED]) is MISSED
    assert overall([HOLDS, NOT_MEASURED]) is NOT_MEASURED
    assert overall([]) is NOT_MEASURED


def suite_row(bound, inverse, versus, kept=21, control=1.0):
    target = {"against": "mm_out", "at_most": bound, "inverse": inverse, "holds": True}
    return {"problem": "gemm m=512 at_least=1.6", "versus": versus, "target": target, "control": control, "kept": kept}


def test_suite_rows_are_judged_by_interval():
    peer = {"against": "mm_out", "ratio": 0.79, "interval": [0.78, 0.81], "ms": 1.0}
    assert suite_figure(suite_row(0.80, False, [peer])).judge().verdict is MISSED
    assert suite_figure(suite_row(0.82, False, [peer])).judge().verdict is HOLDS
    assert suite_figure(suite_row(0.82, False, [peer], kept=0)).judge().verdict is NOT_MEASURED
    assert suite_figure(suite_row(0.82, False, [])).judge().verdict is NOT_MEASURED  # no round was steady
    inverse = suite_figure(suite_row(0.6250, True, [{**peer, "ratio": 0.60, "interval": [0.59, 0.625]}]))
    assert inverse.at_least == 1.6 and inverse.judge().verdict is HOLDS
    inverse = suite_figure(suite_row(0.6250, True, [{**peer, "ratio": 0.60, "interval": [0.59, 0.63]}]))
    assert inverse.judge().verdict is MISSED


def test_figures_ignore_other_json_fields():
    row = {**TIMED, "interval": [0.76, 0.79], "ms": 3.0, "steal": 0.0}
    assert figure_from(row) == Figure(**TIMED)


SKIPPED = "SKIPPED [2] tests/python/test_x.py:75: "


@pytest.mark.parametrize(
    ("output", "status", "verdict"),
    [
        ("5 passed in 1.2s", 0, HOLDS),
        (f"{SKIPPED}has no halves\n5 passed, 2 skipped in 1.2s", 0, HOLDS),
        (f"{SKIPPED}weft_tests is not built\n5 passed, 2 skipped in 1.2s", 0, NOT_MEASURED),
        (f"{SKIPPED}megatron.core is not installed, nor in $X\n5 passed, 2 skipped in 1.2s", 0, NOT_MEASURED),
        (f"{SKIPPED}has no halves\n2 skipped in 1.2s", 0, NOT_MEASURED),  # all of them
        ("no tests ran in 0.1s", 5, NOT_MEASURED),
        ("12 deselected in 0.1s", 5, NOT_MEASURED),  # the pattern matched nothing
        ("ERROR: file or directory not found: tests/x.py\n\nno tests ran in 0.01s", 4, NOT_MEASURED),
        ("1 failed, 5 passed in 1.2s", 1, MISSED),
        ("5 passed, 1 xfailed in 1.2s", 0, MISSED),
        ("1 error in 1.2s", 2, MISSED),
        ("Fatal Python error: Segmentation fault", -11, MISSED),
        ("5 passed in 1.2s", 1, MISSED),
        ("", 0, NOT_MEASURED),
    ],
)
def test_pytest_output(output, status, verdict):
    assert judge_pytest(output, status).verdict is verdict


def test_pytest_without_figure_is_not_measured():
    output = "2000 pipelines, 0 wrong\n5 passed in 1.2s"
    assert judge_pytest(output, 0, r"\d+ pipelines").verdict is HOLDS
    assert judge_pytest(output, 0, r"\d+ fuzzed calls").verdict is NOT_MEASURED


def gtest_log(reason: str) -> str:
    return f"[ RUN      ] A.B\n/w/a_test.cpp:68: Skipped\n{reason}\n\n[  SKIPPED ] A.B (0 ms)\n[  SKIPPED ] 1 test\n"


ALL = "100% tests passed, 0 tests failed out of 4"


@pytest.mark.parametrize(
    ("output", "status", "log", "verdict"),
    [
        (ALL, 0, "", HOLDS),
        (ALL, 0, gtest_log("one rank agrees with itself"), HOLDS),
        (ALL, 0, gtest_log("the moon is full"), NOT_MEASURED),
        (ALL, 0, gtest_log("weights are packed by the amx tier only"), NOT_MEASURED),
        (ALL + "\n 1 - A.B (Skipped)" * 4, 0, gtest_log("one rank agrees with itself"), NOT_MEASURED),
        ("75% tests passed, 1 tests failed out of 4", 8, "", MISSED),
        ("No tests were found!!!", 8, "", NOT_MEASURED),
    ],
)
def test_ctest_output(output, status, log, verdict):
    assert judge_ctest(output, status, log).verdict is verdict


@pytest.mark.parametrize(
    ("output", "status", "verdict"),
    [
        ("ratio 1.07", 0, HOLDS),
        ("ratio 1.07", 1, MISSED),
        ("ratio 1.07\n256 tokens: no round was steady", 0, NOT_MEASURED),
        ("skipped: network namespaces need root", 0, NOT_MEASURED),
        ("all is well", 0, NOT_MEASURED),  # the pattern matches nothing
        ("", 1, MISSED),
    ],
)
def test_script_output(output, status, verdict):
    assert judge_script(output, status, r"ratio \S+").verdict is verdict


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome("3 passed; 100,000 fuzzed calls, 0 reports", HOLDS), HOLDS),
        (Outcome("3 passed; 60000 fuzzed calls; 40000 fuzzed calls", HOLDS), HOLDS),
        (Outcome("3 passed; 1000 fuzzed calls, 0 reports", HOLDS), NOT_MEASURED),
        (Outcome("1 failed; 1000 fuzzed calls", MISSED), MISSED),
    ],
)
def test_smaller_count_than_claimed_is_not_measured(outcome, verdict):
    check = trust.at_least(100_000, "fuzzed calls", lambda settings: outcome, quick=1000)
    assert check(checks.Settings()).verdict is verdict
    assert check(checks.Settings(quick=True)).verdict in (HOLDS, MISSED)


def test_texts_of_planted_faults_are_found():
    done = subprocess.run([sys.executable, ROOT / "tools/planted_faults.py", "--list"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_trust_judges_scripts_planted_faults_and_ci():
    assert trust.judge_scripts({}).verdict is NOT_MEASURED
    assert trust.judge_scripts({"a": 0, "b": 0}).verdict is HOLDS
    assert trust.judge_scripts({"a": 0, "b": 1}).verdict is MISSED
    assert trust.judge_scripts({"a": None}).verdict is MISSED
    assert trust.judge_planted("40 of 40 killed", 0, quick=False).verdict is HOLDS
    assert trust.judge_planted("6 of 6 planted faults killed", 0, quick=True).verdict is HOLDS
    assert trust.judge_planted("6 of 6 planted faults killed", 0, quick=False).verdict is NOT_MEASURED
    assert trust.judge_planted("39 of 40 killed", 0, quick=False).verdict is MISSED
    assert trust.judge_planted("", 0, quick=False).verdict is NOT_MEASURED
    run = {"seconds": 2400, "status": "passed", "cold": True}
    assert trust.judge_ci(None).verdict is NOT_MEASURED
    assert trust.judge_ci(run).verdict is HOLDS
    assert trust.judge_ci({**run, "seconds": 2800}).verdict is MISSED
    assert trust.judge_ci({**run, "cold": False}).verdict is NOT_MEASURED
    assert trust.judge_ci({**run, "status": "failed in pytest"}).verdict is NOT_MEASURED


def test_defect_scripts_are_run_and_judged_by_status(tmp_path):
    settings = checks.Settings(defects=tmp_path / "absent")
    assert trust.defect_scripts(checks.Settings()).verdict is NOT_MEASURED
    assert trust.defect_scripts(settings).verdict is NOT_MEASURED
    (tmp_path / "good.py").write_text("pass\n")
    assert trust.defect_scripts(checks.Settings(defects=tmp_path)).verdict is HOLDS
    (tmp_path / "bad.py").write_text("raise SystemExit(3)\n")
    found = trust.defect_scripts(checks.Settings(defects=tmp_path))
    assert found.verdict is MISSED and "bad: status 3" in found.measured


def test_attacks_on_transformer_engine_code_run_on_the_real_package():
    old = "import torchweft.compat.transformer_engine as compat\ncompat.install()\nte.Linear(torch.Generator())\n"
    text = trust.on_real_package(old)
    assert "compat" not in text and "torchweft.te.install()" in text and 'Generator("cuda")' in text


def test_script_without_class_test_is_named():
    def check(settings):
        return Outcome("2 passed", HOLDS)

    known = {"d1": check, "d1b": check, "nan_query": check}
    assert trust.classes_of(["d1_rows", "d1b_dense", "nan_query", "e9_new"], known) == (["e9"], [check])


def test_noisy_benchmark_is_repeated():
    noisy, quiet = Figure(**{**TIMED, "control": 1.05}), Figure(**TIMED)
    runs = iter([[noisy], [quiet]])
    assert checks.measured(lambda: (next(runs), True)).verdict is HOLDS
    assert checks.measured(lambda: ([noisy], True)).verdict is NOT_MEASURED
    assert checks.measured(lambda: ([noisy], True), attempts=1).verdict is NOT_MEASURED
    assert checks.measured(lambda: ([quiet], False)).verdict is MISSED  # wrong results


def test_network_without_steady_round_is_not_measured():
    row = {"schedule": "all_gather_gemm", "ratios": [], "hidden": [], "controls": []}
    assert [figure_from(f).judge().verdict for f in network.figures_of(1.0, row)] == [NOT_MEASURED]
    row = {**row, "ratios": [1.05] * 9, "hidden": [0.9] * 9, "controls": [1.0] * 9}
    assert [figure_from(f).judge().verdict for f in network.figures_of(1.0, row)] == [HOLDS, HOLDS]
    assert [figure_from(f).judge().verdict for f in network.figures_of(1.0, {**row, "hidden": [0.8] * 9})] == [
        HOLDS,
        MISSED,
    ]


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([0.50, 0.505, 0.505, 0.50], HOLDS),  # 1 % slower
        ([0.50, 0.52, 0.52, 0.50], MISSED),  # 4 %
        ([0.50, 0.52, 0.52, 0.52], NOT_MEASURED),  # old differs from itself by 4 %
        ([0.50, None, 0.50, 0.50], NOT_MEASURED),  # one process kept no round
    ],
)
def test_old_against_new(runs, verdict):
    rounds = [[{} if ratio is None else {"gemm": ratio} for ratio in runs]] * 9
    assert figure_from(old_against_new.figure("gemm", rounds)).judge().verdict is verdict


def test_only_holds_passes_and_summary_counts_each():
    def result(verdict):
        return claims.Result("1", "claim", "measured", verdict, 0)

    assert claims.status([result(HOLDS)]) == 0
    assert claims.status([result(HOLDS), result(NOT_MEASURED)]) == 1
    assert claims.status([result(MISSED)]) == claims.status([]) == 1
    assert claims.summary([result(HOLDS), result(MISSED), result(HOLDS)]) == "2 holds, 1 missed, 0 not measured"


def test_rows_are_selected_by_number_and_prefix():
    rows = claims.CLAIMS["trust"]
    assert [row.number for row in claims.select_rows(rows, ["3.1"])] == ["3.1"]
    assert len(claims.select_rows(rows, ["3"])) == 15 and len(claims.select_rows(rows, [])) == len(rows)
    with pytest.raises(ValueError, match="no row 9"):
        claims.select_rows(rows, ["9"])


def test_quick_filter_matches_problems():
    """The text by which --quick selects problems of a suite must match at least one."""
    assert checks.problems_of("benchmarks/problems/gemm.txt", "m=512") > 0
    assert checks.problems_of("benchmarks/problems/gemm.txt", "m=7777") == 0


def test_outcomes_are_joined():
    found = join_outcomes([Outcome("a", HOLDS), Outcome("b", NOT_MEASURED)])
    assert found == Outcome("a; b", NOT_MEASURED)


def test_gtest_skips_are_parsed_with_reason():
    assert skips.gtest_skips(gtest_log("two\nlines")) == [skips.Skip("A.B", "two lines")]
    assert skips.gtest_skips("[  SKIPPED ] C.D (1 ms)\n") == [skips.Skip("C.D", "")]
    assert skips.not_allowed(skips.gtest_skips(gtest_log("one rank agrees with itself"))) == []
    assert skips.not_allowed(skips.gtest_skips(gtest_log("")))


def test_unknown_skip_kind_raises():
    with pytest.raises(ValueError, match="unknown kinds"):
        skips.rules("sometimes: the moon is full")
