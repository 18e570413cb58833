"""The run: a trainer in this process, a hub and a vLLM server in others, one version per step, and proof at the end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sparrowrl.delta.publisher import Published
from sparrowrl.errors import ConfigError, SparrowError, TransportError
from sparrowrl.examples.gsm8k_grpo import engine, page, proof, report
from sparrowrl.examples.gsm8k_grpo.console import Console, header, introduction, table_line, verdict
from sparrowrl.examples.gsm8k_grpo.grpo import Prompted, Sample, StepStats
from sparrowrl.examples.gsm8k_grpo.launch import Parts, launch
from sparrowrl.examples.gsm8k_grpo.processes import Children
from sparrowrl.examples.gsm8k_grpo.report import Origin, Report, Requests, VersionRow
from sparrowrl.examples.gsm8k_grpo.rollouts import Group
from sparrowrl.examples.gsm8k_grpo.settings import Settings
from sparrowrl.transport.node import Answer, EngineStatus, remove_stale

_ORIGIN_S = 120.0
_ACTIVATION_S = 180.0


def main(settings: Settings) -> bool:
    """Run it; whether all versions were proved exact. Raises SparrowError, or KeyboardInterrupt when told to stop."""
    return asyncio.run(_interruptible(settings))


async def _interruptible(settings: Settings) -> bool:
    """Ctrl-C and the usual signals to end cancel the run, which then stops its children."""
    task = asyncio.create_task(_run(settings, Console()))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _run(settings: Settings, console: Console) -> bool:
    began = time.monotonic()
    result = Report(report.SCHEMA, datetime.now().astimezone().isoformat(timespec="seconds"), {}, {}, {})
    children = Children()
    try:
        parts = await launch(settings, children, result, console)
        demo = Demo(settings, console, parts, result, began)
        try:
            await demo.follow(children)
        except SparrowError as error:
            result.problems.append(str(error))
            raise
        finally:
            parts.trainer.stop.set()
            demo.write()
    except TransportError:
        for line in children.last_words():
            console.say(line)
        raise
    finally:
        console.progress("stopping hub and engine")
        await children.stop()
        remove_stale()  # vLLM kills its engine core, which then cannot remove its node directory
    for line in verdict(result):
        console.say(line)
    return result.ok


class Demo:
    """The loop of one run, whose `result` grows with it."""

    def __init__(self, settings: Settings, console: Console, parts: Parts, result: Report, began: float) -> None:
        """`began` is the run's start by time.monotonic."""
        self._settings = settings
        self._console = console
        self._parts = parts
        self._result = result
        self._began = began
        self._printed = 0

    async def follow(self, children: Children) -> None:
        """Train and publish while sampling goes on; then the proof. Raises the first SparrowError of any part."""
        parts = self._parts
        try:
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(children.watch()), group.create_task(parts.watched.watch(self._seen))]
                await self._check_origin()
                sampling = group.create_task(parts.rollouts.run())
                await self._train()
                parts.rollouts.close()
                await self._progress(sampling, "letting the last requests finish")
                await self._prove()
                for task in watching:
                    task.cancel()
        except BaseExceptionGroup as failure:
            children.check()  # a process that is gone is the cause of whatever else failed
            raise engine.first_cause(failure) from failure
        finally:
            await parts.watched.close()

    async def _check_origin(self) -> None:
        status = await self._parts.watched.until(
            lambda status: status.audit_ok is not None or status.error is not None, _ORIGIN_S, "audit of version 0"
        )
        if status.version != 0 or not status.audit_ok:
            raise ConfigError(f"the engine did not load what the trainer starts from: {engine.brief(status)}")
        self._result.origin = Origin(status.version, status.audit_ok)
        for line in introduction(self._result, self._parts.engine_url):
            self._console.say(line)
        self._console.say(header())

    async def _train(self) -> None:
        """All steps. The trainer waits for fresh samples, never for the engine to take a version."""
        parts, steps = self._parts, self._settings.steps
        for number in range(1, steps + 1):
            began = self._now()
            groups = await self._progress(
                parts.rollouts.take(self._settings.prompts, oldest=number - 2), f"step {number}: sampling"
            )
            waited = self._now() - began
            await self._step(number, groups, waited)
        await self._progress(
            parts.watched.until(
                lambda status: status.version == steps, _ACTIVATION_S, f"activation of version {steps}"
            ),
            f"waiting for version {steps} to become active",
        )

    async def _step(self, number: int, groups: Sequence[Group], waited: float) -> None:
        """Train on the groups and publish the result as version `number`."""
        trainer, publisher = self._parts.trainer, self._parts.publisher
        times = [self._now()]
        batch = [_prompted(group) for group in groups]
        stats = await self._progress(asyncio.to_thread(trainer.step, batch), f"step {number}: training")
        times.append(self._now())
        done = await asyncio.to_thread(publisher.publish, trainer.weights().items())
        times.append(self._now())
        self._result.versions.append(_row(groups, stats, done, self._settings.wire_dtype.itemsize, waited, times))
        self._seen(self._parts.watched.status)

    def _seen(self, status: EngineStatus) -> None:
        """Take in what an engine's status says of versions, and print those that are complete, in order."""
        rows, now = self._result.versions, self._now()
        for activation in status.activations:
            row = next((row for row in rows if row.version == activation.version and row.active is None), None)
            if row is None:
                continue
            begin, end = self._began + row.published_began, self._began + now
            row.activated(activation, now)
            row.longest_gap_ms = report.longest_gap_ms(self._parts.rollouts.pieces, begin, end)
            for skipped in rows:
                if (activation.base or 0) < skipped.version < activation.version and not skipped.settled:
                    skipped.merged_into = activation.version
        while self._printed < len(rows) and rows[self._printed].settled:
            self._console.say(table_line(rows[self._printed]))
            self._printed += 1

    async def _prove(self) -> None:
        """Audit and export, asked for through the hub; the export compared with the trainer's own weights."""
        result, trainer = self._result, self._parts.trainer
        self._console.say("")
        audit, export = await self._progress(self._ask(), "audit and export of the live weights")
        result.audit_ok, result.audit_detail = audit.ok, audit.detail
        if not export.ok:
            result.problems.append(f"export: {export.detail}")
            return
        path = engine.exported_file(self._settings.out)
        result.export = await asyncio.to_thread(
            proof.compare_export, path, trainer.weights(), self._settings.wire_dtype
        )

    async def _ask(self) -> tuple[Answer, Answer]:
        return await self._parts.watched.ask("audit"), await self._parts.watched.ask("export")

    async def _progress(self, work: Any, text: str) -> Any:
        """Await `work`, saying all the while that `text` goes on."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=0.5))[0]:
                self._console.progress(text)
            return task.result()
        finally:
            task.cancel()

    def _now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._began

    def write(self) -> None:
        """report.json and report.html, as far as the run came."""
        result, rollouts, out = self._result, self._parts.rollouts, self._settings.out
        counts = rollouts.finished
        result.seconds = self._now()
        result.usual_gap_ms = report.usual_gap_ms(rollouts.pieces)
        result.tokens_per_second = report.per_second(rollouts.pieces, self._began, result.seconds)
        result.requests = Requests(
            stop=counts["stop"],
            length=counts["length"],
            aborted=counts["abort"],
            failed=counts["failed"] + counts["error"],
            crossed=rollouts.crossed,
            stale_groups=rollouts.stale,
        )
        result.judge()
        (out / "report.json").write_text(report.to_json(result))
        (out / "report.html").write_text(page.render(result))


def _prompted(group: Group) -> Prompted:
    samples = (Sample(done.tokens, done.logprobs, done.score.reward) for done in group.completions)
    return Prompted(group.prompt.tokens, tuple(samples))


def _row(
    groups: Sequence[Group], stats: StepStats, done: Published, width: int, waited: float, times: Sequence[float]
) -> VersionRow:
    """The trainer's part of a version; `times` are when training and publishing began and when publishing ended."""
    scores = [completion.score for group in groups for completion in group.completions]
    return VersionRow(
        version=done.version,
        reward=sum(score.reward for score in scores) / len(scores),
        exact=sum(score.exact for score in scores) / len(scores),
        marked=sum(score.marked for score in scores) / len(scores),
        loss=stats.loss,
        gradient_norm=stats.gradient_norm,
        clipped=stats.clipped,
        kl=stats.kl,
        train_tokens=stats.tokens,
        oldest_sampled=min(group.oldest for group in groups),
        waited_s=waited,
        train_s=times[1] - times[0],
        elements=done.elements,
        changed=done.changed,
        payload_bytes=done.payload_bytes,
        full_bytes=done.elements * width,
        bits_per_changed=done.bits_per_changed,
        diff_ms=done.diff_ms,
        encode_ms=done.encode_ms,
        put_ms=done.put_ms,
        commit_ms=done.commit_ms,
        train_began=times[0],
        published_began=times[1],
        published=times[2],
    )
