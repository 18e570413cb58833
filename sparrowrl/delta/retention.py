"""Which versions a journal keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparrowrl.delta.chain import ArtifactRef, find_path, roots
from sparrowrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the deltas into the newest `versions` versions and the newest `anchors` anchors.

    Whatever else is needed to get from the newest anchor (or from version 0, if there is no anchor) to the newest
    version is kept too, and so is the origin. Raises ConfigError unless both are at least 1.
    """

    versions: int
    anchors: int = 1

    def __post_init__(self) -> None:
        if self.versions < 1 or self.anchors < 1:
            raise ConfigError(
                f"retention: expected at least 1 of each, got {self.versions} versions, {self.anchors} anchors"
            )


def superfluous(artifacts: Sequence[ArtifactRef], retention: Retention) -> list[ArtifactRef]:
    """The artifacts that `retention` does not keep, in the order given; none if the newest version has no root."""
    if not artifacts:
        return []
    newest = max(artifact.target for artifact in artifacts)
    anchors = sorted((a for a in artifacts if a.kind == "anchor"), key=lambda a: a.target)[-retention.anchors :]
    starts = {anchors[-1].target} if anchors else set(roots(artifacts))
    needed = find_path(artifacts, newest, starts)
    if needed is None:
        return []
    kept = {*anchors, *needed}
    recent = newest - retention.versions
    return [a for a in artifacts if a not in kept and a.kind != "origin" and (a.kind == "anchor" or a.target <= recent)]
