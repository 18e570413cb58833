"""One rank of a trainer with the backend; test_backend.py starts several.

    backend_rank.py FOLDER SCENARIO...

The "engine" is a dict of tensors, and a stand-in for `named_shards` hands them over. Writes what it saw as JSON into
FOLDER/SCENARIO, and rank 0 the weights that were sent as each version.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.checkpoint_engine  # noqa: F401 - it lets the plugin in, whose backend is imported below
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from helpers import wait_for
from sparrowrl.delta import publisher as publisher_module
from sparrowrl.delta.segment import SegmentPacker
from sparrowrl.errors import SparrowError
from sparrowrl.verl_plugin import backend
from sparrowrl.verl_plugin.backend import SparrowCheckpointEngine, TrainerWeights

Weights = dict[str, torch.Tensor]


class Rank:
    """The backend of this rank, weights to publish with it, and what came of it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        whole = {f"layer.{number}": torch.randn(64, 33) for number in range(6)} | {"norm": torch.ones(33).bfloat16()}
        mesh = init_device_mesh("cpu", (self.world,))
        self.weights = {n: distribute_tensor(t, mesh, [Shard(0)]) if t.ndim == 2 else t for n, t in whole.items()}
        self.history: dict[int, Weights] = {}
        self.seen: dict[str, Any] = {"errors": [], "results": []}
        options = {"journal_dir": str(folder / "journal"), "timeout": 60, **options}
        self.backend = SparrowCheckpointEngine(bucket_size=1, is_master=self.rank == 0, **options)

    def open(self, hosts: list[str] | None = None) -> None:
        given = self.backend.prepare()
        assert given == {"host": socket.gethostname()}
        hosts = hosts or [given["host"]] * self.world
        run = [self.backend.open_run(hosts, False)]
        assert bool(run[0]) == (self.rank == 0)
        dist.broadcast_object_list(run)
        self.backend.join_run(run[0], hosts)
        self.backend.join_run(run[0], hosts)  # a second manager does the same again
        self.seen["sink"] = type(self.backend._rank._sink).__name__

    @torch.no_grad()
    def step(self, seed: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        """Change a tenth of the weights of these ranks, the same whatever the number of ranks."""
        rng = torch.Generator().manual_seed(seed)
        for weight in self.weights.values():
            change = torch.where(torch.rand(weight.shape, generator=rng) < 0.1, 0.5, 0.0)
            if isinstance(weight, DTensor):
                change = distribute_tensor(change, weight.device_mesh, weight.placements)
                if self.rank not in ranks:
                    continue
            elif ranks != (0, 1):
                continue
            weight += change.to(weight.dtype)

    def send(self, named: Callable[[Weights], Any] = dict.items) -> None:
        backend.named_shards = named  # type: ignore[assignment]
        weights = TrainerWeights(self.weights, "bfloat16")
        try:
            result = asyncio.run(self.backend.send_weights(weights))
        except SparrowError as error:
            self.seen["errors"].append(f"{type(error).__name__}: {error}")
            return
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in self.weights.items()}
        self.seen["results"].append(result)
        if self.rank == 0:
            self.history[result["version"]] = {n: t.detach().bfloat16().clone() for n, t in whole.items()}

    def write_anchor(self) -> None:
        self.seen["results"].append(self.backend.write_anchor())

    def save(self) -> None:
        if self.rank == 0:
            torch.save(self.history, self.folder / "history.pt")
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps(self.seen))

    def close(self) -> None:
        self.backend.finalize()
        self.save()
        dist.barrier()

    def kill_hub(self) -> None:
        if self.rank == 0:
            hub = self.backend._rank._hub
            assert hub is not None
            process = hub._child.process
            process.kill()
            wait_for(lambda: process.poll() is not None, 20, "the hub's end")

    def killing(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights; in the middle of them the hub is killed."""
        for number, named in enumerate(weights.items()):
            if number == 3:
                self.kill_hub()
            yield named


def one_host(folder: Path) -> None:
    """The journal is written directly."""
    rank = Rank(folder, anchor_every=3)
    rank.open()
    rank.send()
    rank.write_anchor()
    for seed in (1, 2, 3):
        rank.step(seed)
        rank.send()
    rank.write_anchor()
    rank.close()


def two_hosts(folder: Path) -> None:
    """All ranks write through the hub, which is killed between two versions and in the middle of one."""
    publisher_module.SegmentPacker = lambda layout: SegmentPacker(layout, 200)  # type: ignore[misc]
    rank = Rank(folder, listen="0.0.0.0", address="127.0.0.1")
    rank.open(hosts=["node-0", "node-1"])
    rank.send()
    for seed in (1, 2, 3):
        rank.step(seed)
        if seed == 2:
            rank.kill_hub()
        rank.send(rank.killing if seed == 3 else dict.items)
    rank.write_anchor()
    rank.close()
    publisher_module.SegmentPacker = SegmentPacker  # type: ignore[misc]


def full_disk(folder: Path) -> None:
    """The journal's disk is full when rank 1 alone has something to write."""
    rank = Rank(folder, journal_dir=str(folder / "disk" / "journal"))
    rank.open()
    rank.send()
    rank.step(1)
    rank.send()
    filler = folder / "disk" / "filler"
    if rank.rank == 1:
        with open(filler, "wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 12)):
                    pass
            except OSError as error:
                rank.seen["filled"] = error.strerror
    dist.barrier()
    rank.step(2, ranks=(1,))
    rank.send()
    rank.step(3, ranks=(1,))
    rank.send()
    dist.barrier()
    if rank.rank == 1:
        filler.unlink()
    dist.barrier()
    rank.send()
    rank.step(4)
    rank.send()
    rank.close()


def broken_engine(folder: Path) -> None:
    """Rank 1's training engine cannot be read, the first time and later."""
    rank = Rank(folder)

    def fail_on_rank_1(weights: Weights) -> Any:
        if rank.rank == 1:
            raise RuntimeError("out of memory")
        return weights.items()

    rank.open()
    for named in (fail_on_rank_1, dict.items, fail_on_rank_1, dict.items):
        try:
            rank.send(named)
        except RuntimeError as error:
            rank.seen["errors"].append(f"RuntimeError: {error}")
        rank.step(len(rank.seen["results"]))
    rank.close()


def a_run(folder: Path) -> None:
    """Two versions, and no end."""
    rank = Rank(folder)
    rank.open()
    rank.send()
    rank.step(1)
    rank.send()
    rank.save()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(folder: Path) -> None:
    """Another process with the weights of the last version, and no end."""
    rank = Rank(folder)
    rank.open()
    rank.step(1)
    rank.send()
    rank.step(2)
    rank.send()
    rank.save()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed_from_older_weights(folder: Path) -> None:
    """Another process, from a checkpoint before the last version."""
    rank = Rank(folder)
    rank.open()
    rank.step(1)
    rank.send()
    rank.close()


def main() -> None:
    folder, scenarios = Path(sys.argv[1]), sys.argv[2:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{scenarios[0]}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    for scenario in scenarios:
        name, _, place = scenario.partition("@")
        globals()[name](folder / (place or name))


if __name__ == "__main__":
    main()
