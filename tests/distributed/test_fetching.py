"""Weights that ranks that only sample fetch through process groups: every bit, from two versions
and again, from one rank that trains or several, whatever fails on the way, and what ends the job.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen_mega.config import StarPOConfig, parse
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.models.layout import group_by_size
from ragen_mega.ranks import collectives
from ragen_mega.report.metrics import Metrics
from ragen_mega.rollout.engine import EngineCounts, EngineError, RolloutEngine
from ragen_mega.rollout.tasks import TaskSampler
from ragen_mega.run import fetching
from ragen_mega.run.link import LinkLost
from ragen_mega.run.messages import Fetch
from ragen_mega.run.separate import Role, Sampler, Samplers, divide
from ragen_mega.run.shares import Shares
from tests.support.forked_ranks import fork_ranks, on_ranks
from tests.support.sockets import all_listening, is_loopback

pytestmark = pytest.mark.forks
NUM_STEPS = 3
HF = Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip


def weights(version: int) -> dict[str, Tensor]:
    torch.manual_seed(version)
    return Qwen2ForCausalLM(HF).to(torch.bfloat16).state_dict()


def group(step: int) -> TrajectoryGroup:
    trajectory = Trajectory(group_id=step, tokens=[1], loss_mask=[False], rollout_logprobs=[0.0])
    trajectory.append_action(Completion([step], [-1.0], "stop"))
    return TrajectoryGroup(step, [trajectory])


class Recorder(RolloutEngine):
    """An engine that takes whole weights, and notes them."""

    shard, num_slots = None, 0

    def __init__(self) -> None:
        self.counts = EngineCounts()

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], *, again: bool = False) -> None:
        self.weights = list(weights)
        self.weight_version += not again

    def load_adapter(self, tensors: Iterator[tuple[str, Tensor]], *, again: bool = False) -> None:
        self.adapter = dict(tensors)
        self.weight_version += not again

    @property
    def has_base(self) -> bool:
        return hasattr(self, "weights")


def assert_holds(engine: Recorder, version: int) -> None:
    """Each tensor of the version once, to the bit."""
    expected = weights(version)
    assert sorted(name for name, _ in engine.weights) == sorted(expected)
    for name, tensor in engine.weights:
        assert tensor.device == collectives.device() and tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.cpu(), expected[name]), name


@contextmanager
def sampling(config: StarPOConfig, part: Role) -> Iterator[tuple[Sampler, Recorder]]:
    """A rank that samples, and its engine."""
    engine = Recorder()
    run = Sampler(config, part, lambda *about: (engine, None, HF))
    with run, run.awake():
        yield run, engine


def job(
    folder: Path,
    *,
    sampler: Callable[[Sampler, Recorder], None] = lambda sampler, engine: None,
    senders: int = 1,
) -> Callable[[], None]:
    """What each rank does, of which the last two sample and the others train; `sampler` after each
    weights.
    """
    flags = "--environments bandit --placement separate --rollout-ranks 2 --rollout-engine sglang"
    flags += f" --max-staleness 1 --importance-cap 2 --num-steps {NUM_STEPS}"
    flags += f" --weight-senders {senders}"
    config = parse([*flags.split(), "--output", str(folder)])

    def rank() -> None:
        fetching.PART_BYTES = 4096
        collectives.start()
        part = divide(config)
        if part.samples:
            with sampling(config, part) as (run, engine):
                for order in run.orders():
                    run.load_weights(order)
                    assert_holds(engine, order.version)
                    sampler(run, engine)
                    run.deliver(order.rollout, [group(order.rollout)])
            return
        samplers = Samplers(
            config, part, TaskSampler(config),
            recall=lambda *about: None, keep=lambda *about: None,
            stop_if_asked=lambda: None, say=print,
        )  # fmt: skip
        samplers.begin(folder)
        for step in range(NUM_STEPS):
            present = {name: each.to(collectives.device()) for name, each in weights(step).items()}
            samplers.order(step, f"{step}", present.items())
            held = samplers._shares._versions.get(step, {})  # no rollout needs the last ones
            expected = shares_of(senders)[collectives.rank()] if held else {}
            assert held.keys() == expected.keys()
            taken, _ = samplers.take(step, Metrics())
            assert collectives.rank() or taken[0].trajectories[0].tokens == [1, step]
        samplers.close(0)

    return rank


@pytest.mark.parametrize("senders", [1, 2, 3])
def test_every_bit_of_every_version_arrives_on_all_ranks(senders: int, tmp_path: Path) -> None:
    """Also once more, for a server that was lost. Sockets listen on the loopback."""

    def fetch_again(sampler: Sampler, engine: Recorder) -> None:
        version, groups = sampler._version, [*sampler._receiver._groups]
        size = sum(tensor.nbytes for tensor in weights(0).values()) / 1e9
        assert sampler._gbytes in (pytest.approx(size), 0.0)  # 0: the order has none
        sampler._sync.send(again=True)
        assert_holds(engine, version)
        assert sampler._receiver._groups == groups and len(groups) == senders

    with all_listening(psutil.Process()) as addresses:
        on_ranks(job(tmp_path, sampler=fetch_again, senders=senders), senders + 2)
    assert addresses and all(map(is_loopback, addresses)), addresses


@pytest.mark.parametrize("what", ["lost", "changed"])
@pytest.mark.parametrize(("senders", "victim"), [(1, 0), (1, 1), (1, 2), (2, 0), (2, 3)])
def test_what_fails_in_a_part_costs_the_groups_alone(
    what: str, senders: int, victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second version, on a rank that sends or on one that receives: in the third round, and
    with two senders in the last one, which the second of them does not need.
    """
    broadcast, counts = fetching._Group.broadcast, []

    def fail_once(self: fetching._Group, memory: Tensor) -> Callable[[], None]:
        counts.append(1)
        is_time = os.environ["RANK"] == str(victim) and len(counts) == fails_at
        if is_time and what == "lost":
            raise RuntimeError("the cable is cut")
        if is_time and victim < senders:
            memory[5] ^= 1
        wait = broadcast(self, memory)
        if is_time and victim >= senders:
            wait()
            memory[5] ^= 1
        return wait

    monkeypatch.setattr(fetching._Group, "broadcast", fail_once)
    parts = [len(list(parts_of(share))) for share in shares_of(senders)]
    mine = sum(parts) if victim >= senders else parts[victim]  # broadcasts of a version
    fails_at = mine + (3 if senders == 1 else mine)
    assert senders == 1 or parts[0] > parts[1]

    def check(sampler: Sampler, engine: Recorder) -> None:
        assert sampler._receiver._number == (1 if sampler._version == 0 else 2)

    on_ranks(job(tmp_path, sampler=check, senders=senders), senders + 2)


def shares_of(senders: int) -> list[dict[str, Tensor]]:
    """Each tensor is of the sender that has the fewest bytes so far."""
    shares: list[dict[str, Tensor]] = [{} for _ in range(senders)]
    for name, tensor in weights(0).items():
        min(shares, key=lambda share: sum(each.nbytes for each in share.values()))[name] = tensor
    return shares


def parts_of(held: dict[str, Tensor]) -> Iterator[list[str]]:
    return group_by_size(held, lambda name: held[name].nbytes, 4096)


def test_groups_that_always_fail_end_the_job_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: fetching._Group, memory: Tensor) -> Callable[[], None]:
        raise RuntimeError("the cable\nis cut")

    monkeypatch.setattr(fetching._Group, "broadcast", fail)
    monkeypatch.setattr(fetching, "_PATIENCE", 10.0)
    work = job(tmp_path)

    def rank() -> None:
        if os.environ["RANK"] == "0":
            with pytest.raises(EngineError) as caught:
                work()
            said = str(caught.value)
            assert re.fullmatch(r"the weights of 0 steps .* 3 groups .*cut.*--resume.*", said), said
            os._exit(0)
        with pytest.raises((SystemExit, LinkLost)):
            work()

    on_ranks(rank, 3)


@pytest.mark.parametrize(
    ("victim", "senders"), [(0, 1), (2, 1), (1, 2)], ids=["trainer", "sampler", "second sender"]
)
def test_a_rank_that_dies_in_a_part_ends_the_job(
    victim: int, senders: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told by the link, or by the collective that the dead rank leaves. Nobody tries
    to form a group with trainers that have hung up.
    """
    broadcast, formed, init = fetching._Group.broadcast, [], fetching._Group.__init__

    def noting(self: fetching._Group, store: dist.Store, number: int, *about: int) -> None:
        formed.append(number)
        init(self, store, number, *about)

    def die(self: fetching._Group, memory: Tensor) -> Callable[[], None]:
        if os.environ["RANK"] == str(victim):
            os.kill(os.getpid(), signal.SIGKILL)
        return broadcast(self, memory)

    monkeypatch.setattr(fetching._Group, "broadcast", die)
    monkeypatch.setattr(fetching._Group, "__init__", noting)
    monkeypatch.setattr(fetching, "_PATIENCE", 10.0)
    work = job(tmp_path, senders=senders)

    def rank() -> None:
        with pytest.raises((LinkLost, RuntimeError, SystemExit)):
            work()
        assert victim or formed == [1]

    processes = fork_ranks(rank, senders + 2)
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    assert codes.pop(victim) == -signal.SIGKILL and not any(codes)


@pytest.mark.parametrize("senders", [1, 2])
def test_adapters_are_fetched_beside_a_base_that_is_fetched_once(
    senders: int, tmp_path: Path
) -> None:
    """With two senders the second one has no adapter to send."""
    flags = f"""--environments bandit --placement separate --rollout-ranks 2 --max-staleness 1
        --importance-cap 2 --num-steps {NUM_STEPS} --rollout-engine sglang --lora-rank 4
        --lora-sync adapter --weight-senders {senders} --output {tmp_path}"""
    config = parse(flags.split())

    def adapter(version: int) -> dict[str, Tensor]:
        return {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.full((4, 32), version + 0.5)}

    def rank() -> None:
        collectives.start()
        part = divide(config)
        if part.samples:
            with sampling(config, part) as (run, engine):
                for order in run.orders():
                    before = run._gbytes
                    run.load_weights(order)
                    assert_holds(engine, 9)
                    (name, expected), *_ = adapter(order.version).items()
                    assert torch.equal(engine.adapter[name].cpu(), expected)
                    fetched = round(1e9 * (run._gbytes - before))
                    assert fetched > 4096 if order.rollout == 0 else fetched in (0, 512)
                    run.deliver(order.rollout, [group(order.rollout)])
            return
        samplers = Samplers(
            config, part, TaskSampler(config),
            recall=lambda *about: None, keep=lambda *about: None,
            stop_if_asked=lambda: None, say=print, base=lambda: weights(9).items(),
        )  # fmt: skip
        samplers.begin(tmp_path)
        for step in range(NUM_STEPS):
            samplers.order(step, f"{step}", adapter(step).items())
            samplers.take(step, Metrics())
        samplers.close(0)

    on_ranks(rank, senders + 2)


def test_nobody_waits_on_a_device_for_a_rank_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All meet before each part, in the order in which they come."""
    calls: list[str] = []
    meet, broadcast = fetching._Group.meet, fetching._Group.broadcast
    monkeypatch.setattr(fetching._Group, "meet", lambda self: (calls.append("meet"), meet(self))[1])
    monkeypatch.setattr(
        fetching._Group, "broadcast", lambda self, m: (calls.append("bytes"), broadcast(self, m))[1]
    )

    def check(*about: object) -> None:
        assert calls == ["meet", "bytes"] * (len(calls) // 2) and calls

    on_ranks(job(tmp_path, sampler=check), 3)


def test_a_sender_that_copies_more_slowly_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks for a share that is not there."""
    copied = Shares.copied

    def slowly(self: Shares, *about: object, **options: object) -> dict[str, Tensor]:
        held = copied(self, *about, **options)
        time.sleep(0.5 * collectives.rank())
        return held

    def check(sampler: Sampler, engine: Recorder) -> None:
        assert sampler._receiver._number == 1

    monkeypatch.setattr(Shares, "copied", slowly)
    on_ranks(job(tmp_path, sampler=check, senders=2), 4)


@pytest.mark.parametrize(("before", "after"), [([0], [0, 1]), ([0, 1], [0]), ([0, 1], [0, 1])])
def test_weights_of_a_checkpoint_are_of_any_number_of_senders(
    before: list[int], after: list[int], tmp_path: Path
) -> None:
    """Each tensor has one sender, before and after a resume."""
    flags = "--environments bandit --placement separate --rollout-ranks 1 --max-staleness 2"
    config = parse([*flags.split(), "--importance-cap", "2", "--output", str(tmp_path)])

    def samplers(senders: list[int]) -> Samplers:
        return Samplers(
            config, Role(samples=False, senders=senders), TaskSampler(config),
            recall=lambda *about: None, keep=lambda *about: None,
            stop_if_asked=lambda: None, say=print,
        )  # fmt: skip

    def rank() -> None:
        collectives.start()
        first, second = samplers(before), samplers(after)
        for step in range(2):
            first.order(step, f"{step}", weights(step).items())
        staged = first.staged()
        assert bool(staged) == (collectives.rank() in before)
        for name, content in staged.items():
            save_file(content, tmp_path / name)
        collectives.barrier()
        second.load_state_dict(first.state_dict())
        second.read_staged(tmp_path)
        assert [*second._shares._versions] == [0]
        second.order(2, "2", weights(2).items())
        share = second._asked_for(Fetch(1, version=0, first=0, is_base=False, rollbacks=0))
        held, expected = collectives.gather_objects(share), weights(0)
        assert sum(map(len, held)) == len(expected)
        for name, tensor in ChainMap(*held).items():
            assert torch.equal(tensor, expected[name]), name

    on_ranks(rank, 2)
