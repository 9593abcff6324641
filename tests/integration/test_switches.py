"""Every flag of LossConfig, TrainConfig and FilterConfig changes an update, or a run of two steps,
as float64, torch's own optimizer or counting says.

A loss and its gradient are compared with autograd through transformers' model in float64; a run is
watched through the minibatches that its policy and critic get.
"""

import dataclasses
import gzip
import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import ragen_mega.run.evaluation
from ragen_mega.algorithm.tables import ESTIMATORS, REWARDS
from ragen_mega.config import LossConfig, TrainConfig, parse
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, Trajectory
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.huggingface import load_config
from ragen_mega.report.step_metrics import OF_COMPUTED, OF_UPDATE
from ragen_mega.report.traces import TRACES, traces
from ragen_mega.rollout.held_out import evaluate_each
from ragen_mega.run.build import build
from ragen_mega.storage.model_readers import open_model
from ragen_mega.train import starpo
from ragen_mega.warm_start.small_model import write_small_model

FLAGS = """
    --environments bandit --prompt-style compact --max-turns 2 --max-response-length 6
    --max-context-length 120 --hidden-size 16 --ffn-hidden-size 32 --num-groups 4 --group-size 4
    --minibatch-size 8 --filter-strategy none --num-steps 2 --eval-prompts 2 --eval-samples 1
    --eval-interval 0 --save-interval 0 --lr 1e-3 --critic-lr 1e-3 --diagnose-interval 0
""".split()
TEMPERATURE = 0.8
TOLERANCE = {"rel": 2e-4, "abs": 2e-5}
"""Sums of some hundred float32 terms about 1, through two layers."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    directory = tmp_path_factory.mktemp("start")
    write_small_model(parse(FLAGS), directory)
    return directory


def make(cls, start: Path, train: TrainConfig, loss: LossConfig, **options):
    config = parse(FLAGS)
    groups = initialize(config.parallel, 0)
    model = cls(load_config(str(start)), groups, config.parallel, train, loss, **options)
    model.load_weights(open_model(start))
    return model


def exact_model(start: Path):
    return AutoModelForCausalLM.from_pretrained(start, attn_implementation="eager").double()


def exact_logprobs(model, trajectories) -> tuple[torch.Tensor, torch.Tensor]:
    """([M] log-probability, [M] entropy) of the sampled tokens, in order, in float64."""
    logprobs, entropies = [], []
    for one in trajectories:
        tokens = torch.tensor(one.tokens)
        mask = torch.tensor(one.loss_mask)[1:]
        rows = (model(tokens[None, :-1]).logits[0] / TEMPERATURE).log_softmax(-1)[mask]
        logprobs.append(rows.gather(1, tokens[1:][mask, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.fixture(scope="module")
def batch(start: Path):
    """Trajectories of ragged lengths and their batch: advantages of both signs, ratios on both
    sides of every bound, log-probabilities of two other policies.
    """
    generator = torch.Generator().manual_seed(1)
    trajectories = []
    for length in (3, 9, 5, 1, 7):
        tokens = torch.randint(0, 256, (4 + length,), generator=generator).tolist()
        one = Trajectory(group_id=0)
        one.append_observation(tokens[:4])
        one.append_action(Completion(tokens[4:], [0.0] * length, "stop"))
        trajectories.append(one)
    packed = pack(trajectories)
    with torch.no_grad():
        logprobs, _ = exact_logprobs(exact_model(start), trajectories)

    def around(base: torch.Tensor, spread: float) -> torch.Tensor:
        noise = torch.randn(len(base), generator=generator, dtype=torch.float64) * spread
        return torch.zeros(packed.num_positions).masked_scatter(
            packed.loss_mask, (base + noise).float()
        )

    zeros = torch.zeros_like(logprobs)
    return trajectories, packed.with_fields(
        old_logprobs=around(logprobs, 0.5),
        ref_logprobs=around(logprobs, 0.7),
        rollout_logprobs=around(logprobs, 0.4),
        advantages=around(zeros, 2.0),
        values=around(zeros, 1.0),
        returns=around(zeros, 1.5),
    )


def exact_loss(model, trajectories, batch, config: LossConfig) -> torch.Tensor:
    """PPO's objective as the papers write it, over the sampled tokens."""
    mask = batch.loss_mask
    logprobs, entropy = exact_logprobs(model, trajectories)
    old, ref, rollout, advantages = (
        getattr(batch, name)[mask].double()
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages")
    )
    ratio = (logprobs - old).exp()
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    sizes = [one.num_sampled_tokens for one in trajectories]
    if config.policy_loss == "gspo":
        means = [part.mean().expand(len(part)) for part in ratio.log().detach().split(sizes)]
        ratio = (torch.cat(means) + logprobs - logprobs.detach()).exp()  # GSPO-token
    loss = -torch.minimum(advantages * ratio, advantages * ratio.clamp(low, high))
    if config.policy_loss == "cispo":
        loss = -advantages * ratio.clamp(low, high).detach() * logprobs
    loss = loss * (entropy.detach() >= config.min_entropy)
    if config.dual_clip:
        bound = -advantages * config.dual_clip
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    if config.importance_cap:
        drift = old - rollout
        if config.importance_level == "sequence":
            drift = torch.cat([part.sum().expand(len(part)) for part in drift.split(sizes)])
        weight = drift.exp()
        if config.importance_mode == "mask":
            outside = (weight > config.importance_cap) | (weight < (config.importance_floor or 0))
            weight = weight.masked_fill(outside, 0.0)
        loss = loss * weight.clamp(max=config.importance_cap)
    gap = ref - logprobs
    kl = {"none": 0 * gap, "k2": gap**2 / 2, "k3": gap.exp() - 1 - gap}
    loss = loss + config.kl_coef * kl[config.kl_kind] - config.entropy_coef * entropy
    parts = loss.split(sizes)
    if config.loss_aggregation == "token-mean":
        return loss.mean()
    if config.loss_aggregation == "seq-mean-token-mean":
        return torch.stack([part.mean() for part in parts]).mean()
    return torch.stack([part.sum() for part in parts]).mean()


LOSSES = [
    {},
    {"clip_ratio_low": 0.5},
    {"clip_ratio_high": 0.05},
    {"dual_clip": 1.3},
    {"kl_kind": "k2", "kl_coef": 0.2},
    {"kl_kind": "k3", "kl_coef": 0.2},
    {"kl_kind": "k3", "kl_coef": 0.4},
    {"entropy_coef": 0.1},
    {"loss_aggregation": "seq-mean-token-mean"},
    {"loss_aggregation": "seq-mean-token-sum"},
    {"importance_cap": 1.2},
    {"importance_cap": 1.2, "importance_mode": "mask"},
    {"importance_cap": 1.2, "importance_mode": "mask", "importance_floor": 0.8},
    {"importance_cap": 1.2, "importance_level": "sequence"},
    {"min_entropy": 5.62},
    {"policy_loss": "cispo"},
    {"policy_loss": "gspo", "loss_aggregation": "seq-mean-token-mean"},
]


def test_loss_and_gradient_of_the_policy(start: Path, batch) -> None:
    """Each flag gives the loss and the gradient norm of its formula, unlike any other's."""
    trajectories, packed = batch
    seen = []
    for options in LOSSES:
        config = LossConfig(**options)
        model = exact_model(start)
        loss = exact_loss(model, trajectories, packed, config)
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        policy = make(MegatronPolicy, start, TrainConfig(), config, temperature=TEMPERATURE)
        result = policy.update(packed)
        assert result["loss"] == pytest.approx(float(loss), **TOLERANCE), options
        assert result["grad_norm"] == pytest.approx(norm, **TOLERANCE), options
        seen.append((float(loss), norm))
    gaps = [abs(a - b) + abs(c - d) for i, (a, c) in enumerate(seen) for b, d in seen[:i]]
    assert min(gaps) > 1e-3
    flags = {item.name for item in dataclasses.fields(LossConfig)}
    flags -= {"value_clip", "old_logprobs", "loss_mask"}
    assert flags == {name for options in LOSSES for name in options}


def test_metrics_of_an_update_are_means_over_sampled_tokens(start: Path, batch) -> None:
    trajectories, packed = batch
    config = LossConfig(
        dual_clip=1.5,
        kl_kind="k3",
        kl_coef=0.2,
        importance_cap=1.2,
        importance_mode="mask",
        min_entropy=5.62,
    )
    policy = make(MegatronPolicy, start, TrainConfig(), config, temperature=TEMPERATURE)
    result = policy.update(packed)
    with torch.no_grad():
        logprobs, entropies = exact_logprobs(exact_model(start), trajectories)
    old, ref, rollout, advantages = (
        getattr(packed, name)[packed.loss_mask].double()
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages")
    )
    ratio, to_ref, weight = (logprobs - old).exp(), ref - logprobs, (old - rollout).exp()
    weight = weight.masked_fill(weight > 1.2, 0.0)
    expected = {
        "entropy": entropies,
        "approx_kl": ratio - 1 - ratio.log(),  # k3 of KL(old || new)
        "clip_fraction_low": (advantages < 0) & (ratio < 1 - config.clip_ratio_low),
        "clip_fraction_high": (advantages > 0) & (ratio > 1 + config.clip_ratio_high),
        "dual_clip_fraction": (advantages < 0) & (ratio > 1.5),
        "importance": weight,
        "importance_masked": weight == 0,
        "forking_share": entropies >= config.min_entropy,
        "ref_kl": to_ref.exp() - 1 - to_ref,
    }
    means = {name: float(values.double().mean()) for name, values in expected.items()}
    assert {name: result[name] for name in means} == pytest.approx(means, **TOLERANCE)
    assert min(means.values()) > 0 and len(set(means.values())) == len(means)
    assert result.keys() - {*OF_UPDATE, *OF_COMPUTED} == means.keys()
    plain = make(MegatronPolicy, start, TrainConfig(), LossConfig(), temperature=TEMPERATURE)
    assert not {"ref_kl", "importance_masked", "forking_share"} & plain.update(packed).keys()


@pytest.mark.parametrize("value_clip", [None, 0.5, 0.1])
def test_loss_of_the_critic(start: Path, batch, value_clip) -> None:
    _, packed = batch
    critic = make(MegatronCritic, start, TrainConfig(), LossConfig(value_clip=value_clip))
    mask = packed.loss_mask
    values, old, returns = (
        tensor[mask].double() for tensor in (critic.values(packed), packed.values, packed.returns)
    )
    loss = plain = (values - returns).square()
    if value_clip:
        clipped = old + (values - old).clamp(-value_clip, value_clip)
        loss = torch.maximum(loss, (clipped - returns).square())
    result = critic.update(packed)
    assert result["loss"] == pytest.approx(float(loss.mean()) / 2, **TOLERANCE)
    assert result["clip_fraction"] == pytest.approx(float((loss > plain).double().mean()))
    left = (returns - old).var(correction=0) / returns.var(correction=0)
    assert result["explained_variance"] == pytest.approx(1 - float(left), **TOLERANCE)
    assert result["lr"] == TrainConfig().critic_lr
    assert result.keys() - {*OF_UPDATE, *OF_COMPUTED} == {"clip_fraction"}


OPTIMIZERS = [
    {},
    {"lr": 1e-4},
    {"weight_decay": 0.5},
    {"adam_beta1": 0.5},
    {"adam_beta2": 0.9},
    {"adam_eps": 1e-1},
    {"clip_grad": 0.02},
    {"lr_warmup": 2},
    {"lr_warmup": 3},
    {"lr_decay": "linear"},
    {"lr_decay": "cosine", "lr_warmup": 2},
    {"decoupled_lr": 4e-2},
    {"decoupled_lr": 1e-4, "lr_decay": "linear", "lr_warmup": 2},
]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear over the warm-up, whose last step has the whole rate; then constant or down to 0 at
    the end of the run.
    """
    rises = max(config.lr_warmup - 1, 0)
    if step < rises:
        return config.lr * (step + 1) / config.lr_warmup
    done = (step - rises) / (config.num_steps - rises)
    share = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return config.lr * share[config.lr_decay]


def test_the_optimizer_is_adamw_with_these_settings(start: Path, batch) -> None:
    """Three steps of behaviour cloning against torch's AdamW in float64."""
    trajectories, packed = batch
    ends = []
    for options in OPTIMIZERS:
        config = TrainConfig(
            **{"num_steps": 4, "lr": 1e-2, "weight_decay": 0.0, "adam_eps": 1e-2, **options}
        )
        policy = make(MegatronPolicy, start, config, LossConfig(), temperature=TEMPERATURE)
        model = exact_model(start)
        parameters = list(model.parameters())
        outer = [model.model.embed_tokens.weight, model.lm_head.weight]
        # Neither norms nor biases decay.
        decays = [
            {"params": [p for p in model.model.layers.parameters() if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
            {"params": list({id(p): p for p in outer}.values())},
        ]
        factors = 1.0, 1.0, (config.decoupled_lr or config.lr) / config.lr
        adam = torch.optim.AdamW(
            decays,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        for step in range(3):
            result = policy.clone(packed)
            assert result["lr"] == pytest.approx(learning_rate(config, step)), options
            policy.trainer.schedule.step(1)
            adam.zero_grad()
            (-exact_logprobs(model, trajectories)[0].mean()).backward()
            torch.nn.utils.clip_grad_norm_(parameters, config.clip_grad)
            for group, factor in zip(adam.param_groups, factors, strict=True):
                group["lr"] = learning_rate(config, step) * factor
            adam.step()
        expected, worst = model.state_dict(), 0.0
        for name, weight in policy.export_weights():
            worst = max(worst, float((weight.double() - expected[name]).abs().max()))
        assert worst < 1e-5, options
        ends.append(torch.cat([p.detach().flatten() for p in parameters]))
    gaps = [float((a - b).abs().max()) for i, a in enumerate(ends) for b in ends[:i]]
    assert min(gaps) > 1e-4


def test_microbatches_bound_a_pass_and_change_no_result(start: Path, batch) -> None:
    _, packed = batch
    results = {}
    for bound in (16, 10_000):
        config = TrainConfig(max_tokens_per_microbatch=bound)
        policy = make(MegatronPolicy, start, config, LossConfig(), temperature=TEMPERATURE)
        sizes: list[int] = []

        def count(module, args, kwargs, sizes=sizes):
            sizes.append(kwargs["input_ids"].numel())

        policy.head.register_forward_pre_hook(count, with_kwargs=True)
        results[bound] = policy.update(packed)
        assert sum(sizes) == packed.num_positions and max(sizes) <= bound
        assert len(sizes) > 1 if bound == 16 else len(sizes) == 1
    assert results[16]["grad_norm"] == pytest.approx(results[10_000]["grad_norm"], rel=1e-4)


# A run of two steps.


def odd_tokens(trajectory):
    """What random play can earn: something of every turn."""
    return [float(sum(trajectory.tokens[turn.start : turn.end]) % 7) for turn in trajectory.turns]


REWARDS.register("odd_tokens", odd_tokens)


class Watched:
    """What a run did: (step, model, minibatch, did the model's weights move) of every update, and
    its metrics.
    """

    def __init__(self, start: Path, output: Path, *flags: str) -> None:
        name = f"run{len(list(output.iterdir()))}"
        argv = [*FLAGS, "--reward", "odd_tokens", "--load", str(start), "--output", str(output)]
        self.run = build(parse([*argv, "--name", name, *flags]))
        self.updates: list = []
        self.step = -1
        for model, owner in (("critic", self.run.critic), ("actor", self.run.policy)):
            if owner:
                self._watch(model, owner)
        close = self.run.close
        self.rows: list[dict[str, float]] = []

        def watched_close(log):
            close(log)
            self.rows.append(log.result())

        self.run.close = watched_close
        with self.run:
            starpo(self.run)

    def _watch(self, model: str, owner) -> None:
        update = owner.update

        def watched(minibatch):
            before = [p.detach().clone() for p in owner.chunks.parameters()]
            result = update(minibatch)
            after = owner.chunks.parameters()
            moved = any(not torch.equal(a, b) for a, b in zip(before, after))
            self.updates.append((len(self.rows), model, minibatch, moved))
            return result

        owner.update = watched

    def of(self, model: str, step: int) -> list:
        """The minibatches of a model's updates in a step; all of them moved it."""
        found = [one for one in self.updates if one[:2] == (step, model)]
        assert all(moved for _, _, _, moved in found)
        return [minibatch for _, _, minibatch, _ in found]


def labels(minibatches) -> list[tuple[int, ...]]:
    """The sampled tokens of every trajectory."""
    return sorted(
        tuple(one.select([i]).labels.tolist())
        for one in minibatches
        for i in range(one.num_trajectories)
    )


def test_a_plain_run(start: Path, tmp_path: Path) -> None:
    plain = Watched(start, tmp_path)
    for step in (0, 1):
        for model in ("actor", "critic"):
            assert [one.num_trajectories for one in plain.of(model, step)] == [8, 8]
    assert len(plain.rows) == 2 and len(set(labels(plain.of("actor", 0)))) == 16
    again = Watched(start, tmp_path)
    assert labels(again.of("actor", 1)) == labels(plain.of("actor", 1))
    other = Watched(start, tmp_path, "--seed", "1", "--num-steps", "1")
    assert len(other.rows) == 1 and labels(other.of("actor", 0)) != labels(plain.of("actor", 0))
    assert plain.run.critic.trainer.lr == plain.run.policy.trainer.lr == 1e-3

    def deal(run: Watched, step: int) -> list[list[int]]:
        """The groups of the step's trajectories, minibatch by minibatch."""
        return [(one.group_ids - 4 * step).tolist() for one in run.of("actor", step)]

    assert deal(again, 1) == deal(plain, 1) != deal(plain, 0) != deal(other, 0)


def test_evaluations_are_the_same_games_and_the_best_is_saved(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the seed and the temperature of training. A checkpoint is due at each new best, not
    at a tie, also after the run has gone on; the last evaluation alone takes more samples.
    """
    seen = []

    def told(*args, samples_per_prompt: int, **options):
        results = evaluate_each(*args, samples_per_prompt=samples_per_prompt, **options)
        settings = args[3]["bandit"].settings
        seen.append((settings.seed, settings.temperature, samples_per_prompt))
        return {"bandit": dataclasses.replace(results["bandit"], success=levels.pop(0))}

    monkeypatch.setattr(ragen_mega.run.evaluation, "evaluate_each", told)
    flags = "--eval-interval 1 --keep-best --keep-last 0 --seed 5 --temperature 0.7".split()
    flags += "--eval-temperature 0.25 --eval-samples 3 --load".split()
    flags += [str(start), "--output", str(tmp_path), "--name", "best"]
    for num_steps, levels, saved in (
        (4, [0.9, 0.2, 0.5, 0.5, 0.4], [4, 2, 1]),
        (6, [0.45, 0.3], [6, 4, 2, 1]),
    ):
        more = ["--num-steps", str(num_steps)] + ["--resume"] * (num_steps == 6)
        with build(parse([*FLAGS, *flags, *more])) as run:
            starpo(run)
        assert run.checkpoints.steps() == saved and levels == []
    assert seen == [(0, 0.25, 3 if call in (4, 6) else 1) for call in range(7)]


def test_critic_warmup_leaves_the_actor_alone(start: Path, tmp_path: Path) -> None:
    """And each model's learning rate warms up from its own first update."""
    flags = "--critic-warmup 1 --critic-lr 2e-3 --lr-warmup 2".split()
    run = Watched(start, tmp_path, *flags)
    assert [len(run.of(model, 0)) for model in ("critic", "actor")] == [2, 0]
    assert [len(run.of(model, 1)) for model in ("critic", "actor")] == [2, 2]
    assert "actor/loss" not in run.rows[0] and "actor/loss" in run.rows[1]
    assert [row["critic/lr"] for row in run.rows] == pytest.approx([1e-3, 2e-3])
    assert run.rows[1]["actor/lr"] == pytest.approx(5e-4)
    assert run.run.critic.trainer.lr == 2e-3 and run.run.policy.trainer.lr == 1e-3


def test_passes_over_a_rollout_and_minibatches(start: Path, tmp_path: Path) -> None:
    flags = "--updates-per-rollout 3 --minibatch-size 4 --num-steps 1".split()
    run = Watched(start, tmp_path, *flags)
    for model in ("actor", "critic"):
        minibatches = run.of(model, 0)
        assert [one.num_trajectories for one in minibatches] == [4] * 12
        passes = [labels(minibatches[i : i + 4]) for i in (0, 4, 8)]
        assert passes[0] == passes[1] == passes[2] and len(set(passes[0])) == 16
        orders = {tuple(map(tuple, labels([one]))) for one in minibatches}
        assert len(orders) > 4, "every pass is shuffled anew"


def test_shared_prefixes_change_no_number(start: Path, tmp_path: Path) -> None:
    """Three steps of the same recipe. Adam divides a gradient by its own size, so that a rounding
    moves a weight whose gradient is one by as much as the learning rate; hence the tolerance.
    """
    off, on = (
        Watched(start, tmp_path, "--num-steps", "3", "--shared-prefixes", way)
        for way in ("off", "on")
    )
    for model in ("actor", "critic"):
        key = f"{model}/computed_share"
        assert all(row[key] == 1 for row in off.rows) and all(0 < row[key] < 1 for row in on.rows)
        assert all(labels(off.of(model, step)) == labels(on.of(model, step)) for step in range(3))
    for step, (row, truth) in enumerate(zip(on.rows, off.rows, strict=True)):
        for key, value in truth.items():
            if key.startswith(("actor/", "critic/", "rollout/")) and not key.endswith(
                ("computed_share", "tokens_per_second")
            ):
                assert row[key] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, key)


OLD_LOGPROBS = (
    # flags, optimizer steps, which old log-probabilities they saw
    ("--minibatch-size 16", 1, "none"),
    ("--minibatch-size 16 --old-logprobs recompute", 1, "policy"),
    ("--minibatch-size 16 --old-logprobs engine", 1, "engine"),
    ("--minibatch-size 8", 2, "engine"),
    ("--minibatch-size 8 --old-logprobs recompute", 2, "policy"),
    ("--minibatch-size 8 --importance-cap 2", 2, "policy"),
    ("--minibatch-size 16 --updates-per-rollout 2", 2, "engine"),
    ("--minibatch-size 16 --kl-in-reward k1 --kl-reward-coef 0.1", 1, "engine"),
)


@pytest.mark.slow
def test_old_logprobs_are_computed_where_something_needs_them(start: Path, tmp_path: Path) -> None:
    runs = [
        Watched(start, tmp_path, "--num-steps", "1", *flags.split()) for flags, _, _ in OLD_LOGPROBS
    ]
    for run, (flags, num_steps, whose) in zip(runs, OLD_LOGPROBS):
        minibatches = run.of("actor", 0)
        assert len(minibatches) == num_steps, flags
        for one in minibatches:
            old, engine = one.old_logprobs, one.rollout_logprobs
            assert (old is None) == (whose == "none"), flags
            assert (old is not None and torch.equal(old, engine)) == (whose == "engine"), flags
        # watched in every mode: both computed what they say in float32
        assert 0 < run.rows[0]["mismatch/logprob_max_abs_diff"] < 1e-4, flags
    first, recomputed = runs[0].rows[0], runs[1].rows[0]
    assert first["actor/approx_kl"] == 0
    for key, value in recomputed.items():
        if key.startswith(("actor/", "critic/", "mismatch/")):
            assert first[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("flags", ["--old-logprobs engine", "--old-logprobs auto", "several"])
def test_readers_see_the_policy_where_no_pass_is_needed(
    flags: str, start: Path, tmp_path: Path
) -> None:
    """What the first update of each token computes is, in the first minibatch, what a pass does."""
    size = 4 if flags == "several" else 16
    shown = []
    for source in (flags.replace("several", ""), "--old-logprobs recompute"):
        further = f"--num-steps 1 --trace-groups 2 --minibatch-size {size} {source}".split()
        watched = Watched(start, tmp_path, *further)
        ((file, _, _, _),) = [
            found for found in traces(watched.run.logger.directory / TRACES) if found[1] == "step"
        ]
        groups = json.loads(gzip.decompress(file.read_bytes()))["groups"]
        shown.append([member["channels"] for group in groups for member in group["members"]])
    num_alike = 0
    for ours, truth in zip(*shown, strict=True):
        assert ours.keys() == truth.keys()
        assert ours["entropy"] != ours["trainer log-probability"]
        num_alike += all(  # written with four digits
            ours[name] == pytest.approx(values, rel=2e-3, abs=1e-5)
            for name, values in truth.items()
        )
    assert 0 < num_alike < 8 if flags == "several" else num_alike == len(shown[0]) == 8


def test_the_first_pass_gives_the_gradient_of_recomputed_logprobs(start: Path, batch) -> None:
    _, packed = batch
    loss = LossConfig(importance_cap=2.0, kl_kind="k3", kl_coef=0.1)
    gradients = []
    for is_recomputed in (True, False):
        config = TrainConfig(max_tokens_per_microbatch=32)
        policy = make(MegatronPolicy, start, config, loss, temperature=TEMPERATURE)
        old = policy.logprobs(packed)
        result = policy.update(
            dataclasses.replace(packed, old_logprobs=old if is_recomputed else None)
        )
        assert torch.equal(policy.passed[:, 0], old)
        gradients.append(policy.trainer.gradients())
    assert result["grad_norm"] > 0 and result["approx_kl"] == 0
    for name, expected in gradients[0].items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(gradients[1][name], expected, rtol=0, atol=1e-5 * scale)


def test_one_pass_gives_log_probabilities_and_entropies(start: Path, batch) -> None:
    """Of the distribution at the temperature that was sampled from, against float64."""
    trajectories, packed = batch
    config = TrainConfig(max_tokens_per_microbatch=32)
    policy = make(MegatronPolicy, start, config, LossConfig(), temperature=TEMPERATURE)
    logprobs, entropies = policy.logprobs_and_entropies(packed)
    assert torch.equal(policy.logprobs(packed), logprobs)
    with torch.no_grad():
        exact = exact_logprobs(exact_model(start), trajectories)
    for found, expected in zip((logprobs, entropies), exact, strict=True):
        assert (found[~packed.loss_mask] == 0).all()
        torch.testing.assert_close(found[packed.loss_mask].double(), expected, rtol=0, atol=2e-5)
    assert (entropies[packed.loss_mask] + logprobs[packed.loss_mask]).abs().max() > 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("engine --importance-cap 2", "drop --importance-cap or --old-logprobs"),
        ("first", "--old-logprobs must be auto, recompute or engine, not 'first'"),
    ],
)
def test_old_logprobs_that_cannot_be(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse([*FLAGS, "--old-logprobs", *flags.split()])


def returns_by_group(run: Watched) -> dict[int, list[float]]:
    """Shaped returns of the step's whole rollout, read back as it was stored."""
    groups = run.run.rollouts.files.read(0).groups
    return {g.group_id: [sum(odd_tokens(one)) for one in g.trajectories] for g in groups}


def trained(run: Watched) -> dict[int, list[float]]:
    """Group -> advantage of each trained trajectory's first sampled token, in step 0."""
    found: dict[int, list[float]] = {}
    for one in run.of("actor", 0):
        for i in range(one.num_trajectories):
            part = one.select([i])
            found.setdefault(int(part.group_ids[0]), []).append(
                float(part.advantages[part.loss_mask][0])
            )
    return {group: sorted(advantages) for group, advantages in found.items()}


def test_the_filter_ranks_raw_returns(start: Path, tmp_path: Path) -> None:
    grpo = "--advantage-estimator dr_grpo --num-steps 1 --keep-rollouts 0".split()
    for flags, count in (
        ("--filter-strategy top_k --filter-value 1", 1),
        ("--filter-strategy top_k --filter-value 3 --soft-reweighting --minibatch-size 4", 3),
        ("--filter-strategy top_fraction", 1),
        ("--filter-strategy percentile_range --filter-value 0.25 --filter-start 0", 1),
        ("--filter-strategy none", 4),
    ):
        run = Watched(start, tmp_path, *grpo, *flags.split())
        returns = returns_by_group(run)
        spread = {group: statistics.stdev(own) for group, own in returns.items()}
        best = sorted(returns, key=lambda group: -spread[group])[:count]
        assert run.rows[0]["filter/kept_groups"] == count
        advantages = trained(run)
        assert advantages.keys() == set(best), flags
        for group in best:
            share = spread[group] / spread[best[0]] if "soft" in flags else 1.0
            mean = statistics.mean(returns[group])
            expected = sorted(share * (one - mean) for one in returns[group])
            assert advantages[group] == pytest.approx(expected, abs=1e-4), flags


def test_within_group_trains_on_parts_of_groups(start: Path, tmp_path: Path) -> None:
    flags = "--advantage-estimator dr_grpo --num-steps 1 --keep-rollouts 0".split()
    flags += "--filter-strategy within_group --filter-value 0.5".split()
    run = Watched(start, tmp_path, *flags)
    returns, advantages = returns_by_group(run), trained(run)
    for group, own in returns.items():
        pairs = [(max(pair) - min(pair), pair) for pair in itertools.combinations(own, 2)]
        widest = max(pairs)[0]
        if widest:
            assert advantages[group] == pytest.approx([-widest / 2, widest / 2], abs=1e-4)


@pytest.mark.parametrize("window", [[], ["--context-window", "1"]])
def test_the_legacy_mask_trains_on_all_behind_the_first_message(
    start: Path, tmp_path: Path, window: list[str]
) -> None:
    """Log-probabilities of states too, as the model in float64 says; the same advantage on them.
    With a window every turn is a sample with its own first message.
    """
    flags = "--advantage-estimator dr_grpo --num-steps 1 --loss-mask legacy --minibatch-size 16"
    run = Watched(start, tmp_path, *flags.split(), *window)
    (batch,) = (one.by_segment() for one in run.of("actor", 0))
    end, model = run.run.renderer.end_of_turn, exact_model(start)
    sampled = batch.turn_ids >= 0
    for i, span in enumerate(map(slice, batch.cu_seqlens, batch.cu_seqlens[1:])):
        labels = batch.labels[span].tolist()
        mask = [end in labels[:at] for at in range(len(labels))]
        assert batch.loss_mask[span].tolist() == mask and any(mask), i
        assert bool(sampled[span].any()) and not bool(sampled[span][batch.loss_mask[span]].all())
        assert len(set(batch.advantages[span][batch.loss_mask[span]].tolist())) == 1
        with torch.no_grad():
            logits = model(batch.tokens[span][None]).logits[0] / run.run.policy.temperature
        exact = logits.log_softmax(-1).gather(1, batch.labels[span][:, None])[:, 0]
        for field in (batch.old_logprobs, batch.rollout_logprobs):
            found = field[span][batch.loss_mask[span]].double()
            assert found == pytest.approx(exact[batch.loss_mask[span]], abs=1e-4)
    with pytest.raises(ValueError, match="no engine sampled"):
        parse([*FLAGS, "--loss-mask", "legacy", "--old-logprobs", "engine"])


def test_constant_groups_are_trained_on_only_if_asked(start: Path, tmp_path: Path) -> None:
    flags = "--advantage-estimator dr_grpo --num-steps 1 --reward 0*environment".split()
    flags += ["--filter-strategy", "top_fraction", "--filter-value", "0.5"]
    assert Watched(start, tmp_path, *flags).updates == []
    kept = Watched(start, tmp_path, *flags, "--filter-keep-zero")
    assert kept.rows[0]["filter/kept_groups"] == 2 and len(trained(kept)) == 2


def in_every_third_group(group):
    """Returns that differ in groups 0, 3, 6, ... and nowhere else."""
    return [float(i * (group.group_id % 3 == 0)) for i in range(len(group.trajectories))]


REWARDS.register("in_every_third_group", in_every_third_group)


@pytest.mark.parametrize(
    ("bound", "value", "rounds", "kept"), [(9, 1, 3, 4), (2, 1, 2, 3), (9, 0.5, 1, 2)]
)
def test_groups_are_sampled_until_enough_have_spread(
    start: Path, tmp_path: Path, bound: int, value: float, rounds: int, kept: int
) -> None:
    flags = f"--filter-strategy top_fraction --filter-value {value} --max-sampling-rounds {bound}"
    flags += " --advantage-estimator dr_grpo --num-steps 2 --keep-rollouts 0"
    run = Watched(start, tmp_path, *flags.split(), "--reward", "in_every_third_group")
    row = run.rows[0]
    assert row["rollout/sampling_rounds"] == rounds
    assert row["rollout/num_trajectories"] == rounds * 16
    assert row["filter/kept_groups"] == kept
    assert trained(run).keys() == {0, 3, 6, 9} & set(range(3 * kept))
    played = [g for step in (0, 1) for g in run.run.rollouts.files.read(step).groups]
    prompts = {(g.group_id, g.trajectories[0].seed) for g in played}
    assert len({group for group, _ in prompts}) == len({seed for _, seed in prompts}) == len(played)


def test_the_loop_hands_the_estimator_its_flags(start: Path, tmp_path: Path) -> None:
    seen = []

    def watching(inputs, *, gamma, lam, turn_gamma=None, turn_lam=None):
        seen.append((gamma, lam, turn_gamma, turn_lam, inputs.rewards.sum(), inputs.scores.sum()))
        return inputs.per_token(inputs.scores), None

    ESTIMATORS.register("watching", watching)
    flags = "--advantage-estimator watching --num-steps 1 --gamma 0.9 --lam 0.8 --turn-gamma 0.7"
    run = Watched(start, tmp_path, *flags.split(), "--turn-lam", "0.6", "--keep-rollouts", "0")
    _, (*options, rewards, scores) = seen  # scripted play tries it first
    assert options == [0.9, 0.8, 0.7, 0.6] and run.run.critic is None
    total = sum(sum(own) for own in returns_by_group(run).values())
    assert float(rewards) == float(scores) == total
    assert run.rows[0]["reward/odd_tokens"] == pytest.approx(total / 16)
    assert run.rows[0]["rollout/reward"] <= 0, "raw rewards are reported apart"


def test_reasoning_is_diagnosed_when_due(start: Path, tmp_path: Path) -> None:
    run = Watched(start, tmp_path, "--diagnose-interval", "2", "--num-steps", "3")
    keys = [{key for key in row if key.startswith("collapse/")} for row in run.rows]
    assert keys[0] == keys[2] and not keys[1]
    estimate = {key: run.rows[0][key] for key in keys[0]}
    assert set(estimate) == {
        f"collapse/{name}"
        for name in (
            "mutual_information",
            "max_mutual_information",
            "conditional_entropy",
            "entropy",
            "retrieval_accuracy",
            "retrieval_chance",
            "score",
            "score_average",
        )
    }
    scores = [run.rows[step]["collapse/score"] for step in (0, 2)]
    average = run.rows[2]["collapse/score_average"]
    assert average == pytest.approx(0.9 * scores[0] + 0.1 * scores[1])
    # Six tokens of a random model: log 512 nats each, whatever stands before them.
    assert estimate["collapse/conditional_entropy"] == pytest.approx(
        estimate["collapse/entropy"], abs=1.0
    )
    assert 0 <= estimate["collapse/retrieval_accuracy"] <= 1
