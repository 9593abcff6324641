"""The prompt before each answer: the whole trajectory, or the task and a window of turns.

Past answers keep the tokens that were sampled, even in a new window: it is assembled from token
deltas, and nothing is tokenised again.
"""

from collections import deque
from collections.abc import Sequence

from ragen_mega.environments.episode import Episode
from ragen_mega.environments.protocol import Message
from ragen_mega.rollout.renderer import ChatRenderer


class Context:
    """The tokens that the policy continues from, in one trajectory."""

    def __init__(self, renderer: ChatRenderer, episode: Episode, window: int) -> None:
        """`window`: turns that the policy sees, the current one included; 0: all."""
        self._renderer = renderer
        self._episode = episode
        # Messages that began a turn, and the tokens that answered them.
        self._turns: deque[tuple[Sequence[Message], list[int]]] = deque(maxlen=window or 1)
        self._window = window
        self.tokens: list[int] = []
        self.num_recorded = 0
        """Number of first tokens for which an engine has given the recorded fields: with the last
        sampled token they come with the next answer.
        """

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """Return the first prompt."""
        self.tokens = self._renderer.start(messages, self._episode.tools)
        self._present = messages
        return self.tokens[:]

    def answer(self, tokens: list[int]) -> None:
        """Note that the policy has sampled `tokens`."""
        self.tokens += tokens
        self.num_recorded = len(self.tokens) - 1
        self._turns.append((self._present, tokens))

    def go_on(self, messages: Sequence[Message]) -> tuple[list[int], bool]:
        """Begin the next turn with `messages`. Returns the tokens to append, and whether they are a
        whole new prompt, because a turn has left the window.
        """
        self._present = messages
        if not self._window or len(self._turns) < self._window:
            added = self._observe(self._turns[-1][1], messages)
            self.tokens += added
            return added, False
        seen = list(self._turns)[1:]  # with the current turn, as many as the window holds
        firsts = [*(before for before, _ in seen), messages]
        prompt = self._renderer.start(self._episode.beginning(firsts[0]), self._episode.tools)
        for (_, tokens), following in zip(seen, firsts[1:], strict=True):
            prompt += tokens + self._observe(tokens, following)
        self.tokens, self.num_recorded = prompt, 0
        return prompt[:], True

    def _observe(self, answer: list[int], messages: Sequence[Message]) -> list[int]:
        is_ended = answer[-1:] == [self._renderer.end_of_turn]
        return self._renderer.observe(messages, is_ended)
