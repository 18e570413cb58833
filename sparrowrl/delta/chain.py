"""Which artifacts lead from one version to another."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """Where an artifact stands in its run: `name` is the last folder of its key (docs/format.md section 2).

    `kind` is "origin", "delta" or "anchor"; `base` is None unless a delta; `codec` is None for an origin.
    """

    target: int
    name: str
    kind: str
    base: int | None
    codec: str | None


def find_path(artifacts: Iterable[ArtifactRef], target: int, starts: Container[int]) -> list[ArtifactRef] | None:
    """The fewest deltas that lead from any version in `starts` to `target`, in the order to apply them.

    Empty if `target` itself is in `starts`; None if there is no way.
    """
    into: dict[int, list[ArtifactRef]] = {}
    for artifact in sorted(artifacts, key=lambda a: (a.target, a.name)):
        if artifact.kind == "delta":
            into.setdefault(artifact.target, []).append(artifact)
    paths: dict[int, list[ArtifactRef]] = {target: []}
    front = [target]
    while front:
        for version in front:
            if version in starts:
                return paths[version]
        following: list[int] = []
        for version in front:
            for delta in into.get(version, ()):
                if delta.base is not None and delta.base not in paths:
                    paths[delta.base] = [delta, *paths[version]]
                    following.append(delta.base)
        front = sorted(following)
    return None


def roots(artifacts: Iterable[ArtifactRef]) -> dict[int, ArtifactRef]:
    """The versions that are known whole without a delta: the origin's and those of anchors (which win)."""
    found: dict[int, ArtifactRef] = {}
    for artifact in artifacts:
        if artifact.kind == "anchor" or (artifact.kind == "origin" and artifact.target not in found):
            found[artifact.target] = artifact
    return found
