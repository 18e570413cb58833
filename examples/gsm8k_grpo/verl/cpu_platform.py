"""What verl 0.9.1 lacks to run on a machine without an accelerator. verl imports it (`VERL_USE_EXTERNAL_MODULES`).

The accelerators that verl counts and Ray hands out are made up (`ray_init.num_gpus`): a "GPU" is a process on the CPU.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

DEVICES = 8  # more than any process asks for
_MEMORY = 1 << 30  # what verl is told of memory, free and in all


class _Cpu(str):
    """The number of the current device, for torch (`tensor.to(device)`) as well as in verl's f"{name}:{device}"."""

    def __new__(cls) -> _Cpu:
        """The only one."""
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return "0"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for all that only an accelerator needs to do."""


def _device_module() -> types.ModuleType:
    """What `torch.cuda` is to a GPU."""
    module = types.ModuleType("cpu_as_device")
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(module, name, _nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *args: 0)
    vars(module).update(
        is_available=lambda: False,
        current_device=_Cpu,
        get_device_name=lambda *args: "CPU",
        device_count=lambda: DEVICES,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        mem_get_info=lambda *args: (_MEMORY, _MEMORY),
    )
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """verl's platform for the CPU; chosen by `VERL_PLATFORM=cpu`."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        """A CPU always is."""
        return True

    def current_device(self) -> _Cpu:
        """There is only one."""
        return _Cpu()

    def device_count(self) -> int:
        """Enough; it is Ray that counts."""
        return DEVICES

    def manual_seed(self, seed: int) -> None:
        """As torch's."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """None, as there is no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """What torch.distributed calls it."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Ray sets it for its made-up GPUs."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No range."""
        yield

    def ray_resource_name(self) -> str:
        """The made-up GPUs'."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """verl sets it so that Ray leaves the visible devices alone."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """No device memory to share; verl then uses shared memory."""
        return False


def _one_backend_per_device(original: Callable[..., None]) -> Callable[..., None]:
    """verl asks for "cpu:gloo,<device>:<backend>"; with the CPU as the device torch refuses to be told twice."""

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend is not None:
            backend = ",".join(dict.fromkeys(backend.split(",")))
        original(backend, *args, **kwargs)

    return init_process_group


torch.distributed.init_process_group = _one_backend_per_device(torch.distributed.init_process_group)
