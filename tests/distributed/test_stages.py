"""Pipeline stages of unequal numbers of layers, and of several chunks: their layers, weights and
checkpoints, and the passes in flight that the memory plan counts. Gradients: tools/parity.py.
"""

from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ragen_mega.config import ParallelConfig, TrainConfig
from ragen_mega.megatron import checkpoint
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.shape import ModelShape, stage_layers
from ragen_mega.planning.memory import in_flight
from ragen_mega.ranks import collectives
from ragen_mega.rollout.engine import EngineShard
from tests.support.forked_ranks import on_ranks
from tools import parity

pytestmark = [pytest.mark.forks, pytest.mark.timeout(600)]
MODEL = parity.random_model("qwen2")  # tied, and of five layers
HF, SHAPE = MODEL.config, ModelShape.of(MODEL.config)
WEIGHTS = {n: t.detach() for n, t in MODEL.named_parameters()}
ALONE, UNEVEN, CHUNKS = (
    ParallelConfig(),
    ParallelConfig(pipeline_model_parallel_size=2),
    ParallelConfig(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=True,
    ),
)


def test_stages_hold_all_layers_in_order_and_the_ends_one_fewer() -> None:
    for layers, pp, vp in ((94, 4, 1), (94, 8, 1), (94, 8, 3), (5, 2, 2), (7, 3, 2), (6, 6, 1)):
        stages = stage_layers(layers, pp, vp)
        in_order = [stages[number % pp][number // pp] for number in range(pp * vp)]
        assert list(chain.from_iterable(in_order)) == list(range(layers))
        lengths = [len(run) for run in in_order]
        assert max(lengths) - min(lengths) == (layers % (pp * vp) > 0)
        assert lengths[-1] == min(lengths) and sum(map(len, chain(*stages))) == layers
    # as Qwen3-235B is cut in public recipes
    assert [len(run) for (run,) in stage_layers(94, 4)] == [23, 24, 24, 23]
    assert [len(run) for (run,) in stage_layers(94, 8)] == [11, *[12] * 6, 11]


def build(parallel: ParallelConfig) -> tuple[MegatronPolicy, MegatronCritic]:
    torch.set_num_threads(1)
    options = (HF, initialize(parallel), parallel)
    train = TrainConfig(lr=1e-3, critic_lr=1e-3, max_tokens_per_microbatch=32)
    policy = MegatronPolicy(*options, train, parity.LOSS, temperature=1.0)
    critic = MegatronCritic(*options, train, parity.LOSS)
    for model in (policy, critic):
        model.load_weights(WEIGHTS.get)
    return policy, critic


def step(models: tuple[MegatronPolicy, MegatronCritic]) -> dict[str, Tensor]:
    """The weights of both models before and after an update."""
    found, batch = {}, parity.make_batch(MODEL)
    for when in ("before", "after"):
        for role, model in zip(("policy", "critic"), models):
            found |= {f"{when} {role} {n}": t.clone() for n, t in model.export_weights()}
            model.update(batch)
    return found


def test_a_checkpoint_moves_between_stages_and_chunks(tmp_path: Path) -> None:
    """Written by one process, read and written with chunks, and read by uneven stages."""

    def work(parallel: ParallelConfig, source: Path | None, target: Path) -> None:
        models = build(parallel)
        trainers = {role: model.trainer for role, model in zip(("actor", "critic"), models)}
        if source is None:
            for model in models:
                model.update(parity.make_batch(MODEL))
        else:
            checkpoint.load(source, trainers)
        write = checkpoint.stage(target, trainers)
        if collectives.is_main():
            assert not [*target.iterdir()]  # or a full disk would end the run here
        collectives.barrier()
        write()
        found = step(models)
        if collectives.is_main():
            torch.save(found, target / "found")
        collectives.barrier()

    source, truth = None, {}
    for number, parallel in enumerate((ALONE, CHUNKS, UNEVEN)):
        (target := tmp_path / str(number)).mkdir()
        on_ranks(partial(work, parallel, source, target), parallel.pipeline_model_parallel_size)
        found = torch.load(target / "found")
        source, truth = target, truth or found
        for name, expected in truth.items():
            if name.startswith("before"):
                assert torch.equal(found[name], expected), name
            else:  # without Adam's moments a step has the sign of the gradient
                assert float((found[name] - expected).abs().max()) < 1e-4, name
    assert not torch.equal(truth["before policy model.norm.weight"], WEIGHTS["model.norm.weight"])


def test_engines_are_served_and_passes_in_flight_are_as_planned() -> None:
    def work() -> None:
        policy, _ = build(CHUNKS)
        served = dict(policy.export_weights())
        assert served.keys() == WEIGHTS.keys()
        assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in served.items())
        norm = "model.layers.2.input_layernorm.weight"  # of the second chunk of the first stage
        for size in (1, 2):
            shards = dict(policy.export_weights(EngineShard(collectives.rank() % size, size)))
            assert torch.equal(shards[norm], WEIGHTS[norm])
        alive = most = 0

        def begin(module: torch.nn.Module, inputs: tuple, output: Tensor) -> None:
            nonlocal alive, most
            alive += output.requires_grad
            most = max(most, alive)
            if output.requires_grad:
                output.register_hook(end)

        def end(gradient: Tensor) -> None:
            nonlocal alive
            alive -= 1

        for part in policy.chunks:
            part.register_forward_hook(begin)
        policy.update(parity.make_batch(MODEL))
        assert (alive, most) == (0, in_flight(policy.groups.pp.rank(), 2, 2))
        collectives.barrier()

    on_ranks(work, 2)
