"""Flags of agents: programs that ask for completions at the door."""

from dataclasses import dataclass
from typing import Literal

from ragen_mega.config.sections.section import NonNegative, Section

PREFIX = "agent:"
"""Start of the names of environments that are agents."""


def is_agent(name: str) -> bool:
    """Return whether the environment with this name is an agent."""
    return name.startswith(PREFIX)


@dataclass(frozen=True)
class AgentConfig(Section):
    """Agents of --agent, which ask a server of the run as they ask OpenAI or Anthropic."""

    agent_reward: str | None = None
    """Import path of a function `reward(episode)`, which gets task, calls, result and error of an
    episode and returns its reward, or a dict as an agent does (default: the agent returns it).
    """
    agent_timeout: NonNegative = 600.0
    """Seconds that an agent may take for an episode, its completions included (0: no limit); one
    that takes longer is closed and played once more. They count from the last answer to another
    episode of the agent, for an episode may wait for others, and not while a server is replaced.
    """
    agent_listen: str = "127.0.0.1:0"
    """HOST:PORT at which agents ask; port 0 is any free one, and another port is raised by the
    number of the rank. 0.0.0.0 lets agents of other machines and of containers in.
    """
    agent_sampling: Literal["trainer", "agent"] = "trainer"
    """Side whose temperature and top_p hold: `trainer` ignores the request's settings; `agent`
    keeps them, and answers that were drawn in another way than the trainer's are not trained.
    """
    train_roles: str = ""
    """Names of models, separated by commas, whose answers are trained; others only play (default:
    all that the agent asks for).
    """
    agent_example: str | None = None
    """Import path of a function `example(messages, tools)` that returns the message of the
    assistant, as text or with tool_calls: the warm start imitates the agent with it as its model.
    """

    @property
    def trained_roles(self) -> frozenset[str]:
        """Return the roles that are trained; empty if all are."""
        return frozenset(name.strip() for name in self.train_roles.split(",") if name.strip())

    def listen_on(self, rank: int) -> str:
        """Return HOST:PORT at which a rank listens."""
        host, _, port = self.agent_listen.rpartition(":")
        return f"{host}:{int(port) + rank if int(port) else 0}"

    def check(self) -> None:
        host, _, port = self.agent_listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(
                f"agent_listen must be HOST:PORT, not {self.agent_listen!r}; write e.g. 127.0.0.1:0"
            )
