"""The comparison of exported weights with the trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparrowrl.examples.gsm8k_grpo.proof import compare_export


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(3, 5), "b": torch.tensor([0.0, 1.0, float("inf")])}


def exported(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = tmp_path / "export.safetensors"
    save_file(tensors, path)
    return path


def test_equal_weights_agree(tmp_path: Path) -> None:
    path = exported(tmp_path, {name: weight.bfloat16() for name, weight in weights().items()})
    check = compare_export(path, weights(), torch.bfloat16)
    assert (check.tensors, check.elements, check.different, check.first_difference) == (2, 18, 0, None)


def test_one_bit_is_found(tmp_path: Path) -> None:
    tensors = {name: weight.bfloat16() for name, weight in weights().items()}
    tensors["a"].view(torch.int16)[1, 2] ^= 1
    check = compare_export(exported(tmp_path, tensors), weights(), torch.bfloat16)
    assert check.different == 1
    assert check.first_difference is not None and check.first_difference.startswith("a: element 7: expected bits 0x")


def test_zeros_of_either_sign_differ(tmp_path: Path) -> None:
    tensors = {name: weight.bfloat16() for name, weight in weights().items()}
    tensors["b"][0] = -0.0
    check = compare_export(exported(tmp_path, tensors), weights(), torch.bfloat16)
    assert (check.different, check.first_difference) == (1, "b: element 0: expected bits 0x0, got 0x8000")


@pytest.mark.parametrize(
    ("change", "different"),
    [({"b": None}, 3), ({"c": torch.zeros(4)}, 4), ({"b": torch.zeros(4)}, 3), ({"b": torch.zeros(3).half()}, 3)],
)
def test_missing_extra_and_other_tensors_count_whole(
    tmp_path: Path, change: dict[str, torch.Tensor | None], different: int
) -> None:
    tensors = {name: weight for name, weight in {**weights(), **change}.items() if weight is not None}
    assert compare_export(exported(tmp_path, tensors), weights(), torch.float32).different == different
