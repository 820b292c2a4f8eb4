"""A process outside the job attacks every socket of a training over shared memory; the loss stays correct."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import launch  # noqa: E402


def run_under_attack(folder: pathlib.Path, seconds: float) -> None:
    shared = launch.environment_of(2, WEFT_TRANSPORT="shm", WEFT_TIMEOUT="30")
    other = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
    with launch.Ranks(folder) as ranks:
        for rank in range(2):
            ranks.fork("attacked_rank.py", str(folder), env={**shared, "RANK": str(rank)})
        end = time.time() + 60
        while not all((folder / f"rank{rank}.ready").exists() for rank in range(2)):
            assert time.time() < end, ranks.text()
            time.sleep(0.01)
        ports = [f"{host}:{port}" for process in ranks.processes for host, port in launch.listening(process.pid)]
        script = (launch.HERE / "attacker.py").read_text()  # another user may not be able to read the file
        attackers = [
            subprocess.Popen(
                ["python3", "-c", script, str(seconds), str(n), *ports], stdout=subprocess.PIPE, cwd="/", **other
            )
            for n in range(2)
        ]
        reached = [int(attacker.communicate()[0].split()[0]) for attacker in attackers]
        (folder / "end").touch()
        assert ranks.codes(90) == [0, 0], ranks.text()
    for rank in range(2):
        losses = json.loads((folder / f"rank{rank}.json").read_text())
        assert len(losses) > 2 and len(set(losses)) == 1, losses
    assert min(reached) > 0, "no socket was found"


def test_attacker_does_not_disturb_training(tmp_path):
    run_under_attack(tmp_path, 5)


@pytest.mark.slow
def test_attacker_does_not_disturb_training_for_a_minute(tmp_path):
    run_under_attack(tmp_path, 60)
