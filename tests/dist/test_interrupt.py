"""Ctrl-C ends a wait for another rank within a second, on every transport, and arrives as KeyboardInterrupt."""

from __future__ import annotations

import pathlib
import signal
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import launch  # noqa: E402

CASES = [
    (transport, where)
    for transport in ("shm", "ucx", "plain")
    for where in ("forward", "backward", "rendezvous", "signal")
    if where in ("forward", "backward") or transport == "shm" or (transport, where) == ("ucx", "rendezvous")
]


@pytest.mark.parametrize(("transport", "where"), CASES)
def test_interrupt_ends_wait(tmp_path, transport, where):
    shared = launch.environment_of(2, WEFT_TRANSPORT=transport, WEFT_UCX_TRUSTED="1")
    with launch.Ranks(tmp_path) as ranks:
        for rank in range(2):
            ranks.fork("interrupt_rank.py", str(tmp_path), where, env={**shared, "RANK": str(rank)})
        end = time.time() + 60
        while not (tmp_path / "rank0.waiting").exists():
            assert time.time() < end, ranks.text()
            time.sleep(0.01)
        time.sleep(0.5)
        assert not (tmp_path / "rank0.raised").exists(), ranks.text()
        since = time.time()
        ranks.processes[0].send_signal(signal.SIGINT)
        assert ranks.processes[0].wait(30) == 0, ranks.text()
        raised = tmp_path / "rank0.raised"
        assert raised.read_text().startswith("KeyboardInterrupt"), raised.read_text()
        assert raised.stat().st_mtime - since < 1.0
