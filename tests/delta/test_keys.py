"""Keys."""

from __future__ import annotations

import pytest

from sparrowrl.delta import keys
from sparrowrl.errors import FormatError

HASH = bytes(range(32))


@pytest.mark.parametrize(
    ("kind", "base", "codec", "name"),
    [("origin", None, None, "origin"), ("anchor", None, "dense", "anchor.dense"), ("delta", 12, "fast", "12.fast")],
)
def test_artifact_names(kind: str, base: int | None, codec: str | None, name: str) -> None:
    assert keys.artifact_name(kind, base, codec) == name
    assert keys.parse_artifact_name(name) == (kind, base, codec)


def test_keys_as_the_document_has_them() -> None:
    assert keys.layout_key("run-1", HASH) == f"runs/run-1/layout/{HASH.hex()}"
    assert keys.artifact_key("r", 7, "6.fast") == "runs/r/v/7/6.fast"
    assert keys.manifest_key("r", 0, "origin") == "runs/r/v/0/origin/manifest"
    assert keys.segment_key("r", 7, "anchor.dense", HASH) == f"runs/r/v/7/anchor.dense/{HASH.hex()}.seg"
    assert keys.is_key(keys.layout_key("r", HASH))
    assert keys.is_key(keys.manifest_key("r", 3, "0.fast"))
    assert keys.is_key(keys.segment_key("r", 3, "0.fast", HASH))


@pytest.mark.parametrize(
    "key",
    [
        "", "/", "runs/r/v/1/0.fast", "runs/r/v/1/0.fast/", "runs/r/v/1/0.fast/manifest/",
        "runs/r/v/1/0.fast/manifest\n", "runs/r/v/1/0.slow/manifest", "runs/r/v/1/x.fast/manifest",
        "runs/../v/1/0.fast/manifest", "runs/r/v/01/0.fast/manifest", "runs/r/v/-1/0.fast/manifest",
        "/runs/r/v/1/0.fast/manifest", "runs/r/v/1/../manifest",
        "runs/.r/v/1/0.fast/manifest", "runs/r/v/\u0661/0.fast/manifest", f"runs/r/layout/{'A' * 64}",
        f"runs/r/layout/{'a' * 63}", f"runs/r/v/1/0.fast/{'a' * 64}", f"runs/{'r' * 65}/v/1/0.fast/manifest",
    ],
)  # fmt: skip
def test_what_is_no_key(key: str) -> None:
    assert not keys.is_key(key)


def test_bad_parts_are_refused() -> None:
    for name in ("", "fast", "01.fast", "-1.fast", "1.dense", "anchor.fast", "origin\n", "9999999999999999.fast"):
        with pytest.raises(FormatError):
            keys.parse_artifact_name(name)
    for kind, base, codec in (
        ("delta", None, "fast"),
        ("delta", 1, "dense"),
        ("anchor", 1, "dense"),
        ("x", None, None),
    ):
        with pytest.raises(FormatError):
            keys.artifact_name(kind, base, codec)
    for run in ("", "..", "a/b", "-a", "r" * 65, "r\n"):
        with pytest.raises(FormatError):
            keys.layout_key(run, HASH)
    with pytest.raises(FormatError):
        keys.layout_key("r", HASH[:-1])
    with pytest.raises(FormatError):
        keys.artifact_key("r", 2**53, "0.fast")
