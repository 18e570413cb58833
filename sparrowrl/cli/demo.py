"""`sparrowrl demo`: GRPO on GSM8K with a live vLLM engine that follows the trainer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparrowrl.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Add the command and its flags."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small model with GRPO while a vLLM server follows it, and prove that they agree",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2, tiny, a checkpoint's folder, or a Hugging Face name")
    add("--data", type=Path, help="problems in GSM8K's format, JSON lines (default: 24 that come with the demo)")
    add("--steps", type=int, default=8, help="updates, each one a version")
    add("--lr", type=float, default=1e-5, help="learning rate of AdamW")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of the engine's weights")
    add("--tensor-parallel-size", type=int, default=1, help="of the engine")
    add("--port", type=int, help="of the vLLM server (default: a free one)")
    add("--out", type=Path, default=Path("runs/demo"), help="folder for logs, journal and report")
    add("--cache", type=Path, default=Path.home() / ".cache" / "sparrowrl", help="folder for converted checkpoints")
    add("--group-size", type=int, default=8, help="completions of a prompt")
    add("--prompts", type=int, default=2, help="prompts of a step")
    add("--max-tokens", type=int, default=64, help="longest completion")
    add("--seed", type=int, default=0, help="of the order of problems and of the engine's sampling")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo: 0 if every version became active exactly, nothing was aborted and the audit agreed, else 3."""
    try:
        from sparrowrl.examples.gsm8k_grpo.demo import main
        from sparrowrl.examples.gsm8k_grpo.settings import Settings
        from sparrowrl.examples.gsm8k_grpo.tasks import SAMPLE
    except ModuleNotFoundError as error:
        raise ConfigError(f"the demo needs the package {error.name}: pip install 'sparrowrl[demo,vllm]'") from error
    names = ("model", "steps", "lr", "dtype", "tensor_parallel_size", "port", "out", "cache", "group_size", "prompts")
    values = {name: getattr(args, name) for name in (*names, "max_tokens", "seed")}
    return 0 if main(Settings(**values, data=args.data or SAMPLE)) else 3
