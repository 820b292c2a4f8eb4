"""Links through shared memory between real processes: values, ends of ranks, strangers, full memory."""

from __future__ import annotations

import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import launch  # noqa: E402

BUILD = pathlib.Path(os.environ.get("WEFT_BUILD", pathlib.Path(__file__).parents[2] / "build" / "release"))
PROGRAM = BUILD / "link_rank"
TIMEOUT = 1.0  # seconds, of every wait
GRACE = 1.0

if not PROGRAM.exists():
    pytest.skip(f"no link_rank in {BUILD}", allow_module_level=True)


class Ranks(launch.Ranks):
    """Processes of link_rank; `extra` are their last arguments, `each` what Popen gets for a rank."""

    def __init__(self, folder: pathlib.Path, size: int, rounds: int, *extra: str, timeout=TIMEOUT, each=None):
        folder.mkdir(exist_ok=True)
        super().__init__(folder)
        for rank in range(size):
            words = [PROGRAM, rank, size, folder / "store", int(timeout * 1000), rounds, *extra]
            self.start([str(word) for word in words], **(each or {}).get(rank, {}))

    def wait_for(self, word: str) -> None:
        end = time.time() + 60
        while not all(word in text for text in self.texts()):
            assert time.time() < end, self.texts()
            time.sleep(0.005)

    def codes(self, seconds: float = 60) -> list[int]:
        return super().codes(seconds)


def left_behind(processes: list[subprocess.Popen]) -> list[str]:
    """Files in shared memory, and sockets, that these have left."""
    files = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "weft" in name]
    sockets = pathlib.Path("/proc/net/unix").read_text()
    return files + [name for p in processes for name in re.findall(rf"@weft-{p.pid}-\w+", sockets)]


@pytest.mark.parametrize("size", [2, 4])
def test_rounds_of_random_kind_and_size_carry_every_value(tmp_path, size):
    with Ranks(tmp_path, size, 1500, timeout=20) as ranks:
        assert ranks.codes() == [0] * size, ranks.texts()
        assert all(text.split() == ["started", "ready", "done"] for text in ranks.texts())


def test_two_jobs_with_the_same_group_and_ranks_do_not_meet(tmp_path):
    with (
        Ranks(tmp_path / "a", 2, 1500, "group", timeout=20) as a,
        Ranks(tmp_path / "b", 2, 1500, "group", timeout=20) as b,
    ):
        assert a.codes() + b.codes() == [0] * 4, a.texts() + b.texts()


# ---- ends and stops of ranks -----------------------------------------------------------------------------------------


def drill(folder: pathlib.Path, size: int, how: signal.Signals, when: float | str) -> None:
    """Ends or stops one rank, after some seconds, during the rendezvous or at a fixed point "round:step"; every other
    must raise in time, and name it and what it did."""
    seed = random.Random(f"{size}{how}{when}")
    victim = seed.randrange(size)
    at_point = ":" in str(when)
    point = {victim: {"env": {**os.environ, "KILL_POINT": f"{when}:{how.value}"}}} if at_point else None
    with Ranks(folder, size, 0, each=point) as ranks:
        if at_point:
            ranks.wait_for_end_or_stop(victim)
        elif when == "rendezvous":
            ranks.wait_for("started")
            time.sleep(seed.random() * 0.02)
        else:
            ranks.wait_for("ready")
            time.sleep(float(when))
        if not at_point:
            ranks.processes[victim].send_signal(how)
        survivors = [p for rank, p in enumerate(ranks.processes) if rank != victim]
        codes = [p.wait(TIMEOUT + GRACE + 5) for p in survivors]
        if how == signal.SIGSTOP:
            ranks.processes[victim].send_signal(signal.SIGCONT)
            assert ranks.processes[victim].wait(TIMEOUT + GRACE) == 1, "it must find the failure when it goes on"
        texts = ranks.texts()
    assert codes == [1] * (size - 1), texts
    for text in texts[:victim] + texts[victim + 1 :]:
        error = text.split("error ")[1]
        assert int(error.split()[0]) < 1000 * (TIMEOUT + GRACE), error  # by the rank's own clock
        # In a round; and where ranks meet, at the start or because memory grows.
        ended = rf"rank {victim}\b.* process has ended|the process of rank {victim}\b.* has ended"
        late = rf"waited \d+ ms for rank {victim}\b"
        kind = ended if how == signal.SIGKILL else rf"{late}|rank {victim}\b.* within \d+ ms"
        assert re.search(f"{kind}|the Store" if "ready" not in text else kind, error), error
        assert f"rank {victim}" in error.lower(), error
        rendezvous = r"Rank \d of \d(, meeting| at) 'group/\d'"
        assert re.search(rendezvous if "ready" not in text else f"round \\d+, (all|reduce)|{rendezvous}", error), error
    assert left_behind(ranks.processes) == []


MOMENTS = ["rendezvous", 0.1, "1:0", "50:2", "51:3", "52:5"]
CASES = [(size, how, when) for when in MOMENTS for size in (2, 4) for how in ("SIGKILL", "SIGSTOP")]


@pytest.mark.parametrize("size, how, when", CASES)
def test_every_survivor_raises_in_time_and_names_the_rank(tmp_path, size, how, when):
    drill(tmp_path, size, signal.Signals[how], when)


POINTS = [f"{round}:{step}" for round in (1, 2, 40, 41) for step in (0, 2, 3, 4, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("when", [*POINTS, "rendezvous"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_point(tmp_path, size, how, when):
    drill(tmp_path, size, signal.Signals[how], when)


def count_leftovers(folder: pathlib.Path, kills: int) -> None:
    """Files in shared memory, sockets and processes after so many kills, at fixed points and during the rendezvous."""
    moments = [*POINTS, "rendezvous"]
    for number in range(kills):
        drill(folder / str(number), 2 + number % 2, signal.SIGKILL, moments[number * 8 % len(moments)])
    names = re.findall(r"@weft-\S+", pathlib.Path("/proc/net/unix").read_text())
    files = [name for name in os.listdir("/dev/shm") if "weft" in name]
    running = [path for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if str(folder) in command_of(path)]
    assert not names and not files and not running, (names, files, running)
    print(f"{kills} kills leave no file in shared memory, no socket, no process")


def command_of(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


def test_kills_leave_nothing(tmp_path):
    count_leftovers(tmp_path, 6)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_kills_leave_nothing(tmp_path):
    count_leftovers(tmp_path, 100)


# ---- users and memory ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_a_rank_of_another_user_is_refused_by_both(tmp_path):
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        if folder.owner() == "root" and folder != pathlib.Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "store").touch()
    (tmp_path / "store").chmod(0o666)
    with Ranks(tmp_path, 2, 1, each={1: {"user": 65534, "group": 65534, "extra_groups": []}}) as ranks:
        assert ranks.codes() == [1, 1], ranks.texts()
        assert all("another user (" in text for text in ranks.texts()), ranks.texts()


def test_memory_that_does_not_fit_is_an_error_on_every_rank(tmp_path):
    with Ranks(tmp_path, 2, 20, "group", str(10**12)) as ranks:
        assert ranks.codes() == [1, 1], ranks.texts()
    assert all("bytes of shared memory" in text for text in ranks.texts()), ranks.texts()


def test_a_limit_on_the_address_space_of_one_rank_is_an_error_on_every_rank(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

    with Ranks(tmp_path, 2, 20, "group", str(1 << 30), each={1: {"preexec_fn": limit}}) as ranks:
        assert ranks.codes() == [1, 1], ranks.texts()
    assert "bytes of shared memory" in ranks.texts()[1], ranks.texts()
    assert re.search(r"Rank 1 gave up in round 21, .*bytes of shared memory", ranks.texts()[0]), ranks.texts()


def memory_group() -> pathlib.Path | None:
    """A control group whose memory can be limited."""
    for root in (pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")):
        controls = root / "cgroup.controllers"
        if (root / "memory.limit_in_bytes").exists() or (controls.exists() and "memory" in controls.read_text()):
            try:
                group = root / f"weft-test-{os.getpid()}"
                group.mkdir()
                return group
            except OSError:
                return None
    return None


def test_a_limit_of_the_control_group_is_an_error_and_kills_nobody(tmp_path):
    group = memory_group()
    if group is None:
        pytest.skip("no control group can be made here")
    try:
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (group / name).exists():
                (group / name).write_text(str(600 << 20))

        def join():
            (group / "cgroup.procs").write_text(str(os.getpid()))

        each = {rank: {"preexec_fn": join} for rank in range(2)}
        with Ranks(tmp_path, 2, 20, "group", str(1 << 30), each=each) as ranks:
            assert ranks.codes() == [1, 1], ranks.texts()
        assert all("bytes of shared memory" in text for text in ranks.texts()), ranks.texts()
    finally:
        group.rmdir()
