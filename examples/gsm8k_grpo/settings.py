"""The flags of `sparrowrl demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sparrowrl.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. `port` is the vLLM server's; None takes a free one."""

    model: str
    data: Path
    steps: int
    lr: float
    dtype: str
    tensor_parallel_size: int
    port: int | None
    out: Path
    cache: Path
    group_size: int
    prompts: int
    max_tokens: int
    seed: int

    def __post_init__(self) -> None:
        """Raise ConfigError that names the flag whose value makes no sense."""
        for name, least in (("steps", 1), ("group_size", 2), ("prompts", 1), ("max_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"--{name.replace('_', '-')}: expected {least} or more, got {value}")
        if not 0 < self.lr < 1:
            raise ConfigError(f"--lr: expected a number between 0 and 1, got {self.lr:g}")
        if self.tensor_parallel_size < 1:
            raise ConfigError(f"--tensor-parallel-size: expected 1 or more, got {self.tensor_parallel_size}")
        if self.port is not None and not 0 < self.port < 65536:
            raise ConfigError(f"--port: expected 1 to 65535, got {self.port}")

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of the engine's weights."""
        return DTYPES[self.dtype]

    @property
    def in_flight(self) -> int:
        """Requests that run at once: those of one step."""
        return self.group_size * self.prompts
