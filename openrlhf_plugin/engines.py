"""All rollout engines of a job, from the trainer's rank 0: one Ray call an engine a sync."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from sparrowrl.errors import DeadlineExceeded
from sparrowrl.job.options import Options
from sparrowrl.job.ray_errors import ours
from sparrowrl.job.replica import Report
from sparrowrl.job.trainer_rank import Run, follow_settings

_START_S = 4 * 3600.0  # for a large model, with its compilation; Ray itself tells of an engine that dies meanwhile


class Engines:
    """The Ray actors that own the engines (actors.SparrowRolloutActor), called engine-0, engine-1 and so on."""

    def __init__(self, actors: Sequence[Any], options: Options) -> None:
        self._actors, self._options = list(actors), options

    def __len__(self) -> int:
        return len(self._actors)

    def hosts(self) -> set[str]:
        """The names of their machines, when they have loaded their models. Raises EngineDied, DeadlineExceeded."""
        return set(self._all("the engines to start", [a.sparrow_host.remote() for a in self._actors], _START_S))

    def wake(self) -> None:
        """Wake the weights of all engines up. Raises as `hosts`."""
        self._all("the engines to wake up", [actor.wake_up.remote(tags=["weights"]) for actor in self._actors])

    def follow(self, run: Run) -> None:
        """Have all engines follow the run. Raises what an engine says, EngineDied, DeadlineExceeded."""
        settings = follow_settings(run, self._options)
        calls = [actor.sparrow_follow.remote(f"engine-{at}", settings) for at, actor in enumerate(self._actors)]
        self._all("the engines to follow the run", calls)

    def reach(self, version: int, state: str, has_anchor: bool) -> list[Report]:
        """Wait until all engines are at a version (Replica.reach). Raises as that, at the first that fails."""
        arguments = (version, state, self._options.timeout, has_anchor)
        calls = [actor.sparrow_reach.remote(*arguments) for actor in self._actors]
        return self._all(f"the engines to be at version {version}", calls)

    def _all(self, what: str, calls: list[Any], seconds: float | None = None) -> list[Any]:
        """All results, in order; the first failure, whichever engine's, as the SparrowError that it is."""
        if seconds is None:
            seconds = 2 * self._options.timeout  # the other side has deadlines of its own, and says more
        deadline, pending = time.monotonic() + seconds, calls
        while pending:
            done, pending = ray.wait(pending, timeout=max(deadline - time.monotonic(), 0))
            if not done:
                raise DeadlineExceeded(f"waited {seconds:.0f} s for {what}: no answer; is a process of the job stuck?")
            for call in done:
                _result(call, f"engine-{calls.index(call)}")
        return list(ray.get(calls, timeout=seconds))


def _result(call: Any, name: str) -> Any:
    """The result of a Ray call that has ended, or the error that its method raised, without Ray's wrapping."""
    try:
        return ray.get(call)
    except ray.exceptions.RayError as error:
        if (own := ours(error, name)) is not None:
            raise own from error
        raise
