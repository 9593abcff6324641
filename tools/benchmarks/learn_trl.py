"""TRL's GRPOTrainer on a task of ragen_mega, for its curve of success against time and samples.

    .venv-trl/bin/python tools/benchmarks/learn_trl.py --curve curve.jsonl -- FLAGS

It takes the flags of `ragen-mega train` with one turn, such as `--recipe smollm2_reverse`, and with
them model, prompts, rewards, held-out states, objective, learning rate and limit of an answer.
bench_peers.py makes the environment. A line of the curve is an evaluation: {"step", "seconds",
"samples", "success"}, whose seconds leave evaluations and imports out.
"""

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # TRL's environment has no ragen_mega

import torch
from peers import first_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from ragen_mega.commands.command_line import command, flag
from ragen_mega.config import parse
from ragen_mega.environments.episode import is_success
from ragen_mega.rollout.player import Task
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import TaskSampler, evaluation_prompts, evaluation_tasks


class Curve(TrainerCallback):
    """Evaluates every few steps, and leaves the seconds of evaluation out of the clock."""

    def __init__(self, curve: Path, config: Any, renderer: ChatRenderer) -> None:
        world, (self.name,) = config.environment, config.environment.worlds
        self.renderer, self.interval = renderer, config.evaluation.eval_interval
        self.most = world.max_response_length
        prompts = evaluation_prompts(world, self.name, config.evaluation.eval_prompts)
        groups = evaluation_tasks(
            world, self.name, prompts, samples_per_prompt=config.evaluation.eval_samples
        )
        self.tasks = list(itertools.chain(*groups))
        self.curve, self.begun, self.paused = curve, time.perf_counter(), 0.0
        self.per_step = config.rollout.num_groups * config.rollout.group_size

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.evaluate(0, known["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if state.global_step % self.interval == 0 or state.global_step == state.max_steps:
            self.evaluate(state.global_step, known["model"])

    @torch.no_grad()
    def evaluate(self, step: int, model: Any) -> None:
        """Play the held-out tasks at temperature 1 and write a line."""
        begin = time.perf_counter()
        seconds = begin - self.begun - self.paused
        episodes, prompts = zip(*(first_prompt(self.renderer, task) for task in self.tasks))
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.autocast("cpu", torch.bfloat16):
            answers = model.generate(
                input_ids=torch.tensor(padded), attention_mask=torch.tensor(seen),
                max_new_tokens=self.most, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            )[:, longest:]  # fmt: skip
        solved = [
            is_success(episode.respond(self.renderer.decode_action(answer)))
            for episode, answer in zip(episodes, answers.tolist())
        ]
        line = {"step": step, "seconds": round(seconds, 1), "samples": step * self.per_step,
                "success": sum(solved) / len(solved)}  # fmt: skip
        with self.curve.open("a") as file:
            print(json.dumps(line), file=file)
        print(line, flush=True)
        self.paused += time.perf_counter() - begin


@command(
    __doc__,
    flag("--curve", "file that gets a line for each evaluation", Path("curve.jsonl")),
    flag("flags", "of the training", nargs="*"),
)
def main(arguments: argparse.Namespace) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    config, curve = parse(arguments.flags), arguments.curve
    train, rollout = config.train, config.rollout
    tokenizer = AutoTokenizer.from_pretrained(config.model.load, padding_side="left")
    renderer = ChatRenderer(tokenizer, think=config.environment.think)
    sampler = TaskSampler(config)
    groups = list(itertools.chain(*map(sampler.sample, range(train.num_steps))))
    prompts = [tokenizer.decode(first_prompt(renderer, group[0])[1]) for group in groups]
    by_prompt: dict[str, list[Task]] = dict(zip(map(str, prompts), groups))

    def reward(prompts: list[str], completion_ids: list[list[int]], **also: Any) -> list[float]:
        rewards = []
        for prompt, ids in zip(prompts, completion_ids):
            episode, _ = first_prompt(renderer, by_prompt[prompt][0])
            rewards.append(episode.respond(renderer.decode_action(ids)).reward)
        return rewards

    torch.manual_seed(train.seed)
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(str(config.model.load), dtype=torch.float32),
        reward,
        GRPOConfig(
            str(curve.with_suffix("")), use_cpu=True, bf16=True, report_to="none", seed=train.seed,
            per_device_train_batch_size=rollout.num_groups * rollout.group_size,
            num_generations=rollout.group_size,
            max_completion_length=config.environment.max_response_length,
            max_steps=train.num_steps, learning_rate=config.train.lr,
            weight_decay=config.train.weight_decay, lr_scheduler_type="constant",
            max_grad_norm=config.train.clip_grad, loss_type="dr_grpo", scale_rewards="none",
            beta=0.0, epsilon=config.loss.clip_ratio_low, epsilon_high=config.loss.clip_ratio_high,
            temperature=1.0, top_p=1.0, top_k=0, gradient_checkpointing=False,
            save_strategy="no", logging_steps=1, disable_tqdm=True, shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Curve(curve, config, renderer)],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
