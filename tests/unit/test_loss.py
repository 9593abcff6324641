"""Aggregation weights: the formulas by loop, and additivity over ranks and microbatches."""

import pytest
import torch

from ragen_mega.algorithm.aggregation import aggregation_weights

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def make_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (7,), generator=generator)
    lengths[3] = 0
    mask = torch.rand(int(lengths.sum()), generator=generator) < 0.6
    offsets = [0, *lengths.cumsum(0).tolist()]
    mask[offsets[5] : offsets[6]] = False  # a trajectory without sampled tokens
    mask[offsets[6]] = True
    losses = torch.randn(len(mask), generator=generator, dtype=torch.float64)
    return mask, torch.tensor(offsets).int(), losses


def aggregate(mask, cu_seqlens, losses, mode):
    """The loss of the papers, trajectory by trajectory."""
    offsets = cu_seqlens.tolist()
    rows = [
        [float(losses[t]) for t in range(start, end) if mask[t]]
        for start, end in zip(offsets, offsets[1:])
    ]
    if mode == "token-mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows if row) / len(rows)
    return sum(sum(row) for row in rows) / len(rows)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", MODES)
def test_weights_give_the_loss(seed, mode):
    mask, cu_seqlens, losses = make_batch(seed)
    counts = {"num_tokens": int(mask.sum()), "num_trajectories": len(cu_seqlens) - 1}
    weights = aggregation_weights(mask, cu_seqlens, mode=mode, **counts)
    assert weights.dtype == torch.float32 and weights.shape == mask.shape
    assert not weights[~mask].any()
    assert float((weights * losses).sum()) == pytest.approx(
        aggregate(mask, cu_seqlens, losses, mode), abs=1e-6
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (1, 2, 3, 4, 5, 6)])
def test_parts_add_up_to_the_whole(mode, cuts):
    """However trajectories are dealt to ranks and microbatches, padded or not, the parts' weights
    are the whole's.
    """
    mask, cu_seqlens, _ = make_batch(0)
    counts = {"num_tokens": int(mask.sum()), "num_trajectories": len(cu_seqlens) - 1}
    whole = aggregation_weights(mask, cu_seqlens, mode=mode, **counts)
    bounds = [0, *cuts, len(cu_seqlens) - 1]
    pieces = []
    for first, last in zip(bounds, bounds[1:]):
        start, end = int(cu_seqlens[first]), int(cu_seqlens[last])
        padded = torch.nn.functional.pad(mask[start:end], (0, 5))
        weights = aggregation_weights(
            padded, cu_seqlens[first : last + 1] - start, mode=mode, **counts
        )
        assert not weights[end - start :].any()
        pieces.append(weights[: end - start])
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_sampled(mode):
    nothing = torch.zeros(4, dtype=torch.bool)
    weights = aggregation_weights(
        nothing, torch.tensor([0, 4]), mode=mode, num_tokens=0, num_trajectories=0
    )
    assert weights.tolist() == [0.0] * 4


def test_errors():
    mask, cu_seqlens, _ = make_batch(0)
    with pytest.raises(ValueError, match="unknown loss aggregation"):
        aggregation_weights(mask, cu_seqlens, mode="mean", num_tokens=99, num_trajectories=99)
    with pytest.raises(ValueError, match="counts the whole minibatch"):
        aggregation_weights(mask, cu_seqlens, mode="token-mean", num_tokens=1, num_trajectories=99)
    with pytest.raises(ValueError, match="counts the whole minibatch"):
        aggregation_weights(mask, cu_seqlens, mode="token-mean", num_tokens=99, num_trajectories=1)
