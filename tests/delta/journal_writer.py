"""Writes versions into a journal as fast as it can; test_journal_kill.py kills it.

    journal_writer.py ROOT

Prints each version once it is committed.
"""

from __future__ import annotations

import sys

import torch

from sparrowrl.config import Credentials
from sparrowrl.delta import publisher, segment
from sparrowrl.delta.materialize import materialize
from sparrowrl.delta.retention import Retention
from sparrowrl.delta.sink import JournalSink
from sparrowrl.kernels.bits import as_bits


def main() -> None:
    torch.set_num_threads(1)
    publisher.SegmentPacker = lambda layout: segment.SegmentPacker(layout, 500)  # type: ignore[misc,assignment]
    credentials = Credentials("run", bytes(32), "reader", "writer")
    sink = JournalSink(sys.argv[1], credentials, retention=Retention(6))
    weights = {"w": torch.zeros(3000, dtype=torch.bfloat16)}
    newest = sink.journal.newest()
    if newest:
        weights = materialize(sink.journal, newest, weights)
    trainer = publisher.Publisher(sink, weights.items(), anchor_every=3)
    assert trainer.version == (newest or 0), "resuming must not make a version"
    sys.stdout.write("started\n")
    while True:
        as_bits(weights["w"])[torch.rand(3000) < 0.3] += 1
        sys.stdout.write(f"{trainer.publish(weights.items()).version}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
