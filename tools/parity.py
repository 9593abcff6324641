"""Run one packed batch through every parallel layout and compare it with one process and with
transformers, in float32.

    python tools/parity.py --json parity.json

For tied Qwen2 and untied Qwen3 models with random weights it reports, per layout, the largest
difference of log-probabilities, values, losses, gradients and of the parameters after two optimizer
steps, and that of the actor's gradient by the fused loss from the one through full logits
(parity_unfused.py). Exit code 1 beyond tolerance. On GPUs every process has one of its own, so that
layouts of more processes than GPUs are left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data import distributed
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory

TOLERANCES = {
    "max_diff_logprobs": 1e-5,
    "max_diff_values": 1e-5,
    "max_diff_loss": 1e-5,
    "max_rel_diff_gradients": 1e-4,
    "max_diff_parameters": 1e-4,
    "max_rel_diff_unfused": 1e-4,
}
TRANSFORMERS_TOLERANCE = 1e-4
ARCHITECTURES = ("qwen2", "qwen3")
TEMPERATURE = 0.7
CLIP_GRAD = 0.5
LOSS = LossConfig(dual_clip=3.0, kl_kind="k3", kl_coef=0.05, entropy_coef=0.01, importance_cap=1.5)


@dataclass(frozen=True)
class Layout:
    """One way to cut the same computation."""

    name: str
    num_processes: int
    parallel: ParallelConfig
    max_tokens: int = 128


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("single", 1, ParallelConfig()),
        Layout("microbatch_of_one", 1, ParallelConfig(), max_tokens=1),
        Layout("one_microbatch", 1, ParallelConfig(), max_tokens=100_000),
        Layout("recompute_full", 1, ParallelConfig(recompute="full")),
        Layout("tp2", 2, ParallelConfig(tensor_model_parallel_size=2)),
        Layout("tp2_sp", 2, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
        Layout("pp2", 2, ParallelConfig(pipeline_model_parallel_size=2)),
        Layout("dp2", 2, ParallelConfig()),
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
        Layout("dp2_tp2", 4, ParallelConfig(tensor_model_parallel_size=2)),
        Layout(
            "dp2_tp2_sp_distributed_optimizer",
            4,
            ParallelConfig(
                tensor_model_parallel_size=2, sequence_parallel=True, use_distributed_optimizer=True
            ),
        ),
    )
}


def random_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    """A small Qwen model whose every parameter, biases and norms too, is random."""
    sizes = dict(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        attn_implementation="eager",
    )
    if architecture == "qwen2":
        config = Qwen2Config(**sizes, tie_word_embeddings=True)
    else:
        config = Qwen3Config(**sizes, head_dim=20, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.1 * noise)
    return model


def random_trajectories(vocab_size: int, num_trajectories: int, seed: int = 0) -> list[Trajectory]:
    """Ragged multi-turn trajectories of random tokens."""
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
    """A batch in which every term of the objective is active: ratios around 1, both signs of
    advantage, a reference.
    """
    batch = pack(random_trajectories(model.config.vocab_size, 12, seed))
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


def run_layout(layout: Layout, directory: Path) -> None:
    """Body of one rank: compute everything under `layout`; rank 0 writes it to
    `directory`/<layout>.pt.
    """
    from ragen_mega.megatron.critic import MegatronCritic
    from ragen_mega.megatron.initialize import initialize
    from ragen_mega.megatron.policy import MegatronPolicy
    from ragen_mega.megatron.weights import export_weights
    from ragen_mega.storage.model_readers import open_model

    torch.set_num_threads(1)
    groups = initialize(layout.parallel)
    train = TrainConfig(
        lr=1e-3, critic_lr=1e-3, max_tokens_per_microbatch=layout.max_tokens, clip_grad=CLIP_GRAD
    )
    results: dict[str, dict] = {}
    for architecture in ARCHITECTURES:
        hf = AutoModelForCausalLM.from_pretrained(directory / architecture).config
        reader = open_model(directory / architecture)
        batch = TokenBatch(**torch.load(directory / f"{architecture}.batch.pt"))
        policy = MegatronPolicy(hf, groups, layout.parallel, train, LOSS, temperature=TEMPERATURE)
        critic = MegatronCritic(hf, groups, layout.parallel, train, LOSS)
        for model in (policy, critic):
            model.load_weights(reader)
        result = {
            "logprobs": policy.logprobs(batch),
            "losses": [],
            "gradients": {},
            "grad_norms": [],
        }
        for step in range(2):
            for name, model in (("policy", policy), ("critic", critic)):
                metrics = model.update(batch)
                result["losses"].append(metrics["loss"])
                result["grad_norms"].append(metrics["grad_norm"])
                if step == 0 and not layout.parallel.use_distributed_optimizer:
                    gradients = export_weights(model.module, groups, model.trainer.gradients())
                    result["gradients"][name] = {
                        key: value.cpu().clone() for key, value in gradients
                    }
        result["values"] = critic.values(batch)
        result["parameters"] = {
            name: {key: value.cpu().clone() for key, value in export_weights(model.module, groups)}
            for name, model in (("policy", policy), ("critic", critic))
        }
        results[architecture] = result
    if distributed.is_main():
        torch.save(results, directory / f"{layout.name}.pt")
    distributed.barrier()
    distributed.stop()


def compare(name: str, result: dict, baseline: dict, unfused: dict) -> dict[str, float | str]:
    """Largest differences of one layout from the single process and from `unfused`, over both
    architectures.
    """
    row: dict[str, float | str] = {"name": name} | dict.fromkeys(TOLERANCES, 0.0)

    def record(key: str, value: float) -> None:
        row[key] = max(row[key], value)

    for architecture in ARCHITECTURES:
        ours, theirs = result[architecture], baseline[architecture]
        record("max_diff_logprobs", float((ours["logprobs"] - theirs["logprobs"]).abs().max()))
        record("max_diff_values", float((ours["values"] - theirs["values"]).abs().max()))
        record("max_diff_loss", max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"])))
        for a, b in zip(ours["grad_norms"], theirs["grad_norms"]):
            record("max_rel_diff_gradients", abs(a - b) / b)
        for model, gradients in ours["gradients"].items():
            record(
                "max_rel_diff_gradients", relative_difference(gradients, theirs["gradients"][model])
            )
        truth, norm = unfused[architecture]
        record("max_rel_diff_unfused", abs(ours["grad_norms"][0] - norm) / norm)
        if "policy" in ours["gradients"]:  # the distributed optimizer leaves only the norm
            record("max_rel_diff_unfused", relative_difference(ours["gradients"]["policy"], truth))
        for model, parameters in ours["parameters"].items():
            for key, parameter in parameters.items():
                record(
                    "max_diff_parameters",
                    float((parameter - theirs["parameters"][model][key]).abs().max()),
                )
    return row


def relative_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of any tensor's elements, relative to its largest element; the names must
    agree.
    """
    if actual.keys() != expected.keys():
        raise ValueError(
            f"gradients of other tensors than expected: {sorted(actual.keys() ^ expected.keys())}"
        )
    return max(
        float((actual[name] - x).abs().max()) / max(float(x.abs().max()), 1e-6)
        for name, x in expected.items()
    )


def launch(layout: Layout, directory: Path) -> None:
    """Run `layout` under torchrun; raise RuntimeError with its output when it fails."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(layout.num_processes),
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        __file__,
        "--worker",
        layout.name,
        "--directory",
        str(directory),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(
            f"layout {layout.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        )


def choose_layouts(asked: list[str] | None, num_gpus: int) -> list[str]:
    """Those asked for, else all; on GPUs each process needs one of its own, since NCCL takes no two
    on one.
    """
    too_large = [name for name in asked or LAYOUTS if 0 < num_gpus < LAYOUTS[name].num_processes]
    if asked and too_large:
        raise SystemExit(
            f"error: {', '.join(too_large)} need a GPU per process, not {num_gpus}; drop them from"
            " --layouts"
        )
    if too_large:
        print(
            f"left out, with more processes than the {num_gpus} GPU(s) here:"
            f" {', '.join(too_large)}",
            flush=True,
        )
    return asked or [name for name in list(LAYOUTS)[1:] if name not in too_large]


def measure(names: list[str]) -> dict:
    """Run the named layouts beside the single process and return the report."""
    from parity_unfused import (  # here, since tests import this file as part of a package
        clipped,
        unfused_gradients,
    )

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        expected, unfused = {}, {}
        for architecture in ARCHITECTURES:
            model = random_model(architecture)
            model.save_pretrained(directory / architecture)
            batch = make_batch(model)
            torch.save(dict(batch.tensors()), directory / f"{architecture}.batch.pt")
            expected[architecture] = transformers_logprobs(model, batch)
            unfused[architecture] = clipped(
                unfused_gradients(model, batch, LOSS, TEMPERATURE), CLIP_GRAD
            )
        launch(LAYOUTS["single"], directory)
        baseline = torch.load(directory / "single.pt")
        rows = []
        for name in names:
            launch(LAYOUTS[name], directory)
            rows.append(compare(name, torch.load(directory / f"{name}.pt"), baseline, unfused))
            print(
                "  ".join(
                    f"{key} {value:.1e}" if isinstance(value, float) else f"{value:34s}"
                    for key, value in rows[-1].items()
                ),
                flush=True,
            )
        difference = max(
            float((baseline[a]["logprobs"] - expected[a]).abs().max()) for a in ARCHITECTURES
        )
        print(f"transformers                        max_diff_logprobs {difference:.1e}")
    return {"layouts": rows, "transformers": {"max_diff_logprobs": difference}}


def is_within_tolerance(report: dict) -> bool:
    """Whether every layout in the report of `measure` agrees as well as TOLERANCES demand."""
    return report["transformers"]["max_diff_logprobs"] <= TRANSFORMERS_TOLERANCE and all(
        row[key] <= tolerance for row in report["layouts"] for key, tolerance in TOLERANCES.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument(
        "--layouts", nargs="+", choices=sorted(LAYOUTS), help="default: all that fit the GPUs"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_layout(LAYOUTS[arguments.worker], arguments.directory)
        return
    report = measure(choose_layouts(arguments.layouts, torch.cuda.device_count()))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if not is_within_tolerance(report):
        print(
            f"beyond tolerance: {TOLERANCES}, transformers {TRANSFORMERS_TOLERANCE}",
            file=sys.stderr,
        )
        raise SystemExit(1)


if __name__ == "__main__":
    main()
