"""Lets a model's loader see the modules that it was written for where vLLM has wrapped them for LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_lora(model: torch.nn.Module) -> Iterator[None]:
    """Puts the layers that vLLM has wrapped for LoRA back into their places in the model, for as long as it lasts.

    Wrapped, `layer.weight` is called `layer.base_layer.weight`, and `load_weights` finds some names no more. Nothing is
    copied, and adapters stay as they are; the engine must make no step meanwhile. A model without LoRA is not touched.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    replaced = []
    try:
        for module in list(model.modules()):
            for name, child in list(module._modules.items()):
                if isinstance(child, BaseLayerWithLoRA) and not isinstance(module, BaseLayerWithLoRA):
                    module._modules[name] = child.base_layer
                    replaced.append((module, name, child))
        yield
    finally:
        for module, name, child in replaced:
            module._modules[name] = child
