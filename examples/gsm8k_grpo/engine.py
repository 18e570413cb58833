"""Hub and vLLM server as child processes, and the engine as the hub sees it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import torch

from sparrowrl.config import Credentials
from sparrowrl.errors import DeadlineExceeded, SparrowError, TransportError
from sparrowrl.examples.gsm8k_grpo.processes import Child, Children, free_port
from sparrowrl.examples.gsm8k_grpo.settings import Settings
from sparrowrl.transport.node import Answer, EngineStatus
from sparrowrl.transport.records import from_json
from sparrowrl.transport.remote import HubClient

ENGINE = "demo"
LONGEST_PROMPT = 512
_HUB_START_S = 60.0
_ENGINE_START_S = 600.0
_ANSWER_S = 300.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Devices:
    """Where trainer and engine compute: the engine takes the first GPUs; the trainer the next, or shares the first."""

    gpus: int
    trainer: torch.device
    shared: bool

    @classmethod
    def found(cls, tensor_parallel_size: int) -> Devices:
        """What this machine has."""
        gpus = torch.cuda.device_count()
        spare = gpus > tensor_parallel_size
        trainer = torch.device("cpu" if not gpus else f"cuda:{tensor_parallel_size if spare else 0}")
        return cls(gpus, trainer, shared=gpus > 0 and not spare)


def start_hub(children: Children, out: Path, credentials: Path) -> tuple[Child, str]:
    """Start `sparrowrl hub` over `out`/journal; the process and its address."""
    port = free_port()
    command = [sys.executable, "-m", "sparrowrl.cli.main", "hub", "--journal", str(out / "journal")]
    command += ["--credentials", str(credentials), "--port", str(port)]
    return children.start("hub", command, out / "hub.log", os.environ), f"http://127.0.0.1:{port}"


def start_engine(
    children: Children, settings: Settings, devices: Devices, checkpoint: Path, hub: str, token_file: Path
) -> tuple[Child, str]:
    """Start a vLLM server that follows the hub by itself; the process and its address."""
    port = settings.port or free_port()
    environment = _environment(bool(devices.gpus)) | {
        "SPARROWRL_HUB": hub,
        "SPARROWRL_TOKEN_FILE": str(token_file),
        "SPARROWRL_ENGINE_ID": ENGINE,
        "SPARROWRL_EXPORT_DIR": str(settings.out / "export"),
    }
    command = engine_command(settings, devices, checkpoint, port)
    return children.start("engine", command, settings.out / "engine.log", environment), f"http://127.0.0.1:{port}"


def engine_command(settings: Settings, devices: Devices, checkpoint: Path, port: int) -> list[str]:
    """The same as `vllm serve`; only --weight-transfer-config is about SparrowRL.

    --enable-scale-out offers the route that takes and gives token ids and says which weights sampled which token.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(checkpoint), "--dtype", settings.dtype, "--seed", str(settings.seed)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--weight-transfer-config", json.dumps({"backend": "sparrow"})]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enforce-eager"]
    command += ["--max-model-len", str(LONGEST_PROMPT + settings.max_tokens), "--max-num-seqs", str(settings.in_flight)]
    command += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    if not devices.gpus:
        command += ["--kv-cache-memory-bytes", str(1 << 30)]
    elif devices.shared:
        command += ["--gpu-memory-utilization", "0.4"]
    return command


def _environment(cuda: bool) -> dict[str, str]:
    environment = dict(os.environ) | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("VLLM_SERVER_DEV_MODE", None)
    if not cuda:
        # One process fewer, threads that the trainer can share the cores with, and no compiler at the first request.
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(engine_threads()),
            "TORCHDYNAMO_DISABLE": "1",
        }
    return environment


def engine_threads() -> int:
    """CPU threads of an engine without a GPU: half of the cores; the trainer has the others."""
    return max(1, (os.cpu_count() or 2) // 2)


async def wait_for_hub(child: Child, url: str) -> None:
    """Until the hub answers. Raises TransportError."""
    await _wait_healthy(child, url, _HUB_START_S, lambda: None)


async def wait_for_engine(child: Child, url: str, tell: Callable[[], None]) -> None:
    """Until the server takes requests, calling `tell` all the while. Raises TransportError."""
    await _wait_healthy(child, url, _ENGINE_START_S, tell)


async def _wait_healthy(child: Child, url: str, seconds: float, tell: Callable[[], None]) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            child.check()
            tell()
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineExceeded(
                    f"the {child.name}: expected an answer at {url} within {seconds:.0f} s, got none"
                )
            await asyncio.sleep(_POLL_S)


class Watched:
    """The engine's status, read from the hub again and again."""

    def __init__(self, hub: str, credentials: Credentials) -> None:
        """Make it inside a running event loop."""
        self._client = HubClient(hub, credentials)
        self._changed = asyncio.Condition()
        self.status = EngineStatus()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.__aexit__(None, None, None)

    async def watch(self, report: Callable[[EngineStatus], None]) -> None:
        """Read it until cancelled, and hand every new one to `report`. Raises TransportError if the hub is lost."""
        while True:
            raw = (await self._client.engines()).get(ENGINE)
            if raw is not None:
                status = from_json(EngineStatus, raw, f"engine {ENGINE}")
                if status != self.status:
                    self.status = status
                    report(status)
                    async with self._changed:
                        self._changed.notify_all()
            await asyncio.sleep(_POLL_S)

    async def until(self, condition: Callable[[EngineStatus], bool], seconds: float, what: str) -> EngineStatus:
        """The first status that meets `condition`. Raises DeadlineExceeded that names `what` did not happen."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: condition(self.status))
        except TimeoutError as error:
            told = brief(self.status)
            raise DeadlineExceeded(f"{what}: expected within {seconds:.0f} s; the engine is at {told}") from error
        return self.status

    async def ask(self, kind: str) -> Answer:
        """Ask for an "audit" or an "export" through the hub; the engine's answer."""
        number = await self._client.ask(ENGINE, kind)

        def answers(status: EngineStatus) -> list[Answer]:
            return [answer for answer in status.answers if answer.id == number]

        status = await self.until(lambda status: bool(answers(status)), _ANSWER_S, f"answer to the {kind}")
        return answers(status)[0]


def brief(status: EngineStatus) -> str:
    """A status in one line."""
    trouble = f", {status.error.error}: {status.error.message}" if status.error else ""
    return f"version {status.version}, {status.condition}{trouble}"


def first_cause(failure: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that a task group wraps; one of ours before any other."""
    leaves: list[BaseException] = []
    for error in failure.exceptions:
        leaves.append(first_cause(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in leaves if isinstance(error, SparrowError)), leaves[0])


def exported_file(out: Path) -> Path:
    """The file that the engine exported. Raises TransportError unless there is exactly one."""
    found = sorted((out / "export").rglob("*.safetensors"))
    if len(found) != 1:
        raise TransportError(f"expected one exported file under {out / 'export'}, got {[path.name for path in found]}")
    return found[0]
