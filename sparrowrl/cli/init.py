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
    """Write the credentials files, mode 0600: all or none. Raises ConfigError if one is there already (nothing is
    overwritten) or cannot be written.
    """
    credentials = Credentials.new(args.run)
    wanted = [(args.out, credentials)]
    if args.engine_out is not None:
        wanted.append((args.engine_out, credentials.for_engines()))
    made: list[Path] = []
    try:
        for path, copy in wanted:
            copy.save(path)
            made.append(path)
    except FileExistsError as error:
        _take_back(made)
        raise ConfigError(
            f"{path} exists; its run would lose its keys, so choose another name or delete it first"
        ) from error
    except OSError as error:
        _take_back(made)
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose a file in a folder of yours") from error
    for path in made:
        sys.stdout.write(f"{path}: credentials of run {credentials.run}\n")
    return 0


def _take_back(made: list[Path]) -> None:
    """The engines' copy is of no use without the trainer's file, nor that without the copy that was asked for."""
    for path in made:
        path.unlink()
