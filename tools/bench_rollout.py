"""Sampled tokens per second of the embedded engine against `transformers` generate, called once per
turn.

Both play the same FrozenLake episodes with the same weights and sample the same number of tokens in
every turn: stop tokens are ignored, and the environment is told an empty answer, so that every
trajectory plays all its turns. The baseline is what one would write with transformers alone: all
prompts of a turn left-padded into one batch, with its key-value cache inside the turn; it computes
no log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

from ragen_mega.config import ModelConfig
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.registry import make
from ragen_mega.models.huggingface import load_tokenizer, random_weights, save_huggingface
from ragen_mega.rollout.collector import PlaySettings, Task, collect, tasks_for_group
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.warm_start.tokenizer import train_tokenizer


class DeafRenderer(ChatRenderer):
    """Hands the environment an empty answer and never stops: equal work for any weights."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, think=True)
        self.stop_token_ids = ()

    def decode_action(self, tokens: Sequence[int]) -> str:
        return ""


def write_random_model(directory: Path, tasks: list[Task]) -> None:
    """A model of the default size with random weights, and a tokenizer for what the environment
    says.
    """
    texts = ["system\nuser\nassistant\n"]
    for task in tasks:
        episode = task.make_episode()
        texts += [message.content for message in episode.start(task.seed)]
        while not episode.done:
            message = episode.respond("").message
            texts += [] if message is None else [message.content]
    tokenizer = train_tokenizer(texts)
    shape = ModelConfig()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        tie_word_embeddings=True,
        dtype="float32",
    )
    save_huggingface(
        directory, config, tokenizer, random_weights(config, seed=0).items(), is_writer=True
    )


def make_tasks(arguments: argparse.Namespace) -> list[Task]:
    """Groups of FrozenLake tasks under the chosen prompt style."""
    rules = EpisodeConfig(max_turns=arguments.turns, prompt_style=arguments.prompt_style)
    return [
        task
        for group_id in range(arguments.groups)
        for task in tasks_for_group(
            group_id,
            "frozen_lake",
            seed=1000 + group_id,
            make_episode=lambda: Episode(make("frozen_lake"), rules),
            group_size=arguments.group_size,
        )
    ]


def play_with_generate(
    model: PreTrainedModel, renderer: ChatRenderer, tasks: list[Task], max_tokens: int
) -> int:
    """One rollout with `generate` per turn; the number of sampled tokens."""
    generation = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        use_cache=True,
        pad_token_id=0,
    )
    episodes = [task.make_episode() for task in tasks]
    contexts = [
        renderer.start(episode.start(task.seed, outcome_seed=task.outcome_seed, board=task.board))
        for episode, task in zip(episodes, tasks, strict=True)
    ]
    num_sampled = 0
    while episodes:
        longest = max(map(len, contexts))
        tokens = torch.tensor([[0] * (longest - len(context)) + context for context in contexts])
        mask = torch.tensor(
            [[0] * (longest - len(context)) + [1] * len(context) for context in contexts]
        )
        output: Tensor = model.generate(
            input_ids=tokens, attention_mask=mask, generation_config=generation
        )
        answers = output[:, longest:].tolist()
        num_sampled += sum(map(len, answers))
        going_on = []
        for episode, context, answer in zip(episodes, contexts, answers, strict=True):
            result = episode.respond(renderer.decode_action(answer))
            if result.message is not None:
                going_on.append(
                    (episode, context + answer + renderer.observe(result.message, False))
                )
        episodes, contexts = (
            [episode for episode, _ in going_on],
            [context for _, context in going_on],
        )
    return num_sampled


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, object]:
    """Interleaved repeats of both; medians decide. Tokens per CPU second hold on a machine that
    others use too.
    """
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    renderer = DeafRenderer(load_tokenizer(str(directory)))
    tasks = make_tasks(arguments)
    engine = EmbeddedEngine(
        model.config, max_context=arguments.max_context, max_sessions=len(tasks)
    )
    wall: dict[str, list[float]] = {"embedded": [], "transformers": []}
    cpu: dict[str, list[float]] = {"embedded": [], "transformers": []}
    contexts: list[int] = []

    def timed(name: str, play: Callable[[], int]) -> int:
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        sampled = play()
        wall[name].append(sampled / (time.perf_counter() - wall_start))
        cpu[name].append(sampled / (time.process_time() - cpu_start))
        return sampled

    def play_with_engine() -> int:
        with engine.awake():
            engine.load_weights(model.state_dict().items())
            groups = collect(
                engine,
                renderer,
                tasks,
                PlaySettings(arguments.max_tokens, arguments.max_context, 1.0, repeat),
            )
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        contexts[:] = [len(trajectory) for trajectory in trajectories]
        return sum(trajectory.num_sampled_tokens for trajectory in trajectories)

    for repeat in range(arguments.repeats):
        sampled = timed("embedded", play_with_engine)
        baseline_sampled = timed(
            "transformers", lambda: play_with_generate(model, renderer, tasks, arguments.max_tokens)
        )
        if baseline_sampled != sampled:
            raise ValueError(
                f"both must sample the same number of tokens: {sampled} embedded,"
                f" {baseline_sampled} transformers; raise --max-context ({arguments.max_context}),"
                " a trajectory was cut"
            )
        print(
            f"repeat {repeat}: "
            + "  ".join(f"{name} {rate[-1]:.0f} tokens/s" for name, rate in wall.items())
        )
    medians = {name: statistics.median(values) for name, values in wall.items()}
    cpu_medians = {name: statistics.median(values) for name, values in cpu.items()}
    config = model.config
    return {
        "tokens_per_second": medians,
        "ratio": medians["embedded"] / medians["transformers"],
        "tokens_per_cpu_second": cpu_medians,
        "cpu_ratio": cpu_medians["embedded"] / cpu_medians["transformers"],
        "repeats": wall,
        "trajectories": len(tasks),
        "turns": arguments.turns,
        "sampled_tokens_per_turn": arguments.max_tokens,
        "prompt_style": arguments.prompt_style,
        "trajectory_tokens": {"mean": statistics.fmean(contexts), "max": max(contexts)},
        "threads": arguments.threads,
        "model": {
            "parameters": model.num_parameters(),
            "hidden_size": config.hidden_size,
            "num_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "processor": platform.processor() or platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument(
        "--load",
        type=Path,
        help="Hugging Face checkpoint (default: the default small model, random)",
    )
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=40, help="sampled in every turn")
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--prompt-style", choices=("full", "system", "compact"), default="full")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.load or Path(scratch)
        if arguments.load is None:
            write_random_model(directory, make_tasks(arguments))
        result = measure(arguments, directory)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
