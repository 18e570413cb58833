"""Lets a model's loader see the modules that it was written for where vLLM has wrapped them for LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PREFIX = "lora_base_layer_prefix"


@contextmanager
def without_lora(model: torch.nn.Module) -> Iterator[None]:
    """Puts the layers that vLLM has wrapped for LoRA back into their places in the model, for as long as it lasts.

    Wrapped, `layer.weight` is called `layer.base_layer.weight`: some loaders then fail, and that of wrapped experts,
    which looks for such names in the checkpoint too, drops all experts without a word. Nothing is copied, and adapters
    stay as they are; the engine must make no step meanwhile. A model without LoRA is not touched.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    replaced: list[tuple[dict[str, Any], str, Any]] = []

    def replace(holder: dict[str, Any], name: str, value: Any) -> None:
        replaced.append((holder, name, holder[name]))
        holder[name] = value

    try:
        for module in list(model.modules()):
            if vars(module).get(_PREFIX):
                replace(vars(module), _PREFIX, "")
            if not isinstance(module, BaseLayerWithLoRA):
                for name, child in module._modules.items():
                    if isinstance(child, BaseLayerWithLoRA):
                        replace(module._modules, name, child.base_layer)
        yield
    finally:
        for holder, name, value in replaced:
            holder[name] = value
