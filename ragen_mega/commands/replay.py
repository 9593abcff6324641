"""Repeat a step of a run from its files and compare with what the run logged.

    ragen-mega replay --run runs/NAME --step 12 --json out.json
    ragen-mega replay --run runs/NAME --step 12 --num-ranks 2 --tensor-model-parallel-size 2

Starts as many ranks as the run had, on the layout that config.json records, unless flags say
another. Begins with the newest intact checkpoint at or before the step, goes through the rollouts
on the disk up to the step, and repeats its advantages, losses and gradients. On the layout of the
run the numbers are equal to the bit, on another to rounding, which the steps between amplify
(--tolerance); there it leaves out metrics of computed tokens, which the layout decides. Does not
go through a start of the run that changed settings of training. Writes nothing into the run.

    ragen-mega replay --run runs/NAME --step 12 --agent-calls

plays the agents of the step again with the recorded answers in place of the model, and compares
their requests, tokens and rewards. Answers that were not trained are not in the record.
Exit code 0 if all numbers agree, 1 if some do not, 2 for bad input.
"""

import argparse
import sys

from ragen_mega.commands.command_line import JSON, any_path, command, flag, relaunch
from ragen_mega.config.recorded import read_recorded, unknown_note
from ragen_mega.ranks.launcher import is_rank


@command(
    __doc__,
    flag("--run", "run directory", type=any_path, required=True),
    flag("--step", "the step to repeat, as metrics.jsonl numbers it", type=int, required=True),
    flag("--tolerance", "of a number, relative to max(1, |logged|)", 1e-4),
    flag("--num-ranks", "of the replay (default: as many as the run had)", type=int),
    flag("--tensor-model-parallel-size", "of the replay (default: the run's)", type=int),
    flag("--pipeline-model-parallel-size", "of the replay (default: the run's)", type=int),
    flag("--expert-model-parallel-size", "of the replay (default: the run's)", type=int),
    flag("--context-parallel-size", "of the replay (default: the run's)", type=int),
    flag(
        "--use-distributed-optimizer",
        "in the replay (default: as the run)",
        action=argparse.BooleanOptionalAction,
    ),
    flag(
        "--agent-calls",
        "play the agents of the step again, answered from the record",
        False,
    ),
    JSON,
)
def main(arguments: argparse.Namespace) -> int:
    note = unknown_note(read_recorded(arguments.run))
    if not is_rank():
        if note:
            print(note, file=sys.stderr)
        print(
            f"step {arguments.step} of {arguments.run}: loading the program that trains",
            file=sys.stderr,
            flush=True,
        )
    # Only here, for it brings torch, which takes seconds.
    from ragen_mega.commands.replayed_step import (
        read_config,
        read_row,
        replay,
        replay_agents,
        report,
    )
    from ragen_mega.ranks import collectives
    from ragen_mega.report.metrics import METRICS_FILE, write_json

    if arguments.agent_calls:
        lines = replay_agents(arguments)
        print("\n".join(lines))
        if arguments.json:
            write_json(arguments.json, {"equal": len(lines) == 1, "said": lines})
        return min(1, len(lines) - 1)
    config, num_ranks = read_config(arguments)
    read_row(config.run_directory / METRICS_FILE, arguments.step)  # before ranks begin
    relaunch(num_ranks, "replay", arguments.argv)
    result = replay(arguments)
    if collectives.is_main():
        report(result)
        if arguments.json:
            write_json(arguments.json, result)
    collectives.stop()
    return 0 if result["equal"] else 1
