"""What verl's logger is told about a sync."""

from __future__ import annotations

from collections.abc import Iterable

from sparrowrl.verl_plugin.server import Report


def of_sync(reports: list[Report], seconds: float) -> dict[str, float]:
    """Metrics of one sync that took `seconds`, from all replicas' reports: the slowest of times, the sum of counts.

    Keys begin with "sparrow/"; docs/verl.md says what each means. Times end in _s (seconds) or _ms (milliseconds).
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
