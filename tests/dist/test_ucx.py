"""The UCX transport between processes: values, killed and stopped ranks, two hosts."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import launch  # noqa: E402
import netns  # noqa: E402

BUILD = pathlib.Path(os.environ.get("WEFT_BUILD", pathlib.Path(__file__).parents[2] / "build" / "release"))
PROGRAM = BUILD / "ucx_rank"
TIMEOUT = 1.5  # seconds, of every wait
GRACE = 1.0
FOREVER = 10**9

if not PROGRAM.exists() or not (BUILD / "libweft_ucx.so").exists():
    pytest.skip(f"no ucx_rank and libweft_ucx.so in {BUILD}: built without UCX", allow_module_level=True)


class Ranks(launch.Ranks):
    def __init__(
        self,
        folder: pathlib.Path,
        size: int,
        rounds: int,
        prefixes: list[list[str]] | None = None,
        trusted: bool = True,
        point: tuple[int, str] | None = None,
    ):
        super().__init__(folder)
        env = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")} | {"OMP_NUM_THREADS": "1"}
        env["WEFT_UCX_TRUSTED"] = "1" if trusted else "0"
        for rank in range(size):
            words = [PROGRAM, rank, size, folder / "store", int(TIMEOUT * 1000), rounds]
            ends = {"KILL_POINT": point[1]} if point and point[0] == rank else {}
            self.start([*(prefixes[rank] if prefixes else []), *map(str, words)], env=env | ends)

    def wait_ready(self) -> None:
        end = time.time() + 20
        while not all("ready" in log.read_text() for log in self.logs):
            assert time.time() < end, self.text()
            time.sleep(0.01)

    def check_raised(self, rank: int, since: float, victim: int, kind: str) -> None:
        """The rank raised in time, named the missing rank, the reason and the operation, and exited."""
        assert self.processes[rank].wait(TIMEOUT + GRACE + 5) == 3, self.text()
        found = re.search(r"raised at ([\d.]+): (.*)", self.logs[rank].read_text())
        assert found and float(found[1]) - since < TIMEOUT + GRACE, self.text()
        assert re.search(kind + rf" rank {victim}\b.*\((all_gather|reduce_scatter) of", found[2]), self.text()


@pytest.mark.parametrize("size", [2, 4])
def test_processes_exchange_blocks(tmp_path, size):
    with Ranks(tmp_path, size, 40) as ranks:
        assert ranks.codes(30) == [0] * size, ranks.text()


def inject_fault(folder: pathlib.Path, size: int, how: signal.Signals, number: int) -> None:
    """A rank kills or stops itself at a fixed point of a collective."""
    victim, step, at = number % size, number % 6, 20 + number % 7
    with Ranks(folder, size, FOREVER, point=(victim, f"{at}:{step}:{how.value}")) as ranks:
        since = ranks.wait_for_end_or_stop(victim)
        kind = "lost its connection to" if how == signal.SIGKILL else "waited 1500 ms for"
        for rank in set(range(size)) - {victim}:
            ranks.check_raised(rank, since, victim, kind)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_survivors_name_the_missing_rank(tmp_path, size, how, number):
    inject_fault(tmp_path, size, how, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100))
def test_survivors_name_the_missing_rank_a_hundred_times(tmp_path, number):
    inject_fault(tmp_path, 3 + number % 2, signal.SIGKILL if number % 3 == 0 else signal.SIGSTOP, number // 2)


def test_untrusted_ucx_is_rejected_by_name(tmp_path):
    with Ranks(tmp_path, 2, 4, trusted=False) as ranks:
        assert ranks.codes(30) == [3, 3], ranks.text()
        assert all("WEFT_UCX_TRUSTED" in text for text in ranks.texts()), ranks.text()


def test_rank_listens_on_one_interface(tmp_path):
    with Ranks(tmp_path, 2, FOREVER) as ranks:
        ranks.wait_ready()
        for process in ranks.processes:
            addresses = {address for address, _ in launch.listening(process.pid)}
            assert len(addresses) == 1 and "0.0.0.0" not in addresses, addresses


def test_rank_that_dies_before_rendezvous_is_named(tmp_path):
    with Ranks(tmp_path, 3, FOREVER) as ranks:
        ranks.processes[1].kill()
        start = time.time()
        for rank in (0, 2):
            assert ranks.processes[rank].wait(15) == 3, ranks.text()
            assert "rank 1" in ranks.logs[rank].read_text(), ranks.text()
        assert time.time() - start < TIMEOUT + GRACE + 2  # plus the start of a process


@pytest.mark.skipif(bool(netns.unavailable_reason()), reason=netns.unavailable_reason() or "-")
class TestTwoHosts:
    def test_hosts_exchange_blocks(self, tmp_path):
        with netns.two_hosts(gigabits=3) as hosts, Ranks(tmp_path, 2, 40, hosts) as ranks:
            assert ranks.codes(30) == [0, 0], ranks.text()

    def test_gloo_interface_is_the_default_for_ucx(self, tmp_path):
        with netns.two_hosts() as hosts:
            for host in hosts:
                host[-1] = host[-1].replace("UCX_NET_DEVICES", "GLOO_SOCKET_IFNAME")
            with Ranks(tmp_path, 2, 4, hosts) as ranks:
                assert ranks.codes(30) == [0, 0], ranks.text()

    def test_untrusted_hosts_fall_back_to_plain(self, tmp_path):
        shared = launch.environment_of(2, WEFT_TIMEOUT="30")
        shared.pop("WEFT_UCX_TRUSTED", None)
        with netns.two_hosts() as hosts, launch.Ranks(tmp_path) as ranks:
            for rank, host in enumerate(hosts):
                host[-1] = host[-1].replace("UCX_NET_DEVICES", "GLOO_SOCKET_IFNAME")
                command = [*host, sys.executable, str(launch.HERE / "untrusted_rank.py"), str(tmp_path)]
                ranks.start(command, env={**shared, "RANK": str(rank)})
            assert ranks.codes(60) == [0, 0], ranks.text()
            for text in ranks.texts():
                assert re.search("plain collectives, because .*WEFT_UCX_TRUSTED is not 1", text), ranks.text()
                assert "UCX is not loaded" in text, ranks.text()

    def test_host_that_dies_is_named(self, tmp_path):
        with netns.two_hosts(gigabits=1) as hosts, Ranks(tmp_path, 2, FOREVER, hosts) as ranks:
            ranks.wait_ready()
            time.sleep(0.1)
            since = time.time()
            ranks.processes[1].kill()
            ranks.check_raised(0, since, 1, "lost its connection to")

    def test_cut_cable_times_out(self, tmp_path):
        with netns.two_hosts(gigabits=1) as hosts, Ranks(tmp_path, 2, FOREVER, hosts) as ranks:
            ranks.wait_ready()
            host, end = hosts[0][3], hosts[0][-1].split("=")[1]
            since = time.time()
            subprocess.run(["ip", "-n", host, "link", "set", end, "down"], check=True)
            for rank in (0, 1):
                ranks.check_raised(rank, since, 1 - rank, "waited 1500 ms for")
