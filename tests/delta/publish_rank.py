"""One rank of a trainer; test_publisher_ranks.py starts several.

    publish_rank.py FOLDER SCENARIO...

Writes what it saw as JSON into FOLDER/SCENARIO, and rank 0 the weights of every version.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sparrowrl.config import Credentials
from sparrowrl.delta import publisher as publisher_module
from sparrowrl.delta.journal import Draft
from sparrowrl.delta.publisher import Publisher
from sparrowrl.delta.ranks import TorchRanks
from sparrowrl.delta.segment import SegmentPacker
from sparrowrl.delta.shard import FlatShard
from sparrowrl.delta.sink import JournalSink
from sparrowrl.errors import JournalError, SparrowError

CREDENTIALS = Credentials("run", bytes(range(32)), "reader", "writer")


def build(mesh_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A model under FSDP2 with sizes that do not divide, beside it a column-sharded and a plain tensor."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(31, 7), torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1)
    )
    columns, plain = torch.randn(6, 8, 3), torch.randn(4, 3).bfloat16()
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    fully_shard(model, mesh=mesh)
    weights = dict(model.named_parameters())
    flat = init_device_mesh("cpu", (dist.get_world_size(),))
    weights["columns"] = distribute_tensor(columns, flat, [Shard(1)])
    weights["plain"] = plain
    return weights


@torch.no_grad()
def step(weights: dict[str, torch.Tensor], seed: int) -> None:
    """Change the weights, the same on any number of ranks."""
    rng = torch.Generator().manual_seed(seed)
    for name in sorted(weights):
        weight = weights[name]
        dense = name == "columns" and seed == 2
        noise = torch.randn(weight.shape, generator=rng)
        noise = torch.where(torch.rand(weight.shape, generator=rng) < (1.0 if dense else 0.2), noise, 0)
        if isinstance(weight, DTensor):
            noise = distribute_tensor(noise.to(weight.dtype), weight.device_mesh, weight.placements)
        weight += noise.to(weight.dtype)


def ranges(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, FlatShard]]:
    """Uneven ranges of the flat tensors, as if the ranks had never held anything else; some are empty."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for number, (name, weight) in enumerate(weights.items()):
        flat = weight.full_tensor() if isinstance(weight, DTensor) else weight
        cuts = [0, *((number + 1) * flat.numel() * r // (len(weights) * world) for r in range(1, world)), flat.numel()]
        local = flat.detach().reshape(-1)[cuts[rank] : cuts[rank + 1]].clone()
        yield name, FlatShard(tuple(flat.shape), cuts[rank], local)


def full(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in weights.items()}
    return {name: t.detach().bfloat16().clone() for name, t in tensors.items()}


def fail_once(method: str) -> None:
    original = getattr(Draft, method)

    def failing(draft: Draft, argument: object) -> object:
        setattr(Draft, method, original)
        raise JournalError("injected")

    setattr(Draft, method, failing)


def gather(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights that the ranks gather while they publish: none gets on without the others."""
    for name, weight in weights.items():
        dist.barrier()
        yield name, weight


def attempt(errors: list[str], publish: object) -> object:
    try:
        return publish()  # type: ignore[operator]
    except (SparrowError, RuntimeError) as error:
        errors.append(f"{type(error).__name__}: {error}")
        return None


def run(scenario: str, folder: Path, ranks: TorchRanks) -> None:
    """Publish three times, with what the scenario says going wrong; write what this rank saw."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder.mkdir(exist_ok=True)
    weights = build((world, 1) if scenario == "replicated" else (world,))
    errors: list[str] = []
    versions: list[int] = []
    history = [full(weights)]
    named = {"gathering": gather, "ranges": ranges}.get(scenario, dict.items)
    if scenario == "gathering":
        publisher_module.SegmentPacker = lambda layout: SegmentPacker(layout, 40)  # type: ignore[misc]
    if scenario == "unequal":
        weights["plain"] = weights["plain"] + rank
    if scenario == "names" and rank == 1:
        weights["more"] = torch.zeros(1)
    sink = JournalSink(folder / (f"journal-{rank}" if scenario == "folders" else "journal"), CREDENTIALS)
    publisher = attempt(errors, lambda: Publisher(sink, named(weights), anchor_every=2, ranks=ranks))
    for seed in range(1, 4) if isinstance(publisher, Publisher) else ():
        step(weights, seed)
        history.append(full(weights))
        if scenario in ("put", "commit", "gathering") and rank == (0 if scenario == "commit" else 1) and seed == 2:
            fail_once("commit" if scenario == "commit" else "put")
        if scenario == "death" and seed == 2 and rank == 1:
            os._exit(9)
        bad = {"plain": torch.zeros(1)} if scenario == "shape" and seed == 2 and rank == 1 else {}
        done = attempt(errors, lambda bad=bad: publisher.publish(named(weights | bad)))
        if done is None and scenario != "death":
            done = publisher.publish(named(weights))
        versions.append(done.version if done is not None else -1)
        if done is None:
            break
    if scenario == "anchor" and isinstance(publisher, Publisher):
        if rank == 1:
            fail_once("put")
        attempt(errors, publisher.write_anchor)
        versions += [publisher.write_anchor().version for _ in range(2)]
    sink.close()
    if rank == 0:
        torch.save(history, folder / "history.pt")
    (folder / f"rank-{rank}.json").write_text(json.dumps({"versions": versions, "errors": errors}))


def main() -> None:
    folder, scenarios = Path(sys.argv[1]), sys.argv[2:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    ranks = TorchRanks(timeout=timedelta(seconds=20))
    for scenario in scenarios:
        run(scenario, folder / scenario, ranks)
    os._exit(0)  # without waiting for ranks that are gone


if __name__ == "__main__":
    main()
