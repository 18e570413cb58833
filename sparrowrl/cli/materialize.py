"""`sparrowrl materialize`: a version as a safetensors file."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from sparrowrl.cli.places import load_checkpoint
from sparrowrl.config import Credentials
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.materialize import materialize
from sparrowrl.errors import ConfigError, VersionNotFound


def add_parser(subparsers: Any) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser("materialize", help="write all weights of a version as a safetensors file")
    parser.add_argument("--journal", required=True, type=Path, metavar="DIR", help="root of the journal")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--version", type=int, help="version (default: the newest)")
    parser.add_argument(
        "--base",
        type=Path,
        metavar="CKPT",
        help="safetensors file or directory with version 0; not needed if an anchor is there",
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="credentials file: check who wrote the manifests")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the file to write")


def run(args: argparse.Namespace) -> int:
    """Write the file, under a temporary name first. Raises what `materialize` raises."""
    if not args.out.parent.is_dir() or (args.out.exists() and not args.out.is_file()):
        raise ConfigError(f"--out {args.out}: expected the name of a file, in a folder that exists")
    key = Credentials.load(args.key).run_key if args.key is not None else None
    journal = Journal(args.journal, args.run, key)
    version = journal.newest() if args.version is None else args.version
    if version is None:
        raise ConfigError(f"run {args.run} of {args.journal} has no version yet")
    base = load_checkpoint(args.base) if args.base is not None else None
    try:
        weights = materialize(journal, version, base)
    except VersionNotFound as error:
        if base is not None or version not in journal.versions():
            raise
        raise ConfigError(f"no anchor leads to version {version}: give --base, the checkpoint of version 0") from error
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError("writing a checkpoint needs safetensors: pip install safetensors") from error
    metadata = {"format": "pt", "sparrowrl_run": args.run, "sparrowrl_version": str(version)}
    try:
        with tempfile.TemporaryDirectory(prefix=".sparrowrl-", dir=args.out.parent) as folder:
            save_file(weights, Path(folder) / "weights", metadata)
            os.replace(Path(folder) / "weights", args.out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {args.out}: {error}; choose a place where you may write, with room") from error
    state = journal.manifest_of(version).target_state.hex()
    sys.stdout.write(f"{args.out}: version {version} of run {args.run}, {len(weights)} tensors, state {state}\n")
    return 0
