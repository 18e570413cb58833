"""Tiny random checkpoints of many model families, with what their engines need."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from helpers import skip_before

Tensors = dict[str, torch.Tensor]

VOCABULARY = 500  # vLLM pads it to 512; over two ranks each has 256 rows, of which the second pads 12
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_DENSE = {**_COMMON, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 160}
_EXPERTS = {**_DENSE, "moe_intermediate_size": 64, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Family:
    """How to make a checkpoint, and how an engine must be started on it."""

    config: str  # class of transformers
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)  # of vllm.LLM
    rewrite: Callable[[Tensors], Tensors] | None = None  # of the tensors that transformers would save
    dtype: torch.dtype = torch.bfloat16  # of the checkpoint, and so of the trainer
    wire_dtype: torch.dtype | None = torch.bfloat16  # of the publisher
    unused: str = ""  # for SPARROWRL_UNUSED
    quantisation: dict[str, Any] | None = None  # of the checkpoint: `quantization_config` of its config.json

    def keep_tied(self, weights: Tensors) -> None:
        """What a trainer of a tied model does by itself: its output head is its embedding."""
        if self.settings.get("tie_word_embeddings") and "lm_head.weight" in weights:
            weights["lm_head.weight"].copy_(weights["model.embed_tokens.weight"])


def _head_beside_its_embedding(tensors: Tensors) -> Tensors:
    """The output head in the checkpoint as well, with the bits of the embedding."""
    return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def _float32_bias(tensors: Tensors) -> Tensors:
    """The one tensor that DeepSeek's own checkpoints have in float32; not every transformers saves it so."""
    return {name: t.float() if name.endswith(".e_score_correction_bias") else t for name, t in tensors.items()}


def _frequencies(tensors: Tensors) -> Tensors:
    """A buffer that old checkpoints have, and that engines compute."""
    return {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16, dtype=torch.bfloat16)}


def _stack_experts(tensors: Tensors) -> Tensors:
    """Names and shapes of transformers 5 in memory: gate_up_proj [experts, 2 * intermediate, hidden], down_proj."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    stacked: Tensors = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(".experts.")
        number, _, kind = after.partition(".")
        if found and number.isdigit():
            parts.setdefault(f"{before}.experts.{kind.removesuffix('.weight')}", []).append((int(number), tensor))
        else:
            stacked[name] = tensor
    whole = {name: torch.stack([t for _, t in sorted(some, key=lambda s: s[0])]) for name, some in parts.items()}
    for name, tensor in whole.items():
        if name.endswith("gate_proj"):
            up = whole[name.replace("gate_proj", "up_proj")]
            stacked[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, up], dim=1)
        elif not name.endswith("up_proj"):
            stacked[name] = tensor
    return stacked


def _quantise(bits: int) -> Callable[[Tensors], Tensors]:
    """Weights as compressed-tensors has them: of 8 bits, or of 4 bits eight to a word in groups of 32."""

    def rewrite(tensors: Tensors) -> Tensors:
        done: Tensors = {}
        for name, tensor in tensors.items():
            if not name.endswith("_proj.weight"):
                done[name] = tensor
                continue
            rows, columns = tensor.shape
            groups = tensor.float().view(rows, 1 if bits == 8 else columns // 32, -1)
            scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
            whole = (groups / scale).round()
            if bits == 8:
                done[name] = whole.view(rows, columns).to(torch.int8)
            else:
                nibbles = (whole + 8).view(rows, columns // 8, 8).to(torch.int64) << torch.arange(0, 32, 4)
                done[name + "_packed"] = nibbles.sum(-1).to(torch.int32)
                done[name + "_shape"] = torch.tensor([rows, columns])
            done[name + "_scale"] = scale.view(rows, -1).bfloat16()
        return done

    return rewrite


def _quantisation(bits: int) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": 32}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **strategy}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if bits == 8:
        group["input_activations"] = {**weights, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_MLA = {
    **_COMMON,
    "num_key_value_heads": 4,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "q_lora_rank": None,
    "kv_lora_rank": 512,  # the CPU's kernel knows this one, as DeepSeek has it
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MLA_ARGUMENTS: dict[str, Any] = {"block_size": 16}
if torch.cpu._is_amx_tile_supported():  # else vLLM's CPU build takes a kernel that packs the projections out of reach
    _MLA_ARGUMENTS["attention_backend"] = "CPU_MLA"

FAMILIES: dict[str, Family] = {
    "qwen3": Family("Qwen3Config", _DENSE),
    "qwen3-tied": Family("Qwen3Config", {**_DENSE, "tie_word_embeddings": True}),
    "qwen3-both": Family("Qwen3Config", {**_DENSE, "tie_word_embeddings": True}, rewrite=_head_beside_its_embedding),
    "qwen3-equal": Family("Qwen3Config", _DENSE, rewrite=_head_beside_its_embedding),
    "qwen3-f32": Family("Qwen3Config", _DENSE, dtype=torch.float32),
    "qwen3-wire32": Family("Qwen3Config", _DENSE, dtype=torch.float32, wire_dtype=torch.float32),
    "qwen3-w4": Family(
        "Qwen3Config", {**_DENSE, "intermediate_size": 256}, rewrite=_quantise(4), quantisation=_quantisation(4)
    ),
    "qwen3-w8": Family("Qwen3Config", _DENSE, rewrite=_quantise(8), quantisation=_quantisation(8)),
    "llama": Family("LlamaConfig", _DENSE),
    "llama-tied": Family("LlamaConfig", {**_DENSE, "tie_word_embeddings": True}),
    "llama-unused": Family("LlamaConfig", _DENSE, rewrite=_frequencies, unused="*.inv_freq"),
    "llama-head": Family("LlamaConfig", _DENSE),  # whose engines' tests derive a float32 head
    "llama-470": Family("LlamaConfig", {**_DENSE, "vocab_size": 470}),
    "qwen2": Family("Qwen2Config", _DENSE),
    "gpt2": Family(
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 128,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": Family("Phi3Config", _DENSE),
    "gemma2": Family("Gemma2Config", {**_DENSE, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gemma3": Family("Gemma3TextConfig", {**_DENSE, "query_pre_attn_scalar": 32}),
    "qwen3-moe": Family("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4}),
    "qwen3-moe-stacked": Family("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4}, rewrite=_stack_experts),
    "mixtral": Family("MixtralConfig", {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": Family(
        "GptOssConfig",
        {
            **_DENSE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama4": Family(
        "Llama4TextConfig",
        {
            **_DENSE,
            "intermediate_size_mlp": 160,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "deepseek-v2": Family("DeepseekV2Config", _MLA, _MLA_ARGUMENTS),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        {**_MLA, "q_lora_rank": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        _MLA_ARGUMENTS,
        rewrite=_float32_bias,
        wire_dtype=None,
    ),
    "mamba2": Family(
        "Mamba2Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 1,
            "bos_token_id": 0,
        },
    ),
    "lfm2": Family(
        "Lfm2Config",
        {
            **_DENSE,
            "tie_word_embeddings": True,  # vLLM ties them whatever is said here
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,
            "block_dim": 128,
            "block_ff_dim": 160,
            "block_multiple_of": 1,
            "block_ffn_dim_multiplier": 1.0,
            "conv_dim_out": 128,
        },
    ),
    "falcon-h1": Family(
        "FalconH1Config",
        {
            **_DENSE,
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        {
            **_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "granite-moe-hybrid": Family(
        "GraniteMoeHybridConfig",
        {
            **_DENSE,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 160,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    ),
}

# vLLM 0.24 has no hook for llama-head; its CPU build has no MLA and no state-space kernels; its loaders drop stacked
# experts, or fail at gpt-oss.
SINCE_029 = {
    *("llama-head", "qwen3-moe-stacked", "gpt-oss", "deepseek-v2", "deepseek-v3"),
    *("mamba2", "lfm2", "falcon-h1", "qwen3-next", "granite-moe-hybrid"),
}


def make_model(folder: Path, name: str) -> Tensors:
    """Write the random checkpoint of a family into `folder` (made if need be); returns its tensors.

    Skips the test if the vLLM that is installed cannot run the family.
    """
    import transformers
    from safetensors.torch import load_file, save_file

    if name in SINCE_029:
        skip_before("0.29", f"runs {name}")
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**{"tie_word_embeddings": False, **family.settings})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=family.dtype)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    random = torch.Generator().manual_seed(1)
    tensors = {}
    for key, saved in sorted(load_file(path).items()):
        tensors[key] = (torch.randn(saved.shape, generator=random) * 0.2).to(saved.dtype)
    if family.rewrite is not None:
        tensors = family.rewrite(tensors)
    if family.quantisation is not None:
        config_file = folder / "config.json"
        known = json.loads(config_file.read_text())
        config_file.write_text(json.dumps({**known, "quantization_config": family.quantisation}))
    save_file(tensors, path, {"format": "pt"})
    return tensors


def save_checkpoint(source: Path, folder: Path, tensors: Tensors) -> Path:
    """A checkpoint with the configuration of `source` and other weights."""
    from safetensors.torch import save_file

    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder
