"""Worked examples in prompts: where they stand, from which states they come, what they cost, and
that no loss covers them.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from ragen_mega.config import parse
from ragen_mega.config.starpo import StarPOConfig
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments.actions import read_response
from ragen_mega.environments.protocol import Environment, Message
from ragen_mega.environments.registry import make
from ragen_mega.environments.worlds.ways import way
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout.all_ranks import JointCollection
from ragen_mega.rollout.player import PlaySettings
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import (
    TaskSampler,
    episode_maker,
    evaluation_prompts,
    forget_files,
    held_out_states,
    prompt_examples,
)
from ragen_mega.run.check import check
from ragen_mega.warm_start.clone import scripted_texts
from ragen_mega.warm_start.rehearsal import check_play, fit_context
from tests.support.small_policy import tiny_qwen2

STRIPS_THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{{"
    " m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}{{"
    " '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen3's template does with all answers before the last question."""


def config_of(world: str, *flags: str) -> StarPOConfig:
    return parse(["--environments", world, *flags])


def renderer_of(config: StarPOConfig) -> ChatRenderer:
    (name,) = config.environment.shares
    texts = scripted_texts(episode_maker(config.environment, name), range(20), skill=0.0)
    return ChatRenderer(train_tokenizer([*texts, "first second third"]), think=True)


@pytest.mark.parametrize("style", ["full", "system", "brief", "compact"])
@pytest.mark.parametrize("world", ["bandit", "frozen_lake", "sokoban"])
def test_examples_stand_between_the_task_and_the_episode(world: str, style: str) -> None:
    flags = ("--prompt-style", style)
    plain = episode_maker(config_of(world, *flags).environment, world)()
    config = config_of(world, *flags, "--prompt-examples", "3")
    shown = episode_maker(config.environment, world)()
    for seed in (7, 1_000_007):
        without, with_examples = plain.start(seed), shown.start(seed)
        system = [m for m in without if m.role == "system"]
        *examples, own = with_examples[len(system) :]
        assert with_examples[: len(system)] == system
        assert [m.role for m in examples] == ["user", "assistant"] * 3
        task = plain.task if style == "full" else ""
        assert examples[0].content.startswith(task)
        assert task + own.content == without[-1].content
        assert not any(task and m.content.startswith(task) for m in examples[1:])
        for question, answer in zip(examples[::2], examples[1::2], strict=True):
            said = answer.content.removeprefix("<think>")
            read = read_response(world_of(question, world), said, think=True, max_actions=5)
            assert read.is_action_valid and read.thought.endswith(".")
    window = shown.beginning([Message("user", "a later turn")])
    assert [m.role for m in window if m.role != "system"] == ["user", "assistant"] * 3 + ["user"]


def world_of(question: Message, name: str) -> Environment:
    """The bandit's examples pull other arms than the bandit that is played."""
    if name != "bandit":
        return make(name)
    low, high = re.search(r"The arms are (\w+) and (\w+)\.", question.content).groups()
    assert not {low, high} & {"Phoenix", "Dragon"}
    return make(name, low_arm=low, high_arm=high)


def test_examples_come_from_no_state_that_is_evaluated_on() -> None:
    """With as many examples as are likely to meet a board of a small lake that is held out."""
    flags = ("--environment-options", '{"frozen_lake": {"size": 4}}', "--prompt-style", "compact")
    config = config_of("frozen_lake", *flags, "--prompt-examples", "200")
    held_out = held_out_states(config.environment, "frozen_lake")
    drawn = [make("frozen_lake").reset(seed) for seed in range(900_000, 900_200)]
    assert held_out & set(drawn), "the test would not see a board that is left in"
    shown = prompt_examples(config.environment, "frozen_lake")[::2]
    assert len(shown) == 200
    assert not held_out & {message.content.rpartition("\n")[0] for message in shown}
    arms = {arm for name in ("bandit", "bandit_test") for arm in make(name).actions}
    for message in prompt_examples(
        config_of("bandit", "--prompt-examples", "4").environment, "bandit"
    ):
        assert not any(arm in message.content for arm in arms)


def test_an_evaluation_of_another_split_shows_the_same_examples() -> None:
    config = config_of("frozen_lake", "--prompt-examples", "2", "--seed", "3")
    name, world = "frozen_lake", config.environment
    trained, evaluated = (
        episode_maker(world, name, **where)()
        for where in ({"step": 5}, {"options": world.evaluation_options(name)})
    )
    ((seed, board), *_) = evaluation_prompts(world, name, 1)
    assert trained.start(1)[1:5] == evaluated.start(seed, board=board)[1:5]


def test_no_loss_covers_an_example_and_all_prompts_begin_alike() -> None:
    flags = ("--prompt-style", "brief", "--prompt-examples", "2", "--num-groups", "2")
    config = config_of("frozen_lake", *flags, "--group-size", "2", "--max-response-length", "8")
    renderer = renderer_of(config)
    policy = tiny_qwen2(len(renderer.tokenizer))
    engine = EmbeddedEngine(policy.config, max_context=900, max_sessions=4)
    settings = PlaySettings(max_context_length=900, temperature=1.0, seed=0)
    with engine.awake(), JointCollection(engine, renderer, settings) as joint:
        engine.load_weights(policy.state_dict().items())
        tasks = joint.add(TaskSampler(config).sample(0))
        joint.play()
        groups = joint.take(tasks)
    said = prompt_examples(config.environment, "frozen_lake")
    members = [member for group in groups for member in group.trajectories]
    assert len({tuple(member.tokens[:100]) for member in members}) == 1
    for member in members:
        prompt = renderer.tokenizer.decode(member.tokens[: member.turns[0].start])
        assert all(message.content in prompt for message in said)
        assert not any(member.loss_mask[: member.turns[0].start])
        sampled = sum(turn.end - turn.start for turn in member.turns)
        assert sum(member.loss_mask) == sampled == member.num_sampled_tokens


def test_a_template_that_strips_earlier_thoughts_leaves_examples_whole() -> None:
    config = config_of("bandit", "--prompt-examples", "2", "--prompt-style", "brief")
    renderer = renderer_of(config)
    renderer.tokenizer.chat_template = STRIPS_THOUGHTS
    renderer = ChatRenderer(renderer.tokenizer, think=True)
    messages = episode_maker(config.environment, "bandit")().start(0)
    messages.append(Message("user", "ANSWER-OF-THE-ASSISTANT"))  # the renderer's own mark
    blocks = [f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages]
    text = "".join(blocks) + "<|im_start|>assistant\n<think>"
    assert renderer.tokenizer.decode(renderer.start(messages)) == text


def test_limits_that_follow_from_the_world_count_the_examples() -> None:
    flags = ("--prompt-style", "brief", "--max-response-length", "24")
    plain = config_of("frozen_lake", *flags)
    shown = config_of("frozen_lake", *flags, "--prompt-examples", "2")
    renderer = renderer_of(shown)
    examples = prompt_examples(shown.environment, "frozen_lake")
    size = len(renderer.start(examples)) - len(renderer.start([Message("user", "")]))
    assert size > 40
    room = fit_context(plain).rollout.max_context_length
    assert room + size - 64 <= fit_context(shown).rollout.max_context_length
    limit = ("--max-context-length", str(room))
    assert not any(
        "holds" in n for n in check_play(config_of("frozen_lake", *flags, *limit), renderer)
    )
    cut = config_of("frozen_lake", *flags, *limit, "--prompt-examples", "6")
    assert any(f"context {room} holds" in note for note in check_play(cut, renderer))


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return str(path)


def talk(*contents: str, **more: str) -> dict:
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents)]
    return {"messages": messages} | more


def test_a_file_gives_its_first_conversations_of_the_environment(tmp_path: Path) -> None:
    rows = talk("a", "b", environment="sokoban"), talk("c", "d", "e", "f"), talk("g", "h")
    rows[1]["messages"].insert(0, {"role": "system", "content": "not shown twice"})
    rows[1]["messages"][1]["content"] = odd = "c\u2028\u2029\u0085"  # which end lines elsewhere
    first, *others = (json.dumps(row, ensure_ascii=False) for row in rows)
    file = write(tmp_path / "mine.jsonl", "\ufeff" + first, *others)
    flags = ("--prompt-examples-file", file, "--prompt-examples")
    said = prompt_examples(config_of("bandit", *flags, "1").environment, "bandit")
    assert [m.content for m in said] == [odd, "d", "e", "f"]
    said = prompt_examples(config_of("sokoban", *flags, "1").environment, "sokoban")
    assert [m.content for m in said] == ["a", "b"]
    with pytest.raises(ValueError, match=r"prompt_examples \(3\) .* 2 conversations of bandit"):
        prompt_examples(config_of("bandit", *flags, "3").environment, "bandit")


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("{", "line 1 must be a JSON object"),
        ("[1]", "line 1 must be a JSON object"),
        ({}, r"line 1: messages must be a list, not None; must be an object"),
        (talk("only a question"), "line 1: a conversation must .* roles are user"),
        ({"messages": []}, "roles are none"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            r"line 1: messages\[0\].content must be a text, not 3; must be an object",
        ),
        (talk("a", "b", environment="sokoban"), "must hold conversations of bandit"),
        ("", "must hold conversations of bandit"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_before_ranks_start(
    row: object, rule: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "bad.jsonl", row)
    config = config_of("bandit", "--prompt-examples", "1", "--prompt-examples-file", file)
    with pytest.raises(ValueError, match=rule) as error:
        check(config, 1, 1)
    assert "\n" not in str(error.value)
    missing = config_of("bandit", "--prompt-examples", "1", "--prompt-examples-file", f"{file}.no")
    with pytest.raises(ValueError, match="must be a file of conversations"):
        check(missing, 1, 1)


def test_another_run_reads_a_file_that_has_changed(tmp_path: Path) -> None:
    texts = []
    for answer in ("Dragon", "Phoenix"):
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        file = write(tmp_path / "examples.jsonl", {"messages": turns})
        config = config_of("bandit", "--prompt-examples", "1", "--prompt-examples-file", file)
        forget_files()  # as `build` does
        texts.append(prompt_examples(config.environment, "bandit")[-1].content)
    assert texts == ["Dragon", "Phoenix"]


def test_a_file_without_examples_and_a_world_without_a_script_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt_examples_file does nothing without"):
        config_of("bandit", "--prompt-examples-file", "x.jsonl")
    config = config_of("tests.unit.test_prompt_examples:Essay", "--prompt-examples", "1")
    with pytest.raises(ValueError, match="--prompt-examples-file, or drop --prompt-examples"):
        prompt_examples(config.environment, "tests.unit.test_prompt_examples:Essay")


class Essay:
    """Free text, whose right answers nobody can script."""

    def reset(self, seed: int) -> str:
        return "Write an essay on mountains."

    def step(self, text: str) -> tuple:
        return "", 0.0, True, False, {}


@pytest.mark.parametrize("world", ["frozen_lake", "sokoban"])
def test_neighbours_in_words_are_what_the_moves_meet(world: str) -> None:
    options = {"success_rate": 1.0} if world == "frozen_lake" else {}
    seen = set()
    for seed in range(150):
        for action in make(world).actions:
            environment = make(world, observation="words", **options)
            observation, draw = environment.reset(seed), random.Random(seed)
            result = None
            for _ in range(seed % 7):
                if result is None or not result.terminated:
                    result = environment.step(draw.choice(environment.actions))
                    observation = result.observation
            if result is not None and result.terminated:
                continue
            told = dict(re.findall(r"(\w+): ([^.]+)\.", observation))
            before = environment.facts()
            if world == "frozen_lake":
                assert told["Goal"] == way(before["player"], before["goal"])
            else:
                assert told["Box"] == way(before["player"], before["boxes"][0])
                assert told["target"] == way(before["boxes"][0], before["targets"][0])
            result = environment.step(action)
            after = environment.facts()
            has_moved = after["player"] != before["player"]
            met = {
                "the edge": not has_moved,
                "a hole": after["player"] in after.get("holes", ()),
                "the goal": result.info["success"],
                "a wall": not has_moved,
                "a box that is stuck": not has_moved,
                "a box": after.get("boxes") != before.get("boxes"),
                "ice": has_moved and not result.terminated,
                "free": has_moved and after.get("boxes") == before.get("boxes"),
            }
            assert met[told[action]], (seed, action, told)
            seen.add(told[action])
    assert len(seen) == 4, "every kind of cell was met"


def test_ways_in_words() -> None:
    assert way((0, 0), (2, 1)) == "2 down and 1 right"
    assert way((2, 3), (1, 3)) == "1 up"
    assert way((2, 3), (2, 1)) == "2 left"
    assert way((1, 1), (1, 1)) == "here"
