"""What a publish did, and how long each part of it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish did: over all ranks, but for the times, which are this rank's, in milliseconds.

    `kind` is "delta", "anchor" or "origin"; `changed` of `elements` weights changed; `payload_bytes` are those of the
    segments and the manifest; `put_ms` is the time spent handing segments to the sink.
    """

    version: int
    kind: str
    changed: int
    elements: int
    payload_bytes: int
    diff_ms: float
    encode_ms: float
    put_ms: float
    commit_ms: float

    @property
    def bits_per_changed(self) -> float:
        """Bits of the whole artifact per changed weight; 0 if nothing changed."""
        return 8 * self.payload_bytes / self.changed if self.changed else 0.0

    def log(self, run: str, logger: logging.Logger) -> None:
        """Say it."""
        if not self.changed:
            logger.warning("run %s: version %d has no changed weight", run, self.version)
        logger.info(
            "run %s: %s of version %d: %d of %d weights changed (%.3f %%), %.1f KiB, %.2f bits per change; "
            "diff %.0f, encode %.0f, put %.0f, commit %.0f ms",
            run,
            self.kind,
            self.version,
            self.changed,
            self.elements,
            100 * self.changed / max(self.elements, 1),
            self.payload_bytes / 1024,
            self.bits_per_changed,
            self.diff_ms,
            self.encode_ms,
            self.put_ms,
            self.commit_ms,
        )


@dataclass(slots=True)
class Clock:
    """Milliseconds spent on each kind of work."""

    diff_ms: float = 0.0
    encode_ms: float = 0.0
    put_ms: float = 0.0
    commit_ms: float = 0.0

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Add the time inside to the field of that name."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + (time.perf_counter() - begin) * 1e3)
