"""The follower: in vLLM's engine core, has the workers activate what they have staged, between two engine steps."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparrowrl.config import EngineConfig
from sparrowrl.delta.manifest import Manifest
from sparrowrl.errors import CorruptData, DeadlineExceeded, FingerprintMismatch, SparrowError, StateError, UnknownState
from sparrowrl.transport.node import Activation, Answer, EngineStatus, ErrorInfo, NodeDirectory, Request
from sparrowrl.vllm_worker_ext.agent_process import AgentProcess
from sparrowrl.vllm_worker_ext.arrival import Arrival
from sparrowrl.vllm_worker_ext.hooks import JOB
from sparrowrl.vllm_worker_ext.prefixes import Prefixes
from sparrowrl.vllm_worker_ext.receiver import Reply
from sparrowrl.vllm_worker_ext.versions import facts
from sparrowrl.vllm_worker_ext.worker_extension import call_receiver

_POLL_S = 0.005
_CALL_S = 600.0  # for one call of the workers: an audit or a restore of a large model may take minutes
_JOIN_S = 10.0
_KEPT = 64
_GONE = (
    "the node directory %s was removed: this engine stays at version %s until it is started again "
    "(does systemd-logind clear /dev/shm when its user logs out? See RemoveIPC in logind.conf)"
)

# A child of vLLM's logger, whose lines therefore show among the engine's own.
logger = logging.getLogger("vllm.sparrowrl")


@dataclass(frozen=True, slots=True)
class Transfer:
    """What is being fetched and staged, and how many tokens had been generated when it began."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Ready:
    """An artifact that all ranks have staged, and how long it took to fetch and to stage it, in milliseconds."""

    key: str
    manifest: Manifest
    fetch_ms: float
    stage_ms: float


class Follower:
    """Keeps one engine at its trainer's newest version.

    Two threads touch it: the core's own, which runs every job (activation, audit, export), and the watcher, which reads
    the node directory and submits jobs. Nothing is submitted while a job is waiting or running.
    """

    def __init__(self, core: Any, config: EngineConfig, node: NodeDirectory, prefixes: Prefixes) -> None:
        self.prefixes = prefixes
        self.status = EngineStatus(condition="unknown")
        self.least = 0  # the engine makes no step at an older version than this
        self.tokens = 0
        self._core, self._config, self._node = core, config, node
        self._has_loop = hasattr(core, "input_queue")  # EngineCoreProc; else the caller of an LLM makes the steps
        self._world = core.vllm_config.parallel_config.world_size
        self._calls = itertools.count(1)
        self._jobs: deque[Callable[[], None]] = deque()
        self._busy = threading.Event()
        self._transfer: Transfer | None = None
        self._answered: int | None = None  # id of the request that was answered last
        self._rank_error: ErrorInfo | None = None
        self._draining: Ready | None = None
        self._drain_until = 0.0
        self._paused: Any = None  # the scheduler's pause state before the drain
        self._written = (self.status, False)
        self._postponed: deque[Callable[[], None]] = deque()  # jobs that came while the weights slept
        self._stop = threading.Event()
        self._agent = AgentProcess(node.root, config)
        self.arrival = Arrival(node, self._agent, config, self._stop)
        self._watcher = threading.Thread(target=self._watch, name="sparrowrl-follower", daemon=True)

    def attach(self) -> None:
        """Have the ranks learn where the run's tensors are, and compare what they hold with version 0.

        Other weights are no failure: the engine is then "unknown", until an anchor. Raises what a rank says went wrong.
        """
        replies = self._call("attach", str(self._node.root), str(self._config.token_file))
        self._note(replies)
        self._raise_failure(replies)
        if self.status.condition != "exact":
            self._rank_error = self._first_rank_error()
            self.status = replace(self.status, error=self._rank_error)
            return
        self.status = replace(self.status, fingerprint_ok=True, audited=self.status.version, audit_ok=True)
        if (scheduler := getattr(self._core, "scheduler", None)) is not None:
            # What the prefix cache holds was computed under another follower, if at all.
            self.prefixes.change(bytes.fromhex(self.status.state or ""), scheduler)

    def catch_up(self, deadline: float, newest: int) -> None:
        """Activate what there is until the newest version is active, while the engine starts.

        Raises DeadlineExceeded if there is no way to it.
        """
        while self.status.condition != "exact" or (self.status.version or 0) < newest:
            what = f"version {newest} to be staged (now: {self.status.version}, {self.status.condition})"
            self._activate_now(self.arrival.wait(deadline, what, self._ready))
            newest = max(newest, self.arrival.newest() or 0)

    def watch(self) -> None:
        """Follow, from now on."""
        if self.status.condition == "exact":
            self._tell_version()
        self._write()
        self._watcher.start()

    def leave(self) -> None:
        """Stop following, on the core's thread, so that the engine can follow another run."""
        if self._draining is not None:
            self._draining = None
            self._end_pause()
        if self._has_loop:
            self._finish_batches()
        self.close()

    def close(self) -> None:
        """Stop following and remove the node directory. The engine keeps the weights that it has."""
        self._stop.set()
        self._node.remove()  # first, for vLLM may kill this process at any moment now
        self._agent.close()
        if self._watcher.is_alive():
            self._watcher.join(_JOIN_S)
        self._node.remove()  # what the others were still writing

    # Called by the engine core (hooks.py), on its own thread.

    def before_step(self) -> bool:
        """Run what is due between two steps; returns whether the engine may make a step now."""
        while self._jobs and not self._core.batch_queue and not self.asleep:
            self._jobs.popleft()()
        if self._draining is not None:
            self._end_drain()
        held = not self._may_step() and not self._core.batch_queue
        if held and not self._has_loop and self._core.scheduler.has_requests():
            self._wait_to_step()
        return self._may_step()

    def scheduling(self) -> AbstractContextManager[None]:
        """The context of a step: no batch is begun while a job waits for those in flight, or the engine is held."""
        return self._nothing_scheduled() if self._jobs or not self._may_step() else nullcontext()

    def woken(self) -> None:
        """The weights' memory is back: find out whether they are known, prove that they are what they were, go on."""
        self._note(self._call("status"))
        if self.status.condition == "exact":
            self._audit()
        while self._postponed:
            self._postponed.popleft()()

    def after_step(self, outputs: Any) -> None:
        """Count what the step has generated."""
        for some in (outputs or {}).values():
            self.tokens += sum(len(output.new_token_ids) for output in some.outputs)

    # The watcher's thread.

    def _watch(self) -> None:
        told, late = "", None
        while not self._stop.wait(_POLL_S):
            self._agent.poll()
            problem = ""
            try:
                self._write()
                if not self._busy.is_set():
                    self._look()
                elif self._draining not in (None, late) and time.monotonic() > self._drain_until:
                    late = self._draining  # the engine may be making no steps, paused by its owner
                    self._submit(self._end_late_drain)
            except (SparrowError, OSError) as error:
                problem = f"node directory {self._node.root}: {error}"
                if isinstance(error, CorruptData):
                    self._agent.renew()
            if problem not in ("", told) and not self._stop.is_set():
                logger.error(problem)
            told = problem
            if not self._stop.is_set() and not self._node.root.exists():
                logger.error(_GONE, self._node.root, self.status.version)
                return

    def _look(self) -> None:
        """Submit what the node directory says is to be done."""
        if self.asleep:
            return
        ready, request, error = self._ready(), self._node.request.read(), self._first_rank_error()
        if error is not None and error.error == CorruptData.__name__:
            self._agent.renew()
        if ready is not None:
            self._submit(partial(self._activate, ready))
        elif request is not None and request.id != self._answered:
            self._answered = request.id
            self._submit(partial(self._answer, request))
        elif error != self._rank_error:
            self._rank_error = error
            self._submit(partial(self._report, error))

    def _ready(self) -> Ready | None:
        """What all ranks have staged, if there is such a thing; notes when something new is on its way."""
        wanted, ranks = self._node.next.read(), self._node.ranks().values()
        if wanted is None:
            self._transfer = None
            return None
        if self._transfer is None or self._transfer.key != wanted.key:
            self._transfer = Transfer(wanted.key, self.tokens)
        if len(ranks) < self._world or any(rank.staged != wanted.key for rank in ranks):
            return None
        try:
            data = (self._node.key_path(wanted.key) / "manifest").read_bytes()
        except FileNotFoundError:  # given up meanwhile
            return None
        stage_ms = max(rank.stage_ms for rank in ranks)
        return Ready(wanted.key, Manifest.decode(data, None), wanted.fetch_ms, stage_ms)

    def _first_rank_error(self) -> ErrorInfo | None:
        return next((rank.error for rank in self._node.ranks().values() if rank.error is not None), None)

    def _submit(self, job: Callable[[], None]) -> None:
        """Have the core's thread run `job` between two steps."""
        self._busy.set()
        if self._has_loop:
            self._core.input_queue.put_nowait((JOB, partial(self._run, job)))
        else:
            self._jobs.append(job)

    # Jobs, on the core's thread.

    def _run(self, job: Callable[[], None]) -> None:
        if self._stop.is_set():  # the engine may be another follower's by now
            return
        if self.asleep:
            self._postponed.append(job)
        else:
            job()

    @property
    def asleep(self) -> bool:
        """Whether vLLM has the weights' memory."""
        return "weights" in getattr(self._core.model_executor, "sleeping_tags", ())

    def _may_step(self) -> bool:
        return self.status.condition == "exact" and (self.status.version or 0) >= self.least

    def _activate(self, ready: Ready) -> None:
        if self._config.in_flight == "drain" and self._may_step() and not self._drained():
            from vllm.v1.core.sched.interface import PauseState

            self._drain_until = time.monotonic() + self._config.drain_timeout
            self._draining, self._paused = ready, self._core.scheduler.pause_state
            self._core.scheduler.set_pause_state(max(self._paused, PauseState.PAUSED_NEW))
            self._core._idle_state_callbacks.append(lambda core: self._end_drain())
            return
        self._activate_now(ready)
        self._busy.clear()

    def _drained(self) -> bool:
        return not self._core.scheduler.running and not self._core.batch_queue

    def _end_late_drain(self) -> None:
        if self._draining is None:  # it has just ended by itself
            self._busy.clear()
        else:
            self._end_drain()

    def _end_drain(self) -> None:
        if self._draining is None or self.asleep:
            return
        if not self._drained():
            if time.monotonic() < self._drain_until:
                return
            waited, running = self._config.drain_timeout, len(self._core.scheduler.running)
            logger.warning("%d requests are running still after %d s of drain: they go on across", running, waited)
        ready, self._draining = self._draining, None
        self._end_pause()
        self._activate_now(ready)
        # An idle core is about to wait for input, and would not notice that requests can be scheduled again.
        self._submit(self._busy.clear)

    def _end_pause(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        if self._core.scheduler.pause_state == PauseState.PAUSED_NEW:  # else its owner has paused or resumed it since
            self._core.scheduler.set_pause_state(self._paused)

    def _activate_now(self, ready: Ready) -> None:
        """One activation: the engine makes no step while this runs."""
        began = time.perf_counter()
        scheduler = getattr(self._core, "scheduler", None)  # there is none yet while the engine starts
        if scheduler is not None:
            self._finish_batches()
        before = set(scheduler.requests) if scheduler is not None else set()
        in_flight = len(scheduler.running) if scheduler is not None else 0
        old = self.status.state
        replies = self._call("activate", ready.key)
        self._note(replies)
        ok = all(reply["ok"] for reply in replies)
        if ok and scheduler is not None:
            if self.status.state != old:
                self.prefixes.change(ready.manifest.target_state, scheduler)
            self._tell_version()
        pause_ms = 1000 * (time.perf_counter() - began)
        if ok:
            aborted = len(before - set(scheduler.requests)) if scheduler is not None else 0
            self._record(ready, pause_ms, in_flight, aborted)
            if self._config.audit_every and ready.manifest.target % self._config.audit_every == 0:
                self._audit()
            return
        logger.error("activation of %s failed: %s", ready.key, self.status.error)
        if self.status.condition == "unknown" or any(_names(reply, FingerprintMismatch) for reply in replies):
            self.status = replace(self.status, fingerprint_ok=False)

    def _record(self, ready: Ready, pause_ms: float, in_flight: int, aborted: int) -> None:
        manifest, transfer = ready.manifest, self._transfer
        activation = Activation(
            version=manifest.target,
            base=manifest.base,
            kind=manifest.kind,  # type: ignore[arg-type]
            changed=manifest.changed,
            payload_bytes=manifest.payload_bytes,
            fetch_ms=ready.fetch_ms,
            stage_ms=ready.stage_ms,
            pause_ms=pause_ms,
            requests_in_flight=in_flight,
            aborted=aborted,
            tokens_during_transfer=self.tokens - transfer.tokens if transfer and transfer.key == ready.key else 0,
            fingerprint_ok=True,
        )
        kept = (*self.status.activations, activation)[-_KEPT:]
        self.status = replace(self.status, fingerprint_ok=True, activations=kept)
        if manifest.kind == "anchor":  # a restore ends with an audit
            self.status = replace(self.status, audited=manifest.target, audit_ok=True)
        logger.info("version %d: %d weights changed, pause %.1f ms", manifest.target, manifest.changed, pause_ms)

    def _finish_batches(self) -> None:
        """Take the results of batches that were computed with the old weights, so that they are stamped as such."""
        if self._core.batch_queue:
            with self._nothing_scheduled():
                while self._core.batch_queue:
                    self._core._process_engine_step()

    @contextmanager
    def _nothing_scheduled(self) -> Iterator[None]:
        from vllm.v1.core.sched.interface import PauseState

        scheduler = self._core.scheduler
        paused = scheduler.pause_state
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            yield
        finally:
            scheduler.set_pause_state(paused)

    def _report(self, error: ErrorInfo | None) -> None:
        """Tell the trainer's side why the ranks do not stage what there is (or that they do again)."""
        self.status = replace(self.status, error=error)
        if error is not None:
            logger.error("cannot stage: %s: %s", error.error, error.message)
            if error.error == FingerprintMismatch.__name__:  # the artifact is wrong, or what it builds on is no more
                self._audit()
        self._busy.clear()

    def _answer(self, request: Request) -> None:
        try:
            answer = self._audit() if request.kind == "audit" else self._export()
        except SparrowError as error:
            answer = (False, str(error))
        said = Answer(request.id, request.kind, *answer)
        self.status = replace(self.status, answers=(*self.status.answers, said)[-_KEPT:])
        self._busy.clear()

    def _audit(self) -> tuple[bool, str]:
        replies = self._call("audit")
        self._note(replies)
        ok = all(reply["ok"] for reply in replies)
        self.status = replace(self.status, audited=self.status.version, audit_ok=ok)
        return ok, "; ".join(_outcome(reply) for reply in replies)

    def _export(self) -> tuple[bool, str]:
        folder = self._config.export_dir
        if folder is None:
            return False, "ConfigError: exports are off: start the engine with SPARROWRL_EXPORT_DIR"
        replies = self._call("export", str(folder / f"{self._config.engine_id}-v{self.status.version}.safetensors"))
        return all(reply["ok"] for reply in replies), "; ".join(_outcome(reply) for reply in replies)

    def _wait_to_step(self) -> None:
        """An engine without a loop of its own waits here until it may step, since its caller would only spin."""
        deadline = time.monotonic() + self._config.start_timeout
        while not self._may_step():
            if time.monotonic() > deadline:
                waited = f"within {self._config.start_timeout} s"
                if self.status.condition == "unknown":
                    raise UnknownState(f"no anchor came {waited}; publish one: {self.status.error}")
                raise DeadlineExceeded(f"version {self.least} did not come {waited}: {self.status.error}")
            self._stop.wait(_POLL_S)
            while self._jobs:
                self._jobs.popleft()()

    # Between the follower and the workers.

    def _call(self, method: str, *args: str) -> list[Reply]:
        """Have every worker run a method of its receiver. Raises StateError if an answer is not to this call."""
        call_id = next(self._calls)
        replies: list[Reply] = self._core.model_executor.collective_rpc(
            call_receiver, timeout=_CALL_S, args=(method, call_id, *args)
        )
        for reply in replies:
            if reply["call_id"] != call_id:
                raise StateError(f"{method}: expected an answer to call {call_id}, got one to {reply['call_id']}")
        return replies

    def _note(self, replies: list[Reply]) -> None:
        """Take over what the ranks hold; the engine is at the lowest version, and exact if all agree."""
        lowest = min(replies, key=lambda reply: -1 if reply["version"] is None else reply["version"])
        agree = len({reply["state"] for reply in replies}) == 1 and all(r["condition"] == "exact" for r in replies)
        errors = [reply["error"] for reply in replies if reply["error"] is not None]
        self.status = replace(
            self.status,
            version=lowest["version"],
            state=lowest["state"],
            condition="exact" if agree else "unknown",
            error=ErrorInfo(**errors[0]) if errors else None,
        )
        if not agree:
            logger.error("what this engine holds is unknown, so it serves nothing until an anchor restores it")

    def _tell_version(self) -> None:
        """Have vLLM's own clients see the version, where vLLM has a place for it."""
        if facts().keeps_version:
            self._core.set_weight_version(str(self.status.version))

    def _raise_failure(self, replies: list[Reply]) -> None:
        from sparrowrl import errors

        for reply in replies:
            if (error := reply["error"]) is not None:
                raise getattr(errors, error["error"], StateError)(f"rank {reply['rank']}: {error['message']}")

    def _write(self) -> None:
        """Write engine.json if what it says has changed. On the watcher's thread, so that no pause pays for it."""
        status, asleep = self.status, self.asleep
        if status is not self._written[0] or asleep != self._written[1]:
            self._node.engine.write(replace(status, asleep=asleep))
            self._written = (status, asleep)


def _names(reply: Reply, error: type[SparrowError]) -> bool:
    return reply["error"] is not None and reply["error"]["error"] == error.__name__


def _outcome(reply: Reply) -> str:
    error = reply["error"]
    said = reply["detail"] if error is None else f"{error['error']}: {error['message']}"
    return f"rank {reply['rank']}: {said}"
