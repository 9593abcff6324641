"""Flags: every bad one is a ValueError of one line that names the rule; a good configuration
survives its JSON.
"""

import json

import pytest

from ragen_mega.config import StarPOConfig, parse


def test_last_flag_wins_and_json_round_trips() -> None:
    config = parse(
        ["--lr", "1e-4", "--no-think", "--environments", "sokoban:3,frozen_lake", "--lr", "3e-4"]
    )
    assert config.train.lr == 3e-4 and not config.environment.think
    assert config.environment.shares == {"sokoban": 3, "frozen_lake": 1}
    assert StarPOConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("flags", "section", "name", "value"),
    [
        ("--lr 1 --lr=2 --lr 3", "train", "lr", 3.0),
        ("--seed=1 --seed 2 --seed=3", "train", "seed", 3),
        ("--think --no-think", "environment", "think", False),
        ("--no-think --think", "environment", "think", True),
        ("--keep_best --no-keep-best", "checkpoint", "keep_best", False),
        ("--value-clip None --value_clip 0.3", "loss", "value_clip", 0.3),
        ("--value-clip 0.3 --value-clip None", "loss", "value_clip", None),
        (
            "--whiten-advantages True --whiten-advantages None",
            "advantage",
            "whiten_advantages",
            None,
        ),
        ("--recompute full --recompute selective", "parallel", "recompute", "selective"),
        ("--name a --name None --name c", "logging", "name", "c"),
        ("--environments sokoban --environments bandit", "environment", "environments", "bandit"),
        ('--curriculum {} --curriculum {"0":{}}', "environment", "curriculum", '{"0":{}}'),
        ("--format-penalty 1 --format-penalty -2.5", "environment", "format_penalty", -2.5),
    ],
)
def test_of_a_repeated_flag_of_any_kind_the_last_wins(flags, section, name, value) -> None:
    assert getattr(getattr(parse(flags.split()), section), name) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lrr 1", "did you mean --lr"),
        ("--clip-grad x", "--clip-grad"),
        ("stray", "stray"),
        ("--sequence-parallel", "does nothing at tensor_model_parallel_size 1"),
        ("--fp8-recipe blockwise", "fp8_recipe blockwise does nothing with fp8 none"),
        ("--fp8 hybrid --bf16 --transformer-impl local", "needs Transformer Engine's layers"),
        ("--fp8 e4m3", "fp8 e4m3 works beside bfloat16 parameters; add --bf16"),
        ("--transformer-impl transformer_engine", "no fused attention in float32; add --bf16"),
        ("--environments lake", "unknown environment 'lake'"),
        ("--environments sokoban:0", "positive shares"),
        ("--environments sokoban:3,frozen_lake:2", "multiple of the sum of environment shares"),
        ("--environment-options {", "JSON object"),
        ('--environment-options {"sokoban":{}}', "not trained"),
        ('--environment-options {"frozen_lake":{"depth":3}}', "depth"),
        ("--filter-strategy none --filter-value 0.5", "does nothing with filter_strategy none"),
        ("--filter-strategy top_k", "needs its value"),
        ("--turn-gamma 0.9", "turn_gamma does nothing with advantage_estimator gae"),
        ("--advantage-estimator bilevel_gae", "--reward-placement turn"),
        (
            "--advantage-estimator grpo --reward-placement turn",
            "reward_placement turn does nothing",
        ),
        ("--advantage-estimator grpo --critic-warmup 3", "has no critic"),
        (
            "--advantage-estimator grpo --kl-in-reward k1 --kl-reward-coef 0.1",
            "per-token KL reward does nothing",
        ),
        ("--kl-coef 0.1", "need each other"),
        ("--kl-in-reward k1", "need each other"),
        ("--group-size 1 --filter-strategy none --advantage-estimator grpo", "group_size is 1"),
        ("--group-size 1", "raise --group-size"),
        ("--temperature 0", "must be positive"),
        ("--num-steps 0", "at least 1"),
        ("--sglang-python x/python", "does nothing with rollout_engine embedded"),
        ("--rollout-fp8", "rollout_fp8 does nothing with rollout_engine embedded"),
        ("--weight-transfer ipc", "weight_transfer does nothing with rollout_engine embedded"),
        (
            "--rollout-tensor-parallel-size 2",
            "rollout_tensor_parallel_size does nothing with rollout_engine embedded",
        ),
        ("--rollout-tensor-parallel-size 0 --rollout-engine sglang", "must be at least 1"),
        ("--lr nan", "finite number"),
        ("--warm-start-temperature 0", "must be positive"),
        ("--warm-start-skill 1.5", "a probability"),
        ("--reward-normalization-scope batch", "does nothing with identity"),
    ],
)
def test_bad_flags_are_one_line(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(flags.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("rank", "is_printed"), [(None, True), ("0", True), ("1", False)])
def test_help_comes_from_one_rank_and_names_the_recipes(
    rank, is_printed, monkeypatch, capsys
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert not caught.value.code
    printed = capsys.readouterr().out
    assert ("--recipe NAME" in printed) == ("--num-groups" in printed) == is_printed


def test_world_size_must_fit() -> None:
    config = parse(["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"])
    config.parallel.check_world(8)
    with pytest.raises(ValueError, match=r"must divide the world size \(6\)"):
        config.parallel.check_world(6)


def test_engines_have_their_ranks_on_one_node() -> None:
    rollout = parse(["--rollout-engine", "sglang", "--rollout-tensor-parallel-size", "4"]).rollout
    assert rollout.num_engines(16, 8) == 4
    for world_size, ranks_per_node in ((16, 2), (6, 6), (2, 2)):
        with pytest.raises(
            ValueError, match=r"rollout_tensor_parallel_size \(4\) must divide the ranks of a node"
        ):
            rollout.num_engines(world_size, ranks_per_node)
