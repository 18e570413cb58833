"""What OpenRLHF has logged so far."""

from __future__ import annotations

import re
from pathlib import Path

from sparrowrl.examples.gsm8k_grpo import step_table

# OpenRLHF's loggers write their files late; its log has every step at once, as a Python dict in a line.
_STEP = re.compile(rb"Global step (\d+): \{(.*)\}")
_NUMBER = re.compile(r"'([^']+)': (-?[\d.]+(?:e[+-]?\d+)?|-?inf|nan)[,}]")
_REWARD = "rollout/reward_mean"


class Progress:
    """Follows the log of a job, each step of which must be proved, or need not."""

    def __init__(self, log: Path, must_be_proved: bool) -> None:
        self._path, self._must_be_proved = log, must_be_proved
        self._read = 0
        self.trained = 0  # the last step
        self.wrong = 0  # steps with live weights that were not proved

    def news(self) -> list[str]:
        """A line for each step that was logged since the last call."""
        lines = []
        for step, metrics in self._steps():
            self.trained = max(self.trained, step)
            self.wrong += step_table.is_wrong(metrics, self._must_be_proved)
            known = {"step": float(step), **({"reward": metrics[_REWARD]} if _REWARD in metrics else {})}
            lines.append(step_table.row({**metrics, **known}))
        return lines

    def _steps(self) -> list[tuple[int, dict[str, float]]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        found = []
        for step, said in _STEP.findall(whole):
            pairs = _NUMBER.findall(said.decode(errors="replace") + "}")
            found.append((int(step), {key: float(value) for key, value in pairs}))
        return found
