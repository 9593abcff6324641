"""The launch-bound jobs of the kernel benchmark: advantages and value loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import ragen_kernels as ours
from ragen_kernels import reference_returns
from ragen_kernels.benchmark import Case, Provider
from ragen_kernels.benchmark_cases import gradients

RETURNS_SHAPES = {"cuda": ((64, 4096), (256, 8192), (512, 32768)), "cpu": ((16, 256),)}


def returns_cases(device: str) -> Iterator[Case]:
    """GAE and value loss, both bound by launches; the value loss also in plain torch."""
    for num_trajectories, length in RETURNS_SHAPES[device]:
        total = num_trajectories * length
        shape = {"S": num_trajectories, "T": length}

        def make(seed: int, total: int = total, length: int = length) -> dict[str, Tensor]:
            random = torch.Generator(device).manual_seed(seed)
            values, old_values, rewards = torch.randn(3, total, generator=random, device=device)
            mask = torch.rand(total, generator=random, device=device) < 0.5
            return {
                "values": values,
                "old_values": old_values,
                "rewards": rewards,
                "mask": mask,
                "turn_ends": mask & (rewards > 2.0),
                "cu_seqlens": torch.arange(0, total + 1, length, dtype=torch.int32, device=device),
                "weights": mask / mask.sum(),
            }

        def estimate(bi_level: bool) -> Callable[[dict[str, Tensor]], Any]:
            return lambda x: ours.gae(
                x["rewards"],
                x["values"],
                x["mask"],
                x["cu_seqlens"],
                gamma=1.0,
                lam=0.95,
                turn_ends=x["turn_ends"] if bi_level else None,
                turn_gamma=0.95,
            )

        def value_step(function: Callable[..., Any]) -> Callable[[dict[str, Tensor]], Any]:
            def run(x: dict[str, Tensor]) -> Any:
                values = x["values"].detach().requires_grad_()
                return gradients(
                    function(values, x["old_values"], x["rewards"], x["weights"], clip=0.5)[0],
                    values,
                )

            return run

        yield Case(
            "gae", shape, make, (Provider("ragen", estimate(False)),), min_bytes=17.0 * total
        )
        yield Case(
            "bi-level gae",
            shape,
            make,
            (Provider("ragen", estimate(True)),),
            min_bytes=18.0 * total,
        )
        yield Case(
            "value loss forward+backward",
            shape,
            make,
            (
                Provider("ragen", value_step(ours.value_loss)),
                Provider("torch", value_step(reference_returns.value_loss)),
            ),
            min_bytes=28.0 * total,
        )
