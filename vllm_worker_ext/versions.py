"""What differs between the vLLM versions that were tested, and what this plugin does not support in any of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sparrowrl.errors import EngineUnsupported


@dataclass(frozen=True, slots=True)
class Facts:
    """What one tested vLLM release can do.

    engine_starts_updates: the worker has its weight-transfer engine start vLLM's own updates, not starts them itself.
    keeps_version: the engine core keeps a weight version (`set_weight_version`) that clients can ask for.
    stamps_requests: finished requests say which weight versions made which tokens.
    speculates: its CPU build, with which it was tested, can decode speculatively.
    """

    engine_starts_updates: bool
    keeps_version: bool
    stamps_requests: bool
    speculates: bool


TESTED: dict[str, Facts] = {
    "0.24.0": Facts(engine_starts_updates=False, keeps_version=False, stamps_requests=False, speculates=False),
    "0.29.0": Facts(engine_starts_updates=True, keeps_version=True, stamps_requests=False, speculates=True),
    "0.32.0": Facts(engine_starts_updates=True, keeps_version=True, stamps_requests=True, speculates=True),
}


# Methods of speculative decoding, of those that were tested, that have a model of their own.
_DRAFTS = ("draft_model", "eagle")


def is_usable() -> bool:
    """Whether the vLLM that is installed was tested, or the user insists on it (SPARROWRL_UNTESTED_VLLM=1)."""
    return _installed() in TESTED or os.environ.get("SPARROWRL_UNTESTED_VLLM") == "1"


def facts() -> Facts:
    """What holds for the vLLM that is installed; an untested one is taken for the newest tested.

    Raises EngineUnsupported unless `is_usable`.
    """
    if not is_usable():
        raise EngineUnsupported(
            f"vLLM {_installed()}: expected one that was tested, {' or '.join(TESTED)}; "
            "set SPARROWRL_UNTESTED_VLLM=1 to try it all the same"
        )
    return TESTED.get(_installed(), TESTED[max(TESTED)])


def _installed() -> str:
    import vllm

    return str(vllm.__version__).split("+")[0]


def check_supported(config: Any) -> None:
    """Raise EngineUnsupported, naming it, if a VllmConfig asks for a feature that was not tested with live updates."""
    parallel, model = config.parallel_config, config.model_config
    speculative = config.speculative_config
    refused = {
        f"data parallel size {parallel.data_parallel_size}": parallel.data_parallel_size > 1
        or parallel.data_parallel_index > 0,
        f"an engine over {parallel.nnodes} nodes": parallel.nnodes > 1,
        f"prefill context parallel size {parallel.prefill_context_parallel_size}": (
            parallel.prefill_context_parallel_size > 1
        ),
        f"decode context parallel size {parallel.decode_context_parallel_size}": (
            parallel.decode_context_parallel_size > 1
        ),
        "expert load balancing": parallel.enable_eplb,
        "a multimodal model": model.is_multimodal_model,
        f"speculative decoding by {speculative and speculative.method}": speculative is not None
        and not (speculative.method in ("ngram", *_DRAFTS) and facts().speculates),
        "a KV connector": config.kv_transfer_config is not None,
    }
    named = [what for what, asked in refused.items() if asked]
    if named:
        raise EngineUnsupported(f"{', '.join(named)}: not supported together with live weight updates; turn it off")


def unsynced_draft(config: Any) -> str | None:
    """What to tell the user of a VllmConfig with a draft model: that it is not synced."""
    speculative = config.speculative_config
    if speculative is None or speculative.method not in _DRAFTS:
        return None
    return (
        f"the draft model {speculative.model} ({speculative.method}) does not follow the trainer: what it proposes is "
        "still checked by the model that does, but less of it will be accepted as training goes on"
    )
