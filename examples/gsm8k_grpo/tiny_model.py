"""The checkpoint of the tiny job: a random Qwen3 whose tokens are bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sparrowrl.examples.gsm8k_grpo.model import TINY, prepare, quiet


def make(target: Path, seed: int) -> None:
    """Write model and tokenizer into `target`. The model has exactly the tokenizer's tokens, which verl relies on."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    quiet()
    with tempfile.TemporaryDirectory() as cache:
        tokenizer = AutoTokenizer.from_pretrained(prepare(TINY, Path(cache), lambda text: None))
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
