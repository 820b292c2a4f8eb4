"""A rank is killed, is stopped, or runs a different collective: every survivor raises in time and names the cause.
A destroyed group leaves no thread behind."""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import launch  # noqa: E402

TIMEOUT = 3.0  # seconds, of every wait
GRACE = 1.0


class Ranks(launch.Ranks):
    """Plain processes, because torchrun would kill the survivors."""

    def __init__(self, folder: pathlib.Path, size: int, transport: str, fault: dict[int, str] | None = None):
        super().__init__(folder)
        self.size = size
        settings = {"WEFT_TIMEOUT": str(TIMEOUT), "WEFT_TRANSPORT": transport, "WEFT_UCX_TRUSTED": "1"}
        shared = launch.environment_of(size, **settings)
        for rank in range(size):
            extra = ["--fault", fault[rank]] if fault and rank in fault else []
            self.fork("failures.py", str(folder), *extra, env={**shared, "RANK": str(rank)})

    def wait_for(self, suffix: str, seconds: float, ranks: list[int] | None = None) -> None:
        end = time.time() + seconds
        paths = [self.folder / f"rank{rank}.{suffix}" for rank in (range(self.size) if ranks is None else ranks)]
        while not all(path.exists() for path in paths):
            assert time.time() < end, f"no {suffix} within {seconds} s\n{self.text()}"
            time.sleep(0.01)

    def found(self, rank: int) -> dict:
        return json.loads((self.folder / f"rank{rank}.json").read_text())


def check_survivor(found: dict, since: float, says: str = "") -> None:
    assert found["kind"].endswith("Error") and found["kind"] != "AssertionError", found
    assert re.search(says, found["error"]), f"{says} is not in: {found['error']}"
    waited = found["time"] - max(since, found["began"])  # a rank may still be starting when the other one fails
    assert waited < TIMEOUT + GRACE, f"raised after {waited:.1f} s: {found['error']}"
    assert not found["wrong"], found
    if "again" in found:
        assert found["again"] != "ran", "a group that failed was used again"


def expected(transport: str, how: signal.Signals, phase: str, victim: int) -> str:
    """Pattern for the error of every survivor."""
    if phase == "rendezvous":
        return ""
    if transport == "plain":
        return r"Collective \d+ \(.*\) failed on rank \d"
    if how == signal.SIGSTOP:
        return rf"waited \d+ ms for rank {victim}\b"
    return rf"(waited for|lost its connection to) rank {victim}\b.*process has exited"


def inject_fault(
    folder: pathlib.Path, transport: str, size: int, how: signal.Signals, phase: str, rng: random.Random
) -> None:
    victim = rng.randrange(size)
    survivors = [rank for rank in range(size) if rank != victim]
    with Ranks(folder, size, transport) as ranks:
        ranks.wait_for("started" if phase == "rendezvous" else "ready", 60)
        time.sleep(rng.uniform(0, 0.1))
        since = time.time()
        ranks.processes[victim].send_signal(how)
        ranks.wait_for("json", TIMEOUT + GRACE + 15, survivors)
        for rank in survivors:
            check_survivor(ranks.found(rank), since, expected(transport, how, phase, victim))


QUICK = [
    (transport, size, how, phase)
    for transport in ("shm", "ucx", "plain")
    for size, how, phase in (
        (2, signal.SIGKILL, "training"),
        (2, signal.SIGSTOP, "training"),
        (4, signal.SIGSTOP, "training"),
        (4, signal.SIGKILL, "training"),
        (2, signal.SIGKILL, "rendezvous"),
    )
]


@pytest.mark.parametrize(("transport", "size", "how", "phase"), QUICK, ids=lambda v: getattr(v, "name", str(v)))
def test_every_survivor_raises_in_time(tmp_path, transport, size, how, phase):
    inject_fault(tmp_path, transport, size, how, phase, random.Random(f"{transport}{size}{how}{phase}"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200))
def test_two_hundred_failures(tmp_path, number):
    rng = random.Random(number)
    transport, size = rng.choice(["shm", "ucx"]), rng.choice([2, 4])
    how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    inject_fault(tmp_path, transport, size, how, rng.choice(["training", "training", "rendezvous"]), rng)


@pytest.mark.parametrize("fault", ["rows", "dtype", "order", "width"])
@pytest.mark.parametrize("transport", ["shm", "ucx", "plain"])
def test_mismatch_raises_on_every_rank(tmp_path, transport, fault):
    with Ranks(tmp_path, 2, transport, {1: fault}) as ranks:
        ranks.wait_for("json", 90)
        for rank, process in enumerate(ranks.processes):
            process.wait(10)
            assert process.returncode == 0, f"rank {rank} ended with {process.returncode}\n{ranks.text()}"
            check_survivor(ranks.found(rank), ranks.found(0)["time"] - TIMEOUT, "Mismatch")


def test_no_shared_memory_is_left(tmp_path):
    before = set(os.listdir("/dev/shm"))
    rng = random.Random(1)
    inject_fault(tmp_path, "shm", 2, signal.SIGKILL, "training", rng)
    assert set(os.listdir("/dev/shm")) <= before


def test_a_destroyed_group_leaves_no_thread_behind(tmp_path):
    """Threads that outlive the interpreter abort the process when they release a tensor that Python has seen."""
    code = f"""
import os
import torch, torchweft
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
torch.optim.SGD([torch.ones(1, requires_grad=True)])  # imports modules whose default arguments are the default group
dist.destroy_process_group()
names = [open(f"/proc/self/task/{{thread}}/comm").read() for thread in os.listdir("/proc/self/task")]
print([name.strip() for name in names if "gloo" in name])
"""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2] / "python")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
