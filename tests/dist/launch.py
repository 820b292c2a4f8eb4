"""Starts the ranks of a test: plain processes that meet through a file."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import weft

HERE = pathlib.Path(__file__).parent


def run_ranks(script: str, folder: pathlib.Path, ranks: int, *arguments: str, seconds: float = 240, **environment: str):
    """Runs ``script FOLDER ARGUMENTS…`` on each rank and raises, with what they printed, unless all end well."""
    shared = {
        **os.environ,
        "PYTHONPATH": str(pathlib.Path(weft.__file__).parent.parent),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        **environment,
    }
    command = [sys.executable, str(HERE / script), str(folder), *arguments]
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes: list[subprocess.Popen] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=file, stderr=subprocess.STDOUT)
                )
        codes = [process.wait(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    text = "\n".join(f"---- {log.name}\n{log.read_text()}" for log in logs)
    assert codes == [0] * ranks, f"exit codes {codes}\n{text}"
