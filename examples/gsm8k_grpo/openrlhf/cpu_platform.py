"""What OpenRLHF 0.11.2 and DeepSpeed lack to run on a machine without an accelerator.

Imported by all processes of the job (site/sitecustomize.py), it waits for their own imports. The accelerators that Ray
hands out are made up: a "GPU" is a process on the CPU.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import wrapt


class _Cpu(str):
    """The current device: for torch (`tensor.to(device)`) as well as in OpenRLHF's f"cuda:{device}"."""

    def __new__(cls) -> _Cpu:
        """The only one."""
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return "0"


def _nothing() -> Callable[..., None]:
    """Stands for what only an accelerator needs to do. A new function each time: torch.compile's tables want that."""
    return lambda *args, **kwargs: None


@wrapt.when_imported("torch")  # type: ignore[untyped-decorator]
def _without_cuda(torch: types.ModuleType) -> None:
    cuda = torch.cuda
    cuda.current_device = _Cpu
    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        setattr(cuda, name, _nothing())


@wrapt.when_imported("torch.distributed.device_mesh")  # type: ignore[untyped-decorator]
def _meshes_of_cpus(module: types.ModuleType) -> None:
    original = module.init_device_mesh

    @functools.wraps(original)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    module.init_device_mesh = init_device_mesh  # type: ignore[attr-defined]


@wrapt.when_imported("deepspeed.comm.torch")  # type: ignore[untyped-decorator]
def _gloo_alone(module: types.ModuleType) -> None:
    """DeepSpeed would compile a reduction over shared memory first, for minutes."""
    module.build_shm_op = _nothing()  # type: ignore[attr-defined]


@wrapt.when_imported("deepspeed.runtime.engine")  # type: ignore[untyped-decorator]
def _torchs_adam(module: types.ModuleType) -> None:
    """DeepSpeed would compile an optimizer of its own first."""
    engine_class = module.DeepSpeedEngine
    original = engine_class._configure_basic_optimizer

    def configure(self: Any, parameters: Any) -> Any:
        self.optimizer_params().setdefault("torch_adam", True)
        return original(self, parameters)

    engine_class._configure_basic_optimizer = configure


@wrapt.when_imported("vllm.platforms.cpu")  # type: ignore[untyped-decorator]
def _counted_as_gpus(module: types.ModuleType) -> None:
    """By which vLLM's Ray executor asks for devices: OpenRLHF uses it for engines of several ranks."""
    module.CpuPlatform.ray_device_key = "GPU"


@wrapt.when_imported("openrlhf")  # type: ignore[untyped-decorator]
def _without_flash_attention(openrlhf: types.ModuleType) -> None:
    """`openrlhf.models` imports flash-attn, whose functions it only calls for packed samples and ring attention."""
    names = {
        "flash_attn": (),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
        "flash_attn.utils": (),
        "flash_attn.utils.distributed": ("all_gather",),
    }
    for name, functions in names.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        for function in functions:
            setattr(module, function, _needs_flash_attention)
        sys.modules[name] = module


def _needs_flash_attention(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("flash-attn is a stand-in here: no packed samples and no ring attention on a CPU")
