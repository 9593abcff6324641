"""Aggregation weights: the formulas by loop."""

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
    weights = aggregation_weights(mask, cu_seqlens, mode)
    assert weights.dtype == torch.float32 and weights.shape == mask.shape
    assert not weights[~mask].any()
    padded = aggregation_weights(torch.nn.functional.pad(mask, (0, 5)), cu_seqlens, mode)
    assert torch.equal(padded[:-5], weights) and not padded[-5:].any()
    assert float((weights * losses).sum()) == pytest.approx(
        aggregate(mask, cu_seqlens, losses, mode), abs=1e-6
    )


@pytest.mark.parametrize("mode", MODES)
def test_nothing_sampled(mode):
    nothing = torch.zeros(4, dtype=torch.bool)
    assert aggregation_weights(nothing, torch.tensor([0, 4]), mode).tolist() == [0.0] * 4
