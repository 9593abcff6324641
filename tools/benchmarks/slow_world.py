"""An environment that takes its time and accepts any text, for measurements of overlap."""

import time
from typing import Any

from ragen_mega.environments.protocol import StepResult


class SlowWorld:
    """Every step takes `latency` seconds; an episode ends with its turns."""

    instruction = "Say anything."

    def __init__(self, latency: float = 0.1) -> None:
        self.latency = latency

    def reset(self, seed: int) -> str:
        return f"Board {seed % 10}"

    def parse(self, text: str) -> list[str]:
        """Return the whole text as one step."""
        return [text]

    def step(self, action: Any) -> StepResult:
        time.sleep(self.latency)
        return StepResult("Go on", reward=float(len(action) % 2), terminated=False)
