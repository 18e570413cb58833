"""The `sparrowrl` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from sparrowrl.errors import ConfigError, FormatError, SparrowError, StateError, TransportError

# One module each in sparrowrl/cli, imported only when its command is run.
COMMANDS = {
    "init": "make the credentials of a new run",
    "hub": "serve a journal to engines and trainers",
    "engines": "show which engine is at which version",
    "agent": "fetch versions for the engine on this node",
    "demo": "train and serve a small model here, in sync",
    "inspect": "show what a journal, a run or an artifact holds",
    "verify": "check every byte of a journal, or a checkpoint against a version",
    "materialize": "write all weights of a version as a safetensors file",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 done, 1 an error, 2 wrong usage or configuration, 3 verification failed or damaged data, 4 the way to the hub,
    130 interrupted, 141 nobody reads the output any more. Errors are one line on standard error.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if sys.stdout is None:  # closed by the shell (>&-): nobody reads
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except SparrowError as error:
        return _fail(error, _status_of(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails once more
        return 141
    except OSError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="sparrowrl", description="Lossless sparse delta checkpoints for RL rollouts.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name != wanted:
            subparsers.add_parser(name, help=summary)
    if wanted not in COMMANDS:
        parser.parse_args(arguments)
        return 2
    module = import_module(f"sparrowrl.cli.{wanted}")
    module.add_parser(subparsers)
    return int(module.run(parser.parse_args(arguments)))


def _status_of(error: SparrowError) -> int:
    if isinstance(error, ConfigError):
        return 2
    if isinstance(error, (FormatError, StateError)):
        return 3
    return 4 if isinstance(error, TransportError) else 1


def _fail(error: Exception, status: int) -> int:
    message = " ".join(str(error).split())
    sys.stderr.write(f"sparrowrl: {type(error).__name__}: {message}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
