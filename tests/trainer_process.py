"""A trainer as a process of its own, to be killed: changes random weights, publishes them, saves a checkpoint at times.

Run as: python trainer_process.py HUB_URL CREDENTIALS CHECKPOINT SECONDS_BETWEEN. It starts from CHECKPOINT
(safetensors) and saves there after every third version, as a training job would, so that a restart goes back to
earlier weights.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import sparrowrl
from sparrowrl.errors import JournalLocked, SparrowError, TransportError

PATIENCE_S = 120.0


def patiently(action):  # type: ignore[no-untyped-def]
    """Try again while the hub is away or still takes the trainer killed before for the writer."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return action()
        except (TransportError, JournalLocked) as error:
            if time.monotonic() > deadline:
                raise
            print(f"again: {type(error).__name__}: {error}", flush=True)
            time.sleep(0.2)


def main(url: str, credentials: str, checkpoint: Path, pause: float) -> None:
    """Publish until killed."""
    weights = load_file(checkpoint)
    random = torch.Generator().manual_seed(os.getpid())
    sink = patiently(lambda: sparrowrl.HubSink(url, sparrowrl.Credentials.load(credentials)))
    publisher = patiently(lambda: sparrowrl.Publisher(sink, weights.items()))
    print(f"start {publisher.version}", flush=True)
    while True:
        for tensor in weights.values():
            mask = torch.rand(tensor.shape, generator=random) < 0.01
            tensor[mask] += (torch.randn(tensor.shape, generator=random) * 0.05).to(tensor.dtype)[mask]
        done = patiently(lambda: publisher.publish(weights.items()))
        print(f"version {done.version} {done.kind}", flush=True)
        if done.version % 3 == 0:
            save_file(weights, checkpoint.with_suffix(".part"), {"format": "pt"})
            os.replace(checkpoint.with_suffix(".part"), checkpoint)
        time.sleep(pause)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
    except SparrowError as error:
        sys.exit(f"{type(error).__name__}: {error}")
