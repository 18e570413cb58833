from __future__ import annotations

from sparrowrl.delta.chain import ArtifactRef, find_path, roots


def ref(base: int, target: int) -> ArtifactRef:
    return ArtifactRef(target, f"{base}.fast", "delta", base, "fast")


def test_the_shortest_way_is_taken():
    singles = [ref(k, k + 1) for k in range(6)]
    assert find_path(singles, 3, {1}) == singles[1:3]
    assert find_path([*singles, ref(1, 4)], 6, {1}) == [ref(1, 4), *singles[4:]]
    assert find_path(singles, 4, {4}) == []
    assert find_path(singles, 4, {0, 2}) == singles[2:4]


def test_where_there_is_no_way():
    singles = [ref(k, k + 1) for k in range(6)]
    assert find_path(singles, 4, {5}) is None
    assert find_path([s for s in singles if s.target != 2], 4, {1}) is None
    assert find_path([ref(2, 3), ref(2, 4)], 4, {0}) is None
    assert find_path([], 0, set()) is None


def test_roots_are_the_origin_and_anchors():
    origin = ArtifactRef(0, "origin", "origin", None, None)
    anchors = [ArtifactRef(target, "anchor.dense", "anchor", None, "dense") for target in (0, 3)]
    assert roots([origin, ref(0, 1), ref(0, 3)]) == {0: origin}
    assert roots([anchors[0], origin, anchors[1]]) == {0: anchors[0], 3: anchors[1]}
