"""The initial states that are played: fresh ones in training, never an evaluation board; fixed ones
in evaluation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ragen_mega.algorithm.filters import has_return
from ragen_mega.config import EnvironmentConfig, StarPOConfig
from ragen_mega.config.cli import read_words
from ragen_mega.config.rules import Sections
from ragen_mega.config.sections.agent import is_agent
from ragen_mega.config.sections.environment import is_task_file
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.environments import calls
from ragen_mega.environments.boards import (
    Board,
    accepts,
    has_packaged_boards,
    held_out_seeds,
    load_boards,
)
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.examples import Conversation, read_conversations, worked_example
from ragen_mega.environments.pool import EnvironmentFailed, Worker, briefly
from ragen_mega.environments.processes import builder, opened
from ragen_mega.environments.protocol import Observation, text_seed
from ragen_mega.environments.reference_players import Prompt
from ragen_mega.environments.registry import ENVIRONMENTS
from ragen_mega.ranks.collectives import on_main
from ragen_mega.rollout.curriculum import LEAST_SHARE, Levels
from ragen_mega.rollout.player import PlaySettings, Task, no_room
from ragen_mega.rollout.renderer import ChatRenderer

TRAINING_SEEDS = (1_000_000, 1_000_000_000)
"""Training draws prompt seeds from this range; evaluation sets and held-out checks use smaller
ones.
"""
SCRIPTED_SEEDS = 100_000
"""First prompt seed of scripted play: above the evaluation sets, below training."""
_EXAMPLE_SEEDS = range(900_000, 1_000_000)
"""Seeds of the examples in prompts: above the seeds of scripted play, below the seeds of training.
"""
_REPEATED_STARTS = 5
_PROBED = 256
"""Training seeds whose difficulties are looked at before the first step."""
_MOST_DRAWS = 1000
"""Seeds that are tried for an initial state that is not held out."""
_MOST_DRAWS_OF_LEVEL = 4000
"""Seeds that are tried for one that is also of a level of the curriculum by success, which may be
rarer than the states that were looked at say, see `LEAST_SHARE`.
"""


def episode_config(config: EnvironmentConfig) -> EpisodeConfig:
    """Return the budgets and the wording of every episode of a run."""
    return EpisodeConfig(
        max_turns=config.max_turns,
        max_actions_per_turn=config.max_actions_per_turn,
        max_actions=config.max_actions,
        max_response_length=config.max_response_length,
        format_penalty=config.format_penalty,
        think=config.think,
        prompt_style=config.prompt_style,
        system_prompt=config.system_prompt,
    )


def episode_maker(
    config: EnvironmentConfig,
    name: str,
    step: int | None = None,
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[[], Episode]:
    """Return a function that builds one episode of environment `name`, with the curriculum of a
    training `step` or with other `options`, if given.
    """
    rules = episode_config(config)
    if options is None:
        options = config.options(name) if step is None else config.training_options(name, step)
    build = builder(config, name, options)
    return lambda: Episode(build(), rules, prompt_examples(config, name))


def forget_files() -> None:
    """Read files of examples and boards anew, which may have changed since another run."""
    prompt_examples.cache_clear()
    _held_out_boards.cache_clear()


@lru_cache(maxsize=64)
def prompt_examples(config: EnvironmentConfig, name: str) -> Conversation:
    """Return the messages of the examples that every prompt of environment `name` shows: the same
    in every episode, so that all prompts begin alike.

    Raises ValueError, in one line, if there are fewer or scripted play of `name` gives none.
    """
    count, file = config.prompt_examples, config.prompt_examples_file
    if not count:
        return ()
    if file is not None:
        found = read_conversations(file, name)
        if len(found) < count:
            raise ValueError(
                f"prompt_examples ({count}) must be at most the {len(found)} conversations of"
                f" {name} in {file}; lower --prompt-examples"
            )
    else:
        seeds = iter(_EXAMPLE_SEEDS)
        held_out = held_out_states(config, name)
        kinds: Sequence[Mapping[str, Any]] = getattr(
            ENVIRONMENTS.get(name), "example_options", ({},)
        )
        found = [
            _worked_example(config, name, kinds[index % len(kinds)], seeds, held_out)
            for index in range(count)
        ]
    said = [message for conversation in found[:count] for message in conversation]
    return tuple(message for message in said if message.role != "system")


def _worked_example(
    config: EnvironmentConfig,
    name: str,
    options: Mapping[str, Any],
    seeds: Iterator[int],
    held_out: frozenset[Observation],
) -> Conversation:
    """Play an example within the time limit of the environment."""
    rules = replace(episode_config(config), system_prompt="")
    build = builder(config, name, {**config.options(name), **options})

    with briefly(name, lambda: Episode(build(), rules), config.environment_timeout) as opened:
        worker, episode = opened
        try:
            texts = frozenset(state for state in held_out if isinstance(state, str))
            return worker.wait(partial(worked_example, episode, seeds, texts))
        except EnvironmentFailed as error:
            raise ValueError(
                f"prompt_examples {config.prompt_examples} needs scripted play of {name} ({error});"
                " give --prompt-examples-file, or drop --prompt-examples"
            ) from error


def tasks_for_group(
    group_id: int,
    environment: str,
    seed: int,
    make_episode: Callable[[], Episode],
    *,
    group_size: int,
    outcome_seed: int = 0,
    board: Sequence[str] | None = None,
) -> list[Task]:
    """Return `group_size` tasks from one initial state, each with its own outcome.

    `outcome_seed` is the run's; the members' outcome seeds are derived from it, the initial seed
    and their index in the group.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, not {group_size}")
    return [
        Task(
            group_id,
            environment,
            seed,
            text_seed(repr(("outcome", outcome_seed, environment, seed, member))),
            None if board is None else tuple(board),
            make_episode,
        )
        for member in range(group_size)
    ]


def play_settings(
    config: Sections, *, temperature: float, seed: int, attempts: int = 1
) -> PlaySettings:
    """Return the settings by which a run samples: in training, where a failed trajectory gets
    another of its `attempts`, or at another temperature in evaluation, where it counts as it is.
    """
    # A host process times its own calls; a turn may have to wait for calls of other environments.
    is_hosted = config.environment.environment_processes > 0
    return PlaySettings(
        max_context_length=config.rollout.max_context_length,
        context_window=config.rollout.context_window,
        temperature=temperature,
        seed=seed,
        environment_timeout=0.0 if is_hosted else config.environment.environment_timeout,
        attempts=attempts,
        agent=config.agent,
        is_ordered=config.rollout.carry_over > 0,
    )


class TaskSampler:
    """Groups of training tasks, a pure function of seed, step and round; with a curriculum by
    success also of the success so far.
    """

    def __init__(self, config: StarPOConfig) -> None:
        self.config = config
        shares = config.environment.shares
        rotation = [name for name, share in shares.items() for _ in range(share)]
        self._names = [rotation[i % len(rotation)] for i in range(config.rollout.num_groups)]
        world, boards = config.environment, config.evaluation.boards
        self._held_out = {  # by the step from which a stage of the curriculum is played
            first: {name: held_out_states(world, name, boards, first) for name in shares}
            for first in sorted({0, *world.curriculum_steps})
        }
        self.levels: dict[str, Levels] = {}
        """Levels of difficulty of each environment that has several."""
        if world.curriculum_success is not None:
            found = {
                name: Levels(_difficulties(world, name), world.curriculum_success)
                for name in world.worlds
            }
            self.levels = {name: levels for name, levels in found.items() if len(levels.levels) > 1}
            if not self.levels:
                raise ValueError(
                    f"curriculum_success needs an environment whose states have an attribute"
                    f" difficulty with several values, each in {LEAST_SHARE:.1%} of the states or"
                    f" more, and {', '.join(found)} has none; drop --curriculum-success"
                )
        self._drawn: dict[int, int] = {}  # level of each group of the latest rollout
        self.moved: dict[str, tuple[int, int]] = {}
        """Hardest open level of an environment before and after success was last observed, where
        the two differ.
        """

    @property
    def has_changed(self) -> bool:
        """Whether a harder level opened when success was last observed. One that closes does not
        count: a collapse closes levels itself, and `--guard` has to see it.
        """
        return any(after > before for before, after in self.moved.values())

    def observe(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Record the success of the rollout that was sampled last; returns its metrics. Collective:
        the first rank alone knows the success of every trajectory.
        """
        if not self.levels:
            return {}
        results = on_main(lambda: self._results(groups))
        before = {name: levels.hardest_open for name, levels in self.levels.items()}
        for name, levels in self.levels.items():
            levels.observe(results[name])
        hardest = {name: levels.hardest_open for name, levels in self.levels.items()}
        self.moved = {
            name: (before[name], level) for name, level in hardest.items() if level != before[name]
        }
        return {f"level/{name}": float(level) for name, level in hardest.items()}

    def _results(self, groups: Sequence[TrajectoryGroup]) -> dict[str, dict[int, list[bool]]]:
        """Return environment -> level -> success of each trajectory that counts."""
        results: dict[str, dict[int, list[bool]]] = {name: {} for name in self.levels}
        for group in groups:
            name = group.trajectories[0].environment
            if name in results and group.group_id in self._drawn:
                level = self._drawn[group.group_id]
                successes = [each.success for each in group.trajectories if has_return(each)]
                results[name].setdefault(level, []).extend(successes)
        return results

    def sample_again(self, step: int, num_groups: int) -> None:
        """Note the levels of a rollout of so many groups that is read from the disk, so that
        `observe` knows them.
        """
        for each in range(num_groups // self.config.rollout.num_groups) if self.levels else ():
            self.sample(step, each)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, as JSON values."""
        return {name: levels.state_dict() for name, levels in self.levels.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the success of a checkpoint; with an empty state the levels begin anew."""
        for name, levels in self.levels.items():
            levels.load_state_dict(state.get(name, {}))
        self.moved = {}

    def sample(self, step: int, sampling_round: int = 0) -> list[list[Task]]:
        """Return the P groups of N tasks of a step, or of the step's further round. Collective: the
        first rank looks at states, since an environment that fails on one rank alone would draw
        other seeds there. Raises ValueError on all ranks if none is found.
        """
        drawn = on_main(partial(self._fresh_seeds, step, sampling_round))
        num_groups = self.config.rollout.num_groups
        first = (step * self.config.rollout.max_sampling_rounds + sampling_round) * num_groups
        if not sampling_round:
            self._drawn = {}
        self._drawn |= {
            group_id: level
            for group_id, (_, level) in enumerate(drawn, start=first)
            if level is not None
        }
        makers = {
            name: episode_maker(self.config.environment, name, step) for name in set(self._names)
        }
        return [
            tasks_for_group(
                group_id,
                name,
                seed,
                makers[name],
                group_size=self.config.rollout.group_size,
                outcome_seed=self.config.train.seed,
            )
            for group_id, (name, (seed, _)) in enumerate(zip(self._names, drawn), start=first)
        ]

    def _fresh_seeds(self, step: int, sampling_round: int) -> list[tuple[int, int | None]]:
        """Draw the seed of each group, and its level of the curriculum by success."""
        further = [sampling_round] if sampling_round else []
        generator = np.random.default_rng([self.config.train.seed, step, *further])
        world = self.config.environment
        held_out = self._held_out[max(stage for stage in self._held_out if stage <= step)]
        with ExitStack() as stack:
            opened = {
                name: stack.enter_context(
                    briefly(name, episode_maker(world, name, step), world.environment_timeout)
                )
                for name in sorted(set(self._names))
                if held_out[name] or name in self.levels
            }
            return [
                self._fresh_seed(name, opened.get(name), held_out[name], generator)
                for name in self._names
            ]

    def _fresh_seed(
        self,
        name: str,
        opened: tuple[Worker, Episode] | None,
        held_out: frozenset[Observation],
        generator: np.random.Generator,
    ) -> tuple[int, int | None]:
        """Return a training seed whose initial state is not an evaluation board, and whose level,
        which is returned too, the curriculum by success admits. `opened`: an episode to look at
        states with, if any seed may be wrong. Raises ValueError if environment `name` seems to draw
        none, or fails.
        """
        levels = self.levels.get(name)
        wanted = levels.wanted(generator.random()) if levels else frozenset()
        most = _MOST_DRAWS_OF_LEVEL if levels else _MOST_DRAWS
        for _ in range(most):
            seed = int(generator.integers(*TRAINING_SEEDS))
            if opened is None:
                return seed, None
            worker, episode = opened
            try:
                state = worker.wait(partial(calls.reset, episode.environment, seed))
            except EnvironmentFailed as error:
                raise ValueError(
                    f"{name} cannot begin with training seed {seed}: {error}; mend its reset, and"
                    " go on with --resume"
                ) from error
            if state in held_out:
                continue
            if levels is None:
                return seed, None
            assert hasattr(episode.environment, "difficulty")  # else there are no levels
            level = levels.level_of.get(int(episode.environment.difficulty))
            if level in wanted:
                return seed, level
        others = f", or no state of difficulty {max(wanted)}" if wanted else ""
        raise ValueError(
            f"{most} training seeds of {name} drew only boards that it is evaluated"
            f" on{others}; evaluate on other ones (--boards), or let reset draw from more"
        )


def _difficulties(config: EnvironmentConfig, name: str) -> list[int]:
    """Return the difficulties of some training seeds of environment `name`; none if its states have
    none.
    """
    with briefly(name, episode_maker(config, name), config.environment_timeout) as (worker, each):
        difficulties = []
        for seed in range(TRAINING_SEEDS[0], TRAINING_SEEDS[0] + _PROBED):
            worker.wait(partial(calls.reset, each.environment, seed))
            if not hasattr(each.environment, "difficulty"):
                return []
            difficulties.append(int(each.environment.difficulty))
        return difficulties


def draws_by_outcome(
    make_episode: Callable[[], Episode], seed: int, outcome_seeds: Sequence[int], timeout: float
) -> bool:
    """Return whether the first observations from a seed differ, and each follows from the outcome
    seed; False if a call of the environment takes more than `timeout` seconds (0: no limit).
    """
    try:
        with briefly("of the group", make_episode, timeout) as (worker, episode):
            first, *others = [
                [
                    worker.wait(partial(episode.start, seed, outcome_seed=drawn))
                    for drawn in outcome_seeds
                ]
                for _ in range(_REPEATED_STARTS)
            ]
    except (ValueError, EnvironmentFailed):
        return False
    return first[0] != first[-1] and all(other == first for other in others)


def held_out_states(
    config: EnvironmentConfig, name: str, boards: str | None = None, step: int | None = None
) -> frozenset[Observation]:
    """Return the first observations that evaluation boards have in environment `name`, with the
    curriculum of a training `step`, if given: a state may look otherwise there.

    They are the boards of all sets that are evaluated, as far as this environment can start from
    them: the packaged ones, and the boards of the file `boards`. The set is empty if there are
    none.
    """
    held_out = _held_out_boards(config, boards)
    if not held_out:
        return frozenset()
    options = config.options(name) if step is None else config.training_options(name, step)
    with opened(config, name, options) as (worker, environment):
        reset = partial(calls.reset, environment)
        try:
            return frozenset(
                worker.wait(partial(reset, board.seed, board=board.rows))
                for board in held_out
                if accepts(environment, board)
            )
        except EnvironmentFailed as error:
            raise ValueError(f"environment {name} cannot start from a board: {error}") from error


@lru_cache(maxsize=8)
def _held_out_boards(config: EnvironmentConfig, boards: str | None) -> tuple[Board, ...]:
    """Return the packaged boards of every set that is evaluated, and the boards of the file
    `boards` that fit one which is trained.
    """
    held_out: dict[Board, None] = {}
    for name in config.evaluated:
        options = config.evaluation_options(name)
        with opened(config, name, options) as (_, environment):
            files: list[str | None] = [None] if has_packaged_boards(environment) else []
        if boards is not None and name in config.shares:
            files.append(boards)
        for file in files:
            held_out |= dict.fromkeys(load_boards(file, name, **options))
    return tuple(held_out)


def evaluation_tasks(
    config: EnvironmentConfig,
    name: str,
    prompts: Sequence[Prompt],
    *,
    samples_per_prompt: int = 1,
) -> list[list[Task]]:
    """Return the groups of tasks from these initial states."""
    maker = episode_maker(config, name, options=config.evaluation_options(name))
    return [
        tasks_for_group(index, name, seed, maker, group_size=samples_per_prompt, board=rows)
        for index, (seed, rows) in enumerate(prompts)
    ]


def evaluation_prompts(
    config: EnvironmentConfig, name: str, num_prompts: int, boards: str | None = None
) -> list[Prompt]:
    """Return at most `num_prompts` initial states to evaluate environment `name` on: the boards of
    the file `boards`, the packaged ones, or the seeds of `held_out_seeds`.

    Raises ValueError if the environment cannot be built or none of the file's boards is for it.
    """
    options = config.evaluation_options(name)
    with opened(config, name, options) as (_, environment):
        seeds = held_out_seeds(name, environment, num_prompts)
        takes_boards = boards is not None or has_packaged_boards(environment)
    if not takes_boards:
        return [(seed, None) for seed in seeds]
    return [
        (board.seed, board.rows) for board in load_boards(boards, name, **options)[:num_prompts]
    ]


def held_out_note(name: str, num_found: int, num_asked: int) -> str | None:
    """Say that environment `name` has fewer initial states to evaluate on than were asked for."""
    if num_found >= num_asked:
        return None
    has_rows = name.partition(":")[0] in ("tasks", "agent")
    more = "; the option validation_share keeps more rows for it" if has_rows else ""
    return f"held-out initial states of {name}: {num_found} of the {num_asked} asked for{more}"


def reference_notes(config: EnvironmentConfig) -> list[str]:
    """Return a line for each environment that is trained on whose score does not take its own
    references for right answers.
    """
    notes = []
    for name in config.worlds:
        make_episode = episode_maker(config, name)
        with briefly(name, make_episode, config.environment_timeout) as (worker, episode):
            if judge := getattr(episode.environment, "judge_references", None):
                try:
                    note = worker.wait(judge)
                except EnvironmentFailed as error:
                    note = f"the score of a reference failed: {error}"
                notes += [f"{name}: {note}"] if note else []
    return notes


def check_first_prompts(
    config: StarPOConfig, prompts: Mapping[str, Sequence[Prompt]], renderer: ChatRenderer
) -> list[str]:
    """Raise ValueError if the first of the `prompts` that an environment is evaluated on, or one
    that it is trained on, fills the context, or if the longest row of a file does. One that does
    not begin may be away for a moment. Returns notes on rows that leave a loaded model less than
    the length of an answer, and on a style of prompts that none of them has.
    """
    world, room = config.environment, config.rollout.max_context_length
    notes, is_text = [], False
    first = [
        (name, episode_maker(world, name, options=world.evaluation_options(name)), *states[0])
        for name, states in prompts.items()
        if not is_agent(name)  # an agent writes its prompts while it plays
    ]
    trained = [
        (name, episode_maker(world, name, step=0), TRAINING_SEEDS[0], None) for name in world.worlds
    ]
    for name, make_episode, seed, board in first + trained:
        with briefly(name, make_episode, world.environment_timeout) as (worker, episode):
            tried, row = [(seed, name)], ""
            if is_task_file(name):
                rows: Any = episode.environment
                longest, row = rows.longest
                tried.append((longest, f"{name}, {row},"))
            for start_seed, what in tried:
                try:
                    start = partial(episode.start, start_seed, outcome_seed=start_seed, board=board)
                    messages = worker.wait(start)
                except EnvironmentFailed:
                    is_text = True  # perhaps
                    continue
                is_text |= isinstance(episode.observation, str)
                num_tokens = len(renderer.start(messages, episode.tools))
                if num_tokens >= room:
                    raise ValueError(no_room(what, num_tokens, room))
                needed = num_tokens + episode.budget.max_response_length
                if what != name and config.model.load is not None and needed > room:
                    notes.append(
                        f"{row} has {num_tokens} tokens, which leave {room - num_tokens} of"
                        f" --max-context-length {room} for an answer; raise it to {needed} for"
                        " answers of --max-response-length, or drop the row"
                    )
    if not is_text and world.prompt_style != _style_of_recipe(config.logging.recipe):
        notes.append(
            f"note: --prompt-style {world.prompt_style} leaves the first prompts of"
            f" {', '.join(world.evaluated)} as they are, for they come as messages"
        )
    return notes


def _style_of_recipe(recipe: str) -> str:
    given: dict[str, Any] = {}
    with suppress(ValueError):  # a recipe file may be gone when its run goes on
        given = read_words([f"--recipe={recipe}"]).get("environment", {})
    return given.get("prompt_style", EnvironmentConfig.prompt_style)
