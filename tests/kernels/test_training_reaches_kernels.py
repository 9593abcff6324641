"""Training's credit assignment on the kernels' device: the kernels are reached, and compute what
plain torch computes.
"""

import pytest
import torch
from ragen_kernels import dispatch

from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.config import parse
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory

REACHED = {"gae": {"gae"}, "bilevel_gae": {"gae"}, "reinforce_plus_plus": {"gae"}}
"""Estimator -> kernels that it calls."""


def play(count: int) -> list[Trajectory]:
    """Trajectories of one to three turns, four from each initial state."""
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    trajectories = []
    for index in range(count):
        trajectory = Trajectory(group_id=index // 4, environment="lake")
        for _ in range(draw(1, 4)):
            trajectory.append_observation([1] * draw(2, 6))
            length = draw(1, 5)
            turn = trajectory.append_action(Completion([2] * length, [-0.5] * length, "stop"))
            turn.reward = draw(-2, 3) / 2
        trajectories.append(trajectory)
    return trajectories


def batch_of(trajectories: list[Trajectory]) -> TokenBatch:
    batch = pack(trajectories)
    values = torch.sin(torch.arange(float(batch.num_positions)))
    return batch.with_fields(values=values * batch.loss_mask)


@pytest.mark.parametrize("name", REACHED)
def test_the_kernels_compute_the_advantages_of_training(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--advantage-estimator", name]
    if name == "bilevel_gae":
        flags += ["--reward-placement", "turn"]
    settings = parse(flags).advantage
    trajectories = play(12)
    weights = torch.linspace(0.5, 1.0, 12)
    expected = estimate_advantages(
        batch_of(trajectories), trajectories, settings, group_weights=weights
    )
    device = request.getfixturevalue("small_blocks")
    calls: set[str] = set()
    load = dispatch.import_module

    class Recorded:
        def __init__(self, module):
            self.module = module

        def __getattr__(self, function):
            calls.add(function)
            return getattr(self.module, function)

    monkeypatch.setattr(dispatch, "import_module", lambda module: Recorded(load(module)))
    batch = batch_of(trajectories).to(torch.device(device))
    actual = estimate_advantages(batch, trajectories, settings, group_weights=weights)
    assert calls == REACHED[name]
    for field in ("advantages", "returns"):
        if getattr(expected, field) is not None:
            torch.testing.assert_close(
                getattr(actual, field).cpu(), getattr(expected, field), atol=1e-5, rtol=1e-5
            )
