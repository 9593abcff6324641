"""Rollouts come back from the disk exactly as they were sampled, damage is seen, and the right ones
are kept.
"""

import hashlib
import itertools
import json
import resource
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from ragen_mega.config import parse
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.run.checkpoints import RunCheckpoints
from ragen_mega.run.rollouts import fingerprint
from ragen_mega.storage.checkpoints import CheckpointWriter
from ragen_mega.storage.integrity import describe_error
from ragen_mega.storage.rollouts import RolloutStore, oldest_kept
from ragen_mega.storage.sealed_files import read_sealed, write_sealed

ORIGIN = {"weights": "abc", "weight_version": 4, "settings": {"temperature": 1.0, "names": ["a"]}}
FLOATS = st.floats(allow_nan=False)
PLAIN = st.one_of(st.booleans(), st.integers(), FLOATS, st.text(max_size=4), st.none())
INFOS = st.dictionaries(
    st.text(max_size=5),
    st.one_of(PLAIN, st.lists(PLAIN, max_size=2), st.lists(PLAIN, max_size=2).map(tuple)),
    max_size=3,
)


@st.composite
def trajectories(draw, group_id: int) -> Trajectory:
    seed = st.integers(0, 2**63 - 1)
    trajectory = Trajectory(
        group_id, draw(st.text(max_size=5)), draw(seed), draw(seed), draw(st.integers(0, 99))
    )
    for _ in range(draw(st.integers(0, 3))):
        trajectory.append_observation(draw(st.lists(st.integers(0, 2**31 - 1), max_size=4)))
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
        turn = trajectory.append_action(Completion(tokens, [draw(FLOATS) for _ in tokens], "stop"))
        turn.reward, turn.info = draw(FLOATS), draw(INFOS)
    trajectory.terminated, trajectory.truncated = draw(st.booleans()), draw(st.booleans())
    trajectory.is_tree, trajectory.rank = draw(st.booleans()), draw(st.integers(0, 99))
    return trajectory


@st.composite
def rollouts(draw) -> list[TrajectoryGroup]:
    ids = draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=3, unique=True))
    return [
        TrajectoryGroup(i, draw(st.lists(trajectories(i), min_size=1, max_size=3))) for i in ids
    ]


def bits(groups: list[TrajectoryGroup]) -> list:
    """Everything in the groups; floats by their bits, which tells -0.0 from 0.0, and containers
    with their type.
    """

    def exact(value):
        if isinstance(value, float):
            return struct.pack("d", value)
        if isinstance(value, dict):
            return {key: exact(item) for key, item in value.items()}
        return type(value), (
            [exact(item) for item in value] if isinstance(value, (list, tuple)) else value
        )

    return [
        (group.group_id, t.group_id, t.environment, t.seed, t.outcome_seed, t.weight_version,
         t.terminated, t.truncated, t.is_tree, t.rank,
         exact(t.tokens[:]), exact(t.loss_mask[:]), exact(t.rollout_logprobs[:]),
         [(turn.start, turn.end, exact(turn.reward), exact(turn.info)) for turn in t.turns])
        for group in groups
        for t in group.trajectories
    ]  # fmt: skip


def small() -> list[TrajectoryGroup]:
    trajectory = Trajectory(7, "bandit", 1, 2, 3)
    trajectory.append_observation([5, 6])
    trajectory.append_action(Completion([8, 9], [-0.1, -1e-9], "stop")).info["actions"] = ("Up",)
    return [TrajectoryGroup(7, [trajectory])]


@settings(max_examples=100)
@given(groups=rollouts())
def test_groups_come_back_to_the_bit(
    groups: list[TrajectoryGroup], tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = RolloutStore(tmp_path_factory.mktemp("r") / "rollouts")
    store.write(12, groups, ORIGIN)
    back = store.recall(12, ORIGIN, pytest.fail)
    assert bits(back) == bits(groups) and back == groups


def test_files_are_whole(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    store.write(3, small(), ORIGIN)
    assert [entry.name for entry in store.directory.iterdir()] == ["step_00000003.safetensors"]


def test_every_damage_is_seen_and_the_step_sampled_again(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.write(3, small(), ORIGIN)
    path = tmp_path / "step_00000003.safetensors"
    intact = path.read_bytes()
    damaged = [b"", intact[:7], intact[: len(intact) // 2], intact[:-1], intact + b"\0"]
    for position in range(0, len(intact), 7):
        damaged.append(
            intact[:position]
            + bytes([intact[position] ^ 1 << position % 8])
            + intact[position + 1 :]
        )
    for content in damaged:
        path.write_bytes(content)
        reports: list[str] = []
        assert store.recall(3, ORIGIN, reports.append) is None
        assert (
            len(reports) == 1
            and "step_00000003.safetensors" in reports[0]
            and "sampled again" in reports[0]
        )
    path.write_bytes(intact)
    assert store.recall(3, ORIGIN, pytest.fail) == small()


def test_a_file_of_another_step_or_origin_is_not_used(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.write(3, small(), ORIGIN)
    (tmp_path / "step_00000004.safetensors").write_bytes(
        (tmp_path / "step_00000003.safetensors").read_bytes()
    )
    reports: list[str] = []
    assert store.recall(4, ORIGIN, reports.append) is None
    assert store.recall(3, ORIGIN | {"weights": "other"}, reports.append) is None
    assert (
        store.recall(3, {key: ORIGIN[key] for key in ("weights", "settings")}, reports.append)
        is None
    )
    assert "step 3, not 2 and 4" in reports[0]
    assert (
        "another weights; the step is sampled" in reports[1]
        and "another weight_version" in reports[2]
    )
    assert store.recall(5, ORIGIN, pytest.fail) is None


def test_prune(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    for step in range(5):
        store.write(step, small(), ORIGIN)
    (tmp_path / ".step_00000009.safetensors.part").write_bytes(b"half")
    store.prune(3)
    assert store.steps() == [3, 4]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("keep", "kept"), [(None, [2, 3, 4]), (2, [3, 4]), (0, [0, 1, 2, 3, 4])])
def test_which_rollouts_a_run_keeps(tmp_path: Path, keep: int | None, kept: list[int]) -> None:
    """None: those since the oldest checkpoint; one that is being written does not count."""
    store = RolloutStore(tmp_path / "rollouts")
    checkpoints = CheckpointWriter(tmp_path / "checkpoints", {}, keep_last=0, keep_best=False)
    for step in range(5):
        store.write(step, small(), ORIGIN)
        store.prune(oldest_kept(step, keep, checkpoints.steps()))
        if step == 2:
            assert store.steps()[0] == (1 if keep == 2 else 0)
            for name in ("step_00000002", "step_00000003", ".step_00000001.tmp"):
                (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert store.steps() == kept


@pytest.mark.parametrize(
    ("samplers", "steps", "saved_step", "kept"),
    [
        (None, [4, 2], 4, [5]),
        (object(), [4, 2], 4, [2, 3, 4, 5]),
        (object(), [], 3, [3, 4, 5]),
        (object(), [], None, [5]),
    ],
    ids=["colocated", "separate", "being_written", "no_checkpoint"],
)
def test_what_a_checkpoint_needs_stays_where_others_sample(
    tmp_path: Path, samplers: object, steps: list[int], saved_step: int | None, kept: list[int]
) -> None:
    """It lacks the weights of rollouts that had arrived when it was written."""
    store = RolloutStore(tmp_path)
    checkpoints = SimpleNamespace(
        steps=lambda: steps,
        saved_step=saved_step,
        _config=parse(["--keep-rollouts", "1"]).checkpoint,
        _samplers=samplers,
        _guard=SimpleNamespace(pinned=[]),
    )
    for step in range(6):
        store.write(step, small(), ORIGIN)
    store.prune(RunCheckpoints.oldest_rollout(checkpoints, 5))
    assert store.steps() == kept


def test_seals_do_not_depend_on_the_facts(tmp_path: Path) -> None:
    facts = {"sha256": "0" * 64, "text": '"sha256":"' + "0" * 64 + '"'}
    write_sealed(tmp_path / "file", {"x": torch.arange(3)}, facts)
    tensors, back = read_sealed(tmp_path / "file")
    assert back == facts and torch.equal(tensors["x"], torch.arange(3))


def test_a_sealed_file_of_a_version_that_kept_facts_elsewhere_is_skipped(tmp_path: Path) -> None:
    """It has not changed, and this version finds no facts among its tensors."""
    blank = save({"x": torch.arange(3)}, {"sha256": "0" * 64})
    digest = hashlib.sha256(blank).hexdigest().encode()
    (tmp_path / "step_00000003.safetensors").write_bytes(blank.replace(b"0" * 64, digest, 1))
    reports: list[str] = []
    assert RolloutStore(tmp_path).recall(3, ORIGIN, reports.append) is None
    assert "sampled again: step_00000003.safetensors holds no facts" in reports[0]


def test_facts_may_be_longer_than_a_header(tmp_path: Path) -> None:
    """safetensors refuses headers of more than 100 MB."""
    facts = {"thoughts": "x" * 10**6}
    write_sealed(tmp_path / "file", {"x": torch.arange(3)}, facts)
    assert int.from_bytes((tmp_path / "file").read_bytes()[:8], "little") < 1000
    assert read_sealed(tmp_path / "file")[1] == facts


def test_infos_come_back_as_they_were(tmp_path: Path) -> None:
    """Whatever names a policy gives to the arguments of a tool."""
    infos = [{"tuple": 5}, {"tuple": [1]}, {"a": ({"tuple": ()},), "b": {"tuple": {"tuple": 1}}}]
    groups = small()
    turns = [turn for group in groups for one in group.trajectories for turn in one.turns]
    for turn, info in zip(turns, itertools.cycle(infos)):
        turn.info = info
    store = RolloutStore(tmp_path)
    store.write(0, groups, ORIGIN)
    back = [t for g in store.read(0).groups for one in g.trajectories for t in one.turns]
    assert [turn.info for turn in back] == [turn.info for turn in turns]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """The size limit of a process stands for the disk: `write` fails in the middle of the file."""
    store = RolloutStore(tmp_path)
    store.write(3, small(), ORIGIN)
    size = (tmp_path / "step_00000003.safetensors").stat().st_size

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as failed:
            store.write(3, small(), ORIGIN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = describe_error(failed.value)
    assert said.startswith(f"cannot write {tmp_path}/step_00000003") and "(ulimit -f" in said
    assert store.recall(3, ORIGIN, pytest.fail) == small() and len(list(tmp_path.iterdir())) == 1


def test_reading_executes_nothing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    torch.save({"tokens": torch.zeros(2)}, tmp_path / "step_00000001.safetensors")  # a pickle
    reports: list[str] = []
    assert RolloutStore(tmp_path).recall(1, ORIGIN, reports.append) is None and len(reports) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprint_sees_the_last_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(5, 4, dtype=dtype), torch.randn(3, dtype=dtype)]
    before = fingerprint(weights)
    assert fingerprint([value.clone() for value in weights]) == before
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    changed = [value.clone() for value in weights]
    changed[0].view(integers)[2, 3] ^= 1
    assert fingerprint(changed) != before
    assert fingerprint([weights[0], -weights[1]]) != before
    assert json.loads(json.dumps(before)) == before
