"""The objective refuses settings that make no sense or do nothing."""

import pytest
import torch
from ragen_kernels import PolicyObjective, linear_policy_loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_ratio_low": 1.0}, "clip_ratio_low"),
        ({"clip_ratio_low": -0.1}, "clip_ratio_low"),
        ({"clip_ratio_high": float("inf")}, "clip_ratio_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"kl_kind": "k4"}, "kl_kind"),
        ({"kl_kind": "k3", "kl_coef": -1.0}, "kl_coef"),
        ({"kl_coef": 0.1}, "needs a kl_kind"),
        ({"entropy_coef": float("nan")}, "entropy_coef"),
        ({"importance_cap": 0.0}, "importance_cap"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PolicyObjective(**settings)


@pytest.mark.parametrize(
    "objective", [PolicyObjective(kl_kind="k1"), PolicyObjective(importance_cap=2.0)]
)
def test_missing_logprobs_are_named(objective):
    zeros, matrix = torch.zeros(3), torch.zeros(3, 3)
    with pytest.raises(ValueError, match="needs r.*_logprobs"):
        linear_policy_loss(matrix, matrix, zeros.long(), zeros, zeros, zeros, objective)
