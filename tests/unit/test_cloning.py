"""Behaviour cloning: its loss equals transformers' at the asked temperature, it descends, and it
takes as many steps as it was told to.
"""

import io
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from ragen_mega.commands import make_boards
from ragen_mega.config import parse
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.environments.boards import load_boards
from ragen_mega.environments.registry import make
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.huggingface import load_config
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.report.console import Console
from ragen_mega.report.pace import duration
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import TaskSampler, held_out_states
from ragen_mega.run.check import check
from ragen_mega.storage.model_readers import open_model
from ragen_mega.storage.run_directory import BASE, WARM_START
from ragen_mega.warm_start.clone import fit
from ragen_mega.warm_start.small_model import (
    _fit,
    scripted_play,
    take_warm_start,
    warm_start_critic,
    write_small_model,
)
from tests.support.rounding import exact_logprobs

FLAGS = "--environments bandit --hidden-size 16 --ffn-hidden-size 32 --lr 1e-3".split()


@pytest.mark.parametrize(
    ("temperature", "flags"), [(1.0, []), (2.0, []), (1.0, ["--num-experts", "4"])]
)
def test_loss_is_the_cross_entropy_at_the_temperature(
    temperature: float, flags: list[str], tmp_path: Path
) -> None:
    config = parse([*FLAGS, *flags])
    groups = initialize(config.parallel, 0)
    write_small_model(config, tmp_path)
    hf = load_config(str(tmp_path))
    policy = MegatronPolicy(
        hf, groups, config.parallel, config.train, config.loss, temperature=temperature
    )
    policy.load_weights(open_model(tmp_path))
    generator = torch.Generator().manual_seed(0)
    trajectories = []
    for length in (3, 9):
        tokens = torch.randint(0, 256, (4 + length,), generator=generator).tolist()
        trajectory = Trajectory(group_id=0)
        trajectory.append_observation(tokens[:4])
        trajectory.append_action(Completion(tokens[4:], [0.0] * length, "stop"))
        trajectories.append(trajectory)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    rows, bounds = [], []
    for one in trajectories:
        exact, bound = exact_logprobs(model, one.tokens, temperature)
        rows.append(-exact[3:-1].gather(-1, torch.tensor(one.tokens[4:])[:, None])[:, 0])
        bounds.append(bound)
    losses = [policy.clone(pack(trajectories))["loss"] for _ in range(5)]
    assert losses[0] == pytest.approx(float(torch.cat(rows).mean()), abs=max(bounds))
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("num_trajectories", [1, 3, 8, 11, 12, 13, 20, 64])
@pytest.mark.parametrize("num_steps", [1, 7, 40])
def test_it_takes_as_many_steps_as_asked(num_trajectories: int, num_steps: int) -> None:
    """Also where a pass has fewer minibatches than trajectories / 8, for a remainder joined one."""
    trajectories = []
    for index in range(num_trajectories):
        one = Trajectory(group_id=index)
        one.append_observation([1])
        one.append_action(Completion([2], [0.0], "stop"))
        trajectories.append(one)
    steps, told = [], []

    def step(minibatch: TokenBatch) -> dict[str, float]:
        steps.append(minibatch.group_ids.tolist())
        return {"loss": float(len(steps))}

    fit(step, pack(trajectories), batch_size=8, num_steps=num_steps, seed=0, report=told.append)
    assert told == [{"loss": float(number)} for number in range(1, num_steps + 1)]
    drawn = Counter(index for ids in steps for index in ids)
    assert max(drawn.values()) - min(drawn[index] for index in range(num_trajectories)) <= 1


@pytest.mark.parametrize(("fall", "num_steps"), [(0.99, 375), (1.0, 200)])
def test_steps_until_a_loss_is_flat_are_bounded_by_the_flags(fall: float, num_steps: int) -> None:
    """Two stages of 80 steps each where the loss is flat at once, else of 4/5 of the bound, and a
    quarter as many while the learning rate falls.
    """
    rates, said, clock = [], io.StringIO(), itertools.count(step=60)
    trainer = SimpleNamespace(
        schedule=SimpleNamespace(step=lambda count: None), set_lr_factor=rates.append
    )
    console = Console(is_writer=True, num_steps=0, file=said, clock=lambda: next(clock))
    one = Trajectory(group_id=0)
    one.append_observation([1])
    one.append_action(Completion([2], [0.0], "stop"))
    losses = (fall**step for step in itertools.count())
    found = _fit(
        SimpleNamespace(trainer=trainer),
        lambda batch: {"loss": next(losses)},
        [(pack([one]), 125, 1), (pack([one]), 250, 1)],
        console,
        "warm start",
        seed=0,
        until_flat=True,
    )
    assert len(found) == num_steps and len(rates) == num_steps // 5 and rates[-1] == 0.0
    counted = re.findall(r"(\d+)/(\d+) loss", said.getvalue())
    assert counted[0] == ("1", "375") and counted[-1] == (str(num_steps), str(num_steps))


def test_the_time_left_counts_the_longer_steps_of_a_later_stage() -> None:
    """A position takes a second, and the steps of the second stage have more positions."""
    said, now = io.StringIO(), [0.0]
    console = Console(is_writer=True, num_steps=0, file=said, clock=lambda: now[0])
    stages = []
    for length, num_steps, size in ((1, 40, 2), (3, 20, 4)):
        one = Trajectory(group_id=0)
        one.append_observation([1] * length)
        one.append_action(Completion([2], [0.0], "stop"))
        stages.append((pack([one]), num_steps, size))
    seconds = iter([size * batch.num_positions for batch, n, size in stages for _ in range(n)])
    ends = []

    def step(minibatch: TokenBatch) -> dict[str, float]:
        now[0] += next(seconds)
        ends.append(now[0])
        return {"loss": 1.0}

    trainer = SimpleNamespace(schedule=SimpleNamespace(step=lambda count: None))
    _fit(SimpleNamespace(trainer=trainer), step, stages, console, "warm start", seed=0)
    lines = re.findall(r"warm start (\d+)/60 loss 1.000, about (.*) left", said.getvalue())
    assert len(lines) > 10
    for count, left in lines:
        assert left == duration(now[0] - ends[int(count) - 1])


def test_the_critic_learns_returns_without_a_kl_that_is_zero(tmp_path: Path) -> None:
    """The clone is the reference policy: with a KL in the reward its returns are the same."""
    trajectories = []
    for reward in (0.0, 1.0, 0.5):
        one = Trajectory(group_id=0)
        one.append_observation([1, 2])
        one.append_action(Completion([3, 4], [0.0, 0.0], "stop")).reward = reward
        trajectories.append(one)
    weights = []
    for kl in ([], ["--kl-in-reward", "k1", "--kl-reward-coef", "0.1"]):
        config = parse([*FLAGS, "--warm-start-critic-steps", "3", *kl])
        groups = initialize(config.parallel, 0)
        write_small_model(config, tmp_path)
        hf, console = load_config(str(tmp_path)), Console(is_writer=False, num_steps=0)
        critic = warm_start_critic(config, hf, groups, console, tmp_path, trajectories)
        weights.append(torch.cat([x.detach().flatten() for x in critic.chunks.parameters()]))
    assert torch.equal(*weights)


def test_no_board_that_is_evaluated_on_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the boards that the warm start would play, and one that training would."""
    flags = ["--environments", "frozen_lake", "--prompt-style", "compact", "--num-groups", "4"]
    free = parse(flags)
    renderer = ChatRenderer(train_tokenizer(["system\nuser\nassistant\n"] * 9), think=True)
    console = Console(is_writer=True, num_steps=1, file=io.StringIO())
    played = [one.seed for one in scripted_play(free, renderer, console, 6, max_turns=1)]
    trained = [group[0].seed for group in TaskSampler(free).sample(0)]
    monkeypatch.setattr(make_boards, "_WARM_START_SEEDS", 2**63)
    held_out = [played[1], played[4], trained[2]]
    lines = [make_boards.draw_boards("frozen_lake", {}, seed, 1)[0] for seed in held_out]
    assert [line["seed"] for line in lines] == held_out
    (tmp_path / "boards.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = parse([*flags, "--boards", str(tmp_path / "boards.jsonl")])
    again = [one.seed for one in scripted_play(config, renderer, console, 6, max_turns=1)]
    assert again == [seed for seed in played if seed not in held_out]
    drawn = [group[0].seed for group in TaskSampler(config).sample(0)]
    assert drawn[:2] == trained[:2] and drawn[2] != trained[2]


@pytest.mark.parametrize("window", [0, 2])
def test_scripted_play_ends_where_a_rollout_would(window: int) -> None:
    """Before an answer that the context has no room for; a window of turns has its own room."""
    flags = ["--environments", "frozen_lake", "--prompt-style", "compact", "--max-turns", "5"]
    flags += ["--max-response-length", "8", "--context-window", str(window)]
    renderer = ChatRenderer(train_tokenizer(["system\nuser\nassistant\n"] * 9), think=True)
    console = Console(is_writer=True, num_steps=1, file=io.StringIO())

    def play(*more: str) -> list[Trajectory]:
        return scripted_play(parse([*flags, *more]), renderer, console, 12)

    free = play()
    room = max(one.turns[: 1 + window // 2][-1].end for one in free)
    kept = {one.seed: one for one in play("--max-context-length", str(room))}
    assert len(kept) == 12
    for one in free:
        cut = kept[one.seed]
        assert cut.tokens == one.tokens[: len(cut)] and cut.turns == one.turns[: len(cut.turns)]
        bounds = [0, *cut.breaks, len(cut)]
        assert max(end - start for start, end in itertools.pairwise(bounds)) <= room
        assert cut.truncated == (len(cut.turns) < len(one.turns))
        assert bool(cut.breaks) == (window > 0 and len(cut.turns) > window)
    assert any(one.truncated for one in kept.values()) or window
    with pytest.raises(ValueError, match="first prompt of frozen_lake .* max_context_length 9"):
        play("--max-context-length", "9")


def test_packaged_boards_are_held_out_and_those_of_a_file_too(tmp_path: Path) -> None:
    board = {"set": "own", "seed": 7, "board": ["SFFF", "FFFF", "FFFF", "HHHG"]}
    (tmp_path / "boards.jsonl").write_text(json.dumps(board))
    config, lake = parse(["--environments", "frozen_lake"]).environment, make("frozen_lake")
    packaged = {lake.reset(one.seed, board=one.rows) for one in load_boards(None, "frozen_lake")}
    assert len(packaged) > 200
    assert held_out_states(config, "frozen_lake") == packaged
    with_file = held_out_states(config, "frozen_lake", str(tmp_path / "boards.jsonl"))
    assert with_file == packaged | {lake.reset(7, board=tuple(board["board"]))}


def test_a_warm_start_is_taken_whole(tmp_path: Path) -> None:
    """Also into a run that died while it made its own warm start."""
    made = parse([*FLAGS, "--output", str(tmp_path), "--name", "made"])
    for part in (BASE, WARM_START):
        write_small_model(made, made.run_directory / part)
    flags = ["--name", "own", "--seed", "1", "--warm-start-from", str(made.run_directory)]
    own = parse([*FLAGS, "--output", str(tmp_path), *flags])
    write_small_model(own, own.run_directory / BASE)
    (own.run_directory / WARM_START).mkdir()
    (own.run_directory / WARM_START / "config.json").write_text("{}")
    take_warm_start(own, made.run_directory)
    for part in (BASE, WARM_START):
        for path in (made.run_directory / part).iterdir():
            assert (own.run_directory / part / path.name).read_bytes() == path.read_bytes()
    made.run_directory.rename(tmp_path / "elsewhere")
    (own.run_directory / "config.json").write_text(json.dumps(own.to_dict()))
    flags = [*FLAGS, "--output", str(tmp_path), *flags]
    check(parse([*flags, "--resume"]), 1, 1)
    take_warm_start(own, made.run_directory)
    (own.run_directory / WARM_START / "model.safetensors").unlink()
    for further in ("--resume", "--overwrite"):  # which would delete the copies
        with pytest.raises(ValueError, match="made lacks base, warm_start"):
            check(parse([*flags, further]), 1, 1)
        write_small_model(own, own.run_directory / WARM_START)
