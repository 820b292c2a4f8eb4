"""Two network namespaces connected by a veth pair, which act as two hosts. Needs root."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator


def unavailable_reason() -> str:
    """Why network namespaces cannot be created; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            return f"no {tool}: apt-get install iproute2"
    name = f"weft-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.stderr.strip() if made.returncode else ""


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def _wait_for_carrier(hosts: list[str], ends: list[str]) -> None:
    for host, end in zip(hosts, ends, strict=True):
        for _ in range(200):
            if (
                "LOWER_UP"
                in subprocess.run(["ip", "-n", host, "link", "show", end], capture_output=True, text=True).stdout
            ):
                break
            time.sleep(0.01)


@contextlib.contextmanager
def two_hosts(gigabits: float | None = None, burst: str = "256kb") -> Iterator[list[list[str]]]:
    """Yields for each host the prefix of a command that runs there. Names are unique; removes everything at exit."""
    tag = secrets.token_hex(3)
    hosts, ends = [f"weft-{tag}-{i}" for i in (0, 1)], [f"w{tag}{i}" for i in (0, 1)]
    try:
        for host in hosts:
            _run(f"ip netns add {host}")
        _run(f"ip link add {ends[0]} netns {hosts[0]} type veth peer name {ends[1]} netns {hosts[1]}")
        for i, (host, end) in enumerate(zip(hosts, ends, strict=True)):
            _run(f"ip -n {host} addr add 10.99.0.{i + 1}/24 dev {end}")
            _run(f"ip -n {host} link set {end} up")
            _run(f"ip -n {host} link set lo up")
            if gigabits:
                rate = f"{int(gigabits * 1000)}mbit"
                _run(f"ip netns exec {host} tc qdisc add dev {end} root tbf rate {rate} burst {burst} latency 50ms")
        _wait_for_carrier(hosts, ends)
        yield [
            ["ip", "netns", "exec", host, "env", f"UCX_NET_DEVICES={end}"]
            for host, end in zip(hosts, ends, strict=True)
        ]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)
