"""One rank of an engine: stages what its agent fetches, activates it between two steps, and proves what it holds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from sparrowrl.config import Credentials, RankConfig
from sparrowrl.delta.keys import artifact_key, layout_key
from sparrowrl.delta.layout import Layout, state_id
from sparrowrl.errors import CorruptData, FingerprintMismatch, StateError, UnknownState
from sparrowrl.transport.node import ErrorInfo, NextArtifact, NodeDirectory, RankStatus
from sparrowrl.vllm_worker_ext import attachment as attaching
from sparrowrl.vllm_worker_ext import export
from sparrowrl.vllm_worker_ext.agreement import Agreement
from sparrowrl.vllm_worker_ext.attachment import Attachment
from sparrowrl.vllm_worker_ext.census import Parts
from sparrowrl.vllm_worker_ext.changes import Write
from sparrowrl.vllm_worker_ext.staging import Held, Staged, check_base, read_manifest, read_segment
from sparrowrl.vllm_worker_ext.tracing import Model

_POLL_S = 0.005
_IDLE_POLL_S = 0.02
_JOIN_S = 10.0


class Reply(TypedDict):
    """What every call of a worker answers, whatever happened (docs/protocol.md section 5)."""

    rank: int
    call_id: int
    ok: bool
    version: int | None
    state: str | None
    condition: str
    detail: str
    error: dict[str, str] | None


class Receiver:
    """The state machine of one rank: exactly at a version, or unknown until an anchor restores it.

    The ranks of an engine get the same calls in the same order, and what changes their weights they do together or not
    at all.
    """

    def __init__(self, model: Model, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        self._model, self._vllm_config = model, vllm_config
        self.rank, self._world = parallel.rank, parallel.world_size
        self._lock = threading.RLock()  # held while live weights or what is staged are read or written
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._memory = threading.Lock()  # held by the stager at work, and by vLLM while it has the weights' memory
        self._asleep = False
        self._node: NodeDirectory | None = None
        self._credentials: Credentials | None = None
        self._attachment: Attachment | None = None
        self._ranks: Agreement | None = None
        self._calls = 0  # the same in all ranks: names what they do together
        self._trusted = False  # whether all weights were proved to be where the placement says
        self._agreed = False  # whether the ranks have agreed, one way or the other, on the call that runs
        self._held = Held(exact=False)
        self._staged: Staged | None = None
        self._active: str | None = None  # key of the artifact that brought us here
        self._refused: NextArtifact | None = None  # what failed to be staged or activated: not tried again as it is
        self._error: ErrorInfo | None = None
        self._status: RankStatus | None = None  # what was written last, or should have been

    # The calls of docs/protocol.md section 5. None raises.

    def attach(self, call_id: int, node_dir: str, token_file: str) -> Reply:
        """Learn the placement, prove that the live weights are version 0, and begin to follow the node directory.

        Weights that are not version 0 are no failure of the call: the condition is then "unknown", until an anchor.
        """
        self.close()  # not with the lock held, for which the thread may be waiting
        return self._answer(call_id, lambda: self._awake(lambda: self._attach(node_dir, token_file)))

    def activate(self, call_id: int, key: str) -> Reply:
        """Switch to the staged artifact `key`, all or nothing; already being there is ok."""
        return self._answer(call_id, lambda: self._awake(lambda: self._activate(key)))

    def audit(self, call_id: int) -> Reply:
        """Compare the fingerprints of all live weights with those of the version held."""
        return self._answer(call_id, lambda: self._awake(self._audit))

    def export(self, call_id: int, path: str) -> Reply:
        """Write the live weights, in checkpoint coordinates, to a safetensors file."""
        return self._answer(call_id, lambda: self._awake(lambda: self._export(Path(path))))

    def status(self, call_id: int) -> Reply:
        """Say what is held."""
        return self._answer(call_id, lambda: "")

    def close(self) -> None:
        """Stop following. Live weights stay as they are."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None

    def sleep(self, discarded: bool) -> None:
        """vLLM is about to take the weights' memory: when this returns nothing touches it, until `wake`.

        Discarded weights are unknown from now on, until an anchor.
        """
        if self._asleep:
            return
        self._memory.acquire()  # the stager ends what it is at
        with self._lock:
            self._asleep = True
            if discarded:
                self._staged, self._held = None, Held(exact=False)
                self._error = ErrorInfo.of(UnknownState("vLLM has discarded the weights (a sleep of level 2)"))
            self._write_status()

    def wake(self) -> None:
        """The weights' memory is back."""
        if self._asleep:
            self._asleep = False
            self._memory.release()

    def _awake(self, action: Callable[[], str]) -> str:
        if self._asleep:
            raise StateError(f"rank {self.rank}: the engine's weights sleep; wake them up first")
        return action()

    def _answer(self, call_id: int, action: Callable[[], str]) -> Reply:
        detail, error = "", None
        with self._lock:
            self._calls += 1
            try:
                detail = action()
            except Exception as failure:  # noqa: BLE001 - an exception across the RPC desynchronizes vLLM's replies
                error = ErrorInfo.of(failure)
                self._error = error
            self._write_status()
            return Reply(
                rank=self.rank,
                call_id=call_id,
                ok=error is None,
                version=self._held.version,
                state=None if self._held.state is None else self._held.state.hex(),
                condition="exact" if self._held.exact else "unknown",
                detail=detail,
                error=None if error is None else {"error": error.error, "message": error.message},
            )

    @contextmanager
    def _together(self, what: str) -> Iterator[tuple[Agreement, str]]:
        """All ranks do the block, or none has done it: if it fails in one, it fails in all, within the deadline.

        The ranks agree at its end, or where the block calls `_agree`.
        """
        if self._ranks is None:
            raise UnknownState(f"rank {self.rank} is not attached to a run yet")
        event = f"{self._calls}-{what}"
        self._agreed = False
        try:
            yield self._ranks, event
        except BaseException as error:
            if not self._agreed:
                self._agreed = True
                self._ranks.decide(event, f"{type(error).__name__}: {error}")
            raise
        self._agree(event)

    def _agree(self, event: str) -> None:
        """Raise StateError if another rank has failed, or did not come in time."""
        assert self._ranks is not None
        if not self._agreed:
            self._agreed = True
            if (problem := self._ranks.decide(event, None)) is not None:
                raise StateError(f"expected all ranks to succeed, but {problem}")

    def _attach(self, node_dir: str, token_file: str) -> str:
        self._stop = threading.Event()
        self._staged = self._active = self._refused = self._error = None
        self._attachment, self._held = None, Held(exact=False)
        config = RankConfig.from_environment()
        node, credentials = NodeDirectory.open(node_dir), Credentials.load(token_file)
        self._node, self._credentials = node, credentials
        folder = node.root / f"ranks-{self._vllm_config.instance_id}"
        self._ranks = Agreement(folder, self.rank, self._world, config.timeout)
        with self._together("attach") as (ranks, event):
            key = artifact_key(credentials.run, 0, "origin")
            origin = read_manifest(node, NextArtifact(key, "origin", None, 0), credentials.run, credentials.run_key)
            layout = Layout.from_bytes(node.key_path(layout_key(credentials.run, origin.layout)).read_bytes())
            origin.check_layout(layout)
            wanted = tuple(tensor.fingerprint for tensor in origin.tensors)
            own, parts, wrong = self._learn(layout, wanted, ranks, event, ())
            if self._is_suspect(layout, {n: wanted[n] for n in wrong}):
                own, parts, wrong = self._learn(layout, wanted, ranks, f"{event}-again", wrong)
            if wrong:
                held = Held(exact=False)
                advice = "serve the checkpoint that training started from, or have the trainer publish an anchor"
                self._error = ErrorInfo.of(FingerprintMismatch(f"{_other_weights(layout, wrong, 0, wanted)}; {advice}"))
            else:
                held = Held(True, 0, origin.target_state, wanted, parts)
                attaching.prove_reload(own)
            self._agree(event)
        self._trusted |= held.exact
        self._attachment, self._held = own, held
        self._thread = threading.Thread(target=self._follow, name="sparrowrl-stager", daemon=True)
        self._thread.start()
        return "" if self._error is None else self._error.message

    def _is_suspect(self, layout: Layout, wrong: dict[int, int]) -> bool:
        """Whether the engine has loaded weights of these fingerprints, and holds other bits where they should be.

        Then something has processed them after loading, unseen. (Not if we have changed them ourselves since.)
        """
        return (
            bool(wrong)
            and not self._trusted
            and attaching.are_in_checkpoint(self._vllm_config, self._model, layout, wrong)
        )

    def _learn(
        self, layout: Layout, wanted: tuple[int, ...], ranks: Agreement, event: str, distrusted: Sequence[int]
    ) -> tuple[Attachment, Parts, list[int]]:
        """What this rank holds, its parts of the fingerprints, and the tensors of which the ranks hold other bits."""
        unused = RankConfig.from_environment().unused
        within = event.removesuffix("-again")
        own = attaching.learn(self._model, self._vllm_config, layout, ranks, event, within, unused, distrusted)
        attaching.fill_mirrors(own, self._vllm_config, self._model)
        parts = own.live_parts()
        everyone = ranks.share(f"{event}-parts", parts.tobytes(), within)
        return own, parts, own.census.wrong([np.frombuffer(data, dtype=np.uint64) for data in everyone], wanted)

    # Staging, on a thread of its own.

    def _follow(self) -> None:
        assert self._attachment is not None and self._node is not None
        device = self._attachment.placement.device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        pause = 0.0
        while not self._stop.wait(pause) and self._node.root.exists():
            if not self._memory.acquire(timeout=_IDLE_POLL_S):
                continue
            try:
                with torch.cuda.stream(stream), torch.no_grad():
                    pause = _POLL_S if self._poll(stream) else _IDLE_POLL_S
            finally:
                self._memory.release()

    def _poll(self, stream: torch.cuda.Stream | None) -> bool:
        """Stage what next.json lists and is not staged yet; returns whether there is something to follow."""
        assert self._node is not None
        wanted: NextArtifact | None = None
        try:
            self._keep_status()
            wanted = self._node.next.read()
            with self._lock:
                staged = self._begin(wanted)
            if staged is None or wanted is None:
                return False
            try:
                self._stage(staged, wanted, stream)
            except FileNotFoundError as error:
                if self._node.next.read() == wanted:  # else it was given up by the agent meanwhile
                    raise CorruptData(f"{error.filename}: listed in next.json, but not there any more") from error
        except Exception as error:  # noqa: BLE001 - nobody else would see it: what stops this thread must be reported
            with self._lock:
                self._refuse(wanted, error)
            return False
        return not staged.complete

    def _begin(self, wanted: NextArtifact | None) -> Staged | None:
        """The draft to go on with: the one there is, a new one, or none if there is nothing to do."""
        staged = self._staged
        if staged is not None and (
            wanted is None or wanted.key != staged.artifact.key or not staged.taken <= set(wanted.segments)
        ):
            self._staged = staged = None
            self._write_status()
        if wanted != self._refused:
            self._refused = None
        if wanted is None or self._refused is not None or self._is_at(wanted):
            return None
        if staged is None:
            check_base(wanted, self._held)
            self._staged = staged = Staged(wanted)
            self._error = None
            self._write_status()
        return None if staged.complete else staged

    def _is_at(self, wanted: NextArtifact) -> bool:
        """Whether there is nothing to do. An anchor of what this rank holds is offered for another rank's sake."""
        if wanted.kind == "anchor":
            return self._held.exact and wanted.key == self._active
        return wanted.target == self._held.version

    def _stage(self, staged: Staged, wanted: NextArtifact, stream: torch.cuda.Stream | None) -> None:
        assert self._node and self._attachment and self._credentials and self._ranks
        for name in wanted.segments:
            if name in staged.taken or self._stop.is_set():
                continue
            data = read_segment(self._node, wanted, name)
            with self._lock:
                check_base(wanted, self._held)
                staged.take(name, data, self._attachment.placement)
                if stream is not None:
                    stream.synchronize()
        if not wanted.committed or self._stop.is_set():
            return
        event = f"staged-{blake3(repr(wanted).encode()).hexdigest()[:32]}"
        if staged.manifest is None:
            manifest = read_manifest(self._node, wanted, self._credentials.run, self._credentials.run_key)
            with self._lock:
                staged.finish(manifest, self._attachment.placement, self._held)
        if staged.offered != event:  # new, or the same artifact again because another rank has refused it
            assert staged.parts is not None
            self._ranks.offer(event, staged.parts.tobytes())
            staged.offered = event
        self._complete(event, staged)

    def _complete(self, event: str, staged: Staged) -> None:
        """Once all ranks have staged it, see whether together they will hold what the manifest says."""
        assert self._ranks is not None and self._attachment is not None
        everyone = self._ranks.offered(event)
        if everyone is None:
            return
        with self._lock:
            parts = [np.frombuffer(data, dtype=np.uint64) for data in everyone]
            staged.agree(parts, self._attachment.census, self._held)
            self._write_status()

    def _refuse(self, artifact: NextArtifact | None, error: Exception) -> None:
        self._staged, self._refused, self._error = None, artifact, ErrorInfo.of(error)
        self._write_status()

    # Between two engine steps.

    def _activate(self, key: str) -> str:
        with self._together("activate") as (_, event):
            if self._held.exact and key == self._active:
                return "active already"
            staged = self._staged
            if staged is None or staged.artifact.key != key or not staged.complete:
                got = "nothing" if staged is None else f"{staged.artifact.key}, complete: {staged.complete}"
                raise StateError(f"expected {key} to be staged, got {got}")
            check_base(staged.artifact, self._held)
            assert staged.manifest is not None
            try:
                if staged.manifest.kind == "anchor":
                    self._restore(staged, event)
                else:
                    self._apply(staged, event)
            except Exception as error:
                if isinstance(error, UnknownState):
                    self._held = Held(exact=False)
                self._refuse(staged.artifact, error)
                raise
        manifest = staged.manifest
        self._held = Held(True, manifest.target, manifest.target_state, staged.fingerprints, staged.parts)
        self._active, self._staged, self._error = key, None, None
        return ""

    def _apply(self, staged: Staged, event: str) -> None:
        """Write a delta, prove it from the bits read back, and see that all ranks have; else put everything back."""
        assert self._attachment is not None
        layout, live = self._attachment.placement.layout, self._attachment.placement.live
        digest = self._attachment.digest
        done: list[tuple[Write, Tensor | None]] = []
        try:
            for write in staged.writes:
                done.append((write, write.do(live[write.live])))
                write.check(live[write.live], write.after, layout)  # at once: it is in the caches still
            self._attachment.carry()
            self._attachment.placement.mark_written()
            self._agree(event)  # the last that can fail: after it the others keep what they have written
        except BaseException as error:
            self._undo(staged, done, digest, error)
            raise

    def _undo(
        self, staged: Staged, done: list[tuple[Write, Tensor | None]], digest: bytes | None, reason: BaseException
    ) -> None:
        """Put everything back. Raises UnknownState, with the reason too, if that fails."""
        assert self._attachment is not None
        layout, live = self._attachment.placement.layout, self._attachment.placement.live
        try:
            for write, old in reversed(done):
                write.undo(live[write.live], old)
            for write in staged.writes:
                write.check(live[write.live], write.before, layout)
            if done:
                self._attachment.carry()
                if self._attachment.digest != digest:
                    raise FingerprintMismatch("opaque and derived weights: expected the bytes from before, got others")
        except BaseException as error:
            self._held = Held(exact=False)
            raise UnknownState(f"{staged.artifact.key}: {reason}; putting it back failed too: {error}") from error
        finally:
            self._attachment.placement.mark_written()

    def _restore(self, staged: Staged, event: str) -> None:
        """Write an anchor and audit everything. There is no way back: what fails half-way leaves the rank unknown."""
        assert self._attachment is not None and staged.manifest is not None
        live = self._attachment.placement.live
        self._held = Held(exact=False)
        try:
            for write in staged.writes:
                write.do(live[write.live])
            self._attachment.carry(held=False)
        finally:
            self._attachment.placement.mark_written()
        manifest = staged.manifest
        self._check_live(Held(True, manifest.target, manifest.target_state, staged.fingerprints, staged.parts))
        self._agree(event)

    # Proof.

    def _check_live(self, held: Held) -> None:
        """Audit this rank: raises FingerprintMismatch that names tensors whose live weights are not those of `held`."""
        assert self._attachment is not None and held.parts is not None
        wrong = np.flatnonzero(self._attachment.live_parts() != held.parts).tolist()
        if wrong:
            layout = self._attachment.placement.layout
            raise FingerprintMismatch(_other_weights(layout, wrong, held.version, held.fingerprints))
        self._attachment.check_carried()

    def _audit(self) -> str:
        began = time.perf_counter()
        held = self._held
        try:
            with self._together("audit"):
                if not held.exact or held.version is None:
                    raise UnknownState(f"rank {self.rank} cannot say what it holds; publish an anchor")
                self._check_live(held)
        except StateError:
            self._held, self._staged = Held(exact=False), None
            raise
        return f"version {held.version}, {1000 * (time.perf_counter() - began):.1f} ms"

    def _export(self, path: Path) -> str:
        with self._together("export") as (ranks, event):
            if self._attachment is None:
                raise UnknownState(f"rank {self.rank} is not attached to a run yet")
            version = "unknown" if self._held.version is None else str(self._held.version)
            return export.write(self._attachment.placement, path, version, ranks, event)

    def _write_status(self) -> None:
        if self._node is None:
            return
        staged = self._staged
        self._status = RankStatus(
            rank=self.rank,
            pid=os.getpid(),
            version=self._held.version,
            state=None if self._held.state is None else self._held.state.hex(),
            condition="exact" if self._held.exact else "unknown",
            staged=staged.artifact.key if staged is not None and staged.complete else None,
            staged_bytes=sum(write.nbytes for write in staged.writes) if staged is not None else 0,
            stage_ms=staged.milliseconds if staged is not None else 0.0,
            error=self._error,
        )
        with suppress(OSError):  # the directory is full, or gone; _keep_status tries again
            self._node.rank(self.rank).write(self._status)

    def _keep_status(self) -> None:
        """Write the status again if its file does not say it: it could not be written, or somebody else was at it."""
        assert self._node is not None
        with self._lock:
            try:
                there = self._node.rank(self.rank).read()
            except CorruptData:
                there = None
            if there != self._status:
                self._write_status()


def _other_weights(layout: Layout, wrong: Sequence[int], version: int | None, wanted: Sequence[int]) -> str:
    names = [layout.tensors[n].name for n in wrong]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"live weights of {', '.join(names[:3])}{more}: expected those of version {version}, state "
        f"{state_id(layout, wanted).hex()[:16]}, got others"
    )
