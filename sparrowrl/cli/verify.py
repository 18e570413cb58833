"""`sparrowrl verify`: check a journal, or a checkpoint against a version."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sparrowrl.cli.places import journals_at, load_checkpoint
from sparrowrl.delta.chain import ArtifactRef
from sparrowrl.delta.journal import Journal
from sparrowrl.delta.verify import verify_artifact, verify_checkpoint, verify_newest
from sparrowrl.errors import ConfigError, CorruptData, VersionNotFound


def add_parser(subparsers: Any) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "verify",
        help="check every byte of a journal, or a checkpoint against a version",
        description="Exit status 3, and one line with the reason, at the first thing that is wrong.",
    )
    parser.add_argument("path", type=Path, help="a journal, a run's folder in it, or an artifact's folder")
    parser.add_argument("--key", type=Path, metavar="FILE", help="credentials file: check who wrote the manifests")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="compare this safetensors file or directory")
    parser.add_argument(
        "--version", type=int, help="with --checkpoint: the version (default: that of the artifact, or the newest)"
    )


def run(args: argparse.Namespace) -> int:
    """Raises CorruptData or FingerprintMismatch at the first thing that is wrong."""
    places = journals_at(args.path, args.key)
    if args.checkpoint is not None:
        return _verify_checkpoint(args, places)
    if args.version is not None:
        raise ConfigError("--version: expected together with --checkpoint")
    checked = 0
    for journal, only in places:
        artifacts = journal.artifacts()
        if only is not None and only not in artifacts:
            raise CorruptData(f"{args.path}: no manifest, so no artifact (a draft, or damaged)")
        for artifact in artifacts if only is None else [only]:
            chained = _verify(journal, artifact)
            if chained is None:
                continue
            note = "" if chained else " (states not checked: what came before is no longer kept)"
            sys.stdout.write(f"ok {journal.run} {artifact.target}/{artifact.name}{note}\n")
            sys.stdout.flush()
            checked += 1
        if only is None:
            verify_newest(journal)
    if not checked:
        raise ConfigError(f"{args.path}: nothing to verify, there is no artifact")
    authentic = "and signed with the run key" if args.key is not None else "(signatures not checked: no --key)"
    sys.stdout.write(f"{checked} artifacts are whole {authentic}\n")
    return 0


def _verify(journal: Journal, artifact: ArtifactRef) -> bool | None:
    """`verify_artifact`, or None if the artifact is no longer kept: a trainer may be at work on this journal."""
    try:
        return verify_artifact(journal, artifact)
    except (CorruptData, VersionNotFound):
        if artifact not in journal.at(artifact.target)[0]:
            return None
    return verify_artifact(journal, artifact)  # what went may have been its neighbour; damage stays


def _verify_checkpoint(args: argparse.Namespace, places: list[Any]) -> int:
    if len(places) != 1:
        raise ConfigError(f"{args.path}: expected one run with --checkpoint, got {len(places)}; give runs/<run>")
    journal, artifact = places[0]
    version = args.version
    if version is None:
        version = journal.newest() if artifact is None else artifact.target
    if version is None:
        raise ConfigError(f"{args.path}: run {journal.run} has no version yet")
    verify_checkpoint(journal, version, load_checkpoint(args.checkpoint))
    sys.stdout.write(f"{args.checkpoint} is version {version} of run {journal.run}, bit for bit\n")
    return 0
