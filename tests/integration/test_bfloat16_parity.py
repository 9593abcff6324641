"""A whole model in bfloat16: the log-probabilities of sampled tokens by the embedded engine, by the
trainer and by transformers, against float32 arithmetic with the same weights.

The bound is what rounding must take: transformers in float32, where nothing but the factors and
the result of every product is rounded to bfloat16. Independent roundings add up by their squares,
so another program that rounds as often, each time elsewhere, has an error of the same size. Half as
much again is left for a few more roundings and for the spread among a few hundred tokens.
"""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, SamplingParams, Trajectory
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy

SPREAD = 1.5
PROMPT, ANSWER, ROWS = 200, 40, 8
SIZES = {  # a few layers of SmolLM2-135M
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
}


def build(family: str) -> PreTrainedModel:
    """A random model, whose weights are bfloat16 numbers held in float32."""
    torch.manual_seed(0)
    model = MODELS[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    return cast(cast(model, torch.bfloat16), torch.float32)


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its weights, not its rotary frequencies, in another dtype."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def sampled(model: PreTrainedModel) -> list[Trajectory]:
    """Trajectories that the embedded engine samples in bfloat16."""
    prompts = torch.randint(SIZES["vocab_size"], (ROWS, PROMPT)).tolist()
    engine = EmbeddedEngine(
        model.config, max_context=PROMPT + ANSWER, max_sessions=ROWS, dtype=torch.bfloat16
    )

    async def answers() -> list[Completion]:
        return await asyncio.gather(
            *(
                engine.generate(prompt, SamplingParams(ANSWER, seed=row), session=row)
                for row, prompt in enumerate(prompts)
            )
        )

    with engine.awake():
        engine.load_weights(model.state_dict().items())
        completions = asyncio.run(answers())
    trajectories = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions)):
        trajectory = Trajectory(group_id=row)
        trajectory.append_observation(prompt)
        trajectory.append_action(completion)
        trajectories.append(trajectory)
    return trajectories


def of_trainer(
    model: PreTrainedModel, trajectories: list[Trajectory], *, sums: torch.dtype = torch.float32
) -> Tensor:
    """Log-probabilities by the trainer, whose last norm has `sums`."""
    parallel = ParallelConfig(bf16=True)
    policy = MegatronPolicy(
        model.config, initialize(parallel), parallel, TrainConfig(), LossConfig(), temperature=1.0
    )
    policy.load_weights(model.state_dict().get)
    if sums != torch.float32:
        norm = policy.head.decoder.final_layernorm

        def forward(x: Tensor) -> Tensor:
            squares = x.to(sums).square().unbind(-1)
            mean = reduce(torch.add, squares).unsqueeze(-1) / x.shape[-1]
            return (x * (mean + norm.eps).rsqrt() * norm.weight).to(norm.weight.dtype)

        norm.forward = forward
    batch = pack(trajectories)
    return policy.logprobs(batch)[batch.loss_mask].view(ROWS, ANSWER).double()


@torch.inference_mode()
def of_transformers(model: PreTrainedModel, trajectories: list[Trajectory]) -> Tensor:
    tokens = torch.tensor([list(trajectory.tokens) for trajectory in trajectories])
    logprobs = model(tokens).logits[:, PROMPT - 1 : -1].double().log_softmax(-1)
    return logprobs.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


@contextmanager
def rounded_products(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the layers' linear modules round what they take and return, and the head what it
    takes.
    """

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    hooks = [model.lm_head.register_forward_pre_hook(lambda module, inputs: rounded(*inputs))]
    for module in model.model.modules():
        if isinstance(module, torch.nn.Linear):
            hooks += [
                module.register_forward_pre_hook(lambda module, inputs: rounded(*inputs)),
                module.register_forward_hook(lambda module, inputs, output: rounded(output)),
            ]
    yield
    for hook in hooks:
        hook.remove()


def size(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


@pytest.mark.parametrize("family", list(MODELS))
def test_engine_and_trainer_lose_what_bfloat16_takes(family: str) -> None:
    model = build(family)
    trajectories = sampled(model)
    exact = of_transformers(model, trajectories)
    with rounded_products(model):
        bound = SPREAD * size(of_transformers(model, trajectories) - exact)
    engine = torch.tensor([t.rollout_logprobs[PROMPT:] for t in trajectories]).double()
    trainer = of_trainer(model, trajectories)
    rounded = of_transformers(cast(model, torch.bfloat16), trajectories)
    errors = {
        "engine": size(engine - exact),
        "trainer": size(trainer - exact),
        "transformers": size(rounded - exact),
        "engine against trainer": size(engine - trainer),
    }
    print(family, "bound", bound, errors)
    assert max(errors["engine"], errors["trainer"]) < bound
    assert max(errors["engine"], errors["trainer"]) < errors["transformers"]
    assert errors["engine against trainer"] < math.sqrt(2) * bound
    broken = of_trainer(model, trajectories, sums=torch.bfloat16)
    print("a norm with bfloat16 sums", size(broken - exact))
    assert size(broken - exact) > bound, "the bound cannot tell one norm with rounded sums"
