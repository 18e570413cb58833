"""Methods that vLLM adds to its workers, for frameworks that own the engine and call `collective_rpc` themselves."""

from __future__ import annotations

from typing import Any

from sparrowrl.vllm_worker_ext import sleeping
from sparrowrl.vllm_worker_ext.receiver import Receiver, Reply


def receiver_of(worker: Any) -> Receiver:
    """The receiver of a vLLM worker (or of vLLM's wrapper around one), made at the first call."""
    worker = getattr(worker, "worker", worker)
    own = getattr(worker, "_sparrow_receiver", None)
    if own is None:
        sleeping.watch(type(worker))
        own = worker._sparrow_receiver = Receiver(worker.get_model(), worker.vllm_config)
        engine = getattr(worker, "weight_transfer_engine", None)
        if engine is not None and hasattr(engine, "receiver"):
            engine.receiver = own  # which closes it when the engine is shut down
    assert isinstance(own, Receiver)
    return own


def call_receiver(worker: Any, method: str, *args: Any) -> Reply:
    """What the follower has each worker run: `method` of its receiver."""
    reply: Reply = getattr(receiver_of(worker), method)(*args)
    return reply


class WorkerExtension:
    """For `worker_extension_cls="sparrowrl.vllm_worker_ext.WorkerExtension"`.

    Every method answers a Reply and never raises. The caller makes the node directory, starts the agent, and calls
    `sparrow_activate` while no request is running, and resets the prefix cache: only an engine that follows by itself
    (`--weight-transfer-config '{"backend": "sparrow"}'`) does that for its caller.
    """

    def sparrow_attach(self, call_id: int, node_dir: str, token_file: str) -> Reply:
        """Learn the placement, prove version 0 and follow the node directory."""
        return receiver_of(self).attach(call_id, node_dir, token_file)

    def sparrow_activate(self, call_id: int, key: str) -> Reply:
        """Switch to the staged artifact, all or nothing."""
        return receiver_of(self).activate(call_id, key)

    def sparrow_audit(self, call_id: int) -> Reply:
        """Recompute the fingerprints of all live weights."""
        return receiver_of(self).audit(call_id)

    def sparrow_export(self, call_id: int, path: str) -> Reply:
        """Write the live weights to a safetensors file in checkpoint coordinates."""
        return receiver_of(self).export(call_id, path)

    def sparrow_status(self, call_id: int) -> Reply:
        """Say what is held."""
        return receiver_of(self).status(call_id)
