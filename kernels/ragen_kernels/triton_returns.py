"""Generalised advantage estimation on Triton, in one launch.

GAE is a composition of affine maps g -> a g + b, hence an associative scan; a token that was not
sampled is the identity (1, 0). One program walks one trajectory from its end in blocks, each block
a parallel scan.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragen_kernels.launch import PER_TOKEN
from ragen_kernels.reference import check_gae_arguments

SCAN_BLOCK = 2048
SCAN_WARPS = 8


@triton.jit
def compose(a1, b1, a2, b2):
    """Compose affine map 2 after affine map 1."""
    return a1 * a2, b2 + a2 * b1


@triton.jit
def from_right(factor, term, carry):
    """Solve g_i = term_i + factor_i g_{i+1} over a block, with `carry` on its right."""
    a, b = tl.associative_scan((factor, term), 0, compose, reverse=True)
    return b + a * carry


@triton.jit
def first_lane(x, lane):
    """A block's first element, as a scalar."""
    return tl.sum(tl.where(lane == 0, x, 0.0), 0)


@triton.jit(do_not_specialize_on_alignment=PER_TOKEN)
def gae_kernel(
    REWARDS,
    VALUES,
    MASK,
    TURN_ENDS,
    OFFSETS,
    ADVANTAGES,
    RETURNS,
    gamma,
    lam,
    turn_gamma,
    turn_lam,
    BI_LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Estimate advantages with one program per trajectory. The carries come from the block to the
    right: the advantage at its first token, and the value after it, since the lane on the left has
    read the first token's own.
    """
    trajectory = tl.program_id(0)
    begin = tl.load(OFFSETS + trajectory).to(tl.int64)
    length = (tl.load(OFFSETS + trajectory + 1) - begin).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    advantage_carry, value_carry, turn_carry, turn_value_carry = 0.0, 0.0, 0.0, 0.0
    num_blocks = tl.cdiv(length, BLOCK)
    for step in range(0, num_blocks):
        local = (num_blocks - 1 - step) * BLOCK + lane
        t = begin + local
        inside = local < length
        sampled = tl.load(MASK + t, mask=inside, other=0) != 0
        v = tl.load(VALUES + t, mask=sampled, other=0.0).to(tl.float32)
        r = tl.load(REWARDS + t, mask=sampled, other=0.0).to(tl.float32)
        has_next = local + 1 < length
        next_sampled = tl.load(MASK + t + 1, mask=has_next, other=0) != 0
        v_right = tl.load(VALUES + t + 1, mask=next_sampled, other=0.0).to(tl.float32)
        next_value = from_right(tl.where(next_sampled, 0.0, 1.0), v_right, value_carry)
        delta = r + gamma * next_value - v
        decay = tl.zeros((BLOCK,), tl.float32) + gamma * lam
        if BI_LEVEL:
            is_end = sampled & (tl.load(TURN_ENDS + t, mask=inside, other=0) != 0)
            next_is_end = next_sampled & (tl.load(TURN_ENDS + t + 1, mask=has_next, other=0) != 0)
            next_turn_value = from_right(
                tl.where(next_is_end, 0.0, 1.0),
                tl.where(next_is_end, v_right, 0.0),
                turn_value_carry,
            )
            turn_delta = r + turn_gamma * next_turn_value - v
            turn_advantage = from_right(
                tl.where(is_end, turn_gamma * turn_lam, 1.0),
                tl.where(is_end, turn_delta, 0.0),
                turn_carry,
            )
            turn_carry = first_lane(turn_advantage, lane)
            turn_value_carry = first_lane(next_turn_value, lane)
            delta = tl.where(is_end, turn_advantage, delta)
            decay = tl.where(is_end, 0.0, decay)
        advantage = from_right(
            tl.where(sampled, decay, 1.0), tl.where(sampled, delta, 0.0), advantage_carry
        )
        advantage_carry = first_lane(advantage, lane)
        value_carry = first_lane(next_value, lane)
        advantage = tl.where(sampled, advantage, 0.0)
        tl.store(ADVANTAGES + t, advantage, mask=inside)
        tl.store(RETURNS + t, advantage + v, mask=inside)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float,
    turn_ends: Tensor | None = None,
    turn_gamma: float = 1.0,
    turn_lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See `reference.gae`; arithmetic and results are float32."""
    check_gae_arguments(
        rewards,
        values,
        loss_mask,
        cu_seqlens,
        turn_ends,
        gamma=gamma,
        lam=lam,
        turn_gamma=turn_gamma,
        turn_lam=turn_lam,
    )
    num_trajectories = len(cu_seqlens) - 1
    advantages, returns = rewards.new_zeros((2, len(rewards)), dtype=torch.float32)
    if num_trajectories:
        gae_kernel[(num_trajectories,)](
            rewards.contiguous(),
            values.contiguous(),
            as_bytes(loss_mask),
            None if turn_ends is None else as_bytes(turn_ends),
            cu_seqlens,
            advantages,
            returns,
            float(gamma),
            float(lam),
            float(turn_gamma),
            float(turn_lam),
            BI_LEVEL=turn_ends is not None,
            BLOCK=SCAN_BLOCK,
            num_warps=SCAN_WARPS,
        )
    return advantages, returns


def as_bytes(mask: Tensor) -> Tensor:
    """Return a bool mask as int8, without a copy."""
    return mask.contiguous().view(torch.int8)
