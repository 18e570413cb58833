"""Keys of a run's files: the same on disk, in a hub's URLs and in an object store (docs/format.md section 2)."""

from __future__ import annotations

import re

from sparrowrl.config import RUN_NAME
from sparrowrl.delta import limits
from sparrowrl.errors import FormatError

NUMBER = r"(?:0|[1-9][0-9]{0,15})"
HASH = r"[0-9a-f]{64}"
ARTIFACT_NAME = rf"(?:origin|anchor\.dense|{NUMBER}\.fast)"
KEY = re.compile(
    rf"runs/{RUN_NAME.pattern}/(?:layout/{HASH}|v/{NUMBER}/{ARTIFACT_NAME}/(?:manifest|{HASH}\.seg))", re.ASCII
)


def artifact_name(kind: str, base: int | None, codec: str | None) -> str:
    """The last folder of an artifact: `origin`, `anchor.dense` or `<base>.fast`. Raises FormatError on any other."""
    if (kind, base, codec) == ("origin", None, None):
        return "origin"
    if (kind, base, codec) == ("anchor", None, "dense"):
        return "anchor.dense"
    if kind == "delta" and codec == "fast" and base is not None:
        return f"{_version(base)}.fast"
    raise FormatError(f"artifact: expected an origin, a dense anchor or a fast delta, got {kind}, {base}, {codec}")


def parse_artifact_name(name: str) -> tuple[str, int | None, str | None]:
    """The kind, base and codec that `artifact_name` made the name from. Raises FormatError on any other name."""
    if not re.fullmatch(ARTIFACT_NAME, name, re.ASCII):
        raise FormatError(f"artifact name: expected origin, anchor.dense or <base>.fast, got {name[:100]!a}")
    if name == "origin":
        return "origin", None, None
    if name == "anchor.dense":
        return "anchor", None, "dense"
    return "delta", _version(int(name.removesuffix(".fast"))), "fast"


def layout_key(run: str, layout_id: bytes) -> str:
    """Key of the layout with this id. Raises FormatError on a bad run name."""
    return f"runs/{_run(run)}/layout/{_hash(layout_id)}"


def artifact_key(run: str, target: int, name: str) -> str:
    """Key of an artifact's folder. Raises FormatError on a bad run name, version or artifact name."""
    parse_artifact_name(name)
    return f"runs/{_run(run)}/v/{_version(target)}/{name}"


def manifest_key(run: str, target: int, name: str) -> str:
    """Key of an artifact's manifest. Raises FormatError as `artifact_key` does."""
    return f"{artifact_key(run, target, name)}/manifest"


def segment_key(run: str, target: int, name: str, digest: bytes) -> str:
    """Key of an artifact's segment, named by its blake3 hash. Raises FormatError as `artifact_key` does."""
    return f"{artifact_key(run, target, name)}/{_hash(digest)}.seg"


def is_key(key: str) -> bool:
    """Whether this is the key of a file; a key that came from outside is safe to use as a path if and only if it is."""
    return KEY.fullmatch(key) is not None


def _run(run: str) -> str:
    if not RUN_NAME.fullmatch(run):
        raise FormatError(f"run name: expected {RUN_NAME.pattern}, got {run[:100]!a}")
    return run


def _version(version: int) -> int:
    return limits.check_int("version", version, 0, limits.VERSIONS)


def _hash(digest: bytes) -> str:
    return limits.check_bytes("blake3 hash", digest, 32).hex()
