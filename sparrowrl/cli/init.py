"""`sparrowrl init`: the credentials of a new run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sparrowrl.config import Credentials
from sparrowrl.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser("init", help="make the credentials of a new run")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="for the trainer and the hub")
    parser.add_argument(
        "--engine-out", type=Path, metavar="FILE", help="the same without the writer token, for engines"
    )


def run(args: argparse.Namespace) -> int:
    """Write the credentials files, mode 0600. Raises ConfigError if one is there already: nothing is overwritten."""
    credentials = Credentials.new(args.run)
    wanted = [(args.out, credentials)]
    if args.engine_out is not None:
        wanted.append((args.engine_out, credentials.for_engines()))
    for path, _ in wanted:
        if path.exists():
            raise ConfigError(f"{path} exists; its run would lose its keys, so choose another name or delete it first")
    for path, copy in wanted:
        copy.save(path)
        sys.stdout.write(f"{path}: credentials of run {credentials.run}\n")
    return 0
