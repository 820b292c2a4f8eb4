"""Links over UCX between real processes: they carry blocks, and the end of a rank is noticed by the others."""

from __future__ import annotations

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
import netns  # noqa: E402

BUILD = pathlib.Path(os.environ.get("WEFT_BUILD", pathlib.Path(__file__).parents[2] / "build" / "release"))
PROGRAM = BUILD / "ucx_rank"
TIMEOUT = 1.5  # seconds, of every wait
GRACE = 1.0
FOREVER = 10**9

if not PROGRAM.exists() or not (BUILD / "libweft_ucx.so").exists():
    pytest.skip(f"no ucx_rank and libweft_ucx.so in {BUILD}: built without UCX", allow_module_level=True)


class Ranks(launch.Ranks):
    def __init__(self, folder: pathlib.Path, size: int, rounds: int, prefixes: list[list[str]] | None = None):
        super().__init__(folder)
        env = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")} | {"OMP_NUM_THREADS": "1"}
        for rank in range(size):
            words = [PROGRAM, rank, size, folder / "store", int(TIMEOUT * 1000), rounds]
            self.start([*(prefixes[rank] if prefixes else []), *map(str, words)], env=env)

    def wait_ready(self) -> None:
        end = time.time() + 20
        while not all("ready" in log.read_text() for log in self.logs):
            assert time.time() < end, self.text()
            time.sleep(0.01)

    def check_raised(self, rank: int, since: float, names: str) -> None:
        """The rank raised in time and named who is gone and in which operation; it also ended."""
        assert self.processes[rank].wait(TIMEOUT + GRACE + 5) == 3, self.text()
        found = re.search(r"raised at ([\d.]+): (.*)", self.logs[rank].read_text())
        assert found and float(found[1]) - since < TIMEOUT + GRACE, self.text()
        assert re.search(f"rank ({names})", found[2]) and re.search("all_gather|reduce_scatter", found[2]), self.text()


@pytest.mark.parametrize("size", [2, 4])
def test_processes_exchange_blocks(tmp_path, size):
    with Ranks(tmp_path, size, 40) as ranks:
        assert ranks.codes(30) == [0] * size, ranks.text()


@pytest.mark.parametrize(
    ("size", "how"),
    [(2, signal.SIGKILL), (4, signal.SIGKILL), (2, signal.SIGSTOP), (4, signal.SIGSTOP)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_survivors_name_the_rank_that_is_gone(tmp_path, size, how):
    chance = random.Random(f"{size}{how}")
    victim = chance.randrange(size)
    with Ranks(tmp_path, size, FOREVER) as ranks:
        ranks.wait_ready()
        time.sleep(chance.uniform(0, 0.3))
        since = time.time()
        ranks.processes[victim].send_signal(how)
        for rank in set(range(size)) - {victim}:
            ranks.check_raised(rank, since, str(victim))


def test_a_rank_that_dies_before_it_is_met_is_named(tmp_path):
    with Ranks(tmp_path, 3, FOREVER) as ranks:
        ranks.processes[1].kill()
        start = time.time()
        for rank in (0, 2):
            assert ranks.processes[rank].wait(15) == 3, ranks.text()
            assert "rank 1" in ranks.logs[rank].read_text(), ranks.text()
        assert time.time() - start < TIMEOUT + GRACE + 2  # and the start of a process


@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "-")
class TestTwoHosts:
    def test_hosts_exchange_blocks(self, tmp_path):
        with netns.two_hosts(gigabits=3) as hosts, Ranks(tmp_path, 2, 40, hosts) as ranks:
            assert ranks.codes(30) == [0, 0], ranks.text()

    def test_gloo_s_interface_is_taken_where_ucx_is_told_none(self, tmp_path):
        with netns.two_hosts() as hosts:
            for host in hosts:
                host[-1] = host[-1].replace("UCX_NET_DEVICES", "GLOO_SOCKET_IFNAME")
            with Ranks(tmp_path, 2, 4, hosts) as ranks:
                assert ranks.codes(30) == [0, 0], ranks.text()

    def test_a_host_that_dies_is_named(self, tmp_path):
        with netns.two_hosts(gigabits=1) as hosts, Ranks(tmp_path, 2, FOREVER, hosts) as ranks:
            ranks.wait_ready()
            time.sleep(0.1)
            since = time.time()
            ranks.processes[1].kill()
            ranks.check_raised(0, since, "1")

    def test_a_cable_that_is_cut_is_a_timeout(self, tmp_path):
        with netns.two_hosts(gigabits=1) as hosts, Ranks(tmp_path, 2, FOREVER, hosts) as ranks:
            ranks.wait_ready()
            host, end = hosts[0][3], hosts[0][-1].split("=")[1]
            since = time.time()
            subprocess.run(["ip", "-n", host, "link", "set", end, "down"], check=True)
            for rank in (0, 1):
                ranks.check_raised(rank, since, str(1 - rank))
