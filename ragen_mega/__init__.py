"""StarPO (arXiv:2504.20073) on Megatron-Core: reinforcement learning of language-model agents over
whole trajectories.

    from ragen_mega import evaluate, parse
    from ragen_mega.train import train

    summary = train(parse(["--recipe", "bandit", "--name", "first"]))
    print(evaluate("runs/first", "bandit"))

What the command line does, as functions; see docs/api.md.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "StarPOConfig": "ragen_mega.config",
    "parse": "ragen_mega.config",
    "evaluate": "ragen_mega.run.evaluation",
    "read_run": "ragen_mega.report.reader",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import the requested name: flags and names are read long before torch is needed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
