"""Verdicts on trajectories from a server of the user: a judge, a test suite, a reward model.

They are requested after a rollout has been played and are stored with it, so that all ranks and all
replays from disk see the same; `--reward` names a judge by its URL. Request and answer are JSON
objects:

    POST {"environment": ..., "text": ..., "responses": [...], "return": ..., "success": ...}
    <- {"score": number}
"""

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from ragen_mega.algorithm.rewards import VERDICTS
from ragen_mega.algorithm.tables import is_judge
from ragen_mega.data.types import Trajectory, TrajectoryGroup
from ragen_mega.environments.calls import MAX_REWARD
from ragen_mega.ranks.collectives import on_main
from ragen_mega.rollout.engine import EngineError
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.system.web_client import open_client

ATTEMPTS = 3
_PAUSE = 0.5  # seconds before the second attempt; twice that before the third
AT_ONCE = 32
AUTHORIZATION = "RAGEN_JUDGE_AUTHORIZATION"
"""The variable with the credentials of judges: flags are visible to others, and are recorded."""
_REFUSALS = (httpx2.HTTPError, httpx2.InvalidURL)
_NO_SCORE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""Errors of an answer that is no JSON, nests too deeply, or holds no number."""


class Verifier:
    """Client of one server; asks every question only once."""

    def __init__(self, url: str, *, timeout: float | None) -> None:
        """`timeout`: seconds for one answer, from the request to its last byte. The value of
        RAGEN_JUDGE_AUTHORIZATION, if it is set, is sent as the header Authorization.
        """
        self.url = url
        self._timeout = timeout
        self._known: dict[str, float] = {}

    def scores(self, questions: Sequence[dict[str, Any]]) -> tuple[list[float | None], str]:
        """Return the server's score of each question, None if three attempts gave no finite number,
        and one example of a reason.
        """
        keys = [json.dumps(question, sort_keys=True) for question in questions]
        digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
        new = {digest: key for digest, key in zip(digests, keys) if digest not in self._known}
        with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in this one
            answers = thread.submit(asyncio.run, self._ask_all([*new.values()])).result()
        self._known |= {
            digest: answer for digest, answer in zip(new, answers) if isinstance(answer, float)
        }
        reason = next((answer for answer in answers if isinstance(answer, str)), "")
        return [self._known.get(digest) for digest in digests], reason

    async def _ask_all(self, bodies: Sequence[str]) -> list[float | str]:
        room, headers = asyncio.Semaphore(AT_ONCE), {"content-type": "application/json"}
        async with open_client(self.url, AUTHORIZATION, headers=headers) as client:
            return await asyncio.gather(*(self._ask(client, room, body) for body in bodies))

    async def _ask(
        self, client: httpx2.AsyncClient, room: asyncio.Semaphore, body: str
    ) -> float | str:
        """Return a score, or the reason why there is none."""
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PAUSE * attempt)
            try:
                # httpx2's own limit is on silence, which a byte now and then breaks for ever.
                async with room, asyncio.timeout(self._timeout):
                    answer = await client.post(self.url, content=body)
                score = float(json.loads(answer.raise_for_status().content)["score"])
                if abs(score) <= MAX_REWARD:
                    return score
                reason = f"score {score}"
            except TimeoutError:
                reason = f"no whole answer within {self._timeout:g} s"
            except (*_REFUSALS, *_NO_SCORE) as error:
                reason = f"{type(error).__name__}: {error}"
        return " ".join(reason.split())


class Verifiers:
    """The judges among the rewards of a run."""

    def __init__(self, rewards: Iterable[str], *, timeout: float | None) -> None:
        self._judges = [Verifier(name, timeout=timeout) for name in rewards if is_judge(name)]

    def judge(self, groups: Sequence[TrajectoryGroup], renderer: ChatRenderer) -> int:
        """Write the verdicts into the info of the last turns, the same on all ranks; returns how
        many are missing. Collective. Raises EngineError on all ranks if a judge gave no verdict.
        """
        if not self._judges:
            return 0
        played = [
            trajectory for group in groups for trajectory in group.trajectories if trajectory.turns
        ]
        verdicts = on_main(
            lambda: [
                judge.scores([question(trajectory, renderer) for trajectory in played])
                for judge in self._judges
            ]
        )
        for judge, (scores, reason) in zip(self._judges, verdicts, strict=True):
            if played and all(score is None for score in scores):
                raise EngineError(
                    f"the judge {judge.url} gave no verdict on {len(scores)} trajectories"
                    f" ({reason}); mend it and go on with --resume"
                )
            for trajectory, score in zip(played, scores, strict=True):
                trajectory.turns[-1].info.setdefault(VERDICTS, {})[judge.url] = score
        return sum(score is None for scores, _ in verdicts for score in scores)


def question(trajectory: Trajectory, renderer: ChatRenderer) -> dict[str, Any]:
    """Return the request to a judge about one trajectory."""
    tokens = list(trajectory.tokens)
    return {
        "environment": trajectory.environment,
        "text": renderer.tokenizer.decode(tokens),
        "responses": [
            renderer.decode_action(tokens[turn.start : turn.end]) for turn in trajectory.turns
        ],
        "return": trajectory.total_reward,
        "success": trajectory.success,
    }
