"""Reads untrusted checkpoints in a process with limited memory.

  python convert_worker.py files FOLDER            prints the outcome for each entry of FOLDER as JSON
  python convert_worker.py fuzz FOLDER COUNT SEED  reads COUNT mutations of each checkpoint in FOLDER

A read must succeed or raise ConversionError. Any other exception, and any process started, is a failure.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from torchweft.convert import ConversionError, compare, convert, inspect

MEMORY = 256 << 20  # bytes above those of the imports
SECONDS = 90  # of this process's CPU time for one checkpoint
STARTED: list[str] = []
WATCHED = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class")


def limit_memory() -> None:
    """Limits the memory. Lazy imports and thread pools are triggered first, so that they do not count."""
    warm = Path(tempfile.mkdtemp())
    torch.save({"a": torch.ones(4, 4)}, warm / "a.pt")
    convert(warm / "a.pt", warm / "b", to="torch_dist")
    convert(warm / "b", warm / "c.safetensors", to="safetensors")
    shutil.rmtree(warm)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    sys.addaudithook(lambda event, _: STARTED.append(event) if event in WATCHED else None)


class TooSlow(BaseException):
    """Not an Exception: the reader turns every Exception into a ConversionError."""


def outcome(path: Path, check: bool, write: bool) -> str:
    """Returns "fine", or the type and text of the error."""

    def raise_too_slow(*_: object) -> None:
        raise TooSlow(f"more than {SECONDS} s")

    STARTED.clear()
    signal.signal(signal.SIGPROF, raise_too_slow)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    target = Path(tempfile.mkdtemp())
    try:
        inspect(path)
        compare(path, path)  # reads every byte
        if write:
            for to, name in (("torch_dist", "a"), ("safetensors", "b"), ("pt", "c.pt")):
                convert(path, target / name, to=to, check=check)
        answer = "fine"
    except ConversionError as error:
        answer = f"ConversionError: {error}"
    except BaseException as error:  # the tests look for these
        answer = f"{type(error).__name__}: {error}"[:500]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        shutil.rmtree(target)
    return f"started {STARTED}" if STARTED else answer


# ---- mutations ------------------------------------------------------------------------------------------------------

MALICIOUS_OPCODES = b"cposix\nsystem\nX\x04\x00\x00\x00true\x85R"
ODD_BYTES = (
    b"\x00",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x7f\xff\xff\xff",
    b"(",
    b"}",
    b"]",
    b"t",
    b"u",
    b"b",
    b"R",
    b"h\x00",
    MALICIOUS_OPCODES,
)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Makes one to four changes: flipped bits, odd bytes, removed, duplicated or moved sections, truncation."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(found) + 1), rng.choice((1, 2, 4, 8, 40, 200))
        kind = rng.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            odd = rng.choice(ODD_BYTES)
            found[at : at + len(odd)] = odd
        elif kind == 2:
            found[at:at] = rng.choice(ODD_BYTES)
        elif kind == 3:
            del found[at : at + length]
        elif kind == 4:
            start = rng.randrange(len(found) + 1)
            found[at:at] = found[start : start + length]
        elif rng.random() < 0.3:
            del found[at:]
        if not found:
            return b"\x00"
    return bytes(found)


def mutate_zip(file: Path, rng: random.Random) -> None:
    """Mutates the pickle and fixes the checksum, or mutates the raw file."""
    if rng.random() < 0.3:
        file.write_bytes(mutated(file.read_bytes(), rng))
        return
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, mutated(content, rng) if name.endswith("data.pkl") else content)


def mutate_safetensors(file: Path, rng: random.Random) -> None:
    """Mutates the header and fixes its length, or mutates the raw file."""
    content = file.read_bytes()
    if rng.random() < 0.3:
        file.write_bytes(mutated(content, rng))
        return
    (length,) = struct.unpack("<Q", content[:8])
    header = mutated(content[8 : 8 + length], rng)
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def mutate(path: Path, rng: random.Random) -> None:
    if path.is_dir():  # a torch_dist checkpoint
        file = rng.choice([path / ".metadata"] * 4 + [path / "common.pt"] + sorted(path.glob("*.distcp")))
        return mutate_zip(file, rng) if file.suffix == ".pt" else file.write_bytes(mutated(file.read_bytes(), rng))
    return mutate_zip(path, rng) if path.suffix == ".pt" else mutate_safetensors(path, rng)


def fuzz(folder: Path, count: int, seed: int) -> dict[str, dict[str, int]]:
    """Counts for each checkpoint how many mutations were read, rejected, or failed, with the number of the mutation."""
    found: dict[str, dict[str, int]] = {}
    for source in sorted(folder.iterdir()):
        answers = found.setdefault(source.name, {"fine": 0, "rejected": 0})
        for number in range(count):
            rng, place = random.Random(f"{source.name} {seed} {number}"), Path(tempfile.mkdtemp())
            copy = place / source.name
            shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
            mutate(copy, rng)
            answer = outcome(copy, check=rng.random() < 0.5, write=number % 8 == 0)
            shutil.rmtree(place)
            kind = {"fine": "fine", "Conv": "rejected"}.get(answer[:4], f"number {number}: {answer}")
            answers[kind] = answers.get(kind, 0) + 1
    return found


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    limit_memory()
    if mode == "fuzz":
        print(json.dumps(fuzz(folder, int(sys.argv[3]), int(sys.argv[4]))))
    else:
        print(json.dumps({path.name: outcome(path, check=True, write=True) for path in sorted(folder.iterdir())}))


if __name__ == "__main__":
    main()
