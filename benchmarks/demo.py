"""The demo as a measurement: runs `sparrowrl demo` and appends one row a version to a CSV file.

Arguments after `--` go to the demo (its own default otherwise). What the columns mean is said in
examples/gsm8k_grpo/README.md; `exported` counts the weights of the live engine that were compared with the trainer's in
the end, and `differing` those that were not the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from record import RESULTS, append, context

COLUMNS = [
    "version", "elements", "changed", "payload_bytes", "bits_per_changed", "publish_ms", "transfer_ms", "stage_ms",
    "pause_ms", "longest_gap_ms", "tokens_during_transfer", "requests_in_flight", "aborted", "fingerprint_ok",
]  # fmt: skip


def main() -> None:
    """Run, then append. Stops if the demo did not succeed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="the demo's folder")
    parser.add_argument("--csv", type=Path, default=RESULTS / "demo.csv")
    parser.add_argument("arguments", nargs="*")
    args = parser.parse_args()
    about = context("torch", "vllm", "transformers")
    command = [sys.executable, "-m", "sparrowrl.cli.main", "demo", "--out", str(args.out), *args.arguments]
    subprocess.run(command, check=True)
    report = json.loads((args.out / "report.json").read_text())
    export = {"exported": report["export"]["elements"], "differing": report["export"]["different"]}
    shared = {"model": report["model"]["name"], "seconds": report["seconds"], "audit_ok": report["audit_ok"], **export}
    append(args.csv, [{**shared, **{name: row[name] for name in COLUMNS}, **about} for row in report["versions"]])


if __name__ == "__main__":
    main()
