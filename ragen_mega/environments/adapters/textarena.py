"""Single-player games of TextArena, e.g. `textarena:GuessTheNumber-v0`.

Interface: TextArena 0.7 (Guertler et al., arXiv:2504.11442). The
prompts and the moves in square brackets are the game's; the observation is what the game has said
since the last move.
"""

from typing import Any

from ragen_mega.environments.adapters.packages import ProcessRandomness, required
from ragen_mega.environments.protocol import StepResult

_WON = 1


class TextArenaGame:
    """A single-player game. The reward comes at the end: 1 for a win, else the share of the task
    that was done, as counted by the game.
    """

    max_turns: int

    def __init__(self, game: str, /, **options: Any) -> None:
        """`options` are keywords of the game. Raises ValueError for a game that is unknown or needs
        several players, for an unknown option, and if TextArena is not installed.
        """
        arena = required("textarena:make", "textarena")
        self._player = arena.ObservationType.PLAYER_ACTION
        self._random = ProcessRandomness()
        try:
            raw = arena.make(f"{game.removesuffix('-raw')}-raw", **options)
            self._game = arena.wrappers.ActionFormattingWrapper(raw)
            self.reset(0)
        except (AssertionError, TypeError) as error:
            raise ValueError(f"textarena:{game} cannot be played alone: {error}") from error
        if limit := self._game.state.max_turns:
            self.max_turns = limit

    def reset(self, seed: int, outcome_seed: int | None = None) -> str:
        self._random.seed(seed)
        with self._random.installed():
            self._game.reset(num_players=1, seed=seed)
        if outcome_seed is not None:
            self._random.seed(outcome_seed)
        return self._new_messages()

    def step(self, text: str) -> StepResult:
        with self._random.installed():
            is_over, _ = self._game.step(text)
        state = self._game.state
        reward = float(state.rewards[0]) if is_over else 0.0
        is_invalid = state.error_count > 0 or state.game_info[0]["invalid_move"]
        said = self._new_messages()
        return StepResult(
            said or str(state.game_info[0].get("reason") or "The game goes on."),
            reward,
            is_over,
            info={
                "success": is_over and not is_invalid and reward >= _WON,
                "is_action_valid": not is_invalid,
                "is_action_effective": not is_invalid,
            },
        )

    def _new_messages(self) -> str:
        """Return the messages of the game since the last call, without the player's own words."""
        _, messages = self._game.get_observation()
        return "\n".join(
            text.strip() for _, text, kind in messages if kind is not self._player
        ).strip()
