"""What the framework's logger is told about a sync."""

from __future__ import annotations

from collections.abc import Iterable

from sparrowrl.delta.published import Published
from sparrowrl.job.replica import Report


def of_publish(done: Published, seconds: float, anchor: bool) -> dict[str, float]:
    """Metrics of one publish that took `seconds`; `anchor` says that the version was (also) written whole."""
    return {
        "sparrow/version": float(done.version),
        "sparrow/density": done.changed / max(done.elements, 1),
        "sparrow/changed": float(done.changed),
        "sparrow/payload_bytes": float(done.payload_bytes),
        "sparrow/bits_per_changed": done.bits_per_changed,
        "sparrow/publish_s": seconds,
        "sparrow/diff_s": done.diff_ms / 1000,
        "sparrow/encode_s": done.encode_ms / 1000,
        "sparrow/put_s": done.put_ms / 1000,
        "sparrow/commit_s": done.commit_ms / 1000,
        "sparrow/anchor": float(anchor),
    }


def of_sync(reports: list[Report], seconds: float) -> dict[str, float]:
    """Metrics of one sync that took `seconds`, from all replicas' reports: the slowest of times, the sum of counts.

    Keys begin with "sparrow/"; docs/jobs.md says what each means. Times end in _s (seconds) or _ms (milliseconds).
    """
    activations = [each for report in reports for each in report["activations"]]
    return {
        "sparrow/sync_s": seconds,
        "sparrow/replicas": float(len(reports)),
        "sparrow/oldest_version": min(float(report["version"] or 0) for report in reports),
        "sparrow/fetch_s": _most(each["fetch_ms"] for each in activations) / 1000,
        "sparrow/stage_s": _most(each["stage_ms"] for each in activations) / 1000,
        "sparrow/pause_ms": _most(each["pause_ms"] for each in activations),
        "sparrow/requests_in_flight": float(sum(each["requests_in_flight"] for each in activations)),
        "sparrow/requests_aborted": float(sum(each["aborted"] for each in activations)),
        "sparrow/tokens_during_transfer": float(sum(each["tokens_during_transfer"] for each in activations)),
        "sparrow/bytes_per_replica": _most(report["fetched_bytes"] for report in reports),
        "sparrow/fingerprints_ok": float(all(report["fingerprint_ok"] for report in reports)),
        "sparrow/audits_ok": float(all(report["audit_ok"] is not False for report in reports)),
        "sparrow/oldest_audit": min(float(report["audited"] or 0) for report in reports),
    }


def _most(values: Iterable[float]) -> float:
    return float(max(values, default=0.0))
