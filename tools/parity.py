"""Run one packed batch through every parallel layout, with shared prefixes computed once, and
compare it with one process that computes each trajectory, and with transformers, in float32.

    python tools/parity.py --json parity.json

Layouts named `lora_...` have low-rank adapters of actor and critic beside one model. For a tied
Qwen2, an untied Qwen3 and a Qwen3-MoE with random weights it reports, per layout that can cut the
model, the largest difference of log-probabilities, values, losses, gradients and of the parameters
after two optimizer steps, and the difference of the actor's gradient by the fused loss from the
gradient through full logits in float64. Exit code 1 beyond tolerance. On GPUs every process has its
own GPU, so that layouts of more processes than GPUs are left out.
"""

import argparse
import copy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ragen_mega.commands.command_line import JSON, command, flag
from ragen_mega.config import LoraConfig, LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.fields import TEACHER_IDS, TEACHER_LOGPROBS, add_likeliest
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.models.layout import split_experts
from ragen_mega.models.lora import expected_adapters
from ragen_mega.models.shape import ModelShape
from ragen_mega.ranks import collectives
from ragen_mega.ranks.launcher import run_ranks
from ragen_mega.report.metrics import write_json

TOLERANCES = {
    "max_diff_logprobs": 1e-5,
    "max_diff_values": 1e-5,
    "max_diff_loss": 1e-5,
    "max_rel_diff_gradients": 1e-4,
    "max_diff_parameters": 1e-4,
    "max_rel_diff_unfused": 1e-4,
}
TRANSFORMERS_TOLERANCE = 1e-4
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 20},
    "qwen3_moe": {
        "tie_word_embeddings": False,
        "head_dim": 20,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
}
TEMPERATURE = 0.7
CLIP_GRAD = 0.5
LOSS = LossConfig(
    dual_clip=3.0,
    kl_kind="k3",
    kl_coef=0.05,
    entropy_coef=0.01,
    importance_cap=1.5,
    min_entropy=4.1,
)
TEACHER_COEF, TEACHER_TOP_K = 0.3, 7
"""The teacher is the model that the policy starts from, at twice the temperature."""
ENTERING = ("old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs")
"""Inputs of a token's loss besides its logits and its label."""


@dataclass(frozen=True)
class Layout:
    """One way to cut the same computation."""

    name: str
    num_processes: int
    parallel: ParallelConfig
    max_tokens: int = 128
    shared_prefixes: Literal["auto", "on", "off"] = "on"
    lora: LoraConfig = LoraConfig()

    @property
    def architectures(self) -> list[str]:
        """The models that it can cut: without experts none are divided, and with experts the tokens
        must be.
        """
        parallel = self.parallel
        has_plain_tp = parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel
        is_dense = parallel.expert_model_parallel_size == 1
        return [
            name
            for name, entries in ARCHITECTURES.items()
            if (not has_plain_tp if "num_experts" in entries else is_dense)
        ]


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("single", 1, ParallelConfig(), shared_prefixes="off"),
        Layout("shared", 1, ParallelConfig()),
        Layout("microbatch_of_one", 1, ParallelConfig(), max_tokens=1),
        Layout("one_microbatch", 1, ParallelConfig(), max_tokens=100_000),
        Layout("recompute_full", 1, ParallelConfig(recompute="full")),
        Layout("tp2", 2, ParallelConfig(tensor_model_parallel_size=2)),
        Layout("tp2_sp", 2, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
        Layout("pp2", 2, ParallelConfig(pipeline_model_parallel_size=2)),
        Layout("dp2", 2, ParallelConfig()),
        Layout("dp2_unshared", 2, ParallelConfig(), shared_prefixes="off"),
        Layout("dp2_distributed_optimizer", 2, ParallelConfig(use_distributed_optimizer=True)),
        Layout("pp4", 4, ParallelConfig(pipeline_model_parallel_size=4)),
        Layout(
            "tp2_pp2",
            4,
            ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
        ),
        Layout(
            "tp2_pp2_sp_recompute",
            4,
            ParallelConfig(
                tensor_model_parallel_size=2,
                pipeline_model_parallel_size=2,
                sequence_parallel=True,
                recompute="full",
            ),
        ),
        Layout("pp3", 3, ParallelConfig(pipeline_model_parallel_size=3)),
        Layout(
            "pp2_vp2",
            2,
            ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
        ),
        Layout(
            "tp2_pp2_vp2_sp_recompute",
            4,
            ParallelConfig(
                tensor_model_parallel_size=2,
                pipeline_model_parallel_size=2,
                virtual_pipeline_model_parallel_size=2,
                sequence_parallel=True,
                recompute="full",
            ),
        ),
        Layout(
            "dp2_pp2_vp2_distributed_optimizer",
            4,
            ParallelConfig(
                pipeline_model_parallel_size=2,
                virtual_pipeline_model_parallel_size=2,
                use_distributed_optimizer=True,
            ),
        ),
        Layout("dp2_tp2", 4, ParallelConfig(tensor_model_parallel_size=2)),
        Layout(
            "dp2_tp2_sp_distributed_optimizer",
            4,
            ParallelConfig(
                tensor_model_parallel_size=2, sequence_parallel=True, use_distributed_optimizer=True
            ),
        ),
        Layout("ep2", 2, ParallelConfig(expert_model_parallel_size=2)),
        Layout(
            "ep2_distributed_optimizer_recompute",
            2,
            ParallelConfig(
                expert_model_parallel_size=2, use_distributed_optimizer=True, recompute="selective"
            ),
        ),
        Layout(
            "tp2_sp_ep2",
            2,
            ParallelConfig(
                tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2
            ),
        ),
        Layout(
            "pp2_ep2",
            4,
            ParallelConfig(pipeline_model_parallel_size=2, expert_model_parallel_size=2),
        ),
        Layout(
            "pp2_vp2_ep2",
            4,
            ParallelConfig(
                pipeline_model_parallel_size=2,
                virtual_pipeline_model_parallel_size=2,
                expert_model_parallel_size=2,
            ),
        ),
        Layout(
            "dp2_tp2_sp_ep2_distributed_optimizer",
            4,
            ParallelConfig(
                tensor_model_parallel_size=2,
                sequence_parallel=True,
                expert_model_parallel_size=2,
                use_distributed_optimizer=True,
            ),
        ),
        Layout("cp2", 2, ParallelConfig(context_parallel_size=2)),
        Layout("cp3", 3, ParallelConfig(context_parallel_size=3), max_tokens=20),
        Layout("cp2_unshared", 2, ParallelConfig(context_parallel_size=2), shared_prefixes="off"),
        Layout(
            "cp4_recompute",
            4,
            ParallelConfig(context_parallel_size=4, recompute="full"),
            max_tokens=1,
        ),
        Layout(
            "cp2_dp2_distributed_optimizer",
            4,
            ParallelConfig(context_parallel_size=2, use_distributed_optimizer=True),
        ),
        Layout(
            "cp2_pp2_vp2",
            4,
            ParallelConfig(
                context_parallel_size=2,
                pipeline_model_parallel_size=2,
                virtual_pipeline_model_parallel_size=2,
            ),
        ),
        Layout(
            "cp2_tp2_sp",
            4,
            ParallelConfig(
                context_parallel_size=2,
                tensor_model_parallel_size=2,
                sequence_parallel=True,
                recompute="selective",
            ),
        ),
        Layout(
            "cp2_tp2_sp_ep2",
            4,
            ParallelConfig(
                context_parallel_size=2,
                tensor_model_parallel_size=2,
                sequence_parallel=True,
                expert_model_parallel_size=2,
            ),
        ),
    )
}


def _lora_layout(name: str, num_processes: int, **layout: Any) -> Layout:
    """Return a layout with adapters."""
    parallel, name = ParallelConfig(**layout), f"lora_{name}"
    if name == "lora_single":
        return Layout(name, num_processes, parallel, shared_prefixes="off", lora=LORA)
    return Layout(name, num_processes, parallel, lora=LORA)


LORA = LoraConfig(lora_rank=3, lora_alpha=6.0, lora_lr_factor=1.0)
"""Low-rank adapters of an odd rank, which no number of ranks divides."""
LAYOUTS |= {
    layout.name: layout
    for layout in (
        _lora_layout("single", 1),
        _lora_layout("recompute_full", 1, recompute="full"),
        _lora_layout("tp2", 2, tensor_model_parallel_size=2),
        _lora_layout(
            "tp2_sp", 2, tensor_model_parallel_size=2, sequence_parallel=True
        ),
        _lora_layout(
            "tp2_pp2_vp2_sp_recompute", 4, tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2,
            sequence_parallel=True, recompute="full",
        ),
        _lora_layout("dp2_distributed_optimizer", 2, use_distributed_optimizer=True),
        _lora_layout(
            "ep2_recompute", 2, expert_model_parallel_size=2, recompute="selective"
        ),
        _lora_layout("cp2_recompute_full", 2, context_parallel_size=2, recompute="full"),
        _lora_layout(
            "dp2_tp2_sp_ep2_distributed_optimizer", 4, tensor_model_parallel_size=2,
            sequence_parallel=True, expert_model_parallel_size=2, use_distributed_optimizer=True,
        ),
    )
}  # fmt: skip


def random_adapter(shape: ModelShape, lora: LoraConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return adapters whose every matrix is random, B too."""
    generator = torch.Generator().manual_seed(seed)
    names = expected_adapters(shape, lora).items()
    return {name: 0.2 * torch.randn(size, generator=generator) for name, size in names}


@torch.no_grad()
def merge(model: PreTrainedModel, adapter: Mapping[str, Tensor], scale: float) -> PreTrainedModel:
    """Return a copy of a model with an adapter added to its weights."""
    merged = copy.deepcopy(model)
    weights = split_experts(dict(merged.named_parameters()), ModelShape.of(model.config))
    for name, down in adapter.items():
        if ".lora_A." in name:
            up = adapter[name.replace(".lora_A.", ".lora_B.")]
            weights[name.replace(".lora_A.", ".")].add_(scale * up @ down)
    return merged


def adapter_gradients(
    gradients: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Return the gradients of A and B from the gradients of the merged weights W + scale B A."""
    found: dict[str, Tensor] = {}
    for name, down in adapter.items():
        if ".lora_A." in name:
            other = name.replace(".lora_A.", ".lora_B.")
            whole = scale * gradients[name.replace(".lora_A.", ".")]
            found |= {name: adapter[other].double().t() @ whole, other: whole @ down.double().t()}
    return found


def random_model(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a small model whose every parameter, biases and norms too, is random; `changes` are
    entries of its configuration.
    """
    sizes = dict(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=5,  # which no number of stages divides
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        attn_implementation="eager",
        experts_implementation="eager",  # the others compute in float32 at most
    )
    sizes |= ARCHITECTURES.get(architecture, {}) | changes
    config = AutoConfig.for_model(architecture, **sizes)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.1 * noise)
    return model


def random_trajectories(vocab_size: int, num_trajectories: int, seed: int = 0) -> list[Trajectory]:
    """Return ragged multi-turn trajectories of random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    trajectories = []
    for index in range(num_trajectories):
        trajectory = Trajectory(group_id=index // 2)
        for _ in range(draw(1, 4)):
            trajectory.append_observation([draw(0, vocab_size) for _ in range(draw(2, 9))])
            tokens = [draw(0, vocab_size) for _ in range(draw(1, 12))]
            trajectory.append_action(Completion(tokens, [0.0] * len(tokens), "stop")).reward = (
                draw(-3, 4) / 2
            )
        trajectories.append(trajectory)
    return trajectories


def branches(trajectories: Sequence[Trajectory], seed: int = 0) -> list[Trajectory]:
    """Branch off each trajectory: a copy, its first turn alone, or a trajectory that leaves it at a
    random token, which may be a sampled one.
    """
    generator, grown = torch.Generator().manual_seed(seed), []
    for index, stem in enumerate(trajectories):
        first = stem.turns[0]
        end = int(torch.randint(2, len(stem), (), generator=generator))
        end = (len(stem), first.end, end)[index % 3]
        branch = Trajectory(stem.group_id)
        for turn in stem.turns:
            branch.append_observation(stem.tokens[len(branch) : min(turn.start, end)])
            tokens = stem.tokens[turn.start : min(turn.end, end)]
            if tokens:
                completion = Completion(tokens, [0.0] * len(tokens), "stop")
                branch.append_action(completion).reward = 1.0
        if index % 3 == 2:
            branch.append_observation([1 - stem.tokens[end] % 2, 2])
            branch.append_action(Completion([3, 4], [0.0, 0.0], "stop")).reward = -1.0
        grown.append(branch)
    return grown


@torch.no_grad()
def transformers_logprobs(
    model: PreTrainedModel, batch: TokenBatch, temperature: float = TEMPERATURE
) -> Tensor:
    """[T] log-probabilities of the sampled labels, one trajectory at a time."""
    offsets = batch.cu_seqlens.tolist()
    rows = []
    for start, end in zip(offsets[:-1], offsets[1:]):
        logits = model(batch.tokens[None, start:end]).logits[0].float() / temperature
        rows.append(logits.log_softmax(-1).gather(-1, batch.labels[start:end, None])[:, 0])
    return torch.cat(rows) * batch.loss_mask


def make_batch(model: PreTrainedModel, seed: int = 0) -> TokenBatch:
    """Return a batch in which every term of the objective is active: ratios around 1, both signs of
    advantage, a reference. Its second half begins as the first does.
    """
    trajectories = random_trajectories(model.config.vocab_size, 6, seed)
    batch = pack([*trajectories, *branches(trajectories, seed)])
    generator = torch.Generator().manual_seed(seed + 1)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(batch.num_positions, generator=generator) * batch.loss_mask

    logprobs = transformers_logprobs(model, batch)
    return batch.with_fields(
        old_logprobs=logprobs + noise(0.2),
        ref_logprobs=logprobs + noise(0.2),
        rollout_logprobs=logprobs + noise(0.2),
        values=noise(1.0),
        advantages=noise(1.0),
        returns=noise(1.0),
    )


class Key(NamedTuple):
    """The key of one tensor that a layout computed."""

    kind: str
    architecture: str
    model: str = ""
    name: str = ""


COLUMNS = {
    "logprobs": "max_diff_logprobs",
    "values": "max_diff_values",
    "loss": "max_diff_loss",
    "grad_norm": "max_rel_diff_gradients",
    "gradient": "max_rel_diff_gradients",
    "parameter": "max_diff_parameters",
}
"""Kind of tensor -> the number of the report that its difference counts for."""


def run_layout(layout: Layout, directory: Path) -> None:
    """Run the body of one rank: compute everything under `layout`; rank 0 writes it to
    `directory`/<layout>.pt as Key -> tensor. The distributed optimizer leaves no gradients.
    """
    from ragen_mega.megatron.critic import MegatronCritic
    from ragen_mega.megatron.initialize import initialize
    from ragen_mega.megatron.policy import MegatronPolicy
    from ragen_mega.megatron.scorer import FrozenPolicy
    from ragen_mega.megatron.weights import export_weights, load_adapters
    from ragen_mega.storage.model_readers import open_model

    torch.set_num_threads(1)
    add_likeliest(TEACHER_TOP_K)
    groups = initialize(layout.parallel)
    train = TrainConfig(
        lr=1e-3,
        critic_lr=1e-3,
        adam_eps=1e-4,  # near 0 the update would be the sign of a gradient, and rounding flips it
        max_tokens_per_microbatch=layout.max_tokens,
        clip_grad=CLIP_GRAD,
        shared_prefixes=layout.shared_prefixes,
    )
    results: dict[Key, Tensor] = {}
    for architecture in layout.architectures:
        hf = AutoConfig.from_pretrained(directory / architecture, trust_remote_code=False)
        reader = open_model(directory / architecture)
        batch = TokenBatch(**torch.load(directory / f"{architecture}.batch.pt"))
        parallel, lora = layout.parallel, layout.lora
        policy = MegatronPolicy(
            hf,
            groups,
            parallel,
            train,
            LOSS,
            temperature=TEMPERATURE,
            lora=lora,
            teacher_coef=TEACHER_COEF,
        )
        base = policy.chunks if lora.rank else None
        critic = MegatronCritic(hf, groups, parallel, train, LOSS, lora=lora, base=base)
        for model in (policy,) if lora.rank else (policy, critic):
            model.load_weights(reader)
        if lora.rank:
            for seed, chunks in enumerate((policy.chunks, critic.chunks)):
                load_adapters(chunks, random_adapter(ModelShape.of(hf), lora, seed).get)
        results[Key("logprobs", architecture)] = policy.logprobs(batch)
        teacher = FrozenPolicy(hf, groups, parallel, train, reader, temperature=2 * TEMPERATURE)
        scores = teacher.scores(batch, top_k=TEACHER_TOP_K)
        logprobs, ids = scores[:, 2:].split(TEACHER_TOP_K, dim=1)
        batch = batch.with_fields(**{TEACHER_LOGPROBS: logprobs, TEACHER_IDS: ids})
        # without ids, of which two that are nearly as likely may change places
        results[Key("logprobs", architecture, "teacher")] = scores[:, :-TEACHER_TOP_K]
        for step in range(2):
            for name, model in (("policy", policy), ("critic", critic)):
                metrics = model.update(batch)
                for kind in ("loss", "grad_norm"):
                    key = Key(kind, architecture, name, f"step {step}")
                    results[key] = torch.tensor(float(metrics[kind]), dtype=torch.float64)
                exported = [("parameter", export_weights(model.chunks, groups))] if step else []
                if step == 0 and not layout.parallel.use_distributed_optimizer:
                    gradients = model.trainer.gradients()
                    exported = [
                        ("gradient", export_weights(model.chunks, groups, tensors=gradients))
                    ]
                for kind, tensors in exported:
                    for parameter, tensor in tensors:
                        key = Key(kind, architecture, name, parameter)
                        results[key] = tensor.cpu().clone()
        results[Key("values", architecture)] = critic.values(batch)
        if lora.rank:
            reference = policy.reference_logprobs(batch)
            results[Key("logprobs", architecture, "reference")] = reference
    if collectives.is_main():
        torch.save({tuple(key): value for key, value in results.items()}, directory / layout.name)
    collectives.barrier()
    collectives.stop()


def launch(layout: Layout, directory: Path) -> dict[Key, Tensor]:
    """Compute `layout` on new ranks, and return the result."""
    flags = ("--worker", layout.name, "--directory", directory)
    run_ranks(layout.num_processes, Path(__file__), *flags)
    return read_result(layout, directory)


def read_result(layout: Layout, directory: Path) -> dict[Key, Tensor]:
    """Read the result that `run_layout` has written."""
    return {Key(*key): value for key, value in torch.load(directory / layout.name).items()}


def compare(
    layout: Layout,
    result: Mapping[Key, Tensor],
    baseline: Mapping[Key, Tensor],
    unfused: Mapping[Key, Tensor],
) -> dict[str, float | str]:
    """Return the largest differences of a layout from the single process and from `unfused`, NaN
    where one of them computed that. Raises ValueError if it computed other tensors.
    """
    has_gradients = not layout.parallel.use_distributed_optimizer
    expected = {
        key
        for key in baseline
        if key.architecture in layout.architectures and (has_gradients or key.kind != "gradient")
    }
    if result.keys() != expected or not unfused.keys() <= baseline.keys():
        raise ValueError(
            f"layout {layout.name} computes other tensors than expected:"
            f" {sorted(result.keys() ^ expected | unfused.keys() - baseline.keys())}"
        )
    worst = dict.fromkeys(TOLERANCES, 0.0)
    pairs = [(COLUMNS[key.kind], result[key], baseline[key]) for key in result]
    pairs += [
        ("max_rel_diff_unfused", result[key], truth)
        for key, truth in unfused.items()
        if key in result
    ]
    for column, ours, theirs in pairs:
        scale = max(float(theirs.abs().max()), 1e-6) if "_rel_" in column else 1.0
        worst[column] = largest(worst[column], float((ours - theirs).abs().max()) / scale)
    return {"name": layout.name} | worst


def largest(*differences: float) -> float:
    """Return the largest difference, NaN if any is: Python's own `max` would leave that out."""
    return float(torch.tensor(differences, dtype=torch.float64).max())


def choose_layouts(asked: list[str] | None, num_gpus: int) -> list[str]:
    """Select the requested layouts, else all; on GPUs each process needs its own, since NCCL does
    not allow two on one. Raises ValueError if a requested layout needs more.
    """
    too_large = [name for name in asked or LAYOUTS if 0 < num_gpus < LAYOUTS[name].num_processes]
    if asked and too_large:
        raise ValueError(
            f"{', '.join(too_large)} need a GPU per process, not {num_gpus}; drop them from"
            " --layouts"
        )
    if too_large:
        print(
            f"left out, with more processes than the {num_gpus} GPU(s) here:"
            f" {', '.join(too_large)}",
            flush=True,
        )
    baselines = ("single", "lora_single")
    return asked or [name for name in LAYOUTS if name not in (*too_large, *baselines)]


def measure(names: list[str]) -> dict:
    """Run the named layouts beside the single process and return the report."""
    expected, rows = {}, []
    unfused: dict[str, dict[Key, Tensor]] = {"single": {}, "lora_single": {}}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for architecture in ARCHITECTURES:
            model = random_model(architecture)
            model.save_pretrained(directory / architecture)
            batch = make_batch(model)
            torch.save(dict(batch.tensors()), directory / f"{architecture}.batch.pt")
            adapter = random_adapter(ModelShape.of(model.config), LORA)
            merged = merge(model, adapter, LORA.scale)
            for name, truth in (("single", model), ("lora_single", merged)):
                expected[Key("logprobs", architecture, name)] = transformers_logprobs(truth, batch)
                gradients = unfused_gradients(truth, batch, LOSS, TEMPERATURE, model)
                if truth is merged:
                    gradients = adapter_gradients(gradients, adapter, LORA.scale)
                gradients, norm = clipped(gradients, CLIP_GRAD)
                found = unfused[name]
                found[Key("grad_norm", architecture, "policy", "step 0")] = torch.tensor(norm)
                for weight, gradient in gradients.items():
                    found[Key("gradient", architecture, "policy", weight)] = gradient
        baselines: dict[str, dict[Key, Tensor]] = {
            "lora_single" if LAYOUTS[name].lora.rank else "single": {}
            for name in ("single", *names)
        }
        for name in baselines:
            baselines[name] = launch(LAYOUTS[name], directory)
        for name in names:
            start = "lora_single" if LAYOUTS[name].lora.rank else "single"
            result = launch(LAYOUTS[name], directory)
            rows.append(compare(LAYOUTS[name], result, baselines[start], unfused[start]))
            numbers = (f"{key} {rows[-1][key]:.1e}" for key in TOLERANCES)
            print(f"{name:34s}", *numbers, sep="  ", flush=True)
    difference = largest(
        *(
            float((baselines[key.model][key._replace(model="")] - logprobs).abs().max())
            for key, logprobs in expected.items()
            if key.model in baselines
        )
    )
    print(f"{'transformers':34s}  max_diff_logprobs {difference:.1e}")
    return {"layouts": rows, "transformers": {"max_diff_logprobs": difference}}


def is_within_tolerance(report: dict) -> bool:
    """Check that every layout in the report of `measure` agrees as well as TOLERANCES demand."""
    return report["transformers"]["max_diff_logprobs"] <= TRANSFORMERS_TOLERANCE and all(
        row[key] <= tolerance for row in report["layouts"] for key, tolerance in TOLERANCES.items()
    )


def unfused_gradients(
    model: PreTrainedModel,
    batch: TokenBatch,
    loss: LossConfig,
    temperature: float,
    teacher: PreTrainedModel | None = None,
) -> dict[str, Tensor]:
    """Return the gradients of the mean token loss by name, float64. `loss` has a dual clip, k3 and
    an importance cap. With a `teacher` its likeliest tokens at twice the temperature are in it.
    """

    def exactly(given: PreTrainedModel) -> Any:
        exact = type(given)(given.config).double().eval()
        exact.load_state_dict(given.state_dict())
        return exact

    exact, wise = exactly(model), None if teacher is None else exactly(teacher)
    offsets = batch.cu_seqlens.tolist()
    tokens = {name: getattr(batch, name).double() for name in ENTERING} | {"labels": batch.labels}
    for start, end in zip(offsets[:-1], offsets[1:]):
        logits = exact(batch.tokens[None, start:end]).logits[0] / temperature
        keep = batch.loss_mask[start:end]
        kept = {name: values[start:end][keep] for name, values in tokens.items()}
        losses = token_losses(logits[keep], kept, loss)
        if wise is not None:
            with torch.no_grad():
                wanted = wise(batch.tokens[None, start:end]).logits[0][keep] / (2 * temperature)
            found, wanted = logits[keep].softmax(-1), wanted.softmax(-1)
            is_kept = wanted >= wanted.topk(TEACHER_TOP_K).values[:, -1:]
            terms = wanted * (wanted / found).log() - wanted + found
            losses = losses + TEACHER_COEF * (terms * is_kept).sum(-1)
        (losses.sum() / batch.loss_mask.sum()).backward()
    named = exact.named_parameters()
    gradients = {name: each.grad for name, each in named if each.grad is not None}
    return split_experts(gradients, ModelShape.of(model.config))


def token_losses(logits: Tensor, tokens: dict[str, Tensor], loss: LossConfig) -> Tensor:
    """Return the loss [T] of tokens with logits [T, V], as the papers write it (formulas:
    `ragen_kernels.objective`).
    """
    all_logprobs = logits.log_softmax(-1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    logprobs = all_logprobs.gather(-1, tokens["labels"][:, None])[:, 0]
    advantages = tokens["advantages"]
    ratio = (logprobs - tokens["old_logprobs"]).exp()
    clipped = ratio.clamp(1 - loss.clip_ratio_low, 1 + loss.clip_ratio_high)
    surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
    if loss.dual_clip is not None:
        bounded = torch.minimum(surrogate, -advantages * loss.dual_clip)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    surrogate = surrogate * (entropy.detach() >= loss.min_entropy)
    importance = (
        (tokens["old_logprobs"] - tokens["rollout_logprobs"]).exp().clamp(max=loss.importance_cap)
    )
    drift = tokens["ref_logprobs"] - logprobs
    return (
        importance * surrogate
        + loss.kl_coef * (drift.exp() - 1 - drift)
        - loss.entropy_coef * entropy
    )


def clipped(gradients: dict[str, Tensor], max_norm: float) -> tuple[dict[str, Tensor], float]:
    """Return the gradients scaled to at most `max_norm`, and the norm that they had."""
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    scale = min(1.0, max_norm / norm)
    return {name: gradient * scale for name, gradient in gradients.items()}, norm


@command(
    __doc__,
    JSON,
    flag("--layouts", "default: all that fit the GPUs", nargs="+", choices=sorted(LAYOUTS)),
    flag("--worker", argparse.SUPPRESS),
    flag("--directory", argparse.SUPPRESS, type=Path),
)
def main(arguments: argparse.Namespace) -> int:
    if arguments.worker:
        run_layout(LAYOUTS[arguments.worker], arguments.directory)
        return 0
    report = measure(choose_layouts(arguments.layouts, torch.cuda.device_count()))
    if arguments.json:
        write_json(arguments.json, report)
    if is_within_tolerance(report):
        return 0
    said = f"beyond tolerance: {TOLERANCES}, transformers {TRANSFORMERS_TOLERANCE}"
    print(said, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
