"""One side of bench_peers.py: it trains a step at every request, with ragen_mega or with TRL's
GRPOTrainer, each in its own process and environment.

    python tools/benchmarks/peers.py ours|trl SETTINGS.json REPLY_FD

Both sample a fixed number of tokens in every turn: stop tokens are ignored and the environment is
given an empty answer. TRL's side uses the environment, the prompts and the renderer of ragen_mega.
"""

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # TRL's environment has no ragen_mega

from ragen_mega.algorithm.tables import REWARDS
from ragen_mega.config import StarPOConfig, parse
from ragen_mega.rollout.player import Task
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import TaskSampler

COMPARED_LR = 1e-9
"""So small that the compared update leaves the weights as they are."""


REWARDS.register("tokens_mod_7", lambda trajectory: float(sum(trajectory.tokens) % 7))


@dataclass(frozen=True)
class Settings:
    """Settings that both sides train with."""

    model: str
    output: str
    threads: int
    bf16: bool
    groups: int
    group_size: int
    turns: int
    max_tokens: int
    max_context: int
    prompt_style: str
    num_steps: int

    def config(self) -> StarPOConfig:
        """Return the same as flags of the program."""
        return parse(
            f"--load {self.model} --output {self.output} --name ours-{self.turns} --overwrite"
            f" --environments frozen_lake --prompt-style {self.prompt_style}"
            f" --max-turns {self.turns} --max-response-length {self.max_tokens}"
            f" --max-context-length {self.max_context} --num-groups {self.groups}"
            f" --group-size {self.group_size} --num-steps {self.num_steps}"
            f" --minibatch-size {self.groups * self.group_size}"
            " --filter-strategy none --advantage-estimator grpo --entropy-coef 0 --lr"
            f" {COMPARED_LR} --weight-decay 0 --adam-beta2 0.999 --clip-grad 1"
            " --reward tokens_mod_7 --eval-prompts 2 --eval-samples 1 --eval-interval 0"
            f" --save-interval 0 --diagnose-interval 0{' --bf16' * self.bf16}".split()
        )


class DeafRenderer(ChatRenderer):
    """Hands the environment an empty answer and never stops: equal work for any weights."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, think=True)
        self.stop_token_ids = ()

    def decode_action(self, tokens: Sequence[int]) -> str:
        return ""


class StepClock:
    """Says what a step took, and waits for the word to begin the next."""

    def __init__(self, reply: int) -> None:
        self._reply = os.fdopen(reply, "w")
        self._started = 0.0, 0.0  # until `begin`
        self.num_sampled = 0
        """Tokens of the step."""

    def say(self, **facts: Any) -> None:
        """Write one line of facts for the benchmark."""
        self._reply.write(json.dumps(facts) + "\n")
        self._reply.flush()

    def begin(self) -> None:
        """Wait for the next request; raises SystemExit when there are no more steps."""
        if not sys.stdin.readline():
            raise SystemExit
        self._started = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Report the end of a step."""
        wall, cpu = time.perf_counter(), time.process_time()
        wall, cpu = wall - self._started[0], cpu - self._started[1]
        self.say(wall=wall, cpu=cpu, num_sampled=self.num_sampled)


@dataclass(frozen=True)
class ComparedBatch:
    """Random sequences with ratios on both sides of the clip bounds, the same in both processes."""

    prompts: torch.Tensor  # [S, P]
    completions: torch.Tensor  # [S, C]
    old_logprobs: torch.Tensor  # [S, C]
    advantages: torch.Tensor  # [S]

    @classmethod
    def of(cls, vocab: int, num: int = 16, prompt: int = 24, sampled: int = 31) -> "ComparedBatch":
        draw = torch.Generator().manual_seed(5)
        return cls(
            torch.randint(1, vocab, (num, prompt), generator=draw),
            torch.randint(1, vocab, (num, sampled), generator=draw),
            -torch.log(torch.tensor(float(vocab)))
            + 0.3 * torch.randn(num, sampled, generator=draw),
            torch.randn(num, generator=draw),
        )


def train_ours(settings: Settings, pace: StepClock) -> None:
    """`train.starpo`, with its files, metrics and weight sync."""
    from ragen_mega.data.packing import pack
    from ragen_mega.data.types import Completion, Trajectory
    from ragen_mega.run.build import build
    from ragen_mega.run.run import Run
    from ragen_mega.train import starpo

    run = build(settings.config())
    assert isinstance(run, Run)  # no rank samples alone
    run.renderer = run.rollouts.sampling.renderer = DeafRenderer(run.renderer.tokenizer)
    batch = ComparedBatch.of(run.policy.hf.vocab_size)
    trajectories = []
    for prompt, completion in zip(batch.prompts.tolist(), batch.completions.tolist(), strict=True):
        trajectory = Trajectory(group_id=0)
        trajectory.append_observation(prompt)
        trajectory.append_action(Completion(completion, [0.0] * len(completion), "length"))
        trajectories.append(trajectory)
    packed = pack(trajectories)
    zeros = torch.zeros(packed.num_positions)
    spread = batch.advantages[:, None].expand_as(batch.completions)
    result = run.policy.update(
        packed.with_fields(
            old_logprobs=zeros.masked_scatter(packed.loss_mask, batch.old_logprobs),
            advantages=zeros.masked_scatter(packed.loss_mask, spread),
        )
    )
    pace.say(loss=result["loss"], grad_norm=result["grad_norm"])

    play = run.rollouts.sample

    def sample(step: int, log: Any) -> Any:
        groups = play(step, log)
        pace.num_sampled = run.timers.sampled_tokens
        return groups

    def steps() -> Iterator[int]:
        for step in range(settings.num_steps):
            pace.begin()
            yield step
            pace.end()
        pace.begin()

    gc.collect()
    gc.freeze()  # as the program does, see train.main
    with run, patch.object(run.rollouts, "sample", sample), patch.object(run, "steps", steps):
        starpo(run)


def train_trl(settings: Settings, pace: StepClock) -> None:
    """`GRPOTrainer.train`: its own generation for one turn, its `rollout_func` for several."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(
        settings.model, padding_side="left", trust_remote_code=False
    )
    renderer, size = DeafRenderer(tokenizer), settings.groups * settings.group_size
    sampler = TaskSampler(settings.config())
    groups = list(itertools.chain(*map(sampler.sample, range(settings.num_steps + 1))))
    prompts = [tokenizer.decode(first_prompt(renderer, group[0])[1]) for group in groups]
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=dtype, trust_remote_code=False
    )
    model.generation_config.eos_token_id = None
    by_prompt = {prompt: iter(group) for prompt, group in zip(prompts, groups, strict=True)}

    class Paced(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            pace.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            pace.end()

    def tokens_mod_7(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if settings.turns == 1:
            pace.num_sampled = sum(map(len, completion_ids))
        return [sum(ids) % 7 for ids in completion_ids]

    def play(texts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        tasks = [next(by_prompt[text]) for text in texts]
        played = play_turns(trainer.model, renderer, tasks, settings.max_tokens)
        pace.num_sampled = sum(map(sum, played["env_mask"]))
        return played

    trainer = GRPOTrainer(
        model,
        tokens_mod_7,
        GRPOConfig(
            f"{settings.output}/trl-{settings.turns}", use_cpu=True, bf16=settings.bf16,
            report_to="none",
            per_device_train_batch_size=size, num_generations=settings.group_size,
            max_completion_length=settings.turns * settings.max_tokens
            if settings.turns == 1 else settings.max_context,
            max_steps=settings.num_steps + 1, learning_rate=COMPARED_LR, weight_decay=0.0,
            lr_scheduler_type="constant", max_grad_norm=1.0, loss_type="dapo", beta=0.0,
            epsilon=0.2, epsilon_high=0.28, temperature=1.0, top_p=1.0, top_k=0,
            gradient_checkpointing=False, save_strategy="no", logging_steps=1, disable_tqdm=True,
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Paced()],
        rollout_func=play if settings.turns > 1 else None,
    )  # fmt: skip
    trainer.eos_token_ids, trainer.generation_config.eos_token_id = [], None
    pace.say(**compare_trl(trainer))
    trainer.train()


def first_prompt(renderer: ChatRenderer, task: Task) -> tuple[Any, list[int]]:
    """Return a new episode of the task, and the tokens that it begins with."""
    episode = task.make_episode()
    messages = episode.start(task.seed, outcome_seed=task.outcome_seed, board=task.board)
    return episode, renderer.start(messages)


def play_turns(
    model: Any, renderer: ChatRenderer, tasks: Sequence[Task], max_tokens: int
) -> dict[str, Any]:
    """Play all turns and return the dictionary of a `rollout_func` of TRL. All prompts of a turn
    are one left-padded batch for `generate`, as in TRL's examples; `env_mask` masks the
    environment's text.
    """
    playing = [(row, *first_prompt(renderer, task)) for row, task in enumerate(tasks)]
    prompts = [context for _, _, context in playing]
    completions, masks = [list[int]() for _ in tasks], [list[int]() for _ in tasks]
    while playing:
        contexts = [prompts[row] + completions[row] for row, _, _ in playing]
        longest = max(map(len, contexts))
        pads = [longest - len(context) for context in contexts]
        with torch.no_grad():
            output = model.generate(
                input_ids=torch.tensor([[0] * n + c for n, c in zip(pads, contexts)]),
                attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in pads]),
                max_new_tokens=max_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        going_on = []
        for (row, episode, _), answer in zip(playing, output[:, longest:].tolist(), strict=True):
            completions[row] += answer
            masks[row] += [1] * len(answer)
            if messages := episode.respond(renderer.decode_action(answer)).messages:
                observed = renderer.observe(messages, False)
                completions[row] += observed
                masks[row] += [0] * len(observed)
                going_on.append((row, episode, prompts[row]))
        playing = going_on
    return dict(prompt_ids=prompts, completion_ids=completions, logprobs=None, env_mask=masks)


def compare_trl(trainer: Any) -> dict[str, float]:
    """Return the loss and gradient norm of the compared batch."""
    batch = ComparedBatch.of(trainer.model.config.vocab_size)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(
        trainer.model.train(),
        dict(
            prompt_ids=batch.prompts,
            prompt_mask=torch.ones_like(batch.prompts),
            completion_ids=batch.completions,
            completion_mask=torch.ones_like(batch.completions),
            old_per_token_logps=batch.old_logprobs,
            advantages=batch.advantages,
            num_items_in_batch=torch.tensor(batch.completions.numel()),
        ),
    )
    loss.backward()
    norms = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
    trainer.model.zero_grad()
    return {"loss": float(loss), "grad_norm": float(torch.stack(norms).norm())}


SIDES: dict[str, Callable[[Settings, StepClock], None]] = {"ours": train_ours, "trl": train_trl}

if __name__ == "__main__":
    _, side, settings_file, reply = sys.argv
    known = Settings(**json.loads(Path(settings_file).read_text()))
    torch.set_num_threads(known.threads)
    SIDES[side](known, StepClock(int(reply)))
