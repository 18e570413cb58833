"""What hub and clients must agree on: how errors, tokens and addresses travel over HTTP."""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Iterable
from urllib.parse import urlsplit

from sparrowrl.errors import (
    ConfigError,
    JournalError,
    JournalLocked,
    LimitExceeded,
    RemoteRefused,
    SparrowError,
    TransportError,
    Unauthorized,
    VersionConflict,
    VersionNotFound,
    WrongBase,
)

WRITER_HEADER = "X-Sparrow-Writer"
SMALL_BODY = 1 << 20  # bytes: statuses, requests, errors
LEASE_SECONDS = 30.0
LONGEST_WAIT = 30.0  # seconds that a long-poll may ask for

_STATUS: list[tuple[type[SparrowError], int]] = [
    (Unauthorized, 401),
    (VersionNotFound, 404),
    (JournalLocked, 409),
    (VersionConflict, 409),
    (WrongBase, 409),
    (LimitExceeded, 413),
    (JournalError, 503),
    (TransportError, 503),
    (SparrowError, 400),
]
# Errors that mean the same on both sides of the wire; any other comes out as RemoteRefused.
_TRAVELS = {kind.__name__: kind for kind in (Unauthorized, VersionNotFound, JournalLocked, VersionConflict, WrongBase)}


def status_of(error: SparrowError) -> int:
    """The HTTP status that says what kind of failure this is."""
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def error_body(name: str, message: str) -> bytes:
    """The JSON body of every answer that is not a success."""
    return json.dumps({"error": name, "message": message.replace("\n", " ")[:2000]}).encode()


def error_of(status: int, body: bytes, what: str) -> SparrowError:
    """The error to raise for an answer that is not a success; 5xx become plain TransportError, worth another try."""
    try:
        raw = json.loads(body)
        name, message = str(raw["error"]), str(raw["message"])
    except (ValueError, KeyError, TypeError):
        name, message = "", body[:200].decode(errors="replace")
    if status >= 500:
        return TransportError(f"{what}: HTTP {status} {name}: {message}")
    if status == 401:
        return Unauthorized(f"{what}: {message}")
    if name in _TRAVELS:
        return _TRAVELS[name](f"{what}: {message}")
    return RemoteRefused(f"{what}: HTTP {status} {name}: {message}")


def worth_retrying(error: SparrowError) -> bool:
    """Whether the same request may succeed a moment later: no connection, no answer in time, a busy or dying hub."""
    return isinstance(error, TransportError) and not isinstance(error, Unauthorized | RemoteRefused)


def check_token(header: str | None, tokens: Iterable[str]) -> None:
    """Compare an Authorization header with each allowed token, in constant time. Raises Unauthorized."""
    given = (header or "").encode()
    matches = [hmac.compare_digest(given, f"Bearer {token}".encode()) for token in tokens]
    if not any(matches):
        raise Unauthorized("expected the header 'Authorization: Bearer <token>' with a token of this run's credentials")


def check_address(host: str, port: int, allow_remote: bool) -> None:
    """Raises ConfigError unless host and port may be listened on: loopback only, if not `allow_remote`."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port: expected 0 to 65535, got {port}")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ConfigError(f"host: expected an IP address or localhost, got {host!r}") from error
    if not local and not allow_remote:
        raise ConfigError(
            f"host {host} is reached by others and this hub speaks plain HTTP; put a TLS proxy in front of 127.0.0.1, "
            "or say --allow-remote on a network you trust"
        )


def is_address(url: str) -> bool:
    """Whether a hub can have this address: http(s)://host[:port][/prefix]."""
    try:
        parts = urlsplit(url)
        right = parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:  # of the port, or of an IPv6 address
        return False
    return right and parts.scheme in ("http", "https") and bool(parts.hostname)
