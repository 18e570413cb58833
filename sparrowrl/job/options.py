"""The options of a job's run, whichever framework's configuration they come from (docs/jobs.md)."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sparrowrl.config import RUN_NAME
from sparrowrl.errors import ConfigError
from sparrowrl.transport.http import is_address

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_AT_LEAST = {"port": 0, "connections": 1, "audit_every": 0, "anchor_every": 0, "keep_versions": 0, "timeout": 1}


@dataclass(frozen=True, slots=True)
class Options:
    """All options, checked. Raises ConfigError that says which is wrong and what to write.

    `key` is what a user of the framework writes before an option's name. `journal_dir` None is a temporary directory.
    `listen` is the address that the hub binds to, `port` its port (0: a free one), and `address` what engines connect
    to instead, a host or the URL of a proxy. `connections` are an engine's streams; `in_flight` is what becomes of
    running requests when weights change; `audit_every`, `anchor_every` and `keep_versions` count versions (0: none,
    none, all). Each wait of a sync may take `timeout` seconds.
    """

    key: str
    journal_dir: str | None = None
    run: str = "run"
    listen: str = "127.0.0.1"
    address: str | None = None
    port: int = 0
    connections: int = 4
    codec: str = "fast"
    in_flight: str = "keep"
    audit_every: int = 0
    anchor_every: int = 0
    keep_versions: int = 0
    timeout: int = 600

    @classmethod
    def from_mapping(cls, key: str, mapping: Mapping[str, Any]) -> Options:
        """The options that a mapping has, others at their defaults. Raises ConfigError, also for one that is none."""
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{key.rstrip('.')}: expected options below it, as {key}run=NAME, got {mapping!r}")
        names = cls.names()
        for name in mapping:
            if name not in names:
                close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
                advice = f"write {key}{close[0]}" if close else f"write {key} and one of {', '.join(names)}"
                raise ConfigError(f"{key}{name}: there is no such option; {advice}")
        return cls(key, **dict(mapping))

    @classmethod
    def names(cls) -> list[str]:
        """Of all options."""
        return [field.name for field in fields(cls) if field.name != "key"]

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            most = 65535 if name == "port" else None
            if type(value) is not int or value < least or (most is not None and value > most):
                span = f"at least {least}" if most is None else f"{least} to {most}"
                raise self._wrong(name, f"a whole number, {span}", value)
        for name in ("run", "listen", "codec", "in_flight", "journal_dir", "address"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name in ("journal_dir", "address")):
                raise self._wrong(name, "text", value)
        if not RUN_NAME.fullmatch(self.run):
            raise self._wrong("run", RUN_NAME.pattern, self.run)
        if self.codec != "fast":
            raise self._wrong("codec", "fast, the only one so far", self.codec)
        if self.in_flight not in ("keep", "drain"):
            raise self._wrong("in_flight", "keep or drain", self.in_flight)
        if self.journal_dir is not None and not os.path.isabs(self.journal_dir):
            raise self._wrong(
                "journal_dir", "an absolute path, for the workers run in folders of their own", self.journal_dir
            )
        if _ip(self.listen) is None and self.listen != "localhost":
            raise self._wrong("listen", "an IP address of the trainer's first node, or localhost", self.listen)
        if self.address is not None and not is_address(self.address) and not _is_host(self.address):
            raise self._wrong(
                "address", "a host name, or http(s)://HOST[:PORT] of a proxy before the hub", self.address
            )

    def _wrong(self, name: str, expected: str, got: object) -> ConfigError:
        return ConfigError(f"{self.key}{name}: expected {expected}, got {got!r}")

    @property
    def only_here(self) -> bool:
        """Whether the hub can be reached from its own machine alone: on loopback, and no proxy is named."""
        ip = _ip(self.listen)
        proxied = self.address is not None and is_address(self.address)
        return (ip is None or ip.is_loopback) and not proxied

    def url(self, port: int, own_ip: str) -> str:
        """What engines connect to if the hub has this port. A hub that listens on all addresses is at `own_ip`."""
        if self.address is not None and is_address(self.address):
            return self.address.rstrip("/")
        ip = _ip(self.listen)
        host = self.address or (own_ip if ip is not None and ip.is_unspecified else self.listen)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_host(text: str) -> bool:
    return _ip(text) is not None or _HOST_NAME.fullmatch(text) is not None
