"""Which features of vLLM are refused at the start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sparrowrl.errors import EngineUnsupported
from sparrowrl.vllm_worker_ext.versions import check_supported, facts, unsynced_draft


def supported_config() -> SimpleNamespace:
    parallel = SimpleNamespace(data_parallel_size=1, data_parallel_index=0, nnodes=1, enable_eplb=False)
    parallel.prefill_context_parallel_size = parallel.decode_context_parallel_size = 1
    model = SimpleNamespace(is_multimodal_model=False)
    rest = {"lora_config": None, "speculative_config": None, "kv_transfer_config": None}
    return SimpleNamespace(parallel_config=parallel, model_config=model, **rest)


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("parallel_config", "data_parallel_size", 2, "data parallel size 2"),
        ("parallel_config", "data_parallel_index", 1, "data parallel"),
        ("parallel_config", "nnodes", 2, "over 2 nodes"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill context"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode context"),
        ("parallel_config", "enable_eplb", True, "expert load balancing"),
        (None, "kv_transfer_config", object(), "KV connector"),
        (None, "speculative_config", SimpleNamespace(method="eagle3"), "speculative decoding by eagle3"),
        (None, "speculative_config", SimpleNamespace(method="mtp"), "speculative decoding by mtp"),
    ],
)
def test_features_that_were_not_tested_are_refused(part: str | None, name: str, value: object, words: str) -> None:
    config = supported_config()
    check_supported(config)
    setattr(config if part is None else getattr(config, part), name, value)
    with pytest.raises(EngineUnsupported, match=words):
        check_supported(config)


@pytest.mark.parametrize(("method", "said"), [("ngram", False), ("draft_model", True), ("eagle", True)])
def test_draft_models_are_accepted_with_a_warning(method: str, said: bool) -> None:
    config = supported_config()
    config.speculative_config = SimpleNamespace(method=method, model="a/draft")
    if not facts().speculates:
        with pytest.raises(EngineUnsupported, match=f"speculative decoding by {method}"):
            check_supported(config)
        return
    check_supported(config)
    warning = unsynced_draft(config)
    assert ("a/draft" in (warning or "")) == said
