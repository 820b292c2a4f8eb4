"""Progress of a conversion on stderr."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Shows how many of `total` bytes are done: a redrawn line on a terminal, otherwise a line every ten seconds."""

    def __init__(self, total: int, what: str, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.total, self.what, self.quiet, self.stream = total, what, quiet, stream or sys.stderr
        self.done, self.start = 0, time.monotonic()
        self.interval = 0.1 if self.stream.isatty() else 10.0
        self.next = self.start + self.interval

    def add(self, count: int) -> None:
        self.done += count
        if not self.quiet and time.monotonic() >= self.next:
            self.next = time.monotonic() + self.interval
            self._show(self._line(), "" if self.stream.isatty() else "\n")

    def finish(self) -> None:
        if not self.quiet and self.stream.isatty():
            self._show(self._line(), "\n")

    def _line(self) -> str:
        seconds = max(time.monotonic() - self.start, 1e-3)
        rate, left = self.done / seconds, (self.total - self.done) * seconds / max(self.done, 1)
        fraction = self.done / max(self.total, 1)
        bar = "#" * int(20 * fraction) if self.stream.isatty() else ""
        shown = f"[{bar:<20}] " if self.stream.isatty() else ""
        return (
            f"{self.what} {shown}{fraction:4.0%} of {self.total / 1e6:.0f} MB, {rate / 1e6:.0f} MB/s, {left:.0f} s left"
        )

    def _show(self, line: str, end: str) -> None:
        start = "\r\x1b[K" if self.stream.isatty() else ""
        print(start + line, end=end, file=self.stream, flush=True)
