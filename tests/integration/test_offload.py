"""Memory handover on CPU tensors: what is freed, and training that does not notice, to the bit."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from transformers import PretrainedConfig

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.types import TokenBatch
from ragen_mega.megatron import adam, cpu
from ragen_mega.megatron.checkpoint import _read_adam
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.layers import drop_quantised_weights
from ragen_mega.megatron.offload import KINDS, Offloadable
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.trainer import Trainer
from ragen_mega.ranks import collectives
from ragen_mega.run.placement import ACTOR, CRITIC, Colocated, Phase
from tests.support.forked_ranks import on_ranks
from tests.support.runs import start_ranks
from tools.parity import make_batch, random_model

TRAIN = TrainConfig(lr=1e-3, critic_lr=1e-3, max_tokens_per_microbatch=128)
LOSS = LossConfig(kl_kind="k3", kl_coef=0.05)
LAYOUTS = {
    "adam": ParallelConfig(),
    "adam bf16": ParallelConfig(bf16=True),
    "distributed optimizer": ParallelConfig(use_distributed_optimizer=True),
    "distributed optimizer bf16": ParallelConfig(use_distributed_optimizer=True, bf16=True),
    "tensor parallel": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    "pipeline parallel, tied": ParallelConfig(pipeline_model_parallel_size=2),
}
FAST = ("adam", "distributed optimizer bf16")
"""What the quick tests play: each optimizer, each dtype."""
Models = dict[str, MegatronPolicy | MegatronCritic]


@pytest.fixture(scope="module")
def case() -> tuple[PretrainedConfig, dict[str, torch.Tensor], TokenBatch]:
    model = random_model("qwen2")
    return (
        model.config,
        {name: value.detach() for name, value in model.state_dict().items()},
        make_batch(model),
    )


def build(
    hf: PretrainedConfig, weights: dict[str, torch.Tensor], parallel: ParallelConfig
) -> Models:
    groups = initialize(parallel)
    models: Models = {
        ACTOR: MegatronPolicy(
            hf, groups, parallel, TRAIN, LOSS, temperature=0.7, keep_reference=True
        ),
        CRITIC: MegatronCritic(hf, groups, parallel, TRAIN, LOSS),
    }
    for model in models.values():
        model.load_weights(weights.get)
    return models


def everything(trainer: Trainer) -> list[torch.Tensor]:
    """Parameters, gradient buffers and Adam's tensors, found by other means than `Trainer` finds
    them.
    """
    parameters = list(trainer.chunks.parameters())
    moments = [
        value
        for optimizer in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if value.dim()
    ]
    mains = [p.main_param for p in parameters if getattr(p, "main_param", None) is not None]
    buffers = [b.param_data for b in trainer.models[0].buffers if b.param_data is not None]
    return [*parameters, *(p.main_grad for p in parameters), *moments, *mains, *buffers]


def state(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of the parameters and, gathered over ranks, of Adam's tensors."""
    trainer.memory.require(*KINDS)
    tensors = [parameter.detach().clone() for parameter in trainer.chunks.parameters()]
    return tensors + [
        value
        for parameter in trainer.chunks.parameters()
        for value in _read_adam(trainer, parameter, "cpu").values()
    ]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(ours, theirs)
    )


def train(models: Models, batch: TokenBatch, phases: Colocated) -> list[torch.Tensor]:
    """Three steps of handover, forward passes and updates; then the state of both models."""
    actor, critic = models.values()
    results = []
    for _ in range(3):
        with phases.lend_device():
            results += [value.clone() for _, value in actor.export_weights()]
            phases.enter(Phase.ROLLOUT)
            if phases.mode != "none":
                for model in models.values():
                    assert all(
                        tensor.untyped_storage().nbytes() == 0
                        for tensor in everything(model.trainer)
                    )
        results += [actor.logprobs(batch), critic.values(batch), actor.reference_logprobs(batch)]
        for model in (critic, actor):
            model.update(batch)
    return results + state(critic.trainer) + state(actor.trainer)


def check_layout(
    hf: PretrainedConfig,
    weights: dict[str, torch.Tensor],
    batch: TokenBatch,
    parallel: ParallelConfig,
) -> None:
    expected = train(build(hf, weights, parallel), batch, Colocated("none"))
    for mode, parks in (("rollout", False), ("turns", False), ("rollout", True)):
        layout = replace(parallel, optimizer_cpu_offload=parks)
        models, phases = build(hf, weights, layout), Colocated(mode)
        for name, model in models.items():
            phases.add(name, model.trainer.memory)
        assert same(train(models, batch, phases), expected), (mode, parks)
        if parks:
            memory = models[ACTOR].trainer.memory
            assert memory.on_device()["optimizer"] == 0 < memory.away()["optimizer"]
        if mode == "turns":  # the actor's state was asked for last
            assert sum(models[CRITIC].trainer.memory.on_device().values()) == 0
            assert sum(models[ACTOR].trainer.memory.away().values()) == 0


@pytest.mark.forks
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in LAYOUTS],
)
def test_two_ranks_train_as_if_nothing_had_moved(name: str, case: tuple) -> None:
    def work() -> None:
        torch.set_num_threads(1)
        adam.PART_BYTES = 30_000  # so that an update has several parts
        check_layout(*case, LAYOUTS[name])
        collectives.barrier()

    on_ranks(work, 2)


class GroupAdam(torch.optim.Optimizer):
    """Adam with bias correction from a count of the group, as Transformer Engine's has it."""

    def __init__(self, groups: list[dict]) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for main in group["params"]:
                moments = self.state[main]
                for key, rate, value in (
                    ("exp_avg", 0.9, main.grad), ("exp_avg_sq", 0.99, main.grad.square()),
                ):  # fmt: skip
                    moments.setdefault(key, torch.zeros_like(main)).lerp_(value, 1 - rate)
                first = moments["exp_avg"] / (1 - 0.9 ** group["step"])
                second = moments["exp_avg_sq"] / (1 - 0.99 ** group["step"])
                main.sub_(group["lr"] * first / second.sqrt().add(1e-8))


def tensors_of(items: list[adam.Updated]) -> Iterator[tuple[str, str, torch.Tensor]]:
    return (("optimizer", *tensor) for item in items for tensor in item.tensors())


def test_steps_that_are_counted_for_a_group_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "PART_BYTES", 12 * 10)
    results = []
    for is_in_parts in (False, True):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(size)) for size in (7, 3, 11, 2, 5)]
        inner = GroupAdam([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.01}])
        with cpu.cuda_literals_as_cpu():
            whole = FP32Optimizer(inner, OptimizerConfig(), None)
        items = [adam.Updated(str(i), p, whole, p, slice(None)) for i, p in enumerate(parameters)]
        memory = Offloadable(partial(tensors_of, items))
        if is_in_parts:
            memory.park("optimizer")
            adam.update_in_parts(items, memory)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            inner.step()
        assert [group["step"] for group in inner.param_groups] == [3, 3]
        assert [len(group["params"]) for group in inner.param_groups] == [3, 2]
        away = 0 if not is_in_parts else 2 * 4 * (7 + 3 + 11 + 2 + 5)
        assert memory.away()["optimizer"] == away
        results.append(torch.cat([p.detach() for p in parameters]))
    assert torch.equal(*results)


def test_quantised_copies_leave_with_whatever_leaves_first(case: tuple) -> None:
    memory = build(*case[:2], ParallelConfig())[ACTOR].trainer.memory
    memory.forget = Mock()
    memory.offload("gradients", "optimizer")  # as for a weight sync, for which the parameters stay
    memory.offload("gradients")
    assert memory.forget.call_count == 1
    layer = torch.nn.Linear(2, 2)
    layer._fp8_workspaces = copies = {
        "weight": torch.zeros(4)
    }  # as Transformer Engine's layers have them
    drop_quantised_weights(torch.nn.Sequential(layer, torch.nn.SiLU()))
    assert layer._fp8_workspaces is copies and not copies


def test_one_storage_moves_once_and_aliases_stay() -> None:
    flat = torch.randn(100)
    view, tied = flat[10:30].view(4, 5), flat[10:30]
    moment, gradient = torch.randn(7, dtype=torch.float64), torch.full((9,), 3.0)
    memory = Offloadable(
        lambda: [
            ("parameters", "a", view),
            ("parameters", "b", tied),
            ("gradients", "g", gradient),
            ("optimizer", "a", view),
            ("optimizer", "m", moment),
        ],
        "actor",
    )
    before = [tensor.clone() for tensor in (flat, view, moment)]
    assert memory.on_device() == {"parameters": 400, "gradients": 36, "optimizer": 56}
    assert memory.offload() == 492 and memory.offload() == 0
    assert [
        tensor.untyped_storage().nbytes() for tensor in (flat, view, tied, gradient, moment)
    ] == [0] * 5
    assert memory.away() == {"parameters": 400, "gradients": 36, "optimizer": 56}
    with pytest.raises(RuntimeError, match=r"parameters and optimizer .* offloaded; restore\(\)"):
        memory.require("parameters", "optimizer")
    host = {name: tensor.data_ptr() for name, tensor in memory._host.items()}
    assert len(host) == 2, "a copy for each storage but the gradients'"
    assert memory.restore("parameters") == 400 and memory.restore() == 92 and memory.restore() == 0
    memory.require("parameters", "gradients", "optimizer")
    assert same([flat, view, moment], before) and not gradient.any()
    assert view.data_ptr() == tied.data_ptr() == flat.data_ptr() + 40
    flat += 1
    memory.offload("optimizer", "parameters")
    assert memory.on_device() == {"parameters": 0, "gradients": 36, "optimizer": 0}
    memory.restore()
    assert (
        same([flat], [before[0] + 1])
        and {name: t.data_ptr() for name, t in memory._host.items()} == host
    )


@pytest.mark.gpu
def test_host_memory_is_pinned_and_as_large_as_what_it_holds() -> None:
    """Small and large; of torch's own pinned allocator, which rounds up to powers of two, only the
    small.
    """
    small, large = (
        torch.randint(256, (size,), dtype=torch.uint8, device="cuda") for size in (1000, 2**26 + 1)
    )
    before, allocated = (
        [small.cpu(), large.cpu()],
        torch.cuda.host_memory_stats().get("allocated_bytes.current", 0),
    )
    memory = Offloadable(lambda: [("parameters", "small", small), ("parameters", "large", large)])
    # the copies have come when the call returns
    for found, expected in zip(memory.snapshot("parameters").values(), before, strict=True):
        assert torch.equal(found, expected)
    for _ in range(2):
        assert (
            memory.offload() == 2**26 + 1001
            and not small.untyped_storage().nbytes() + large.untyped_storage().nbytes()
        )
        assert all(copy.is_pinned() for copy in memory._host.values())
        memory.restore()
        assert torch.equal(small.cpu(), before[0]) and torch.equal(large.cpu(), before[1])
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) - allocated < 2**20
    memory._host.clear()  # gives the pages back, and a next copy finds new ones
    assert memory.offload() and memory.restore()
    assert torch.equal(large.cpu(), before[1])


def test_a_trainer_that_is_away_says_so(case: tuple) -> None:
    hf, weights, batch = case
    actor = build(hf, weights, ParallelConfig())[ACTOR]
    actor.trainer.memory.offload()
    for use in (actor.logprobs, actor.reference_logprobs, actor.update):
        with pytest.raises(RuntimeError, match="parameters.* of the model"):
            use(batch)
    with pytest.raises(RuntimeError, match="parameters of the model"):
        next(actor.export_weights())


def test_phases_follow_each_other() -> None:
    phases = Colocated()
    with pytest.raises(RuntimeError, match="TRAIN comes SYNC, not ROLLOUT"):
        phases.enter(Phase.ROLLOUT)
    with phases.lend_device():
        assert phases.phase is Phase.SYNC
        with pytest.raises(RuntimeError, match="lent already"), phases.lend_device():
            pass
        for phase in (Phase.ROLLOUT, Phase.SYNC, Phase.ROLLOUT):  # the last two: weights again
            phases.enter(phase)
            assert phases.phase is phase
    assert phases.phase is Phase.TRAIN
    with pytest.raises(ValueError), phases.lend_device():
        raise ValueError
    assert phases.phase is Phase.TRAIN
    ledger = phases.take_ledger()
    assert {key.removesuffix("_resident_gib") for key in ledger if "resident" in key} == {
        "train_end",
        "sync",
        "sync_end",
        "rollout",
        "rollout_end",
        "train",
    }
    assert (
        all(value.value > 0 for key, value in ledger.items() if "resident" in key)
        and not phases.take_ledger()
    )


def test_models_away_cannot_be_used_in_a_rollout(case: tuple) -> None:
    hf, weights, batch = case
    models, phases = build(hf, weights, ParallelConfig()), Colocated("turns")
    for name, model in models.items():
        phases.add(name, model.trainer.memory)
    models[CRITIC].values(batch)
    with phases.lend_device():
        phases.enter(Phase.ROLLOUT)
        with pytest.raises(
            RuntimeError,
            match="parameters of the actor .* ROLLOUT.* TRAIN",
        ):
            models[ACTOR].logprobs(batch)
    models[ACTOR].logprobs(batch)


@pytest.mark.parametrize("mode", ["rollout", "turns"])
def test_weights_that_are_sent_again_come_back_and_leave_again(mode: str, case: tuple) -> None:
    hf, weights, batch = case
    models, phases = build(hf, weights, ParallelConfig()), Colocated(mode)
    for name, model in models.items():
        phases.add(name, model.trainer.memory)
    actor = models[ACTOR]
    before = actor.logprobs(batch)
    with phases.lend_device():
        for is_again in (False, True):
            if is_again:
                phases.enter(Phase.SYNC)
            for name, tensor in actor.export_weights():
                assert torch.equal(tensor, weights[name]), name
            phases.enter(Phase.ROLLOUT)
            for model in models.values():
                assert not any(model.trainer.memory.on_device().values())
    assert torch.equal(actor.logprobs(batch), before)


@pytest.mark.forks
def test_no_memory_in_an_update_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*about: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 GiB")

    monkeypatch.setattr("ragen_mega.train.train_step", run_out)
    flags = """
        --recipe bandit --hidden-size 16 --ffn-hidden-size 32 --num-layers 1 --eval-interval 0
        --warm-start-first-turn-steps 1 --warm-start-steps 1 --warm-start-trajectories 4
    """.split()
    (rank,) = start_ranks(tmp_path, "run", 1, *flags)
    rank.join()
    (error,) = capfd.readouterr().err.splitlines()
    assert rank.exitcode == 2
    assert error.startswith("error: out of memory in training; lower --max-tokens-per-microbatch")
    assert error.endswith("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.forks
def test_no_memory_at_wake_is_one_line_of_a_rank_and_ends_every_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine asks for a context that no machine has, and the plan has not refused it."""
    monkeypatch.setattr("ragen_mega.run.build.fit_memory", lambda config, shape: config)
    flags = """
        --environments bandit --max-turns 1 --max-actions-per-turn 1 --max-actions 1
        --prompt-style compact --hidden-size 16 --ffn-hidden-size 32 --num-layers 1
        --warm-start-first-turn-steps 1 --warm-start-steps 1 --warm-start-trajectories 4
    """.split()
    ranks = start_ranks(tmp_path, "run", 2, *flags, "--max-context-length", str(10**12))
    for rank in ranks:
        rank.join()
    errors = capfd.readouterr().err.splitlines()
    assert [rank.exitcode for rank in ranks] == [2, 2], errors
    (error,) = errors  # both ranks meet it, and one of them says so
    assert re.match(
        r"error: out of memory in phase SYNC \(rank [01]: resident \d+\.\d+ GiB; of it"
        r" models: actor",
        error,
    )
    assert "--offload rollout, or lower --kv-cache-tokens" in error
