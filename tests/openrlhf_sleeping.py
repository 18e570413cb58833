"""Imported by all processes of OpenRLHF test runs with `--vllm.enable_sleep`: the stand-in for CUDA's sleep mode."""

from __future__ import annotations

from types import ModuleType

import wrapt


@wrapt.when_imported("vllm.platforms.interface")  # type: ignore[untyped-decorator]
def _allow(module: ModuleType) -> None:
    import sleeping

    sleeping.allow(module.Platform)  # type: ignore[attr-defined]


@wrapt.when_imported("vllm.v1.worker.cpu_worker")  # type: ignore[untyped-decorator]
def _install(module: ModuleType) -> None:
    import sleeping

    sleeping.install(module.CPUWorker)  # type: ignore[attr-defined]
