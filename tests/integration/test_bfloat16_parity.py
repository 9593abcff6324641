"""A whole model in bfloat16: the log-probabilities of sampled tokens by the embedded engine, by the
trainer and by transformers, against float32 arithmetic with the same weights.

The bound is what rounding must take: transformers in float32, where nothing but the factors and
the result of every product is rounded to bfloat16. Independent roundings add up by their squares,
so another program that rounds as often, each time elsewhere, has an error of the same size. Half as
much again is left for a few more roundings and for the spread among a few hundred tokens.
"""

import asyncio
import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, SamplingParams, Trajectory
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.layout import split_experts
from ragen_mega.models.shape import ModelShape

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
    "all experts": lambda: mixture(num_experts=4, num_experts_per_tok=4),
    "two of eight experts": lambda: mixture(num_experts=8, num_experts_per_tok=2),
}


def mixture(**experts: int) -> Qwen3MoeForCausalLM:
    further = {"moe_intermediate_size": 384, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **experts, **further, experts_implementation="eager")
    )


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


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return split_experts(model.state_dict(), ModelShape.of(model.config))


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
        engine.load_weights(weights_of(model).items())
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
    policy.load_weights(weights_of(model).get)
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


class RoundedProducts(TorchFunctionMode):
    """Inside, products of the layers round what they take and return, and products of the LM head
    and of routers what they take.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        names = ("lm_head.weight", "mlp.gate.weight")
        self.exact = {id(p) for name, p in model.named_parameters() if name.endswith(names)}
        self.exact.add(id(model.lm_head.weight))  # which may have the name of the embedding

    def __torch_function__(
        self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        factor, weight, *rest = args
        product = function(factor.bfloat16().float(), weight, *rest)
        return product if id(weight) in self.exact else product.bfloat16().float()


def root_mean_square(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def median(errors: Tensor) -> float:
    return float(errors.abs().median())


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param("llama", root_mean_square, marks=pytest.mark.slow),
        ("qwen3", root_mean_square),
        pytest.param("all experts", root_mean_square, marks=pytest.mark.slow),
        # where rounding decides between two experts, an error is a jump
        pytest.param("two of eight experts", median, marks=pytest.mark.slow),
    ],
)
def test_engine_and_trainer_lose_what_bfloat16_takes(
    family: str, size: Callable[[Tensor], float]
) -> None:
    model = build(family)
    trajectories = sampled(model)
    exact = of_transformers(model, trajectories)
    with RoundedProducts(model):
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
