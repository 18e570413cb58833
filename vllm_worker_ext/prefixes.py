"""Keeps requests from reading prefix-cache blocks of older weights.

vLLM finds a cached block by a hash chain that begins with the request's `cache_salt`. Every salt here begins with a
root that is new whenever the weights change, so a chain begun under other weights is never met again. Requests that run
across a change keep their chain, and their KV cache with it; no later request can find what they add to it.
"""

from __future__ import annotations

import secrets
from typing import Any

from blake3 import blake3


class Prefixes:
    """The root of one engine's prefix hashes, and the requests that must follow when it changes."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._changes = 0
        self._watched = False
        self.root = self._derive(b"")

    def change(self, state: bytes, scheduler: Any) -> None:
        """Take a new root, derived from the state id, and renew all requests that have computed nothing yet.

        The root also depends on how often it changed: weights may come back to an earlier state, but requests that ran
        across the changes between have left blocks under that state's former root.
        """
        self._changes += 1
        self.root = self._derive(state)
        for request in scheduler.requests.values():
            if request.num_computed_tokens == 0:
                self.renew(request)

    def salt(self, own: str | None) -> str:
        """The salt of a new request whose client asked for the salt `own`."""
        return f"{self.root}|{own or ''}"

    def renew(self, request: Any) -> None:
        """Hash a request anew if its root is not the current one."""
        root, _, own = request.cache_salt.partition("|")
        if root != self.root:
            request.cache_salt = self.salt(own)
            request.block_hashes.clear()
            request.update_block_hashes()

    def renew_preempted(self, scheduler: Any) -> None:
        """From now on a preempted request, which begins anew, begins under the current root."""
        if self._watched:
            return
        self._watched = True
        preempt = scheduler._preempt_request

        def preempt_and_renew(request: Any, *args: Any, **kwargs: Any) -> None:
            preempt(request, *args, **kwargs)
            self.renew(request)

        scheduler._preempt_request = preempt_and_renew

    def _derive(self, state: bytes) -> str:
        return blake3(state + self._changes.to_bytes(8, "little"), key=self._secret).hexdigest()
