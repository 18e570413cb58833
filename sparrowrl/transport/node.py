"""The node directory: where an engine's agent, workers and follower meet (docs/protocol.md section 4).

Every file is written under a temporary name and renamed, so a reader sees the old or the new content and never a part.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from sparrowrl.config import RUN_NAME
from sparrowrl.errors import ConfigError, CorruptData
from sparrowrl.transport.records import from_json, parse_json, to_json

PARENT = Path("/dev/shm")
_NAME = re.compile(rf"sparrowrl-{RUN_NAME.pattern}-[0-9]+")
_OWNER = "owner.lock"
# File times advance in steps of the kernel's tick; a file younger than this may change again without a trace.
_RACY_NS = 50_000_000

T = TypeVar("T")
Kind = Literal["origin", "delta", "anchor"]
Condition = Literal["exact", "unknown"]


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as JSON: `error` is the name of a class of sparrowrl.errors."""

    error: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Name and message of an exception."""
        return cls(type(error).__name__, str(error))


@dataclass(frozen=True, slots=True)
class NextArtifact:
    """What the workers should stage: the key of its directory, and the hex names of the segments that are there.

    `fetch_ms`, once it is committed, is how long fetching took.
    """

    key: str
    kind: Kind
    base: int | None
    target: int
    segments: tuple[str, ...] = ()
    committed: bool = False
    fetch_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """Something the trainer's side asked of this engine."""

    id: int
    kind: Literal["audit", "export"]


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """What the agent says of itself; `fetch_ms` is about the last artifact, `fetched_bytes` about all so far."""

    pid: int
    hub: str
    connected: bool = False
    newest: int | None = None
    fetch_ms: float = 0.0
    fetched_bytes: int = 0
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What one worker holds (`version`, `state` in hex), the key of the artifact it has staged, and its bytes there."""

    rank: int
    pid: int
    version: int | None = None
    state: str | None = None
    condition: Condition = "exact"
    staged: str | None = None
    staged_bytes: int = 0
    stage_ms: float = 0.0
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class Activation:
    """One change of an engine's version."""

    version: int
    base: int | None
    kind: Kind
    changed: int
    payload_bytes: int
    fetch_ms: float
    stage_ms: float
    pause_ms: float
    requests_in_flight: int
    aborted: int
    tokens_during_transfer: int
    fingerprint_ok: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a Request."""

    id: int
    kind: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine tells the hub; None where nothing is known yet. While its weights are `asleep` nothing changes."""

    version: int | None = None
    state: str | None = None
    condition: Condition = "exact"
    fingerprint_ok: bool | None = None
    audited: int | None = None
    audit_ok: bool | None = None
    activations: tuple[Activation, ...] = ()
    answers: tuple[Answer, ...] = ()
    error: ErrorInfo | None = None
    asleep: bool = False


_writes = itertools.count()


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file at `path` in one step (not durable: for memory file systems)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_writes)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class JsonFile(Generic[T]):
    """A file that holds one record, or `{}` for none. Cheap to poll: an unchanged file is not parsed again."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self.path = path
        self._kind = kind
        self._stamp: tuple[int, int, int] | None = None
        self._value: T | None = None

    def write(self, value: T | None) -> None:
        """Replace the file in one step."""
        write_atomically(self.path, to_json(value))

    def read(self) -> T | None:
        """The record; None if the file is missing or holds `{}`. Raises CorruptData if it holds anything else."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                stamp = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
                if stamp == self._stamp:
                    return self._value
                raw = parse_json(file.read(), str(self.path))
        except FileNotFoundError:
            return None
        value = from_json(self._kind, raw, self.path.name) if raw != {} else None
        settled = time.time_ns() - facts.st_mtime_ns > _RACY_NS
        self._stamp, self._value = (stamp if settled else None), value
        return value


class NodeDirectory:
    """Paths and records of one node directory. `create` is for its owner, `open` for the others."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.next = JsonFile(root / "next.json", NextArtifact)
        self.request = JsonFile(root / "request.json", Request)
        self.agent = JsonFile(root / "agent.json", AgentStatus)
        self.engine = JsonFile(root / "engine.json", EngineStatus)
        self._ranks: dict[int, JsonFile[RankStatus]] = {}
        self._lock: int | None = None

    @classmethod
    def create(cls, engine_id: str, parent: Path = PARENT) -> NodeDirectory:
        """Make `sparrowrl-<engine id>-<own pid>` with mode 0700, after removing what dead owners left behind.

        The caller owns it for as long as it lives: a lock that dies with the process says so, because process ids are
        reused and differ between containers. Raises ConfigError if the name is in use or the directory cannot be made.
        """
        if not RUN_NAME.fullmatch(engine_id):
            raise ConfigError(f"engine id: expected {RUN_NAME.pattern}, got {engine_id!r}")
        remove_stale(parent)
        node = cls(parent / f"sparrowrl-{engine_id}-{os.getpid()}")
        try:
            node.root.mkdir(mode=0o700)
            node._lock = _locked(node.root)
            (node.root / "ranks").mkdir()
            (node.root / "runs").mkdir()
        except OSError as error:
            raise ConfigError(f"node directory {node.root}: {error}") from error
        return node

    @classmethod
    def open(cls, root: str | os.PathLike[str]) -> NodeDirectory:
        """The directory that an owner made. Raises ConfigError if it is missing, or others may enter it."""
        node = cls(Path(root))
        try:
            facts = node.root.stat()
        except OSError as error:
            raise ConfigError(f"node directory {root}: {error}") from error
        if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or not (node.root / "ranks").is_dir():
            raise ConfigError(f"node directory {root}: expected one of mode 0700 of this user, made by the follower")
        return node

    def remove(self) -> None:
        """Delete the directory with all it holds; doing it twice is fine."""
        removed = self.root.with_name(f".{self.root.name}")  # first, for others may be writing into it still
        with suppress(OSError):
            self.root.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def key_path(self, key: str) -> Path:
        """Where the file or directory of a key of docs/format.md section 2 lies. Raises CorruptData on a bad key."""
        parts = key.split("/")
        if parts[0] != "runs" or any(part in ("", ".", "..") for part in parts):
            raise CorruptData(f"key: expected runs/<run>/..., got {key[:200]!r}")
        return self.root.joinpath(*parts)

    def rank(self, rank: int) -> JsonFile[RankStatus]:
        """The status file of one rank."""
        if rank not in self._ranks:
            self._ranks[rank] = JsonFile(self.root / "ranks" / f"{rank}.json", RankStatus)
        return self._ranks[rank]

    def ranks(self) -> dict[int, RankStatus]:
        """The statuses of all ranks that have written one. Raises CorruptData on a bad file."""
        names = [name.removesuffix(".json") for name in os.listdir(self.root / "ranks") if name.endswith(".json")]
        statuses = {int(name): self.rank(int(name)).read() for name in names if name.isdecimal()}
        return {rank: status for rank, status in sorted(statuses.items()) if status is not None}


def remove_stale(parent: Path = PARENT) -> list[Path]:
    """Delete this user's node directories whose owner is gone; returns their paths."""
    removed = []
    for root in parent.iterdir():
        if root.name.startswith(".") and _NAME.fullmatch(root.name[1:]):
            shutil.rmtree(root, ignore_errors=True)  # somebody was killed while removing it
        if not _NAME.fullmatch(root.name):
            continue
        try:
            descriptor = os.open(root / _OWNER, os.O_RDWR)
        except OSError:  # another user's, or one that is just being made or removed
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root, ignore_errors=True)
            removed.append(root)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return removed


def _locked(root: Path) -> int:
    """Create the owner's lock file, locked before it has its name; returns the descriptor that holds the lock."""
    temporary = root / f".{_OWNER}"
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.replace(temporary, root / _OWNER)
    return descriptor
