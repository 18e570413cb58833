"""Lossless sparse delta checkpoints between RL trainers and vLLM engines.

Importing this package costs milliseconds: names below are resolved when first used, so that neither torch nor any
framework is loaded before it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparrowrl.config import Credentials as Credentials
    from sparrowrl.delta.publisher import Publisher as Publisher
    from sparrowrl.delta.ranks import TorchRanks as TorchRanks
    from sparrowrl.delta.retention import Retention as Retention
    from sparrowrl.delta.shard import FlatShard as FlatShard
    from sparrowrl.delta.sink import JournalSink as JournalSink
    from sparrowrl.transport.client import HubSink as HubSink

_HOME = {
    "Credentials": "sparrowrl.config",
    "Publisher": "sparrowrl.delta.publisher",
    "FlatShard": "sparrowrl.delta.shard",
    "JournalSink": "sparrowrl.delta.sink",
    "Retention": "sparrowrl.delta.retention",
    "TorchRanks": "sparrowrl.delta.ranks",
    "HubSink": "sparrowrl.transport.client",
}

__all__ = ["Credentials", "FlatShard", "HubSink", "JournalSink", "Publisher", "Retention", "TorchRanks"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sparrowrl' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
