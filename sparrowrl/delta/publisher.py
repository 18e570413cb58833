"""The trainer's side: what changed since the last version becomes the next one.

    publisher = sparrowrl.Publisher(sink, model.named_parameters())
    ...
    optimizer.step()
    publisher.publish(model.named_parameters())

The snapshot moves if and only if the version is committed. With several ranks each compares, encodes and stores its own
shards, rank 0 commits, and all ranks go on or all raise.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch

from sparrowrl.delta.blocks import Block
from sparrowrl.delta.box import Box, first_overlap
from sparrowrl.delta.keys import artifact_name
from sparrowrl.delta.layout import DTYPE_NAMES, U64_MASK, state_id
from sparrowrl.delta.manifest import Manifest, SegmentRef, TensorChange
from sparrowrl.delta.published import Clock
from sparrowrl.delta.published import Published as Published
from sparrowrl.delta.ranks import Ranks, SingleProcess, together
from sparrowrl.delta.segment import SegmentPacker
from sparrowrl.delta.sink import Sink, SinkDraft
from sparrowrl.delta.snapshot import NamedTensors, Snapshot
from sparrowrl.errors import ConfigError, LayoutError, SparrowError, StateError

log = logging.getLogger(__name__)

ANCHOR = artifact_name("anchor", None, "dense")


class Publisher:
    """Publishes the weights of one run; made, and called, by all ranks of the trainer alike."""

    def __init__(
        self,
        sink: Sink,
        named_tensors: NamedTensors,
        *,
        wire_dtype: torch.dtype | None = torch.bfloat16,
        anchor_every: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        """Take a snapshot of the weights (every rank its shards) and tie it to the run.

        An empty run gets these weights as version 0. If the newest version has exactly these weights the run goes on
        from it; otherwise an anchor with them becomes the next version.

        `wire_dtype` is what floating-point weights are cast to, as the engine's loader does (None: each keeps its
        dtype; 1-byte floats always do). `anchor_every` = n also writes every n-th version whole, for engines that come
        late (0: never). `ranks` is `sparrowrl.TorchRanks()` if several processes publish together.

        Raises LayoutError for tensors that cannot be published, JournalLocked if another trainer writes this run,
        TransportError from a hub.
        """
        if anchor_every < 0:
            raise ConfigError(f"anchor_every: expected 0 or more, got {anchor_every}")
        if wire_dtype is not None and not (wire_dtype in DTYPE_NAMES and wire_dtype.is_floating_point):
            raise ConfigError(f"wire_dtype: expected None or a floating-point dtype of the format, got {wire_dtype}")
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._sink = sink
        self._wire_dtype = wire_dtype
        self._anchor_every = anchor_every
        self._ranks = SingleProcess() if ranks is None else ranks
        self._anchor_due = False
        self._anchored: int | None = None
        # What the snapshot is and the journal has; the state is None while that is not sure.
        self._version: int = -1
        self._state: bytes | None = None
        self._unsettled = True
        self._table: list[int] = []
        self._last = self._start(named_tensors)

    @property
    def version(self) -> int:
        """The newest version that this publisher knows to be committed."""
        return self._version

    @property
    def state(self) -> str:
        """The state id of `version`, in hex; empty while it is not sure, after a publish that failed."""
        return "" if self._state is None else self._state.hex()

    @property
    def anchored(self) -> int | None:
        """The newest version of which this publisher has written an anchor."""
        return self._anchored

    @property
    def last(self) -> Published:
        """What was published last, an anchor beside a delta aside; from the start on."""
        return self._last

    @torch.no_grad()
    def publish(self, named_tensors: NamedTensors) -> Published:
        """Make the weights the next version; they must not change until this returns.

        If it raises, on any rank, the version does not exist and no snapshot has moved: call it again, with these or
        newer weights. (Where a hub could not be asked whether it has committed, the next call finds out, and publishes
        an anchor if need be.) Threads take turns. Raises LayoutError, JournalError, TransportError, and ConfigError in
        a forked process, which has neither the sink's lock nor its threads.
        """
        with self._my_turn():
            self._last = self._publish(named_tensors)
            return self._last

    @torch.no_grad()
    def write_anchor(self) -> Published:
        """Write the newest version whole, beside what it has, for engines that cannot come to it otherwise.

        If it has an anchor already nothing is written, and nothing counted as changed. Raises as `publish` does, and
        StateError if that has failed since and the newest version may not be this publisher's: publish first.
        """
        with self._my_turn():
            if self._unsettled and self._newest() != (self._version, self._state):
                raise StateError(
                    f"run {self._sink.run}: expected version {self._version} to be the newest, but the last publish "
                    "failed and it is not sure; publish again, then write the anchor"
                )
            if together(self._ranks, lambda: None, lambda _: self._sink.has(self._version, ANCHOR)):
                log.info("run %s: version %d has an anchor already", self._sink.run, self._version)
                return Published(self._version, "anchor", 0, self._elements, 0, *astuple(Clock()))
            return self._anchor(self._version)

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        if os.getpid() != self._process:
            raise ConfigError(f"this publisher is that of process {self._process}; a fork of it cannot publish")
        with self._turn:
            yield

    def _publish(self, named_tensors: NamedTensors) -> Published:
        if self._unsettled and self._newest() != (self._version, self._state):
            log.warning("run %s: the newest version is not this publisher's; taking a new snapshot", self._sink.run)
            return self._start(named_tensors)
        self._unsettled = True
        done = self._delta(named_tensors)
        self._unsettled = False
        if self._anchor_every and done.version % self._anchor_every == 0:
            self._anchor_due = True
        if self._anchor_due:
            self._try_anchor()
        return done

    # A new snapshot

    @torch.no_grad()
    def _start(self, named: NamedTensors) -> Published:
        """Take a snapshot and tie it to the newest version, or make it a version."""
        self._unsettled, self._state = True, None
        token = together(self._ranks, lambda: self._take(named), self._lead)
        version, state, kind = together(self._ranks, lambda: self._join(token), self._tie)
        if kind == "anchor":
            done = self._anchor(version)
        else:
            done = Published(version, kind, 0, self._elements, 0, *astuple(Clock()))
        self._version, self._state, self._unsettled = version, state, False
        return done

    def _take(self, named: NamedTensors) -> object:
        try:
            self._snapshot = Snapshot(named, self._wire_dtype, self._ranks.rank)
        except Exception:
            _finish(named)
            raise
        self._elements = sum(spec.numel for spec in self._snapshot.layout.tensors)
        parts = self._snapshot.parts
        boxes = [(part.box.start, part.box.row_length, part.box.stride, part.box.rows) for part in parts]
        rows = [(box, part.first, part.fingerprint) for box, part in zip(boxes, parts, strict=True)]
        return self._snapshot.layout.id, rows

    def _lead(self, reports: list[tuple[bytes, list[tuple[tuple[int, ...], bool, int]]]]) -> str:
        """Rank 0: check that the parts make up the tensors, sum their fingerprints, become the writer."""
        layout = self._snapshot.layout
        for rank, (layout_id, _) in enumerate(reports):
            if layout_id != layout.id:
                raise LayoutError(
                    f"expected the same tensor names, dtypes and shapes on all ranks, rank {rank} differs"
                )
        columns = zip(*(rows for _, rows in reports), strict=True)
        sums = [
            _sum_of_parts(spec.name, spec.numel, parts) for spec, parts in zip(layout.tensors, columns, strict=True)
        ]
        self._table = sums
        token = self._sink.lead()
        self._sink.put_layout(layout.to_bytes())
        return token

    def _join(self, token: str) -> None:
        if self._ranks.rank != 0:
            self._sink.join(token)

    def _tie(self, _: object) -> tuple[int, bytes, str]:
        """Rank 0: the snapshot's version and state, and "origin" or "delta" (it is there) or "anchor" (to write)."""
        run, layout, head = self._sink.run, self._snapshot.layout, self._sink.newest()
        if head is None:
            manifest = self._manifest("origin", 0, self._table, [0] * len(layout), [])
            self._commit(self._sink.open(0, manifest.name), manifest)
            log.info("run %s: version 0 is %d tensors, %d weights", run, len(layout), self._elements)
            return 0, manifest.target_state, "origin"
        if head.layout != layout.id:
            raise LayoutError(
                f"run {run} has tensors of other names, dtypes or shapes than this model; begin a new run"
            )
        state = state_id(layout, self._table)
        if head.state == state:
            log.info("run %s: going on from version %d", run, head.version)
            return head.version, state, "delta"
        log.info("run %s: these weights are not those of version %d; writing an anchor", run, head.version)
        return head.version + 1, state, "anchor"

    # Artifacts

    def _delta(self, named: NamedTensors) -> Published:
        target, name, clock = self._version + 1, artifact_name("delta", self._version, "fast"), Clock()
        rows: list[tuple[int, int, int]] = []

        def blocks() -> Iterator[Block]:
            for change in self._snapshot.changes(named):
                rows.append((change.number, change.changed, (change.after - change.before) & U64_MASK))
                yield change.block

        def work() -> tuple[Any, ...]:
            try:
                return self._put_all(target, name, blocks(), clock), rows
            except Exception:
                _finish(named)
                raise

        def conclude(reports: list[Any]) -> tuple[bytes, int, int]:
            table, changed = list(self._table), [0] * len(self._table)
            for number, count, step in (row for _, rows_of_rank in reports for row in rows_of_rank):
                table[number] = (table[number] + step) & U64_MASK
                changed[number] += count
            return self._conclude("delta", target, table, changed, reports, clock)

        try:
            state, changed, payload = self._write(target, name, work, conclude)
        except BaseException:
            self._snapshot.stay()
            raise
        self._state = None  # until the snapshot has moved
        self._snapshot.move()
        self._version, self._state = target, state
        done = Published(target, "delta", changed, self._elements, payload, *astuple(clock))
        self._report(done)
        return done

    def _anchor(self, target: int) -> Published:
        """Write the snapshot whole, as version `target`."""
        clock = Clock()
        changed = [spec.numel for spec in self._snapshot.layout.tensors]
        _, total, payload = self._write(
            target,
            ANCHOR,
            lambda: (self._put_all(target, ANCHOR, self._snapshot.whole(), clock),),
            lambda reports: self._conclude("anchor", target, self._table, changed, reports, clock),
        )
        self._anchored, self._anchor_due = target, False
        done = Published(target, "anchor", total, self._elements, payload, *astuple(clock))
        self._report(done)
        return done

    def _try_anchor(self) -> None:
        """Write an anchor beside the delta. If that fails the version stands; the next publish tries again."""
        try:
            self._anchor(self._version)
        except (SparrowError, OSError, RuntimeError) as error:
            log.warning("run %s: version %d is published, but not its anchor: %s", self._sink.run, self._version, error)

    def _write(
        self, target: int, name: str, work: Callable[[], Any], conclude: Callable[[list[Any]], Any]
    ) -> tuple[bytes, int, int]:
        """`together`; a draft that came to nothing is dropped, by each rank before it raises."""
        try:
            state, changed, payload = together(self._ranks, work, conclude)
        except BaseException:
            try:
                self._sink.open(target, name).drop()
            except (SparrowError, OSError) as error:
                log.warning("run %s: could not drop the draft %d/%s: %s", self._sink.run, target, name, error)
            raise
        return state, changed, payload

    def _put_all(self, target: int, name: str, blocks: Iterator[Block], clock: Clock) -> list[tuple[bytes, int]]:
        """Store this rank's segments, each as soon as it is full."""
        draft, packer = self._sink.open(target, name), SegmentPacker(self._snapshot.layout)
        stored: list[tuple[bytes, int]] = []
        more = True
        while more:
            with clock.on("diff_ms"):
                block = next(blocks, None)
            with clock.on("encode_ms"):
                segments = packer.flush() if block is None else packer.add(block)
            with clock.on("put_ms"):
                refs = [draft.put(segment) for segment in segments]
            stored += [(ref.digest, ref.length) for ref in refs]
            more = block is not None
        with clock.on("put_ms"):
            draft.flush()
        return stored

    def _conclude(
        self, kind: str, target: int, table: list[int], changed: list[int], reports: list[Any], clock: Clock
    ) -> tuple[bytes, int, int]:
        """Rank 0: commit an artifact whose segments all ranks have stored."""
        segments = [SegmentRef(*ref) for refs, *_ in reports for ref in refs]
        manifest = self._manifest(kind, target, table, changed, segments)
        with clock.on("commit_ms"):
            self._commit(self._sink.open(target, manifest.name), manifest)
        self._table = table
        return manifest.target_state, manifest.changed, manifest.payload_bytes + len(manifest.encode(None))

    def _manifest(
        self, kind: str, target: int, table: list[int], changed: list[int], segments: list[SegmentRef]
    ) -> Manifest:
        layout, delta = self._snapshot.layout, kind == "delta"
        rows = [TensorChange(number, *row) for number, row in enumerate(zip(changed, table, strict=True))]
        return Manifest(
            run=self._sink.run,
            kind=kind,
            codec={"origin": None, "delta": "fast", "anchor": "dense"}[kind],
            base=self._version if delta else None,
            target=target,
            base_state=self._state if delta else None,
            target_state=state_id(layout, table),
            layout=layout.id,
            created_ms=time.time_ns() // 1_000_000,
            changed=sum(changed),
            tensors=tuple(row for row in rows if row.changed or not delta),
            segments=tuple(segments),
        )

    def _commit(self, draft: SinkDraft, manifest: Manifest) -> None:
        """Commit, also where only the answer was lost."""
        try:
            draft.commit(manifest)
        except (SparrowError, OSError) as error:
            if manifest.target <= self._version or self._head() != (manifest.target, manifest.target_state):
                raise
            log.warning("run %s: version %d is there in spite of: %s", self._sink.run, manifest.target, error)

    def _head(self) -> tuple[int, bytes] | None:
        """Version and state of the newest version; None if there is none or it cannot be found out."""
        try:
            head = self._sink.newest()
        except (SparrowError, OSError) as error:
            log.warning("run %s: cannot read the newest version: %s", self._sink.run, error)
            return None
        return None if head is None else (head.version, head.state)

    def _newest(self) -> tuple[int, bytes] | None:
        """`_head` of rank 0, on all ranks."""
        head = together(self._ranks, lambda: None, lambda _: self._head())
        return None if head is None else (head[0], head[1])

    def _report(self, done: Published) -> None:
        if self._ranks.rank == 0:
            done.log(self._sink.run, log)


def _finish(named: NamedTensors) -> None:
    """Go on to the end of an iterator after a failure: if ranks gather tensors in it, the others wait for this one."""
    if isinstance(named, Iterator):
        for _ in named:
            pass


def _sum_of_parts(name: str, numel: int, parts: Sequence[tuple[Sequence[int], bool, int]]) -> int:
    """The fingerprint of a tensor from (box, published by that rank, fingerprint) of each rank.

    Raises LayoutError unless the published parts make up the tensor and copies of a part are equal.
    """
    boxes = [Box(*box) for box, first, _ in parts if first]
    published = {tuple(box): fingerprint for box, first, fingerprint in parts if first}
    if sum(box.elements for box in boxes) != numel or first_overlap(boxes):
        raise LayoutError(
            f"{name}: expected shards that make up its {numel} elements, got {boxes}; publish with all ranks"
        )
    for rank, (box, first, fingerprint) in enumerate(parts):
        if not first and Box(*box).elements and published.get(tuple(box)) != fingerprint:
            raise LayoutError(
                f"{name}: rank {rank} holds other bits than the rank that publishes {Box(*box)}; "
                "pass DTensors if these are shards"
            )
    return sum(published.values()) & U64_MASK
