"""On-policy distillation: its gradient against exact sums in float64, the teacher's log-ratios and
likeliest tokens against transformers, its own prompts, several teachers, and what is refused.

The gradient of the likeliest tokens: `tests/kernels/test_policy.py`, and under every layout
`tests/distributed/test_parity.py`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ragen_mega.algorithm.credit import estimate_advantages, taught
from ragen_mega.config import LoraConfig, LossConfig, ParallelConfig, TrainConfig, parse
from ragen_mega.data.fields import (
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TOKEN_FIELDS,
    add_likeliest,
)
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.scorer import FrozenPolicy
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import episode_maker, prompt_examples
from ragen_mega.run.check import check
from ragen_mega.run.log import StepLog
from ragen_mega.run.teacher import Model, Teacher, check_tokens
from ragen_mega.run.timers import Timers
from tests.support.small_policy import tiny_qwen2
from tools.parity import transformers_logprobs

TEMPERATURE = 0.7
ALONE = "--reward teacher --advantage-estimator none --filter-strategy none".split()


@pytest.fixture(autouse=True)
def likeliest_tokens() -> Iterator[None]:
    """Batches may hold three likeliest tokens."""
    add_likeliest(3)
    yield
    for name in (TEACHER_IDS, TEACHER_LOGPROBS):
        TOKEN_FIELDS.pop(name, None)


def played(
    tokens: list[list[int]], prompt: list[int], group: int = 0, world: str = "reverse"
) -> Trajectory:
    """Turns of these tokens, each behind an observation."""
    trajectory = Trajectory(group, environment=world, seed=1_000_003, outcome_seed=5)
    for number, said in enumerate(tokens):
        trajectory.append_observation([1, 2] if number else prompt)
        trajectory.append_action(Completion(said, [-1.0] * len(said), "stop"))
    return trajectory


# The formula


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Over all pairs of samples of two tokens, weighted by their probability, in float64; states
    stay as they are.
    """
    generator = torch.Generator().manual_seed(0)
    size = 3
    own, other = torch.randn(2, size + 1, size, generator=generator, dtype=torch.float64)
    own.requires_grad_()  # logits of the first token, and of the second one behind each first

    def table(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)

    samples = [*itertools.product(range(size), repeat=2)]

    def of(rows: Tensor, sample: tuple[int, int]) -> Tensor:
        return torch.stack([rows[0, sample[0]], rows[1 + sample[0], sample[1]]])

    policy, teacher = table(own), table(other)
    loss = torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(samples, repeat=2):
        batch = pack([played([list(sample)], [0]) for sample in pair])
        ratios = torch.stack([of(teacher, s) - of(policy, s) for s in pair]).detach()
        found = torch.zeros(batch.num_positions)
        found[batch.loss_mask] = ratios.flatten().float()
        advantages = taught(batch.with_fields(teacher_log_ratios=found), 0.5)
        logprobs = torch.stack([of(policy, sample) for sample in pair])
        chance = logprobs.detach().sum().exp()
        loss = loss - chance * (advantages[batch.loss_mask] * logprobs.flatten()).sum() / 2
    (gradient,) = torch.autograd.grad(loss, own, retain_graph=True)

    kl = (policy.exp() * (policy - teacher)).sum(-1)
    exact = 0.5 * (kl[0] + (policy[0].exp().detach() * kl[1:]).sum())
    (expected,) = torch.autograd.grad(exact, own)
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


def test_the_baseline_is_the_mean_of_the_others_at_the_same_place_of_the_same_turn() -> None:
    batch = pack([played([[5, 6], [7]], [0]), played([[5], [7, 8]], [0, 0]), played([[4]], [0])])
    ratios = torch.zeros(batch.num_positions)
    #                                       a0 a1  a2 | b0  b1  b2 | c0
    ratios[batch.loss_mask] = torch.tensor([1.0, 4.0, 3.0, 2.0, 9.0, 6.0, 6.0])
    found = taught(batch.with_fields(teacher_log_ratios=ratios), 2.0)
    expected = [1 - 4, 4, 3 - 9, 2 - 3.5, 9 - 3, 6, 6 - 1.5]
    assert found[batch.loss_mask].tolist() == [2 * each for each in expected]
    assert not found[~batch.loss_mask].any()


@pytest.mark.parametrize("estimator", ["none", "dr_grpo", "reinforce_plus_plus", "gae"])
def test_a_teacher_adds_to_what_the_estimator_gives(estimator: str) -> None:
    members = [played([[5, 6], [7]], [0]), played([[5], [7, 8]], [0, 0])]
    members[0].turns[-1].reward = 1.0
    batch = pack(members)
    values, ratios = torch.randn(2, batch.num_positions, generator=torch.Generator().manual_seed(1))
    batch = batch.with_fields(values=values)
    reward = "teacher" if estimator == "none" else "environment + 0.5*teacher"
    flags = ["--advantage-estimator", estimator, "--filter-strategy", "none", "--reward", reward]
    settings = parse([*flags, "--teacher-prompt-examples", "2"]).advantage
    without = estimate_advantages(batch, members, settings).advantages
    taught_batch = batch.with_fields(teacher_log_ratios=ratios)
    both = estimate_advantages(taught_batch, members, settings).advantages
    assert without is not None and both is not None
    assert torch.equal(both, without + taught(taught_batch, settings.teacher_weight))
    assert torch.equal(both, without) == False  # noqa: E712
    in_loss = replace(settings, teacher_top_k=2)
    credited = estimate_advantages(taught_batch, members, in_loss).advantages
    assert credited is not None and torch.equal(credited, without)
    same = batch.with_fields(teacher_log_ratios=torch.zeros_like(ratios))
    equal = estimate_advantages(same, members, settings).advantages
    assert equal is not None and torch.equal(equal, without)


# The teacher's log-ratios


class World:
    """A config, a tiny model and the renderer of its prompts."""

    def __init__(self, *flags: str) -> None:
        self.config = parse(
            ["--environments", "reverse", "--no-think", "--prompt-style", "compact", *ALONE]
            + ["--temperature", str(TEMPERATURE), *flags]
        )
        world = self.config.environment
        shown = prompt_examples(replace(world, prompt_examples=3), "reverse")
        texts = [message.content for message in shown] + [
            "user assistant system first second third"
        ]
        self.renderer = ChatRenderer(train_tokenizer(texts), think=False)
        self.model = tiny_qwen2(len(self.renderer.tokenizer))
        self.hf: PretrainedConfig = self.model.config

    def first_prompt(self, seed: int) -> list[int]:
        episode = episode_maker(self.config.environment, "reverse", 0)()
        return self.renderer.start(episode.start(seed, outcome_seed=5))

    def trajectories(self) -> list[Trajectory]:
        prompt = self.first_prompt(1_000_003)
        return [played([[9, 8, 7], [6]], prompt), played([[9, 5], [4, 3]], prompt)]

    def teacher(self, *scorers: MegatronPolicy | FrozenPolicy) -> Teacher:
        """A teacher of all environments, or one for each."""
        top = {"top_k": self.config.advantage.teacher_top_k, "top_below": self.hf.vocab_size}
        scores = (
            each.scores if isinstance(each, FrozenPolicy) else each.reference_scores
            for each in scorers
        )
        models = [Model(partial(each, **top), 4096) for each in scores]
        names = self.config.environment.shares
        return Teacher(self.config, dict(zip(names, itertools.cycle(models))), self.renderer)

    def frozen(
        self, temperature: float = TEMPERATURE, model: PreTrainedModel | None = None
    ) -> FrozenPolicy:
        model = model or self.model
        return FrozenPolicy(
            model.config, initialize(ParallelConfig()), ParallelConfig(), TrainConfig(),
            model.state_dict().get, temperature=temperature,
        )  # fmt: skip

    def read(self, name: str) -> Tensor | None:
        return self.model.state_dict().get(name)

    def policy(self, lora: LoraConfig | None = None) -> MegatronPolicy:
        policy = MegatronPolicy(
            self.hf, initialize(ParallelConfig()), ParallelConfig(), TrainConfig(), LossConfig(),
            temperature=TEMPERATURE, keep_reference=True, lora=lora,
        )  # fmt: skip
        policy.load_weights(self.read)
        return policy

    def expected(self, prompt: list[int], members: list[Trajectory]) -> Tensor:
        """Log-probabilities of sampled tokens behind another prompt, by transformers."""
        batch = self.behind(prompt, members)
        return transformers_logprobs(self.model, batch, TEMPERATURE)[batch.loss_mask]

    def likeliest(self, prompt: list[int], members: list[Trajectory], top_k: int) -> Tensor:
        """[N, 2 K] log-probabilities and ids of the likeliest tokens there, by transformers."""
        batch, rows = self.behind(prompt, members), []
        for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            with torch.no_grad():
                logits = self.model(batch.tokens[None, start:end]).logits[0] / TEMPERATURE
            rows.append(torch.cat(logits.log_softmax(-1).topk(top_k), -1))
        return torch.cat(rows)[batch.loss_mask]

    def behind(self, prompt: list[int], members: list[Trajectory]) -> TokenBatch:
        """The trajectories behind another prompt, made by hand."""
        restated = []
        for member in members:
            start = member.turns[0].start
            other = Trajectory(0)
            other.append_observation(prompt)
            for turn, following in zip(member.turns, [*member.turns[1:], None]):
                tokens = member.tokens[turn.start : turn.end]
                other.append_action(Completion(tokens, [0.0] * len(tokens), "stop"))
                if following:
                    other.append_observation(member.tokens[turn.end : following.start])
            assert len(other) == len(member) - start + len(prompt)
            restated.append(other)
        return pack(restated)


def scored(world: World, teacher: Teacher) -> tuple[TokenBatch, StepLog]:
    members, log = world.trajectories(), StepLog(0, Timers())
    batch = pack(members)
    batch = batch.with_fields(old_logprobs=-torch.ones(batch.num_positions))
    return teacher.score(batch, members, log), log


def restated_prompt(world: World) -> list[int]:
    """The teacher's prompt of the trajectories, by hand."""
    settings = replace(world.config.environment, prompt_examples=2, system_prompt="Be right.")
    episode = episode_maker(settings, "reverse", 0)()
    return world.renderer.start(episode.start(1_000_003, outcome_seed=5))


@pytest.mark.parametrize(("is_restated", "rank"), [(False, 0), (True, 0), (True, 2)])
def test_log_ratios_are_those_of_transformers(is_restated: bool, rank: int) -> None:
    """A teacher that is shifted by a token, or scored at another temperature, fails this."""
    given = ["--teacher-prompt-examples", "2", "--teacher-system-prompt", "Be right."]
    given = given if is_restated else ["--teacher-load", "/some/model"]
    world = World(*given, "--teacher-top-k", "3")
    members = world.trajectories()
    prompt = restated_prompt(world) if is_restated else [*members[0].first_prompt]
    assert (len(prompt) > len(members[0].first_prompt) + 20) == is_restated
    expected = world.expected(prompt, members) + 1  # of a policy that is always at -1
    policy = world.policy(LoraConfig(lora_rank=rank) if rank else None)
    with torch.no_grad():
        for weight in policy.local_weights():  # the teacher is what the policy started from
            if weight.requires_grad:
                weight.add_(0.1)
    teacher = world.teacher(policy if is_restated else world.frozen())
    batch, log = scored(world, teacher)
    found = batch.teacher_log_ratios
    assert found is not None and not found[~batch.loss_mask].any()
    torch.testing.assert_close(found[batch.loss_mask], expected, atol=2e-5, rtol=0)
    assert log.result()["teacher/kl"] == pytest.approx(-float(expected.mean()), abs=1e-5)
    top = torch.cat([found_fields(batch, name) for name in (TEACHER_LOGPROBS, TEACHER_IDS)], 1)
    exact = world.likeliest(prompt, members, 3)
    torch.testing.assert_close(top, exact, atol=2e-5, rtol=0)
    mass = float(exact[:, :3].exp().sum(1).mean())
    assert log.result()["teacher/top_k_mass"] == pytest.approx(mass, abs=1e-5)
    for wrong in (expected.roll(1), world.expected(prompt[1:], members) + 1):
        assert (found[batch.loss_mask] - wrong).abs().max() > 1e-3
    hot, _ = scored(world, world.teacher(world.frozen(2 * TEMPERATURE)))
    assert hot.teacher_log_ratios is not None
    assert (hot.teacher_log_ratios - found).abs().max() > 1e-2


def found_fields(batch: TokenBatch, name: str) -> Tensor:
    """What a batch holds of the sampled tokens; of others it holds nothing."""
    values = batch.further_fields[name]
    assert not values[~batch.loss_mask].any()
    return values[batch.loss_mask].float()


def test_each_environment_has_its_own_teacher() -> None:
    """Trajectories of two environments in one batch: each is scored by its own model alone."""
    own = '{"reverse": "/some/model", "lookup": "/some/other"}'
    world = World("--environments", "reverse,lookup", "--num-groups", "8", "--teacher-load", own)
    assert world.config.teachers == {"reverse": "/some/model", "lookup": "/some/other"}
    other = tiny_qwen2(len(world.renderer.tokenizer), seed=7)
    prompt = world.first_prompt(1_000_003)
    members = [
        played([[9, 8, 7], [6]], prompt),
        played([[9, 5], [4, 3]], prompt, world="lookup"),
        played([[9, 8], [6, 5]], prompt),
    ]
    batch = pack(members)
    batch = batch.with_fields(old_logprobs=torch.zeros(batch.num_positions))
    teacher = world.teacher(world.frozen(), world.frozen(model=other))
    found = teacher.score(batch, members, StepLog(0, Timers())).teacher_log_ratios
    one, two = (transformers_logprobs(each, batch, TEMPERATURE) for each in (world.model, other))
    start, end = batch.cu_seqlens[1:3].tolist()
    expected = torch.cat([one[:start], two[start:end], one[end:]])
    assert found is not None and (one - two).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    alone = teacher.score(batch.select([0, 2]), [members[0], members[2]], StepLog(0, Timers()))
    assert torch.equal(alone.teacher_log_ratios, torch.cat([found[:start], found[end:]]))


def test_a_teacher_with_more_rows_teaches_tokens_of_the_policy_alone() -> None:
    """Rows behind the tokenizer's tokens, which some models have, are nobody's."""
    world = World("--teacher-load", "/some/model", "--teacher-top-k", "3")
    larger = tiny_qwen2(len(world.renderer.tokenizer) + 8)
    size = world.hf.vocab_size
    with torch.no_grad():
        larger.lm_head.weight[size:] = 4 * larger.lm_head.weight[:8]
    members = world.trajectories()
    batch = pack(members)
    batch = batch.with_fields(old_logprobs=torch.zeros(batch.num_positions))
    frozen = world.frozen(model=larger)
    assert int(frozen.scores(batch, top_k=3)[:, 5:].max()) >= size
    found = world.teacher(frozen).score(batch, members, StepLog(0, Timers()))
    assert int(found.further_fields[TEACHER_IDS].max()) < size


def test_a_teacher_that_is_the_policy_teaches_nothing() -> None:
    world = World("--teacher-load", "/some/model")
    policy, members, log = world.policy(), world.trajectories(), StepLog(0, Timers())
    batch = pack(members)
    batch = batch.with_fields(old_logprobs=policy.logprobs(batch))
    for scorer in (policy, world.frozen()):
        found = world.teacher(scorer).score(batch, members, log)
        assert found.teacher_log_ratios is not None and not found.teacher_log_ratios.any()
        credited = estimate_advantages(found, members, world.config.advantage)
        assert credited.advantages is not None and not credited.advantages.any()


def test_a_frozen_teacher_has_no_gradients_and_no_optimizer() -> None:
    memory = World("--teacher-load", "/some/model").frozen().trainer.memory
    held = memory.on_device()
    assert held["parameters"] > 0 and held["gradients"] == held["optimizer"] == 0
    assert memory.offload() == held["parameters"] and memory.on_device()["parameters"] == 0


def test_a_world_that_begins_otherwise_is_refused() -> None:
    world = World("--teacher-prompt-examples", "2")
    teacher = world.teacher(world.policy())
    member = world.trajectories()[0].behind([*world.first_prompt(1_000_004), 1])
    batch = pack([member])
    batch = batch.with_fields(old_logprobs=-torch.ones(batch.num_positions))
    with pytest.raises(ValueError, match="does not begin again as it began from seed 1000003"):
        teacher.score(batch, [member], StepLog(0, Timers()))


def test_a_longer_prompt_needs_positions() -> None:
    world = World("--teacher-prompt-examples", "2", "--max-context-length", "4090")
    with pytest.raises(ValueError, match="reads up to .* positions; lower --max-context-length"):
        world.teacher(world.policy())


# What is refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--teacher-load x", "a teacher does nothing with reward environment"),
        ("--teacher-top-k 4", "teacher_top_k does nothing with reward environment"),
        (
            "--reward environment+teacher --teacher-load {}",
            "must name a teacher for each .*frozen_lake",
        ),
        ("--teacher-prompt-examples 2", "a teacher does nothing"),
        ("--reward teacher --advantage-estimator none --filter-strategy none", "not the policy"),
        ("--reward teacher --teacher-load x", "leaves advantage_estimator gae no rewards"),
        ("--advantage-estimator none", "makes nothing of the rewards environment"),
        ("--reward environment-0.1*teacher --teacher-load x", "must not be negative"),
        ("--reward teacher --advantage-estimator none --teacher-load x", "ranks groups by"),
        (
            "--reward environment+teacher --teacher-load x --policy-loss gspo --advantage-estimator"
            " grpo --loss-aggregation seq-mean-token-mean",
            "no place for",
        ),
        ("--reward environment+teacher --teacher-load x --loss-mask legacy", "no place for"),
        (
            "--reward environment+teacher --teacher-system-prompt x --context-window 2",
            "its own first prompt alone",
        ),
    ],
)
def test_settings_that_cannot_work(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        parse(flags.split())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("teachers", "message"),
    [
        ('{"sokoban": "x"}', r"each environment that is trained \(frozen_lake\), not for sokoban"),
        ('{"frozen_lake": "x", "sokoban": "y"}', "not for frozen_lake, sokoban"),
        ('{"frozen_lake": 3}', "must name a model for frozen_lake, not 3"),
        ('{"frozen_lake": "x"', "teacher_load must be a JSON object"),
    ],
)
def test_teachers_that_fit_no_environment(teachers: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        parse(["--reward", "environment+teacher", "--teacher-load", teachers])
    assert "\n" not in str(raised.value)


def test_teachers_are_known_by_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that both have is loaded once; one that the policy starts from is not loaded."""
    monkeypatch.chdir(tmp_path)
    Path("one").mkdir()
    flags = ["--environments", "sokoban,frozen_lake", "--reward", "environment + teacher"]
    flags += ["--num-groups", "8", "--load", "owner/model", "--teacher-load"]
    config = parse([*flags, '{"sokoban": "one", "frozen_lake": "owner/other"}']).located()
    place = str(tmp_path / "one")
    assert config.teachers == {"sokoban": place, "frozen_lake": "owner/other"}
    assert config.loaded_teachers == {place: ["sokoban"], "owner/other": ["frozen_lake"]}
    assert not config.needs_reference
    both = parse([*flags, "one"])
    assert both.loaded_teachers == {"one": ["sokoban", "frozen_lake"]}
    start = parse([*flags, '{"sokoban": "one", "frozen_lake": "owner/model"}'])
    assert start.loaded_teachers == {"one": ["sokoban"]} and start.needs_reference


def test_a_teacher_without_a_template(tmp_path: Path) -> None:
    world = World("--teacher-prompt-examples", "2")
    for name in ("policy", "teacher"):
        world.model.save_pretrained(tmp_path / name)
        world.renderer.tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "teacher" / "chat_template.jinja").unlink()
    flags = ["--environments", "reverse", *ALONE, "--output", str(tmp_path / "runs")]
    flags += ["--load", str(tmp_path / "policy"), "--teacher-load"]
    with pytest.raises(ValueError, match="--teacher-load .* without chat template"):
        check(parse([*flags, str(tmp_path / "teacher")]), 1, 1)
    with pytest.raises(ValueError, match="--teacher-load .*nothing"):
        check(parse([*flags, str(tmp_path / "nothing")]), 1, 1)
    same = parse([*flags, str(tmp_path / "policy")])
    assert not same.loaded_teachers and same.needs_reference and not same.has_kl


def test_other_tokens_are_refused_with_the_first_difference() -> None:
    ours = train_tokenizer(["the sun is a cup"] * 4)
    theirs = train_tokenizer(["a lamp and a door"] * 4)
    config = PretrainedConfig(vocab_size=len(ours))
    both = {token: text for text, token in theirs.get_vocab().items()}
    first = min(token for text, token in ours.get_vocab().items() if both.get(token) != text)
    with pytest.raises(ValueError, match=f"token {first} is .* there and .* here"):
        check_tokens("other", (theirs, config), (ours, config))
    check_tokens("same", (ours, config), (ours, config))
    with pytest.raises(ValueError, match="rows for tokens"):
        check_tokens("less", (ours, config), (ours, PretrainedConfig(vocab_size=len(ours) + 1)))
