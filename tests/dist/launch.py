"""Starts the ranks of a test as plain processes, which rendezvous through a file."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any

from typing_extensions import Self

import weft

HERE = pathlib.Path(__file__).parent


class Ranks:
    """Processes, each with a log file. Leaving the `with` block kills those that still run."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.logs = folder, list[pathlib.Path]()
        self.processes: list[subprocess.Popen] = []

    def start(self, command: list[str], **more: Any) -> None:
        """Starts the next rank; `more` is passed to Popen."""
        self.logs.append(self.folder / f"rank{len(self.logs)}.log")
        with self.logs[-1].open("w") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **more))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_for_end_or_stop(self, rank: int) -> float:
        """Waits until the rank has ended or stopped itself, and returns the time."""
        os.waitid(os.P_PID, self.processes[rank].pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        return time.time()

    def codes(self, seconds: float) -> list[int]:
        return [process.wait(seconds) for process in self.processes]

    def texts(self) -> list[str]:
        return [log.read_text() for log in self.logs]

    def text(self) -> str:
        return "\n".join(f"---- {log.name}\n{text}" for log, text in zip(self.logs, self.texts(), strict=True))


def listening(pid: int) -> list[tuple[str, int]]:
    """IPv4 addresses and TCP ports on which the process listens."""
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    rows = [line.split() for line in pathlib.Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    return [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in found]


def environment_of(ranks: int, **environment: str) -> dict[str, str]:
    """Environment for a script of this folder, without RANK."""
    return {
        **os.environ,
        "PYTHONPATH": str(pathlib.Path(weft.__file__).parent.parent),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        **environment,
    }


def run_ranks(script: str, folder: pathlib.Path, ranks: int, *arguments: str, seconds: float = 240, **environment: str):
    """Runs ``script FOLDER ARGUMENTS…`` on each rank; fails with their output unless all exit with 0."""
    shared = environment_of(ranks, **environment)
    with Ranks(folder) as started:
        for rank in range(ranks):
            command = [sys.executable, str(HERE / script), str(folder), *arguments]
            started.start(command, env={**shared, "RANK": str(rank)})
        codes = started.codes(seconds)
        assert codes == [0] * ranks, f"exit codes {codes}\n{started.text()}"
