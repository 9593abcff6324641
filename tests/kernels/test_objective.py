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
        ({"surrogate": "ppo"}, "surrogate"),
        ({"surrogate": "gspo", "dual_clip": 3.0}, "dual_clip"),
        ({"surrogate": "gspo", "clip_ratio_low": 1.0}, "clip_ratio_low"),
        ({"importance_mode": "mask"}, "importance_mode"),
        ({"importance_mode": "drop", "importance_cap": 2.0}, "importance_mode"),
        ({"importance_level": "sequence"}, "importance_level"),
        ({"importance_cap": 2.0, "importance_floor": 0.5}, "importance_floor"),
        (
            {"importance_cap": 2.0, "importance_floor": 2.5, "importance_mode": "mask"},
            "importance_floor",
        ),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PolicyObjective(**settings)


@pytest.mark.parametrize(
    ("objective", "missing"),
    [
        (PolicyObjective(kl_kind="k1"), "ref_logprobs"),
        (PolicyObjective(importance_cap=2.0), "rollout_logprobs"),
        (PolicyObjective(surrogate="gspo"), "cu_seqlens"),
    ],
)
def test_missing_inputs_are_named(objective, missing):
    zeros, matrix = torch.zeros(3), torch.zeros(3, 3)
    with pytest.raises(ValueError, match=f"needs {missing}"):
        linear_policy_loss(matrix, matrix, zeros.long(), zeros, zeros, zeros, objective)
