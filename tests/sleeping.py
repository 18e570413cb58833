"""Sleep mode on a CPU: a stand-in for CUDA's memory pool, which vLLM's CPU build does not have.

What is asleep holds garbage, so whoever reads or writes it is found out: by fingerprints, or because what was written
is gone. (On a GPU the process would end.)
"""

from __future__ import annotations

from typing import Any

import torch

_GARBAGE = 0xA5


def allow(platform_class: Any) -> None:
    """Have vLLM accept `enable_sleep_mode`."""
    platform_class.is_sleep_mode_available = lambda self: True


def install(worker_class: Any) -> None:
    """Have a worker class of vLLM's do with ordinary memory what sleep mode does."""

    @torch.no_grad()
    def sleep(self: Any, level: int = 1) -> None:
        memory = _memory(self)
        buffers = {buffer.untyped_storage().data_ptr() for buffer in self.model_runner.model.buffers()}
        self.stand_in_kept = {at: data.clone() for at, data in memory.items() if level == 1 or at in buffers}
        for data in memory.values():
            data.fill_(_GARBAGE)

    @torch.no_grad()
    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        if tags is not None and "weights" not in tags:
            return
        memory = _memory(self)
        for at, data in self.stand_in_kept.items():
            memory[at].copy_(data)
        self.stand_in_kept = {}

    worker_class.sleep, worker_class.wake_up = sleep, wake_up


def _memory(worker: Any) -> dict[int, torch.Tensor]:
    """The bytes of all weights and buffers, by address, uint8[n] each."""
    model = worker.model_runner.model
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return {
        storage.data_ptr(): torch.tensor([], dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        for storage in storages
        if storage.nbytes()
    }
