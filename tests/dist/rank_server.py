"""Forks ranks from a process that has imported torch, because importing it takes longer than most tests.

Reads one rank per line, as JSON: script, arguments, environment and log file. Answers with one line, the rank's process
id, when the rank is a child of the process that started the server and is its subreaper. The rank runs the script and
exits as an interpreter does.

Ranks forked from one process are more alike than ranks started one by one: they share a hash seed, a layout of the
address space and the modules of `IMPORTED`. Some tests therefore do not fork. weft is not imported here, because it may
read the environment.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import runpy
import sys
from typing import Any

IMPORTED = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor")


def run(rank: dict[str, Any]) -> None:
    log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(rank["environment"])
    sys.argv = [rank["script"], *rank["arguments"]]
    sys.path[0] = str(pathlib.Path(rank["script"]).parent)
    runpy.run_path(rank["script"], run_name="__main__")


def serve() -> None:
    """Returns at the end of the input, and in each rank after its script."""
    for name in IMPORTED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork copies one of {len(threads)} threads"
    for line in iter(sys.stdin.readline, ""):
        reader, writer = os.pipe()
        intermediate = os.fork()
        if intermediate == 0:
            pid = os.fork()
            if pid == 0:
                return run(json.loads(line))
            os.write(writer, str(pid).encode())
            os._exit(0)  # the rank's parent is now the subreaper
        os.waitpid(intermediate, 0)
        print(os.read(reader, 20).decode(), flush=True)
        os.close(reader)
        os.close(writer)


serve()
