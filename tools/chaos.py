"""Kill training runs at random moments, damage their newest checkpoint, and see that nothing is
lost.

    python tools/chaos.py --rounds 30 --json chaos.json

A small run is started again and again with --resume. In every round one of its ranks gets SIGKILL
in a phase that is its turn (setup, rollout, update, checkpoint, finish), after a random delay; in
every second round a random file of the newest checkpoint is cut short or has bytes flipped
afterwards. A run that comes to its end is compared with one that nobody disturbed, and the next
begins, on another layout. With --sglang-python two layouts roll out with SGLang servers; in every
second round of such a run a process of a server is killed instead of a rank, again and again until
the run is finished. Exit code 1 if any of these fails:

- a round goes on from the newest checkpoint that was not damaged;
- after a kill of a rank no process of the run is left, within a time limit; after one of a server
the run goes on;
- the finished run logged every step once, with the metrics of the undisturbed run, and has its
parameters to the bit:
  no step is lost and no trajectory trained twice. No seed repeats what SGLang samples on a CPU;
  there, every step was trained on the tasks of the undisturbed run, each played once, and its
  metrics are those of the rollout on the disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from chaos_run import LAYOUTS, NUM_STEPS, RESUMED, Layout, Victim, identity, sglang_layouts

from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.rollout.summary import summarize

NOTHING = "nothing"
PHASES = ("setup", "rollout", "update", "checkpoint", "finish")
SECONDS_TO_START, SECONDS_TO_END, SECONDS_TO_VANISH = 300.0, 600.0, 90.0


@dataclass(frozen=True, slots=True)
class Round:
    """What was done to a run in one round, and how it took it."""

    layout: str
    target: str
    """Phase in which a rank was to be killed."""
    hit: str
    """Phase in which it was; `end` if the run was finished first."""
    server_kills: int
    """Times that a process of an SGLang server was killed."""
    damage: str | None
    begun: int | None
    """Step at which it began, which must be the newest sound checkpoint's, else 0; None if it was
    killed before that.
    """
    seconds_to_vanish: float
    """From the kill until no process of the run was left."""
    problems: list[str]


def damage(directory: Path, generator: random.Random) -> str:
    """Cut a random file of a checkpoint short, or flip up to eight of its bytes. Returns what was
    done.
    """
    path = generator.choice(sorted(path for path in directory.iterdir() if path.stat().st_size))
    content = bytearray(path.read_bytes())
    if generator.random() < 0.5:
        size = generator.randrange(len(content))
        path.write_bytes(content[:size])
        return f"{directory.name}/{path.name} cut from {len(content)} to {size} bytes"
    positions = generator.sample(range(len(content)), min(len(content), generator.randint(1, 8)))
    for position in positions:
        content[position] ^= generator.randint(1, 255)
    path.write_bytes(content)
    return f"{directory.name}/{path.name} with {len(positions)} of {len(content)} bytes changed"


def wait_for(run: Victim, launcher: subprocess.Popen[bytes], phase: str, num_logged: int) -> bool:
    """Until the run has logged so many steps and is in that phase; False if it ended first."""
    deadline = time.monotonic() + SECONDS_TO_START
    while run.phase() != phase or len(run.rows()) < num_logged:
        if launcher.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def vanish(run: Victim, launcher: subprocess.Popen[bytes]) -> tuple[float, list[str]]:
    """Wait until no process of the run is left. Returns the seconds, and a problem for those that
    had to be killed.
    """
    start = time.monotonic()
    while (left := run.processes()) and time.monotonic() - start < SECONDS_TO_VANISH:
        launcher.poll()
        time.sleep(0.05)
    seconds = time.monotonic() - start
    for process in left:
        process.kill()
    launcher.wait()
    return seconds, [f"{len(left)} processes were left after {seconds:.0f} s"] if left else []


def kill_servers(run: Victim, launcher: subprocess.Popen[bytes], generator: random.Random) -> int:
    """Kill a process of the run's server every few steps until the run ends. Returns how often."""
    count = 0
    while wait_for(
        run,
        launcher,
        generator.choice(("rollout", "update")),
        len(run.rows()) + generator.randint(1, 2),
    ):
        time.sleep(generator.expovariate(1 / 0.3))
        if servers := run.servers():
            generator.choice(servers).kill()
            count += 1
    return count


def kill_rank(
    run: Victim,
    launcher: subprocess.Popen[bytes],
    target: str,
    num_logged: int,
    generator: random.Random,
) -> str:
    """Kill a rank in phase `target`, `num_logged` steps into the run. Returns the phase; `end` if
    the run ended first.
    """
    if not wait_for(run, launcher, target, num_logged):
        return "end"
    time.sleep(
        generator.expovariate(
            1 / {"setup": 4.0, "rollout": 0.005, "checkpoint": 0.005}.get(target, 0.05)
        )
    )
    while not (ranks := run.ranks(launcher.pid)) and launcher.poll() is None:
        time.sleep(0.01)  # in setup the launcher may still be alone
    if not ranks:
        return "end"
    hit = run.phase()
    generator.choice(ranks).kill()
    return hit


def play_round(
    run: Victim,
    target: str,
    generator: random.Random,
    *,
    tainted: set[tuple[str, int]],
    damages: bool,
) -> Round:
    """Start the run, kill a rank in phase `target` (or servers, if it is `server`), damage a
    checkpoint if it is the turn.

    `tainted` holds the checkpoints damaged so far; the run must go on from the newest that is not
    among them.
    """
    expected = max((int(path.name.removeprefix("step_")) for path in run.sound(tainted)), default=0)
    launcher = run.start()
    hit, server_kills = "end", 0
    if target == "server":
        server_kills = kill_servers(run, launcher, generator)
    elif target != NOTHING:
        num_logged = 0 if target == "setup" else min(expected + generator.randrange(5), NUM_STEPS)
        hit = kill_rank(run, launcher, target, num_logged, generator)
    if hit == "end":
        launcher.wait(SECONDS_TO_END)
    seconds, problems = vanish(run, launcher)
    if hit == "end" and launcher.returncode:
        problems.append(f"the run ended with exit code {launcher.returncode}: {run.said()[-500:]}")
    resumed = RESUMED.search(run.said())
    begun = int(resumed.group(1)) if resumed else None if hit == "setup" else 0
    if begun not in (None, expected):
        problems.append(f"went on from step {begun} instead of {expected}")
    if "Traceback" in run.said():
        problems.append("a traceback was printed")
    damaged = None
    if damages and hit != "end" and (sound := run.sound(tainted)):
        damaged = damage(sound[0], generator)
        tainted.add(identity(sound[0]))
    return Round(run.layout.name, target, hit, server_kills, damaged, begun, seconds, problems)


def compare(run: Victim, undisturbed: Victim) -> list[str]:
    """How a finished run differs from one of the same flags that was left alone."""
    steps = [row["step"] for row in run.rows()]
    if steps != list(range(NUM_STEPS)):
        return [f"logged steps {steps}"]
    return (
        compare_tasks(run, undisturbed)
        if run.layout.has_servers
        else compare_bits(run, undisturbed)
    )


def compare_bits(run: Victim, undisturbed: Victim) -> list[str]:
    """How metrics and the tensors of the last checkpoint differ."""
    problems = []
    for row, expected in zip(run.rows(), undisturbed.rows(), strict=True):
        if keys := [key for key in expected if row.get(key) != expected[key]]:
            problems.append(
                f"step {row['step']} differs from the undisturbed run's in {', '.join(keys[:3])}"
            )
            break
    ours, theirs = run.parameters(), undisturbed.parameters()
    if ours.keys() != theirs.keys() or not all(
        torch.equal(value, theirs[key]) for key, value in ours.items()
    ):
        problems.append("the last checkpoint differs from the undisturbed run's")
    return problems


def compare_tasks(run: Victim, undisturbed: Victim) -> list[str]:
    """How the tasks that were trained on differ, or the logged metrics from those of the rollouts
    on the disk.
    """
    problems = []
    for row, ours, theirs in zip(run.rows(), run.trained(), undisturbed.trained(), strict=True):
        if _tasks(ours.groups) != _tasks(theirs.groups):
            problems.append(
                f"step {row['step']} was trained on other tasks than the undisturbed run's"
            )
        facts = summarize(ours.groups)
        if any(row.get(f"rollout/{key}") != value for key, value in facts.items()):
            problems.append(
                f"step {row['step']} has metrics that are not those of its rollout on the disk"
            )
    return problems


def _tasks(groups: list[TrajectoryGroup]) -> list[tuple[int, int, int]]:
    """Group, initial state and luck of every trajectory, in one order."""
    return sorted(
        (group.group_id, one.seed, one.outcome_seed)
        for group in groups
        for one in group.trajectories
    )


def undisturbed_runs(output: Path, layouts: Sequence[Layout]) -> Iterator[Victim]:
    """One run of every layout that nobody disturbs."""
    for layout in layouts:
        run = Victim(output, f"undisturbed_{layout.name}", layout)
        launcher = run.start()
        if launcher.wait(SECONDS_TO_END):
            raise SystemExit(f"error: the undisturbed run failed: {run.said()[-1000:]}")
        yield run


def torment(output: Path, layouts: Sequence[Layout], num_rounds: int, seed: int) -> dict[str, Any]:
    """Play all rounds; returns the report."""
    generator = random.Random(seed)
    undisturbed = {run.layout.name: run for run in undisturbed_runs(output, layouts)}
    print(f"undisturbed runs: {', '.join(undisturbed)}", flush=True)
    turns, targets = itertools.cycle(layouts), itertools.cycle(PHASES)
    rounds: list[Round] = []
    finished = 0
    while len(rounds) < num_rounds:
        layout = next(turns)
        run = Victim(output, f"tormented_{finished}_{layout.name}", layout)
        tainted: set[tuple[str, int]] = set()
        is_over, is_servers_turn = False, False
        while not is_over:
            # After the last round the run is left alone, so that it too is compared.
            target = (
                NOTHING
                if len(rounds) >= num_rounds
                else "server"
                if is_servers_turn
                else next(targets)
            )
            is_servers_turn = layout.has_servers and target != "server"
            played = play_round(
                run, target, generator, tainted=tainted, damages=bool(len(rounds) % 2)
            )
            rounds.append(played)
            is_over = played.hit == "end"
            if is_over:
                played.problems.extend(compare(run, undisturbed[layout.name]))
            print(_line(len(rounds), played), flush=True)
        finished += 1
        shutil.rmtree(run.directory)
    return {
        "rounds": len(rounds),
        "kills": Counter(played.hit for played in rounds if played.hit != "end"),
        "server_kills": sum(played.server_kills for played in rounds),
        "damaged_checkpoints": sum(played.damage is not None for played in rounds),
        "runs_finished_and_compared": finished,
        "seconds_to_vanish_max": max(played.seconds_to_vanish for played in rounds),
        "failures": sum(bool(played.problems) for played in rounds),
        "seed": seed,
        "played": [asdict(played) for played in rounds],
    }


def _line(number: int, played: Round) -> str:
    done = f"killed in {played.hit}" if played.hit != "end" else "ran to its end"
    parts = [
        f"{number:3d} {played.layout}: from step {played.begun}, {done}, gone in"
        f" {played.seconds_to_vanish:.1f} s"
    ]
    parts += [f"server killed {played.server_kills} times"] if played.server_kills else []
    parts += [played.damage] if played.damage else []
    return "; ".join(parts + [f"PROBLEM: {problem}" for problem in played.problems])


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 1 if anything was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=30,
        help="starts of a run, all but those that reach its end with a kill",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of victims, moments and damages (a process's timing is its own)",
    )
    parser.add_argument(
        "--sglang-python",
        type=Path,
        help="Python of an environment with SGLang (tools/setup_sglang_cpu.sh): kill servers too",
    )
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument(
        "--work", type=Path, help="directory for the runs and their logs; default: a temporary one"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {arguments.rounds}")
    layouts = (
        (*LAYOUTS, *sglang_layouts(arguments.sglang_python)) if arguments.sglang_python else LAYOUTS
    )
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        report = torment(work, layouts, arguments.rounds, arguments.seed)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"{report['rounds']} rounds, kills by phase {dict(report['kills'])},"
        f" {report['server_kills']} of servers, {report['damaged_checkpoints']} checkpoints"
        f" damaged, {report['runs_finished_and_compared']} runs compared, {report['failures']}"
        " failures"
    )
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
