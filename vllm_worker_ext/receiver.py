"""One rank of an engine: stages what its agent fetches, activates it between two steps, and proves what it holds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from sparrowrl.config import Credentials
from sparrowrl.delta.keys import artifact_key, layout_key
from sparrowrl.delta.layout import U64_MASK, Layout, state_id
from sparrowrl.errors import CorruptData, FingerprintMismatch, StateError, UnknownState
from sparrowrl.kernels.fingerprint import fingerprint
from sparrowrl.transport.node import ErrorInfo, NextArtifact, NodeDirectory, RankStatus
from sparrowrl.vllm_worker_ext.changes import Change, sums
from sparrowrl.vllm_worker_ext.placement import Model, Placement, check_live, learn_placement
from sparrowrl.vllm_worker_ext.staging import (
    Held,
    Staged,
    check_base,
    read_manifest,
    read_segment,
    synchronize,
)

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
    """The state machine of one rank: exactly at a version, or unknown until an anchor restores it."""

    def __init__(self, model: Model, rank: int) -> None:
        self._model, self.rank = model, rank
        self._lock = threading.RLock()  # held while live weights or what is staged are read or written
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._node: NodeDirectory | None = None
        self._credentials: Credentials | None = None
        self._placement: Placement | None = None
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
        return self._answer(call_id, lambda: self._attach(node_dir, token_file))

    def activate(self, call_id: int, key: str) -> Reply:
        """Switch to the staged artifact `key`, all or nothing; already being there is ok."""
        return self._answer(call_id, lambda: self._activate(key))

    def audit(self, call_id: int) -> Reply:
        """Compare the fingerprints of all live weights with those of the version held."""
        return self._answer(call_id, self._audit)

    def export(self, call_id: int, path: str) -> Reply:
        """Write the live weights, in checkpoint coordinates, to a safetensors file."""
        return self._answer(call_id, lambda: self._export(Path(path)))

    def status(self, call_id: int) -> Reply:
        """Say what is held."""
        return self._answer(call_id, lambda: "")

    def close(self) -> None:
        """Stop following. Live weights stay as they are."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None

    def _answer(self, call_id: int, action: Callable[[], str]) -> Reply:
        detail, error = "", None
        with self._lock:
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

    def _attach(self, node_dir: str, token_file: str) -> str:
        self.close()
        self._stop = threading.Event()
        self._staged = self._active = self._refused = self._error = None
        check_live(self._model)
        node, credentials = NodeDirectory.open(node_dir), Credentials.load(token_file)
        self._node, self._credentials = node, credentials
        key = artifact_key(credentials.run, 0, "origin")
        origin = read_manifest(node, NextArtifact(key, "origin", None, 0), credentials.run, credentials.run_key)
        layout = Layout.from_bytes(node.key_path(layout_key(credentials.run, origin.layout)).read_bytes())
        origin.check_layout(layout)
        self._placement = learn_placement(self._model, layout)
        wanted = tuple(tensor.fingerprint for tensor in origin.tensors)
        try:
            self._check_live(wanted, 0)
            self._held = Held(True, 0, origin.target_state, wanted)
        except FingerprintMismatch as error:
            self._held = Held(exact=False)
            advice = "serve the checkpoint that training started from, or have the trainer publish an anchor"
            self._error = ErrorInfo.of(FingerprintMismatch(f"{error}; {advice}"))
        self._thread = threading.Thread(target=self._follow, name="sparrowrl-stager", daemon=True)
        self._thread.start()
        return "" if self._error is None else self._error.message

    # Staging, on a thread of its own.

    def _follow(self) -> None:
        assert self._placement is not None
        device = self._placement.live[0].device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        pause = 0.0
        assert self._node is not None
        while not self._stop.wait(pause) and self._node.root.exists():
            with torch.cuda.stream(stream), torch.no_grad():
                pause = _POLL_S if self._poll(stream) else _IDLE_POLL_S

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
        return not wanted.committed

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
        if wanted is None or self._refused is not None or wanted.target == self._held.version:
            return None
        if staged is None:
            check_base(wanted, self._held)
            self._staged = staged = Staged(wanted)
            self._error = None
            self._write_status()
        return None if staged.manifest is not None else staged

    def _stage(self, staged: Staged, wanted: NextArtifact, stream: torch.cuda.Stream | None) -> None:
        assert self._node is not None and self._placement is not None and self._credentials is not None
        for name in wanted.segments:
            if name in staged.taken or self._stop.is_set():
                continue
            data = read_segment(self._node, wanted, name)
            with self._lock:
                check_base(wanted, self._held)
                staged.take(name, data, self._placement)
                if stream is not None:
                    stream.synchronize()
        if wanted.committed and not self._stop.is_set():
            manifest = read_manifest(self._node, wanted, self._credentials.run, self._credentials.run_key)
            with self._lock:
                staged.finish(manifest, self._placement, self._held)
                self._write_status()

    def _refuse(self, artifact: NextArtifact | None, error: Exception) -> None:
        self._staged, self._refused, self._error = None, artifact, ErrorInfo.of(error)
        self._write_status()

    # Between two engine steps.

    def _activate(self, key: str) -> str:
        if self._held.exact and key == self._active:
            return "active already"
        staged = self._staged
        if staged is None or staged.artifact.key != key or staged.manifest is None:
            got = "nothing" if staged is None else f"{staged.artifact.key}, complete: {staged.manifest is not None}"
            raise StateError(f"expected {key} to be staged, got {got}")
        check_base(staged.artifact, self._held)
        try:
            if staged.manifest.kind == "anchor":
                self._restore(staged)
            else:
                self._apply(staged)
        except Exception as error:
            self._refuse(staged.artifact, error)
            raise
        self._held = Held(True, staged.manifest.target, staged.manifest.target_state, staged.fingerprints)
        self._active, self._staged, self._error = key, None, None
        return ""

    def _apply(self, staged: Staged) -> None:
        """Write a delta and prove it from the bits read back; on any failure put everything back and prove that."""
        assert self._placement is not None
        done: list[tuple[Change, Tensor | None]] = []
        proofs: list[Tensor] = []
        ordered = sorted(staged.changes, key=lambda change: change.alias)  # aliases last: their owners are written then
        try:
            for change in ordered:
                if not change.alias:
                    done.append((change, change.write(self._placement.live[change.live])))
                proofs.append(self._proof(change))  # at once, while the caches still have what was written
            self._check_proofs(ordered, proofs, staged.after)
        except BaseException:
            self._undo(staged, done)
            raise
        self._placement.mark_written()

    def _undo(self, staged: Staged, done: list[tuple[Change, Tensor | None]]) -> None:
        assert self._placement is not None
        try:
            for change, old in reversed(done):
                change.undo(self._placement.live[change.live], old)
            self._check_proofs(staged.changes, [self._proof(change) for change in staged.changes], staged.before)
        except BaseException as error:
            self._held = Held(exact=False)
            raise UnknownState(f"{staged.artifact.key}: failed, and so did putting it back ({error})") from error
        finally:
            self._placement.mark_written()

    def _restore(self, staged: Staged) -> None:
        """Write an anchor and audit everything. There is no way back: what fails half-way leaves the rank unknown."""
        assert self._placement is not None and staged.manifest is not None
        self._held = Held(exact=False)
        try:
            for change in staged.changes:
                if not change.alias:
                    change.write(self._placement.live[change.live])
        finally:
            self._placement.mark_written()
        self._check_live(staged.fingerprints, staged.manifest.target)

    # Proof.

    def _proof(self, change: Change) -> Tensor:
        assert self._placement is not None
        return change.proof(self._placement.live[change.live], self._placement.layout.seeds[change.tensor])

    def _check_proofs(self, changes: list[Change], proofs: list[Tensor], expected: dict[int, int]) -> None:
        assert self._placement is not None
        for number, value in sums(changes, proofs).items():
            if value != expected[number]:
                raise FingerprintMismatch(
                    f"{self._placement.layout.tensors[number].name}: expected the changed weights to sum to "
                    f"{expected[number]:#x}, read back {value:#x}"
                )

    def _live_fingerprints(self) -> tuple[int, ...]:
        assert self._placement is not None
        layout, live = self._placement.layout, self._placement.live
        synchronize(live[0].device)
        totals = []
        for seed, pieces in zip(layout.seeds, self._placement.pieces, strict=True):
            parts = [fingerprint(bits, seed, *box) for piece in pieces for bits, *box in piece.rows(live[piece.live])]
            totals.append(sum(int(part) for part in parts) & U64_MASK)
        return tuple(totals)

    def _check_live(self, wanted: tuple[int, ...], version: int) -> None:
        """Audit: raises FingerprintMismatch that names the tensors whose live weights are not those of `wanted`."""
        assert self._placement is not None
        layout = self._placement.layout
        got = self._live_fingerprints()
        wrong = [spec.name for spec, a, b in zip(layout.tensors, wanted, got, strict=True) if a != b]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise FingerprintMismatch(
                f"live weights of {', '.join(wrong[:3])}{more}: expected those of version {version}, state "
                f"{state_id(layout, wanted).hex()[:16]}, got others"
            )

    def _audit(self) -> str:
        held = self._held
        if not held.exact or held.version is None:
            raise UnknownState(f"rank {self.rank} cannot say what it holds; publish an anchor")
        began = time.perf_counter()
        try:
            self._check_live(held.fingerprints, held.version)
        except FingerprintMismatch:
            self._held = Held(exact=False)
            self._staged = None
            raise
        return f"version {held.version}, {1000 * (time.perf_counter() - began):.1f} ms"

    def _export(self, path: Path) -> str:
        from safetensors.torch import save_file

        if self._placement is None:
            raise UnknownState(f"rank {self.rank} is not attached to a run yet")
        tensors: dict[str, Tensor] = {}
        for spec, pieces in zip(self._placement.layout.tensors, self._placement.pieces, strict=True):
            out = torch.empty(spec.numel, dtype=self._placement.live[pieces[0].live].dtype if pieces else torch.int8)
            for piece in pieces:
                bits = self._placement.live[piece.live].as_strided(piece.sizes, piece.target_strides, piece.target)
                out.as_strided(piece.sizes, piece.source_strides, piece.source).copy_(bits)
            tensors[spec.name] = out.view(spec.torch_dtype).reshape(spec.shape)
        held = "unknown" if self._held.version is None else str(self._held.version)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(tensors, temporary, {"format": "pt", "version": held})
        os.replace(temporary, path)
        return str(path)

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
            staged=staged.artifact.key if staged is not None and staged.manifest is not None else None,
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
