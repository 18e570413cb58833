"""The journal: the ordered, durable store of one run's artifacts, in a directory.

Names are the keys of docs/format.md section 2. Everything is written under a temporary name, made durable and renamed;
an artifact exists if and only if its manifest does. So a reader, or the next writer after a crash at any moment, sees
whole artifacts only. One process at a time writes (an flock on `writer.lock`); a merged delta may be added by any.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blake3 import blake3

from sparrowrl.config import RUN_NAME
from sparrowrl.delta import files, limits, lock
from sparrowrl.delta.chain import ArtifactRef, find_path, roots
from sparrowrl.delta.keys import artifact_key, is_key, layout_key, manifest_key, parse_artifact_name, segment_key
from sparrowrl.delta.layout import Layout, state_id
from sparrowrl.delta.manifest import Manifest, SegmentRef
from sparrowrl.delta.merge import merge
from sparrowrl.delta.retention import Retention, superfluous
from sparrowrl.errors import (
    ConfigError,
    CorruptData,
    FormatError,
    JournalError,
    LimitExceeded,
    VersionConflict,
    VersionNotFound,
)

log = logging.getLogger(__name__)

_TABLES_KEPT = 8


class Journal:
    """One run's artifacts under a root directory. Safe to use from several threads and processes."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        run: str,
        run_key: bytes | None = None,
        *,
        retention: Retention | None = None,
    ) -> None:
        """Nothing is read or made yet. `run_key` (32 bytes) signs and checks manifests; None signs with no key and
        checks nothing. `retention` is applied after each commit. Raises ConfigError on a bad run name.
        """
        if not RUN_NAME.fullmatch(run):
            raise ConfigError(f"run name: expected {RUN_NAME.pattern}, got {run[:100]!r}")
        self.root = Path(root).resolve()
        self.run = run
        self._run_key = run_key
        self._retention = retention
        self._directory = self.root / "runs" / run
        self._writer_process: int | None = None
        self._commit_lock = threading.Lock()
        self._tables: dict[int, tuple[int, ...]] = {}
        self._layouts: dict[bytes, Layout] = {}

    # Reading

    def artifacts(self) -> list[ArtifactRef]:
        """All committed artifacts, by target and name."""
        return [artifact for target in sorted(self._targets()) for artifact in self._committed(target)]

    def targets(self) -> list[int]:
        """The versions that have an artifact or a draft, ascending."""
        return sorted(self._targets())

    def at(self, target: int) -> tuple[list[ArtifactRef], list[ArtifactRef]]:
        """The committed artifacts of one version, and its drafts, each by name."""
        found = self._folder(target)
        committed = [artifact for artifact in found if self._is_whole(artifact)]
        return committed, [artifact for artifact in found if artifact not in committed]

    def drafts(self) -> list[ArtifactRef]:
        """The artifacts that are being written, or were when their writer died."""
        return [a for target in self._targets() for a in self._folder(target) if not self._is_whole(a)]

    def draft_segments(self, target: int, name: str) -> list[SegmentRef]:
        """What a draft has so far, oldest first. Raises VersionNotFound if there is no such folder (any more)."""
        key = artifact_key(self.run, target, name)
        folder = self._inside(key)
        with self._reading(folder):
            segments = [e for e in os.scandir(folder) if e.name.endswith(".seg") and is_key(f"{key}/{e.name}")]
            found = sorted((e.stat().st_mtime_ns, e.name, e.stat().st_size) for e in segments)
        return [SegmentRef(bytes.fromhex(name.removesuffix(".seg")), size) for _, name, size in found]

    def versions(self) -> list[int]:
        """The versions that have an artifact, ascending."""
        return sorted({artifact.target for artifact in self.artifacts()})

    def newest(self) -> int | None:
        """The newest version, None in an empty run."""
        for target in sorted(self._targets(), reverse=True):
            if self._committed(target):
                return target
        return None

    def folder(self, artifact: ArtifactRef) -> Path:
        """Where an artifact or draft is, or would be."""
        return self._inside(artifact_key(self.run, artifact.target, artifact.name))

    def file(self, key: str) -> Path:
        """The path of a key from outside.

        Raises FormatError if it is no key of this run, VersionNotFound if there is no such file, JournalError if it is
        or leads through a symbolic link.
        """
        if not is_key(key) or not key.startswith(f"runs/{self.run}/"):
            raise FormatError(f"expected a key of run {self.run} (docs/format.md section 2), got {key[:200]!a}")
        path = self._inside(key)
        if path.is_symlink():
            raise JournalError(f"{path}: expected a file, got a symbolic link; links inside a journal are not followed")
        if not path.is_file():
            raise VersionNotFound(f"{key}: not in this journal (never written, or no longer kept)")
        return path

    def manifest(self, target: int, name: str) -> Manifest:
        """The manifest of an artifact, checked against its key, and its MAC if this journal has a run key.

        Raises VersionNotFound if it is not there, FormatError if it is damaged.
        """
        path = self._inside(manifest_key(self.run, target, name))
        with self._reading(path):
            data = files.read_file(path, limits.MANIFEST_BYTES)
        try:
            manifest = Manifest.decode(data, self._run_key)
        except FormatError as error:
            raise type(error)(f"{path}: {error}") from error
        if (manifest.run, manifest.target, manifest.name) != (self.run, target, name):
            got = f"run {manifest.run}, version {manifest.target}, {manifest.name}"
            raise CorruptData(f"{path}: expected run {self.run}, version {target}, {name}, got {got}; it was moved")
        return manifest

    def manifest_of(self, version: int) -> Manifest:
        """The manifest of any artifact of this version: all agree on its state. Raises VersionNotFound."""
        for artifact in self._committed(version):
            return self.manifest(artifact.target, artifact.name)
        raise VersionNotFound(f"version {version} is not in run {self.run} of {self.root}; newest: {self.newest()}")

    def layout(self, layout_id: bytes | None = None) -> Layout:
        """The layout of that id, or of the newest version. Raises VersionNotFound, CorruptData."""
        if layout_id is None:
            newest = self.newest()
            if newest is None:
                raise VersionNotFound(f"run {self.run} of {self.root} has no version yet")
            layout_id = self.manifest_of(newest).layout
        if layout_id not in self._layouts:
            path = self._inside(layout_key(self.run, layout_id))
            with self._reading(path):
                data = files.read_file(path, limits.LAYOUT_BYTES)
            if blake3(data).digest() != layout_id:
                raise CorruptData(f"{path}: its content does not match its name; the file is damaged")
            self._layouts[layout_id] = Layout.from_bytes(data)
        return self._layouts[layout_id]

    def segment(self, target: int, name: str, ref: SegmentRef) -> bytes:
        """The bytes of a segment, checked against its hash. Raises VersionNotFound, CorruptData."""
        path = self._inside(segment_key(self.run, target, name, ref.digest))
        with self._reading(path):
            data = files.read_file(path, limits.SEGMENT_BYTES)
        if len(data) != ref.length or blake3(data).digest() != ref.digest:
            raise CorruptData(f"{path}: expected {ref.length} bytes with the hash in its name, got {len(data)} others")
        return data

    def route(self, target: int, starts: set[int] | None = None) -> tuple[int, list[ArtifactRef]]:
        """A version in `starts` (default: every root, the origin or an anchor) and the deltas from there to `target`.

        Raises VersionNotFound if there is no way.
        """
        artifacts = self.artifacts()
        wanted = set(roots(artifacts)) if starts is None else starts
        deltas = find_path(artifacts, target, wanted)
        if deltas is None or not any(artifact.target == target for artifact in artifacts):
            known = sorted({artifact.target for artifact in artifacts})
            span = f"versions {known[0]} to {known[-1]}" if known else "no versions"
            raise VersionNotFound(
                f"no way from version {', '.join(map(str, sorted(wanted)[:5])) or 'nothing'} to {target} in run "
                f"{self.run} ({span}); take an anchor, or a later version"
            )
        return (target if not deltas else deltas[0].base or 0), deltas

    def fingerprints(self, version: int) -> tuple[int, ...]:
        """The fingerprints (u64, in layout order) of all tensors at a version, checked against its state id.

        Raises VersionNotFound if the version cannot be reached from the origin or an anchor.
        """
        table = self._tables.get(version)
        if table is not None and self._committed(version):
            return table
        known = dict(self._tables)
        artifacts = self.artifacts()
        whole = roots(artifacts)
        start, deltas = self.route(version, {*known, *whole} & {artifact.target for artifact in artifacts})
        table = known.get(start)
        if table is None:
            root = self.manifest(start, whole[start].name)
            root.check_layout(self.layout(root.layout))
            table = tuple(tensor.fingerprint for tensor in root.tensors)
        for delta in deltas:
            table = self.table_after(table, self.manifest(delta.target, delta.name))
        self._remember(version, table)
        return table

    def table_after(self, table: tuple[int, ...], delta: Manifest) -> tuple[int, ...]:
        """The fingerprints after a delta from a state with `table`. Raises CorruptData if its states do not fit."""
        layout = self.layout(delta.layout)
        delta.check_layout(layout)
        changed = list(table)
        for tensor in delta.tensors:
            changed[tensor.number] = tensor.fingerprint
        for what, state, fingerprints in (("base", delta.base_state, table), ("target", delta.target_state, changed)):
            if state_id(layout, fingerprints) != state:
                raise CorruptData(f"delta {delta.base} -> {delta.target}: its {what} state is not that of its {what}")
        return tuple(changed)

    # Writing

    @contextmanager
    def write_lock(self, *, keep_drafts: bool = False) -> Iterator[str]:
        """Hold the run's only writer's place and drop what an earlier writer left half done; yields a token.

        `keep_drafts` is for a hub that comes back while its writer goes on: then drafts stay.
        Raises JournalLocked, at once, if another process (or another Journal of this one) holds it.
        """
        with lock.writer_lock(self._directory / "writer.lock") as token:
            self._writer_process = os.getpid()
            try:
                with files.as_journal_error(self._directory, "dropping unfinished artifacts of"):
                    self._drop_leftovers(keep_drafts)
                yield token
            finally:
                self._writer_process = None

    def check_writer(self, token: str) -> None:
        """Raise JournalError unless the present writer of this directory is the one that got `token`."""
        lock.check_writer(self._directory / "writer.lock", token)

    def put_layout(self, data: bytes) -> None:
        """Store a layout durably. Raises FormatError if it is none, JournalError."""
        layout = Layout.from_bytes(data)
        path = self._inside(layout_key(self.run, layout.id))
        with files.as_journal_error(path, "writing"):
            if not path.exists():
                files.make_directories(path.parent)
                files.write_file(path, data)
            files.sync_directory(path.parent)

    def draft(self, target: int, name: str) -> Draft:
        """Begin artifact `name` of version `target`, or go on with it. Raises VersionConflict if it is committed."""
        kind, base, codec = parse_artifact_name(name)
        return Draft(self, ArtifactRef(target, name, kind, base, codec))

    def merged(self, base: int, target: int) -> ArtifactRef:
        """The delta from `base` to `target`, made by merging the steps between if it is not there yet.

        Needs no writer lock. Raises VersionNotFound if there is no chain of deltas, JournalError.
        """
        made = ArtifactRef(target, f"{base}.fast", "delta", base, "fast")
        if self._is_whole(made):
            return made
        manifest, segments = merge(self, base, target)
        folder = self.folder(made)
        with files.as_journal_error(folder, "writing"), self._workshop() as workshop:
            for ref, segment in zip(manifest.segments, segments, strict=True):
                files.write_file(workshop / f"{ref.digest.hex()}.seg", segment)
            files.write_file(workshop / "manifest", manifest.encode(self._run_key))
            files.sync_directory(workshop)
            try:
                os.rename(workshop, folder)
            except OSError:
                if not self._is_whole(made):  # else another process was faster, with the same bytes
                    raise
            files.sync_directory(folder.parent)
        return made

    def remove(self, artifact: ArtifactRef) -> None:
        """Delete an artifact or draft; whoever reads it meanwhile gets VersionNotFound, never a part of it."""
        folder = self.folder(artifact)
        with files.as_journal_error(folder, "deleting"):
            files.remove_tree(folder, self._trash)
            with suppress(OSError):  # another artifact is still there
                folder.parent.rmdir()

    def commit(self, artifact: ArtifactRef, manifest: Manifest) -> None:
        """What Draft.commit does."""
        folder = self.folder(artifact)
        data = manifest.encode(self._run_key)
        with self._commit_lock:
            self._check_writing(folder)
            if (manifest.run, manifest.target, manifest.name) != (self.run, artifact.target, artifact.name):
                raise VersionConflict(f"{folder}: the manifest is that of {manifest.target}/{manifest.name}")
            if self._is_whole(artifact):
                self._check_same(folder / "manifest", data)
                return
            table = self._check_follows(manifest)
            self._check_segments(folder, manifest)
            with files.as_journal_error(folder, "committing"):
                files.make_directories(folder)
                files.sync_directory(folder)
                files.write_file(folder / "manifest", data)
                files.sync_directory(folder)
            self._remember(manifest.target, table)
        self._retain()

    # Inside

    @property
    def _trash(self) -> Path:
        return self._directory / "trash"

    def _inside(self, key: str) -> Path:
        """The path of a key, whose folders below the root must not be links. Raises JournalError."""
        path = self.root / key
        if os.path.realpath(path.parent) != str(path.parent):
            raise JournalError(f"{path}: leads through a symbolic link; links inside a journal are not followed")
        return path

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        with files.as_journal_error(path, "reading"):
            try:
                yield
            except (FileNotFoundError, NotADirectoryError) as error:
                raise VersionNotFound(f"{path}: not in this journal (never written, or no longer kept)") from error

    def _targets(self) -> list[int]:
        folder = self._directory / "v"
        with files.as_journal_error(folder, "reading"):
            try:
                names = os.listdir(folder)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return [int(name) for name in names if is_key(f"runs/{self.run}/v/{name}/origin/manifest")]

    def _folder(self, target: int) -> list[ArtifactRef]:
        """The artifacts and drafts of a version."""
        found = []
        folder = self._directory / "v" / str(target)
        with files.as_journal_error(folder, "reading"), suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(folder):
                with suppress(FormatError):
                    kind, base, codec = parse_artifact_name(entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        found.append(ArtifactRef(target, entry.name, kind, base, codec))
        return sorted(found, key=lambda artifact: artifact.name)

    def _committed(self, target: int) -> list[ArtifactRef]:
        return [artifact for artifact in self._folder(target) if self._is_whole(artifact)]

    def _is_whole(self, artifact: ArtifactRef) -> bool:
        return (self.root / manifest_key(self.run, artifact.target, artifact.name)).is_file()

    def _remember(self, version: int, table: tuple[int, ...]) -> None:
        self._tables[version] = table
        for old in sorted(self._tables)[:-_TABLES_KEPT]:
            self._tables.pop(old, None)

    def _drop_leftovers(self, keep_drafts: bool) -> None:
        for draft in () if keep_drafts else self.drafts():
            log.warning("run %s: dropping the unfinished artifact %d/%s", self.run, draft.target, draft.name)
            self.remove(draft)
        layouts = self._directory / "layout"
        for path in layouts.glob(f"*{files.TEMPORARY}") if layouts.is_dir() else ():
            path.unlink(missing_ok=True)
        shutil.rmtree(self._trash, ignore_errors=True)
        for path in self._directory.glob("merge-*"):
            with lock.locked_folder(path) as free:
                if free:
                    shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _workshop(self) -> Iterator[Path]:
        """A folder beside the artifacts, locked so that no writer takes it for a leftover; gone afterwards."""
        files.make_directories(self._directory / "v")
        folder = self._directory / f"merge-{secrets.token_hex(8)}"
        folder.mkdir()
        with lock.locked_folder(folder):
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _check_writing(self, folder: Path) -> None:
        if self._writer_process != os.getpid():  # a forked child has no lock
            raise JournalError(f"{folder}: expected the writer lock to be held; commit inside `with write_lock()`")

    def _check_same(self, path: Path, data: bytes) -> None:
        with self._reading(path):
            there = files.read_file(path, limits.MANIFEST_BYTES)
        if there != data:
            raise VersionConflict(f"{path}: already committed, with other content; artifacts never change")

    def _check_follows(self, manifest: Manifest) -> tuple[int, ...]:
        """The fingerprints at the manifest's target. Raises VersionConflict if it does not belong there."""
        newest = self.newest()
        layout = self.layout(manifest.layout)
        manifest.check_layout(layout)
        what = f"{manifest.kind} of version {manifest.target}"
        if newest is None:
            if manifest.kind != "origin":
                raise VersionConflict(f"{what}: expected the origin of version 0, as run {self.run} is empty")
        elif manifest.target == newest + 1:
            if manifest.kind == "delta" and manifest.base != newest:
                raise VersionConflict(f"{what}: expected base {newest}, the newest version, got {manifest.base}")
        elif not self._committed(manifest.target):
            raise VersionConflict(f"{what}: expected version {newest + 1}, as the newest is {newest}; read it anew")
        elif self.manifest_of(manifest.target).target_state != manifest.target_state:
            raise VersionConflict(f"{what}: its state is not the one that the version has")
        if newest is not None and manifest.layout != self.manifest_of(newest).layout:
            raise VersionConflict(f"{what}: expected the layout of the run; begin a new run for another model")
        if manifest.base is not None:
            if manifest.base_state != self.manifest_of(manifest.base).target_state:
                raise VersionConflict(f"{what}: its base state is not that of version {manifest.base}; diff anew")
            return self.table_after(self.fingerprints(manifest.base), manifest)
        return tuple(tensor.fingerprint for tensor in manifest.tensors)

    def _check_segments(self, folder: Path, manifest: Manifest) -> None:
        """Raise JournalError unless all segments are there; delete those of an earlier attempt."""
        wanted = {f"{segment.digest.hex()}.seg": segment.length for segment in manifest.segments}
        with files.as_journal_error(folder, "reading"):
            found = {entry.name: entry.stat().st_size for entry in os.scandir(folder)} if folder.is_dir() else {}
            for name in found.keys() - wanted.keys():
                (folder / name).unlink()
        for name, length in wanted.items():
            if found.get(name) != length:
                got = f"{found[name]} bytes" if name in found else "nothing"
                raise JournalError(f"{folder / name}: expected a segment of {length} bytes, got {got}; put it first")

    def _retain(self) -> None:
        if self._retention is None:
            return
        try:
            for artifact in superfluous(self.artifacts(), self._retention):
                self.remove(artifact)
        except JournalError as error:  # the commit stands, and the next one tries again
            log.warning("run %s: could not delete old versions: %s", self.run, error)


class Draft:
    """An artifact that is being written; made by Journal.draft."""

    def __init__(self, journal: Journal, artifact: ArtifactRef) -> None:
        self.artifact = artifact
        self.segments: list[SegmentRef] = []
        self._journal = journal
        self._folder = journal.folder(artifact)

    def put(self, data: bytes) -> SegmentRef:
        """Store a segment durably under its hash; doing it again changes nothing.

        Raises LimitExceeded if it is too long, VersionConflict if the artifact is committed already, JournalError.
        """
        if not 0 < len(data) <= limits.SEGMENT_BYTES:
            raise LimitExceeded(f"segment: expected 1 to {limits.SEGMENT_BYTES} bytes, got {len(data)}")
        ref = SegmentRef.of(data)
        path = self._folder / f"{ref.digest.hex()}.seg"
        with files.as_journal_error(path, "writing"):
            if (self._folder / "manifest").exists():
                raise VersionConflict(f"{self._folder}: already committed; artifacts never change")
            files.make_directories(self._folder)
            if not path.exists():
                files.write_file(path, data)
        if ref not in self.segments:
            self.segments.append(ref)
        return ref

    def flush(self) -> None:
        """Make the names of the segments durable. Raises JournalError."""
        with files.as_journal_error(self._folder, "writing"):
            if self.segments:
                files.sync_directory(self._folder)

    def commit(self, manifest: Manifest) -> None:
        """Make the artifact exist, atomically; doing it again with the same manifest changes nothing.

        Raises VersionConflict unless it is the newest version plus one (from the newest), or another artifact of an
        existing version with that version's state; JournalError if a segment is missing or the disk refuses.
        """
        self._journal.commit(self.artifact, manifest)

    def drop(self) -> None:
        """Delete the draft. Raises VersionConflict if it is committed."""
        if (self._folder / "manifest").exists():
            raise VersionConflict(f"{self._folder}: already committed; artifacts never change")
        self._journal.remove(self.artifact)
        self.segments.clear()
