"""Flags: every bad one is a ValueError of one line that names the rule; a good configuration
survives its JSON.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from ragen_mega.config import FilterConfig, StarPOConfig, parse
from ragen_mega.run.check import check, flags_without_effect
from ragen_mega.system.addresses import check_addresses


class Patient:
    """Declares its own limits, and is not built where flags are read."""

    actions = ("go",)
    max_turns = 9
    max_response_length: int

    def __init__(self):
        raise AssertionError("an environment was built")

    def reset(self, seed):
        return "Go."

    def step(self, action):
        return "", 0.0, True, False, {}


APART = "--placement separate --rollout-ranks 1 --max-staleness 1 --importance-cap 2"
ADAPTED = "--lora-rank 8 --load m/m"
TAUGHT = "--teacher-prompt-examples 4 --reward environment+0.1*teacher"
AGENT = "--agent my:run --agent-example my:example"
GSPO = "--policy-loss gspo --loss-aggregation seq-mean-token-mean --advantage-estimator grpo"


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
        ("--scores m:f", r"did you mean --score\?"),
        ("--loss-type dapo", "--policy-loss or --loss-aggregation"),
        ("actor.optim.lr=1", "flags begin with --.*coming_from.md"),
        ("--clip-grad x", "--clip-grad"),
        ("stray", "unexpected 'stray': flags begin with --"),
        (
            "--keep-rollouts all",
            r"--keep-rollouts must be a whole number or None, not 'all' \(.*0: all",
        ),
        ("--num-steps 1e3", "--num-steps must be a whole number, not '1e3'"),
        (
            "--kl-kind k1 --kl-coef 0.2",
            "kl_kind k1 must not be a loss term: .* kl_coef 0.2 .* --kl-kind k2, .* --kl-in-reward"
            " k1 --kl-reward-coef 0.2",
        ),
        ("--kl-kind k4", r"--kl-kind must be none, k1, k2 or k3, not 'k4'"),
        ("--whiten-advantages yes", "must be True, False or None, not 'yes'"),
        ("--bf16=yes", "--bf16 takes no value, not 'yes'"),
        ("--adam-beta2 1", "adam_beta2 must be at least 0, below 1, not 1"),
        ("--lr", "--lr needs a value"),
        ("--lr --bf16", "--lr needs a value"),
        ("--recipe sokobn", "did you mean sokoban"),
        ("--advantage-estimator PPO", r"did you mean gae\?"),
        ("--sequence-parallel", "sequence_parallel does nothing with tensor_model_parallel_size 1"),
        ("--fp8-recipe blockwise", "fp8_recipe does nothing with fp8 none"),
        ("--fp8 hybrid --bf16 --transformer-impl local", "needs Transformer Engine's layers"),
        ("--fp8 e4m3", "fp8 e4m3 works beside bfloat16 parameters; add --bf16"),
        ("--transformer-impl transformer_engine", "no fused attention in float32; add --bf16"),
        ("--environments sokoban:0", "positive shares"),
        ("--environments sokoban:3,frozen_lake:2", "multiple of the sum of environment shares"),
        ("--environment-options {", "JSON object"),
        ('--environment-options {"sokoban":{}}', "not trained"),
        ("--filter-strategy none --filter-value 0.5", "does nothing with filter_strategy none"),
        ("--filter-start 0.5", "filter_start 0.5 does nothing with filter_strategy top_fraction"),
        ("--loss-mask legacy --old-logprobs engine", "no engine sampled"),
        ("--guard-lr 0.3", "guard_lr does nothing with guard off"),
        ("--guard warn --guard-rollbacks 2", "guard_rollbacks does nothing with guard warn"),
        ("--guard react --save-interval 0", "save_interval 0 writes none"),
        ("--guard react --num-steps 10", "save_interval 10 writes none on the way in num_steps 10"),
        (
            "--guard react --group-size 1 --filter-strategy none",
            "guard_filter ranks groups by the spread of their returns",
        ),
        (
            "--guard react --filter-strategy none --reward teacher --advantage-estimator none"
            " --teacher-load a/b",
            "reward teacher alone gives none; set --guard-filter 1",
        ),
        ("--filter-strategy top_k", "needs its value"),
        ("--turn-gamma 0.9", "turn_gamma does nothing with advantage_estimator gae"),
        (
            "--advantage-estimator grpo --gamma 0.9",
            "gamma does nothing with .* grpo; drop it or set --advantage-estimator gae",
        ),
        (
            "--advantage-estimator reinforce_plus_plus --lam 0.9",
            "lam does nothing with advantage_estimator reinforce_plus_plus",
        ),
        *(
            (
                f"--advantage-estimator {given}",
                f"{said} does nothing .* so that it cancels; drop --",
            )
            for given, said in (
                ("grpo --reward-normalization mean", "reward_normalization mean"),
                ("grpo --reward-normalization mean_std", "reward_normalization mean_std"),
                ("dr_grpo --reward-normalization mean", "reward_normalization mean"),
                ("rloo --reward-normalization mean", "reward_normalization mean"),
                ("reinforce_plus_plus --whiten-advantages True", "whiten_advantages True"),
                ("reinforce_plus_plus --whiten-advantages False", "whiten_advantages False"),
            )
        ),
        ("--advantage-estimator bilevel_gae", "--reward-placement turn"),
        (
            "--advantage-estimator grpo --reward-placement turn",
            "reward_placement turn does nothing",
        ),
        ("--advantage-estimator grpo --critic-warmup 3", "has no critic"),
        (
            "--critic-warmup 20 --num-steps 20",
            r"critic_warmup \(20\) must be below num_steps \(20\), or the policy is never trained",
        ),
        (
            "--advantage-estimator grpo --kl-in-reward k1 --kl-reward-coef 0.1",
            "per-token KL reward does nothing",
        ),
        *(
            (f"--reward teacher --advantage-estimator none --filter-strategy none {flags}", said)
            for flags, said in (
                ("--kl-in-reward k1 --kl-reward-coef 0.1", "kl_in_reward k1 does nothing with"),
                ("--reward-placement turn", "reward_placement turn does nothing with"),
                ("--reward-normalization mean", "reward_normalization mean does nothing with"),
                ("--whiten-advantages True", "whiten_advantages True does nothing with"),
                (
                    "--soft-reweighting --teacher-load a/b",
                    "advantage_estimator none has none; drop --soft-reweighting",
                ),
            )
        ),
        (
            "--recipe frozen_lake --reward environment+0.1*group_relative",
            "without the group or the judge of group_relative; drop one",
        ),
        (
            f"{AGENT} --reward environment+0.1*teacher --teacher-prompt-examples 0",
            "writes its own prompts; drop --teacher-prompt-examples",
        ),
        ("--curriculum-success 0 --placement separate --rollout-ranks 1", "drop one of them"),
        ("--weight-senders 2", "weight_senders does nothing with placement colocated"),
        (
            "--placement separate --rollout-ranks 1 --weight-senders 2",
            "embedded engine takes weights from the first rank that trains",
        ),
        ("--kl-coef 0.1", "need each other"),
        ("--kl-in-reward k1", "need each other"),
        ("--group-size 1 --filter-strategy none --advantage-estimator grpo", "group_size is 1"),
        ("--group-size 1", "raise --group-size"),
        ("--group-size 1 --filter-strategy none --soft-reweighting", "drop --soft-reweighting"),
        (
            "--group-size 1 --filter-strategy none --reward-normalization mean",
            "compares the trajectories of a group, which are one",
        ),
        (
            "--group-size 1 --filter-strategy none --reward-normalization mean_std --num-groups 4"
            " --reward-normalization-scope environment --environments frozen_lake:3,sokoban",
            "compares the trajectories of an environment, which are one",
        ),
        ("--temperature 0", "must be positive"),
        ("--num-steps -1", "at least 0"),
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
        (
            "--reward-normalization-scope batch",
            "reward_normalization_scope does nothing with reward_normalization",
        ),
        ("--policy-loss gspo", "set --loss-aggregation seq-mean-token-mean"),
        (f"{GSPO} --advantage-estimator gae", "gae gives each token its own; set --advantage-est"),
        (f"{GSPO} --context-window 2", "need it whole; drop --context-window"),
        (f"{AGENT} --loss-mask legacy", "agent:my:run may have answers there.* drop --loss-mask"),
        (
            f"{AGENT} --importance-cap 2 --importance-level sequence",
            "agent:my:run may branch; drop them",
        ),
        (f"{AGENT} --context-window 2", "agent:my:run writes its own prompts; drop --context-w"),
        ("--agent-timeout 9", "does nothing without an agent; drop --agent-timeout"),
        ("--policy-loss cispo --dual-clip 3", "policy_loss is cispo; drop --dual-clip"),
        ("--clip-ratio-low 1", "which only policy_loss cispo does"),
        ("--importance-mode mask", "importance_mode does nothing without importance_cap"),
        ("--importance-cap 2 --importance-floor 0.5", "needs importance_mode mask"),
        (
            "--importance-mode mask --importance-floor 0.5",
            "does nothing without importance_cap; .* --importance-cap 2",
        ),
        (
            "--importance-cap 2 --importance-mode mask --importance-floor 2",
            r"importance_floor \(2.0\) must be below importance_cap \(2.0\)",
        ),
        ("--max-sampling-rounds 3 --filter-strategy none", "known number of groups, none of them"),
        ("--max-sampling-rounds 3 --filter-keep-zero", "top_fraction with filter_keep_zero; set"),
        (
            "--max-sampling-rounds 3 --filter-strategy percentile_range --filter-start 0.5"
            " --filter-value 1",
            "keeps the groups that vary most, and filter_start 0.5 passes over them",
        ),
        ("--max-sampling-rounds 0", "at least 1"),
        ("--bf16 --fp8 hybrid --shared-prefixes on", "drop --shared-prefixes or --fp8"),
        (
            "--loss-mask legacy --advantage-estimator bilevel_gae --reward-placement turn",
            "bilevel_gae works on sampled turns, .* drop --loss-mask",
        ),
        ("--stop-at-success 0.9 --eval-interval 0", "drop it or set --eval-interval"),
        *(
            (f"{flag} --num-steps 20", "eval_interval 20 leaves none in num_steps 20; drop it or")
            for flag in ("--stop-at-success 0.9", "--keep-best")
        ),
        ("--warm-start-critic-lr 1", "warm_start_critic_lr does nothing without warm_start_critic"),
        (f"{AGENT} --format-penalty -1", "agent:my:run, which judges its answers itself; drop --f"),
        (
            "--agent http://here/run --load m/m --environment-processes 2",
            "agent:http://here/run, which runs elsewhere; drop --environment-processes",
        ),
        *(
            (f"{flags} --reward environment+0.1*{term}", f"reward {term} is always 0, for {why}")
            for flags, term, why in (
                (AGENT, "grounded_thought", "thoughts of agents"),
                (AGENT, "action_effectiveness", "agents have no actions"),
                ("--no-think", "grounded_thought", "without --think there are no thoughts"),
            )
        ),
        (
            '--eval-environments sokoban --curriculum {"0":{"sokoban":{}}}',
            "curriculum names sokoban, which is not trained",
        ),
        (
            "--routing-replay policy --old-logprobs engine",
            "old_logprobs engine may do without it; set --old-logprobs recompute",
        ),
        (
            f"{APART} --curriculum-success 0.8 --max-staleness 0",
            "which placement separate samples ahead of; drop one",
        ),
        (f"{APART} --carry-over 0.2", "at max_staleness 1; set --max-staleness 2"),
        ("--offload turns --advantage-estimator grpo", "has no critic; set --offload rollout"),
        (
            "--advantage-estimator grpo --load m/m --critic-load m/n",
            "critic_load does nothing: advantage_estimator grpo has no critic; drop it",
        ),
        (
            "--warm-start-critic-steps 9 --reward-normalization mean",
            "without the group or the judge of reward_normalization mean; drop one",
        ),
        (f"{ADAPTED} --critic-load m/n", r"\(m/n\) is another than load \(m/m\); drop"),
        (f"{ADAPTED} --warm-start-critic-steps 9", "another one for the critic; drop it"),
        (
            f"{ADAPTED} --lora-sync adapter --lora-targets mlp --rollout-engine sglang",
            "set --lora-targets attention,mlp, or drop --lora-sync",
        ),
        ("--reward environment+0.1*teacher", "set --teacher-load MODEL, --teacher-prompt-exampl"),
        (
            f"{TAUGHT} --loss-mask legacy",
            "which policy_loss gspo and loss_mask legacy have no place for",
        ),
        (
            f"{TAUGHT} --context-window 2",
            "context_window 2 writes prompts anew .* drop --context-window",
        ),
        (
            "--teacher-prompt-examples 4 --reward teacher --advantage-estimator none",
            "reward teacher leaves none; set --filter-strategy none",
        ),
        (
            "--reward-placement turn --reward-normalization mean",
            "acts on whole returns; drop it or --reward-placement turn",
        ),
        (
            "--importance-cap 2 --old-logprobs engine",
            "importance_cap compares .* drop --importance-cap or --old-logprobs",
        ),
        ("--num-query-groups 3", r"num_attention_heads \(4\) must be a multiple"),
        ("--num-experts 8 --ffn-hidden-size 129", r"must divide ffn_hidden_size \(129\)"),
        ("--num-experts 4 --experts-per-token 8", r"\(8\) must be at most num_experts \(4\)"),
        (
            "--lora-rank 8 --warm-start-critic-steps 9 --load a/b",
            "warm_start_critic_steps makes another one for the critic; drop it",
        ),
        ('--curriculum {"soon":{}}', "'soon' is no step"),
        (
            "--environments sokoban --eval-environments sokoban",
            "eval_environments must be distinct and not among sokoban",
        ),
    ],
)
def test_bad_flags_are_one_line(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(flags.split())
    assert "\n" not in str(caught.value)


WARMED = "--load m/m --sft-steps 9"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--load m/m --warm-start-steps 9 --warm-start-critic-steps 9",
            "--warm-start-steps, --warm-start-critic-steps do nothing: --load without --sft-steps",
        ),
        (f"{WARMED} --warm-start-lr 1 --warm-start-batch 4", "--warm-start-lr does nothing"),
        (f"{WARMED} --sft-file f --warm-start-skill 1", "--warm-start-skill does nothing"),
        ("--warm-start-from r --warm-start-seed 9", "--warm-start-seed does nothing: .* of r"),
        (
            "--critic-load m/n --warm-start-critic-steps 9",
            "--warm-start-critic-steps does nothing: the critic is that of --critic-load",
        ),
        (
            "--recipe frozen_lake --advantage-estimator grpo --value-clip 0.2",
            "--value-clip, --critic-lr, --warm-start-critic-steps do nothing: .* no critic",
        ),
        (
            "--filter-strategy none --minibatch-size 128 --clip-ratio-low 0.1 --dual-clip 3",
            "--clip-ratio-low, --dual-clip do nothing: a step is one update",
        ),
        (f"{AGENT} --max-actions 3 --system-prompt a", "--max-actions, --system-prompt do nothing"),
        ('--curriculum {"0":{},"200":{}}', "--curriculum does nothing from step 200 on"),
        (f"{WARMED} --warm-start-critic-steps 9 --warm-start-batch 4", None),
        ("--warm-start-from r --warm-start-critic-steps 9", None),
        ("--warm-start-critic-steps 9 --warm-start-critic-lr 1 --critic-lr 1", None),
        ("--filter-strategy none --minibatch-size 64 --clip-ratio-low 0.1", None),
        ("--filter-strategy none --minibatch-size 128 --value-clip None", None),
        ("--advantage-estimator grpo --value-clip None", None),
        (f"{AGENT} --eval-environments bandit --max-actions 3", None),
    ],
)
def test_what_a_recipe_may_have_set_is_said_to_do_nothing(flags: str, said: str | None) -> None:
    config = parse(flags.split())
    notes = flags_without_effect(config)
    assert len(notes) == (said is not None)
    assert all(re.match(f"note: {said}", note) for note in notes)
    assert not (config.model.critic_load and config.warm_starts_critic)


@pytest.mark.parametrize(
    "part",
    ["host/?token=hidden", "host/#access_token=hidden", "host/a?b=1&key=hidden#c"]
    + ["me:hidden@host/v1", "me:hid#hidden@host/v1", "me:hid?hidden@host/v1"],
)
def test_addresses_hold_credentials_before_the_path_and_in_parameters(part: str) -> None:
    with pytest.raises(ValueError, match="must hold no name, password or key") as caught:
        check_addresses(f"see http://{part}")
    assert "hidden" not in str(caught.value)
    for harmless in ("http://host?mail=me@here", "http://host#me@here", "http://[me", "http://h/@"):
        check_addresses(harmless)
    check_addresses("http://host:80?mail=me@here")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--environments lake", "unknown environment 'lake'"),
        ("--eval-environments lake", "unknown environment 'lake'"),
        ("--environments Taxi-v4", r"did you mean gymnasium:Taxi-v4\?"),
        ("--environments gym:Taxi-v4", r"did you mean gymnasium:Taxi-v4\?"),
        ("--environments my_world.Desk", r"'my_world.Desk' \(did you mean my_world:Desk\?\)"),
        ("--environments sokoban,bandit:x", "bandit is a name itself, .* whole number"),
        ('--environment-options {"frozen_lake":{"depth":3}}', "depth"),
        ('--curriculum {"4":{"frozen_lake":{"depth":3}}}', "depth"),
        ("--routing-replay engine", "routing_replay engine .* a qwen2 model has none"),
    ],
)
def test_environments_are_built_by_the_check_before_a_run_and_not_by_parsing(
    flags: str, message: str
) -> None:
    config = parse(flags.split())
    with pytest.raises(ValueError, match=message) as caught:
        check(config, 1, 1)
    assert "\n" not in str(caught.value)


class Unbuildable(Patient):
    """An environment that must not be built."""

    def __init__(self) -> None:
        raise AssertionError("flags are only parsed")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--recipe bandit", r"a list of words, not '--recipe bandit'; write it with \.split\(\)"),
        (["--lr", 1e-3], r'words of text, as a command line has them, not 0\.001; write "0\.001"'),
    ],
)
def test_what_python_gives_to_parse_is_words(words, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(words)


def test_parsing_builds_no_environment() -> None:
    name = f"{__name__}:Unbuildable"
    options = json.dumps({name: {}})
    curriculum = json.dumps({"3": {name: {}}})
    flags = ["--environments", name, "--environment-options", options, "--curriculum", curriculum]
    config = parse(flags)
    with pytest.raises(ValueError, match="flags are only parsed"):
        check(config, 1, 1)


def show_help(capsys: pytest.CaptureFixture[str], *flags: str, recipe: str = "none") -> str:
    with pytest.raises(SystemExit) as caught:
        parse([*flags, "--help"], recipe=recipe)
    assert not caught.value.code
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("rank", "is_printed"), [(None, True), ("0", True), ("1", False)])
def test_help_comes_from_one_rank_and_names_the_recipes(
    rank: str | None, is_printed: bool, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    printed = show_help(capsys)
    assert ("--recipe NAME" in printed) == ("echo_trap" in printed) == is_printed


def test_help_has_every_flag_with_its_default_and_that_of_the_recipe(capsys) -> None:
    bare = StarPOConfig().to_dict()
    for flags, recipe in ((), "frozen_lake"), (("--recipe", "sokoban"), "sokoban"):
        printed = show_help(capsys, *flags, recipe="frozen_lake")
        chosen = parse([], recipe=recipe).to_dict()
        for section, values in bare.items():
            for name in values.keys() - {"recipe"}:
                flag = name.replace("_", "-")
                found = re.search(rf" --{flag}[ ,].*?\[default (.*?)\](?: |$)", printed)
                words = [
                    str(value).replace("True", "on").replace("False", "off")
                    for value in (values[name], chosen[section][name])
                ]
                default, *other = found[1].split(f"; {recipe}: ")
                assert default == words[0] or (words[0] == "None" and default == "as said")
                assert other == words[1:] * (words[0] != words[1])


def test_another_estimator_takes_the_recipes_one_away_with_its_options() -> None:
    own = parse([], recipe="frozen_lake").advantage
    assert own.advantage_estimator == "bilevel_gae" and own.turn_lam < 1
    for flag in (["--advantage-estimator", "grpo"], ["--advantage-estimator=gae"]):
        other = parse(flag, recipe="frozen_lake").advantage
        assert other.advantage_estimator in flag[-1]
        assert other.turn_lam is other.turn_gamma is None
        assert other.reward_placement == "trajectory"
    same = parse(["--advantage-estimator", "bilevel_gae"], recipe="frozen_lake").advantage
    assert same == own
    discounted = ["--recipe", "smollm2_frozen_lake", "--advantage-estimator"]
    assert parse([*discounted, "grpo"]).advantage.gamma == 1.0
    assert parse([*discounted, "reinforce_plus_plus"]).advantage.gamma == 0.96
    with pytest.raises(ValueError, match="turn_lam does nothing with advantage_estimator gae"):
        parse(["--advantage-estimator", "gae", "--turn-lam", "0.5"], recipe="frozen_lake")


def test_another_filter_takes_the_recipes_one_away_with_its_value() -> None:
    own = parse([], recipe="frozen_lake").filter
    assert own.filter_value == 1.0 and own.filter_keep_zero
    for flags in (["--filter-strategy", "none"], ["--filter_strategy", "none"]):
        off = parse(flags, recipe="frozen_lake").filter
        assert off == FilterConfig(filter_strategy="none")
    most = parse(["--filter-strategy=top_k", "--filter-value", "4"], recipe="frozen_lake").filter
    assert most == FilterConfig(filter_strategy="top_k", filter_value=4)
    assert parse(["--filter-strategy", own.filter_strategy], recipe="frozen_lake").filter == own
    with pytest.raises(ValueError, match="filter_value 0.5 does nothing"):
        parse(["--filter-strategy", "none", "--filter-value", "0.5"], recipe="frozen_lake")


@pytest.mark.parametrize("others", ["--load models/mine", "--environments sokoban"])
def test_a_recipe_that_is_named_holds_beside_what_the_default_gives_way_to(others: str) -> None:
    config = parse(["--recipe", "frozen_lake", *others.split()], recipe="frozen_lake")
    named = parse(["--recipe", "frozen_lake"])
    assert config.logging.recipe == "frozen_lake" and config.filter == named.filter
    assert config.train == named.train != parse(others.split(), recipe="frozen_lake").train


@pytest.mark.parametrize("form", ["--environment-options '{}'", "--environment_options='{}'"])
def test_options_of_a_file_are_those_of_the_environments_that_are_played(
    tmp_path: Path, form: str
) -> None:
    options = {"sokoban": {"num_boxes": 1}, "bandit": {}}
    file = tmp_path / "my.flags"
    file.write_text(
        f"--environments sokoban:1,bandit:1 {form.replace('{}', json.dumps(options))}"
        f""" --curriculum='{{"2": {{"sokoban": {{"num_boxes": 2}}}}}}'"""
    )
    config = parse(["--recipe", str(file), "--environments=bandit"])
    assert config.environment.environments == "bandit"
    assert config.environment.environment_options == '{"bandit": {}}'
    assert config.environment.curriculum == '{"2": {}}'


def test_options_of_environments_that_are_evaluated_stay_and_their_curriculum_goes(
    tmp_path: Path,
) -> None:
    options = {"sokoban": {"num_boxes": 1}, "bandit": {}}
    (tmp_path / "my.flags").write_text(
        f"--environments sokoban --environment-options '{json.dumps(options)}'"
        """ --curriculum '{"2": {"sokoban": {"num_boxes": 2}}}'"""
    )
    words = ["--environments=bandit", "--eval-environments", "frozen_lake, sokoban"]
    config = parse(["--recipe", str(tmp_path / "my.flags"), *words]).environment
    assert config.environment_options == json.dumps(options) and config.curriculum == '{"2": {}}'


def test_a_file_that_names_no_choice_keeps_what_belongs_to_one(tmp_path: Path) -> None:
    (tmp_path / "my.flags").write_text("--max-turns 4 --turn-gamma 0.5 --filter-value 4")
    words = ["--recipe", str(tmp_path / "my.flags"), "--environments", f"{__name__}:Patient"]
    words += "--advantage-estimator bilevel_gae --reward-placement turn".split()
    config = parse([*words, "--filter-strategy", "top_k"])
    assert config.environment.max_turns == 4, "not the 9 that the environment declares"
    assert (config.advantage.turn_gamma, config.filter.filter_value) == (0.5, 4)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("environment-options", "{bandit}"),
        ("environment-options", "[3]"),
        ("curriculum", "{bandit}"),
        ("curriculum", '{"2": 3}'),
    ],
)
def test_malformed_options_of_a_file_are_named(tmp_path: Path, flag: str, text: str) -> None:
    file = tmp_path / "my.flags"
    file.write_text(f"--environments sokoban --{flag} '{text}'")
    with pytest.raises(ValueError, match=rf"{flag.replace('-', '_')} must .*; write "):
        parse(["--recipe", str(file), "--environments=bandit"])


def test_an_environments_own_limits_win_over_a_recipe_that_is_about_another(tmp_path: Path) -> None:
    name = f"{__name__}:Patient"
    config = parse(["--environments", f"{name}:2"], recipe="bandit")
    assert config.environment.max_turns is None and config.environment.max_response_length is None
    assert config.environment.max_actions is None, "one action would end it in its first turn"
    assert config.rollout.max_context_length == 128, "which it does not declare"
    given = parse(["--max-turns", "4", "--environments", name], recipe="bandit")
    assert given.environment.max_turns == 4
    own = parse([], recipe="bandit")
    same = parse(["--environments", "bandit"], recipe="bandit")
    other = parse(["--environments", "bandit_test"], recipe="bandit")
    for one in (own, same, other):
        assert (one.environment.max_turns, one.environment.max_response_length) == (1, 32)
    for limit in ("--max-turns=3", "--max_turns 3"):  # of a file that a user wrote
        (tmp_path / "my.flags").write_text(f"--environments bandit {limit}")
        config = parse(["--recipe", str(tmp_path / "my.flags"), "--environments", name])
        assert config.environment.max_turns is None
    with pytest.raises(ValueError, match="no option size"):
        options = json.dumps({name: {"size": 3}})
        config = parse(["--environments", name, "--environment-options", options], recipe="bandit")
        check(config, 1, 1)


def test_a_missing_wandb_is_an_error_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = parse(["--wandb-project", "starpo", "--output", str(tmp_path / "runs")])
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ModuleNotFoundError
    with pytest.raises(ValueError, match="pip install wandb .*--wandb-project"):
        check(config, 1, 1)
    assert not (tmp_path / "runs").exists()


RECORDED = """
    --recipe sokoban --no-think --num-steps 7 --format-penalty -1e-3 --value-clip None --lr 3e-5
    --reward -0.5*format+environment --whiten-advantages False --overwrite
""".split()


def record(run: Path, *flags: str) -> StarPOConfig:
    """A run directory as a start leaves it."""
    config = parse([*flags, "--output", str(run.parent), "--name", run.name], recipe="bandit")
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(config.to_dict() | {"provenance": []}))
    return config


def test_a_run_that_is_named_goes_on_under_its_own_flags(tmp_path: Path) -> None:
    for number, flags in enumerate((RECORDED, [], ["--recipe", "none"])):
        run = tmp_path / "elsewhere" / str(number)
        first = record(tmp_path / "runs" / str(number), *flags)
        run.parent.mkdir(exist_ok=True)
        (tmp_path / "runs" / str(number)).rename(run)
        again = parse(["--num-groups", "64", "--resume", str(run)], recipe="frozen_lake")
        assert again.run_directory == run and again.checkpoint.resume
        assert again.logging.recipe == first.logging.recipe and again.rollout.num_groups == 64
        for section, values in first.to_dict().items():
            for name, value in values.items():
                if name not in ("num_groups", "output", "resume", "overwrite"):
                    assert again.to_dict()[section][name] == value, name
    other = parse(["--resume", str(run), "--advantage-estimator", "grpo"])
    assert other.advantage.advantage_estimator == "grpo"


def test_the_fitted_context_of_a_run_is_kept_unless_it_is_not_to_be_fitted(tmp_path: Path) -> None:
    run = tmp_path / "a"
    words = "--recipe own --environments frozen_lake --max-context-length 700".split()
    record(run, *words)
    asked = ["--resume", str(run), "--max-context-length"]
    with pytest.raises(
        ValueError, match="900 does nothing: fit_context keeps the 700 .* add --no-"
    ):
        parse([*asked, "900"])
    assert parse([*asked, "900", "--no-fit-context"]).rollout.max_context_length == 900
    assert parse([*asked, "700"]).rollout.fit_context


def test_another_environment_leaves_the_limits_of_a_run_that_recorded_the_default(
    tmp_path: Path,
) -> None:
    record(tmp_path / "a", "--recipe", "none", "--max-turns", "4", "--filter-value", "0.5")
    words = ["--resume", str(tmp_path / "a"), "--environments", f"{__name__}:Patient"]
    config = parse([*words, "--filter-strategy", "none"])
    assert config.environment.max_turns is None and config.filter.filter_value is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--recipe bandit", "says which run goes on, .*; drop --recipe, or"),
        ("--name b --output c", "drop --name, --output, or"),
        ("--overwrite", "drop --resume or --overwrite"),
        ("--lrr 1", "unknown flag --lrr"),
    ],
)
def test_what_a_named_run_does_not_go_with(tmp_path: Path, flags: str, said: str) -> None:
    record(tmp_path / "a")
    with pytest.raises(ValueError, match=said):
        parse([*flags.split(), "--resume", str(tmp_path / "a")])


def test_a_named_run_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="b does not exist; give a run directory"):
        parse(["--resume", str(tmp_path / "b"), "--lr", "1"])
    assert parse(["--resume", "--lr", "1"]).checkpoint.resume, "the default name's, as ever"
    assert not parse(["--resume", "--no-resume"]).checkpoint.resume


def test_a_curriculum_plays_its_latest_entry_and_evaluates_on_none() -> None:
    entries = {"9": {"frozen_lake": {"size": 4}}, "20": {"frozen_lake": {"size": 5}}}
    flags = ["--environments", "frozen_lake,bandit", "--curriculum", json.dumps(entries)]
    own = '{"frozen_lake":{"size":3,"success_rate":1.0}}'
    played = parse([*flags, "--environment-options", own]).environment
    steps = (0, 8, 9, 19, 20, 100)
    for step, size in zip(steps, (3, 3, 4, 4, 5, 5)):
        options = played.training_options("frozen_lake", step)
        assert (options["size"], options["success_rate"]) == (size, 1.0), step
        assert played.training_options("bandit", step) == played.options("bandit")
    assert played.evaluation_options("frozen_lake")["size"] == 3
    assert played.curriculum_steps == {9, 20}


def test_a_value_may_begin_with_a_dash() -> None:
    config = parse(["--format-penalty", "-1e-2", "--reward", "-0.5*format + environment"])
    assert config.environment.format_penalty == -0.01
    assert config.advantage.reward_terms == {"format": -0.5, "environment": 1.0}


def test_world_size_must_fit() -> None:
    config = parse(["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"])
    config.parallel.check_world(8)
    with pytest.raises(ValueError, match=r"must divide the world size \(6\)"):
        config.parallel.check_world(6)
    config = parse(["--tensor-model-parallel-size", "2", "--context-parallel-size", "3"])
    config.parallel.check_world(12)
    with pytest.raises(ValueError, match=r"x context_parallel_size \(3\) must divide .* \(8\);"):
        config.parallel.check_world(8)


def test_engines_have_their_ranks_on_one_node() -> None:
    rollout = parse(["--rollout-engine", "sglang", "--rollout-tensor-parallel-size", "4"]).rollout
    assert rollout.num_engines(16, 8) == 4
    for world_size, ranks_per_node in ((16, 2), (6, 6), (2, 2)):
        with pytest.raises(
            ValueError, match=r"rollout_tensor_parallel_size \(4\) must divide the ranks of a node"
        ):
            rollout.num_engines(world_size, ranks_per_node)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("top_k --filter-value 3", 3),
        ("top_fraction --filter-value 0.3", 2),
        ("percentile_range --filter-start 0.25 --filter-value 0.75", 4),
        ("none", 8),
        ("top_p_linear --filter-value 0.9", None),
    ],
)
def test_groups_that_a_filter_keeps_are_a_whole_number(flags: str, expected: int | None) -> None:
    """They count groups: lists are cut at them, and messages name them."""
    words = f"--num-groups 8 --minibatch-size 16 --filter-strategy {flags}"
    kept = parse(words.split()).filter.num_kept(8)
    assert kept == expected and type(kept) is type(expected)


def test_each_sender_of_weights_is_a_rank_that_trains() -> None:
    flags = "--placement separate --rollout-ranks 2 --importance-cap 2 --rollout-engine sglang"
    config = parse([*flags.split(), "--max-staleness", "1", "--weight-senders", "3"])
    assert config.parallel.num_trainers(5) == 3 and config.senders(3) == [0, 1, 2]
    assert config.senders(8) == [0, 2, 5]
    with pytest.raises(ValueError, match=r"weight_senders \(3\) must be at most .* train \(2\)"):
        config.parallel.num_trainers(4)


def test_settings_of_another_version_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown keys \['nosuch'\] in 'train'; load it with"):
        StarPOConfig.from_dict({"train": {"nosuch": 1}})
