"""Flags, checked before anything heavy is imported: what the launch script does first.

    python -m ragen_mega.run.check NUM_RANKS [flags]

Exit code 0: go on; 2: one line says why not; HELPED: --help has been printed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ragen_mega.config import parse
from ragen_mega.config.cli import DEFAULT_RECIPE
from ragen_mega.report.console import fail

HELPED = 100


def check(flags: Sequence[str], num_ranks: int | None) -> None:
    """Raise ValueError, in one line, if flags or layout cannot work on so many ranks of one node
    (None: torchrun will count them).
    """
    config = parse(flags, recipe=DEFAULT_RECIPE)
    if num_ranks is not None:
        config.parallel.check_world(num_ranks)
        config.rollout.num_engines(num_ranks, num_ranks)
    python = config.rollout.sglang_python
    if python is not None and not Path(python).exists():
        raise ValueError(
            f"sglang_python {python} does not exist; give the interpreter of an environment that"
            " has SGLang, e.g. the one that tools/setup_sglang_cpu.sh makes"
        )


def main() -> None:
    num_ranks, *flags = sys.argv[1:]
    try:
        check(flags, int(num_ranks) if num_ranks.isdigit() else None)
    except ValueError as error:
        fail(str(error))
    except SystemExit:  # parse has printed the help
        raise SystemExit(HELPED) from None


if __name__ == "__main__":
    main()
