"""Environments of the verifiers hub, one of each kind, as modules that a user would install."""

from typing import Any

SUMS = '''
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int


class Sum(vf.Task[Data]):
    """One answer, and two rewards with weights."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)


class Config(vf.TasksetConfig):
    largest: int = 20


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for number in range(self.config.largest):
            prompt = f"What is {number} + {number}?"
            yield Sum(
                Data(prompt=prompt, system_prompt="Answer with a number.", answer=2 * number),
                self.config.task,
            )


__all__ = ["Sums"]
'''

GUESS = '''
import verifiers.v1 as vf


class Data(vf.TaskData):
    number: int


class Guess(vf.Task[Data]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "no idea"


class Guesses(vf.Taskset[Guess]):
    def load(self):
        for number in range(10):
            prompt = f"Guess my number from 0 to 9, game {number}."
            yield Guess(Data(prompt=prompt, number=number), self.config.task)


class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[Config]):
    """Several turns with a user, who says higher or lower."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and said.last_reply != str(task.data.number):
                is_low = said.last_reply < str(task.data.number)
                said = await talk.turn("higher" if is_low else "lower")
        found = talk.trace.last_reply == str(task.data.number)
        talk.trace.record_reward("found", found / talk.trace.num_turns)


__all__ = ["Guesses", "Game"]
'''

LOOKUP = '''
import verifiers.v1 as vf

MEANINGS = {"ash": "red", "oak": "blue", "yew": "green"}


class Dictionary(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def look_up(self, name: str) -> str:
        """The meaning of a name."""
        return MEANINGS[name]


class Data(vf.TaskData):
    name_asked: str


class Lookup(vf.Task[Data]):
    """A tool that has no memory, and may fail."""

    @classmethod
    def toolsets(cls, config):
        return [Dictionary(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == MEANINGS[self.data.name_asked])


class Lookups(vf.Taskset[Lookup]):
    def load(self):
        for name in MEANINGS:
            yield Lookup(Data(prompt=f"What does {name} mean?", name_asked=name), self.config.task)


__all__ = ["Lookups"]

if __name__ == "__main__":
    Dictionary.run()
'''

BANK = '''
import verifiers.v1 as vf


class Account(vf.State):
    balance: int = 0
    moves: int = 0


class Data(vf.TaskData):
    start: int
    target: int


class Bank(vf.Toolset[vf.ToolsetConfig, Account]):
    TOOL_PREFIX = None

    async def setup_task(self, task):
        self.step = 5 if task.start else 1

    @vf.tool
    async def deposit(self, amount: int) -> str:
        """Move an amount onto the account."""
        self.state.balance += amount * self.step
        self.state.moves += 1
        return f"balance {self.state.balance} after {self.state.moves}"


class Saving(vf.Task[Data, Account]):
    """A tool that changes the state of the episode, which a stop and the reward read."""

    @classmethod
    def toolsets(cls, config):
        return [Bank(vf.ToolsetConfig())]

    async def setup(self, trace, runtime):
        trace.state.balance = self.data.start

    @vf.stop
    async def saved(self, trace: vf.Trace) -> bool:
        return trace.state.balance == self.data.target

    @vf.reward
    async def reached(self, trace: vf.Trace) -> float:
        return float(trace.state.balance == self.data.target) / max(1, trace.state.moves)


class Savings(vf.Taskset[Saving]):
    def load(self):
        for start in range(0, 12, 3):
            prompt = f"You have {start}. Save {start + 10}."
            yield Saving(Data(prompt=prompt, start=start, target=start + 10), self.config.task)


__all__ = ["Savings"]

if __name__ == "__main__":
    Bank.run()
'''

MODULES = {"sums_v1": SUMS, "guess_v1": GUESS, "lookup_v1": LOOKUP, "bank_v1": BANK}


def _call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


WRITTEN = [
    ("sums_v1", "What is 7 + 7?", [("14", None)], 1.5),
    ("sums_v1", "What is 7 + 7?", [("fifteen", None)], 0.0),
    (
        "guess_v1",
        "Guess my number from 0 to 9, game 3.",
        [("5", None), ("2", None), ("3", None)],
        1 / 3,
    ),
    (
        "lookup_v1",
        "What does oak mean?",
        [
            ("Let me see.", _call("dictionary_look_up", name="elm")),
            ("", _call("dictionary_look_up", name="oak")),
            ("blue", None),
        ],
        1.0,
    ),
    ("lookup_v1", "What does oak mean?", [("", _call("guess", name="oak")), ("red", None)], 0.0),
    (
        "bank_v1",
        "You have 3. Save 13.",
        [("", _call("deposit", amount=1)), ("", _call("deposit", amount=1))],
        0.5,
    ),
]
"""Taskset, prompt, answers and the reward, by hand."""

ENDLESS = """
import itertools

import verifiers.v1 as vf


class Echo(vf.Task[vf.TaskData]):
    @vf.reward
    async def same(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.prompt)


class Echoes(vf.Taskset[Echo]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield Echo(vf.TaskData(prompt=f"echo {number}"), self.config.task)


class Config(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(AGENT)


class Runs(vf.Env[Config]):
    async def run(self, task, agents):
        for _ in range(NUM_RUNS):
            await agents.agent.run(task)


__all__ = ["Echoes", "Runs"]
"""


def echoes(agent: str = "", num_runs: int = 1) -> str:
    """A module whose agent has these settings and runs so often in an episode."""
    return ENDLESS.replace("AGENT", agent).replace("NUM_RUNS", str(num_runs))
