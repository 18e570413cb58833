"""A real vLLM server, processes and all, that follows a real hub while it answers requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engines import ENVIRONMENT, PROMPTS, Tensors, Trainer, generate, save_checkpoint
from safetensors.torch import load_file

from helpers import assert_bits_equal, wait_for
from sparrowrl.transport.node import remove_stale
from sparrowrl.vllm_worker_ext.versions import facts

pytestmark = pytest.mark.vllm
ENGINE_ID = "served"


def ask(url: str, body: Any = None, token: str = "") -> Any:
    """GET, or POST of JSON; the answer's JSON (None if it is empty)."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
        content = answer.read()
    return json.loads(content) if content else None


class Server:
    """`vllm serve` of a tiny model, following the hub of `trainer`."""

    def __init__(self, folder: Path, trainer: Trainer, ranks: int = 1) -> None:
        self.folder, self.trainer, root = folder, trainer, trainer.root
        command = [sys.executable, "-m", "sparrowrl.cli.main", "hub", "--port", "0", "--journal", str(root / "journal")]
        self.hub = subprocess.Popen(
            [*command, "--credentials", str(root / "token.json")], stdout=subprocess.PIPE, text=True
        )
        assert self.hub.stdout is not None
        self.hub_url = self.hub.stdout.readline().strip()
        trainer.credentials.for_engines().save(root / "engine-token.json")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        environment |= {"SPARROWRL_HUB": self.hub_url, "SPARROWRL_TOKEN_FILE": str(root / "engine-token.json")}
        environment |= {"SPARROWRL_ENGINE_ID": ENGINE_ID, "SPARROWRL_EXPORT_DIR": str(root)}
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(folder),
            "--port",
            str(port),
        ]
        command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--skip-tokenizer-init", "--enforce-eager"]
        command += ["--dtype", "bfloat16", "--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20)]
        command += ["--enable-scale-out"] if facts().stamps_requests else []
        command += ["--tensor-parallel-size", str(ranks)]
        command += ["--weight-transfer-config", '{"backend": "sparrow"}']
        self.log = root / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        def up() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                ask(f"{self.url}/health")
            except OSError:
                return False
            return True

        wait_for(up, 240, "the server to be up")

    def generate(self, prompt: list[int], tokens: int) -> Any:
        body = {"token_ids": prompt, "model": "tiny", "stream": False}
        sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        return ask(f"{self.url}/inference/v1/generate", {**body, "sampling_params": sampling})["choices"][0]

    def stream(self, prompt: list[int], tokens: int, began: Callable[[], None] = lambda: None) -> list[Any]:
        """The chunks of a streamed answer; `began` is called at each of them."""
        body = {"token_ids": prompt, "model": "tiny", "stream": True}
        sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        data = json.dumps({**body, "sampling_params": sampling}).encode()
        headers = {"Content-Type": "application/json"}
        chunks = []
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/inference/v1/generate", data, headers), timeout=120
        ) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    began()
                    chunks.extend(json.loads(line[6:])["choices"])
        return chunks

    def status(self) -> Any:
        known = ask(f"{self.hub_url}/runs/test/engines", token=self.trainer.credentials.reader)["engines"]
        return known.get(ENGINE_ID, {})

    def request(self, kind: str) -> Any:
        address = f"{self.hub_url}/runs/test/engines/{ENGINE_ID}/requests"
        number = ask(address, {"kind": kind}, self.trainer.credentials.writer or "")["id"]
        wait_for(lambda: any(a["id"] == number for a in self.status().get("answers", [])), 60, kind)
        return next(a for a in self.status()["answers"] if a["id"] == number)

    def close(self) -> None:
        for process in (self.process, self.hub):
            process.send_signal(signal.SIGINT)
        for process in (self.process, self.hub):
            process.wait(60)


@pytest.fixture
def server(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], tuple[Path, Tensors]], tmp_path: Path
) -> Iterator[Server]:
    folder, weights = checkpoint("qwen3-tied")
    server = Server(folder, Trainer.begin(tmp_path / "trainer", weights), getattr(request, "param", 1))
    yield server
    server.close()

    # vLLM kills its engine core and all children of it, so the directory may stay until the next engine of this user.
    wait_for(gone, 20, "the node directory to go")


def gone() -> bool:
    """Whether no node directory of the server is left, once those without an owner are removed."""
    remove_stale()
    return not [name for name in os.listdir("/dev/shm") if name.startswith(f"sparrowrl-{ENGINE_ID}-")]


@pytest.mark.parametrize("server", [1, pytest.param(2, marks=pytest.mark.slow)], indirect=True, ids=["one", "tp2"])
def test_a_server_follows_while_it_answers(server: Server) -> None:
    server.trainer.step()
    server.wait()
    wait_for(lambda: server.status().get("version") == 1, 60, "the late server to say that it is at version 1")
    answers: list[Any] = []
    enough = threading.Event()

    def load(prompt: list[int]) -> None:
        while not enough.is_set():
            answers.append(server.generate(prompt, 400))

    threads = [threading.Thread(target=load, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for version in range(2, 7):
        seen = len(answers)
        wait_for(lambda seen=seen: len(answers) > seen, 60, "an answer")  # type: ignore[misc]
        weights = server.trainer.step()
        wait_for(lambda version=version: server.status().get("version") == version, 60, f"version {version}")  # type: ignore[misc]
    enough.set()
    for thread in threads:
        thread.join(120)
    assert all(a["finish_reason"] == "length" and len(a["token_ids"]) == 400 for a in answers)
    activations = server.status()["activations"]
    assert [(a["base"], a["version"]) for a in activations] == [(v - 1, v) for v in range(1, 7)]
    assert all(a["fingerprint_ok"] and a["aborted"] == 0 for a in activations)
    assert any(a["requests_in_flight"] for a in activations)
    if facts().stamps_requests:
        spans = [[(s["version"], s["start"], s["end"]) for s in a["weight_versions"]] for a in answers]
        assert all(some[0][1] == 0 and some[-1][2] == 400 for some in spans)
        assert all(before[2] == after[1] for some in spans for before, after in pairwise(some))
        assert any(len(some) > 1 for some in spans)
    assert server.request("audit")["ok"] and server.status()["audited"] == 6
    assert server.request("export")["ok"]
    exported = load_file(server.trainer.root / f"{ENGINE_ID}-v6.safetensors")
    for name, tensor in weights.items():
        assert_bits_equal(exported[name], tensor)


@pytest.mark.slow
def test_streams_go_on_across_activations(server: Server, engine: Callable[..., Any], tmp_path: Path) -> None:
    server.wait()
    streams: list[list[Any]] = [[] for _ in PROMPTS]

    def listen(prompt: list[int], into: list[Any]) -> None:
        into.extend(server.stream(prompt, 450, lambda: first[id(into)].set()))

    first = {id(into): threading.Event() for into in streams}
    threads = [
        threading.Thread(target=listen, args=(prompt, into)) for prompt, into in zip(PROMPTS, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    assert all(event.wait(120) for event in first.values())
    for version in range(1, 5):
        weights = server.trainer.step(0.3)
        wait_for(lambda version=version: server.status().get("version") == version, 60, f"version {version}")  # type: ignore[misc]
    for thread in threads:
        thread.join(240)
    for chunks in streams:
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == 450
        if facts().stamps_requests:
            spans = [(s["version"], s["start"], s["end"]) for s in chunks[-1]["weight_versions"]]
            assert spans[0][:2] == ("0", 0) and spans[-1][2] == 450 and len(spans) > 1
            assert all(before[2] == after[1] and before[0] < after[0] for before, after in pairwise(spans))
    activations = server.status()["activations"]
    assert [(a["base"], a["version"], a["aborted"]) for a in activations] == [(v - 1, v, 0) for v in range(1, 5)]
    assert any(a["requests_in_flight"] for a in activations)
    fresh = engine(save_checkpoint(server.folder, tmp_path / "fresh", weights), max_model_len=512)
    for prompt in PROMPTS:
        ((tokens, logprobs),) = generate(fresh, [prompt], 12)
        chunks = server.stream(prompt, 12)
        assert [token for chunk in chunks for token in chunk["token_ids"]] == tokens
        found = [one["logprob"] for chunk in chunks for one in chunk["logprobs"]["content"]]
        assert found == pytest.approx(logprobs, abs=0.05)
