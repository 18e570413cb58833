"""The weight-transfer backend "sparrow": its name in an engine's config is what makes the engine follow a trainer.

Nothing goes through vLLM's own update calls, which exist for trainers that push; they are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from sparrowrl.errors import EngineUnsupported
from sparrowrl.vllm_worker_ext.receiver import Receiver
from sparrowrl.vllm_worker_ext.versions import facts


@dataclass
class NoInfo(WeightTransferInitInfo, WeightTransferUpdateInfo):  # type: ignore[misc]
    """There is nothing to say."""


class SparrowEngine(WeightTransferEngine[NoInfo, NoInfo]):  # type: ignore[misc]
    """Made by each worker after it has loaded its model; the follower in the engine core does the rest."""

    init_info_cls = NoInfo
    update_info_cls = NoInfo
    supports_draft_weight_update = False

    def __init__(self, *what_vllm_knows: Any) -> None:
        super().__init__(*what_vllm_knows)
        if not facts().engine_starts_updates:
            _refuse_in_workers()
        self.receiver: Receiver | None = None  # made when the follower calls its worker

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Refused, as all of vLLM's update calls are. Raises EngineUnsupported."""
        _refuse()

    def start_weight_update(self) -> None:
        """Refused."""
        _refuse()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Refused."""
        _refuse()

    def receive_weights(self, *update: Any) -> None:
        """Refused."""
        _refuse()

    def finish_weight_update(self) -> None:
        """Refused."""
        _refuse()

    @staticmethod
    def trainer_send_weights(*update: Any) -> None:
        """Refused."""
        _refuse()

    def shutdown(self) -> None:
        """Stop staging. The weights stay as they are."""
        if self.receiver is not None:
            self.receiver.close()


@cache
def _refuse_in_workers() -> None:
    """Refuse vLLM's update calls where the worker itself begins an update, and takes its model apart for it."""
    from vllm.v1.worker.gpu_worker import Worker

    check = Worker._check_weight_transfer_engine

    def check_and_refuse(worker: Any) -> None:
        check(worker)
        if isinstance(worker.weight_transfer_engine, SparrowEngine):
            _refuse()

    Worker._check_weight_transfer_engine = check_and_refuse


def _refuse() -> NoReturn:
    raise EngineUnsupported("this engine follows a SparrowRL hub by itself; vLLM's own update calls are refused")
