"""Which initial states are played, and how: in training fresh ones, never an evaluation board; in
evaluation fixed ones.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ragen_mega.config import EnvironmentConfig, RolloutConfig, StarPOConfig
from ragen_mega.environments import calls
from ragen_mega.environments.boards import Board, has_packaged_boards, load_boards
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.processes import HostedEnvironment
from ragen_mega.environments.reference_players import Prompt
from ragen_mega.environments.registry import make
from ragen_mega.rollout.collector import PlaySettings, Task, tasks_for_group

TRAINING_SEEDS = (1_000_000, 1_000_000_000)
"""Training draws prompt seeds from this range; evaluation sets and held-out checks use smaller
ones.
"""


def episode_config(config: EnvironmentConfig) -> EpisodeConfig:
    """Budgets and wording of every episode of a run."""
    return EpisodeConfig(
        max_turns=config.max_turns,
        max_actions_per_turn=config.max_actions_per_turn,
        max_actions=config.max_actions,
        format_penalty=config.format_penalty,
        think=config.think,
        prompt_style=config.prompt_style,
    )


def episode_maker(
    config: EnvironmentConfig,
    name: str,
    step: int | None = None,
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[[], Episode]:
    """A function that builds one episode of environment `name`, with the curriculum of a training
    `step` or with other `options`, if given.
    """
    rules = episode_config(config)
    if options is None:
        options = config.options(name) if step is None else config.training_options(name, step)
    if config.environment_processes:
        hosting = (config.environment_processes, config.environment_timeout)
        build = partial(HostedEnvironment, name, options, *hosting)
    else:
        build = partial(make, name, **options)
    return lambda: Episode(build(), rules)


def play_settings(
    rollout: RolloutConfig, environment: EnvironmentConfig, *, temperature: float, seed: int
) -> PlaySettings:
    """How a run samples, in training or, at another temperature, in evaluation."""
    return PlaySettings(
        max_response_length=rollout.max_response_length,
        max_context_length=rollout.max_context_length,
        context_window=rollout.context_window,
        temperature=temperature,
        seed=seed,
        environment_timeout=environment.environment_timeout,
    )


class TaskSampler:
    """Groups of training tasks, a pure function of seed, step and round."""

    def __init__(self, config: StarPOConfig) -> None:
        self.config = config
        shares = config.environment.shares
        rotation = [name for name, share in shares.items() for _ in range(share)]
        self._names = [rotation[i % len(rotation)] for i in range(config.rollout.num_groups)]
        self._held_out = {name: held_out_states(config.environment, name) for name in shares}

    def sample(self, step: int, sampling_round: int = 0) -> list[list[Task]]:
        """The P groups of N tasks of a step, or of a further round of it."""
        further = [sampling_round] if sampling_round else []
        generator = np.random.default_rng([self.config.train.seed, step, *further])
        num_groups, group_size = self.config.rollout.num_groups, self.config.rollout.group_size
        first = (step * self.config.rollout.max_sampling_rounds + sampling_round) * num_groups
        makers = {
            name: episode_maker(self.config.environment, name, step) for name in set(self._names)
        }
        return [
            tasks_for_group(
                first + index,
                name,
                self._fresh_seed(makers[name], self._held_out[name], generator),
                makers[name],
                group_size=group_size,
                outcome_seed=self.config.train.seed,
            )
            for index, name in enumerate(self._names)
        ]

    @staticmethod
    def _fresh_seed(
        make_episode: Callable[[], Episode],
        held_out: frozenset[str],
        generator: np.random.Generator,
    ) -> int:
        """A training seed whose initial state is not an evaluation board."""
        seed = int(generator.integers(*TRAINING_SEEDS))
        if held_out:
            episode = make_episode()
            while initial_state(episode, seed) in held_out:
                seed = int(generator.integers(*TRAINING_SEEDS))
        return seed


def initial_state(episode: Episode, seed: int, board: Sequence[str] | None = None) -> str:
    """The first observation, by which boards are told apart."""
    return calls.reset(episode.environment, seed, board=board)


def held_out_states(config: EnvironmentConfig, name: str) -> frozenset[str]:
    """First observations of the packaged evaluation boards of `name`; empty if it has none."""
    boards = evaluation_boards(config, name)
    if not boards:
        return frozenset()
    episode = episode_maker(config, name)()
    return frozenset(initial_state(episode, board.seed, board.rows) for board in boards)


def evaluation_boards(
    config: EnvironmentConfig, name: str, path: str | None = None
) -> list[Board] | None:
    """Boards to evaluate environment `name` on: those of the file `path`, the packaged ones, or
    None where it has none.

    Raises ValueError if a file is given that holds none for this environment.
    """
    options = config.evaluation_options(name)
    if path is None:
        environment = make(name, **options)
        calls.close(environment)
        if not has_packaged_boards(environment):
            return None
    return load_boards(path, name, **options)


def evaluation_tasks(
    config: EnvironmentConfig,
    name: str,
    *,
    boards: Sequence[Board] | None,
    num_prompts: int,
    samples_per_prompt: int = 1,
) -> list[list[Task]]:
    """Groups of tasks from the initial states of `evaluation_prompts`."""
    maker = episode_maker(config, name, options=config.evaluation_options(name))
    prompts = evaluation_prompts(config, name, boards, num_prompts)
    return [
        tasks_for_group(index, name, seed, maker, group_size=samples_per_prompt, board=rows)
        for index, (seed, rows) in enumerate(prompts)
    ]


def evaluation_prompts(
    config: EnvironmentConfig, name: str, boards: Sequence[Board] | None, num_prompts: int
) -> list[Prompt]:
    """Seeds and rows of at most `num_prompts` initial states: the given boards; the seeds 0, 1, ...
    of an environment that has a number of tasks (`num_tasks`); or the seeds 123, 124, ...
    """
    if boards:
        return [(board.seed, board.rows) for board in boards[:num_prompts]]
    environment = make(name, **config.evaluation_options(name))
    num_tasks = getattr(environment, "num_tasks", None)
    calls.close(environment)
    seeds = range(min(num_tasks, num_prompts)) if num_tasks else range(123, 123 + num_prompts)
    return [(seed, None) for seed in seeds]
