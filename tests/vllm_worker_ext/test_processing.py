from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EXTENSION, worker_of
from zoo import FAMILIES, make_model

from helpers import skip_before
from sparrowrl.errors import PlacementError
from sparrowrl.vllm_worker_ext.processing import processed

pytestmark = pytest.mark.vllm
Start = Callable[..., Any]
METHOD = "process_weights_after_loading"


@pytest.fixture
def model_of(engine: Start, tmp_path: Path) -> Start:
    """model_of(family, **arguments) -> the model of an engine that we may change the weights of."""

    def start(family: str, **arguments: Any) -> torch.nn.Module:
        make_model(tmp_path / family, family)
        given = {"worker_extension_cls": EXTENSION, **FAMILIES[family].arguments, **arguments}
        return worker_of(engine(tmp_path / family, **given)).get_model()

    return start


def found_in(model: torch.nn.Module) -> dict[str, bool]:
    names = {module: name for name, module in model.named_modules()}
    return {names[known.module]: known.own for known in processed(model)}


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "gpt2"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_nothing_is_processed_in_a_dense_model(model_of: Start, family: str, load_format: str) -> None:
    assert found_in(model_of(family, load_format=load_format)) == {}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_experts_are_packed(model_of: Start, load_format: str) -> None:
    experts = {f"model.layers.{n}.mlp.experts.routed_experts": True for n in range(2)}
    assert found_in(model_of("qwen3-moe", load_format=load_format)) == experts


def test_weights_quantised_while_they_are_loaded(model_of: Start) -> None:
    found = found_in(model_of("qwen3", quantization="fp8_per_channel"))
    layers = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert found == {f"model.layers.{n}.{layer}": True for n in range(2) for layer in layers}


def test_views_of_other_weights_are_no_processing(model_of: Start) -> None:
    model = model_of("deepseek-v2")
    assert set(found_in(model)) == {"model.layers.1.mlp.experts.routed_experts"}
    attention = model.get_submodule("model.layers.0.self_attn.mla_attn.mla_attn")
    attention.kv_b_proj.weight.data.fill_(3.0)
    assert bool((attention.W_UV == 3).all()) and bool((attention.W_UK_T == 3).all())


def test_nothing_of_the_watch_is_left(model_of: Start) -> None:
    model = model_of("qwen3-moe")
    for module in model.modules():
        for holder in (module, getattr(module, "quant_method", None)):
            assert holder is None or not {METHOD, "load_weights", "_sparrowrl_watch"} & vars(holder).keys()


def test_an_engine_that_is_not_ours_is_not_watched(engine: Start, tmp_path: Path) -> None:
    make_model(tmp_path / "qwen3", "qwen3")
    model = worker_of(engine(tmp_path / "qwen3")).get_model()
    with pytest.raises(PlacementError, match="VLLM_PLUGINS"):
        processed(model)


def with_hook(monkeypatch: pytest.MonkeyPatch, hook: Callable[[Any], Any]) -> None:
    """Have Llama models call `hook` after loading."""
    skip_before("0.29", "calls a hook of the model")
    from vllm.model_executor.models.llama import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, METHOD, hook, raising=False)


def heads(model: Any) -> None:
    model.heads = [model.lm_head.weight.float()]


def test_a_hook_of_the_model_derives(model_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with_hook(monkeypatch, heads)
    (known,) = processed(model_of("llama"))
    assert (known.own, known.others, known.made) == (False, True, {"heads.0"})


def test_load_weights_derives(model_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM

    load = LlamaForCausalLM.load_weights

    def load_and_derive(self: Any, weights: Any) -> Any:
        loaded = load(self, weights)
        heads(self)
        return loaded

    monkeypatch.setattr(LlamaForCausalLM, "load_weights", load_and_derive)
    (known,) = processed(model_of("llama"))
    assert (known.own, known.made) == (False, {"heads.0"})


@pytest.mark.parametrize("visible", [True, False])
def test_kernels_that_cannot_be_seen(model_of: Start, monkeypatch: pytest.MonkeyPatch, visible: bool) -> None:
    """A tensor that no operation has filled was filled by something else, from who knows what."""

    def fill(self: Any) -> None:
        self.table = torch.zeros(4) if visible else torch.empty(4)

    with_hook(monkeypatch, fill)
    assert len(processed(model_of("llama"))) == (0 if visible else 1)


def test_writing_to_another_module_makes_it_opaque(model_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with_hook(monkeypatch, lambda self: self.lm_head.weight.data.mul_(2))
    assert found_in(model_of("llama")) == {"": False, "lm_head": True}


def test_replacing_weights_of_another_module_makes_it_opaque(model_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(self: Any) -> None:
        self.lm_head.weight = torch.nn.Parameter(self.lm_head.weight * 2, requires_grad=False)

    with_hook(monkeypatch, replace)
    assert found_in(model_of("llama")) == {"": False, "lm_head": True}
