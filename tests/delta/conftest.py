"""A small trainer that the tests of the journal and the publisher share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.publisher import Published, Publisher
from sparrowrl.delta.sink import JournalSink

Weights = dict[str, torch.Tensor]


def first_weights() -> Weights:
    """Tensors of several dtypes and odd sizes, among them an empty one and a scalar."""
    rng = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(97, 33, generator=rng),
        "layers.0.up.weight": torch.randn(65, 31, generator=rng).bfloat16(),
        "layers.0.norm.weight": torch.ones(31),
        "empty": torch.empty(0, 5),
        "scale": torch.tensor(2.0),
        "positions": torch.arange(17),
        "mask": torch.tensor([True, False, True]),
        "fp8": torch.randn(9, 3, generator=rng).to(torch.float8_e4m3fn),
    }


class Trainer:
    """Weights that are stepped and published; keeps every version's wire bits to compare with."""

    def __init__(self, root: Path, credentials: Credentials, **options: object) -> None:
        self.weights = first_weights()
        self.rng = torch.Generator().manual_seed(1)
        self.sink = JournalSink(root, credentials)
        self.publisher = Publisher(self.sink, self.weights.items(), **options)
        self.history = {self.publisher.version: self.wire()}

    @property
    def journal(self) -> Journal:
        return self.sink.journal

    def wire(self) -> Weights:
        """Copies of the weights in wire dtype; a NaN that was cast is the positive quiet one."""
        cast = {name: t.bfloat16() if t.dtype == torch.float32 else t.clone() for name, t in self.weights.items()}
        for name, t in self.weights.items():
            if t.dtype == torch.float32:
                cast[name].view(torch.int16).masked_fill_(t.isnan(), 0x7FC0)
        return cast

    def step(self, density: float = 0.03) -> None:
        """Change about that part of the weights; at 1.0 all of them."""
        for name in ("embed.weight", "layers.0.up.weight"):
            t = self.weights[name]
            noise = torch.randn(t.shape, generator=self.rng) * 0.1
            t += torch.where(torch.rand(t.shape, generator=self.rng) < density, noise, 0).to(t.dtype)

    def publish(self) -> Published:
        done = self.publisher.publish(self.weights.items())
        self.history[done.version] = self.wire()
        return done

    def run(self, steps: int, density: float = 0.03) -> None:
        for _ in range(steps):
            self.step(density)
            self.publish()


@pytest.fixture
def credentials() -> Credentials:
    return Credentials.new("run")


@pytest.fixture
def make_trainer(tmp_path: Path, credentials: Credentials) -> Callable[..., Trainer]:
    """Makes trainers that publish to the journal at tmp_path/journal; one at a time may be open."""
    return lambda **options: Trainer(tmp_path / "journal", credentials, **options)


@pytest.fixture
def trainer(make_trainer: Callable[..., Trainer]) -> Trainer:
    return make_trainer()
