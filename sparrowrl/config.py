"""Settings that come from outside the code: the credentials file and the engine's environment."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparrowrl.errors import ConfigError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who may read and write a run (docs/protocol.md section 1).

    `run_key` is 32 bytes; `writer` is None in an engine's copy.
    """

    run: str
    run_key: bytes = field(repr=False)
    reader: str = field(repr=False)
    writer: str | None = field(default=None, repr=False)

    @classmethod
    def new(cls, run: str) -> Credentials:
        """Random credentials for a new run. Raises ConfigError on a bad run name."""
        if not RUN_NAME.fullmatch(run):
            raise ConfigError(f"run name: expected {RUN_NAME.pattern}, got {run!r}")
        return cls(run, secrets.token_bytes(32), secrets.token_urlsafe(24), secrets.token_urlsafe(24))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Credentials:
        """Read a credentials file. Raises ConfigError if it is missing or not of the documented form."""
        try:
            raw = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"credentials file {path}: {error}; make one with `sparrowrl init`") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"credentials file {path}: expected a JSON object, got {type(raw).__name__}")
        run, run_key, reader, writer = (raw.get(name) for name in ("run", "run_key", "reader", "writer"))
        if not isinstance(run, str) or not RUN_NAME.fullmatch(run):
            raise ConfigError(f"credentials file {path}: run: expected {RUN_NAME.pattern}, got {run!r}")
        if not isinstance(run_key, str) or not re.fullmatch("[0-9a-f]{64}", run_key):
            raise ConfigError(f"credentials file {path}: run_key: expected 64 hex digits")
        for name, token in (("reader", reader), ("writer", "-" if writer is None else writer)):
            if not isinstance(token, str) or not re.fullmatch("[!-~]+", token):
                raise ConfigError(f"credentials file {path}: {name}: expected a token of printable characters")
        return cls(run, bytes.fromhex(run_key), str(reader), writer)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file with mode 0600. Raises OSError, leaving nothing behind; the file must not exist yet."""
        body: dict[str, str] = {"run": self.run, "run_key": self.run_key.hex(), "reader": self.reader}
        if self.writer is not None:
            body["writer"] = self.writer
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(body, file, indent=1)
        except OSError:
            os.unlink(path)
            raise

    def for_engines(self) -> Credentials:
        """The copy to hand to engines: without the writer token."""
        return Credentials(self.run, self.run_key, self.reader)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine that follows a trainer by itself is told through its environment (docs/environment.md)."""

    hub: str
    token_file: Path
    engine_id: str
    in_flight: str = "keep"
    audit_every: int = 0
    connections: int = 4
    start_timeout: int = 300
    export_dir: Path | None = None
    drain_timeout: int = 300

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> EngineConfig:
        """Read SPARROWRL_*. Raises ConfigError that names the variable that is missing or wrong."""
        for name in ("SPARROWRL_HUB", "SPARROWRL_TOKEN_FILE"):
            if not environment.get(name):
                raise ConfigError(f"{name} is not set: an engine with weight-transfer backend 'sparrow' needs it")
        in_flight = environment.get("SPARROWRL_IN_FLIGHT", "keep")
        if in_flight not in ("keep", "drain"):
            raise ConfigError(f"SPARROWRL_IN_FLIGHT: expected keep or drain, got {in_flight!r}")
        engine_id = environment.get("SPARROWRL_ENGINE_ID") or f"engine-{secrets.token_hex(4)}"
        if not RUN_NAME.fullmatch(engine_id):
            raise ConfigError(f"SPARROWRL_ENGINE_ID: expected {RUN_NAME.pattern}, got {engine_id!r}")
        export_dir = environment.get("SPARROWRL_EXPORT_DIR")
        return cls(
            hub=environment["SPARROWRL_HUB"].rstrip("/"),
            token_file=Path(environment["SPARROWRL_TOKEN_FILE"]),
            engine_id=engine_id,
            in_flight=in_flight,
            audit_every=_whole_number(environment, "SPARROWRL_AUDIT_EVERY", 0),
            connections=_whole_number(environment, "SPARROWRL_CONNECTIONS", 4, least=1),
            start_timeout=_whole_number(environment, "SPARROWRL_START_TIMEOUT", 300),
            export_dir=Path(export_dir) if export_dir else None,
            drain_timeout=_whole_number(environment, "SPARROWRL_DRAIN_TIMEOUT", 300),
        )


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What the workers of an engine are told through their environment (docs/environment.md).

    `timeout` is how many seconds a rank waits for the others of its engine in one call; `unused` are patterns of tensor
    names that the trainer publishes and this engine has no use for.
    """

    timeout: int = 60
    unused: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RankConfig:
        """Read SPARROWRL_RANK_TIMEOUT and SPARROWRL_UNUSED. Raises ConfigError."""
        unused = environment.get("SPARROWRL_UNUSED", "")
        return cls(
            timeout=_whole_number(environment, "SPARROWRL_RANK_TIMEOUT", 60, least=1),
            unused=tuple(pattern.strip() for pattern in unused.split(",") if pattern.strip()),
        )


def _whole_number(environment: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name}: expected a whole number, at least {least}, got {text!r}")
    return int(text)
