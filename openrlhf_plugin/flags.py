"""Our flags on OpenRLHF's command line, in its own parser: so `--help` has them, and all its processes get them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

from sparrowrl.errors import SparrowError
from sparrowrl.job.options import Options
from sparrowrl.openrlhf_plugin import support

BACKEND = "sparrow"
KEY = "--sparrow."
_SYNC_BACKEND = "--vllm.sync_backend"
_STOCK_BACKEND = "nccl"
_RUN = "openrlhf"  # unless the user names it

# Name, type, metavar and help; docs/jobs.md says more.
_FLAGS: tuple[tuple[str, type, str, str], ...] = (
    (
        "journal_dir",
        str,
        "DIR",
        "absolute path where versions stay for a job that is resumed; none: temporary",
    ),
    ("run", str, "NAME", "name of the run in the journal"),
    ("listen", str, "IP", "address on which the trainer's first node serves engines"),
    ("address", str, "HOST|URL", "what engines connect to instead: a host name, or the address of a proxy"),
    ("port", int, "N", "port of the hub; 0: any free one"),
    ("connections", int, "N", "streams that an engine fetches with"),
    ("codec", str, "NAME", "how deltas are coded"),
    ("in_flight", str, "keep|drain", "what happens to running requests when an engine switches"),
    ("audit_every", int, "N", "recompute the fingerprints of all live weights at every n-th version; 0: never"),
    ("anchor_every", int, "N", "also write every n-th version whole; 0: never"),
    ("keep_versions", int, "N", "keep the deltas of the last n versions; 0: all"),
    ("timeout", int, "S", "seconds that each wait of a sync may take"),
)


def backend_of(argv: Sequence[str]) -> str:
    """The sync backend that the command line asks for, read as OpenRLHF's parser reads it."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(_SYNC_BACKEND, default=_STOCK_BACKEND)
    return str(parser.parse_known_args(list(argv))[0].__dict__[_SYNC_BACKEND.lstrip("-")])


def options(args: Any) -> Options:
    """Our options from OpenRLHF's arguments, as all of its processes have them. Raises ConfigError."""
    return _options(vars(args.sparrow))


def _options(given: dict[str, Any]) -> Options:
    return Options.from_mapping(KEY, {"run": _RUN, **given})


@contextmanager
def added(argv: Sequence[str]) -> Iterator[None]:
    """Inside, OpenRLHF's parser has our flags too, if its command line asks for our backend or for help."""
    stock = argparse.ArgumentParser.parse_args
    asked = backend_of(argv) == BACKEND or not {"-h", "--help"}.isdisjoint(argv)
    parse = _parse if asked else _parse_without
    argparse.ArgumentParser.parse_args = partialmethod(parse, stock)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = stock  # type: ignore[method-assign]


def _parse(parser: argparse.ArgumentParser, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Parse with our flags, and end the program with status 2 where what they ask for cannot be done.

    Other parsers than OpenRLHF's, if there are any, parse as ever.
    """
    if _SYNC_BACKEND not in parser._option_string_actions:
        return stock(parser, *args, **kwargs)
    defaults = Options(KEY, run=_RUN)
    group = parser.add_argument_group("sparrow", f"For {_SYNC_BACKEND} {BACKEND}; see docs/openrlhf.md of sparrowrl.")
    for name, kind, metavar, text in _FLAGS:
        default = getattr(defaults, name)
        said = f"{text} (default: {default if default is not None else 'none'})"
        group.add_argument(KEY + name, type=kind, default=default, metavar=metavar, help=said)
    parsed = stock(parser, *args, **kwargs)
    try:
        support.check_arguments(vars(parsed))
        _options({name: getattr(parsed, f"sparrow.{name}") for name, *_ in _FLAGS})
    except SparrowError as error:
        parser.exit(2, f"{type(error).__name__}: {error}\n")  # without the usage, which is longer than a screen
    return parsed


def _parse_without(parser: argparse.ArgumentParser, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Parse as OpenRLHF does, which takes a backend that it does not know for NCCL, so ours must not be miswritten."""
    parsed = stock(parser, *args, **kwargs)
    backend = str(vars(parsed).get(_SYNC_BACKEND.lstrip("-")))
    if backend.strip().casefold() == BACKEND:
        parser.exit(2, f"ConfigError: {_SYNC_BACKEND}: expected {BACKEND}, got {backend!r}\n")
    return parsed
