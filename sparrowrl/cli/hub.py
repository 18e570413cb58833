"""`sparrowrl hub`: serve a journal directory to engines, and take a trainer's uploads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sparrowrl.config import Credentials

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("hub", help="serve a journal to engines", description=__doc__)
    parser.add_argument("--journal", type=Path, required=True, help="journal directory; made if it is not there")
    parser.add_argument("--credentials", type=Path, required=True, help="the trainer's file of `sparrowrl init`")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8590, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--allow-remote", action="store_true", help="listen beyond this machine, in plain HTTP")
    parser.add_argument("--keep-versions", type=int, metavar="N", help="keep deltas of N versions (default: all)")
    parser.add_argument("--keep-anchors", type=int, default=1, metavar="N", help="and N anchors (default: %(default)s)")
    parser.add_argument(
        "--until-stdin-ends", action="store_true", help="leave at the end of standard input: with who started it"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGINT or, if so asked, the end of standard input. The first line on standard output is the
    address.
    """
    from sparrowrl.delta.retention import Retention
    from sparrowrl.transport.hub import run_hub

    retention = None if args.keep_versions is None else Retention(args.keep_versions, args.keep_anchors)
    run_hub(
        _say_address,
        args.journal,
        Credentials.load(args.credentials),
        host=args.host,
        port=args.port,
        allow_remote=args.allow_remote,
        retention=retention,
        until_stdin_ends=args.until_stdin_ends,
    )
    return 0


def _say_address(address: str) -> None:
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
