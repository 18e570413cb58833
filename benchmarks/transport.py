"""Throughput of hub and agent over loopback: how fast one artifact is put by HubSink, and fetched by an agent.

    python benchmarks/transport.py [--mebibytes 64] [--repeats 5] [--folder DIR] [--csv FILE]

Hub and agent are processes of their own. The artifact is made of segments of 2 MiB of random bytes. `put` is the time
from the first `put` to the end of `commit`: hashed, sent, hashed again, made durable in the journal's folder. `fetch`
is the agent's `fetch_ms`: manifest and segments fetched, hashed, written to /dev/shm, named in next.json. One row for
each direction and number of connections: the median, least and most of the repeats, and the artifact's size over the
median. The load of the machine at the start is part of the row: whatever else runs takes its share of the cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from record import RESULTS, append, context

from sparrowrl.config import Credentials
from sparrowrl.delta.layout import Layout, TensorSpec, state_id
from sparrowrl.delta.manifest import Manifest, SegmentRef, TensorChange
from sparrowrl.transport.client import HubSink
from sparrowrl.transport.node import NodeDirectory, RankStatus

SEGMENT = 2 << 20
COMMAND = [sys.executable, "-m", "sparrowrl.cli.main"]
LAYOUT = Layout([TensorSpec("w", "BF16", (1 << 30,))])


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the journal goes")
    parser.add_argument("--csv", type=Path, default=RESULTS / "transport.csv")
    args = parser.parse_args()
    about = context("aiohttp", "blake3")
    rows = []
    for connections in (1, 4):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            times = measure(Path(folder), connections, args.mebibytes << 20, args.repeats)
        rows += [
            {**row(direction, connections, args.mebibytes << 20, ms), "journal_in": str(args.folder), **about}
            for direction, ms in times.items()
        ]
    append(args.csv, rows)
    for one in rows:
        print({name: value for name, value in one.items() if name not in about})


def measure(folder: Path, connections: int, size: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each repeat."""
    credentials = Credentials.new("benchmark")
    credentials.save(folder / "credentials.json")
    times: dict[str, list[float]] = {"put": [], "fetch": []}
    with hub(folder) as url:
        sink = HubSink(url, credentials, connections=connections)
        sink.lead()
        sink.put_layout(LAYOUT.to_bytes())
        sink.open(0, "origin").commit(manifest(0, []))
        for target in range(1, repeats + 1):
            bodies = [os.urandom(SEGMENT) for _ in range(size // SEGMENT)]
            began = time.perf_counter()
            draft = sink.open(target, f"{target - 1}.fast")
            refs = [draft.put(body) for body in bodies]
            draft.commit(manifest(target, refs))
            times["put"].append(1e3 * (time.perf_counter() - began))
            times["fetch"].append(fetch(folder, url, target, connections))
        sink.close()
    return times


def fetch(folder: Path, url: str, target: int, connections: int) -> float:
    """Start an agent for an engine at the version before; its `fetch_ms`."""
    node = NodeDirectory.create("benchmark")
    state = state_id(LAYOUT, [target - 1]).hex()
    node.rank(0).write(RankStatus(0, os.getpid(), target - 1, state))
    command = [*COMMAND, "agent", "--hub", url, "--token-file", str(folder / "credentials.json")]
    command += ["--node-dir", str(node.root), "--engine-id", "benchmark", "--connections", str(connections)]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            status, artifact = node.agent.read(), node.next.read()
            if status is not None and status.fetch_ms and artifact is not None and artifact.committed:
                return status.fetch_ms
            time.sleep(0.01)
        raise SystemExit(f"the agent did not fetch version {target} in 120 s: {node.agent.read()}")
    finally:
        agent.terminate()
        agent.wait(20)
        node.remove()


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """A hub process; its address."""
    command = [*COMMAND, "hub", "--journal", str(folder / "journal"), "--port", "0"]
    command += ["--credentials", str(folder / "credentials.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(20)


def manifest(target: int, refs: list[SegmentRef]) -> Manifest:
    """Version n has the fingerprint n, which no reader on this way looks behind."""
    delta = target > 0
    return Manifest(
        run="benchmark",
        kind="delta" if delta else "origin",
        codec="fast" if delta else None,
        base=target - 1 if delta else None,
        target=target,
        base_state=state_id(LAYOUT, [target - 1]) if delta else None,
        target_state=state_id(LAYOUT, [target]),
        layout=LAYOUT.id,
        created_ms=1,
        changed=1 if delta else 0,
        tensors=(TensorChange(0, 1 if delta else 0, target),),
        segments=tuple(refs),
    )


def row(direction: str, connections: int, size: int, ms: list[float]) -> dict[str, object]:
    """One line of the CSV file."""
    middle = statistics.median(ms)
    return {
        "direction": direction,
        "connections": connections,
        "bytes": size,
        "segments": size // SEGMENT,
        "repeats": len(ms),
        "ms": round(middle, 1),
        "ms_min": round(min(ms), 1),
        "ms_max": round(max(ms), 1),
        "gbit_per_s": round(8 * size / middle / 1e6, 2),
    }


if __name__ == "__main__":
    main()
