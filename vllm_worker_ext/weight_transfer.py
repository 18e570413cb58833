"""The weight-transfer backend "sparrow": its name in an engine's config is what makes the engine follow a trainer.

Nothing goes through vLLM's own update calls, which exist for trainers that push; they are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
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

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        facts()
        super().__init__(config, vllm_config, device, model)
        self.receiver = Receiver(model, vllm_config)  # type: ignore[arg-type]

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Refused, as all of vLLM's update calls are. Raises EngineUnsupported."""
        _refuse()

    def start_weight_update(self) -> None:
        """Refused."""
        _refuse()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Refused."""
        _refuse()

    def receive_weights(self, update_info: NoInfo) -> None:
        """Refused."""
        _refuse()

    def finish_weight_update(self) -> None:
        """Refused."""
        _refuse()

    def shutdown(self) -> None:
        """Stop staging. The weights stay as they are."""
        self.receiver.close()


def _refuse() -> NoReturn:
    raise EngineUnsupported("this engine follows a SparrowRL hub by itself; vLLM's own update calls are refused")
