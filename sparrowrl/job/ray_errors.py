"""What a Ray call's failure stands for."""

from __future__ import annotations

import ray

from sparrowrl.errors import EngineDied, SparrowError


def ours(error: Exception, name: str) -> SparrowError | None:
    """The SparrowError that the called method raised, without Ray's wrapping, or EngineDied, which says that `name` is
    gone, if its process is; None for what is no error of ours.
    """
    while isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause  # of a call that another call has made
    if isinstance(error, SparrowError):
        return error
    if isinstance(error, ray.exceptions.RayActorError):
        return EngineDied(f"{name}: its process is gone: {str(error).splitlines()[0]}")
    return None
