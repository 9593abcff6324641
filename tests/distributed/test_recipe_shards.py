"""Every Qwen recipe, rank by rank, without memory: parameters against the memory plan, weights on
their way to the engines against transformers' names and shapes.

Built are the first and the last tensor- and expert-parallel rank of every pipeline stage, in a job
of the recipe's own size whose process group moves nothing. They stand for all: a data-parallel
replica builds what the first one does, and of tensor- and expert-parallel ranks megatron-core asks
their number for nothing but where their rows of the vocabulary, and their experts, begin.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PretrainedConfig

from ragen_mega.config import LoraConfig, StarPOConfig, parse
from ragen_mega.config.cli import RECIPES
from ragen_mega.megatron.initialize import initialize, shutdown
from ragen_mega.megatron.model import (
    build_model,
    transformer_config,
)
from ragen_mega.megatron.resharding import ReshardPlan, Traffic, serve
from ragen_mega.megatron.weights import held
from ragen_mega.models.layout import Slot, model_slots
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.answer import planned_gpus
from ragen_mega.planning.memory import Setting, engine_bytes, state_of
from ragen_mega.planning.published import model_config
from ragen_mega.ranks import collectives
from ragen_mega.rollout.engine import EngineShard

Held = list[tuple[Slot, Tensor]]
NAMES = sorted(path.stem for path in RECIPES.glob("qwen*.flags"))
MIXTURES = [name for name in NAMES if re.search(r"_a\d+b", name)]


class Recipe:
    """A recipe's job: its configuration, without FP8, which changes no parameter and needs a GPU,
    and the shards of its policy.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        config = parse(["--recipe", name])
        self.config: StarPOConfig = replace(config, parallel=replace(config.parallel, fp8="none"))
        self.ranks = planned_gpus(name)
        self.hf: PretrainedConfig = model_config(config.model.load)
        self.shape = ModelShape.of(self.hf)
        self.setting = Setting.from_config(self.config, self.ranks)
        layout = self.config.parallel
        self.tp, self.pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        self.ep = layout.expert_model_parallel_size
        self.held: dict[tuple[int, int], Held] = {}

    def each_rank(self) -> Iterator[tuple[int, int, Any]]:
        """(stage, place in it, groups) of the first data-parallel replica, and of the rank with the
        last experts.
        """
        shutdown()  # what a test before has started in this process
        for stage in range(self.pp):
            for place in sorted({0, self.tp - 1, self.ep - 1}):
                rank = place + stage * self.ranks // self.pp
                dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.ranks)
                groups = initialize(self.config.parallel)
                assert (groups.pp.rank(), groups.tp.rank()) == (stage, place % self.tp)
                copies = groups.dp_cp.rank(), groups.dp_cp.size()
                assert copies == (place // self.tp, self.setting.dp)
                assert (groups.ep.rank(), groups.expt_dp.size()) == (
                    place % self.ep,
                    self.setting.expert_dp,
                )
                yield stage, place, groups
                shutdown()


@pytest.fixture
def recipe(request: pytest.FixtureRequest) -> Iterator[Recipe]:
    """The recipe with the shards of its policy built on the device `meta`."""
    built = Recipe(request.param)
    config = transformer_config(built.hf, built.config.parallel)
    plain = replace(
        built.setting,
        parallel=replace(built.config.parallel, use_distributed_optimizer=False),
        lora=LoraConfig(),
    )  # the whole model, without the padding of the optimizer's buffers (test_memory_plan.py)
    try:
        for stage, place, groups in built.each_rank():
            with torch.device("meta"):
                policy = build_model(built.hf, config, groups)
                critic = build_model(built.hf, config, groups, is_critic=True)
            for model in (policy, critic):
                stored = sum(tensor.nbytes for tensor in model.parameters())
                planned = state_of(built.shape, plain, stage, is_critic=model is critic)
                assert stored == planned.parameters, (stage, place, model is critic)
            built.held[stage, place] = list(held(policy))
        yield built
    finally:
        shutdown()


def whole(recipe: Recipe, plan: ReshardPlan) -> Iterator[tuple[str, Tensor]]:
    """What `gather` streams, by shape: the slices of all tensor-parallel ranks put together."""
    tensors = {
        place: {slot.names: tensor for slot, tensor in held} for place, held in recipe.held.items()
    }
    for entry in plan.entries:
        (own,) = entry.slots
        first, last = (tensors[entry.stage, rank][own.names] for rank in (0, recipe.tp - 1))
        pieces = [first.detach()] * (recipe.tp - 1) + [last.detach()]
        yield from zip(own.names, own.unshard(pieces), strict=True)


@contextmanager
def exchanges(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Give the ranks of a group what each of them holds, by the shapes that a built one holds, and
    count collectives of tensors, which move nothing.
    """
    calls: Counter[str] = Counter()

    def of_ranks(kinds: list[tuple[Slot, ...]], own: int) -> list[list[tuple[Slot, ...]]]:
        """What each rank that shares experts holds, by what rank `own` holds."""
        of_rank = recipe.shape.num_experts // recipe.ep
        return [
            [
                (slot if slot.expert is None else replace(
                    slot, expert=slot.expert + (rank - own) * of_rank), *kind)
                for slot, *kind in kinds
            ]
            for rank in range(recipe.ep)
        ]  # fmt: skip

    def exchange(values: list[Any], mine: Any, group: Any = None) -> None:
        if isinstance(mine, str):  # the digest of the plan, compared over all ranks
            calls[mine] += 1
            values[:] = [mine] * len(values)
        elif recipe.ep > 1 and len(values) == recipe.ep:
            values[:] = of_ranks(mine, group.rank())
        else:
            place = dist.get_rank() % recipe.tp
            values[:] = [
                of_ranks([(slot, t.shape, t.dtype) for slot, t in recipe.held[stage, place]], place)
                for stage in range(len(values))
            ]

    def counting(name: str) -> Callable[..., None]:
        return lambda *arguments, **options: calls.update([name])

    monkeypatch.setattr(dist, "all_gather_object", exchange)
    monkeypatch.setattr(collectives, "device", lambda: torch.device("meta"))
    for name in ("all_gather_single", "all_gather_into_tensor", "all_to_all_single", "broadcast"):
        monkeypatch.setattr(dist, name, counting(name.partition("_single")[0]), raising=False)
    yield calls


SYNCS = {
    "qwen3_30b_a3b": (0, {8: 0, 1: 6_341_787_648}, 256),
    "qwen3_30b_a3b_8_gpus": (0, {8: 0, 1: 6_341_787_648}, 256),
    "qwen3_235b_a22b": (12_221_223_936, {8: 42_580_574_208, 1: 54_999_908_352}, 752),
}
"""Bytes that the first rank receives in a sync to servers of eight ranks: of what is not an expert;
of experts, by how many ranks of a server share them; and exchanges of experts if they move.

An expert of 30B has 3 x 2048 x 768 elements of two bytes, a layer 128 such experts. The rank holds
16 in each of 48 layers. A server with whole experts has the same 16 there. One with parts takes an
eighth of each of the other 112. An expert of 235B has 3 x 4096 x 1536; all stages together the rank
gets four in each of 94 layers without an exchange, and its server's rank holds 16, or an eighth of
each of the 124 others. The rest is gathered from three tensor-parallel ranks. For 235B its slices
have 1725701632 elements in layers and 311169024 outside: 94 x ((2 x 8192 + 1024) x 4096 / 4 + 2 x
4096 + 2 x 128 + 128 x 4096), and two vocabularies of 151936 / 4 rows and a norm. A bucket has 256
MiB / 8 of a rank, which is three experts of 30B and the down-projection of a fourth, then three; in
235B a tensor of one of the four experts is a bucket.
"""


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[] if name == "qwen3_30b_a3b" else [pytest.mark.slow])
        for name in MIXTURES
    ],
    indirect=True,
)
def test_every_rank_of_a_mixture_holds_its_experts_and_a_sync_moves_no_others(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has as many experts, and the last rank the last ones."""
    assert recipe.ep > 1 and recipe.config.rollout.rollout_expert_parallel_size == 8
    of_rank = recipe.shape.num_experts // recipe.ep
    for (_, place), parameters in recipe.held.items():
        first = place % recipe.ep * of_rank
        numbers = {slot.expert for slot, _ in parameters} - {None}
        assert numbers == set(range(first, first + of_rank))
    gathered, moved, num_exchanges = SYNCS[recipe.name]
    names = {slot.server for slot in model_slots(recipe.shape)}
    # the server makes FP8 of what it receives
    planned = engine_bytes(recipe.shape, replace(recipe.setting, engine_fp8=False))[0]
    _, _, groups = next(recipe.each_rank())
    held = recipe.held[0, 0]
    tensors = {slot.parameter: tensor.detach().to("meta") for slot, tensor in held}
    with exchanges(recipe, monkeypatch) as calls:
        plan = ReshardPlan.build(groups, held)
        for ep, received in moved.items():
            calls.clear()
            traffic, part = Traffic(), EngineShard(0, 8, ep)
            shards = list(serve(plan, tensors, part, traffic))
            assert len(shards) == len(names) and {name for name, _ in shards} == names
            assert sum(t.nbytes for _, t in shards) == pytest.approx(planned, rel=0.01)
            assert traffic.group_bytes == Counter(dense=gathered, expert=received)
            assert traffic.pp_bytes == plan.shard_bytes * (recipe.pp > 1)
            dense = sum(bucket.group == "dense" for bucket in plan.buckets)
            assert calls == Counter(
                all_gather=dense * bool(gathered),
                all_to_all=num_exchanges * bool(received),
                broadcast=len(plan.buckets) * (recipe.pp > 1),
            )


@pytest.mark.parametrize("recipe", sorted({*NAMES} - {*MIXTURES}), indirect=True)
def test_every_rank_holds_its_plan_and_syncs_every_weight_once(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with exchanges(recipe, monkeypatch) as digests:
        plans = [
            ReshardPlan.build(groups, recipe.held[stage, place])
            for stage, place, groups in recipe.each_rank()
        ]
    assert len(digests) == (recipe.ranks > 1)

    with torch.device("meta"):
        truth = AutoModelForCausalLM.from_config(recipe.hf, dtype=torch.bfloat16).state_dict()
    if recipe.hf.tie_word_embeddings:
        del truth["lm_head.weight"]
    stream = list(whole(recipe, plans[0]))
    assert len(stream) == len(truth)
    assert {name: (t.shape, t.dtype) for name, t in stream} == {
        name: (t.shape, t.dtype) for name, t in truth.items()
    }
    check_engines(recipe, plans[0], stream)


def check_engines(recipe: Recipe, plan: ReshardPlan, stream: list[tuple[str, Tensor]]) -> None:
    """The first and the last rank of an engine receive each of its parameters once, as many bytes
    as the memory plan has; by the aligned path the same.
    """
    size = recipe.config.rollout.rollout_tensor_parallel_size
    names = {slot.server for slot in model_slots(recipe.shape)}
    copied = sum(t.nbytes for _, t in stream if t.dim() == 1)  # norms and biases at most
    # the server makes FP8 of what it receives
    planned = engine_bytes(recipe.shape, replace(recipe.setting, engine_fp8=False))[0]
    for rank in sorted({0, size - 1}):
        received = list(cut_stream(iter(stream), recipe.hf, rank, size))
        shards = dict(received)
        assert len(received) == len(names) and shards.keys() == names
        assert 0 <= sum(t.nbytes for t in shards.values()) - planned <= copied
        if size == recipe.tp:  # sent by the aligned path
            local = {
                slot.server: slot.shard_to_server(tensor.detach(), rank, size).shape
                for stage in range(recipe.pp)
                for slot, tensor in recipe.held[stage, rank]
            }
            assert local == {name: t.shape for name, t in shards.items()}
