"""Runs Transformer Engine's own tests on weft and prints how many passed, and why the others did not.

    git clone --depth 1 --branch release_v2.19 https://github.com/NVIDIA/TransformerEngine /tmp/te
    python tools/te_tests.py /tmp/te/tests/pytorch --draw 500 --json benchmarks/results/te-tests.json

Without `--draw` all tests of each file run, which takes many hours; this is the nightly run. `--json` replaces the
counts of the files that were run, for this release, and keeps the others; tools/make_tables.py writes them into
docs/transformer_engine.md. `--fusion` runs the operations by weft's plans and counts their share. Tests in
`distributed` get two devices. `WEFT_TE_STRICT` and the other variables of `torchweft.te` apply.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "test_fusible_ops", "test_numerics", "test_recipe", "test_quantized_tensor", "test_sanity", "test_grouped_linear",
    "test_grouped_mlp", "test_permutation", "test_fused_router", "test_fused_optimizer", "test_fused_rope",
    "test_qk_norm", "test_gqa", "test_float8blockwisetensor", "test_float8_blockwise_scaling_exact",
    "test_float8_blockwise_gemm_exact", "test_float8_current_scaling_exact", "test_checkpoint", "test_custom_recipe",
    "test_deferred_init", "test_grouped_tensor", "test_multi_tensor", "test_mxfp8_2d_quantize",
    "test_parallel_cross_entropy", "test_partial_cast", "test_backward_override", "test_identity_quantizer",
    "test_hybrid_quantization", "nvfp4", "mxfp8", "attention/test_attention", "attention/test_cp_utils",
    "attention/test_cu_seqlens_cache", "attention/test_kv_cache", "attention/test_attention_with_cp",
    "distributed/test_fusible_ops", "distributed/test_numerics", "distributed/test_numerics_exact",
    "distributed/test_sanity", "distributed/test_torch_fsdp2", "distributed/test_cast_master_weights_to_fp8",
)  # fmt: skip
CUDA_GRAPH, NO_FILE = "records a CUDA graph", "reads a file that is not there"
FUSED_CLASS = "expects Transformer Engine's fused class"
REASONS = (  # of failures: (pattern of the error, reason)
    (r"CUDA ?graph|cudaGraph|graph captur", CUDA_GRAPH),
    (r"FileNotFoundError|No such file", NO_FILE),
    (r"Timeout", "did not end in time"),
    (r"No dot product attention backend", "requires FP8 attention"),
    (r"core_attention_bias tensor must be|assert len\(saved_tensors\)", "expects another release"),
    (r"ctx must have \.tensor_objects", "checkpointed attention of this release does not detach packed QKV"),
    (r"CompletedProcess|CalledProcessError", "a program that it starts failed"),
    (r"not (close|equal)|mismatch|Mismatched", "another result"),
    (
        r"isinstance\(\w*ward_ops\[|len\(\[\(WeftRun|ForwardLinear|BackwardLinear|BackwardActivation|GroupedMLP_",
        FUSED_CLASS,
    ),
)
IN_PLANS = 0.95  # of the operations, with --fusion
SHARE, SHARES = 0.98, {"test_fusible_ops": 0.995}  # of the tests that count
REPORT, DRAW = "WEFT_TE_REPORT", "WEFT_TE_DRAW"


# ---- inside of pytest, with `-p te_tests` ---------------------------------------------------------------------------


def write(**line: Any) -> None:
    if REPORT in os.environ:
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    draw = int(os.environ.get(DRAW, 0))
    if 0 < draw < len(items):
        kept = sorted(random.Random(0).sample(range(len(items)), draw))
        items[:] = [items[i] for i in kept]


def pytest_runtest_logreport(report: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that started it reports
        return
    if report.when == "call" or (report.when == "setup" and not report.passed):
        write(test=report.nodeid, outcome=report.outcome, error=str(report.longrepr)[-2000:] if report.failed else "")


FUSIONS = ("forward_backward_fusion_functions", "forward_fusion_functions", "backward_fusion_functions")


def pytest_sessionstart() -> None:
    """Counts the operations that run in plans of weft, with `--fusion`."""
    if os.environ.get("WEFT_TE_FUSION") != "1":
        return
    from transformer_engine.pytorch.ops.fuser import OperationFuser

    from torchweft.te import _fusion

    fuse = OperationFuser.maybe_fuse_ops

    def counted(self: Any, *arguments: Any, **keywords: Any) -> None:
        before = getattr(self, "_forward_ops", None)
        fuse(self, *arguments, **keywords)
        if self._forward_ops is not before:
            others = [op for op, _ in self._forward_ops if type(op).__name__ != "WeftRun"]
            reasons = Counter(
                _fusion._reasons.get(op, "a fusion of Transformer Engine or of the user") for op in others
            )
            write(operations=self._num_basic_ops, others=reasons)

    OperationFuser.maybe_fuse_ops = counted


def pytest_runtest_setup(item: Any) -> None:
    """Remembers the fusions, because tests leave theirs registered."""
    fuser = sys.modules.get("transformer_engine.pytorch.ops.fuser")
    if fuser is not None:
        item.fusions = [
            (getattr(fuser.OperationFuser, name), list(getattr(fuser.OperationFuser, name))) for name in FUSIONS
        ]


def pytest_runtest_teardown(item: Any) -> None:
    for functions, before in getattr(item, "fusions", ()):
        functions[:] = before


# ---- the command ----------------------------------------------------------------------------------------------------


def reason_of(error: str) -> str:
    for pattern, reason in REASONS:
        if re.search(pattern, error):
            return reason
    lines = [line[2:].strip() for line in error.splitlines() if line.startswith("E ")]
    return (lines or error.splitlines() or ["?"])[-1][:100]


def run(folder: Path, name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Runs one file, or the files of a folder."""
    path = folder / name if (folder / name).is_dir() else folder / f"{name}.py"
    if not path.exists():
        return {"file": name, "ended": True, "remarks": "not in this release"}
    report = Path(tempfile.mkdtemp()) / "report"
    variables = {REPORT: str(report), DRAW: str(chosen.draw), "WEFT_TE_FUSION": str(int(chosen.fusion))}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of torchrun
    seconds = chosen.test_seconds
    if name.startswith("distributed/"):
        variables |= {"WEFT_DEVICES": "2"}
        seconds *= 10  # one test runs a program with many
    paths = [str(ROOT / "tools"), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "torchweft.te.pytest_plugin", "-p", "te_tests"]
    command += ["-p", "no:cacheprovider", "--timeout", str(seconds), *chosen.pytest.split(), str(path)]
    start, remarks = time.monotonic(), []
    try:
        done = subprocess.run(
            command, cwd=folder, timeout=chosen.seconds, capture_output=True, text=True, check=False,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        if done.returncode not in (0, 1):
            remarks.append(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-200:]}")
        ended = done.returncode in (0, 1)
    except subprocess.TimeoutExpired:
        remarks.append(f"stopped after {chosen.seconds} s")
        ended = False
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    outcomes = Counter(line["outcome"] for line in lines if "test" in line)
    failures = Counter(reason_of(line["error"]) for line in lines if line.get("outcome") == "failed")
    row = {"file": name, **{k: outcomes[k] for k in ("passed", "failed", "skipped")}}
    not_supported = [CUDA_GRAPH, NO_FILE, *([FUSED_CLASS] if chosen.fusion else [])]
    row |= {"ended": ended, "not supported": sum(failures[reason] for reason in not_supported)}
    if operations := sum(line["operations"] for line in lines if "operations" in line):
        others = sum((Counter(line["others"]) for line in lines if "others" in line), Counter())
        row["in plans"] = round(1 - others.total() / operations, 4)
        row["operations not in plans"] = dict(others.most_common(8))
    remarks += [f"{count} × {reason}" for reason, count in failures.most_common()]
    return row | {"remarks": "; ".join(remarks), "seconds": round(time.monotonic() - start)}


def share(row: dict[str, Any]) -> float:
    """The share of tests that pass, of those that were run and are supported; 0 if the file did not run to its end."""
    if not row["ended"]:
        return 0.0
    ran = row.get("passed", 0) + row.get("failed", 0) - row.get("not supported", 0)
    return row["passed"] / ran if ran else 1.0


def store(path: Path, row: dict[str, Any]) -> None:
    """Puts the row into the stored ones, in place of that with the same file, release and fusion."""
    result = json.loads(path.read_text()) if path.exists() else {"rows": []}
    same = ("file", "release", "fusion")
    others = [other for other in result["rows"] if any(other[name] != row[name] for name in same)]
    order = {name: i for i, name in enumerate(FILES)}
    rows = sorted([*others, row], key=lambda r: (r["fusion"], order.get(r["file"], len(order)), r["release"]))
    result = {"date": row["date"], "command": "python tools/te_tests.py FOLDER --json FILE", "rows": rows}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="tests/pytorch of a checkout of Transformer Engine")
    parser.add_argument("--only", nargs="*", default=FILES, help="files or folders, without .py")
    parser.add_argument("--draw", type=int, default=0, help="run so many tests of each file, drawn with a fixed seed")
    parser.add_argument("--seconds", type=int, default=36000, help="for one file")
    parser.add_argument("--test-seconds", type=int, default=300, help="for one test")
    parser.add_argument("--fusion", action="store_true", help="with weft's plans")
    parser.add_argument("--pytest", default="", help="further options of pytest")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    chosen = parser.parse_args()
    about = {"release": importlib.metadata.version("transformer_engine"), "fusion": chosen.fusion}
    rows = []
    for name in chosen.only:
        rows.append(run(chosen.folder.resolve(), name, chosen))
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
        if chosen.json:
            store(chosen.json, {**about, "date": time.strftime("%F"), "draw": chosen.draw, **rows[-1]})
    short = [row["file"] for row in rows if share(row) < SHARES.get(row["file"], SHARE)]
    print(f"{sum(row.get('passed', 0) for row in rows)} tests of {len(rows)} files passed; below their share: {short}")
    if chosen.fusion:
        least = min((row["in plans"] for row in rows if "in plans" in row), default=0)
        print(f"in plans of weft: {least:.2%} of the operations")
        short += ["operations in plans"] if least < IN_PLANS else []
    sys.exit(bool(short))


if __name__ == "__main__":
    main()
