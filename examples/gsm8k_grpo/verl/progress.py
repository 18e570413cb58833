"""What verl has logged so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparrowrl.examples.gsm8k_grpo import step_table

_STEP = "training/global_step"
_REWARD = "critic/rewards/mean"


class Progress:
    """Follows the file of verl's "file" logger."""

    def __init__(self, metrics: Path) -> None:
        self._path = metrics
        self._read = 0
        self.trained = 0  # steps
        self.wrong = 0  # of them with live weights that were not proved

    def news(self) -> list[str]:
        """A line for each step that verl has logged since the last call."""
        lines = []
        for entry in self._entries():
            self.trained = max(self.trained, int(entry["step"]))
            metrics = dict(entry["data"])
            self.wrong += step_table.is_wrong(metrics)
            if _STEP in metrics:
                known = {"step": metrics[_STEP], **({"reward": metrics[_REWARD]} if _REWARD in metrics else {})}
                lines.append(step_table.row({**metrics, **known}))
        return lines

    def _entries(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        return [json.loads(line) for line in whole.splitlines()]
