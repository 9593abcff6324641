"""What ranks that train order from ranks that only sample: which rollout under which weights, what
a checkpoint keeps, and what ends it in one line.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen_mega.algorithm.tables import ESTIMATORS, Estimator, PlugInError
from ragen_mega.config import StarPOConfig, parse
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.ranks import collectives
from ragen_mega.report.metrics import Metrics
from ragen_mega.rollout.engine import (
    EngineCounts,
    EngineError,
    EngineShard,
    Interrupted,
    RolloutEngine,
)
from ragen_mega.rollout.tasks import TaskSampler
from ragen_mega.run.idleness import Usage
from ragen_mega.run.link import SAMPLERS, TRAINERS, Alarm, Link, LinkLost, connect, listen
from ragen_mega.run.messages import Begin, Delivery, End, Order, Weights, decode, encode
from ragen_mega.run.separate import Role, Sampler, Samplers, parts_of
from tests.support.processes import wait_until

NUM_STEPS = 6
SEPARATE = "--environments bandit --placement separate --rollout-ranks 1"


def config(staleness: int, *others: str) -> StarPOConfig:
    flags = f"{SEPARATE} --max-staleness {staleness} --importance-cap 2 --num-steps {NUM_STEPS}"
    return parse([*flags.split(), *others])


def links() -> tuple[Link, Link]:
    """Both ends of one connection."""
    ours, theirs = socket.socketpair()
    return Link(ours, SAMPLERS), Link(theirs, TRAINERS)


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield "weight", torch.full((3,), float(version))


def group(step: int) -> TrajectoryGroup:
    trajectory = Trajectory(group_id=step, tokens=[1], loss_mask=[False], rollout_logprobs=[0.0])
    trajectory.append_action(Completion([step], [-1.0], "stop"))
    return TrajectoryGroup(step, [trajectory])


class Job:
    """The trainers' view of samplers, whose end of the connection the test has; and a disk."""

    def __init__(self, config: StarPOConfig) -> None:
        collectives.start()
        self.config, self.disk, self.said = config, {}, []
        self.link, self.theirs = links()
        self.alarm = Alarm(torch.distributed.HashStore())
        self.is_stopped = self.is_full = False
        self.samplers = Samplers(
            config,
            Role(False, self.link, self.alarm),
            TaskSampler(config),
            recall=self.recall,
            keep=self.keep,
            stop_if_asked=self.stop_if_asked,
            say=self.said.append,
        )

    def recall(self, step: int, origin: dict) -> list[TrajectoryGroup] | None:
        stored, groups = self.disk.get(step, (None, None))
        return groups if stored == origin else None

    def keep(self, step: int, origin: dict, groups: list[TrajectoryGroup]) -> None:
        if self.is_full:
            raise OSError("no space left")
        self.disk[step] = origin, groups

    def stop_if_asked(self) -> None:
        if self.is_stopped:
            raise Interrupted

    def order(self, step: int) -> list[tuple[int, int, float | None]]:
        """What step `step` orders: rollout, version, and the weights that come with it."""
        digest = hashlib.sha256(f"{step}".encode()).hexdigest()
        self.samplers.order(step, digest, weights(step))
        self.link.send(b"end")  # what the samplers get behind it
        orders = []
        while (data := self.theirs.receive(10.0)) != b"end":
            order = decode(data)
            sent = None
            if order.has_weights:
                part = decode(self.theirs.receive(10.0))
                assert part.is_last and part.rollbacks == order.rollbacks
                ((_, tensor),) = part.tensors(part.memory)
                sent = float(tensor[0])
            orders.append((order.rollout, order.version, sent))
        return orders

    def deliver(self, step: int) -> None:
        self.theirs.send(encode(Delivery(step, [group(step)])))

    def take(self, step: int) -> list[TrajectoryGroup]:
        return self.samplers.take(step, Metrics())[0]

    def restarted(self, step: int, directory: Path) -> Job:
        """Another process that goes on from a checkpoint after `step` steps."""
        self.samplers.flush()
        for name, content in self.samplers.staged().items():
            (directory / name).write_bytes(save(content))
        other = Job(self.config)
        other.disk = self.disk
        other.samplers.load_state_dict(self.samplers.state_dict())
        other.samplers.read_staged(directory)
        return other


@pytest.mark.parametrize(
    ("staleness", "orders"),
    [
        (0, [[(step, step, step)] for step in range(NUM_STEPS)]),
        (1, [[(0, 0, 0), (1, 0, None)], *([(t + 1, t, t)] for t in range(1, 5)), []]),
        (
            3,
            [
                [(0, 0, 0), (1, 0, None), (2, 0, None), (3, 0, None)],
                [(4, 1, 1)],
                [(5, 2, 2)],
                [],
                [],
                [],
            ],
        ),
    ],
)
def test_every_rollout_is_due_under_the_weights_of_so_many_steps_before(
    staleness: int, orders: list
) -> None:
    job = Job(config(staleness))
    for step, expected in enumerate(orders):
        assert job.order(step) == expected
        job.deliver(step)
        assert job.take(step)[0].trajectories[0].tokens == [1, step]
    job.samplers.flush()
    assert sorted(job.disk) == list(range(NUM_STEPS)) and not job.said


def test_a_checkpoint_repeats_what_was_under_way_under_the_same_weights(tmp_path: Path) -> None:
    job = Job(config(2))
    assert job.order(0) == [(0, 0, 0), (1, 0, None), (2, 0, None)]
    job.deliver(0)
    job.take(0)
    assert job.order(1) == [(3, 1, 1)]
    job.deliver(1)
    job.take(1)
    job.deliver(2)  # on its way when the checkpoint is written; 3 is not
    wait_until(lambda: job.link.num_waiting)
    assert job.order(2) == [(4, 2, 2)]  # under the weights that the checkpoint itself holds
    other = job.restarted(2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["weights_00000001_0.safetensors"]
    assert other.order(2) == [(3, 1, 1), (4, 2, 2)]
    assert other.take(2)[0].trajectories[0].tokens == [1, 2]  # from the disk


def test_without_those_weights_the_present_ones_sample_and_it_is_said(tmp_path: Path) -> None:
    job = Job(config(2))
    job.order(0)
    other = job.restarted(1, tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    other.samplers.load_state_dict(job.samplers.state_dict())
    other.samplers.read_staged(tmp_path)
    assert other.order(1) == [(1, 1, 1), (2, 1, None), (3, 1, None)]
    assert other.said == [
        f"step {step}: sampled under the weights after 1 steps, since those of 0 are not in the"
        " checkpoint"
        for step in (1, 2)
    ]


def test_what_was_carried_over_is_never_waited_for(tmp_path: Path) -> None:
    """Its next rollout is ordered, even if it is on the disk."""
    job = Job(config(2, "--carry-over", "0.5"))
    job.order(0)
    for step in (0, 1, 2):
        job.deliver(step)
    job.take(0)
    job.take(1)
    other = job.restarted(1, tmp_path)
    del other.disk[1]
    assert [rollout for rollout, _, _ in other.order(1)] == [1, 2, 3]


def test_after_a_rollback_nothing_of_the_weights_before_it_is_taken(tmp_path: Path) -> None:
    """It is ordered anew, also by a process that goes on from the checkpoint after it."""
    job = Job(config(3))
    assert [rollout for rollout, _, _ in job.order(0)] == [0, 1, 2, 3]
    job.deliver(0)
    job.take(0)
    assert job.order(1) == [(4, 1, 1)]
    job.deliver(1)
    job.deliver(2)
    job.take(1)  # and the run goes back
    job.samplers.flush()
    job.deliver(3)  # on its way
    job.samplers.go_back(2)
    anew = [(2, 2, 2), (3, 2, None), (4, 2, None), (5, 2, None)]
    assert job.order(2) == anew
    assert job.restarted(2, tmp_path).order(2) == anew and not list(tmp_path.iterdir())
    job.theirs.send(encode(Delivery(4, [group(4)])))  # the samplers were in it
    for step in (2, 3):
        job.theirs.send(encode(Delivery(step, [group(step + 90)], rollbacks=1)))
    taken = [job.take(2)]
    assert job.order(3) == []
    taken.append(job.take(3))
    assert [groups[0].trajectories[0].tokens for groups in taken] == [[1, 92], [1, 93]]
    job.samplers.flush()
    assert [groups[0].group_id for _, groups in (job.disk[2], job.disk[3])] == [92, 93]
    assert set(job.disk) == {0, 1, 2, 3}
    assert not job.said


@pytest.mark.parametrize(
    "failure", [EngineError("broken"), FloatingPointError("nan"), Interrupted(), OSError("full")]
)
def test_what_ends_their_work_is_raised_once_it_is_needed(failure: Exception) -> None:
    job = Job(config(1))
    job.order(0)
    job.deliver(0)
    job.theirs.send(encode(failure))
    assert job.take(0)
    with pytest.raises(type(failure)):
        job.take(1)


def test_what_ends_a_rank_without_a_connection_is_raised_too() -> None:
    """Behind what was delivered."""
    job = Job(config(1))
    job.order(0)
    job.deliver(0)
    job.alarm.give(ValueError("mine alone"))
    assert job.take(0)
    with pytest.raises(ValueError, match="mine alone"):
        job.take(1)


def test_samplers_that_end_or_fall_silent_end_the_run_with_one_line() -> None:
    job = Job(config(1, "--sampler-timeout", "0.5"))
    job.order(0)
    job.theirs.beat()
    job.alarm.beat()
    with pytest.raises(LinkLost, match=r"^the ranks that sample have finished no turn for \d+ s;"):
        job.take(0)
    job.theirs.close()
    with pytest.raises(LinkLost, match="^the ranks that sample have ended; --resume goes on"):
        job.take(0)


def test_a_message_that_cannot_be_made_ends_both_sides_at_once() -> None:
    ours, theirs = links()
    ours.send(lambda: 1 // 0)
    with pytest.raises(LinkLost, match="the ranks that train have ended"):
        theirs.receive(5.0)
    with pytest.raises(LinkLost, match=r"^no message to or from the ranks that sample: Zero"):
        ours.receive(5.0)


def test_a_message_that_cannot_be_read_is_what_receive_says() -> None:
    """One of more bytes than there are addresses."""
    ours, theirs = socket.socketpair()
    link = Link(ours, SAMPLERS)
    theirs.sendall(struct.pack("<q", 1 << 62))
    with pytest.raises(LinkLost, match="from the ranks that sample: MemoryError"):
        link.receive(30.0)
    assert link.is_closed


def test_a_rollout_that_cannot_be_written_ends_the_run() -> None:
    """At the latest when a checkpoint relies on it."""
    job = Job(config(1))
    job.order(0)
    job.is_full = True
    job.deliver(0)
    with pytest.raises(OSError, match="no space left"):
        job.take(0)
        job.samplers.flush()


def test_a_stop_is_heard_while_a_rollout_is_waited_for() -> None:
    job = Job(config(1))
    job.order(0)
    job.is_stopped = True
    with pytest.raises(Interrupted):
        job.take(0)


class Recorder(RolloutEngine):
    """The second of two ranks that share a server: keeps what it is given."""

    shard, num_slots = EngineShard(1, 2), 0

    def __init__(self) -> None:
        self.counts, self.done = EngineCounts(), []

    def load_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], *, again: bool = False
    ) -> None:
        self.weights = dict(weights)
        self.weight_version += not again
        self.done.append(f"weights of version {self.weight_version}")

    def start(self) -> None:
        self.done.append("start")

    def shutdown(self) -> None:
        self.done.append("shutdown")


def test_a_server_gets_its_part_of_the_weights_under_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives.start()
    hf = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    whole = Qwen2ForCausalLM(hf).state_dict()
    engine, (link, theirs) = Recorder(), links()
    asked = []

    def prepare(*about: object) -> tuple[Recorder, None, Qwen2Config]:
        asked.append(about)
        return engine, None, hf

    theirs.send(encode(Begin(str(tmp_path), "the-run")))
    monkeypatch.setattr("ragen_mega.run.separate.PART_BYTES", 1024)
    parts = [*parts_of(whole, 0)]
    assert len(parts) > 3
    theirs.send(encode(Order(12, 7, True)))
    for part in parts:
        theirs.send(part)
    theirs.send(encode(Order(13, 7, False)))
    theirs.send(encode(End(0)))
    sampler = Sampler(config(0, "--rollout-engine", "sglang"), Role(True, link), prepare)
    with sampler, sampler.awake():
        for order in sampler.orders():
            sampler.load_weights(order)
    assert asked == [(tmp_path, "the-run")]
    assert engine.done == ["weights of version 7", "start", "shutdown"]
    q, k, v = (whole[f"model.layers.0.self_attn.{one}_proj.weight"] for one in "qkv")
    mine = torch.cat([q[8:], k[4:], v[4:]])  # heads of four rows, two of them and one pair
    assert torch.equal(engine.weights["model.layers.0.self_attn.qkv_proj.weight"], mine)
    assert torch.equal(engine.weights["model.norm.weight"], whole["model.norm.weight"])


def test_void_orders_are_skipped_and_what_is_unfinished_is_dropped(tmp_path: Path) -> None:
    collectives.start()
    hf = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    content = Qwen2ForCausalLM(hf).state_dict()
    engine, (link, theirs) = Recorder(), links()
    sampler = Sampler(
        config(2, "--rollout-engine", "sglang"), Role(True, link), lambda *about: (engine, None, hf)
    )
    theirs.send(encode(Begin(str(tmp_path), "the-run")))
    theirs.send(encode(Order(0, 0, True)))
    for part in parts_of(content, 0):
        theirs.send(part)
    seen = []
    with sampler, sampler.awake():
        for order in sampler.orders():
            sampler.load_weights(order)
            seen.append((order.rollout, order.version, engine.weight_version, dict(sampler._open)))
            if order.rollout:
                continue
            sampler._open[0] = range(4)  # carried over
            sent = [encode(Order(1, 0, True)), *parts_of(content, 0), encode(Order(2, 0, False))]
            sent += [encode(Order(1, 1, True, rollbacks=1)), *parts_of(content, 1)]
            sent += [encode(Order(2, 1, False, rollbacks=1)), encode(End(0))]
            for message in sent:
                theirs.send(message)
            theirs.close()
            wait_until(lambda: link.is_closed)
    assert seen == [(0, 0, 0, {}), (1, 1, 1, {}), (2, 1, 1, {})]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_parts_meet_past_strangers(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the job's store, and says something or nothing, keeps no part from the other."""
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("the system has no IPv6")
    monkeypatch.setattr("ragen_mega.run.link._MOST_STRANGERS", 4)
    store, is_met = torch.distributed.HashStore(), threading.Event()
    with ThreadPoolExecutor(2) as thread:
        meeting = thread.submit(listen, store, tmp_path, address)
        host, port, file = json.loads(store.get("link"))
        assert (tmp_path / file).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / file).read_bytes() not in store.get("link")
        strangers = [socket.create_connection((host, port)) for _ in range(3)]
        challenge = strangers[0].recv(32)
        strangers[0].sendall(bytes(32) + hmac.digest(store.get("link"), challenge, "sha256"))
        assert strangers[0].recv(1) == b""  # it hangs up
        strangers[1].close()
        strangers += [socket.create_connection((host, port)) for _ in range(5)]
        assert len(strangers[2].recv(64, socket.MSG_WAITALL)) == 32  # it makes room for others

        def say_a_byte_now_and_then() -> bool:
            for _ in range(60):  # of the 64 after which it would be answered
                strangers[-1].sendall(b"x")
                if is_met.wait(0.5):
                    return True
            return False

        saying = thread.submit(say_a_byte_now_and_then)
        theirs = connect(store, tmp_path)
        theirs.send(b"there")
        assert meeting.result().receive(60.0) == b"there"
        is_met.set()
        assert saying.result()
    theirs.close()
    assert not list(tmp_path.iterdir())


def test_a_stranger_that_listens_is_no_part_of_the_job(tmp_path: Path) -> None:
    """The store, which others may write, leads to somebody who does not know the key."""
    store = torch.distributed.HashStore()
    (tmp_path / ".link-0").write_bytes(secrets.token_bytes(32))
    (tmp_path / "known").write_bytes(bytes(32))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ["127.0.0.1", server.getsockname()[1]]
        store.set("link", json.dumps([*address, "known"]))
        with pytest.raises(LinkLost, match="'known'"):
            connect(store, tmp_path)
        store.set("link", json.dumps([*address, ".link-0"]))
        with ThreadPoolExecutor(1) as thread:
            connecting = thread.submit(connect, store, tmp_path)
            connection, _ = server.accept()
            connection.sendall(bytes(32))
            proof = connection.recv(64, socket.MSG_WAITALL)[32:]
            connection.sendall(proof)  # what it has just heard
            with pytest.raises(LinkLost, match="key"):
                connecting.result()
            connection.close()


class Opened:
    """What a stranger writes: a pickle that runs code where it is read."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path(os.environ["OPENED"]),)


def test_what_a_stranger_writes_into_the_store_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENED", str(tmp_path / "opened"))
    store = torch.distributed.HashStore()
    alarm = Alarm(store)
    assert alarm.given() is None
    strange = (pickle.dumps(Opened()), b"", b'"x"', b'["Popen", "id"]', b"[[], 1]", b"{}", b"\xff")
    for value in strange:
        store.set("alarm", value)
        assert isinstance(alarm.given(), LinkLost)
    assert not (tmp_path / "opened").exists()
    for error in (PlugInError("reward"), OSError("disk"), EngineError("\u00e9 \udcff")):
        alarm.give(error)
        assert (type(alarm.given()), str(alarm.given())) == (type(error), str(error))


def test_messages_are_those_that_were_sent_and_run_nothing() -> None:
    used = (Usage({"rollout": 0.1}, {"other": 1.0}),)
    trajectory = group(3).trajectories[0]
    trajectory.turns[0].info["score"] = (1, {"of": [0.1]})
    metrics = {"sampling_seconds": 0.1}
    sent = Delivery(3, [TrajectoryGroup(3, [trajectory])], metrics, ("a note",), 2, used)
    messages = [Begin("base", None), Order(1, 2, True, 3), Order(1, 2, False), sent, End(7)]
    assert [decode(encode(message)) for message in messages] == messages
    lost = decode(encode(ConnectionError("gone \udcff")))
    assert (type(lost), str(lost)) == (OSError, "gone \udcff")
    changed = bytearray(encode(sent))
    changed[-1] ^= 1
    tensors = [("a", torch.arange(3, dtype=torch.bfloat16)), ("b", torch.ones(2, 2))]
    whole = encode(Weights.of(tensors, is_last=True, rollbacks=4))
    part = decode(whole)
    assert (part.is_last, part.rollbacks) == (True, 4)
    for (name, tensor), (other, expected) in zip(part.tensors(part.memory), tensors, strict=True):
        assert name == other and tensor.dtype == expected.dtype and torch.equal(tensor, expected)
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    for wrong in (bytes(flipped), whole[:-4]):
        with pytest.raises(ValueError, match="the weights from a on, .* have changed on their way"):
            decode(wrong)
    for damaged in (bytes(changed), b"", encode(End(7))[:-4], pickle.dumps([1]), b"\0" * 16):
        with pytest.raises(ValueError):
            decode(damaged)
    for kind in ("Popen", "Opened", "Path"):
        head = json.dumps([kind, {}, False]).encode()
        with pytest.raises(ValueError, match="damaged"):
            decode(len(head).to_bytes(8, "little") + head)


def test_messages_keep_their_order_whatever_their_size() -> None:
    ours, theirs = links()
    with closing(ours), closing(theirs):
        large = bytes(40_000_000)  # more than any socket buffers
        for message in (b"1", large, b"2"):
            ours.send(message)
        theirs.send(b"back")  # while that is under way
        assert ours.receive(60.0) == b"back"
        assert [theirs.receive(60.0) for _ in range(3)] == [b"1", large, b"2"]
        assert theirs.receive(0.01) is None
        ours.send(encode(End(3)))
        ours.close()
        assert decode(theirs.receive(60.0)) == End(3)
        with pytest.raises(LinkLost):
            theirs.receive(60.0)
        assert theirs.is_closed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rollout-ranks 1", "placement colocated and rollout_ranks 1 do not go together; set"),
        ("--placement separate", "placement separate and rollout_ranks 0 do not go together"),
        ("--max-staleness 1", "max_staleness does nothing with placement colocated"),
        ("--carry-over 0.1", "carry_over does nothing with placement colocated"),
        ("--sampler-timeout 5", "sampler_timeout does nothing with placement colocated"),
        (f"{SEPARATE} --max-staleness 1", "nothing corrects for that: add --importance-cap 2"),
        (
            f"{SEPARATE} --max-staleness 9 --num-steps 9 --importance-cap 2",
            "max_staleness (9) must be below num_steps (9)",
        ),
        (
            f"{SEPARATE} --max-staleness 2 --importance-cap 2 --carry-over 0.5"
            " --carry-over-cache keep --rollout-engine sglang",
            "carry_over_cache keep needs rollout_engine embedded: SGLang drops its caches",
        ),
        (
            f"{SEPARATE} --max-staleness 1 --importance-cap 2 --carry-over 0.5",
            "the trainers would wait at max_staleness 1; set --max-staleness 2",
        ),
        (
            f"{SEPARATE} --max-staleness 2 --importance-cap 2 --carry-over 0.5"
            " --max-sampling-rounds 2 --filter-strategy top_fraction",
            "carry_over 0.5 does not go with max_sampling_rounds 2",
        ),
        (f"{SEPARATE} --carry-over-cache keep", "carry_over_cache does nothing without"),
    ],
)
def test_settings_that_cannot_work_are_one_line(flags: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(flags.split())
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        ("--rollout-ranks 2", 2, "rollout_ranks (2) must leave a rank that trains, and the job"),
        (
            "--rollout-ranks 1 --tensor-model-parallel-size 2",
            2,
            "must divide the world size (1); start torchrun with --nproc-per-node 3 or more",
        ),
    ],
)
def test_an_impossible_split_of_the_ranks_is_one_line(flags: str, ranks: int, message: str) -> None:
    parallel = parse(["--placement", "separate", *flags.split()]).parallel
    with pytest.raises(ValueError) as error:
        parallel.num_trainers(ranks)
    assert message in str(error.value)


def never_called(inputs: object) -> None:
    """An estimator."""


def test_an_estimator_can_refuse_stale_samples() -> None:
    ESTIMATORS.register("refuses", Estimator(never_called, needs_fresh_samples=True))
    flags = f"{SEPARATE} --importance-cap 2 --advantage-estimator refuses".split()
    parse(flags)
    with pytest.raises(ValueError, match="refuses needs samples of the present weights"):
        parse([*flags, "--max-staleness", "1"])
