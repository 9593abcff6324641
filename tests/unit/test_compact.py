"""Trajectories in compact form come back as they were, and take few bytes."""

import pickle
import random

from ragen_mega.data.compact import compact, expand
from ragen_mega.data.types import Completion, Trajectory


def play(seed: int, turns: int, observed: int, sampled: int, *, bits: int = 32) -> Trajectory:
    """A trajectory with segments, infos and turns without tokens."""
    draw = random.Random(seed)
    one = Trajectory(group_id=seed, environment="lake", seed=seed, outcome_seed=2**62 + seed)
    for turn in range(turns):
        one.append_observation(
            [draw.randrange(150_000) for _ in range(observed)], afresh=turn % 3 == 2
        )
        size = sampled if turn != 1 else 0
        logprobs = [
            -draw.randrange(2**20) / 2**18 - (0.1 if bits == 64 else 0) for _ in range(size)
        ]
        tokens = [draw.randrange(150_000) for _ in range(size)]
        played = one.append_action(Completion(tokens, logprobs, "stop"))
        played.reward, played.info = draw.random(), {"claims": (turn, 2), "thought": "so"}
    one.terminated = True
    return one


def test_every_field_comes_back() -> None:
    for bits in (32, 64):
        played = [play(seed, seed % 5, 3 + seed, seed % 4, bits=bits) for seed in range(12)]
        played.append(Trajectory(group_id=3))
        packed = pickle.loads(pickle.dumps(compact(played)))
        again = expand(packed)
        assert again == played  # ints, floats and bools are equal across types: see their types
        for one in again:
            for values, kind in ((one.tokens, int), (one.loss_mask, bool)):
                assert {type(value) for value in values} <= {kind}
            assert {type(value) for value in one.rollout_logprobs} <= {float}
        assert packed.contents["rollout_logprobs"].dtype == f"<f{bits // 8}"
        assert played[4].is_held and not compact(played).shells[4].is_held
    assert expand(compact([])) == []


def test_a_token_that_was_observed_takes_its_three_bytes() -> None:
    played = [play(seed, 4, 900, 100) for seed in range(8)]
    num_tokens = sum(map(len, played))
    assert len(pickle.dumps(compact(played))) < 3.6 * num_tokens
    assert len(pickle.dumps(played)) > 13 * num_tokens


def test_what_trajectories_begin_with_travels_once() -> None:
    played = []
    for seed in range(8):
        played.append(Trajectory(group_id=0))
        played[-1].append_observation(list(range(3000)))
        played[-1].append_action(Completion([seed, 7], [-1.0, -2.0], "stop"))
    packed = compact(played)
    assert packed.contents["tokens"].shared.tolist() == [0] + [3000] * 7
    assert len(packed.contents["tokens"].differing) == 3000 + 8 * 2
    again = expand(packed)
    assert again == played and again[3].tokens[2998:] == [2998, 2999, 3, 7]
    assert again[3].tokens[-1] == 7 and len(again[3].tokens) == 3002
