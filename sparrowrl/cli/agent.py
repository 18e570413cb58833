"""`sparrowrl agent`: bring what one engine needs into its node directory. The engine starts it by itself."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sparrowrl.config import Credentials

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_OWNER_SECONDS = 2.0


def add_parser(subparsers: Subparsers) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("agent", help="follow a hub for one engine", description=__doc__)
    parser.add_argument("--hub", required=True, metavar="URL", help="address of the hub")
    parser.add_argument("--token-file", type=Path, required=True, help="the engines' file of `sparrowrl init`")
    parser.add_argument("--node-dir", type=Path, required=True, help="node directory, made by the engine's follower")
    parser.add_argument("--engine-id", required=True, metavar="ID", help="name of the engine on the hub")
    parser.add_argument(
        "--connections", type=int, default=4, metavar="N", help="fetches at once (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Follow until SIGTERM, SIGINT, or the end of standard input, which the engine holds open."""
    from sparrowrl.transport.agent import run_agent
    from sparrowrl.transport.node import NodeDirectory, remove_stale

    run_agent(
        NodeDirectory.open(args.node_dir),
        args.hub,
        Credentials.load(args.token_file),
        args.engine_id,
        connections=args.connections,
    )
    # vLLM kills its engine core when it stops, and then nobody else removes the directory that the core had locked.
    deadline = time.monotonic() + _OWNER_SECONDS
    while args.node_dir.exists() and time.monotonic() < deadline:
        remove_stale(args.node_dir.parent)
        time.sleep(0.02)
    return 0
