"""What tests of the examples share."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparrowrl.examples.gsm8k_grpo.model import TINY, prepare


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the tiny random model."""
    return prepare(TINY, tmp_path_factory.mktemp("models"), lambda text: None)
