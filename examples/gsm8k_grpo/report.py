"""What a run leaves behind: report.json (README.md describes it) and the page made of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sparrowrl.transport.node import Activation

SCHEMA = 1


@dataclass(slots=True)
class VersionRow:
    """One version: what the trainer did to make it, what it cost to send, and how the engine switched to it.

    Times of day are seconds since the start of the run. What comes from the engine is None until it reports, and stays
    None for a version that it skipped because a later one came as one merged delta (`merged_into`).
    """

    version: int
    reward: float
    exact: float
    marked: float
    loss: float
    gradient_norm: float
    clipped: float
    kl: float
    train_tokens: int
    oldest_sampled: int
    waited_s: float
    train_s: float
    elements: int
    changed: int
    payload_bytes: int
    full_bytes: int
    bits_per_changed: float
    diff_ms: float
    encode_ms: float
    put_ms: float
    commit_ms: float
    train_began: float
    published_began: float
    published: float
    base: int | None = None
    merged_into: int | None = None
    transfer_ms: float | None = None
    stage_ms: float | None = None
    pause_ms: float | None = None
    requests_in_flight: int | None = None
    aborted: int | None = None
    tokens_during_transfer: int | None = None
    longest_gap_ms: float | None = None
    fingerprint_ok: bool | None = None
    active: float | None = None

    @property
    def publish_ms(self) -> float:
        """The trainer's own share: compare, encode, hand over, commit."""
        return self.diff_ms + self.encode_ms + self.put_ms + self.commit_ms

    @property
    def settled(self) -> bool:
        """Whether the engine has reported on it."""
        return self.fingerprint_ok is not None or self.merged_into is not None

    def activated(self, activation: Activation, now: float) -> None:
        """Take in the engine's account of the switch to this version."""
        self.base = activation.base
        self.transfer_ms = activation.fetch_ms
        self.stage_ms = activation.stage_ms
        self.pause_ms = activation.pause_ms
        self.requests_in_flight = activation.requests_in_flight
        self.aborted = activation.aborted
        self.tokens_during_transfer = activation.tokens_during_transfer
        self.fingerprint_ok = activation.fingerprint_ok
        self.active = now


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """The engine's exported weights against the trainer's, bit for bit."""

    tensors: int
    elements: int
    different: int
    first_difference: str | None


@dataclass(frozen=True, slots=True)
class Origin:
    """The audit of version 0: the engine's loaded weights against what the trainer starts from."""

    version: int | None
    audit_ok: bool | None


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by how they ended; `crossed` of those that finished saw the weights change on their way."""

    stop: int
    length: int
    aborted: int
    failed: int
    crossed: int
    stale_groups: int


@dataclass(slots=True)
class Report:
    """All of report.json."""

    schema: int
    started: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    model: dict[str, Any]
    seconds: float = 0.0
    ok: bool = False
    problems: list[str] = field(default_factory=list)
    origin: Origin | None = None
    versions: list[VersionRow] = field(default_factory=list)
    audit_ok: bool = False
    audit_detail: str = ""
    export: ExportCheck | None = None
    requests: Requests | None = None
    usual_gap_ms: float | None = None
    tokens_per_second: list[int] = field(default_factory=list)

    def judge(self) -> None:
        """Set `ok`, and in `problems` what speaks against it."""
        self.problems += _problems(self)
        self.ok = not self.problems


def _problems(report: Report) -> Iterable[str]:
    if report.origin is None or not report.origin.audit_ok:
        yield "version 0: the engine's weights were not proved to be those the trainer starts from"
    wanted = report.settings.get("steps")
    if len(report.versions) != wanted:
        yield f"expected {wanted} versions, got {len(report.versions)}"
    for row in report.versions:
        if row.merged_into is None and not row.fingerprint_ok:
            told = "it never became active" if row.fingerprint_ok is None else "the live fingerprint differs"
            yield f"version {row.version}: {told}"
        if row.aborted:
            yield f"version {row.version}: {row.aborted} requests aborted"
    if report.requests is not None and report.requests.aborted + report.requests.failed:
        yield f"{report.requests.aborted} requests aborted and {report.requests.failed} failed"
    if not report.audit_ok:
        yield f"the final audit did not agree: {report.audit_detail or 'it did not take place'}"
    if report.export is None:
        yield "the engine's weights were not exported"
    elif report.export.different:
        yield f"{report.export.different} exported weights differ, the first {report.export.first_difference}"


def longest_gap_ms(pieces: Iterable[tuple[float, int, float]], begin: float, end: float) -> float | None:
    """The longest wait of a request for its next tokens that overlaps begin..end; None if no tokens came then.

    Takes (arrival, tokens, seconds since the piece before of the same request); times are of one clock.
    """
    gaps = [gap for arrival, _, gap in pieces if arrival >= begin and arrival - gap <= end]
    return 1000 * max(gaps) if gaps else None


def usual_gap_ms(pieces: Iterable[tuple[float, int, float]]) -> float | None:
    """The median wait for the next tokens; the first piece of a request does not count."""
    gaps = [gap for _, _, gap in pieces if gap > 0]
    return 1000 * median(gaps) if gaps else None


def per_second(pieces: Iterable[tuple[float, int, float]], start: float, seconds: float) -> list[int]:
    """Tokens that arrived in each second from `start` on."""
    counts = [0] * (int(seconds) + 1)
    for arrival, tokens, _ in pieces:
        second = int(arrival - start)
        if 0 <= second < len(counts):
            counts[second] += tokens
    return counts


def to_json(report: Report) -> str:
    """report.json."""
    raw = dataclasses.asdict(report)
    for row, filled in zip(report.versions, raw["versions"], strict=True):
        filled["publish_ms"] = row.publish_ms
    return json.dumps(raw, indent=1, ensure_ascii=False)
