"""A loaded model imitates play before reinforcement learning: which tokens carry the loss, that it
is the cross-entropy of transformers, and that it falls.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from ragen_mega.config import parse
from ragen_mega.config.starpo import StarPOConfig
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Trajectory
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.huggingface import load_config, load_tokenizer, random_weights
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.report.console import Console
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import episode_maker
from ragen_mega.run.build import build
from ragen_mega.storage.model_readers import open_model
from ragen_mega.storage.model_writers import save_huggingface
from ragen_mega.warm_start.clone import scripted_texts
from ragen_mega.warm_start.small_model import recorded_play, scripted_play, warm_start
from tests.support.rounding import exact_logprobs
from tests.support.runs import finish

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging"
    " Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' +"
    " message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of SmolLM2-135M-Instruct."""
FLAGS = """
    --environments frozen_lake --prompt-style brief --max-response-length 48 --max-turns 3
    --max-actions-per-turn 1 --prompt-examples 1 --advantage-estimator grpo
    --max-context-length 1500
    --sft-steps 20 --sft-lr 3e-3 --warm-start-trajectories 24 --warm-start-batch 8
""".split()


def write_model(directory: Path, family: str) -> StarPOConfig:
    config = parse(FLAGS + ["--load", str(directory)])
    make_episode = episode_maker(config.environment, "frozen_lake")
    texts = scripted_texts(make_episode, range(20), skill=0.0)
    tokenizer = train_tokenizer([*texts, "first second third", CHAT_TEMPLATE])
    tokenizer.chat_template = CHAT_TEMPLATE
    sizes = dict(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    hf = LlamaConfig(**sizes) if family == "llama" else Qwen2Config(**sizes)
    weights = random_weights(hf, 0)
    save_huggingface(directory, hf, tokenizer, weights.items(), is_writer=True)
    return config


def answers(trajectory: Trajectory, renderer: ChatRenderer) -> list[str]:
    """The texts of the stretches of tokens under the loss mask."""
    texts, stretch = [], []
    for token, is_sampled in zip(
        [*trajectory.tokens, 0], [*trajectory.loss_mask, False], strict=True
    ):
        if is_sampled:
            stretch.append(token)
        elif stretch:
            texts.append(renderer.tokenizer.decode(stretch))
            stretch = []
    return texts


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_loss_covers_answers_alone_and_falls(family: str, tmp_path: Path) -> None:
    config = write_model(tmp_path / "model", family)
    directory = Path(config.model.load)
    hf, tokenizer = load_config(str(directory)), load_tokenizer(str(directory))
    renderer = ChatRenderer(tokenizer, think=True)
    said = io.StringIO()
    console = Console(is_writer=True, num_steps=1, file=said)
    played = scripted_play(config, renderer, console, 6)
    for trajectory in played:
        whole = tokenizer.decode(trajectory.tokens)
        _, *turns = whole.split("<|im_start|>assistant\n<think>")
        said_by_player = [turn.partition("<|im_end|>")[0] + "<|im_end|>" for turn in turns]
        example, *own = said_by_player
        assert answers(trajectory, renderer) == own, "neither the example nor an observation"
        assert all(" is " in text and text.endswith("</answer><|im_end|>") for text in own)

    model = AutoModelForCausalLM.from_pretrained(directory)
    nats, bounds = [], []
    for trajectory in played:
        exact, bound = exact_logprobs(model, trajectory.tokens, 1.0)
        labels = torch.tensor(trajectory.tokens[1:])
        own = -exact[:-1].gather(-1, labels[:, None])[:, 0]
        nats.append(own[torch.tensor(trajectory.loss_mask[1:])])
        bounds.append(bound)
    groups = initialize(config.parallel, 0)
    policy = MegatronPolicy(hf, groups, config.parallel, config.train, config.loss, temperature=1.0)
    policy.load_weights(open_model(directory))
    loss = policy.clone(pack(played))["loss"]
    assert loss == pytest.approx(float(torch.cat(nats).mean()), abs=max(bounds))

    config = parse([*FLAGS, "--load", str(directory), "--output", str(tmp_path), "--name", "run"])
    start = warm_start(config, hf, groups, renderer, console, directory)
    tuned = MegatronPolicy(hf, groups, config.parallel, config.train, config.loss, temperature=1.0)
    tuned.load_weights(open_model(start.policy))
    assert tuned.clone(pack(played))["loss"] < 0.8 * loss
    assert "20 optimizer steps on 24 trajectories of scripted play; loss" in said.getvalue()


def test_recorded_conversations_are_imitated_in_place_of_scripted_play(tmp_path: Path) -> None:
    config = write_model(tmp_path / "model", "llama")
    thought = "<think> north it is</think><answer> Up</answer>"
    rows = [
        [("system", "You walk."), ("user", "where?"), ("assistant", thought),
         ("user", "and then?"), ("assistant", "no thought")],
        [("user", "once"), ("assistant", thought)],
        [("user", "too long " * 2000), ("assistant", thought)],
    ]  # fmt: skip
    file = tmp_path / "talks.jsonl"
    lines = [{"messages": [{"role": r, "content": c} for r, c in row]} for row in rows]
    file.write_text("\n".join(map(json.dumps, lines)))
    config = parse([*FLAGS, "--load", config.model.load, "--sft-file", str(file)])
    tokenizer = load_tokenizer(config.model.load)
    renderer = ChatRenderer(tokenizer, think=True)
    first, second = recorded_play(config, renderer, str(file))
    end = "<|im_end|>"
    assert answers(first, renderer) == [thought.removeprefix("<think>") + end, "no thought" + end]
    assert answers(second, renderer) == [thought.removeprefix("<think>") + end]
    text = tokenizer.apply_chat_template(lines[0]["messages"], tokenize=False).rstrip("\n")
    # Every turn of the policy begins with a forced <think>, as when it plays.
    text = text.replace("assistant\nno thought", "assistant\n<think>no thought")
    assert tokenizer.decode(first.tokens) == text


def test_a_run_without_steps_is_fine_tuning_and_its_evaluation(tmp_path: Path) -> None:
    config = write_model(tmp_path / "model", "llama")
    few = "--eval-prompts 2 --eval-samples 1 --num-groups 2 --group-size 2 --minibatch-size 4"
    flags = [*FLAGS, *few.split(), "--num-steps", "0", "--load", config.model.load]
    flags += ["--output", str(tmp_path), "--name"]
    run = finish(build(parse([*flags, "run"])))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 0 and "frozen_lake" in summary["sets"]
    read = {
        name: open_model(path)
        for name, path in (
            ("loaded", Path(config.model.load)),
            ("tuned", run / "warm_start"),
            ("exported", run / "huggingface"),
        )
    }
    names = read["loaded"].names()
    assert all(torch.equal(read["tuned"](name), read["exported"](name)) for name in names)
    assert not all(torch.equal(read["loaded"](name), read["tuned"](name)) for name in names)


def test_it_is_off_unless_asked_for_and_needs_a_model(tmp_path: Path) -> None:
    assert not parse(["--load", "somewhere"]).has_warm_start
    with pytest.raises(ValueError, match="sft_steps does nothing without load"):
        parse(["--sft-steps", "3"])
    with pytest.raises(
        ValueError, match="sft_file does nothing with sft_steps 0|without sft_steps"
    ):
        parse(["--load", "somewhere", "--sft-file", "x.jsonl"])
