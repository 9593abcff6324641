"""Flags of the environments and of their limits."""

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from ragen_mega.config.sections.agent import is_agent
from ragen_mega.config.sections.section import (
    Bounds,
    Count,
    Natural,
    NonNegative,
    OnlyWith,
    PathName,
    Section,
    Share,
)
from ragen_mega.environments.protocol import Budget
from ragen_mega.environments.registry import held_out_options
from ragen_mega.system.paths import expanded

TASKS = "tasks:"
"""Beginning of the name of an environment that has the rows of a file as tasks."""
_OPTIONS = '{"sokoban": {"observation": "grid"}}'
_CURRICULUM = f'{{"0": {_OPTIONS}, "30": {{}}}}'
_NAME_AND_SHARE = re.compile(r"(?s)(.+?://(?:\[.*?\]|[^:/]*)(?::\d+)?(?:/.*?)?|.*?)(?::(\d+))?")
"""A number after a colon is the share, but after the host of a URL it is the port."""


def parse_shares(environments: str) -> dict[str, int]:
    """Parse `sokoban:4,my_module:Mine` into {"sokoban": 4, "my_module:Mine": 1}. Raises ValueError
    for anything else than distinct names with positive shares.
    """
    shares: dict[str, int] = {}
    for part in environments.split(","):
        found = _NAME_AND_SHARE.fullmatch(part.strip())
        assert found is not None  # any text is a name
        name, share = found.groups("1")
        if int(share) == 0 or not name or name in shares:
            raise ValueError(
                "environments must be distinct names with positive shares, not"
                f" {environments!r}; write e.g. sokoban:4,frozen_lake:4"
            )
        shares[name] = int(share)
    return shares


def is_task_file(name: str) -> bool:
    """Return whether the environment with this name has the rows of a file as tasks."""
    return name.startswith(TASKS)


@dataclass(frozen=True)
class EnvironmentConfig(Section):
    """Environments that are played, and the limits of an episode."""

    environments: str = "frozen_lake"
    """Environments and their shares of the groups of a step, e.g. `frozen_lake`,
    `sokoban:4,frozen_lake:4` or, of a file my_module.py, `my_module:MyEnvironment`. For questions
    with reference answers `--tasks FILE [--score my_module:score] [--mcp SERVER]` stands for
    `tasks:FILE`.
    """
    eval_environments: str = ""
    """Further environments, separated by commas, that are evaluated beside those that are trained,
    e.g. `sokoban_large,frozen_lake`.
    """
    environment_options: str = "{}"
    """JSON object of options per environment, e.g. '{"sokoban": {"observation": "grid_coord"}}'."""
    curriculum: str = "{}"
    """JSON object: step -> options per environment that training adds to environment_options from
    that step on. Evaluation never uses them. E.g. '{"0": {"sokoban": {"max_shortest": 5}}, "30":
    {}}'.
    """
    curriculum_success: Share | None = None
    """Curriculum by success: tasks of a difficulty are drawn once this share of the episodes of the
    difficulty below is solved; half of the tasks are of the hardest one that is open. For
    environments whose states have an attribute `difficulty`, a whole number. E.g. 0.8.
    """
    max_turns: Count | None = None
    """Turns per trajectory, K (default: the environment's, else 5)."""
    max_actions_per_turn: Count | None = None
    """Actions executed per turn; more are dropped (default: the environment's, else 5)."""
    max_actions: Count | None = None
    """Actions per trajectory (default: the environment's, else 10; without limit where it sets its
    own turns or takes text).
    """
    max_response_length: Count | None = None
    """Tokens that may be sampled in one turn (default: the environment's, else 400)."""
    format_penalty: Annotated[float, Bounds("at most 0", -math.inf, 0)] | None = None
    """Reward of a turn whose answer cannot be parsed or holds an unknown action, added to what it
    earned (default: the environment's, else -0.1).
    """
    think: bool = True
    """Force a `<think>` at the start of every turn. Otherwise the chat template begins an answer
    without thoughts in its own way.
    """
    prompt_style: Literal["full", "system", "brief", "compact"] = "full"
    """Places that state the task, the budget and the format: `full` the first user message and
    every turn, `system` the system message and every turn, `brief` the system message alone,
    `compact` none (small models).
    """
    prompt_examples: Natural = 0
    """Worked examples that every prompt shows as earlier turns, so that a pretrained model learns
    the form of an answer: scripted play on seeds that nothing else uses, the first turn of an
    episode where answers are names of actions, else the whole episode.
    """
    prompt_examples_file: Annotated[
        PathName | None, OnlyWith("prompt_examples", "--prompt-examples 2")
    ] = None
    """File of JSON lines, {"messages": [{"role": "user", "content": ...}, {"role": "assistant",
    ...}]}, whose first conversations are the examples instead; with {"environment": NAME} the
    examples of one environment.
    """
    system_prompt: str | None = None
    """A text with which the system message of every prompt begins; an empty text leaves out the
    text of --prompt-style full (default: "You're a helpful assistant." there, nothing in other
    styles and before an environment's own messages).
    """
    environment_timeout: NonNegative = 60.0
    """Seconds an environment may take for a turn (0: no limit). An episode that takes longer is
    closed and played once more.
    """

    environment_processes: Natural = 0
    """Processes of each rank in which environments live that hold the interpreter while they
    compute (0: none, they live in threads). An agent runs in as many, one episode at a time in
    each, with OPENAI_BASE_URL, OPENAI_API_KEY and Anthropic's alike in its environment.
    """

    def check(self) -> None:
        base = json_object("environment_options", self.environment_options)
        self._check_options("environment_options", base, self.evaluated)
        for step, options in json_object("curriculum", self.curriculum, _CURRICULUM).items():
            if not step.isdigit():
                raise ValueError(
                    f"curriculum maps steps to options, but {step!r} is no step; write e.g. "
                    '\'{"0": {"sokoban": {"max_shortest": 5}}}\''
                )
            self._check_options("curriculum", options, self.shares)
        if self.curriculum_success is not None and self.curriculum_steps:
            raise ValueError(
                "curriculum_success chooses among the states of one set of options, and curriculum"
                " changes them; drop --curriculum or --curriculum-success"
            )

    def located(self) -> Self:
        given = json.loads(self.environment_options)
        found = {name: with_directory(name, given.get(name, {})) for name in self.evaluated}
        found = {name: options for name, options in found.items() if options != given.get(name, {})}
        text = json.dumps(given | found) if found else self.environment_options
        return replace(super().located(), environment_options=text)

    def with_terms(self, terms: Sequence[str]) -> Self:
        """Return the section in which these terms of the reward are options of tasks of files."""
        if not terms and '"terms"' not in self.environment_options:
            return self
        options = json.loads(self.environment_options)
        for name in self.evaluated:
            if is_task_file(name):
                options[name] = options.get(name, {}) | {"terms": [*terms]}
        return replace(self, environment_options=json.dumps(options))

    def _check_options(self, flag: str, options: Any, played: Collection[str]) -> None:
        if not isinstance(options, dict) or not all(
            isinstance(value, dict) for value in options.values()
        ):
            raise ValueError(
                f"{flag} must map environment names to objects, not {options!r}; "
                'write e.g. \'{"sokoban": {"observation": "grid"}}\''
            )
        if unknown := set(options) - set(played):
            raise ValueError(
                f"{flag} names {', '.join(sorted(unknown))}, which is not trained; write"
                f" {' or '.join(self.shares)}, or add it to --environments"
            )

    @property
    def expected_turns(self) -> int:
        """Return the turns of a trajectory at most, as far as flags say it."""
        return self.max_turns or Budget().max_turns

    @property
    def expected_response_length(self) -> int:
        """Return the tokens of a turn at most, as far as flags say it."""
        return self.max_response_length or Budget().max_response_length

    @property
    def shares(self) -> dict[str, int]:
        """Return environment name -> share of the groups."""
        return parse_shares(self.environments)

    @property
    def worlds(self) -> list[str]:
        """Environments that are trained on, but for agents."""
        return [name for name in self.shares if not is_agent(name)]

    @property
    def evaluated(self) -> list[str]:
        """List the environments that are trained, then those that are only evaluated."""
        others = [name for part in self.eval_environments.split(",") if (name := part.strip())]
        if len({*self.shares, *others}) < len(self.shares) + len(others):
            raise ValueError(
                f"eval_environments must be distinct and not among {', '.join(self.shares)}, which"
                f" are evaluated anyway; they are {self.eval_environments!r}"
            )
        return [*self.shares, *others]

    def options(self, name: str) -> dict[str, Any]:
        """Return the options of one environment's constructor."""
        return json.loads(self.environment_options).get(name, {})

    def evaluation_options(self, name: str) -> dict[str, Any]:
        """Return the options under which an environment is evaluated: on tasks that are not trained
        on, where it tells them apart and `options` do not say otherwise.
        """
        return held_out_options(name) | self.options(name)

    def training_options(self, name: str, step: int) -> dict[str, Any]:
        """Return the options under which a training step plays: `options` and the options of the
        curriculum's latest entry.
        """
        entries = json.loads(self.curriculum)
        latest = max((key for key in entries if int(key) <= step), key=int, default=None)
        return self.options(name) | entries.get(latest, {}).get(name, {})

    @property
    def curriculum_steps(self) -> set[int]:
        """List the steps from which on other tasks are played."""
        return set(map(int, json.loads(self.curriculum)))


def with_directory(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an environment. If it reads files, their relative paths begin in its
    option `directory`, by default the working directory.
    """
    family = name.partition(":")[0]
    options = dict(options)
    if family == "tasks" or (family == "agent" and "tasks" in options):
        options["directory"] = os.path.abspath(expanded(options.get("directory", "")))
    if family == "webshop" and options.get("data"):
        options["data"] = os.path.abspath(expanded(options["data"]))
    return options


def json_object(flag: str, text: str, example: str = _OPTIONS) -> dict[str, Any]:
    """Read the JSON object that the text of a flag holds. Raises ValueError, with an example, if it
    holds none.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{flag} must be a JSON object, not {text!r} ({error}); write it in single quotes, e.g."
            f" '{example}'"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{flag} must be a JSON object, not {text!r}; write e.g. '{example}'")
    return value
