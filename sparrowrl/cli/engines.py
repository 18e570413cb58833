"""`sparrowrl engines`: which engine of a run is at which version."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparrowrl.config import Credentials
from sparrowrl.transport.remote import HubClient

_COLUMNS = "{:<24} {:>8} {:>9} {:>10} {:>8} {:>9}  {}\n"


def add_parser(subparsers: Any) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser("engines", help="show which engine is at which version")
    parser.add_argument("--hub", default="http://127.0.0.1:8590", metavar="URL", help="default: %(default)s")
    parser.add_argument("--credentials", required=True, type=Path, metavar="FILE", help="of the trainer or the engines")
    parser.add_argument("--json", action="store_true", help="everything that the engines report")


def run(args: argparse.Namespace) -> int:
    """Print a line for each engine. Raises ConfigError, TransportError."""
    engines = asyncio.run(_engines(args.hub, Credentials.load(args.credentials)))
    if args.json:
        sys.stdout.write(json.dumps(engines, indent=1) + "\n")
        return 0
    if not engines:
        sys.stdout.write("no engine has reported yet\n")
        return 0
    sys.stdout.write(_COLUMNS.format("engine", "version", "condition", "live bits", "audited", "heard", "error"))
    for name, status in sorted(engines.items()):
        sys.stdout.write(_line(name, status))
    return 0


async def _engines(hub: str, credentials: Credentials) -> Mapping[str, Any]:
    async with HubClient(hub, credentials) as client:
        return await client.engines()


def _line(name: str, status: Mapping[str, Any]) -> str:
    proved = {True: "ok", False: "WRONG", None: "-"}[status.get("fingerprint_ok")]
    error = status.get("error") or {}
    said = f"{error.get('error')}: {error.get('message')}" if error else ""
    audited = "-" if status.get("audited") is None else status["audited"]
    version = "-" if status.get("version") is None else status["version"]
    heard = f"{status.get('age_s', 0.0):.0f} s ago"
    return _COLUMNS.format(name, version, status.get("condition"), proved, audited, heard, said).rstrip() + "\n"
