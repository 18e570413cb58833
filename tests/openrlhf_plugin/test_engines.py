"""Rank 0's calls of the engines: real Ray actors, which play the owners of engines that fail in every way."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openrlhf")

import ray

from sparrowrl.errors import DeadlineExceeded, EngineDied, FingerprintMismatch
from sparrowrl.job.options import Options
from sparrowrl.job.trainer_rank import Run
from sparrowrl.openrlhf_plugin.engines import Engines

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import this file

RUN = Run(hub="http://hub", journal="/j", credentials={"run": "r"}, writer="secret")


class Owner:
    """As SparrowRolloutActor; `failing` says how."""

    def __init__(self, failing: str | None = None) -> None:
        self._failing = failing
        self._told: Any = None

    async def sparrow_host(self) -> str:
        return f"host-{self._failing}"

    async def sparrow_follow(self, name: str, settings: dict[str, Any]) -> str:
        self._told = (name, dict(settings))
        return "exact"

    async def sparrow_reach(self, version: int, state: str, seconds: float, has_anchor: bool) -> dict[str, Any]:
        import asyncio

        if self._failing == "mismatch":
            raise FingerprintMismatch("engine-1: got others")
        if self._failing == "bug":
            raise KeyError("something")
        if self._failing == "dies":
            os._exit(1)
        if self._failing == "stuck":
            await asyncio.Event().wait()
        return {"version": version, "state": state, "has_anchor": has_anchor}

    def told(self) -> Any:
        return self._told


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # Ray's sockets need a short name
        ray.init(address="local", num_cpus=16, include_dashboard=False, _temp_dir=folder)
        yield
        ray.shutdown()


def engines(*failing: str | None, timeout: int = 60) -> tuple[Engines, list[Any]]:
    actors = [ray.remote(Owner).remote(each) for each in failing]
    return Engines(actors, Options("--sparrow.", timeout=timeout)), actors


def test_each_is_told_its_name_and_not_the_writer_s_token(cluster: None) -> None:
    all_of_them, actors = engines(None, None)
    all_of_them.follow(RUN)
    told = ray.get([actor.told.remote() for actor in actors])
    assert [name for name, _ in told] == ["engine-0", "engine-1"]
    assert all(settings["credentials"] == {"run": "r"} and "secret" not in str(settings) for _, settings in told)
    assert all_of_them.hosts() == {"host-None"}
    reports: list[Any] = all_of_them.reach(4, "ab", True)
    assert reports == [{"version": 4, "state": "ab", "has_anchor": True}] * 2


def test_the_first_failure_is_raised_as_it_is_while_others_are_stuck(cluster: None) -> None:
    all_of_them, _ = engines("stuck", "mismatch")
    with pytest.raises(FingerprintMismatch, match=r"^engine-1: got others$") as raised:
        all_of_them.reach(4, "ab", True)
    assert type(raised.value) is FingerprintMismatch


def test_an_owner_that_dies_is_named(cluster: None) -> None:
    all_of_them, _ = engines("stuck", None, "dies")
    with pytest.raises(EngineDied, match=r"^engine-2: its process is gone"):
        all_of_them.reach(4, "ab", True)


def test_what_is_no_error_of_ours_is_raised_as_ray_does(cluster: None) -> None:
    all_of_them, _ = engines("bug")
    with pytest.raises(ray.exceptions.RayTaskError, match="something"):
        all_of_them.reach(4, "ab", True)


def test_an_owner_that_never_answers_is_an_error_within_the_deadline(cluster: None) -> None:
    all_of_them, _ = engines(None, "stuck", timeout=1)
    with pytest.raises(DeadlineExceeded, match="waited 2 s for the engines to be at version 4"):
        all_of_them.reach(4, "ab", True)
