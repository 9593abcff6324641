"""Gymnasium view of the environments: importing this module registers `ragen_mega/Sokoban-v0` and
its siblings.

Interface: Gymnasium 1.x `Env` (Towers et al., arXiv:2407.17032); actions are indices, or text where
the environment takes text; observations are text.
"""

import re
from typing import Any

import gymnasium

from ragen_mega.environments import calls
from ragen_mega.environments.protocol import text_of
from ragen_mega.environments.registry import make, names

_MAX_EPISODE_STEPS = 100  # as in gym-sokoban and FrozenLake-v1
_MAX_DRAWN = 64


class AnyText(gymnasium.spaces.Text):
    """Every text, in any script and of any length; samples are short and ASCII."""

    def __init__(self) -> None:
        super().__init__(_MAX_DRAWN)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class TextWorld(gymnasium.Env[str, int | str]):
    """One of our environments, one primitive action a step.

    The seed of `reset` is the prompt seed, so the episode is the native environment's. `reset`
    understands the options `outcome_seed` and `board`.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(
        self, environment_name: str, render_mode: str | None = None, **options: Any
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode must be ansi or None, not {render_mode!r}")
        self.world = make(environment_name, **options)
        self.render_mode = render_mode
        self.takes_text = not hasattr(self.world, "actions")
        self.action_space = (
            AnyText() if self.takes_text else gymnasium.spaces.Discrete(len(self.world.actions))
        )
        self.observation_space = AnyText()
        self._observation = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        choices = dict(options or {})
        outcome_seed, board = choices.pop("outcome_seed", None), choices.pop("board", None)
        if choices:
            raise ValueError(
                f"unknown reset options {', '.join(map(str, choices))}; known are outcome_seed and"
                " board"
            )
        prompt_seed = int(self.np_random.integers(2**31)) if seed is None else seed
        self._observation = text_of(
            calls.reset(self.world, prompt_seed, outcome_seed=outcome_seed, board=board)
        )
        return self._observation, {"success": False}

    def step(self, action: int | str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            known = "text" if self.takes_text else f"an index into {', '.join(self.world.actions)}"
            raise ValueError(f"action must be {known}, not {action!r:.60}")
        result = calls.step(
            self.world, action if self.takes_text else self.world.actions[int(action)]
        )
        self._observation = text_of(result.observation)
        return self._observation, result.reward, result.terminated, result.truncated, result.info

    def close(self) -> None:
        calls.close(self.world)

    def render(self) -> str | None:  # type: ignore[override]
        return self._observation if self.render_mode == "ansi" else None


def environment_id(name: str) -> str:
    """Gymnasium's identifier of the environment `name`: sokoban_large is
    ragen_mega/SokobanLarge-v0. One that was registered after this module was imported gets its
    identifier here.
    """
    words = re.split(r"\W+|_", name)
    identifier = f"ragen_mega/{''.join(word[:1].upper() + word[1:] for word in words)}-v0"
    if identifier not in gymnasium.registry:
        gymnasium.register(
            identifier,
            entry_point="ragen_mega.environments.adapters.gymnasium:TextWorld",
            max_episode_steps=_MAX_EPISODE_STEPS,
            kwargs={"environment_name": name},
        )
    return identifier


for _name in names():
    environment_id(_name)
