#!/usr/bin/env python3
"""Stores the summary lines of tests/torch_version_test.sh: store_torch_version.py LOGS RESULTS.json"""

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

import torch

COLUMNS = ["torch", "C++ tests", "Python tests", "tests with ranks", "wheel, README, tutorials", "date", "commit"]


def last_line(log: Path) -> str:
    """Without the rule of equal signs around it and the time it took."""
    line = log.read_text().strip().splitlines()[-1]
    return re.sub(r"^=+ | =+$| in [\d.]+s.*", "", line)


def main(logs: Path, results: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    today = datetime.date.today().isoformat()
    cpp = re.search(r"(\d+% tests passed), .*", (logs / "ctest.log").read_text())
    row = [
        torch.__version__,
        cpp[1] if cpp else "no summary",
        last_line(logs / "pytest.log"),
        last_line(logs / "pytest-serial.log"),
        last_line(logs / "wheel.log").removeprefix("wheel: "),
        today,
        commit.stdout.strip(),
    ]
    rows = json.loads(results.read_text())["rows"] if results.exists() else []
    rows = sorted([*(r for r in rows if r[0] != row[0]), row])
    content = {"date": today, "command": "tests/torch_version_test.sh VERSION", "columns": COLUMNS, "rows": rows}
    results.write_text(json.dumps(content, indent=1) + "\n")
    print(" | ".join(row))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
