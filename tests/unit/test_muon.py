"""Muon against the singular value decomposition in float64 and against torch's own."""

import pytest
import torch

from ragen_mega.megatron.muon import MOMENTUM, orthogonalised, steps_of


def test_the_iteration_applies_its_polynomial_to_the_singular_values() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((24, 24), (16, 40), (40, 16)):
        matrices = torch.randn(3, rows, columns, generator=generator)
        matrices[1] = 0.0
        matrices[2, :, 0] *= 100.0
        left, values, right = torch.linalg.svd(matrices.double(), full_matrices=False)
        values = values / torch.linalg.vector_norm(values, dim=-1, keepdim=True).clamp(min=1e-7)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        expected = left @ torch.diag_embed(values) @ right
        found = orthogonalised(matrices)
        # Singular values near 0 grow up to 3.4445**5 = 485 times, and their rounding errors too.
        torch.testing.assert_close(found.double(), expected, atol=485 * 2e-6, rtol=0)
        assert not found[1].any(), "what has no gradient stays where it is"
        assert ((values[0] > 0.6) & (values[0] < 1.3)).all()


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    peer = torch.optim.Muon(
        [parameter],
        lr=1.0,
        weight_decay=0.0,
        momentum=MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    momentum = torch.zeros(shape)
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        momentum = MOMENTUM * momentum + gradient
        (ours,) = steps_of([gradient + MOMENTUM * momentum])
        before = parameter.detach().clone()
        parameter.grad = gradient
        peer.step()
        theirs = before - parameter.detach()
        # torch iterates in bfloat16, which has 8 bits.
        error = torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs)
        assert error < 0.05
        assert 0.15 < float(ours.square().mean().sqrt()) < 0.25, "as long as steps of Adam"


def test_matrices_of_one_shape_are_done_together_and_do_not_mix() -> None:
    generator = torch.Generator().manual_seed(2)
    matrices = [
        torch.randn(shape, generator=generator)
        for shape in ((8, 12), (12, 8), (8, 8), (8, 12), (8, 8))
    ]
    for matrix, step in zip(matrices, steps_of(matrices), strict=True):
        assert step.shape == matrix.shape
        torch.testing.assert_close(step, steps_of([matrix])[0], atol=1e-4, rtol=1e-4)
