"""Worked examples, which a prompt shows as earlier turns with their answers, and files of
conversations.

A pretrained model that is only told the form of an answer may never write it; two examples show
it (few-shot prompting, arXiv:2005.14165).
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ragen_mega.environments.actions import read_response
from ragen_mega.environments.episode import Episode
from ragen_mega.environments.messages import as_texts, read_messages
from ragen_mega.environments.protocol import Message
from ragen_mega.environments.random_player import is_drawn
from ragen_mega.environments.scripted import scripted_response
from ragen_mega.system.json_lines import json_lines

Conversation = tuple[Message, ...]


def worked_example(
    episode: Episode, seeds: Iterable[int], held_out: frozenset[str]
) -> Conversation:
    """Return turns of an episode without its task, with the answers of the scripted player, who
    plays as well as the solver where there is one: the first turn where answers are names of
    actions, for it shows their form, else all of the solver's. The state belongs to the next of the
    `seeds` that is not `held_out`.

    Raises ValueError if the world cannot read the answer, or its answers cannot be scripted.
    """
    environment, think = episode.environment, episode.config.think
    for seed in seeds:
        messages: Sequence[Message] = episode.start(seed, outcome_seed=seed)
        if not isinstance(episode.observation, str) or episode.observation not in held_out:
            break
    else:
        raise ValueError("all of its states are evaluated on")
    if not is_drawn(episode):
        raise ValueError("its answers cannot be scripted without random_answer(draw)")
    skill = 1.0 if getattr(environment, "solver", None) else 0.0
    generator = np.random.default_rng(seed)
    said: list[Message] = []
    while not said or (skill and not episode.takes_names and not episode.done):
        said += [
            Message(message.role, message.content.removeprefix(episode.task))
            for message in messages
            if message.role != "system"
        ]
        answer = scripted_response(episode, generator, skill=skill, in_sentences=True)
        read = read_response(
            environment, answer, think=think, max_actions=episode.budget.max_actions_per_turn
        )
        if not read.is_action_valid:
            raise ValueError("its answers cannot be scripted")
        said.append(Message("assistant", "<think>" * think + answer))
        messages = episode.respond(answer).messages
    return tuple(said)


def read_conversations(path: str | Path, environment: str | None = None) -> list[Conversation]:
    """Read the conversations of a file of JSON lines: objects with `messages`, as TRL and the
    OpenAI API write them, and perhaps the name of the `environment` that they are of (None: read
    all).

    Raises ValueError, in one line, for a file without any for this environment, and for a
    conversation that does not begin with a message of the user, or of the system before it, and end
    with an answer.
    """
    rule = (
        'must be an object such as {"messages": [{"role": "user", "content": "..."}, {"role":'
        ' "assistant", "content": "<think>...</think><answer>...</answer>"}]}'
    )
    try:
        rows = [*json_lines(path)]
    except OSError as error:
        raise ValueError(f"{path} must be a file of conversations ({error})") from None
    found = []
    for number, row in rows:
        try:
            messages = tuple(as_texts(read_messages("messages", row.get("messages"))))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}; {rule}") from None
        roles = " ".join(str(message.role) for message in messages)
        if not re.fullmatch("(system )?user (user |tool |assistant )*assistant", roles):
            raise ValueError(
                f"{path}, line {number}: a conversation must be messages of a user, with those of"
                " the system before and of tools after it, and end with one of the assistant; its"
                f" roles are {roles or 'none'}"
            )
        if environment in (None, row.get("environment", environment)):
            found.append(messages)
    if not found:
        whose = f" of {environment}" if environment else ""
        raise ValueError(f"{path} must hold conversations{whose}, and has none: a line {rule}")
    return found
