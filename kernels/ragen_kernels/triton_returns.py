"""Advantages and the value loss on Triton: launch-bound work in one launch each.

GAE is a composition of affine maps g -> a g + b, hence an associative scan; a token that was not
sampled is the identity (1, 0). One program walks one trajectory from its end in blocks, each block
a parallel scan.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragen_kernels.launch import PER_TOKEN
from ragen_kernels.reference import (
    CONSTANT_STD,
    check_gae_arguments,
    check_groups,
    check_value_clip,
)

SCAN_BLOCK = 2048
SCAN_WARPS = 8
TOKEN_BLOCK = 512
TOKEN_WARPS = 4


@triton.jit
def compose(a1, b1, a2, b2):
    """Affine map 2 after affine map 1."""
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
    """One program per trajectory. The carries come from the block to the right: the advantage at
    its first token, and the value after it, since the lane on the left has read the first token's
    own.
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


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=PER_TOKEN)
def whiten_kernel(ADVANTAGES, MASK, MOMENTS, OUT, size, epsilon, BLOCK: tl.constexpr):
    """(A - mean) / sqrt(var + epsilon) of BLOCK tokens, from three sums in memory."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # In float64: the difference of two large sums, once per program.
    count = tl.load(MOMENTS).to(tl.float64)
    total = tl.load(MOMENTS + 1).to(tl.float64)
    squares = tl.load(MOMENTS + 2).to(tl.float64)
    mean = total / tl.maximum(count, 1.0)
    variance = tl.maximum(squares - count * mean * mean, 0.0) / tl.maximum(count - 1.0, 1.0)
    factor = 1.0 / tl.sqrt(tl.where(count > 1, variance, 1.0) + epsilon)
    mask = token < size
    sampled = tl.load(MASK + token, mask=mask, other=0) != 0
    advantage = tl.load(ADVANTAGES + token, mask=sampled, other=0.0).to(tl.float32)
    tl.store(
        OUT + token, tl.where(sampled, (advantage - mean) * factor, 0.0).to(tl.float32), mask=mask
    )


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=PER_TOKEN)
def group_normalize_kernel(
    SCORES, GROUPS, OUT, size, constant_std, SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per trajectory, which searches all trajectories for its group's members: no
    sorting, no atomics.

    In float64: the float32 mean of equal scores is off by enough to give them a standard deviation.
    """
    own = tl.program_id(0)
    group = tl.load(GROUPS + own)
    count, total = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        other = start + tl.arange(0, BLOCK)
        member = (tl.load(GROUPS + other, mask=other < size, other=0) == group) & (other < size)
        count += tl.sum(member.to(tl.float64), 0)
        total += tl.sum(tl.load(SCORES + other, mask=member, other=0.0).to(tl.float64), 0)
    mean = total / count
    centred = tl.load(SCORES + own).to(tl.float64) - mean
    if SCALE:
        squares = tl.full((), 0.0, tl.float64)
        for start in range(0, size, BLOCK):
            other = start + tl.arange(0, BLOCK)
            member = (tl.load(GROUPS + other, mask=other < size, other=0) == group) & (other < size)
            deviation = tl.load(SCORES + other, mask=member, other=0.0).to(tl.float64) - mean
            squares += tl.sum(tl.where(member, deviation * deviation, 0.0), 0)
        std = tl.sqrt(squares / tl.maximum(count - 1.0, 1.0))
        centred = tl.where(std > constant_std, centred / tl.maximum(std, constant_std), 0.0)
    tl.store(OUT + own, centred.to(tl.float32))


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=PER_TOKEN)
def value_loss_kernel(
    VALUES,
    OLD,
    RETURNS,
    WEIGHTS,
    LOSSES,
    CLIPPED,
    D_VALUES,
    size,
    clip,
    CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted loss, clip flag and gradient of BLOCK tokens."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = token < size
    weight = tl.load(WEIGHTS + token, mask=mask, other=0.0).to(tl.float32)
    active = mask & (weight != 0)
    value = tl.load(VALUES + token, mask=active, other=0.0).to(tl.float32)
    target = tl.load(RETURNS + token, mask=active, other=0.0).to(tl.float32)
    error = value - target
    loss = error * error
    clipped = active & False
    if CLIP:
        old = tl.load(OLD + token, mask=active, other=0.0).to(tl.float32)
        change = value - old
        bounded = old + tl.minimum(tl.maximum(change, -clip), clip) - target
        clipped = (tl.abs(change) > clip) & (bounded * bounded > loss)
        loss = tl.where(clipped, bounded * bounded, loss)
    tl.store(LOSSES + token, 0.5 * weight * loss, mask=mask)
    tl.store(CLIPPED + token, clipped.to(tl.float32), mask=mask)
    tl.store(D_VALUES + token, tl.where(clipped, 0.0, weight * error), mask=mask)


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
    """A bool mask as int8, without a copy."""
    return mask.contiguous().view(torch.int8)


@torch.no_grad()
def whiten(
    advantages: Tensor, loss_mask: Tensor, moments: Tensor, *, epsilon: float = 1e-8
) -> Tensor:
    """See `reference.whiten`; the result is float32."""
    out = torch.empty_like(advantages, dtype=torch.float32)
    if len(out):
        whiten_kernel[(triton.cdiv(len(out), TOKEN_BLOCK),)](
            advantages.contiguous(),
            as_bytes(loss_mask),
            moments.contiguous(),
            out,
            len(out),
            epsilon,
            BLOCK=TOKEN_BLOCK,
            num_warps=TOKEN_WARPS,
        )
    return out


@torch.no_grad()
def group_normalize(scores: Tensor, group_ids: Tensor, *, scale_by_std: bool = True) -> Tensor:
    """See `reference.group_normalize`; the result is float32."""
    check_groups(scores, group_ids)
    out = torch.empty_like(scores, dtype=torch.float32)
    if len(out):
        group_normalize_kernel[(len(out),)](
            scores.contiguous(),
            group_ids.contiguous(),
            out,
            len(out),
            CONSTANT_STD,
            SCALE=scale_by_std,
            BLOCK=TOKEN_BLOCK,
            num_warps=TOKEN_WARPS,
        )
    return out


class _ValueLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, old_values, returns, weights, clip):
        losses, is_clipped, d_values = values.new_empty((3, len(values)), dtype=torch.float32)
        if len(values):
            value_loss_kernel[(triton.cdiv(len(values), TOKEN_BLOCK),)](
                values,
                old_values,
                returns,
                weights,
                losses,
                is_clipped,
                d_values,
                len(values),
                float(clip or 0.0),
                CLIP=clip is not None,
                BLOCK=TOKEN_BLOCK,
                num_warps=TOKEN_WARPS,
            )
        ctx.save_for_backward(d_values)
        ctx.dtype = values.dtype
        ctx.mark_non_differentiable(is_clipped)
        return losses.sum(), is_clipped

    @staticmethod
    def backward(ctx, d_loss, _):
        (d_values,) = ctx.saved_tensors
        return (d_values * d_loss).to(ctx.dtype), None, None, None, None


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """See `reference.value_loss`; loss and gradient in one launch."""
    check_value_clip(clip)
    constants = (x.detach().contiguous() for x in (old_values, returns, weights))
    return _ValueLoss.apply(values.contiguous(), *constants, clip)
