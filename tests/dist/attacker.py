"""A process outside the job that attacks every socket of some ranks.

    python attacker.py SECONDS SEED HOST:PORT...

Connects to every local socket whose name begins with "weft-" and to the given TCP ports; sends random bytes, the
beginning of a handshake, or nothing, and keeps many connections open. Prints the number of connections of each kind.
"""

from __future__ import annotations

import contextlib
import pathlib
import random
import re
import socket
import sys
import time

HELD = 200  # open connections
REMOTE = 400  # TCP connections in total: Gloo's listener never closes one, and aborts without a free file descriptor


def local_names() -> list[str]:
    return re.findall(r"@(weft-\S+)", pathlib.Path("/proc/net/unix").read_text())


def bytes_to_send(rng: random.Random) -> bytes:
    hello = b"weftmem1" + bytes(8) + rng.randbytes(16)
    return rng.choice([b"", rng.randbytes(rng.choice([1, 13, 32, 4096])), hello[: rng.randrange(32)], hello])


def attack(make, address, rng: random.Random, held: list[socket.socket]) -> int:
    try:
        connection = make()
        connection.setblocking(False)
        connection.connect(address)
    except BlockingIOError:
        pass
    except OSError:
        return 0
    with contextlib.suppress(OSError):
        connection.send(bytes_to_send(rng))
    held.append(connection) if rng.random() < 0.5 else connection.close()
    while len(held) > HELD:
        held.pop(rng.randrange(len(held))).close()
    return 1


def main() -> None:
    seconds, rng = float(sys.argv[1]), random.Random(sys.argv[2])
    listening = [(word.split(":")[0], int(word.split(":")[1])) for word in sys.argv[3:]]
    held: list[socket.socket] = []
    local = remote = 0
    end = time.time() + seconds
    while time.time() < end or (not local and time.time() < end + 60):  # sockets are open for milliseconds at a time
        for name in local_names():
            for _ in range(20):
                local += attack(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), "\0" + name, rng, held)
        if remote < REMOTE and rng.random() < 0.05:
            for address in listening:
                remote += attack(socket.socket, address, rng, held)
    print(local, remote)


if __name__ == "__main__":
    main()
