"""The predictor of time: by hand, by brute force, and against published steps."""

import json
import math
import random
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

from ragen_mega.config import parse
from ragen_mega.data.packing import minibatch_ids
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning import cost
from ragen_mega.planning.hardware import HARDWARE, INTERVAL, Constants, Machine
from ragen_mega.planning.memory import (
    GIB,
    AdapterSizes,
    Capacity,
    Setting,
    adapter_sizes,
    plan,
    state_of,
)
from ragen_mega.planning.published import model_config
from ragen_mega.planning.time import (
    ADAM_BYTES,
    ALL_REDUCE,
    BROADCAST,
    CONNECTION,
    EXPOSED,
    TILE,
    Play,
    TrainingLayout,
    decode_step,
    default_play,
    layer,
    passes,
    ranks_usage,
    rollout,
    sampled_lengths,
    step_seconds,
    total,
    training,
)
from ragen_mega.planning.time import sampling as sampling_terms
from ragen_mega.run.idleness import shares
from tests.support import published_steps
from tests.support.plan_command import run_plan

H100 = Machine(HARDWARE["H100"])
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "predictor.md"


def shape_of(name: str) -> ModelShape:
    return ModelShape.of(model_config(name))


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, words: int) -> ModelShape:
    values = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden}
    values |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
    return ModelShape.from_config(values | {"intermediate_size": ffn, "vocab_size": words})


def test_flops_of_a_token_are_the_published_ratio() -> None:
    """512.7 TFLOP/s a GPU at 10,456 tokens/s a GPU: 49.0 GFLOP."""
    flops = shape_of("Qwen3-8B").cost.flops(4096)
    assert flops == pytest.approx(512.7e12 / 10456, rel=2e-3)
    assert flops == pytest.approx(49.0e9, rel=1e-3)


def test_the_parts_of_a_layer_are_its_matrices() -> None:
    for name in ("Qwen2.5-0.5B", "Qwen3-8B", "Qwen2.5-72B"):
        shape = shape_of(name)
        matrices = sum(shape.layer_sizes(matrices=True))
        assert shape.attention_size + shape.expert_size == shape.active_size == matrices
    shape = shape_of("Qwen3-30B-A3B")  # whose router is the third part
    chosen, router = 8 * shape.expert_size, 2048 * 128
    assert shape.active_size == shape.attention_size + chosen + router


def test_the_terms_of_a_layer_by_hand() -> None:
    constants = Constants(product=0.5, memory=0.5, link=0.5)
    machine = Machine(HARDWARE["H100"], constants)
    shape = shape_of("Qwen2.5-7B")
    terms = layer(machine, shape, TrainingLayout(tp=2), 4096, 2048)
    # queries with keys and values, their projection, gate with up, down: each reads its input once
    products = ((3584, 1792 + 2 * 256), (1792, 3584), (3584, 2 * 9472), (9472, 3584))
    assert sum(inner * columns for inner, columns in products) == sum(
        shape.layer_sizes(2, matrices=True)
    )
    seconds = sum(
        2 * 4096 * (inner + TILE) * columns / 494.7e12
        + 2 * (4096 * (inner + columns) + inner * columns) / (0.5 * 3.35e12)
        for inner, columns in products
    )
    assert terms["matrix products"] == pytest.approx(seconds)
    assert terms["attention"] == pytest.approx(2 * 4096 * 2048 * 1792 / (0.5 * 989.4e12))
    reduced = 2 * 2 * (1 / 2) * 4096 * 3584 * 2 / 225e9  # two all-reduces on a ring of two
    assert terms["tensor parallelism"] == pytest.approx(reduced)
    assert terms["expert parallelism"] == 0


def test_the_terms_of_a_layer_of_experts_by_hand() -> None:
    """Every token goes to eight experts, of which seven eighths are elsewhere, and back."""
    shape = shape_of("Qwen3-30B-A3B")
    for ep, speed in ((8, 450e9), (16, 50e9)):
        terms = layer(H100, shape, TrainingLayout(dp=ep, ep=ep), 4096, 4096)
        sent = 2 * 8 * 4096 * 2048 * 2 * (ep - 1) / ep
        assert terms["expert parallelism"] == pytest.approx(sent / (H100.constants.link * speed))
    dense = layer(H100, llama(48, 2048, 32, 4, 768, 151936), TrainingLayout(), 1e6, 1)
    routed = layer(H100, shape, TrainingLayout(), 1e6, 1)
    assert routed["matrix products"] > 2 * dense["matrix products"]


@pytest.mark.parametrize(
    ("layers", "held"), [(64, [16] * 4), (94, [24, 24, 24, 22]), (61, [16, 16, 16, 13])]
)
def test_a_pipeline_waits_for_its_slowest_stage(layers: int, held: list[int]) -> None:
    """The last one has the layers that are left, and the LM head."""
    shape = llama(layers, 4096, 32, 8, 12288, 64000)
    common = {"tokens": 8192, "length": 4096, "micros": 32}
    one = passes(H100, replace(shape, num_layers=1), TrainingLayout(), **common)
    last = one["LM head"]
    terms = passes(H100, shape, TrainingLayout(pp=4), **common)
    of_layer = sum(one.values()) - last
    slowest = max(of_layer * held[0], of_layer * held[-1] + last)
    own = sum(terms.values()) - terms["pipeline bubble"] - terms["pipeline transfers"]
    assert sum(held) == layers and own == pytest.approx(slowest)
    chunks = passes(H100, shape, TrainingLayout(pp=4, vp=4), **common)
    assert chunks["pipeline bubble"] == pytest.approx(terms["pipeline bubble"] / 4)


def test_gradients_and_parameters_travel_beside_passes() -> None:
    """By hand: a ring of 32 ranks on four nodes, each with its card."""
    shape = shape_of("Qwen2.5-7B")
    matrices = shape.num_layers * shape.active_size + 2 * shape.head_size
    ring = 31 / 32 * matrices * (4 + 2) / H100.link(32, 1)  # float32 there, bfloat16 back
    for tokens in (1, 4096, 65536):
        cut, common = TrainingLayout(dp=32), {"tokens": tokens, "length": 1024, "micros": 2}
        work = sum(passes(H100, shape, cut, **common).values()) / 2
        terms = training(H100, shape, cut, **common)
        seen = max(EXPOSED * ring, ring - work)
        assert terms["data parallelism"] == pytest.approx(seen)
        adam = ADAM_BYTES * shape.num_parameters / 32 / H100.memory + H100.constants.update
        assert terms["optimizer"] == pytest.approx(adam)
    parked = training(H100, shape, replace(cut, parks_optimizer=True), **common)["optimizer"]
    assert parked - adam == pytest.approx(2 * 12 * shape.num_parameters / 32 / H100.host_link)


def test_the_terms_of_a_decode_step_by_hand() -> None:
    """Llama-8B, whose published step on eight A100 a model without all-reduces misses by 70%."""
    shape = llama(32, 4096, 32, 8, 14336, 128256)
    constants = Constants(
        product=0.25, decode_memory=0.5, decode_layer=1e-5, decode_sequence=1e-6, link=0.5,
        routing=1.0, decode_expert=0.5,
    )  # fmt: skip
    machine = Machine(HARDWARE["A100"], constants)
    read = 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336) + 128256 * 4096
    found = decode_step(machine, shape, tp=8, batch=4, context=100)
    assert found["reading weights"] == pytest.approx(2 * read / 8 / (0.5 * 2.039e12))
    cache = 4 * 100 * 2 * 32 * 128 * 2
    assert found["reading keys and values"] == pytest.approx(cache / (0.5 * 2.039e12))
    assert found["products"] == pytest.approx(4 * 2 * read / 8 / (0.25 * 312e12))
    assert found["host"] == pytest.approx(32e-5 + 4e-6)
    sent = 2 * 7 / 8 * 4 * 4096 * 2 / 150e9  # a ring of eight
    assert found["tensor parallelism"] == pytest.approx(32 * 2 * (ALL_REDUCE + sent))
    assert decode_step(machine, shape, tp=1, batch=4, context=100)["tensor parallelism"] == 0
    further = (("num_moe_experts", 16), ("moe_router_topk", 2))
    mixture = replace(shape, model_type="qwen3_moe", further=further)
    other = decode_step(machine, mixture, tp=1, batch=1, context=0)
    experts = 32 * 2 * 3 * 4096 * 14336  # two of sixteen are read, and are all that is computed
    around = 32 * 2 * 4096 * 128 * 40 + 128256 * 4096
    wanted = 2 * (around + experts / 0.5) / (0.5 * 2.039e12)
    assert other["reading weights"] == pytest.approx(wanted)
    router = 32 * 16 * 4096
    assert other["products"] == pytest.approx(2 * (around + experts + router) / (0.25 * 312e12))


def published(**changes: object) -> published_steps.Point:
    """A step of reinforcement learning on ranks that sample and ranks that train."""
    shape, row = shape_of("Qwen2.5-1.5B"), {
        "id": "one", "model": "Qwen2.5-1.5B", "gpus": 4, "samples": 16, "mean_tokens": 100,
        "max_tokens": 200, "prompt_tokens": 50, "engine_tp": 1, "batch": 16, "forward_passes": 1,
        "packed_tokens": 4096, "cut": {}, "measured": {"step": 1.0}, "rollout_gpus": 2,
    }  # fmt: skip
    return published_steps.Point("rl", row | changes, "step", 1.0, False, shape)


@pytest.mark.parametrize("samples", [16, 1024])
def test_a_step_off_takes_as_long_as_the_slower_side(samples: int) -> None:
    """Step by step: a rollout plays while the one before it is trained on; weights stop both."""
    point = published(samples=samples, batch=samples)
    phases = published_steps.rl_phases(H100, point, TrainingLayout(dp=2))
    host = H100.constants.overhead * samples * 150
    training = phases["forward"] + phases["update"] + host
    played = trained = sent = 0.0
    for _ in range(50):
        before, sent = sent, max(played, trained) + phases["sync"]
        played, trained = sent + phases["rollout"], sent + training
    assert sent - before == pytest.approx(phases["step"])
    assert (phases["rollout"] > training) == (samples == 16), "either side may be the slower"
    together = published_steps.rl_phases(H100, published(rollout_gpus=0), TrainingLayout(dp=4))
    assert together["step"] > sum(time for name, time in together.items() if name != "step")


def test_the_head_computes_labels_and_a_reference_is_copied() -> None:
    shape = shape_of("Qwen2.5-0.5B")
    common = {"tokens": 4096, "length": 4096, "micros": 2}
    every, half = (
        passes(H100, shape, TrainingLayout(), **common, labels=n)["LM head"] for n in (1.0, 0.5)
    )
    assert 0.49 < half / every < 0.52
    config = parse(["--bf16", "--kl-kind", "k3", "--kl-coef", "0.1", "--updates-per-rollout", "2"])
    phases = step_seconds(H100, shape, config, 1, default_play(config))
    copied = 3 * 2 * shape.num_parameters / H100.host_link
    extra = sum(phases["reference"].values()) - sum(phases["old log-probabilities"].values())
    assert extra == pytest.approx(copied, rel=1e-3)


def test_lengths_have_their_mean_and_limit() -> None:
    play = Play(1, 100, 200, 400)
    lengths = sampled_lengths(play, 97)
    assert sum(lengths) / 97 == pytest.approx(200, rel=1e-3) and max(lengths) == 400
    assert sampled_lengths(Play(1, 100, 400, 400), 5) == pytest.approx([400.0] * 5, rel=0.01)
    many = sampled_lengths(Play(16, 100, 200), 97)  # turns that differ even each other out
    assert sum(many) / 97 == pytest.approx(16 * 200) and many[-1] / many[0] < 2


def slow_rollout(
    machine: Machine, shape: ModelShape, play: Play, sessions: int, at_once: int
) -> float:
    """Token by token: every step samples one token for each trajectory that is not with its
    environment; `at_once` have begun and not ended.
    """
    per_token = (
        2
        * shape.num_layers
        * shape.active_size
        / (machine.constants.product * machine.hardware.bf16)
    )
    lengths = sampled_lengths(play, sessions)
    random.Random(0).shuffle(lengths)
    left = [[math.ceil(one / play.turns)] * play.turns for one in lengths]
    ready, context, busy, now = [0.0] * sessions, [0.0] * sessions, [False] * sessions, 0.0
    while any(left):
        begun = [i for i in range(sessions) if left[i]][:at_once]  # in order, as others end
        for i in begun:
            if not busy[i] and ready[i] <= now:
                busy[i], context[i] = True, context[i] + play.prompt_tokens
                now += play.prompt_tokens * per_token
        batch = [i for i in begun if busy[i]]
        if not batch:
            now = min(ready[i] for i in begun)
            continue
        held = sum(context[i] for i in batch) / len(batch)
        now += sum(decode_step(machine, shape, tp=1, batch=len(batch), context=held).values())
        for i in batch:
            context[i] += 1
            left[i][0] -= 1
            if left[i][0] == 0:
                left[i].pop(0)
                busy[i], ready[i] = False, now + play.environment_seconds
    return now


@pytest.mark.parametrize("latency", [0.0, 0.05, 5.0])
@pytest.mark.parametrize("turns", [1, 4])
@pytest.mark.parametrize("at_once", [3, 12])
def test_a_rollout_is_about_what_playing_token_by_token_takes(
    latency: float, turns: int, at_once: int
) -> None:
    shape = shape_of("Qwen2.5-0.5B")
    play = Play(turns, 150, 60, 240, environment_seconds=latency)
    room = play.text_length * at_once
    terms = rollout(H100, shape, play, sessions=12, room=room)
    slow = slow_rollout(H100, shape, play, 12, at_once)
    assert sum(terms.values()) == pytest.approx(slow, rel=0.2)


def test_keys_and_values_grow_with_the_text() -> None:
    """Where these are what an engine waits for, it takes as long as token by token."""
    machine = Machine(H100.hardware, replace(H100.constants, decode_memory=0.02))
    shape, play = shape_of("Qwen2.5-0.5B"), Play(1, 20, 2000, 2000)
    terms = rollout(machine, shape, play, sessions=32)
    assert terms["reading keys and values"] > 0.2 * sum(terms.values())
    slow = slow_rollout(machine, shape, play, 32, 32)
    assert sum(terms.values()) == pytest.approx(slow, rel=0.01)


def test_a_window_that_slides_is_read_and_trained_on_as_so_many_short_trajectories() -> None:
    """Seven turns of which two are seen are six texts of two turns."""
    shape = shape_of("Qwen2.5-0.5B")
    base = ["--bf16", "--filter-strategy", "none", "--max-context-length", "1000"]
    base += ["--max-response-length", "100", "--minibatch-size", "16"]
    slides = parse([*base, "--num-groups", "4", "--max-turns", "7", "--context-window", "2"])
    texts = ["--num-groups", "24", "--max-turns", "2"]
    short = parse([*base, *texts, "--minibatch-size", "96"])
    assert default_play(slides).text_length == default_play(short).length == 900
    assert default_play(replace(slides, rollout=replace(slides.rollout, context_window=7))) == (
        replace(default_play(parse([*base, "--max-turns", "7"])), window=7)
    )
    found, wanted = (
        step_seconds(H100, shape, one, 1, default_play(one)) for one in (slides, short)
    )
    for phase in ("values", "update actor", "update critic"):
        for term in ("matrix products", "attention", "element-wise"):
            assert found[phase][term] == pytest.approx(wanted[phase][term])
    # of the twelve answers in these texts seven were sampled there, and those are labels
    play = default_play(slides)
    assert play.sampled / default_play(short).sampled == pytest.approx(7 / 2)
    assert found["update actor"]["LM head"] < 0.7 * wanted["update actor"]["LM head"]
    # the engine reads two turns, and five times two turns and the answer between them
    per_token = (
        2 * shape.num_layers * shape.active_size / (H100.constants.product * H100.hardware.bf16)
    )
    read = (2 * 400 + 5 * (2 * 400 + 50)) * 64 * per_token
    assert found["rollout"]["prompts"] == pytest.approx(read, rel=0.01)


def test_a_tail_costs_time_and_more_gpus_save_it() -> None:
    shape = shape_of("Qwen2.5-7B")
    even = Play(4, 200, 200, 800, spread=0.0)

    def seconds(play: Play, **changes: object) -> float:
        return sum(rollout(H100, shape, play, sessions=64, **changes).values())

    assert seconds(replace(even, spread=0.8)) > 1.1 * seconds(even)
    assert seconds(even, tp=2) < seconds(even) and seconds(even, fp8=True) < seconds(even)


def test_a_step_has_the_passes_of_its_algorithm() -> None:
    shape = shape_of("Qwen2.5-7B")
    base = ["--bf16", "--rollout-engine", "sglang", "--use-distributed-optimizer"]

    def phases(*flags: str) -> dict[str, dict[str, float]]:
        config = parse([*base, *flags])
        return step_seconds(H100, shape, config, 8, default_play(config))

    plain = phases()
    assert {"values", "update critic", "update actor", "sync", "rollout"} <= plain.keys()
    assert "reference" not in plain and "offload" not in plain
    assert "values" not in phases("--advantage-estimator", "grpo")
    assert "reference" in phases("--kl-kind", "k3", "--kl-coef", "0.001")
    assert "old log-probabilities" in phases("--old-logprobs", "recompute")
    often = ["--updates-per-rollout", "2"]
    assert "old log-probabilities" in phases(*often), "SGLang's are not the trainer's"
    assert "old log-probabilities" not in phases(*often, "--old-logprobs", "engine")
    assert sum(phases("--offload", "rollout")["offload"].values()) > 0
    twice = phases("--updates-per-rollout", "2")["update actor"]["matrix products"]
    assert twice == pytest.approx(2 * plain["update actor"]["matrix products"])
    whole = phases("--filter-strategy", "none")["update actor"]["matrix products"]
    assert whole == pytest.approx(4 * plain["update actor"]["matrix products"], rel=0.02)
    wide = phases("--rollout-tensor-parallel-size", "2")["rollout"]["reading weights"]
    assert wide < plain["rollout"]["reading weights"]
    tokens = 8 * 16 * 5 * (320 + 200)  # of all trajectories, whatever the filter keeps
    assert plain["other"]["overhead"] == pytest.approx(H100.constants.overhead * tokens)


def test_adapters_spare_the_gradients_of_what_is_frozen() -> None:
    """By hand: rank 8 beside the attention of a 7B, on two tensor-parallel ranks of eight."""
    shape = shape_of("Qwen2.5-7B")
    base = "--recipe none --bf16 --rollout-engine sglang --tensor-model-parallel-size 2".split()
    base += "--rollout-tensor-parallel-size 2 --kl-kind k3 --kl-coef 0.1".split()

    def phases(*flags: str) -> dict[str, dict[str, float]]:
        config = parse([*base, *flags])
        return step_seconds(H100, shape, config, 8, default_play(config))

    full, small = phases(), phases(*"--lora-rank 8 --lora-targets attention".split())
    update, before = small["update actor"], full["update actor"]
    assert update["matrix products"] == pytest.approx(2 / 3 * before["matrix products"])
    assert update["LM head"] == pytest.approx(2 / 3 * before["LM head"])
    assert update["attention"] == before["attention"]
    # A of q, k and v is whole, B has half of the rows; A of the projection has half of the columns
    held = 28 * 8 * (3 * 3584 + 2304 + 1792 + 3584)
    assert sum(a.elements for a in adapters_of(shape, base)) * 28 == held
    adam = ADAM_BYTES * held / 4 / H100.memory + H100.constants.update
    assert update["optimizer"] == pytest.approx(adam)
    copied = small["reference"].get("host link", 0.0), full["reference"]["host link"]
    assert copied[0] == 0.0 < copied[1]
    assert small["sync"] == full["sync"]
    sent = phases(*"--lora-rank 8 --lora-targets attention --lora-sync adapter".split())
    whole = 4 * 28 * 8 * (3 * 3584 + 3584 + 2 * 512 + 2 * 3584)
    assert sent["sync"]["weights into engine"] == pytest.approx(whole / H100.constants.sync)
    assert sent["rollout"]["prompts"] > 1.5 * small["rollout"]["prompts"]
    every = phases("--lora-rank", "8")["update actor"]
    assert 1 < every["adapters"] / update["adapters"] < 40


def adapters_of(shape: ModelShape, flags: list[str]) -> list[AdapterSizes]:
    config = parse([*flags, *"--lora-rank 8 --lora-targets attention".split()])
    return [*adapter_sizes(shape, Setting.from_config(config, 8))]


def test_adapters_of_experts_count_those_of_a_rank() -> None:
    shape = shape_of("Qwen3-30B-A3B")
    flags = "--recipe none --bf16 --lora-rank 4 --expert-model-parallel-size 4".split()
    setting = Setting.from_config(parse(flags), 4)
    found = sum(adapter.elements for adapter in adapter_sizes(shape, setting)) * shape.num_layers
    state = state_of(shape, setting, 0, is_critic=False)
    assert found == state.parameters / 4


@pytest.mark.parametrize("minibatch", [48, 80, 100, 500])
def test_updates_go_once_over_what_is_trained_whatever_a_minibatch_holds(minibatch: int) -> None:
    """The trainer's own division of 128 trajectories, none of which counts twice."""
    flags = "--bf16 --filter-strategy top_p_softmax --filter-value 0.9".split()
    flags += ["--advantage-estimator", "grpo"]

    def update(size: int) -> dict[str, float]:
        config = parse([*flags, "--minibatch-size", f"{size}"])
        return step_seconds(H100, shape_of("Qwen2.5-7B"), config, 1, default_play(config))[
            "update actor"
        ]

    found, whole = update(minibatch), update(128)
    assert found["attention"] == pytest.approx(whole["attention"])
    sizes = [len(ids) for ids in minibatch_ids(128, minibatch, 1, torch.Generator())]
    assert found["optimizer"] == pytest.approx(len(sizes) * whole["optimizer"])


@pytest.mark.parametrize("seconds", [0.0, 2.0, 20.0])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize(("engine", "senders"), [("sglang", 1), ("sglang", 3), ("embedded", 1)])
def test_ranks_apart_take_what_their_events_take(
    seconds: float, staleness: int, engine: str, senders: int
) -> None:
    """Two ranks that sample and six that train, played step by step as the schedule says: the
    weights leave after a step, over one connection or when a rollout fetches them, and a rollout
    waits for the weights of `staleness` steps ago.
    """
    shape = shape_of("Qwen2.5-1.5B")
    base = ["--bf16", "--rollout-engine", engine, "--importance-cap", "2"]
    base += ["--filter-strategy", "none", "--updates-per-rollout", "8"]
    apart = ["--placement", "separate", "--rollout-ranks", "2", "--max-staleness", f"{staleness}"]
    apart += ["--weight-senders", f"{senders}"] if senders > 1 else []

    def phases(ranks: int, *flags: str) -> dict[str, dict[str, float]]:
        config = parse([*base, *flags])
        play = default_play(config, environment_seconds=seconds)
        return step_seconds(H100, shape, config, ranks, play)

    whole = shape.engine_weights(2, 1)
    is_fetched = engine == "sglang"
    passed, sending = whole / (senders * BROADCAST if is_fetched else CONNECTION), 0.0
    share = whole // senders
    copied = {"copy on the device": 2 * share / H100.hardware.memory, "copy to the host": 0.0}
    if not is_fetched:
        sending = passed
        copied = {"copy on the device": 0.0, "copy to the host": whole / H100.host_link}
    sampling = sum(phases(2)["rollout"].values()) + passed + whole / H100.constants.sync
    found = phases(8, *apart)
    own = total({name: terms for name, terms in found.items() if name != "rollout"})
    assert found["sync"] == copied
    # when each rollout ends, each step with its copy, and when its weights have arrived
    played, sent, arrived = [], [0.0], [sending]
    for step in range(400):
        begun = max(arrived[max(0, step - staleness)], played[-1] if played else 0.0)
        played.append(begun + sampling)
        sent.append(max(played[-1], sent[-1]) + own)
        arrived.append(max(sent[-1], arrived[-1]) + sending)
    step = (sent[-1] - sent[200]) / 200
    assert total(found) == pytest.approx(step, rel=1e-6)
    config = parse([*base, *apart])
    sampled = sampling_terms(
        H100, shape, config, 8, default_play(config, environment_seconds=seconds)
    )
    predicted = shares(ranks_usage(found, sampled, config, 8))
    idle = {"samples": 6 * (step - own), "weights": 2 * (step - sampling)}
    for cause, waited in idle.items():
        assert predicted[f"waiting_{cause}"] == pytest.approx(waited / 8 / step, abs=1e-6)
    assert predicted["rollout"] == pytest.approx(2 * sampling / 8 / step, rel=1e-6)
    assert sum(predicted.values()) == pytest.approx(1.0)


def test_the_constants_are_those_that_the_published_rows_give() -> None:
    fitted = published_steps.fit(published_steps.read_points())
    for one in fields(Constants):
        assert getattr(fitted, one.name) == pytest.approx(getattr(Constants(), one.name), rel=0.03)


def test_the_page_has_the_errors_of_the_judging_rows() -> None:
    result = published_steps.report()
    lines = published_steps.markdown(result).partition("\n\n")[0].splitlines()
    assert len(lines) == 8 and all(line in PAGE.read_text() for line in lines)
    assert result["groups"]["decode, dense"]["median_error"] <= 0.10
    assert result["groups"]["training, dense"]["median_error"] <= 0.20


def test_an_interval_holds_four_of_five_numbers_that_nothing_was_fitted_on() -> None:
    low, high = published_steps.interval()
    assert pytest.approx((low, high), rel=1e-3) == INTERVAL
    found = [
        point.measured / published_steps.predicted(point, Constants())
        for point in published_steps.read_points()
        if point.kind == "rl" and not point.is_fitted
    ]
    inside = sum(0.999999 * low <= times <= 1.000001 * high for times in found)
    assert len(found) >= 20 and 0.8 <= inside / len(found) < 0.9


def test_every_constant_matters() -> None:
    """None is in the fit for nothing: another value changes some prediction."""
    points = published_steps.read_points()
    before = [published_steps.predicted(point, Constants()) for point in points]
    for one in fields(Constants):
        changed = replace(Constants(), **{one.name: 0.97 * getattr(Constants(), one.name)})
        after = [published_steps.predicted(point, changed) for point in points]
        assert after != before, one.name


def test_a_fit_finds_the_constants_that_made_its_numbers() -> None:
    true = replace(
        published_steps.USUAL, product=0.7, memory=0.7, decode_memory=0.65, decode_sequence=60e-6
    )
    points = published_steps.read_points()
    made = [replace(point, measured=published_steps.predicted(point, true)) for point in points]
    random.Random(0).shuffle(made)
    found = published_steps.fit(made)
    for name in ("product", "memory", "decode_memory", "decode_sequence"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.1)


def test_one_command_says_what_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cost.json"
    words = ("--model", "Qwen2.5-14B", "--num-gpus", "16", "--dollars-per-gpu-hour", "2")
    code, said = run_plan(capsys, *words, "--json", str(out))
    cost = json.loads(out.read_text())["cost"]
    total = sum(sum(terms.values()) for terms in cost["phases_seconds"].values())
    assert code == 0 and cost["seconds"] == pytest.approx(total)
    assert cost["dollars"] == pytest.approx(100 * total * 16 / 3600 * 2)
    (low, high), (least, most) = cost["interval_seconds"], cost["interval"]
    assert (low, high) == (pytest.approx(least * total), pytest.approx(most * total))
    assert f"expect {low:.1f} to {high:.1f} s" in said
    assert f"published numbers were {least:.2g} to {most:.2g} times" in said
    spent = {phase: sum(terms.values()) for phase, terms in cost["phases_seconds"].items()}
    assert cost["bound_by"]["phase"] == max(spent, key=spent.get)
    assert re.search(r"^100 steps cost \d+\.\d H100 hours, \d+ \$ at 2\.00 \$", said, re.M)
    assert "bound by: " in said and "what would help next: " in said
    assert "of 5 turns and 2600 tokens, 1000 of them sampled: 332800 tokens a step" in said
    assert (
        "top_fraction keeps 32 trajectories, trained on once (gae) in bfloat16 with matrix" in said
    )
    assert cost["workload"]["tokens"] == 8 * 16 * 5 * (320 + 200)
    seconds = [saved for _, saved in cost["helps"]]
    assert seconds == sorted(seconds, reverse=True) and all(0 < one < total for one in seconds)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--hardware", "H9000"), "--hardware must be one of A100"),
        (("--hardware", "missing.json"), "missing.json"),
        (("--num-gpus", "0"), "--num-gpus must be .*, not 0"),
        (("--dollars-per-gpu-hour", "-1"), "--dollars-per-gpu-hour must be .*, not -1"),
        (("--response-tokens", "nan"), "--response-tokens must be .*, not nan"),
        (("--environment-seconds", "-1"), "--environment-seconds must be .*, not -1"),
        (
            ("--num-gpus", "32", "--response-tokens", "5000"),
            r"--response-tokens \(5000\) .*--max-response-length \(400\)",
        ),
        (
            ("--tensor-model-parallel-size", "3", "--num-gpus", "32"),
            r"tensor_model_parallel_size \(3\) x .* must divide",
        ),
        (
            ("--rollout-tensor-parallel-size", "3", "--num-gpus", "3"),
            r"rollout_tensor_parallel_size \(3\) .*attention heads \(64\)",
        ),
        (
            ("--hardware", "A100", "--bf16", "--fp8", "hybrid", "--rollout-engine", "sglang"),
            "FP8, and --hardware A100 .*drop",
        ),
    ],
)
def test_bad_input(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run_plan(capsys, "--model", "Qwen2.5-72B", *flags)
    assert code == 2 and re.search(message, said) and said.count("\n") == 1


def test_advice_fits_with_what_is_shared() -> None:
    """Transformer Engine gets every trajectory's keys and values, which take further memory: a GPU
    with room for the advice without them alone.
    """
    shape = shape_of("Qwen2.5-1.5B")
    config = parse(["--bf16", "--rollout-engine", "sglang", "--recompute", "full"])
    better = replace(config, parallel=replace(config.parallel, recompute="none"))

    def peak(sharing: float) -> float:
        phases = plan(shape, Setting.from_config(better, 1, sharing=sharing))
        return max(sum(terms.values()) for terms in phases.values()) / GIB

    def advised(capacity: float) -> list[str]:
        play = default_play(config, 32, sharing=4.0)  # updates take most of the step
        room = Capacity(capacity * GIB)
        return [name for name, _ in cost.advice(H100, shape, config, 1, play, room)]

    assert "--recompute none" in advised(peak(4.0))
    assert peak(1.0) < peak(4.0) and "--recompute none" not in advised(peak(1.0))


def test_utilisation_counts_what_is_computed() -> None:
    """Tokens that are shared need no operations, and no GPU exceeds what
    its products reach.
    """
    shape = shape_of("Qwen2.5-14B")
    flags = "--bf16 --filter-strategy none --num-groups 64 --minibatch-size 1024".split()
    config = parse(flags)
    for sharing in (1.0, 8.0):
        play = default_play(config, sharing=sharing)
        told = cost.cost(H100, shape, config, 8, play, 1.0)
        layers = (
            6 * shape.num_layers * shape.active_size
            + 6 * shape.num_layers * shape.num_heads * 128 * play.length
        )
        head = 6 * shape.head_size * play.sampled
        flops = 1024 * (layers * play.length / sharing + head)
        seconds = sum(told["phases_seconds"]["update actor"].values())
        assert told["update_mfu"] == pytest.approx(flops / seconds / 8 / 989.4e12)
        assert told["update_mfu"] < H100.constants.product
    in_fp8 = replace(config, parallel=replace(config.parallel, fp8="hybrid"))
    for one, name, peak in ((config, "bfloat16", 989.4e12), (in_fp8, "FP8", 1978.9e12)):
        told = cost.cost(H100, shape, one, 8, play, 1.0)
        seconds = sum(told["phases_seconds"]["update actor"].values())
        done = 1024 * (layers * play.length / (8.0 if one is config else 1.0) + head)
        assert told["mfu_of"] == name
        assert told["update_mfu"] == pytest.approx(done / seconds / 8 / peak)


@pytest.mark.parametrize(
    ("flags", "turns", "length"),
    [
        ("--max-context-length 3600", 5, 5 * (320 + 200)),
        ("--max-turns 20 --max-context-length 3600", 15, 15 * (32 + 200)),
        ("--max-context-length 1000", 4, 4 * (32 + 200)),
        ("--max-context-length 401", 1, 32 + 200),
        # a window that never fills does not slide, one that does has no end
        ("--max-turns 20 --max-context-length 1000 --context-window 5", 4, 4 * (32 + 200)),
        ("--max-turns 20 --max-context-length 1000 --context-window 4", 20, 17 * 4 * (32 + 200)),
    ],
)
def test_what_is_played_fits_the_context(flags: str, turns: int, length: float) -> None:
    config = parse(["--max-response-length", "400", *flags.split()])
    play = default_play(config)
    assert play.text_length <= config.rollout.max_context_length
    assert (play.turns, play.length) == (turns, length)
    whole = default_play(parse(["--max-turns", "7", "--max-context-length", "3601"]), 400)
    assert whole.turns == 7, "answers at the limit fill the context to the last turn"


@pytest.mark.parametrize(
    "flags",
    [
        ("--critic-warmup", "5"),
        ("--critic-load", "somewhere"),
        ("--kl-in-reward", "k1", "--kl-reward-coef", "0.1"),
        ("--transformer-impl", "local"),
        ("--shared-prefixes", "on"),
    ],
)
def test_advice_keeps_to_the_rules(flags: tuple[str, ...]) -> None:
    config = parse(["--bf16", "--rollout-engine", "sglang", *flags])
    found = cost.changes(config, H100)
    assert found and len(found) < len(
        cost.changes(parse(["--bf16", "--rollout-engine", "sglang"]), H100)
    )


def test_full_precision_is_advised_to_be_halved() -> None:
    config = parse(["--rollout-engine", "sglang"])
    assert cost.changes(config, H100)["--bf16"].parallel.bf16
    assert "--bf16" not in cost.changes(parse(["--bf16"]), H100)


@pytest.mark.parametrize("change", [{"bf16": None}, {"memory": 0}, {"node": 0}, {"nvlink": -1}])
def test_hardware_that_cannot_be_is_refused(
    change: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    values = asdict(HARDWARE["H100"]) | change
    path.write_text(json.dumps(values))
    code, said = run_plan(capsys, "--model", "Qwen2.5-0.5B", "--hardware", str(path))
    assert code == 2 and f"{next(iter(change))} of hardware H100" in said
    assert said.count("\n") == 1
