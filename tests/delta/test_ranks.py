from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from sparrowrl.delta.ranks import SingleProcess, TorchRanks, together
from sparrowrl.errors import JournalError, LayoutError, SparrowError


class FakeRanks:
    """Ranks that are threads of this process; real processes are in test_publisher_ranks.py."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.payloads: dict[int, bytes] = {}

    def member(self, rank: int) -> FakeRank:
        return FakeRank(self, rank)


class FakeRank:
    def __init__(self, ranks: FakeRanks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def _exchange(self, payload: bytes) -> dict[int, bytes]:
        self.ranks.payloads[self.rank] = payload
        self.ranks.barrier.wait()
        everything = dict(self.ranks.payloads)
        self.ranks.barrier.wait()
        return everything

    def gather(self, payload: bytes) -> list[bytes]:
        everything = self._exchange(payload)
        return [everything[rank] for rank in sorted(everything)] if self.rank == 0 else []

    def broadcast(self, payload: bytes) -> bytes:
        return self._exchange(payload)[0]


def on_all(size: int, work: Callable[[int], Any], conclude: Callable[[list[Any]], Any]) -> list[Any]:
    """What `together` returns or raises on each rank."""
    ranks, outcomes = FakeRanks(size), dict[int, Any]()

    def run(rank: int) -> None:
        try:
            outcomes[rank] = together(ranks.member(rank), lambda: work(rank), conclude)
        except (SparrowError, RuntimeError) as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return [outcomes[rank] for rank in range(size)]


def fail(error: Exception) -> Any:
    raise error


def test_all_get_what_rank_0_concludes():
    calls = []

    def conclude(results):
        calls.append(results)
        return [sum(number for number, _ in results), b"bytes", None]

    assert on_all(3, lambda rank: (rank, b"x" * rank), conclude) == [[3, b"bytes", None]] * 3
    assert calls == [[[0, b""], [1, b"x"], [2, b"xx"]]]


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_an_error_of_one_is_raised_by_all(broken):
    error = LayoutError("no such tensor")
    outcomes = on_all(3, lambda rank: fail(error) if rank == broken else rank, lambda results: fail(AssertionError()))
    for rank, outcome in enumerate(outcomes):
        if rank == broken:
            assert outcome is error
        else:
            assert type(outcome) is LayoutError and str(outcome) == f"rank {broken}: no such tensor"


def test_each_keeps_its_own_error():
    errors = [LayoutError("zero"), JournalError("one"), None]
    outcomes = on_all(3, lambda rank: fail(errors[rank]) if errors[rank] else None, lambda results: None)
    assert outcomes[:2] == errors[:2]
    assert type(outcomes[2]) is LayoutError and str(outcomes[2]) == "rank 0: zero"


def test_an_error_of_the_conclusion_is_raised_by_all():
    error = JournalError("no space")
    outcomes = on_all(2, lambda rank: rank, lambda results: fail(error))
    assert outcomes[0] is error
    assert type(outcomes[1]) is JournalError and str(outcomes[1]) == "rank 0: no space"


def test_other_errors_keep_their_names():
    outcomes = on_all(2, lambda rank: fail(RuntimeError("CUDA out of memory")) if rank else 0, lambda results: 0)
    assert type(outcomes[0]) is SparrowError and str(outcomes[0]) == "rank 1: RuntimeError: CUDA out of memory"
    assert type(outcomes[1]) is RuntimeError


def test_one_process():
    assert together(SingleProcess(), lambda: 4, lambda results: results) == [4]
    with pytest.raises(ZeroDivisionError):
        together(SingleProcess(), lambda: 1 // 0, lambda results: results)


@pytest.mark.parametrize("size", [0, 1, 3_000_001])
def test_torch_ranks_carry_any_bytes(size):
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = TorchRanks()
        assert ranks.rank == 0
        assert ranks.gather(payload) == [payload]
        assert ranks.broadcast(payload) == payload
    finally:
        dist.destroy_process_group()
