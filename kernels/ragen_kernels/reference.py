"""Every operation in plain torch: the specification of the kernels, and what CPU tensors run.

Arithmetic is float64 for float64 inputs and float32 for all others. Terms of the objective:
`objective.py`; the split softmax: `vocab.py`. GAE: arXiv:1506.02438 eq. (16), over the sampled
tokens of a trajectory: the successor of a sampled token is the next sampled token, whatever the
environment wrote in between. Bi-level GAE (turns, then tokens): RAGEN, arXiv:2504.20073.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ragen_kernels.objective import MAX_LOG_RATIO, Likeliest, PolicyObjective, TokenTerms
from ragen_kernels.vocab import RowStatistics, VocabShard, gathered, is_split, reduce_over_group


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, float32 for every other float dtype."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def row_statistics(
    logits: Tensor, labels: Tensor, shard: VocabShard, temperature: float
) -> RowStatistics:
    """Return the softmax statistics of one vocabulary shard, without its padding.

    Args:
        logits: [T, V/tp], not yet divided by the temperature.
        labels: [T] int64 global ids; a label of another shard has target 0.

    Raises:
        ValueError: a label outside the vocabulary. On CUDA, where the host would have to wait for
            the labels, the row's target is NaN instead.
    """
    shard.check_labels(labels)
    x = _scaled(logits, shard, temperature)
    if shard.num_valid == 0:
        zeros = x.new_zeros(len(x))
        return RowStatistics(zeros - torch.inf, zeros, zeros)
    peak = x.amax(dim=1)
    exps = torch.exp_(x - peak[:, None])
    total = exps.sum(dim=1)
    column, is_local = _local_columns(labels, shard)
    target = torch.where(is_local, x.gather(1, column[:, None]).squeeze(1), 0)
    return RowStatistics(peak + total.log(), torch.linalg.vecdot(exps, x) / total, target)


def _scaled(logits: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """[T, V'] logits / temperature of the shard's entries, in the compute dtype; perhaps a view."""
    x = logits[:, : shard.num_valid].to(compute_dtype(logits))
    return x if temperature == 1.0 else x / temperature


def _local_columns(ids: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the column of each id in this shard (0 where it has none) and whether it has one:
    int64 and bool of the shape of `ids`.
    """
    column = ids - shard.start
    is_local = (column >= 0) & (column < shard.num_valid)
    return torch.where(is_local, column, 0), is_local


def logits_gradient(
    logits: Tensor,
    out: Tensor,
    labels: Tensor,
    rows: RowStatistics,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    shard: VocabShard,
    temperature: float,
    d_others: Tensor | None = None,
) -> Tensor:
    """d loss / d logits [T, V/tp] into `out`, which may be `logits`; 0 in the padding.

    In x = logits / temperature: d_logprob * (onehot - p) - d_entropy * p * (x - mean), with
    p = exp(x - lse) over the whole vocabulary. The one-hot is added in the compute dtype: rounding
    to a narrower dtype comes after the subtraction.

    Args:
        logits, labels: as in `row_statistics`.
        rows: statistics of the whole vocabulary.
        d_logprobs, d_entropy: [T], gradients in the rows' log-probabilities and entropies.
        d_others: [T], sum of the gradients in log-probabilities of other tokens of a row, whose
            one-hots `add_one_hots` adds.
    """
    x = _scaled(logits, shard, temperature)
    d_logprobs = d_logprobs / temperature
    d_all = d_logprobs if d_others is None else d_logprobs + d_others / temperature
    gradient = torch.sub(x, rows.lse[:, None]).exp_()
    if d_entropy is None:
        gradient *= -d_all[:, None]
    else:
        d_entropy = d_entropy / temperature
        constant = d_entropy * rows.mean - d_all
        gradient *= torch.addcmul(constant[:, None], -d_entropy[:, None], x)
    if shard.num_valid:
        column, is_local = _local_columns(labels, shard)
        gradient.scatter_add_(1, column[:, None], torch.where(is_local, d_logprobs, 0)[:, None])
    out[:, : shard.num_valid] = gradient
    out[:, shard.num_valid :] = 0
    return out


def token_losses(
    logprobs: Tensor, entropy: Tensor, terms: TokenTerms, objective: PolicyObjective
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the token objective with its statistics and derivatives.

    Args:
        logprobs, entropy: [T], of the current weights.

    Returns:
        outputs [10, T], the weighted loss and the fields of `PolicyStats`; and the loss's
        derivatives in logprobs [T] and entropy [T], the latter None without entropy bonus.
    """
    dtype = logprobs.dtype
    terms = terms.each(lambda term: term.to(dtype))
    advantages, weights = terms.advantages, terms.weights
    logprobs = logprobs.detach()
    old_logprobs = logprobs if terms.old_logprobs is None else terms.old_logprobs
    with torch.enable_grad():
        logprobs = logprobs.detach().requires_grad_()
        log_ratio = torch.clamp(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = torch.exp(log_ratio)
        low, high = 1 - objective.clip_ratio_low, 1 + objective.clip_ratio_high
        clipped = torch.clamp(ratio, low, high)
        is_cispo = objective.surrogate == "cispo"
        if is_cispo:
            surrogate = -advantages * clipped.detach() * logprobs
        else:
            unclipped, clipped = -advantages * ratio, -advantages * clipped
            surrogate = torch.where(unclipped >= clipped, unclipped, clipped)

        is_dual_clipped = torch.zeros_like(ratio, dtype=torch.bool)
        if objective.dual_clip is not None:
            is_dual_clipped = (advantages < 0) & (ratio > objective.dual_clip)
            surrogate = torch.where(is_dual_clipped, -advantages * objective.dual_clip, surrogate)

        if objective.min_entropy:
            surrogate = torch.where(entropy >= objective.min_entropy, surrogate, 0.0)

        importance = torch.ones_like(surrogate)
        if objective.importance_cap is not None:
            assert terms.rollout_logprobs is not None  # `check_inputs`
            drift = old_logprobs - terms.rollout_logprobs
            drift = torch.clamp(drift, -MAX_LOG_RATIO, MAX_LOG_RATIO)
            importance = bounded_importance(torch.exp(drift), objective)

        ref_kl = torch.zeros_like(surrogate)
        if objective.kl_kind is not None:
            assert terms.ref_logprobs is not None  # `check_inputs`
            ref_kl = kl_estimate(logprobs, terms.ref_logprobs, objective.kl_kind)
        losses = weights * (
            importance * surrogate - objective.entropy_coef * entropy + objective.kl_coef * ref_kl
        )
        (d_logprobs,) = torch.autograd.grad(losses.sum(), logprobs)
    outputs = (
        losses,
        logprobs,
        entropy,
        ratio,
        ((advantages < 0) | is_cispo) & (ratio < low),
        ((advantages > 0) | is_cispo) & (ratio > high),
        is_dual_clipped,
        ratio - 1 - log_ratio,
        importance,
        ref_kl,
    )
    d_entropy = -objective.entropy_coef * weights if objective.entropy_coef else None
    return torch.stack([x.detach().to(dtype) for x in outputs]), d_logprobs, d_entropy


def bounded_importance(importance: Tensor, objective: PolicyObjective) -> Tensor:
    """Bound the importance by the objective's limits: truncated at the cap, or 0 outside them."""
    cap, floor = objective.importance_cap, objective.importance_floor or 0.0
    assert cap is not None  # else no importance is computed
    if objective.importance_mode == "truncate":
        return importance.clamp(max=cap)
    return torch.where((importance >= floor) & (importance <= cap), importance, 0.0)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Return the per-token estimate of KL(policy || reference) from tokens of the policy, log-ratio
    clamped to +-20.
    """
    log_ratio = torch.clamp(ref_logprobs - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


def likeliest_tokens(
    logits: Tensor, lse: Tensor, count: int, below: int, shard: VocabShard, temperature: float
) -> Likeliest:
    """Return the `count` tokens with ids less than `below` that each row of logits [T, V/tp] gives
    the most, of the whole vocabulary, whose log-sum-exp is `lse` [T].
    """
    num_valid = min(max(below - shard.start, 0), shard.num_valid)
    values, ids = logits[:, :num_valid].topk(min(count, num_valid))
    lacking = count - values.shape[1]
    values = values.to(compute_dtype(logits)) / temperature
    values = torch.nn.functional.pad(values, (0, lacking), value=-torch.inf)
    ids = torch.nn.functional.pad(ids + shard.start, (0, lacking))
    if is_split(shard.group) and len(logits):
        values, ids = (torch.cat([*gathered(each, shard.group)], 1) for each in (values, ids))
        values, order = values.topk(count)
        ids = ids.gather(1, order)
    return Likeliest(ids, values - lse[:, None])


def divergence(
    logits: Tensor,
    row_of: Tensor,
    lse: Tensor,
    teacher: Likeliest,
    shard: VocabShard,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return the divergence D [T] of tokens from their teacher, and its derivatives [T, K] in the
    policy's log-probabilities of the teacher's likeliest tokens.

    D = sum of q log(q / p) - q + p, derivative p - q, with q of the teacher and p of the policy.
    Over a whole vocabulary D is KL(teacher || policy), and each term is at least 0, so that D is at
    most that, and 0 only where p = q.

    Args:
        logits: [R, V/tp], not yet divided by the temperature.
        row_of: [T], the row of each token.
        lse: [T], log-sum-exp of that row over the whole vocabulary.
    """
    column, is_local = _local_columns(teacher.ids, shard)
    x = logits[row_of[:, None], column].to(lse.dtype) / temperature
    x = torch.where(is_local, x, 0)
    if is_split(shard.group) and len(x):
        dist.all_reduce(x, group=shard.group)
    logprobs, wanted = x - lse[:, None], teacher.logprobs.to(lse.dtype)
    slopes = logprobs.exp() - wanted.exp()
    return (wanted.exp() * (wanted - logprobs) + slopes).sum(1), slopes


def add_one_hots(
    gradient: Tensor,
    row_of: Tensor,
    ids: Tensor,
    slopes: Tensor,
    shard: VocabShard,
    temperature: float,
) -> None:
    """Add to the gradient of logits [R, V/tp] what derivatives [T, K] in log-probabilities of ids
    give these ids; `logits_gradient` gives the rest of the rows its part.
    """
    column, is_local = _local_columns(ids, shard)
    values = torch.where(is_local, slopes / temperature, 0).to(gradient.dtype)
    places = row_of[:, None].expand_as(column), column
    gradient.index_put_(places, values, accumulate=True)


def in_pieces(
    row_statistics: Callable[..., RowStatistics],
    token_losses: Callable[..., tuple[Tensor, *tuple[Tensor | None, ...]]],
    logits_gradient: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """`policy_rows_` by these three operations, of whichever implementation; the statistics of a
    row cross ranks in between.
    """

    def policy_rows_(
        logits: Tensor,
        labels: Tensor,
        terms: TokenTerms,
        objective: PolicyObjective,
        shard: VocabShard,
        temperature: float,
        row_of: Tensor | None = None,
        teacher: Likeliest | None = None,
    ) -> Tensor:
        """Return the outputs [10, T] of `token_losses` for T tokens, with a teacher and its
        divergence [11, T]. The gradient of the summed loss replaces their rows of logits
        [R, V/tp].

        Args:
            labels: [R] int64 global ids.
            row_of: [T], the row that each token shares with others; None: each has its own, R = T.
            teacher: the teacher's likeliest tokens, [T, K].
        """
        rows = reduce_over_group(row_statistics(logits, labels, shard, temperature), shard.group)

        def per_token(values: Tensor) -> Tensor:
            return values if row_of is None else values[row_of]

        def per_row(values: Tensor | None) -> Tensor | None:
            if row_of is None or values is None:
                return values
            return torch.zeros_like(rows.lse).index_add_(0, row_of, values)

        def put_gradient(d_others: Tensor | None = None) -> None:
            slopes = (per_row(values) for values in (*derivatives, d_others))
            d_logprobs, d_entropy, d_others = slopes
            logits_gradient(
                logits, logits, labels, rows, d_logprobs, d_entropy, shard, temperature, d_others
            )

        found = (per_token(values) for values in (rows.logprobs, rows.entropy))
        outputs, *derivatives = token_losses(*found, terms, objective)
        if teacher is None:
            put_gradient()
            return outputs
        own = torch.arange(len(logits), device=logits.device) if row_of is None else row_of
        lse = per_token(rows.lse)
        values, slopes = divergence(logits, own, lse, teacher, shard, temperature)
        weights = objective.teacher_coef * terms.weights.to(lse.dtype)
        slopes *= weights[:, None]
        put_gradient(slopes.sum(1))
        add_one_hots(logits, own, teacher.ids, slopes, shard, temperature)
        outputs = torch.cat([outputs, values[None]])
        outputs[0] += weights * values
        return outputs

    return policy_rows_


policy_rows_ = in_pieces(row_statistics, token_losses, logits_gradient)


def check_gae_arguments(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    turn_ends: Tensor | None,
    **discounts: float,
) -> None:
    """Raise ValueError for shapes that differ or discounts outside [0, 1]."""
    inputs = {"rewards": rewards, "values": values, "loss_mask": loss_mask, "turn_ends": turn_ends}
    shapes = {name: tuple(x.shape) for name, x in inputs.items() if x is not None}
    if rewards.dim() != 1 or len(set(shapes.values())) != 1:
        raise ValueError(f"all inputs must be packed to one shape [T], got {shapes}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        raise ValueError(f"cu_seqlens must be [S + 1] offsets, got shape {tuple(cu_seqlens.shape)}")
    for name, value in discounts.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {value}; use 1.0 for no discount")


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
    """Compute generalised advantage estimation over packed trajectories, token-level or bi-level.

    Token level: A_i = r_i + gamma V_{i+1} - V_i + gamma lam A_{i+1} over the sampled tokens i of a
    trajectory, with V = A = 0 behind the last. Bi-level, with `turn_ends`: the last token e_k of
    turn k gets the turn's advantage A_{e_k} = r_{e_k} + turn_gamma V_{e_{k+1}} - V_{e_k} +
    turn_gamma turn_lam A_{e_{k+1}}, and the other tokens follow the token-level rule, which starts
    anew from it in every turn. All in float64, by doubling instead of a loop.

    Args:
        rewards, values: [T] float; entries that were not sampled are ignored.
        loss_mask: [T] bool, True where the policy sampled the token.
        cu_seqlens: [S + 1] offsets of the trajectories; positions behind cu_seqlens[S] are padding.
        gamma, lam: discount and trace decay per token, in [0, 1].
        turn_ends: [T] bool, True at the last sampled token of each turn. None: token level.
        turn_gamma, turn_lam: discount and trace decay per turn, in [0, 1].

    Returns:
        advantages and returns (advantages + values): [T] float32, 0 where not sampled; float64 for
        float64 rewards.

    Raises:
        ValueError: shapes differ, or a discount is outside [0, 1].
    """
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
    positions = loss_mask[: int(cu_seqlens[-1])].nonzero().squeeze(1)  # [N] sampled tokens
    owners = torch.searchsorted(cu_seqlens[1:].long(), positions, right=True)  # [N]
    longest = int(torch.bincount(owners).max()) if len(owners) else 0
    r, v = rewards[positions].double(), values[positions].double()  # [N]

    in_chain = _continues(owners)  # [N] A_{i+1} is the next token's
    deltas = r + gamma * _next(v, in_chain) - v
    if turn_ends is not None:
        is_end = turn_ends[positions]
        ends = is_end.nonzero().squeeze(1)  # [K]
        r_end, v_end, has_next_turn = r[ends], v[ends], _continues(owners[ends])
        turn_deltas = r_end + turn_gamma * _next(v_end, has_next_turn) - v_end
        turn_advantages = _accumulate_from_right(
            turn_deltas, turn_gamma * turn_lam, has_next_turn, longest
        )
        deltas = deltas.index_copy(0, ends, turn_advantages)
        in_chain = in_chain & ~is_end
    advantages = _accumulate_from_right(deltas, gamma * lam, in_chain, longest)

    both = torch.zeros((2, len(rewards)), dtype=torch.float64, device=rewards.device)
    both[:, positions] = torch.stack([advantages, advantages + v])
    advantages, returns = both.to(compute_dtype(rewards)).unbind()
    return advantages, returns


def _continues(owners: Tensor) -> Tensor:
    """[N] bool, whether the next entry belongs to the same trajectory."""
    continues = torch.zeros_like(owners, dtype=torch.bool)
    continues[:-1] = owners[1:] == owners[:-1]
    return continues


def _next(x: Tensor, continues: Tensor) -> Tensor:
    """x_{i+1}, 0 where the chain ends."""
    return torch.where(continues, x.roll(-1), 0.0)


def _accumulate_from_right(deltas: Tensor, decay: float, continues: Tensor, longest: int) -> Tensor:
    """Solve x_i = deltas_i + decay x_{i+1} for all i at once, x_{i+1} = 0 where the chain ends.

    Doubling: after n rounds `totals` sums up to 2^n terms of a chain and `decays` holds
    decay^(2^n), 0 behind a chain's end, so log2(`longest`) rounds reach every end of chains of at
    most that length.
    """
    totals, decays = deltas, decay * continues.to(deltas.dtype)
    shift = 1
    while shift < longest and shift < len(totals):
        own, left = totals[:-shift], decays[:-shift]
        # Without the condition a NaN would cross from one trajectory into another, as 0 * NaN.
        reached = torch.where(left != 0, own + left * totals[shift:], own)
        totals = torch.cat([reached, totals[-shift:]])
        decays = torch.cat([left * decays[shift:], torch.zeros_like(decays[-shift:])])
        shift *= 2
    return totals
