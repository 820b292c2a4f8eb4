"""Stores results with their origin, as tools/make_tables.py requires."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def store(file: Path, **content: object) -> None:
    """Writes `content` with the date, the commit and the command of this process."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    command = " ".join([f"benchmarks/python/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    origin = {"date": datetime.date.today().isoformat(), "commit": commit.stdout.strip(), "command": command}
    file.write_text(json.dumps({**origin, **content}, indent=1) + "\n")
