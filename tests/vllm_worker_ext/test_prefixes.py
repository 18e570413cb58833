"""The prefix cache across versions: no request meets blocks of older weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import core_of
from followed import Runner, Site

pytestmark = pytest.mark.vllm


def test_new_requests_never_meet_blocks_of_older_weights(site: Callable[..., Site]) -> None:
    s = site()
    llm = s.engine(enable_prefix_caching=True, block_size=32)
    long = [2 + (5 * j * j) % 400 for j in range(100)]
    run = Runner(llm)
    run.add(long, 4)
    run.finish()
    across = run.add(long, 60)
    run.step(5)
    assert run.outputs[across].num_cached_tokens == 96  # the cache works under one version
    weights = s.trainer.step()
    s.ready()
    waiting = run.add(long, 12)  # hashed under the old root, starts under the new weights
    late = None
    while run.engine.has_unfinished_requests():
        run.step()
        if late is None and s.follower.status.version == 1:
            late = run.add(long, 12)
    assert late is not None and run.outputs[across].finished
    fresh = Runner(s.fresh(weights, enable_prefix_caching=True, block_size=32))
    expected = [fresh.add(long, 12), fresh.add(long, 12)]
    fresh.step(1)
    fresh.finish()
    for mine, theirs in zip((waiting, late), expected, strict=True):
        assert run.result(mine)[0] == fresh.result(theirs)[0]
    assert run.outputs[waiting].num_cached_tokens == 0
    # With nothing else running, the very numbers of a fresh engine, first computed, then from the cache.
    for cached in (0, 96):
        again, first = (
            Runner(llm),
            Runner(s.fresh(weights, f"fresh{cached}", enable_prefix_caching=True, block_size=32)),
        )
        if not cached:
            core_of(llm).reset_prefix_cache()
        else:
            warm = first.add(long, 12)
            first.finish()
            assert first.outputs[warm].finished
        a, b = again.add(long, 12), first.add(long, 12)
        again.finish()
        first.finish()
        assert again.outputs[a].num_cached_tokens == first.outputs[b].num_cached_tokens == cached
        assert again.result(a) == first.result(b)


def test_a_request_across_the_change_leaves_nothing_that_a_later_one_finds(site: Callable[..., Site]) -> None:
    """Weights go to B and back to A: blocks that a request made across the change must not be taken for A's."""
    s = site()
    llm = s.engine(enable_prefix_caching=True, block_size=32)
    prompt = [2 + (3 * j * j) % 400 for j in range(40)]
    run = Runner(llm)
    across = run.add(prompt, 80)
    run.step(3)
    start = {name: t.clone() for name, t in s.trainer.weights.items()}
    s.trainer.step(0.3)
    s.ready()
    run.step(30)
    assert s.follower.status.version == 1
    for name, tensor in s.trainer.weights.items():
        tensor.copy_(start[name])
    s.trainer.publisher.publish(s.trainer.weights.items())
    s.ready()
    run.finish()
    assert s.follower.status.version == 2
    tokens, _ = run.result(across)
    again = prompt + tokens[:60]
    name = run.add(again, 8)
    run.finish()
    assert run.outputs[name].num_cached_tokens == 0
    fresh = Runner(s.fresh(start, enable_prefix_caching=True, block_size=32))
    expected = fresh.add(again, 8)
    fresh.finish()
    assert run.result(name) == fresh.result(expected)


def test_preempted_requests_begin_anew_under_the_current_root(site: Callable[..., Site]) -> None:
    s = site()
    llm = s.engine(enable_prefix_caching=True, block_size=32)
    run = Runner(llm)
    name = run.add([5] * 40, 30)
    run.step(4)
    s.trainer.step()
    s.ready()
    run.step(1)
    assert s.follower.status.version == 1
    request = next(iter(core_of(llm).scheduler.requests.values()))
    assert not request.cache_salt.startswith(s.follower.prefixes.root)
    assert core_of(llm).scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.cache_salt.startswith(s.follower.prefixes.root) and len(request.block_hashes) == 1
    run.finish()
    assert len(run.result(name)[0]) == 30
