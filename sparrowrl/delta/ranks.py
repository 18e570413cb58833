"""How a trainer's ranks agree: each does its part, rank 0 concludes, and either all go on or all raise."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sparrowrl import errors
from sparrowrl.delta import wire
from sparrowrl.errors import SparrowError, TransportError


class Ranks(Protocol):
    """The processes of a trainer that publish together."""

    @property
    def rank(self) -> int:
        """This process's number."""
        ...

    def gather(self, payload: bytes) -> list[bytes]:
        """Called by all: rank 0 gets every rank's payload, in order; the others get an empty list."""
        ...

    def broadcast(self, payload: bytes) -> bytes:
        """Called by all: what rank 0 gave."""
        ...


class SingleProcess:
    """A trainer of one process."""

    rank = 0

    def gather(self, payload: bytes) -> list[bytes]:
        """The one payload."""
        return [payload]

    def broadcast(self, payload: bytes) -> bytes:
        """The payload."""
        return payload


class TorchRanks:
    """The ranks of torch.distributed, over a Gloo group of their own: metadata travels in host memory, whatever backend
    the training uses, and never as pickle.
    """

    def __init__(self, ranks: list[int] | None = None, timeout: timedelta = timedelta(minutes=10)) -> None:
        """Called by all ranks of the default group; `ranks` are the global ranks that publish (default: all).

        After `timeout` without an answer from another rank, calls raise TransportError.
        """
        self._group = dist.new_group(ranks, timeout=timeout, backend="gloo")
        self.rank = dist.get_rank(self._group)
        self._first = dist.get_global_rank(self._group, 0)
        self._size = dist.get_world_size(self._group)

    def gather(self, payload: bytes) -> list[bytes]:
        """Rank 0 gets every rank's payload; the others get an empty list. Raises TransportError."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        _agreed(dist.all_gather, lengths, torch.tensor([len(payload)]), group=self._group)
        sizes = [int(length) for length in lengths]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else 0
        all_of_them = [torch.empty_like(mine) for _ in sizes] if self.rank == 0 else None
        _agreed(dist.gather, mine, all_of_them, dst=self._first, group=self._group)
        return [part[:size].numpy().tobytes() for part, size in zip(all_of_them or (), sizes, strict=False)]

    def broadcast(self, payload: bytes) -> bytes:
        """What rank 0 gave. Raises TransportError."""
        length = torch.tensor([len(payload)])
        _agreed(dist.broadcast, length, src=self._first, group=self._group)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0 and payload:
            data[:] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        _agreed(dist.broadcast, data, src=self._first, group=self._group)
        return data.numpy().tobytes()


def together(ranks: Ranks, work: Callable[[], Any], conclude: Callable[[list[Any]], Any]) -> Any:
    """Every rank runs `work`; rank 0 then runs `conclude` over all results; all get what that returns.

    Results are what MessagePack can hold (without maps). If anything raises anywhere, all ranks raise: the one where it
    happened its own error, the others one of the same class that names the rank. No rank is left waiting.
    """
    result, error = _attempt(work)
    reports = [wire.unpack("report of a rank", data, 1 << 31) for data in ranks.gather(_report(result, error))]
    verdict = b""
    if ranks.rank == 0:
        failures = [(rank, *failure) for rank, (failure, _) in enumerate(reports) if failure is not None]
        if failures:
            verdict = wire.pack((failures[0], None))
        else:
            result, error = _attempt(lambda: conclude([result for _, result in reports]))
            verdict = wire.pack(((0, *_failure(error)) if error is not None else None, result))
    failure, result = wire.unpack("verdict of rank 0", ranks.broadcast(verdict), 1 << 31)
    if error is not None:
        raise error
    if failure is not None:
        rank, kind, message = failure
        raise _class_named(kind)(f"rank {rank}: {message}")
    return result


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - raised again by `together`, after the other ranks have heard of it
        return None, error


def _failure(error: Exception) -> tuple[str, str]:
    name = type(error).__name__
    return name, str(error) if isinstance(error, SparrowError) else f"{name}: {error}"


def _report(result: Any, error: Exception | None) -> bytes:
    return wire.pack((None if error is None else _failure(error), result))


def _class_named(name: str) -> type[SparrowError]:
    found = getattr(errors, name, SparrowError)
    return found if isinstance(found, type) and issubclass(found, SparrowError) else SparrowError


def _agreed(collective: Callable[..., Any], *tensors: Any, **settings: Any) -> None:
    try:
        collective(*tensors, **settings)
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TransportError(
            f"ranks: a {collective.__name__} failed ({reason}); another rank is gone or too late, restart the trainer"
        ) from error
