"""An engine in this process whose receiver the test drives by hand, without a follower or an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import Fetched, Tensors, Trainer, worker_of
from safetensors.torch import load_file

from helpers import assert_bits_equal, wait_for
from sparrowrl.transport.node import RankStatus
from sparrowrl.vllm_worker_ext.receiver import Receiver
from sparrowrl.vllm_worker_ext.worker_extension import receiver_of


class Bench:
    """An engine in this process, its receiver, its trainer, and what an agent would have fetched."""

    def __init__(self, llm: Any, folder: Path, weights: Tensors, root: Path, anchor_every: int = 0) -> None:
        self.llm, self.folder, self.root = llm, folder, root
        self.trainer = Trainer.begin(root / "trainer", weights, anchor_every)
        self.fetched = Fetched(root / "node", self.trainer)
        self.receiver: Receiver = receiver_of(worker_of(llm))
        self.calls = 0

    def call(self, method: str, *args: str) -> Any:
        self.calls += 1
        reply = getattr(self.receiver, method)(self.calls, *args)
        assert reply["call_id"] == self.calls and reply["rank"] == 0
        return reply

    def attach(self) -> Any:
        return self.call("attach", str(self.fetched.node.root), str(self.trainer.root / "token.json"))

    def status(self) -> RankStatus:
        status = self.fetched.node.rank(0).read()
        assert status is not None
        return status

    def stage(self, target: int, name: str) -> str:
        key = self.fetched.offer(target, name)
        wait_for(lambda: self.status().staged == key, 60, f"{key} to be staged")
        return key

    def offer_again(self) -> None:
        """Take the offer back, as an agent does before it makes the same one anew."""
        self.fetched.node.next.write(None)
        wait_for(lambda: self.receiver._refused is None, 60, "the receiver to see that the offer is gone")

    def refused(self) -> str:
        seen: list[RankStatus] = []

        def failed() -> bool:
            seen.append(self.status())
            return seen[-1].error is not None

        wait_for(failed, 60, "an error")
        error = seen[-1].error
        assert error is not None and seen[-1].staged is None
        return f"{error.error}: {error.message}"

    def exported(self) -> Tensors:
        path = self.root / "export.safetensors"
        reply = self.call("export", str(path))
        assert reply["ok"], reply
        return load_file(path)

    def assert_holds(self, weights: Tensors, version: int) -> None:
        reply = self.call("audit")
        assert reply["ok"] and reply["version"] == version and reply["condition"] == "exact", reply
        got = self.exported()
        assert sorted(got) == sorted(weights)
        for name, tensor in weights.items():
            assert_bits_equal(got[name], tensor)
