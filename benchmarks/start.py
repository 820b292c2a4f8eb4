"""What a group of ranks costs before the first step and after the last one, by its size.

    python benchmarks/start.py                  1,024 threads and 64 processes on this machine
    python benchmarks/start.py --quick          64 threads and 8 processes
    python benchmarks/start.py --json FILE      also as JSON

Ranks as threads agree on a transport through a Store in their process. Ranks as processes also exchange shared memory
over sockets, run collectives and end; their Store is torch's TCPStore. `messages` are requests of one rank to the
Store, the most of any rank. Collectives send none. `leftovers` counts the files, sockets and threads that a process has
more after the teardown than before the rendezvous. `late` ranks
start one after the other, so that each is waited for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import socket
import subprocess
import sys
from math import log2
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
THREADS, PROCESSES = (2, 8, 64, 256, 1024), (2, 4, 8, 16, 32, 64)
LATE = 64, 20  # ranks, and milliseconds between their starts
QUICK_THREADS, QUICK_PROCESSES = (2, 64), (2, 8)
COLUMNS = ["ranks", "agreement", "rendezvous", "collective", "teardown", "messages of a rank", "their bytes"]
MESSAGES = 64  # times log2(ranks): bound of one rank's messages to the Store at start-up


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_threads(program: Path, ranks: int, ms: int = 0) -> dict:
    done = subprocess.run(
        [program, "threads", str(ranks), str(ms)], capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout)


def run_processes(program: Path, ranks: int) -> dict:
    """Returns the figures of the slowest rank."""
    port = str(free_port())
    commands = ([program, "process", str(rank), str(ranks), port] for rank in range(ranks))
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        texts = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"exit codes {[process.returncode for process in processes]}")
    rows = [json.loads(text) for text in texts]
    return {name: max(row[name] for row in rows) for name in rows[0] if name != "rank"}


def cells(kind: str, row: dict) -> list[str]:
    """Returns the cells of a table; ranks that are threads only agree on a transport."""

    def ms(name: str) -> str:
        value = row.get(name, 0.0) * 1e3
        return "" if name not in row else f"{value:,.0f} ms" if value >= 100 else f"{value:.2g} ms"

    times = (ms(name) for name in ("agreement_s", "rendezvous_s", "collective_s", "teardown_s"))
    return [f"{row['ranks']:,} {kind}", *times, str(row["messages"]), f"{row['bytes'] / 1e3:.1f} kB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/start_rank")
    arguments = parser.parse_args()
    threads, processes = [], []
    for ranks in QUICK_THREADS if arguments.quick else THREADS:
        threads.append(run_threads(arguments.program, ranks))
        print("threads  ", threads[-1], flush=True)
    late = run_threads(arguments.program, *LATE)
    print("late     ", late, flush=True)
    for ranks in QUICK_PROCESSES if arguments.quick else PROCESSES:
        processes.append(run_processes(arguments.program, ranks))
        print("processes", processes[-1], flush=True)
    worst = max(threads + processes, key=lambda row: row["messages"] / log2(row["ranks"]))
    during = max(row["messages_of_collectives"] for row in processes)
    left = max(row["leftovers"] for row in processes)
    if arguments.json:
        made = {"date": datetime.date.today().isoformat(), "command": " ".join(["benchmarks/start.py", *sys.argv[1:]])}
        rows = [*(cells("threads", row) for row in threads), cells(f"threads, one every {LATE[1]} ms", late)]
        rows += [cells("processes", row) for row in processes]
        arguments.json.write_text(json.dumps({**made, "columns": COLUMNS, "rows": rows}, indent=1) + "\n")
    ratio = worst["messages"] / log2(worst["ranks"])
    print(f"start: a rank sends at most {ratio:.1f} log2(ranks) messages, {during} in collectives; {left} leftovers")
    sys.exit(0 if ratio <= MESSAGES and not during and not left else 1)


if __name__ == "__main__":
    main()
