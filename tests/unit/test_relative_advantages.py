"""Group-relative advantages and whitening against the standard library, KL estimates and their
gradients against sums over a vocabulary.
"""

import math
import statistics

import pytest
import torch
from ragen_kernels.objective import PolicyObjective, TokenTerms
from ragen_kernels.reference import kl_estimate, token_losses

from ragen_mega.algorithm import advantages as starpo


def random_groups(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 7, (5,), generator=generator).tolist()
    ids = [group for group, size in zip((42, -3, 7, 0, 5), sizes) for _ in range(size)]
    order = torch.randperm(len(ids), generator=generator)
    scores = torch.randn(len(ids), generator=generator, dtype=torch.float64) * 4 + 2
    group_ids = torch.tensor(ids)[order]
    return torch.where(group_ids == 7, 0.1 + 0.2, scores), group_ids  # group 7 is constant


@pytest.mark.parametrize("seed", range(5))
def test_group_relative(seed):
    scores, group_ids = random_groups(seed)
    grpo = starpo.group_relative(scores, group_ids, normalize_std=True)
    dr_grpo = starpo.group_relative(scores, group_ids, normalize_std=False)
    rloo = starpo.group_relative(scores, group_ids, normalize_std=False, leave_one_out=True)
    for i, score in enumerate(scores.tolist()):
        members = [s for j, s in enumerate(scores.tolist()) if group_ids[j] == group_ids[i]]
        others = [
            s for j, s in enumerate(scores.tolist()) if group_ids[j] == group_ids[i] and j != i
        ]
        centred = score - statistics.mean(members)
        assert float(dr_grpo[i]) == pytest.approx(centred, abs=1e-12)
        assert float(rloo[i]) == pytest.approx(score - statistics.mean(others), abs=1e-12)
        expected = 0.0 if group_ids[i] == 7 else centred / statistics.stdev(members)
        assert float(grpo[i]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("bold", "grpo_of_8", "grpo_of_16", "dr_grpo_of_8"),
    [(0.1, -0.079, -0.070, 0.012), (0.5, -0.045, 0.051, 0.033), (0.9, -0.002, 0.024, 0.012)],
)
def test_grpo_prefers_an_arm_that_always_pays_a_little(
    bold: float, grpo_of_8: float, grpo_of_16: float, dr_grpo_of_8: float
) -> None:
    """The numbers of docs/algorithm.md: every group of one pull each, weighted by its probability.
    The share `bold` pulls an arm that pays 1 a quarter of the time, the others one that pays 0.1.
    """

    def gradient(size: int, normalize_std: bool) -> float:
        """Of the expected return with respect to the logit of the bold arm, for each pull."""
        total = 0.0
        for num_bold in range(size + 1):
            for paid in range(num_bold + 1):
                probability = (
                    math.comb(size, num_bold) * bold**num_bold * (1 - bold) ** (size - num_bold)
                    * math.comb(num_bold, paid) * 0.25**paid * 0.75 ** (num_bold - paid)
                )  # fmt: skip
                payouts = [1.0] * paid + [0.0] * (num_bold - paid) + [0.1] * (size - num_bold)
                scores = torch.tensor(payouts, dtype=torch.float64)
                found = starpo.group_relative(
                    scores, torch.zeros(size, dtype=torch.long), normalize_std=normalize_std
                )
                total += probability * float(found[:num_bold].sum()) / size
        return total

    assert gradient(8, True) == pytest.approx(grpo_of_8, abs=5e-4)
    assert gradient(16, True) == pytest.approx(grpo_of_16, abs=5e-4)
    assert gradient(8, False) == pytest.approx(dr_grpo_of_8, abs=5e-4)


@pytest.mark.parametrize("noise", [0.0, 2**-22])
@pytest.mark.parametrize("spread", [1.0, 1e-4])
def test_only_scores_that_are_equal_but_for_float32_rounding_count_as_constant(noise, spread):
    """No epsilon in the divisor shrinks a group of small scores."""
    scores = torch.tensor([1.0, 1.0 + noise, 1.0, 5 * spread, 6 * spread])
    relative = starpo.group_relative(scores, torch.tensor([0, 0, 0, 1, 1]), normalize_std=True)
    assert relative.dtype == torch.float32
    assert relative[:3].tolist() == [0.0, 0.0, 0.0]
    assert relative[3:].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_float_noise_of_equal_scores_is_no_signal():
    scores = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    assert starpo.group_relative(scores, torch.zeros(3), normalize_std=True).tolist() == [0.0] * 3


def test_asymmetric_clip_bounds():
    scores = torch.tensor([1.0] * 15 + [-20.0] + [0.0] * 15 + [20.0])
    keys = torch.tensor([0] * 16 + [1] * 16)
    clipped = starpo.normalize_rewards(scores, keys, method="asym_clip")
    assert float(clipped[15]) == -1.0, "z = -3.75"
    assert float(clipped[31]) == 3.0, "z = 3.75"
    unclipped = starpo.normalize_rewards(scores, keys, method="mean_std")
    assert torch.equal(clipped[:15], unclipped[:15]) and torch.equal(
        clipped[16:31], unclipped[16:31]
    )


@pytest.mark.parametrize("method", ["mean", "mean_std", "asym_clip"])
def test_a_trajectory_without_others_gets_nothing(method):
    """As where episodes failed; the others are compared as ever."""
    scores = torch.tensor([5.0, 0.1, 0.7, 1e9, 0.4], dtype=torch.float64)
    found = starpo.normalize_rewards(scores, torch.tensor([2, 0, 0, 1, 0]), method=method)
    among = scores[[1, 2, 4]].tolist()
    divisor = 1.0 if method == "mean" else statistics.stdev(among)
    expected = [(score - statistics.mean(among)) / divisor for score in among]
    assert found[[1, 2, 4]].tolist() == pytest.approx(expected, abs=1e-12)
    assert found[[0, 3]].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="2 groups with one; raise --group-size"):
        starpo.group_relative(scores, torch.tensor([2, 0, 0, 1, 0]), normalize_std=True)


def test_whitening():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator) * 3 + 100
    mask = torch.rand(1000, generator=generator) < 0.4
    x[~mask] = torch.nan
    whitened = starpo.whiten(x, mask)
    assert not whitened[~mask].any() and whitened.dtype == torch.float32
    mean, std = statistics.mean(x[mask].tolist()), statistics.stdev(x[mask].tolist())
    expected = (x[mask].double() - mean) / std
    torch.testing.assert_close(whitened[mask].double(), expected, atol=1e-6, rtol=0)


def test_whitening_a_constant_gives_zero():
    assert starpo.whiten(torch.full((8,), 0.3), torch.ones(8, dtype=torch.bool)).abs().max() < 1e-3


def test_a_return_lies_on_the_last_sampled_token():
    """A trajectory without any gets nothing, and padding neither."""
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 1, 0, 0], dtype=torch.bool)
    offsets = torch.tensor([0, 4, 4, 6, 8], dtype=torch.int32)
    placed = starpo.place_at_end(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask, offsets)
    assert placed.tolist() == [0, 0, 1, 0, 0, 0, 4, 0, 0]


def test_kl_estimators_are_unbiased():
    """Expectation over all outcomes of a categorical distribution: k1 and k3 give the exact
    divergence.
    """
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    q = torch.tensor([0.25, 0.25, 0.3, 0.2], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    for kind in ("k1", "k3"):
        assert float((p * kl_estimate(p.log(), q.log(), kind)).sum()) == pytest.approx(
            exact, abs=1e-12
        )


def gradient_of(divergence, logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(divergence(logits.log_softmax(0)), logits)[0]


@pytest.mark.parametrize("seed", range(4))
def test_expected_gradients_of_the_kl_estimators(seed: int) -> None:
    """Over all tokens of a small vocabulary, in float64. In the loss k1 has no gradient, k2 has the
    gradient of the reverse KL, k3 the gradient of the forward one; as a reward k1 has the gradient
    of the reverse KL, and k2 and k3 have others.
    """
    generator = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    q = other.log_softmax(0)
    reverse = gradient_of(lambda p: (p.exp() * (p - q)).sum(), logits)
    forward = gradient_of(lambda p: (q.exp() * (q - p)).sum(), logits)
    logprobs = logits.log_softmax(0)
    p = logprobs.exp()  # of each token: how often it is sampled
    constants = {"old_logprobs": logprobs, "advantages": 0 * p, "weights": p, "ref_logprobs": q}
    terms = TokenTerms(**constants, rollout_logprobs=None)

    def with_respect_to_logits(d_logprobs: torch.Tensor) -> torch.Tensor:
        return d_logprobs - p * d_logprobs.sum()

    for kind, expected in (("k1", 0 * p), ("k2", reverse), ("k3", forward)):
        objective = PolicyObjective(kl_kind=kind, kl_coef=1.0)
        _, d_logprobs, _ = token_losses(logprobs, 0 * p, terms, objective)
        found = with_respect_to_logits(d_logprobs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        paid = with_respect_to_logits(p * kl_estimate(logprobs, q, kind))  # sum of R grad log p
        assert (kind == "k1") == torch.allclose(paid, reverse, rtol=0, atol=1e-14)
    assert min(reverse.abs().max(), (forward - reverse).abs().max()) > 0.01


def test_errors():
    with pytest.raises(ValueError, match="at least 2 trajectories"):
        starpo.group_relative(torch.ones(3), torch.tensor([0, 0, 1]), normalize_std=True)
    with pytest.raises(ValueError, match="2 sampled tokens"):
        starpo.whiten(torch.ones(2), torch.tensor([True, False]))
