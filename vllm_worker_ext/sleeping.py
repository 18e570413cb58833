"""vLLM's sleep mode in its workers: a receiver is told before the weights' memory is taken away, and after it is back.

A sleep of level 1 moves the weights to host memory, and they come back as they were, to the same addresses. One of
level 2 discards them. While they sleep, whoever touches one would end the process.
"""

from __future__ import annotations

from typing import Any

_watched: set[Any] = set()


def watch(worker_class: Any) -> None:
    """Wrap two methods of a worker class of vLLM's, once."""
    if worker_class in _watched:
        return
    _watched.add(worker_class)
    sleep, wake_up = worker_class.sleep, worker_class.wake_up

    def sleep_and_tell(worker: Any, level: int = 1) -> None:
        receiver = getattr(worker, "_sparrow_receiver", None)
        if receiver is not None and level > 0:
            receiver.sleep(discarded=level > 1)
        sleep(worker, level)

    def wake_up_and_tell(worker: Any, tags: list[str] | None = None) -> None:
        wake_up(worker, tags)
        receiver = getattr(worker, "_sparrow_receiver", None)
        if receiver is not None and (tags is None or "weights" in tags):
            receiver.wake()

    worker_class.sleep, worker_class.wake_up = sleep_and_tell, wake_up_and_tell
