"""Kill training runs at random moments, damage their newest checkpoint, and see that nothing is
lost.

    python tools/chaos.py --rounds 30 --json chaos.json

A small run is started again and again with --resume. In every round one of its ranks gets SIGKILL
in the phase whose turn it is (setup, rollout, update, checkpoint, finish), after a random delay; in
every second round a random file of the newest checkpoint is cut short or has bytes flipped
afterwards. A run that comes to its end is compared with an undisturbed one, and the next begins,
on another layout. With --sglang-python three layouts roll out with SGLang servers; in every
second round of such a run a process of a server is killed instead of a rank, again and again until
the run is finished. With --nodes one more layout trains on one pretended node and samples on
another: the sampler's node loses its power, the trainer is killed while the sampler stands still
and its weights are on their way, or the sampler stands still for a while and the run goes on. Exit
code 1 if any of these fails:

- a round goes on from the newest checkpoint that was not damaged;
- after a kill of a rank no process of the run is left, within a time limit; after one of a server
    the run goes on;
- the finished run logged every step once, with the metrics of the undisturbed run, and has its
    parameters to the bit: no step is lost and no trajectory trained twice. Samples of SGLang
    on a CPU are not reproducible; there, every step was trained on the tasks of the undisturbed
    run, each played once, and its metrics agree with the rollout on the disk.

    python tools/chaos.py --endure 200 --sglang-python PYTHON --json endure.json

With --endure one run of so many steps is disturbed twice: a process of its server is killed after
a third of the steps, the rank after two thirds. Resident memory and open files of every process are
read once a second while the run takes steps. `growth` is what values add all the time, for 100
steps: the medians of the last three quarters of a process's readings are compared. The run's own
memory metrics and the mismatch between engine and trainer are compared alike. The exit code is then
1 if a step is missing, the server was not replaced, a process outlived the kill or something grew
by more than its limit.
"""

import argparse
import itertools
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedTokenizerBase

from ragen_mega.commands.command_line import JSON, command, flag
from ragen_mega.config import parse
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.models.huggingface import load_tokenizer, random_weights
from ragen_mega.ranks.launcher import PROGRAM, ranks_command
from ragen_mega.report.metrics import METRICS_FILE, read_metrics, write_json
from ragen_mega.rollout.summary import summarize
from ragen_mega.storage.checkpoints import CHECKPOINTS
from ragen_mega.storage.model_writers import save_huggingface
from ragen_mega.storage.rollouts import ROLLOUTS, RolloutStore
from ragen_mega.storage.run_directory import SUMMARY_FILE
from ragen_mega.warm_start.small_model import write_small_model

DELAYS = {"setup": 4.0, "rollout": 0.005, "update": 0.05, "checkpoint": 0.005, "finish": 0.05}
"""Phase -> mean seconds in it until a rank is killed."""
NODE_TARGETS = ("node", "trainer", "sampler")
"""Parts of two nodes that are disturbed: the sampler's node, the trainer, the sampler."""
SECONDS_TO_STAND = 8.0
"""Time for which a sampler stands still, at most."""
SECONDS_TO_START, SECONDS_TO_END, SECONDS_TO_VANISH = 300.0, 600.0, 90.0
NUM_STEPS = 12
TRAINING_FLAGS = f"""
    --recipe none --environments bandit --max-turns 1 --max-actions-per-turn 1 --max-actions 1
    --prompt-style compact --max-response-length 24 --max-context-length 128
    --eval-prompts 16 --eval-interval 4 --hidden-size 32 --ffn-hidden-size 64 --num-layers 2
    --num-groups 8 --group-size 4 --minibatch-size 8 --filter-strategy none
    --lr 1e-3 --critic-lr 1e-3 --num-steps {NUM_STEPS} --save-interval 2 --keep-last 3
    --warm-start-first-turn-steps 20 --warm-start-steps 10 --warm-start-trajectories 100
""".split()
ENDURING_FLAGS = """
    --hidden-size 256 --ffn-hidden-size 512 --eval-interval 0 --eval-prompts 4 --lr 1e-5
    --critic-lr 1e-4
""".split()  # heads have 64 channels, as the kernels of servers want them
MISMATCH = "mismatch/logprob_mean_abs_diff"
# end of a name -> the most that may be added in 100 steps
LIMITS = {"mib": 20.0, "files": 2.0, "gib": 0.05, "diff": 0.05}
MIXTURE = "mixture"
"""Name of the directory of the model with experts."""
MARKER = "RAGEN_CHAOS"
"""Environment variable of every process of a run, by which stragglers are found."""
RESUMED = re.compile(r"resumed from .*: (\d+) steps are done")
EVALUATED = re.compile(r"^after \d+ steps, bandit: ", re.MULTILINE)
CLOCKED = re.compile(r"(time|memory|engine|share)/|.*per_second")
"""Metrics that depend on the clock."""
FLAGS = (
    flag("--rounds", "starts of a run, all but those that reach its end with a kill", 30),
    flag("--seed", "of victims, moments and damages (a process's timing is its own)", 0),
    flag(
        "--sglang-python",
        "Python of an environment with SGLang (tools/setup_sglang_cpu.sh): kill servers too",
        type=Path,
    ),
    flag("--nodes", "disturb two pretended nodes too (Linux namespaces: needs root)", False),
    flag("--endure", "steps of one long run in place of the rounds", type=int),
    JSON,
    flag("--work", "directory for the runs and their logs (default: a temporary one)", type=Path),
)


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Distribution of a run over processes."""

    name: str
    flags: tuple[str, ...]
    num_ranks: int = 2
    has_servers: bool = False
    """Whether SGLang servers sample, whose samples on a CPU are not reproducible."""
    has_experts: bool = False
    """Whether the run trains a mixture of experts in place of the small model."""
    has_nodes: bool = False
    """Whether each rank is on a pretended node; the last one samples."""


SEPARATE = tuple(
    "--placement separate --rollout-ranks 1 --max-staleness 2 --importance-cap 2".split()
)
LAYOUTS: tuple[RunLayout, ...] = (
    RunLayout("dp2_distributed_optimizer", ("--use-distributed-optimizer",)),
    RunLayout("tp2", ("--tensor-model-parallel-size", "2")),
    RunLayout("pp2", ("--pipeline-model-parallel-size", "2")),
    RunLayout(
        "ep2", tuple("--expert-model-parallel-size 2 --sft-steps 10".split()), has_experts=True
    ),
    RunLayout("separate", SEPARATE),
)

NODES = RunLayout("separate_nodes", SEPARATE, has_nodes=True)


def sglang_layouts(python: Path) -> tuple[RunLayout, ...]:
    """Return the ranks that roll out with SGLang servers of another environment and keep every
    rollout on the disk.

    One replaces a lost server from its copy of the weights; of two pipeline stages both have to
    send theirs again; a rank that only samples has the weights of the trainers' last order.
    """
    flags = ("--rollout-engine", "sglang", "--sglang-python", str(python), "--keep-rollouts", "0")
    stages = ("--pipeline-model-parallel-size", "2", "--weight-transfer", "ipc")
    return (
        RunLayout("sglang", (*flags, "--weight-transfer", "file"), num_ranks=1, has_servers=True),
        RunLayout("sglang_pp2_ipc", (*flags, *stages), has_servers=True),
        RunLayout("sglang_separate", (*flags, *SEPARATE), has_servers=True),
    )


def write_mixture(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a small mixture of experts with random weights."""
    hf = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=-(-len(tokenizer) // 16) * 16, hidden_size=32, moe_intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=2048,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, initializer_range=0.1,
        dtype="float32",
    )  # fmt: skip
    weights = random_weights(hf, seed=0)
    save_huggingface(directory, hf, tokenizer, weights.items(), is_writer=True)


def identity(checkpoint: Path) -> tuple[str, int]:
    """Return the identity of a checkpoint, which differs from the identity of one written anew
    under the same name: renaming the directory sets its change time.
    """
    return checkpoint.name, checkpoint.stat().st_ctime_ns


class Victim:
    """A small run that is started, watched, killed and damaged."""

    def __init__(
        self, output: Path, name: str, layout: RunLayout, flags: Sequence[str] = TRAINING_FLAGS
    ) -> None:
        self.output, self.name, self.layout, self.flags = output, name, layout, flags
        self.directory = output.resolve() / name
        self.log = output / f"{name}.log"
        self.mark = uuid.uuid4().hex

    def start(self) -> subprocess.Popen[bytes]:
        """Launch the ranks; they go on from where the run is."""
        place: tuple[str | Path, ...] = ("--output", self.output, "--name", self.name, "--resume")
        if self.layout.has_experts:
            place += ("--load", self.output / MIXTURE)
        words = (PROGRAM, "train", *self.flags, *self.layout.flags, *place)
        launch = ranks_command(self.layout.num_ranks, *words)
        if self.layout.has_nodes:
            nodes = (sys.executable, "-m", "tests.support.pretend_nodes", self.output.resolve())
            launch = [*map(str, (*nodes, *words))]
        root = Path(__file__).parents[1]
        paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            MARKER: self.mark,
        }
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            return subprocess.Popen(
                launch, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def said(self) -> str:
        """Return the output since the last start."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def phase(self) -> str:
        """Name the phase of the run, judged by its files."""
        said = self.said()
        if not (EVALUATED.search(said) or RESUMED.search(said)):
            return "setup"
        if any((self.directory / CHECKPOINTS).glob(".step_*.tmp")):
            return "checkpoint"
        num_logged = len(self.rows())
        if num_logged >= NUM_STEPS:
            return "finish"
        sampled = self.directory / ROLLOUTS / f"step_{num_logged:08d}.safetensors"
        return "update" if sampled.exists() else "rollout"

    def rows(self) -> list[dict[str, Any]]:
        """Return logged metrics, without what depends on the clock."""
        path = self.directory / METRICS_FILE
        rows = read_metrics(path) if path.exists() else []
        return [
            {key: value for key, value in row.items() if not CLOCKED.match(key)} for row in rows
        ]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the last checkpoint: weights and moments of both models, as the
        ranks wrote them.
        """
        last = self.directory / CHECKPOINTS / f"step_{NUM_STEPS:08d}"
        return {
            f"{path.name}/{key}": value
            for path in last.glob("*.safetensors")
            for key, value in load_file(path).items()
        }

    def intact_checkpoints(self, tainted: set[tuple[str, int]]) -> list[Path]:
        """Return published checkpoints that nobody has damaged, newest first."""
        published = sorted((self.directory / CHECKPOINTS).glob("step_*"), reverse=True)
        return [path for path in published if identity(path) not in tainted]

    def trained(self) -> list[list[TrajectoryGroup]]:
        """Return the groups of every rollout that is on the disk, in the order of the steps."""
        store = RolloutStore(self.directory / ROLLOUTS)
        return [store.read(step).groups for step in store.steps()]

    def processes(self) -> list[psutil.Process]:
        """Return every live process of this run: those that carry its mark, and its servers, whose
        environment is scrubbed.
        """
        seen = psutil.process_iter(["environ", "cmdline", "cwd", "status"])
        return [
            process
            for process in seen
            if process.info["status"] != psutil.STATUS_ZOMBIE
            and ((process.info["environ"] or {}).get(MARKER) == self.mark or self._serves(process))
        ]

    def _serves(self, process: psutil.Process) -> bool:
        return Path(process.info["cwd"] or "/").is_relative_to(self.directory / "sglang")

    def servers(self) -> list[psutil.Process]:
        """Return the processes of SGLang servers, with those that supervise them."""
        return [process for process in self.processes() if self._serves(process)]

    def nodes(self) -> list[psutil.Process]:
        """Return the first process of each pretended node, with which the node ends."""
        return [process for process in self.processes() if process.info["cmdline"] == ["cat"]]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks, in their order."""
        ranks = [
            process
            for process in self.processes()
            if "RANK" in (process.info["environ"] or {})
            and PROGRAM in (process.info["cmdline"] or ())
        ]
        return sorted(ranks, key=lambda process: int(process.info["environ"]["RANK"]))


@dataclass(frozen=True, slots=True)
class Round:
    """Disturbances of a run in one round, and their outcome."""

    layout: str
    target: str | None  # phase in which a rank was to be killed, or `server`
    hit: str  # phase in which it was; `end` if the run was finished first
    server_kills: int  # times that a process of an SGLang server was killed
    damage: str | None
    # Step at which it began, which must be the newest sound checkpoint's, else 0; None if it was
    # killed before that, or was finished already.
    begun: int | None
    seconds_to_vanish: float  # from the kill until no process of the run was left
    problems: list[str]

    def __str__(self) -> str:
        what = f"{self.target} " if self.target in NODE_TARGETS else ""
        done = f"{what}killed in {self.hit}" if self.hit != "end" else f"{what}ran to its end"
        parts = (
            f"{self.layout}: from step {self.begun}",
            f"{done}, gone in {self.seconds_to_vanish:.1f} s",
            f"server killed {self.server_kills} times" if self.server_kills else None,
            self.damage,
            *(f"PROBLEM: {problem}" for problem in self.problems),
        )
        return "; ".join(part for part in parts if part)


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
    """Wait until the run has logged so many steps in that phase; False if it ended first."""
    deadline = time.monotonic() + SECONDS_TO_START
    while run.phase() != phase or len(run.rows()) < num_logged:
        if launcher.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def kill(process: psutil.Process) -> bool:
    """Send SIGKILL, and return whether the process was still there."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def wait_for_processes(
    run: Victim, launcher: subprocess.Popen[bytes], seconds_to_end: float = 0.0
) -> tuple[float, list[str]]:
    """Wait until the launcher ends by itself, for so many seconds, and then until no process of the
    run is left. Returns the seconds of the latter, and a problem for those that had to be killed.
    """
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(seconds_to_end)
    start = time.monotonic()
    while (left := run.processes()) and time.monotonic() - start < SECONDS_TO_VANISH:
        launcher.poll()
        time.sleep(0.05)
    seconds = time.monotonic() - start
    for process in left:
        kill(process)
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
            count += kill(generator.choice(servers))
    return count


def kill_rank(
    run: Victim,
    launcher: subprocess.Popen[bytes],
    target: str,
    num_logged: int,
    generator: random.Random,
) -> str:
    """Kill a rank in phase `target`, or disturb a part of two nodes, `num_logged` steps into the
    run. Returns the phase; `end` if the rank or the run ended first, or goes on.
    """
    phase = target if target in DELAYS else generator.choice(("rollout", "update"))
    if not wait_for(run, launcher, phase, num_logged):
        return "end"
    time.sleep(generator.expovariate(1 / DELAYS[phase]))
    while not (ranks := run.ranks()) and launcher.poll() is None:
        time.sleep(0.01)  # in setup the launcher may still be alone
    if not ranks:
        return "end"
    victim, stands = generator.choice(ranks), target in ("trainer", "sampler")
    if target == "node":
        victim = run.nodes()[-1]
    elif stands:
        victim = ranks[0]
        ranks[-1].suspend()  # so that weights which are on their way do not arrive
        time.sleep(generator.uniform(1, SECONDS_TO_STAND))
    hit = run.phase()
    is_over = target != "sampler" and kill(victim)
    if stands:
        ranks[-1].resume()
    return hit if is_over else "end"


def play_round(
    run: Victim,
    target: str | None,
    generator: random.Random,
    *,
    tainted: set[tuple[str, int]],
    damages: bool,
) -> Round:
    """Start the run, disturb its `target` (a rank in this phase, servers, a part of two nodes;
    nothing if it is None), damage a checkpoint if it is the turn.

    `tainted` holds the checkpoints damaged so far; the run must go on from the newest that is not
    among them.
    """
    expected = max(
        (int(path.name.removeprefix("step_")) for path in run.intact_checkpoints(tainted)),
        default=0,
    )
    summary = run.directory / SUMMARY_FILE
    was_finished = summary.exists()  # then a start says so, and reads no checkpoint
    launcher = run.start()
    hit, server_kills = "end", 0
    if target == "server":
        server_kills = kill_servers(run, launcher, generator)
    elif target:
        num_logged = 0 if target == "setup" else min(expected + generator.randrange(5), NUM_STEPS)
        hit = kill_rank(run, launcher, target, num_logged, generator)
    seconds, problems = wait_for_processes(run, launcher, SECONDS_TO_END * (hit == "end"))
    if hit == "end" and launcher.returncode:
        problems.append(f"the run ended with exit code {launcher.returncode}: {run.said()[-500:]}")
    resumed = RESUMED.search(run.said())
    begun = int(resumed.group(1)) if resumed else None if hit == "setup" or was_finished else 0
    if begun not in (None, expected):
        problems.append(f"went on from step {begun} instead of {expected}")
    if "Traceback" in run.said():
        problems.append("a traceback was printed")
    damaged = None
    damages &= hit != "end" and not summary.exists()
    intact_checkpoints = run.intact_checkpoints(tainted)
    if damages and len(intact_checkpoints) > 1:  # with none left a run does not begin anew
        damaged = damage(intact_checkpoints[0], generator)
        tainted.add(identity(intact_checkpoints[0]))
    return Round(run.layout.name, target, hit, server_kills, damaged, begun, seconds, problems)


def compare(run: Victim, undisturbed: Victim) -> list[str]:
    """List the differences of a finished run from an undisturbed one of the same flags."""
    steps = [row["step"] for row in run.rows()]
    if steps != list(range(NUM_STEPS)):
        return [f"logged steps {steps}"]
    return list((differing_tasks if run.layout.has_servers else differing_bits)(run, undisturbed))


def differing_bits(run: Victim, undisturbed: Victim) -> Iterator[str]:
    """Yield the differences in metrics and in the tensors of the last checkpoint."""
    for row, expected in zip(run.rows(), undisturbed.rows(), strict=True):
        if keys := [key for key in expected if row.get(key) != expected[key]]:
            yield f"step {row['step']} differs from the undisturbed run's in {', '.join(keys[:3])}"
            break
    ours, theirs = run.parameters(), undisturbed.parameters()
    if not theirs:
        yield "the undisturbed run has no last checkpoint to compare with"
    elif ours.keys() != theirs.keys() or not all(
        torch.equal(value, theirs[key]) for key, value in ours.items()
    ):
        yield "the last checkpoint differs from the undisturbed run's"


def differing_tasks(run: Victim, undisturbed: Victim) -> Iterator[str]:
    """Yield the differences in the tasks that were trained on - group, initial state and outcomes
    of the trajectories - or in the logged metrics from the metrics of the rollouts on the disk.
    """
    for row, *trained in zip(run.rows(), run.trained(), undisturbed.trained(), strict=True):
        ours, theirs = (
            Counter(
                (group.group_id, member.seed, member.outcome_seed)
                for group in groups
                for member in group.trajectories
            )
            for groups in trained
        )
        if ours != theirs:
            yield f"step {row['step']} was trained on other tasks than the undisturbed run's"
        facts = summarize(trained[0])
        if any(row.get(f"rollout/{key}") != value for key, value in facts.items()):
            yield f"step {row['step']} has metrics that are not those of its rollout on the disk"


def run_rounds(
    output: Path, layouts: Sequence[RunLayout], num_rounds: int, seed: int
) -> dict[str, Any]:
    """Play all rounds; returns the report."""
    generator = random.Random(seed)
    write_small_model(parse(TRAINING_FLAGS), output / "small")
    write_mixture(output / MIXTURE, load_tokenizer(str(output / "small")))
    undisturbed = {
        layout.name: Victim(output, f"undisturbed_{layout.name}", layout) for layout in layouts
    }
    for run in undisturbed.values():
        launcher = run.start()
        wait_for_processes(run, launcher, SECONDS_TO_END)
        if launcher.returncode:
            raise SystemExit(f"error: the undisturbed run failed: {run.said()[-1000:]}")
    print(f"undisturbed runs: {', '.join(undisturbed)}", flush=True)
    turns, targets = itertools.cycle(layouts), itertools.cycle(DELAYS)
    node_targets = itertools.cycle(NODE_TARGETS)
    rounds: list[Round] = []
    finished = 0
    while len(rounds) < num_rounds:
        layout = next(turns)
        run = Victim(output, f"tormented_{finished}_{layout.name}", layout)
        tainted, is_over, is_servers_turn = set[tuple[str, int]](), False, False
        while not is_over:
            nexts = node_targets if layout.has_nodes else targets
            target: str | None = "server" if is_servers_turn else next(nexts)
            if len(rounds) >= num_rounds:  # now undisturbed, so that it too is compared
                target = None
            is_servers_turn = layout.has_servers and target != "server"
            played = play_round(
                run, target, generator, tainted=tainted, damages=bool(len(rounds) % 2)
            )
            rounds.append(played)
            is_over = played.hit == "end"
            if is_over:
                played.problems.extend(compare(run, undisturbed[layout.name]))
            print(f"{len(rounds):3d} {played}", flush=True)
        finished += 1
        shutil.rmtree(run.directory)
    return {
        "rounds": len(rounds),
        "kills": dict(Counter(played.hit for played in rounds if played.hit != "end")),
        "server_kills": sum(played.server_kills for played in rounds),
        "damaged_checkpoints": sum(played.damage is not None for played in rounds),
        "runs_finished_and_compared": finished,
        "seconds_to_vanish_max": max(played.seconds_to_vanish for played in rounds),
        "failures": sum(bool(played.problems) for played in rounds),
        "seed": seed,
        "played": [asdict(played) for played in rounds],
    }


def growth(readings: Sequence[tuple[float, float]]) -> float:
    """Return what values add all the time, for 100 steps: the lesser of what each of the last two
    quarters adds to the quarter before it, so that neither a beginning nor a single step upwards
    counts. `readings` are steps with values. The result is 0 where less than ten steps lie between
    the first and the last of these quarters.
    """
    quarter = len(readings) // 4
    if not quarter:
        return 0.0
    parts = [readings[place * quarter : (place + 1) * quarter] for place in (1, 2, 3)]
    middles = [[statistics.median(column) for column in zip(*part)] for part in parts]
    if middles[2][0] - middles[0][0] < 10:
        return 0.0
    added = min(after[1] - before[1] for before, after in itertools.pairwise(middles))
    return 200 * added / (middles[2][0] - middles[0][0])


def endured(
    rows: Sequence[Mapping[str, Any]],
    readings: Mapping[tuple[str, int], Sequence[tuple[float, float]]],
    num_steps: int,
    left: Sequence[str],
) -> dict[str, Any]:
    """Report what the metrics of a run and the readings of its processes have shown so far, with
    its problems if it were over, `left` the problems of processes that outlived the kill. A killed
    process counts only if it has lived as long as others.
    """
    named = {key for row in rows for key in row if key.startswith("memory/")} | {MISMATCH}
    values = {key: [(row["step"], row[key]) for row in rows if key in row] for key in named}
    found = {key: growth(values[key]) * (-1 if "free" in key else 1) for key in sorted(named)}
    longest = max(map(len, readings.values()), default=0)
    for (name, _), read in readings.items():
        if 2 * len(read) > longest:
            found[name] = max(found.get(name, 0.0), growth(read))
    restarts = sum(row.get("engine/restarts", 0) for row in rows)
    complete = [row["step"] for row in rows] == [*range(num_steps)]
    return {
        "steps": len(rows),
        "server_restarts": restarts,
        "growth_per_100_steps": found,
        "largest_mismatch": max((value for _, value in values[MISMATCH]), default=None),
        "problems": [
            *left,
            *([] if complete and restarts else [f"{len(rows)} steps, {restarts} new servers"]),
            *(
                f"{name} changed by {value:.3g} in 100 steps"
                for name, value in found.items()
                if value > LIMITS[re.split("[/_]", name)[-1]]
            ),
        ],
    }


def endure(output: Path, layout: RunLayout, num_steps: int, json: Path) -> int:
    """Train to the end with one kill of a server and one of the rank, and write the report after
    every reading. Returns the exit code, 1 after a problem.
    """
    # a checkpoint lies between the two kills, so that the row that counts the new server stays
    sizes = ("--num-steps", str(num_steps), "--save-interval", str(max(1, num_steps // 20)))
    flags = [*TRAINING_FLAGS, *ENDURING_FLAGS, *sizes, *["--bf16"] * torch.cuda.is_available()]
    run = Victim(output, "endure", layout, flags)
    launcher, readings = run.start(), defaultdict[tuple[str, int], list[tuple[float, float]]](list)
    left, kills = list[str](), {num_steps // 3: "server", 2 * num_steps // 3: "trainer"}
    begun = 0
    while launcher.poll() is None:
        step, servers = len(run.rows()), run.servers()
        for process in (
            run.processes() if begun < step < num_steps else ()
        ):  # neither begins nor ends
            kind = "server" if process in servers else "trainer"
            with suppress(psutil.Error):  # it may have ended
                size, files = process.memory_info().rss / 2**20, process.num_fds()
                readings[f"{kind}_mib", process.pid].append((step, size))
                readings[f"{kind}_files", process.pid].append((step, files))
        if step:
            rows = read_metrics(run.directory / METRICS_FILE)
            write_json(json, endured(rows, readings, num_steps, left))
        if kills and step >= min(kills):
            target = kills.pop(min(kills))
            for process in (servers if target == "server" else run.ranks())[-1:]:
                kill(process)
            if target == "trainer":
                left += wait_for_processes(run, launcher)[1]
                launcher, begun = run.start(), step
        time.sleep(1)
    left += wait_for_processes(run, launcher)[1]
    report = endured(read_metrics(run.directory / METRICS_FILE), readings, num_steps, left)
    write_json(json, report)
    print(report)
    return 1 if report["problems"] else 0


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> int:
    """Return the exit code: 1 if anything was lost."""
    if arguments.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, not {arguments.rounds}")
    layouts = LAYOUTS
    if arguments.sglang_python:
        layouts += sglang_layouts(arguments.sglang_python)
    layouts += (NODES,) * arguments.nodes
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if arguments.endure:
            layout = sglang_layouts(arguments.sglang_python or Path(sys.executable))[0]
            return endure(work, layout, arguments.endure, arguments.json or work / "endure.json")
        report = run_rounds(work, layouts, arguments.rounds, arguments.seed)
    if arguments.json:
        write_json(arguments.json, report)
    said = {key: value for key, value in report.items() if key not in ("played", "seed")}
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in said.items()))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    main()
