"""The embedded engine against transformers: log-probabilities, samples, scheduling, weights."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.engines.embedded import slots
from ragen_mega.engines.embedded.decoder import Decoder
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.engines.embedded.kernels import BLOCK
from ragen_mega.engines.embedded.kv_cache import KVCache
from ragen_mega.models.shape import ModelShape
from tests.support.rounding import exact_logprobs

Result = TypeVar("Result")
VOCAB = 60
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "initializer_range": 0.2,
}
CONFIGS = {
    "qwen2_tied": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2_untied": Qwen2Config(
        **SIZES,
        num_key_value_heads=3,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True),
}


def build_model(name: str) -> PreTrainedModel:
    torch.manual_seed(1)
    config = CONFIGS[name]
    model = (Qwen3ForCausalLM if name == "qwen3" else Qwen2ForCausalLM)(config).eval()
    with torch.no_grad():  # biases start at 0 and norms at 1, which would hide a mistake
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name or "norm" in parameter_name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_model("qwen2_tied")


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(model.config, max_context=200, max_sessions=80)
    with engine.awake():
        engine.load_weights(model.state_dict().items())
        yield engine


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def random_tokens(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB) for _ in range(count)]


async def play(
    engine: EmbeddedEngine,
    session: int,
    prompt: list[int],
    *,
    turns: int,
    temperature: float = 1.0,
    rest: bool = False,
) -> tuple[list[int], list[tuple[int, Completion]]]:
    """A trajectory with random observations; `rest`: the environment takes its time."""
    generator = random.Random(session)
    tokens, answers = list(prompt), []
    for turn in range(turns):
        sampling = SamplingParams(
            generator.randint(3, 12),
            temperature=temperature,
            stop_token_ids=(7, 8),
            seed=100 * session + turn,
        )
        completion = await engine.generate(list(tokens), sampling, session=session)
        answers.append((len(tokens), completion))
        tokens += completion.tokens + random_tokens(generator, generator.randint(1, 9))
        for _ in range(generator.randint(0, 6) if rest else 0):
            await asyncio.sleep(0)
    engine.release(session)
    return tokens, answers


def assert_logprobs(
    model: PreTrainedModel,
    tokens: list[int],
    start: int,
    completion: Completion,
    temperature: float = 1.0,
) -> None:
    """The completion stands at `start` of `tokens`, and its log-probabilities equal one full
    forward in float64.
    """
    end = start + len(completion.tokens)
    assert tokens[start:end] == completion.tokens
    exact, bound = exact_logprobs(model, tokens, temperature)
    picked = exact[torch.arange(start - 1, end - 1), completion.tokens]
    torch.testing.assert_close(
        torch.tensor(completion.logprobs, dtype=torch.float64), picked, atol=bound, rtol=0
    )


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("rest", [False, True])
def test_multi_turn_logprobs_equal_one_full_forward(name: str, rest: bool) -> None:
    model = build_model(name)
    generator = random.Random(0)
    common = random_tokens(generator, 20)
    prompts = [common + random_tokens(generator, length) for length in (1, 25, 25, 60)]

    async def everything(
        engine: EmbeddedEngine,
    ) -> list[tuple[list[int], list[tuple[int, Completion]]]]:
        return await asyncio.gather(
            *(
                play(engine, i, prompts[i % 4], turns=1 + i % 4, temperature=0.7, rest=rest)
                for i in range(13)
            )
        )

    engine = EmbeddedEngine(
        model.config, max_context=200, max_sessions=9
    )  # some sessions have to wait for a slot
    with engine.awake():
        engine.load_weights(model.state_dict().items())
        trajectories = run(everything(engine))
    for tokens, answers in trajectories:
        for start, completion in answers:
            assert_logprobs(model, tokens, start, completion, temperature=0.7)


def test_float64_is_exact_to_float64() -> None:
    model = build_model("qwen3").double()
    engine = EmbeddedEngine(model.config, max_context=64, max_sessions=2, dtype=torch.float64)
    with engine.awake():
        engine.load_weights(model.state_dict().items())
        completion = run(engine.generate([1, 2, 3], SamplingParams(40, seed=5), session=0))
    # The rotary tables are float32 in both, so only their cosines' last bits differ.
    expected, _ = exact_logprobs(model, [1, 2, 3, *completion.tokens], 1.0)
    picked = expected[torch.arange(2, 42), completion.tokens]
    torch.testing.assert_close(
        torch.tensor(completion.logprobs, dtype=torch.float64), picked, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("lacking", ["nothing", "matrix instructions", "bfloat16"])
def test_bfloat16_loses_no_more_than_in_transformers(
    name: str, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = torch.cpu.get_capabilities()
    processor = {
        "nothing": here | {"amx_bf16": True},
        "matrix instructions": here | {"amx_bf16": False},
        "bfloat16": {},
    }[lacking]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    model = build_model(name).bfloat16()
    engine = EmbeddedEngine(model.config, max_context=200, max_sessions=8, dtype=torch.bfloat16)

    async def everything(
        engine: EmbeddedEngine,
    ) -> list[tuple[list[int], list[tuple[int, Completion]]]]:
        prompt = random_tokens(random.Random(0), BLOCK + 5)
        return await asyncio.gather(*(play(engine, i, prompt, turns=4) for i in range(16)))

    with engine.awake():
        engine.load_weights(model.state_dict().items())
        trajectories = run(everything(engine))
    ours, theirs = [], []
    exact_model = copy.deepcopy(model).double()
    for tokens, answers in trajectories:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            exact, rounded = (
                torch.log_softmax(m(ids).logits[0].double(), dim=-1) for m in (exact_model, model)
            )
        for start, completion in answers:
            at = torch.arange(start - 1, start - 1 + len(completion.tokens)), completion.tokens
            ours.append(torch.tensor(completion.logprobs) - exact[at])
            theirs.append(rounded[at] - exact[at])
    # Each rounds at other places; transformers also rounds sums of layers and logits.
    our_error, their_error = (torch.cat(errors).abs().mean() for errors in (ours, theirs))
    assert our_error < 1.5 * their_error


def test_logits_of_bfloat16_weights_have_more_digits_than_bfloat16() -> None:
    model = build_model("qwen3").bfloat16()
    shape = ModelShape.of(model.config)
    decoder = Decoder(shape, model.state_dict().items(), max_context=8, dtype=torch.bfloat16)
    hidden = torch.randn(37, shape.hidden_size, generator=torch.Generator().manual_seed(0))
    rounded = hidden.bfloat16()
    exact = rounded.double() @ model.lm_head.weight.double().t()
    error = (decoder.logits(rounded.float()) - exact).abs().max()
    assert error < exact.abs().max() * torch.finfo(torch.bfloat16).eps / 100


def test_a_turn_costs_its_new_tokens_and_equal_prompts_are_computed_once(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    forward = Decoder.forward

    def counting_forward(
        self: Decoder, tokens: NDArray[np.int64], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        computed.append(len(tokens))
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(Decoder, "forward", counting_forward)
    generator = random.Random(3)
    task = random_tokens(generator, 50)
    prompts = [task + random_tokens(generator, 30) for _ in range(2)]

    async def members() -> None:
        first = await asyncio.gather(
            *(
                engine.generate(prompts[i // 8], SamplingParams(1, seed=i), session=i)
                for i in range(16)
            )
        )
        # One prompt whole, the other's own part, and of the copies the last token alone.
        assert sum(computed) == 80 + 30 + 14
        assert engine.counts.prompt_tokens == 16 * 80
        assert engine.counts.cached_tokens == 16 * 80 - sum(computed)
        computed.clear()
        await engine.generate(
            prompts[0] + first[3].tokens + [1, 2, 3, 4], SamplingParams(1), session=3
        )
        assert sum(computed) == 1 + 4  # the last sampled token has not been fed yet
        computed.clear()
        await engine.generate(
            prompts[0] + first[4].tokens + [1, 2, 3, 4], SamplingParams(6), session=4
        )
        assert computed[0] == 1 + 4 and len(computed) == 6

    run(members())


def test_trajectories_that_went_the_same_way_compute_a_turn_once(
    model: PreTrainedModel, engine: EmbeddedEngine
) -> None:
    """And what they get is what one of them alone gets, to the bit."""
    prompt, observation = (random_tokens(random.Random(i), 40) for i in range(2))

    async def turns(session: int) -> list[Completion]:
        tokens, answers = list(prompt), []
        for seed in (0, 0, session):  # the third answers differ, so that the ways part
            answer = await engine.generate(tokens, SamplingParams(6, seed=seed), session=session)
            answers.append(answer)
            tokens = tokens + answer.tokens + observation
        sampling = SamplingParams(6, seed=3)
        return [*answers, await engine.generate(tokens, sampling, session=session)]

    def computed() -> int:
        return engine.counts.prompt_tokens - engine.counts.cached_tokens

    async def together() -> list[list[Completion]]:
        return await asyncio.gather(*map(turns, range(5)))

    answers = run(together())
    turn = 1 + len(observation)  # with the last token sampled
    assert computed() == (len(prompt) + 4) + 2 * (turn + 4) + 5 * turn
    for session in range(5):
        for other in range(5):
            engine.release(other)
        assert run(turns(session)) == answers[session]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_completion_does_not_depend_on_the_batch(
    model: PreTrainedModel, engine: EmbeddedEngine, temperature: float
) -> None:
    prompt = random_tokens(random.Random(9), 30)

    async def among_others() -> tuple[list[int], list[tuple[int, Completion]]]:
        others = [prompt[: 5 + i % 26] + random_tokens(random.Random(i), i) for i in range(64)]
        plays = (play(engine, 100 + i, other, turns=3, rest=True) for i, other in enumerate(others))
        tasks = [asyncio.create_task(one) for one in plays]
        for _ in range(5):
            await asyncio.sleep(0)
        result = await play(engine, 42, prompt, turns=3, temperature=temperature)
        await asyncio.gather(*tasks)
        return result

    alone_tokens, alone = run(play(engine, 42, prompt, turns=3, temperature=temperature))
    tokens, answers = run(among_others())
    assert tokens == alone_tokens
    assert answers == alone  # with log-probabilities, to the bit
    for start, one in alone:
        assert_logprobs(model, tokens, start, one, temperature or 1.0)  # greedy: as at 1


def test_shared_prefixes_change_nothing(
    model: PreTrainedModel, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(4)
    task = random_tokens(generator, BLOCK)
    prompts = [task + random_tokens(generator, 20) for _ in range(3)] + [
        random_tokens(generator, 70)
    ]
    shared: list[int] = []
    share = KVCache.share

    def recording_share(self: KVCache, source: int, target: int, length: int) -> None:
        share(self, source, target, length)
        shared.append(length)
        full = length // BLOCK
        assert full and np.array_equal(self.table[source, :full], self.table[target, :full])

    sizes = (0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3)  # uneven classes

    def one(session: int) -> Coroutine[Any, Any, tuple[list[int], list[tuple[int, Completion]]]]:
        return play(engine, session, prompts[sizes[session]], turns=3, rest=True)

    async def together() -> list[tuple[list[int], list[tuple[int, Completion]]]]:
        return await asyncio.gather(*map(one, range(len(sizes))))

    monkeypatch.setattr(KVCache, "share", recording_share)
    with_others = run(together())
    # Between tasks, and between copies but for the last token, whose logits are needed.
    assert Counter(shared) == {BLOCK: 2, BLOCK + 19: 9}
    shared.clear()
    for session, (tokens, answers) in enumerate(with_others):
        plain_tokens, plain = run(one(session))
        assert tokens == plain_tokens
        for (start, completion), (_, other) in zip(answers, plain, strict=True):
            assert_logprobs(model, tokens, start, completion)
            assert_logprobs(model, tokens, start, other)
    assert not shared


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7)])
def test_samples_follow_the_distribution(
    model: PreTrainedModel, engine: EmbeddedEngine, temperature: float, top_p: float
) -> None:
    prompt, draws = [3, 1, 4, 1, 5], 3000
    exact, bound = exact_logprobs(model, prompt, temperature)
    logprobs = exact[-1]
    probabilities = logprobs.exp()
    if top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        kept = order[: int((ordered.cumsum(0) < top_p).sum()) + 1]
        nucleus = torch.zeros_like(probabilities)
        nucleus[kept] = probabilities[kept]
        probabilities = nucleus / nucleus.sum()

    async def draw(seed: int) -> int:
        completion = await engine.generate(
            prompt, SamplingParams(1, temperature, top_p, seed=seed), session=seed
        )
        engine.release(seed)
        token = completion.tokens[0]
        assert completion.logprobs[0] == pytest.approx(
            float(logprobs[token]), abs=bound
        )  # before top_p
        return token

    async def draw_all() -> list[int]:
        return await asyncio.gather(*(draw(seed) for seed in range(draws)))

    counts = Counter(run(draw_all()))
    expected = {token: draws * p for token, p in enumerate(probabilities.tolist())}
    assert all(expected[token] > 0 for token in counts)
    common = [token for token in expected if expected[token] >= 5]
    rare_expected = draws - sum(expected[token] for token in common)
    rare_count = draws - sum(counts[token] for token in common)
    statistic = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in common)
    statistic += (rare_count - rare_expected) ** 2 / rare_expected if rare_expected > 1 else 0.0
    freedom = len(common)
    assert (
        statistic < freedom + 4 * (2 * freedom) ** 0.5
    )  # mean + 4 standard deviations of chi-square


def test_greedy_is_argmax_with_the_logprob_of_temperature_one(
    model: PreTrainedModel, engine: EmbeddedEngine
) -> None:
    tokens = [5, 6, 9]
    completion = run(engine.generate(list(tokens), SamplingParams(12, temperature=0.0), session=0))
    for token, logprob in zip(completion.tokens, completion.logprobs, strict=True):
        exact, bound = exact_logprobs(model, tokens, 1.0)
        assert token == int(exact[-1].argmax())
        assert logprob == pytest.approx(float(exact[-1, token]), abs=bound)
        tokens.append(token)


def test_completions_end_at_a_stop_token_a_limit_or_the_context(engine: EmbeddedEngine) -> None:
    free = run(engine.generate([1, 2], SamplingParams(30, seed=1), session=0))
    assert (len(free.tokens), free.finish_reason) == (30, "length")
    stop = free.tokens[11]
    first = free.tokens.index(stop)
    stopped = run(
        engine.generate([1, 2], SamplingParams(30, seed=1, stop_token_ids=(stop,)), session=1)
    )
    assert stopped.tokens == free.tokens[: first + 1] and stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == first + 1
    for room in (0, 1, 7):
        prompt = random_tokens(random.Random(room), 200 - room)
        cut = run(engine.generate(prompt, SamplingParams(30), session=2 + room))
        assert (len(cut.tokens), len(cut.logprobs), cut.finish_reason) == (room, room, "length")


def test_long_prompts_are_computed_in_parts(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_MAX_PREFILL_TOKENS", 16)
    engine = EmbeddedEngine(model.config, max_context=120, max_sessions=4)
    prompts = [random_tokens(random.Random(i), length) for i, length in enumerate((100, 33, 16, 5))]

    async def everything() -> list[Completion]:
        return await asyncio.gather(
            *(
                engine.generate(prompt, SamplingParams(4, seed=i), session=i)
                for i, prompt in enumerate(prompts)
            )
        )

    with engine.awake():
        engine.load_weights(model.state_dict().items())
        for prompt, completion in zip(prompts, run(everything()), strict=True):
            assert_logprobs(model, prompt + completion.tokens, len(prompt), completion)


def test_a_changed_history_is_computed_again(
    model: PreTrainedModel, engine: EmbeddedEngine
) -> None:
    run(engine.generate([1, 2, 3, 4, 5, 6], SamplingParams(3), session=0))
    prompt = [1, 2, 3, 9, 9]
    completion = run(engine.generate(prompt, SamplingParams(1), session=0))
    assert_logprobs(model, prompt + completion.tokens, len(prompt), completion)


@pytest.mark.parametrize("length", [20, 50])
def test_a_changed_history_among_others_that_share_the_old_or_the_new_one(
    model: PreTrainedModel, engine: EmbeddedEngine, length: int
) -> None:
    generator = random.Random(6)
    old, new = (random_tokens(generator, 40) for _ in range(2))
    prompt = (new + random_tokens(generator, 10))[:length] if length > 40 else old[:length]

    async def scenario() -> list[Completion]:
        async def generate(session: int, tokens: list[int]) -> Completion:
            return await engine.generate(tokens, SamplingParams(6, seed=session), session=session)

        # four rows whose prefix is read once, of which one goes on otherwise beside a new one
        await asyncio.gather(*(generate(session, old) for session in range(4)))
        return await asyncio.gather(generate(1, prompt), generate(4, prompt))

    for completion in run(scenario()):
        assert_logprobs(model, prompt + completion.tokens, len(prompt), completion)


def test_a_slot_forgets_the_longer_trajectory_that_left_it(model: PreTrainedModel) -> None:
    engine = EmbeddedEngine(model.config, max_context=120, max_sessions=2)
    lengths = (
        90,
        90,
        3,
        80,
    )  # of the prompts; the short one sits in a long one's slot, beside another long one
    prompts = [
        random_tokens(random.Random(session), length) for session, length in enumerate(lengths)
    ]

    async def scenario() -> list[Completion]:
        async def generate(session: int) -> Completion:
            return await engine.generate(
                prompts[session], SamplingParams(25, seed=session), session=session
            )

        await asyncio.gather(generate(0), generate(1))
        engine.release(0)
        engine.release(1)
        return await asyncio.gather(generate(2), generate(3))

    with engine.awake():
        engine.load_weights(model.state_dict().items())
        completions = run(scenario())
    for prompt, completion in zip(prompts[2:], completions, strict=True):
        assert_logprobs(model, prompt + completion.tokens, len(prompt), completion)


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_weights_must_arrive_complete_once_and_in_shape(
    model: PreTrainedModel, engine: EmbeddedEngine
) -> None:
    weights = weights_of(model)
    name = "model.layers.1.self_attn.k_proj.bias"
    bad_streams = {
        f"1 of .* missing, first '{name}'": {
            key: value for key, value in weights.items() if key != name
        },
        "unexpected weight 'model.layers.9.x'": weights | {"model.layers.9.x": weights[name]},
        "must have the full shape \\(16,\\)": weights | {name: weights[name][:8]},
        "ties its embeddings": weights | {"lm_head.weight": weights["lm_head.weight"] + 1},
    }
    for message, stream in bad_streams.items():
        with pytest.raises(ValueError, match=message):
            engine.load_weights(stream.items())
        with pytest.raises(RuntimeError, match="no weights"):
            run(engine.generate([1], SamplingParams(1), session=0))
    with pytest.raises(ValueError, match="arrived twice"):
        engine.load_weights([*weights.items(), (name, weights[name])])
    before = engine.weight_version
    engine.load_weights(item for item in weights.items() if item[0] != "lm_head.weight")
    assert engine.weight_version == before + 1


def test_untied_models_need_their_head() -> None:
    model = build_model("qwen2_untied")
    engine = EmbeddedEngine(model.config, max_context=8, max_sessions=1)
    with engine.awake(), pytest.raises(ValueError, match="missing, .*'lm_head.weight'"):
        engine.load_weights(
            item for item in weights_of(model).items() if item[0] != "lm_head.weight"
        )


def test_weights_are_copied_and_new_weights_take_effect(
    model: PreTrainedModel, engine: EmbeddedEngine
) -> None:
    weights = weights_of(model)
    engine.load_weights(weights.items())
    before = run(engine.generate([1, 2, 3], SamplingParams(5), session=0))
    for tensor in weights.values():
        tensor.mul_(1.5)
    engine.release(0)
    assert run(engine.generate([1, 2, 3], SamplingParams(5), session=0)).logprobs == before.logprobs
    with pytest.raises(RuntimeError, match="cache of the old weights"):
        engine.load_weights(weights.items())
    engine.release(0)
    engine.load_weights(weights.items())
    assert run(engine.generate([1, 2, 3], SamplingParams(5), session=0)).logprobs != before.logprobs


def test_diverged_weights_fail_every_caller(model: PreTrainedModel, engine: EmbeddedEngine) -> None:
    weights = weights_of(model)
    weights["model.norm.weight"][3] = float("nan")
    engine.load_weights(weights.items())

    async def both() -> list[Completion | BaseException]:
        calls = (engine.generate([1, 2], SamplingParams(5), session=i) for i in range(2))
        return await asyncio.gather(*calls, return_exceptions=True)

    for result in run(both()):
        assert isinstance(result, FloatingPointError) and "diverged" in str(result)


def test_released_and_cancelled_sessions_make_room(model: PreTrainedModel) -> None:
    engine = EmbeddedEngine(model.config, max_context=100, max_sessions=1)

    async def scenario() -> None:
        holder = asyncio.create_task(engine.generate([1, 2], SamplingParams(90), session=0))
        waiter = asyncio.create_task(engine.generate([3, 4], SamplingParams(4), session=1))
        for _ in range(5):
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="already generates"):
            await engine.generate([1], SamplingParams(1), session=0)
        holder.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holder
        assert not waiter.done()
        engine.release(0)
        assert len((await waiter).tokens) == 4
        engine.release(1)
        engine.release(1)  # releasing twice is harmless

    with engine.awake():
        engine.load_weights(model.state_dict().items())
        run(scenario())


def test_weights_and_cache_exist_only_while_awake(model: PreTrainedModel) -> None:
    engine = EmbeddedEngine(model.config, max_context=16, max_sessions=1)
    with pytest.raises(RuntimeError, match="asleep"):
        engine.load_weights(model.state_dict().items())
    with engine.awake():
        with pytest.raises(RuntimeError, match="awake already"), engine.awake():
            pass
        engine.load_weights(model.state_dict().items())
        run(engine.generate([1], SamplingParams(1), session=0))
    with pytest.raises(RuntimeError, match="no weights"):
        run(engine.generate([1], SamplingParams(1), session=0))
    with engine.awake():  # a session does not survive sleep
        engine.load_weights(model.state_dict().items())


@pytest.mark.parametrize(
    ("tokens", "sampling", "message"),
    [
        ([], SamplingParams(1), "at least one token"),
        ([VOCAB], SamplingParams(1), "token ids must lie"),
        ([1], SamplingParams(0), "max_tokens"),
        ([1], SamplingParams(1, temperature=-1.0), "temperature"),
        ([1], SamplingParams(1, top_p=0.0), "top_p"),
        ([1], SamplingParams(1, seed=-1), "seed"),
        ([1], SamplingParams(1, stop_token_ids=(VOCAB,)), "stop_token_ids"),
    ],
)
def test_bad_requests_are_refused(
    engine: EmbeddedEngine, tokens: list[int], sampling: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(engine.generate(tokens, sampling, session=0))


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SIZES, hidden_act="gelu"),
        Qwen2Config(
            **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        ),
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        Qwen3Config(**SIZES, attention_bias=True),
    ],
)
def test_variants_that_would_be_computed_wrongly_are_refused(
    config: Qwen2Config | Qwen3Config,
) -> None:
    with pytest.raises(ValueError, match="no other is supported"):
        EmbeddedEngine(config, max_context=8, max_sessions=1)
