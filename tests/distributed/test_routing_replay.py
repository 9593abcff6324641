"""Routes of a mixture that are recorded and replayed, against transformers' model in float64 whose
routers are told what to choose.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ragen_mega.config import ParallelConfig, TrainConfig
from ragen_mega.data.fields import ROUTES, TOKEN_FIELDS, add_routes
from ragen_mega.data.packing import Share, microbatch, part_of
from ragen_mega.data.types import TokenBatch, in_groups
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.routing import Routing, check_routes
from ragen_mega.megatron.weights import export_weights
from ragen_mega.models.layout import split_experts
from ragen_mega.models.shape import ModelShape
from ragen_mega.ranks import collectives
from ragen_mega.run.log import StepLog
from ragen_mega.run.run import Run
from ragen_mega.run.timers import Timers
from tests.support.forked_ranks import on_ranks
from tools import parity

LAYERS, TOPK, EXPERTS = 2, 3, 6
LOSS = replace(parity.LOSS, min_entropy=0.0)
BOTH = ("routing_load", "routing_entropy")
REPLAYED = ("routing_overlap", "routing_drift")


@pytest.fixture(autouse=True)
def field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOKEN_FIELDS, ROUTES, None)
    add_routes(LAYERS, TOPK, EXPERTS, by_engine=False)


def small_model(*, normalises: bool = True) -> PreTrainedModel:
    return parity.random_model(
        "qwen3_moe", num_hidden_layers=LAYERS, num_experts=EXPERTS, norm_topk_prob=normalises
    )


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it was when it sampled: its routers had other weights."""
    earlier = type(model)(model.config).eval()
    earlier.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in earlier.named_parameters():
            if name.endswith("gate.weight"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return earlier


class Truth(NamedTuple):
    """What transformers computes of a batch on given routes."""

    logprobs: Tensor
    gradients: dict[str, Tensor]
    router_logits: Tensor  # [T, layers, experts] float64


def told(routes: Iterator[Tensor], seen: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a forward pass of transformers' router that takes its choices [n, k] from `routes`,
    and notes its logits.
    """

    def forward(router: Qwen3MoeTopKRouter, hidden: Tensor) -> tuple[Tensor, ...]:
        logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.t()
        seen.append(logits.detach())
        experts = next(routes).long()
        weights = logits.softmax(-1).gather(1, experts)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts

    return forward


def truth_of(model: PreTrainedModel, batch: TokenBatch) -> Truth:
    """Compute one trajectory after another, layer by layer."""
    bounds = batch.cu_seqlens.tolist()
    routes = batch.further_fields[ROUTES]
    rows = [routes[a:b, n] for a, b in zip(bounds, bounds[1:]) for n in range(LAYERS)]
    exact = type(model)(model.config).eval()
    exact.load_state_dict(model.state_dict())
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3MoeTopKRouter, "forward", told(iter([*rows, *rows]), seen))
        logprobs = parity.transformers_logprobs(exact.double(), batch)
        gradients = parity.unfused_gradients(model, batch, LOSS, parity.TEMPERATURE)
    logits = [torch.cat(seen[n : len(rows) : LAYERS]) for n in range(LAYERS)]
    return Truth(logprobs, gradients, torch.stack(logits, 1))


@torch.no_grad()
def native_routes(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """[T, layers, k] the choices of transformers' own routers, sorted."""
    chosen: list[Tensor] = []
    gates = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    hooks = [
        gate.register_forward_hook(lambda gate, inputs, outputs: chosen.append(outputs[2]))
        for gate in gates
    ]
    parity.transformers_logprobs(model, batch)
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cat(chosen[n::LAYERS]) for n in range(LAYERS)], 1).sort(-1).values


def make_batch(model: PreTrainedModel) -> TokenBatch:
    """A batch with the routes of earlier weights; two trajectories that begin like others have
    other routes from some position on.
    """
    batch = parity.make_batch(model).select([0, 1, 2, 6, 7, 8])
    routes = native_routes(moved(model), batch).to(torch.uint8)
    for trajectory, position in ((3, 0), (5, 2)):
        place = int(batch.cu_seqlens[trajectory]) + position
        routes[place, 0] = (routes[place, 0] + 1) % EXPERTS
    assert (native_routes(model, batch) != routes).any(-1).float().mean() > 0.3
    return batch.with_fields(routes=routes)


def build(
    model: PreTrainedModel, parallel: ParallelConfig, *, cls: type = MegatronPolicy, **train: str
) -> MegatronPolicy:
    groups = initialize(parallel)
    options = TrainConfig(
        lr=1e-3, clip_grad=1e6, max_tokens_per_microbatch=40,
        **({"shared_prefixes": "on"} | train),
    )  # fmt: skip
    named = {} if cls is MegatronCritic else dict(temperature=parity.TEMPERATURE, keep_reference=1)
    built = cls(model.config, groups, parallel, options, LOSS, **named)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    built.load_weights(split_experts(weights, ModelShape.of(model.config)).get)
    return built


def computed(policy: MegatronPolicy, batch: TokenBatch) -> dict[str, Tensor]:
    found = {"logprobs": policy.logprobs(batch)}
    metrics = policy.update(batch)
    gradients = policy.trainer.gradients()
    for name, gradient in export_weights(policy.chunks, policy.groups, tensors=gradients):
        found[f"gradient {name}"] = gradient.clone()
    names = (*BOTH, *REPLAYED, "computed_share", "routing_unshared")
    return found | {name: torch.tensor(metrics[name]) for name in names if name in metrics}


def assert_true(found: dict[str, Tensor], truth: Truth) -> None:
    assert float((found["logprobs"] - truth.logprobs).abs().max()) < 1e-5
    assert found.keys() >= {f"gradient {name}" for name in truth.gradients}
    for name, expected in truth.gradients.items():
        scale = max(float(expected.abs().max()), 1e-6)
        difference = float((found[f"gradient {name}"] - expected).abs().max())
        assert difference <= 1e-4 * scale, name


def assert_counted(found: dict[str, Tensor], truth: Truth, batch: TokenBatch) -> None:
    """Check the metrics of routing over distinct positions, one by one."""
    places = list(distinct(batch).values())
    routes = batch.further_fields[ROUTES][places].long()
    loads = torch.stack([routes[:, n].flatten().bincount(minlength=EXPERTS) for n in range(LAYERS)])
    probs = truth.router_logits[places].softmax(-1)
    best, own = probs.topk(TOPK)
    overlap = (own[..., None] == routes[..., None, :]).any(-1)
    expected = {
        "routing_load": (loads.amax(1) / loads.double().mean(1)).mean(),
        "routing_entropy": -(probs * probs.log()).sum(-1).mean(),
        "routing_overlap": overlap.double().mean(),
        "routing_drift": (best.sum(-1) - probs.gather(-1, routes).sum(-1)).mean(),
    }
    assert 0.3 < expected["routing_overlap"] < 0.9 and expected["routing_drift"] > 0.01
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(float(value), abs=1e-5), name


def distinct(batch: TokenBatch, *, by_routes: bool = True) -> dict[tuple, int]:
    """Every beginning of a trajectory -> its last position."""
    found: dict[tuple, int] = {}
    bounds = batch.cu_seqlens.tolist()
    for start, end in zip(bounds, bounds[1:]):
        rows = [
            (int(batch.tokens[t]), batch.further_fields[ROUTES][t].numpy().tobytes() * by_routes)
            for t in range(start, end)
        ]
        for place in range(start, end):
            found.setdefault(tuple(rows[: place - start + 1]), place)
    return found


@pytest.mark.parametrize(
    ("normalises", "recompute", "shared_prefixes"),
    [(True, "none", "on"), (False, "selective", "off"), (True, "full", "on")],
)
def test_log_probabilities_and_gradients_are_those_of_the_routes(
    normalises: bool, recompute: str, shared_prefixes: str
) -> None:
    model = small_model(normalises=normalises)
    batch = make_batch(model)
    policy = build(model, ParallelConfig(recompute=recompute), shared_prefixes=shared_prefixes)
    native = policy.logprobs(batch.without(ROUTES))
    truth = truth_of(model, batch)
    assert float((native - truth.logprobs).abs().max()) > 1e-2
    found = computed(policy, batch)
    assert_true(found, truth)
    if shared_prefixes == "off":
        assert found["computed_share"] == 1 and found["routing_unshared"] == 0


def test_positions_are_one_where_tokens_and_routes_agree() -> None:
    model = small_model()
    batch = make_batch(model)
    policy = build(model, ParallelConfig())
    policy.trainer.max_tokens = 10_000  # one microbatch
    metrics = policy.update(batch)
    nodes, fewest = len(distinct(batch)), len(distinct(batch, by_routes=False))
    assert fewest < nodes < batch.num_positions
    assert metrics["computed_share"] * batch.num_positions == pytest.approx(nodes)
    assert metrics["routing_unshared"] * batch.num_positions == pytest.approx(nodes - fewest)
    metrics = policy.update(batch.without(ROUTES))
    assert metrics["computed_share"] * batch.num_positions == pytest.approx(fewest)
    assert metrics.keys() >= {*BOTH} and metrics.keys().isdisjoint({*REPLAYED, "routing_unshared"})


@pytest.mark.parametrize(("normalises", "recompute"), [(True, "none"), (False, "full")])
def test_metrics_count_every_computed_token_once(normalises: bool, recompute: str) -> None:
    model = small_model(normalises=normalises)
    batch = make_batch(model)
    policy = build(model, ParallelConfig(recompute=recompute))
    policy.trainer.max_tokens = 10_000
    assert_counted(computed(policy, batch), truth_of(model, batch), batch)


def test_a_pass_records_what_later_passes_replay() -> None:
    """The pass of old log-probabilities records, and weights that move do not change the routes.
    The reference policy, while its weights are the same, has the same log-probabilities to the bit.
    """
    model = small_model()
    batch = make_batch(model)
    policy = build(model, ParallelConfig(recompute="selective"), routing_replay="policy")
    assert torch.equal(policy.reference_logprobs(batch), policy.logprobs(batch))
    batch = batch.without(ROUTES)
    scored = policy.with_old_logprobs(batch)
    routes = scored.further_fields[ROUTES]
    assert torch.equal(routes.sort(-1).values.long(), native_routes(model, batch))
    assert torch.equal(policy.reference_logprobs(scored), scored.old_logprobs)
    assert torch.equal(policy.logprobs(scored), scored.old_logprobs)
    with torch.no_grad():
        for name, parameter in policy.head.named_parameters():
            if name.endswith("router.weight"):
                parameter.copy_(dict(moved(model).named_parameters())[_gate(name)])
    routers = moved(model)
    assert not torch.equal(policy.logprobs(batch), scored.old_logprobs)
    assert_true(computed(policy, scored), truth_of(routers, scored))
    assert policy.update(scored)["routing_overlap"] < 0.9
    again = policy.with_old_logprobs(batch)
    assert not torch.equal(again.further_fields[ROUTES], routes)


def _gate(name: str) -> str:
    return f"model.layers.{name.split('.')[2]}.mlp.gate.weight"


def test_the_critic_and_cloning_choose_for_themselves() -> None:
    model = small_model()
    batch = make_batch(model)
    wrong = batch.with_fields(routes=batch.further_fields[ROUTES].roll(1, 0))
    critics = [build(model, ParallelConfig(), cls=MegatronCritic) for _ in range(2)]
    for critic in critics:
        torch.nn.init.ones_(critic.chunks[0].output_layer.weight)
    results = [
        (critic.values(given), critic.update(given), critic.values(given))
        for critic, given in zip(critics, (batch.without(ROUTES), wrong))
    ]
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert torch.equal(results[0][2], results[1][2])
    losses = [build(model, ParallelConfig()).clone(x) for x in (batch.without(ROUTES), wrong)]
    assert losses[0] == losses[1]


def test_the_diagnosis_chooses_for_itself() -> None:
    """A thought behind the prompt of another has no routes, and defaults are nobody's choice."""
    policy = build(small_model(), ParallelConfig())
    run = SimpleNamespace(
        policy=policy,
        config=SimpleNamespace(logging=SimpleNamespace(diagnose_interval=1)),
        renderer=SimpleNamespace(thought_length=len),
        score_average=None,
    )
    results = []
    for by_engine in (False, True):
        add_routes(LAYERS, TOPK, EXPERTS, by_engine=by_engine)
        log = StepLog(0, Timers())
        Run.diagnose_if_due(run, in_groups(parity.random_trajectories(97, 8)), log)
        results.append(log.result())
    own, recorded = ({k: v for k, v in row.items() if "time" not in k} for row in results)
    assert own == recorded and "collapse/mutual_information" in own


def test_nothing_is_left_of_a_pass_that_failed() -> None:
    model = small_model()
    batch = make_batch(model)
    truth = truth_of(model, batch)
    policy = build(model, ParallelConfig(recompute="selective"))
    native = policy.logprobs(batch.without(ROUTES))
    objective, policy.objective = policy.objective, None
    wrong = batch.with_fields(routes=batch.further_fields[ROUTES].roll(1, 0))
    with pytest.raises(AttributeError):
        policy.update(wrong)
    policy.objective = objective
    policy.logprobs(wrong)  # forward only
    assert torch.equal(policy.logprobs(batch.without(ROUTES)), native)
    assert_true(computed(policy, batch), truth)


def test_padding_goes_to_all_experts_in_turn() -> None:
    batch = make_batch(small_model())
    micro = microbatch(part_of(batch, Share([0], [0])), multiple=128, device=torch.device("cpu"))
    parts = [Routing(micro, EXPERTS, part=(index, 2)) for index in range(2)]
    routes = torch.cat([part.routes for part in parts])
    real = int(batch.lengths[0])
    assert torch.equal(routes[:real], batch.further_fields[ROUTES][:real])
    assert [part.num_real for part in parts] == [min(real, 64), max(0, real - 64)]
    padding = torch.cat([part.routes[part.num_real :] for part in parts])
    assert len(padding) == 128 - real
    assert (padding.sort(-1).values.diff(dim=-1) > 0).all()
    load = padding[:, 0].flatten().bincount(minlength=EXPERTS)
    assert load.max() - load.min() <= 2 * TOPK


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routes: routes + 1, r"below 6, not 6;"),
        (lambda routes: routes * 0, r"3 different experts for a token, not \[0, 0, 0\].* layer 0;"),
        (lambda routes: routes[:, :1], r"must be \[2, 3\] experts \[layers, k\], not \[1, 3\];"),
    ],
)
def test_routes_that_cannot_be_are_refused(change: Callable, message: str) -> None:
    model = small_model()
    batch = make_batch(model)
    given = batch.further_fields[ROUTES].clone()
    given[-1, 0] = torch.tensor([5, 1, 2])
    with pytest.raises(ValueError, match=message) as caught:
        check_routes(change(given), ModelShape.of(model.config))
    assert "\n" not in str(caught.value)
    if given.shape != change(given).shape:
        return
    policy = build(model, ParallelConfig())
    for method in (policy.logprobs, policy.update):
        with pytest.raises(ValueError, match=message):
            method(batch.with_fields(routes=change(given)))


@pytest.mark.forks
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, dict(tensor_model_parallel_size=2, sequence_parallel=True, recompute="full")),
        (2, dict(pipeline_model_parallel_size=2, recompute="selective")),
        pytest.param(2, dict(expert_model_parallel_size=2), marks=pytest.mark.slow),
        pytest.param(
            2,
            dict(context_parallel_size=2, expert_model_parallel_size=2, recompute="full"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            dict(
                tensor_model_parallel_size=2,
                sequence_parallel=True,
                pipeline_model_parallel_size=2,
                expert_model_parallel_size=2,
                recompute="full",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            dict(pipeline_model_parallel_size=2, expert_model_parallel_size=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_layouts_record_and_replay_as_one_process_does(
    num_ranks: int, layout: dict, tmp_path: Path
) -> None:
    model = small_model()
    batch = make_batch(model)
    truth = truth_of(model, batch)
    parallel = ParallelConfig(**layout)

    def work() -> None:
        torch.set_num_threads(1)
        policy = build(model, parallel, routing_replay="policy")
        recorded = policy.with_old_logprobs(batch.without(ROUTES)).further_fields[ROUTES]
        found = computed(policy, batch) | {"recorded": recorded}
        if collectives.is_main():
            torch.save(found, tmp_path / "found")
        collectives.barrier()

    on_ranks(work, num_ranks)
    found = torch.load(tmp_path / "found")
    assert torch.equal(found["recorded"].sort(-1).values.long(), native_routes(model, batch))
    assert_true(found, truth)
    policy = build(model, ParallelConfig())
    policy.trainer.max_tokens = 10_000
    metrics = policy.update(batch)
    for name in (*BOTH, *REPLAYED):
        assert float(found[name]) == pytest.approx(metrics[name], rel=0.2), name
