"""OpenRLHF's `openrlhf.cli.train_ppo_ray` with one more sync backend.

python -m sparrowrl.openrlhf_plugin.train_ppo_ray --vllm.sync_backend sparrow <OpenRLHF's own flags>
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from sparrowrl.errors import FrameworkUnsupported, SparrowError
from sparrowrl.openrlhf_plugin import flags, support

_STOCK = "openrlhf.cli.train_ppo_ray"


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit status: 0, 1 if the sync has failed, 2 for wrong flags.

    With another backend this is OpenRLHF's own command. Raises what OpenRLHF raises.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if flags.backend_of(arguments) != flags.BACKEND:
        _run(arguments)
        return 0
    try:
        support.check_usable()
    except FrameworkUnsupported as error:
        return _failed(error, 2)
    import ray

    from sparrowrl.job.ray_errors import ours
    from sparrowrl.openrlhf_plugin import actors

    actors.install()
    try:
        _run(arguments)
    except ray.exceptions.RayError as error:
        if (own := ours(error, "a process of the job")) is None:
            raise
        sys.stderr.write(f"{error}\n")  # it tells of all the calls
        return _failed(own, 1)
    return 0


def _run(arguments: list[str]) -> None:
    sys.argv = [_STOCK, *arguments]
    with flags.added(arguments):
        runpy.run_module(_STOCK, run_name="__main__", alter_sys=True)


def _failed(error: SparrowError, status: int) -> int:
    """Say it, in one line."""
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
