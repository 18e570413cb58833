"""What the plugin does not do in OpenRLHF, refused by name before anything is started."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from sparrowrl.errors import ConfigError, FrameworkUnsupported

TESTED = ("0.11.2",)


def check_usable() -> None:
    """Raise FrameworkUnsupported unless this OpenRLHF is what the plugin was written for and tested with."""
    try:
        installed = importlib.metadata.version("openrlhf")
    except importlib.metadata.PackageNotFoundError as error:
        raise FrameworkUnsupported(f"expected OpenRLHF {' or '.join(TESTED)}, got none: install it") from error
    if installed not in TESTED:
        raise FrameworkUnsupported(f"OpenRLHF {installed}: expected one that was tested, {' or '.join(TESTED)}")


def check_arguments(flat: Mapping[str, Any]) -> None:
    """Check OpenRLHF's arguments, by the names of its flags, when they ask for our backend.

    Raises FrameworkUnsupported, and ConfigError where there is nothing to sync.
    """
    if not flat["vllm.num_engines"]:
        raise ConfigError("--vllm.sync_backend sparrow: expected --vllm.num_engines of 1 or more, got none")
    refused = {
        f"--ds.lora.rank {flat['ds.lora.rank']} (adapters; OpenRLHF does not merge them for its engines either)": (
            flat["ds.lora.rank"] > 0
        ),
        "--ds.load_in_4bit": flat["ds.load_in_4bit"],
        f"--data.max_images_per_prompt {flat['data.max_images_per_prompt']} (a multimodal model)": (
            flat["data.max_images_per_prompt"] > 0
        ),
        f"--ds.zero_stage 3 together with --ds.tensor_parallel_size {flat['ds.tensor_parallel_size']}": (
            flat["ds.zero_stage"] == 3 and flat["ds.tensor_parallel_size"] > 1
        ),
        "--vllm.sync_with_ray (nothing goes through Ray's collectives)": flat["vllm.sync_with_ray"],
    }
    named = [what for what, asked in refused.items() if asked]
    if named:
        raise FrameworkUnsupported(f"--vllm.sync_backend sparrow: not supported with {'; '.join(named)}")
