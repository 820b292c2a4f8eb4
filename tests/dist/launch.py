"""Starts the ranks of a test as processes, which rendezvous through a file."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from typing_extensions import Self

import torchweft

HERE = pathlib.Path(__file__).parent
# Folders of packages that are not installed with the others: see .ci/common.sh.
PACKAGES = [*filter(None, [os.environ.get("WEFT_MEGATRON")]), str(HERE.parent.parent / "build/te")]
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


@functools.cache
def rank_server() -> subprocess.Popen:
    """Forks the ranks of this process; see rank_server.py. It ends when its input is closed."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    command = [sys.executable, str(HERE / "rank_server.py")]
    return subprocess.Popen(command, env=environment_of(1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class ForkedRank:
    """A rank forked by the server, with the methods of subprocess.Popen that tests use."""

    def __init__(self, script: str, arguments: list[str], environment: dict[str, str], log: pathlib.Path) -> None:
        changed = environment.items() - environment_of(1).items()
        late = [name for name, _ in changed if name not in ("RANK", "WORLD_SIZE") and not name.startswith("WEFT_")]
        assert not late, f"{late} may have been read before the fork; start such ranks with Ranks.start"
        rank = {"script": script, "arguments": arguments, "environment": environment, "log": str(log)}
        self.returncode: int | None = None
        try:
            server = rank_server()
            print(json.dumps(rank), file=server.stdin, flush=True)
            self.pid = int(server.stdout.readline())
        except BaseException:  # also a timeout of the test: the answer of this server would be read as the next one
            rank_server().kill()
            rank_server.cache_clear()
            raise

    def wait(self, timeout: float = 300) -> int:
        end = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            else:
                time.sleep(0.005)
        return self.returncode

    def send_signal(self, which: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Ranks:
    """Processes, each with a log file. Leaving the `with` block kills those that still run."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.logs = folder, list[pathlib.Path]()
        self.processes: list[subprocess.Popen | ForkedRank] = []

    def fork(self, script: str, *arguments: str, env: dict[str, str]) -> None:
        """Starts the next rank with a script of this folder."""
        self.logs.append(self.folder / f"rank{len(self.logs)}.log")
        self.logs[-1].touch()
        self.processes.append(ForkedRank(str(HERE / script), list(arguments), env, self.logs[-1]))

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
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    rows = [line.split() for line in pathlib.Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    return [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in found]


def environment_of(ranks: int, **environment: str) -> dict[str, str]:
    """Environment for a script of this folder, without RANK."""
    return {
        **os.environ,
        "PYTHONPATH": str(pathlib.Path(torchweft.__file__).parent.parent),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        **environment,
    }


def run_ranks(
    script: str,
    folder: pathlib.Path,
    ranks: int,
    *arguments: str,
    seconds: float = 240,
    fork: bool = True,
    **environment: str,
) -> None:
    """Runs ``script FOLDER ARGUMENTS…`` on each rank; fails with their output unless all exit with 0."""
    shared = environment_of(ranks, **environment)
    with Ranks(folder) as started:
        for rank in range(ranks):
            own = {**shared, "RANK": str(rank)}
            if fork:
                started.fork(script, str(folder), *arguments, env=own)
            else:
                started.start([sys.executable, str(HERE / script), str(folder), *arguments], env=own)
        codes = started.codes(seconds)
        assert codes == [0] * ranks, f"exit codes {codes}\n{started.text()}"
