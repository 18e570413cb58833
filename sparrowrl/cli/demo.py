"""`sparrowrl demo`: GRPO on GSM8K with a live vLLM engine that follows the trainer."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sparrowrl.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


DTYPES = ("bfloat16", "float16", "float32")
CACHE = Path.home() / ".cache" / "sparrowrl"


def add_parser(subparsers: Subparsers) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("demo", help="train and serve a small model here, in sync", description=__doc__)
    add = parser.add_argument
    add(
        "--model",
        default="smollm2",
        help="smollm2 (135M-Instruct), tiny, a checkpoint folder, or a Hugging Face name (default: %(default)s)",
    )
    add(
        "--data", type=Path, metavar="FILE", help="problems in GSM8K's JSON lines (default: 24 that come with the demo)"
    )
    add("--steps", type=int, default=8, metavar="N", help="updates, each one a version (default: %(default)s)")
    add("--lr", type=float, default=1e-5, metavar="RATE", help="learning rate of AdamW (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=DTYPES, help="of the engine's weights (default: %(default)s)")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="of the engine (default: %(default)s)")
    add("--port", type=int, metavar="P", help="of the vLLM server (default: a free one)")
    add("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="logs and report (default: %(default)s)")
    add("--cache", type=Path, default=CACHE, metavar="DIR", help="converted checkpoints (default: %(default)s)")
    add("--group-size", type=int, default=4, metavar="N", help="completions of a prompt (default: %(default)s)")
    add("--prompts", type=int, default=2, metavar="N", help="prompts of a step (default: %(default)s)")
    add("--max-tokens", type=int, default=64, metavar="N", help="longest completion (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of problem order and sampling (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo: 0 if every version became active exactly, nothing was aborted and the audit agreed, else 3."""
    try:
        from sparrowrl.examples.gsm8k_grpo.demo import main
        from sparrowrl.examples.gsm8k_grpo.settings import Settings
        from sparrowrl.examples.gsm8k_grpo.tasks import SAMPLE
    except ModuleNotFoundError as error:
        raise ConfigError(f"the demo needs the package {error.name}: pip install 'sparrowrl[demo,vllm]'") from error
    logging.getLogger().setLevel(logging.WARNING)  # the table says what the publisher would log
    names = ("model", "steps", "lr", "dtype", "tensor_parallel_size", "port", "out", "cache", "group_size", "prompts")
    values = {name: getattr(args, name) for name in (*names, "max_tokens", "seed")}
    return 0 if main(Settings(**values, data=args.data or SAMPLE)) else 3
