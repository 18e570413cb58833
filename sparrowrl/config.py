"""Settings that come from outside the code: the credentials file and the engine's environment."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparrowrl.errors import ConfigError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LEAST = {"audit_every": 0, "connections": 1, "start_timeout": 0, "drain_timeout": 0}  # what an engine may be told
LATER = "later"  # SPARROWRL_HUB of an engine that is told whom to follow after it has started


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
        return cls.of(raw, f"credentials file {path}")

    @classmethod
    def of(cls, raw: object, what: str) -> Credentials:
        """Take the content of a credentials file. Raises ConfigError that begins with `what`."""
        if not isinstance(raw, dict):
            raise ConfigError(f"{what}: expected a JSON object, got {type(raw).__name__}")
        run, run_key, reader, writer = (raw.get(name) for name in ("run", "run_key", "reader", "writer"))
        if not isinstance(run, str) or not RUN_NAME.fullmatch(run):
            raise ConfigError(f"{what}: run: expected {RUN_NAME.pattern}, got {run!r}")
        if not isinstance(run_key, str) or not re.fullmatch("[0-9a-f]{64}", run_key):
            raise ConfigError(f"{what}: run_key: expected 64 hex digits")
        for name, token in (("reader", reader), ("writer", "-" if writer is None else writer)):
            if not isinstance(token, str) or not re.fullmatch("[!-~]+", token):
                raise ConfigError(f"{what}: {name}: expected a token of printable characters")
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
    """What an engine that follows a trainer by itself is told: through its environment, or later by its owner."""

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
        """Read SPARROWRL_* (docs/environment.md). Raises ConfigError that names what is missing or wrong."""
        for name in ("SPARROWRL_HUB", "SPARROWRL_TOKEN_FILE"):
            if not environment.get(name):
                raise ConfigError(f"{name} is not set: an engine with weight-transfer backend 'sparrow' needs it")
        given: dict[str, object] = {}
        for name in ("engine_id", "in_flight", *_LEAST):
            if (text := environment.get(_variable(name))) is not None:
                given[name] = int(text) if name in _LEAST and text.isdecimal() else text
        if given.get("engine_id") == "":
            del given["engine_id"]
        token_file = Path(environment["SPARROWRL_TOKEN_FILE"])
        return cls._checked(environment["SPARROWRL_HUB"], token_file, given, _variable, environment)

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, object], token_file: Path, environment: Mapping[str, str] = os.environ
    ) -> EngineConfig:
        """Take the settings of `sparrow_follow` (docs/protocol.md section 5), all but the credentials.

        Where files may be exported to is the say of whoever started the engine, in its environment. Raises ConfigError
        that names the setting that is missing, wrong or not known.
        """
        allowed = ("hub", "engine_id", "in_flight", *_LEAST)
        if unknown := sorted(str(name) for name in settings if name not in allowed):
            raise ConfigError(f"settings: {', '.join(unknown)}: not known; expected {', '.join(allowed)}")
        hub = settings.get("hub")
        if not isinstance(hub, str) or not hub:
            raise ConfigError(f"setting hub: expected http://host:port or https://host, got {hub!r}")
        given = {name: settings[name] for name in allowed[1:] if name in settings}
        return cls._checked(hub, token_file, given, lambda name: f"setting {name}", environment)

    @classmethod
    def _checked(
        cls,
        hub: str,
        token_file: Path,
        given: Mapping[str, object],
        called: Callable[[str], str],
        environment: Mapping[str, str],
    ) -> EngineConfig:
        in_flight = given.get("in_flight", "keep")
        if in_flight not in ("keep", "drain"):
            raise ConfigError(f"{called('in_flight')}: expected keep or drain, got {in_flight!r}")
        engine_id = given.get("engine_id", f"engine-{secrets.token_hex(4)}")
        if not isinstance(engine_id, str) or not RUN_NAME.fullmatch(engine_id):
            raise ConfigError(f"{called('engine_id')}: expected {RUN_NAME.pattern}, got {engine_id!r}")
        numbers: dict[str, int] = {}
        for name, least in _LEAST.items():
            if name not in given:
                continue
            value = given[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{called(name)}: expected a whole number, at least {least}, got {value!r}")
            numbers[name] = value
        export_dir = environment.get("SPARROWRL_EXPORT_DIR")
        return cls(
            hub=hub.rstrip("/"),
            token_file=token_file,
            engine_id=engine_id,
            in_flight=str(in_flight),
            export_dir=Path(export_dir) if export_dir else None,
            **numbers,
        )


def _variable(setting: str) -> str:
    return f"SPARROWRL_{setting.upper()}"


def follows_later(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether an engine with weight-transfer backend "sparrow" is to wait until it is told whom to follow."""
    return environment.get("SPARROWRL_HUB") == LATER


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
