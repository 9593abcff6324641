"""The predictor of time: by hand, by brute force, and against published steps."""

import json
import math
import random
import re
import statistics
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

from ragen_mega.config import parse
from ragen_mega.data.packing import minibatch_ids
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning import calibration, cost, validation
from ragen_mega.planning.hardware import HARDWARE, Constants, Machine
from ragen_mega.planning.memory import GIB, Setting, plan
from ragen_mega.planning.published import model_config
from ragen_mega.planning.time import (
    BF16,
    Play,
    Sizes,
    TrainingLayout,
    decode_step,
    default_play,
    gradients,
    idle_share,
    layer,
    passes,
    rollout,
    step_seconds,
    training,
    turn_lengths,
)
from ragen_mega.warm_start.small_model import small_model
from tests.support.plan_command import run_plan

H100 = Machine(HARDWARE["H100"])
ROOT = Path(__file__).parents[2]


def shape_of(name: str) -> ModelShape:
    return ModelShape.of(model_config(name))


def test_flops_of_a_token_are_the_published_ratio() -> None:
    """512.7 TFLOP/s a GPU at 10,456 tokens/s a GPU: 49.0 GFLOP."""
    flops = Sizes.of(shape_of("Qwen3-8B")).flops(4096)
    assert flops == pytest.approx(512.7e12 / 10456, rel=2e-3)
    assert flops == pytest.approx(49.0e9, rel=1e-3)


def test_sizes_count_what_the_shape_counts() -> None:
    """But for norms and biases, which are no products."""
    for name in ("Qwen2.5-0.5B", "Qwen3-8B", "Qwen2.5-72B"):
        shape = shape_of(name)
        assert Sizes.of(shape).total == pytest.approx(shape.num_parameters, rel=1e-3)
        assert Sizes.of(shape).active == shape.num_layers * sum(shape.linear_sizes())


def test_the_terms_of_a_layer_by_hand() -> None:
    constants = Constants(product=0.5, tile=1, attention=0.25, memory=0.5, link=0.5, latency=1e-6)
    machine = Machine(HARDWARE["H100"], constants)
    shape = shape_of("Qwen2.5-7B")
    terms = layer(machine, Sizes.of(shape), TrainingLayout(tp=2), 4096, 2048)
    # queries with keys and values, their projection, gate with up, down: each reads its input once
    products = ((3584, 1792 + 2 * 256), (1792, 3584), (3584, 2 * 9472), (9472, 3584))
    assert sum(inner * columns for inner, columns in products) == sum(shape.linear_sizes(2))
    seconds = sum(
        2 * 4096 * (inner + 1) * columns / 494.7e12  # with a tile's element
        + 2 * (4096 * (inner + columns) + inner * columns) / (0.5 * 3.35e12)
        for inner, columns in products
    )
    assert terms["matrix products"] == pytest.approx(seconds)
    assert terms["attention"] == pytest.approx(2 * 4096 * 2048 * 1792 / (0.25 * 989.4e12))
    reduced = 2 * 2 * (1 / 2) * 4096 * 3584 * 2 / 225e9  # two all-reduces on a ring of two
    assert terms["tensor parallelism"] == pytest.approx(reduced + 4e-6)
    assert terms["expert parallelism"] == terms["context parallelism"] == 0


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_rank_of_the_last_block_attends_to_most(cp: int) -> None:
    """Pairs counted one by one. Megatron deals early and late blocks, programs with FSDP do not."""
    sizes, length = Sizes.of(shape_of("Qwen2.5-7B")), 256
    of_rank = length // cp
    pairs = [sum(range(first + 1, first + of_rank + 1)) for first in range(0, length, of_rank)]
    plain, dealt, even = (
        layer(H100, sizes, cut, 1 << 20, 1 << 20)
        for cut in (TrainingLayout(), TrainingLayout(cp=cp), TrainingLayout(cp=cp, is_fsdp=True))
    )
    assert dealt["attention"] == pytest.approx(plain["attention"] / cp)
    assert even["attention"] / plain["attention"] == pytest.approx(
        max(pairs) / sum(pairs), rel=1 / of_rank
    )
    # every rank waits for each block of the others, however much it computes meanwhile
    ring = 2 * 512 * (1 << 20) / cp * 2 * (cp - 1) / H100.link(cp)
    reached = H100.constants
    seen = reached.exposed * ring + (cp - 1) * reached.latency
    assert dealt["context parallelism"] == pytest.approx(seen)


def test_a_stage_of_a_pipeline_gathers_its_weights_once() -> None:
    """Whatever its microbatches: it keeps them until the last one has gone back."""
    sizes = replace(Sizes.of(shape_of("Qwen2.5-32B")), vocab_size=1)

    def gathered(micros: int, **cut: int) -> float:
        terms = training(
            H100, sizes, TrainingLayout(is_fsdp=True, **cut), tokens=1, length=1, micros=micros
        )
        return terms["data parallelism"]

    assert gathered(8, dp=8) == pytest.approx(8 * gathered(1, dp=8), rel=0.05)
    assert gathered(64, dp=8, pp=2) < 1.2 * gathered(8, dp=8, pp=2)
    assert gathered(1, dp=2, cp=4) == pytest.approx(gathered(1, dp=8), rel=0.05)


def test_experts_stay_where_they_are() -> None:
    """FSDP gathers an expert only among the ranks that hold it, and tokens go to as many nodes as
    the experts lie on, whatever the tensor parallelism beside it.
    """
    sizes = Sizes(48, 2048, 32, 4, 128, 768, 151936, num_experts=128, experts_per_token=8)

    def gathered(ep: int) -> float:
        cut = TrainingLayout(dp=8, ep=ep, is_fsdp=True)
        terms = training(H100, sizes, cut, tokens=1, length=1, micros=1, trained=0.0)
        return terms["data parallelism"] / H100.constants.exposed * H100.link(8)

    experts = sizes.num_layers * sizes.num_experts * sizes.expert_weights
    dense = 2 * BF16 * (sizes.total - experts) * 7 / 8
    assert gathered(8) == pytest.approx(dense)
    assert gathered(2) == pytest.approx(dense + 2 * BF16 * experts / 2 * 3 / 4)
    sent = [
        layer(H100, sizes, TrainingLayout(tp=tp, dp=16 // tp, ep=16), 4096 * tp, 4096)[
            "expert parallelism"
        ]
        for tp in (1, 2)
    ]
    assert sent[0] == pytest.approx(sent[1])


def test_tokens_are_exchanged_over_both_links_at_once() -> None:
    """By hand, and the places that the experts of tokens lie on by drawing them."""
    sizes = Sizes(48, 2048, 32, 4, 128, 768, 151936, num_experts=128, experts_per_token=8)
    draw, tokens = random.Random(0), 4096
    chosen = [draw.sample(range(128), 8) for _ in range(4000)]

    def others(places: int) -> float:
        """Places other than a token's own that it needs."""
        met = (len({expert // (128 // places) for expert in one} - {0}) for one in chosen)
        return sum(met) / len(chosen)

    for ep in (8, 32):
        found = layer(H100, sizes, TrainingLayout(dp=ep, ep=ep), tokens, 4096)["expert parallelism"]
        within = others(ep) * tokens * 2048 * 2 / H100.link(8)
        between = (others(4) if ep == 32 else 0) * tokens * 2048 * 2 / H100.link(32)
        assert (between > within) == (ep == 32), "either link may be the slower"
        rounds = math.ceil(ep / 8) * H100.constants.latency
        seconds = 2 * (max(between, within) + rounds)  # there and back
        assert found == pytest.approx(seconds, rel=0.02)
    copied = layer(H100, sizes, TrainingLayout(dp=32, ep=32, copies=True), tokens, 4096)[
        "expert parallelism"
    ]
    between = 8 * 3 / 4 * tokens * 2048 * 2 / H100.link(32)  # to other nodes, for each expert
    assert copied == pytest.approx(2 * between + 8 * H100.constants.latency)


@pytest.mark.parametrize(
    ("layers", "stages", "held"),
    [  # of the recipes of Qwen3-235B and DeepSeek-V3 in NeMo-RL: fewer on the first and the last
        (94, 8, [11, 12, 12, 12, 12, 12, 12, 11]),
        (94, 4, [23, 24, 24, 23]),
        (61, 16, [3, *[4] * 14, 2]),
        (64, 4, [16] * 4),
    ],
)
def test_a_pipeline_waits_for_its_slowest_stage(layers: int, stages: int, held: list[int]) -> None:
    assert sum(held) == layers
    sizes = Sizes(layers, 4096, 32, 8, 128, 12288, 64000)
    common = {"tokens": 8192, "length": 4096, "micros": 32}
    one = passes(H100, replace(sizes, num_layers=1), TrainingLayout(), **common)
    last = one["LM head"]
    terms = passes(H100, sizes, TrainingLayout(pp=stages), **common)
    of_layer = sum(one.values()) - last
    slowest = max(of_layer * max(held), of_layer * held[-1] + last)
    own = sum(terms.values()) - terms["pipeline bubble"] - terms["pipeline transfers"]
    assert own == pytest.approx(slowest)


def test_gradients_and_parameters_travel_beside_passes() -> None:
    """By hand: a ring of 32 ranks on four nodes, each with its card."""
    sizes = Sizes.of(shape_of("Qwen2.5-7B"))
    held = sizes.total  # of a rank: tensor and pipeline parallelism are 1
    ring = 31 / 32 * held / H100.link(32, 1)
    reduced, gathered = 4 * ring, 2 * ring

    def seen(hidden: float) -> float:
        return gradients(H100, sizes, TrainingLayout(dp=32), hidden)["data parallelism"]

    assert seen(0.0) == pytest.approx(reduced + gathered)
    assert seen(1e3) == pytest.approx(H100.constants.exposed * (reduced + gathered))
    half = 0.75 * reduced  # a backward pass of half the reduction, a forward pass of half of that
    assert seen(half) == pytest.approx(reduced / 2 + gathered - reduced / 4)
    slow = Machine(replace(H100.hardware, network=1e9), H100.constants)
    chunks, plain = (
        training(
            slow, sizes, TrainingLayout(pp=4, dp=64, vp=vp), tokens=4096, length=4096, micros=8
        )
        for vp in (7, 1)
    )
    for terms, beside in ((chunks, 4), (plain, 1)):  # microbatches that hide it: of every stage
        work = sum(terms.values()) - terms["data parallelism"] - terms["optimizer"]
        seconds = gradients(slow, sizes, TrainingLayout(pp=4, dp=64), work / 8 * beside)[
            "data parallelism"
        ]
        assert terms["data parallelism"] == pytest.approx(seconds)
    assert chunks["pipeline transfers"] == pytest.approx(
        7 * H100.constants.exposed * plain["pipeline transfers"]
    )


def test_the_terms_of_a_decode_step_by_hand() -> None:
    """Llama-8B, whose published step on eight A100 a model without all-reduces misses by 70%."""
    sizes = Sizes(32, 4096, 32, 8, 128, 14336, 128256)
    constants = Constants(
        decode_memory=0.5, decode_host=1e-3, decode_layer=1e-5, decode_reduce=2e-5,
        decode_sequence=1e-6, decode_product=0.25, link=0.5,
    )  # fmt: skip
    machine = Machine(HARDWARE["A100"], constants)
    read = 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336) + 128256 * 4096
    found = decode_step(machine, sizes, tp=8, batch=4, context=100)
    assert found[0] == pytest.approx(2 * read / 8 / (0.5 * 2.039e12) + 1e-3 + 32e-5)
    assert found[1] == pytest.approx(4 * 100 * 2 * 32 * 128 * 2 / (0.5 * 2.039e12))
    assert found[2] == pytest.approx(4 * (1e-6 + 2 * read / 8 / (0.25 * 312e12)))
    sent = 2 * 7 / 8 * 4 * 4096 * 2 / 150e9  # a ring of eight
    assert found[3] == pytest.approx(32 * 2 * (2e-5 + sent))
    assert decode_step(machine, sizes, tp=1, batch=4, context=100)[3] == 0
    far = decode_step(machine, sizes, tp=16, batch=4, context=100)[3]
    sent = 2 * 15 / 16 * 4 * 4096 * 2 / 12.5e9
    assert far == pytest.approx(32 * 2 * (3 * 2e-5 + sent))  # within, between, within nodes
    mixture = replace(sizes, num_experts=16, experts_per_token=2)
    share = replace(constants, routing=1.0, decode_expert=0.5, decode_routed=0.125)
    other = decode_step(Machine(HARDWARE["A100"], share), mixture, tp=1, batch=1, context=0)
    experts = 32 * 2 * 3 * 4096 * 14336  # two of sixteen are read, and are all that is computed
    around = 32 * 2 * 4096 * 128 * 40 + 128256 * 4096
    assert other[0] == pytest.approx(2 * (around + experts / 0.5) / (0.5 * 2.039e12) + 132e-5)
    assert other[2] == pytest.approx(1e-6 + 2 * (around / 0.25 + experts / 0.125) / 312e12)


@pytest.mark.parametrize("ep", [1, 4, 8])
@pytest.mark.parametrize("batch", [4, 16, 64])
def test_an_engine_waits_for_the_busiest_of_its_gpus(batch: int, ep: int) -> None:
    """Experts of 128 that tokens draw, drawn: those of the GPU that has to read most of them, and
    the products of the GPU that gets most tokens.
    """
    draw, sizes = random.Random(0), Sizes(48, 2048, 32, 4, 128, 768, 151936, False, 128, 8)
    reads, tokens = [], []
    for _ in range(400):
        chosen = [expert for _ in range(batch) for expert in draw.sample(range(128), 8)]
        owners = [expert * ep // 128 for expert in set(chosen)]
        reads.append(max(owners.count(rank) for rank in range(ep)) * ep)
        owners = [expert * ep // 128 for expert in chosen]
        tokens.append(max(owners.count(rank) for rank in range(ep)) * ep / len(owners))
    free = {"decode_host": 0.0, "decode_layer": 1e-6, "decode_sequence": 1e-7, "routing": 1.0}
    machine = Machine(HARDWARE["H100"], replace(Constants(), **free))
    fixed, _, routed, _ = decode_step(machine, sizes, tp=8, ep=ep, batch=batch, context=0)
    reached = machine.constants
    around = 48 * sizes.attention_weights + sizes.head
    read = 48 * sum(reads) / len(reads) * sizes.expert_weights / reached.decode_expert
    wanted = 2 * (around + read) / 8 / (reached.decode_memory * 3.35e12) + 48e-6
    assert fixed == pytest.approx(wanted, rel=0.05)
    most = sum(tokens) / len(tokens) * 48 * 8 * sizes.expert_weights / reached.decode_routed
    wanted = batch * (1e-7 + 2 * (around / reached.decode_product + most) / 8 / 989.4e12)
    assert routed == pytest.approx(wanted, rel=0.08)


def published(**changes: object) -> validation.Point:
    """A step of reinforcement learning on ranks that sample and ranks that train."""
    (sizes, row) = Sizes.of(shape_of("Qwen2.5-1.5B")), {
        "id": "one", "model": "Qwen2.5-1.5B", "gpus": 4, "samples": 16, "mean_tokens": 100,
        "max_tokens": 200, "prompt_tokens": 50, "engine_tp": 1, "batch": 16, "forward_passes": 1,
        "packed_tokens": 4096, "cut": {}, "measured": {"step": 1.0}, "rollout_gpus": 2,
    }  # fmt: skip
    return validation.Point("rl", row | changes, "step", 1.0, False, sizes)


@pytest.mark.parametrize("samples", [16, 1024])
def test_a_step_off_takes_as_long_as_the_slower_side(samples: int) -> None:
    """Step by step: a rollout plays while the one before it is trained on; weights stop both."""
    point = published(samples=samples, batch=samples)
    phases = validation.rl_phases(H100, point, TrainingLayout(dp=2))
    host = H100.constants.overhead * samples * 150
    training = phases["forward"] + phases["update"] + host
    played = trained = sent = 0.0
    for _ in range(50):
        before, sent = sent, max(played, trained) + phases["sync"]
        played, trained = sent + phases["rollout"], sent + training
    assert sent - before == pytest.approx(phases["step"])
    assert (phases["rollout"] > training) == (samples == 16), "either side may be the slower"
    together = validation.rl_phases(H100, published(rollout_gpus=0), TrainingLayout(dp=4))
    assert together["step"] > sum(time for name, time in together.items() if name != "step")


def test_rows_say_padding_turns_and_the_layout_of_engines() -> None:
    """What passes compute grows by the padding; a rollout is that of its turns, played by hand."""
    plain = validation.rl_phases(H100, published(), TrainingLayout(dp=2))
    padded = validation.rl_phases(H100, published(padding=1.0), TrainingLayout(dp=2))
    twice = validation.rl_phases(H100, published(samples=32, batch=32), TrainingLayout(dp=2))
    for phase in ("forward", "update"):
        assert padded[phase] == pytest.approx(twice[phase]) and padded[phase] > plain[phase]
    assert padded["rollout"] == plain["rollout"]
    point = published(turns=2, environment_seconds=3.0)
    found = validation.rl_phases(H100, point, TrainingLayout(dp=2))["rollout"]
    play = Play(2, 25, 50, 100, environment_seconds=3.0)
    terms = rollout(H100, point.sizes, play, sessions=8)
    assert found == pytest.approx(sum(seconds for _, seconds in terms)) and found > 3.0
    mixture = Sizes(48, 2048, 32, 4, 128, 768, 151936, False, 128, 8)
    together, apart = (
        validation.rl_phases(
            H100, replace(published(engine_tp=2, engine_ep=ep), sizes=mixture), TrainingLayout(dp=2)
        )["rollout"]
        for ep in (1, 2)
    )
    assert apart > together


def test_steps_ahead_play_at_the_pace_of_many() -> None:
    """Token by token with as many trajectories at once as six steps have, each followed by another
    one: the seconds in which those of a step end.
    """
    ahead = 6
    point = published(samples=32, staleness=ahead)
    found = validation.rl_phases(H100, point, TrainingLayout(dp=2))["rollout"]
    play, sizes, now, ended = Play(1, 50, 100, 200), point.sizes, 0.0, 0
    lengths = [math.ceil(length) for length in turn_lengths(play, 16 * ahead)]
    left = [draw % lengths[i] + 1 for i, draw in enumerate(random.Random(0).sample(range(999), 96))]
    whole, since = lengths[:], 0.0  # those of the first twelve steps do not count
    read = 2 * sizes.active / (H100.constants.product * H100.hardware.bf16)
    while ended < 16 * ahead * 8:
        context = 50 + sum(total - rest for total, rest in zip(whole, left)) / len(left)
        now += sum(decode_step(H100, sizes, tp=1, batch=len(left), context=context))
        left = [rest - 1 for rest in left]
        for i in [i for i, rest in enumerate(left) if rest == 0]:
            ended, now = ended + 1, now + 50 * read
            left[i] = whole[i] = random.Random(ended).choice(lengths)
            since = now if ended <= 16 * ahead * 2 else since
    steady = (now - since) / (ended - 16 * ahead * 2) * 16
    assert found == pytest.approx(steady, rel=0.05)
    alone = validation.rl_phases(H100, published(samples=32), TrainingLayout(dp=2))["rollout"]
    assert alone > 1.5 * found


def test_the_head_computes_labels_and_a_reference_is_copied() -> None:
    shape, sizes = shape_of("Qwen2.5-0.5B"), Sizes.of(shape_of("Qwen2.5-0.5B"))
    common = {"tokens": 4096, "length": 4096, "micros": 2}
    every, half = (
        passes(H100, sizes, TrainingLayout(), **common, labels=n)["LM head"] for n in (1.0, 0.5)
    )
    assert 0.49 < half / every < 0.52
    config = parse(["--bf16", "--kl-kind", "k3", "--kl-coef", "0.1", "--updates-per-rollout", "2"])
    phases = step_seconds(H100, shape, config, 1, default_play(config))
    copied = 3 * 2 * shape.num_parameters / (H100.constants.link * H100.hardware.host_link)
    extra = sum(phases["reference"].values()) - sum(phases["old log-probabilities"].values())
    assert extra == pytest.approx(copied, rel=1e-3)


def test_a_calibrated_gpu_has_the_links_of_its_sheet() -> None:
    measured = replace(HARDWARE["A100"], name="this machine", fp8=0.0, network=1e12, node=64)
    constants = Constants(sync=8e11, update=0.0)
    hardware, found = calibration.with_sheet(measured, constants, "NVIDIA H200 NVL")
    sheet = HARDWARE["H200"]
    for name in ("fp8", "fp32", "network", "host_link", "node"):
        assert getattr(hardware, name) == getattr(sheet, name)
    assert hardware.bf16 == measured.bf16 and hardware.memory == measured.memory
    assert (found.sync, found.update) == (Constants().sync, Constants().update)


def test_ranks_that_share_cores_compute_in_each_others_bubbles() -> None:
    """Two stages of two ranks keep two cores busy throughout: all their work over two cores."""
    whole = (
        idle_share(0, TrainingLayout(tp=2, pp=2)),
        idle_share(2, TrainingLayout(pp=2)),
        idle_share(2, TrainingLayout(dp=4)),
    )
    assert whole == (1.0, 1.0, 1.0)
    assert idle_share(2, TrainingLayout(tp=2, pp=2)) == 0.0
    assert 0.0 < idle_share(2, TrainingLayout(pp=4)) < 1.0


def test_lengths_have_their_mean_and_limit() -> None:
    play = Play(1, 100, 200, 400)
    lengths = turn_lengths(play, 97)
    assert sum(lengths) / 97 == pytest.approx(200, rel=1e-3) and max(lengths) == 400
    assert turn_lengths(Play(1, 100, 400, 400), 5) == (400.0,) * 5


def slow_rollout(
    machine: Machine, sizes: Sizes, play: Play, sessions: int, at_once: int = 10**9
) -> float:
    """Token by token: every step samples one token for each sequence that is not with its
    environment; `at_once` trajectories have begun and not ended.
    """
    peak = machine.constants.product * machine.hardware.bf16
    per_token = 2 * sizes.active / peak
    lengths = iter(turn_lengths(play, sessions * play.turns))
    left = [[math.ceil(next(lengths)) for _ in range(play.turns)] for _ in range(sessions)]
    whole = [[*turns] for turns in left]
    ready, context, busy, now = [0.0] * sessions, [0.0] * sessions, [False] * sessions, 0.0
    on_processor = machine.hardware.cores > 0
    while any(left):
        begun = [i for i in range(sessions) if left[i]][:at_once]  # in order, as others end
        arrived = [i for i in begun if not busy[i] and ready[i] <= now]
        if on_processor and arrived:  # prompts are a pass of their own
            now += decode_step(machine, sizes, tp=1, batch=1, context=0)[0]
        for i in begun:
            if not busy[i] and ready[i] <= now:
                busy[i], turn, seen = True, play.turns - len(left[i]), play.window or play.turns
                if turn >= seen:  # a window of turns anew
                    context[i] = sum(whole[i][turn - seen + 1 : turn])
                    now += (context[i] + (seen - 1) * play.prompt_tokens) * per_token
                    context[i] += (seen - 1) * play.prompt_tokens
                now += play.prompt_tokens * per_token
                context[i] += play.prompt_tokens
        batch = [i for i in range(sessions) if busy[i]]
        if not batch:
            now = min(ready[i] for i in begun)
            continue
        held = [context[i] for i in batch]  # a processor attends to the longest in every row
        seen = max(held) if on_processor else sum(held) / len(held)
        now += sum(decode_step(machine, sizes, tp=1, batch=len(batch), context=seen))
        for i in batch:
            context[i] += 1
            left[i][0] -= 1
            if left[i][0] == 0:
                left[i].pop(0)
                busy[i], ready[i] = False, now + play.environment_seconds
    return now


@pytest.mark.parametrize("cores", [0, 2])
@pytest.mark.parametrize(("latency", "window"), [(0.0, 0), (0.5, 0), (20.0, 0), (0.0, 2), (0.5, 1)])
def test_a_rollout_is_what_playing_token_by_token_takes(
    latency: float, window: int, cores: int
) -> None:
    machine = replace(H100, hardware=replace(H100.hardware, cores=cores))
    sizes = Sizes.of(shape_of("Qwen2.5-0.5B"))
    turns = 3 + 5 * bool(window)
    play = Play(turns, 150, 60, 120, environment_seconds=latency, window=window)
    events = sum(seconds for _, seconds in rollout(machine, sizes, play, sessions=12))
    # the events round no tokens
    assert events == pytest.approx(slow_rollout(machine, sizes, play, 12), rel=0.03)


@pytest.mark.parametrize("latency", [0.0, 0.5])
@pytest.mark.parametrize("at_once", [1, 5, 11])
def test_an_engine_without_room_for_all_plays_some_after_others(
    at_once: int, latency: float
) -> None:
    sizes = Sizes.of(shape_of("Qwen2.5-0.5B"))
    play = Play(2, 150, 60, 120, environment_seconds=latency)  # 420 tokens a trajectory
    events = dict(rollout(H100, sizes, play, sessions=12, room=420 * at_once + 419))
    slow = slow_rollout(H100, sizes, play, 12, at_once)
    assert sum(events.values()) == pytest.approx(slow, rel=0.03)
    assert at_once > 5 or slow > 1.05 * slow_rollout(H100, sizes, play, 12)


@pytest.mark.parametrize("cores", [0, 2])
def test_a_context_grows_between_two_events(cores: int) -> None:
    """Answers that all fill their limit end together, so that one event decodes them whole."""
    constants = replace(H100.constants, decode_memory=0.02)  # keys and values are what it waits for
    machine = Machine(replace(H100.hardware, cores=cores), constants)
    sizes, play = Sizes.of(shape_of("Qwen2.5-0.5B")), Play(1, 20, 2000, 2000)
    events = dict(rollout(machine, sizes, play, sessions=32))
    assert events["key-value cache"] > 0.2 * sum(events.values())
    assert sum(events.values()) == pytest.approx(slow_rollout(machine, sizes, play, 32), rel=0.002)


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
    per_token = 2 * Sizes.of(shape).active / (H100.constants.product * H100.hardware.bf16)
    read = (2 * 400 + 5 * (2 * 400 + 50)) * 64 * per_token
    assert found["rollout"]["prompts"] == pytest.approx(read, rel=0.01)


def test_a_tail_and_a_cold_cache_cost_time() -> None:
    sizes = Sizes.of(shape_of("Qwen2.5-7B"))
    even = Play(4, 200, 200, 800, spread=0.0)

    def seconds(play: Play, **changes) -> float:
        return sum(time for _, time in rollout(H100, sizes, play, sessions=64, **changes))

    assert seconds(replace(even, spread=0.8)) > 1.1 * seconds(even)
    cold, warm = (dict(rollout(H100, sizes, even, sessions=64, cached=c)) for c in (False, True))
    # turn k reads k prompts and k - 1 answers again: 200 * (1 + 3 + 5 + 7) instead of 200 * 4
    assert cold["prompts"] == pytest.approx(4 * warm["prompts"])
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
    wide = phases("--rollout-tensor-parallel-size", "2")["rollout"]["weights"]
    assert wide < plain["rollout"]["weights"]
    tokens = 8 * 16 * 5 * (320 + 200)  # of all trajectories, whatever the filter keeps
    assert plain["other"]["overhead"] == pytest.approx(H100.constants.overhead * tokens)


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
def test_ranks_apart_take_what_their_events_take(seconds: float, staleness: int) -> None:
    """Two ranks that sample and six that train, each for as long as in jobs of two and of six
    ranks, played step by step as the schedule says.
    """
    shape = shape_of("Qwen2.5-1.5B")
    base = ["--bf16", "--rollout-engine", "sglang", "--importance-cap", "2"]
    base += ["--filter-strategy", "none", "--updates-per-rollout", "8"]
    apart = ["--placement", "separate", "--rollout-ranks", "2", "--max-staleness", f"{staleness}"]

    def phases(ranks: int, *flags: str) -> dict[str, dict[str, float]]:
        config = parse([*base, *flags])
        play = default_play(config, environment_seconds=seconds)
        return step_seconds(H100, shape, config, ranks, play)

    sampling = sum(phases(2)["rollout"].values())
    alone = {name: sum(terms.values()) for name, terms in phases(6).items()}
    training = sum(alone[name] for name in alone.keys() - {"sync", "rollout"})
    found = phases(8, *apart)
    size = 2 * shape.num_parameters
    load, transfer = size / H100.constants.sync, 2 * size / 1e9
    export = sum(found["sync"].values())
    played, trained, sent = [], [], [export]  # when each rollout and step ends; weights are out
    for step in range(400):
        due = sent[max(0, step - staleness)] + transfer
        before = played[-1] if played else 0.0
        played.append(max(due, before) + load + sampling)
        trained.append(max(played[-1], sent[-1]) + training)
        sent.append(trained[-1] + export)
    seconds_per_step = (trained[-1] - trained[199]) / 200
    total = sum(sum(terms.values()) for terms in found.values())
    assert total == pytest.approx(seconds_per_step, rel=1e-6)


def test_the_constants_are_those_that_the_published_rows_give() -> None:
    fitted = validation.fit(validation.read_points(validation.ROWS))
    for one in fields(Constants):
        assert getattr(fitted, one.name) == pytest.approx(getattr(Constants(), one.name), rel=0.03)


def test_the_published_table_is_what_the_tool_prints() -> None:
    """And every number of field notes is in it; bounds that are missed say so."""
    result = validation.report(validation.ROWS)
    page = (ROOT / "docs" / "benchmarks" / "predictor.md").read_text()
    table = {
        tuple(cell.strip() for cell in line.split("|")[1:6])
        for line in page.splitlines()
        if line.count("|") == 8
    }
    for row in result["rows"]:
        use, published, guess = row["use"], row["published"], row["predicted"]
        cells = (row["name"], row["model"], use, f"{published:.4g}", f"{guess:.4g}")
        assert cells in table
    assert all(row["name"] in page and row["reason"] in page for row in result["unpredicted"])
    medians = result["medians"]
    assert medians["decode"]["judged"] <= 0.10
    for one in medians.values():
        met = "yes" if one["judged"] <= one["bound"] else "no"
        assert f"{one['judged']:.0%} of {one['num_judged']} | {one['fitted']:.0%}" in page
        assert f"{one['bound']:.0%} | {met} |" in page


@pytest.mark.parametrize(
    ("name", "number"), [("rl, dense", 10), ("rl, mixture", 10), ("decode, dense", 10)]
)
def test_an_interval_holds_four_of_five_rows_that_nothing_was_fitted_on(
    name: str, number: int
) -> None:
    low, high, said = validation.interval(name)
    kind, model = name.split(", ")
    found = []
    for point in validation.read_points(validation.ROWS):
        is_mixture = point.sizes.num_experts > 0
        if point.is_fitted or point.kind != kind or is_mixture != (model == "mixture"):
            continue
        ratio = point.measured / validation.predicted(point, Constants())
        found.append(1 / ratio if point.quantity in ("tokens_per_second", "mfu") else ratio)
    inside = sum(0.999999 * low <= times <= 1.000001 * high for times in found)
    assert len(found) >= number and 0.8 <= inside / len(found) < 0.95
    assert said.startswith(f"{inside / len(found):.0%} of {len(found)} ") and name in said


def test_a_class_of_few_rows_has_the_interval_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    own = validation.interval("rl, dense")
    monkeypatch.setattr(validation, "FEW", 18)
    low, high, said = validation.interval("rl, dense")
    assert said.endswith("of rl, for there are only 17 of rl, dense") and (low, high) != own[:2]


@pytest.mark.slow
def test_the_page_says_what_sources_show_that_nothing_was_fitted_on() -> None:
    """Each source is left out of the fit in turn."""
    points, errors = validation.read_points(validation.ROWS), {}
    source = {point.name: point.row["source"].split()[0].strip(":,") for point in points}
    for left_out in sorted(set(source.values())):
        others = [
            replace(point, is_fitted=point.is_fitted and source[point.name] != left_out)
            for point in points
        ]
        own = [point for point in points if source[point.name] == left_out]
        for row in validation.scored(own, validation.fit(others)):
            errors.setdefault(row["class"], []).append(row["error"])
    page = (ROOT / "docs" / "benchmarks" / "predictor.md").read_text()
    for name, found in errors.items():
        median = statistics.median(map(abs, found))
        said = f"| {name} | {median:.0%} of {len(found)} | {statistics.median(found):+.0%} |"
        assert said in page


def test_every_entry_of_a_row_is_explained() -> None:
    page = (ROOT / "docs" / "predictor.md").read_text().partition("## Rows of your own")[2]
    names = {*validation.MODEL, *validation.CUT, "hardware", "source", "note", "unpredicted"}
    for kind in validation.SIZES:
        names |= {*validation.SIZES[kind], *validation.OPTIONS[kind], *validation.MEASURED[kind]}
    assert not [name for name in sorted(names) if f"`{name}`" not in page]


def test_every_constant_matters() -> None:
    """None is in the fit for nothing: another value changes some prediction."""
    points = validation.read_points(validation.ROWS)
    before = [validation.predicted(point, Constants()) for point in points]
    for names in validation.FITTED.values():
        for name in names:
            factor = 1.03 if name == "untuned" else 0.97  # within its range
            changed = replace(Constants(), **{name: factor * getattr(Constants(), name)})
            after = [validation.predicted(point, changed) for point in points]
            assert after != before, name


def test_a_fit_finds_the_constants_that_made_its_numbers() -> None:
    true = replace(
        validation.USUAL, product=0.7, launch=2e-3, decode_memory=0.65, decode_sequence=60e-6
    )
    points = validation.read_points(validation.ROWS)
    made = [replace(point, measured=validation.predicted(point, true)) for point in points]
    random.Random(0).shuffle(made)
    found = validation.fit(made)
    for name in ("product", "launch", "decode_memory", "decode_sequence"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.1)


def test_a_calibration_finds_the_machine_that_made_its_readings() -> None:
    constants = Constants(decode_memory=0.6, decode_layer=3e-4, decode_sequence=2e-4)
    hardware = replace(HARDWARE["A100"], bf16=1e11, memory=2e10)
    true = Machine(hardware, constants)
    sizes = {layers: Sizes.of(ModelShape.of(calibration.small(layers))) for layers in (2, 6)}

    def step(machine: Machine, what: tuple[float, ...]) -> float:
        layers, batch, context = what
        return sum(
            decode_step(machine, sizes[layers], tp=1, batch=batch, context=context, itemsize=4)
        )

    readings = [(what, step(true, what)) for what in calibration.DECODED]
    names = ("decode_memory", "decode_layer", "decode_sequence")
    found = calibration.solved(Machine(hardware), names, readings, step)
    for name in ("decode_layer", "decode_sequence"):
        assert getattr(found.constants, name) == pytest.approx(getattr(constants, name), rel=0.05)
    for _, flags in calibration.CONFIGURATIONS.values():
        parse([*calibration.BASE, *flags.split()])


@pytest.mark.parametrize("window", [0, 3, 9])
def test_what_a_run_played_is_found_in_its_metrics(window: int) -> None:
    """Eight turns of 30 told and 20 sampled tokens, whose engine computed half of what it read."""
    config = parse([*calibration.BASE, "--context-window", f"{window}", "--max-turns", "8"])
    seen = min(8, window or 8)
    spans = [50 * number for number in range(1, seen + 1)] + [50 * seen] * (8 - seen)
    prompts, texts = [one - 20 for one in spans], [50 * seen] * (9 - seen)
    read = 30 * seen + sum(prompts[seen:])
    row = {
        "rollout/num_turns": 8.0, "rollout/sampled_tokens": 64 * 160.0,
        "rollout/num_trajectories": 64.0, "filter/kept_groups": 8.0, "time/advantages": 0.5,
        "time/update": 1.5, "update/tokens_per_second": 64 * sum(texts) / 2.0,
        "engine/cached_share": 1 - read / 2 / sum(prompts), "actor/computed_share": 0.25,
    }  # fmt: skip
    play = calibration.played([row], config)
    assert (play.turns, play.response_tokens, play.sharing) == (8, 20, 4)
    assert play.prompt_tokens == pytest.approx(30) and play.length == pytest.approx(sum(texts))
    assert play.asked == pytest.approx(sum(prompts)) and play.read == pytest.approx(read)
    assert play.prefilled == pytest.approx(0.5)


def steps_like(words: str, ranks: int, play: Play, true: Machine) -> calibration.Steps:
    """A run whose phases take what `true` says."""
    config = parse([*calibration.BASE, *words.split()])
    shape = ModelShape.of(small_model(config.model, 512))
    run = calibration.Steps(config, shape, ranks, play, {})
    return replace(run, measured=run.predicted(true))


def test_what_a_processor_spends_is_found_and_holds_elsewhere() -> None:
    """Fitted on the tiny runs of a machine that is known, judged on the larger ones, none of which
    was fitted on.
    """
    hardware = replace(HARDWARE["A100"], bf16=5e10, memory=2e10, nvlink=1e9, cores=2)
    usual = replace(Constants(), untuned=1.0, overhead=0.0, update=0.0, launch=1e-3, latency=2e-4)
    true = replace(
        usual, memory=0.06, attention=0.05, launch=2e-3, micro=4e-3, start=2e-2, update=9e-3,
        update_layer=3e-3, turn=1.5e-3, decode_layer=2e-4, decode_sequence=3e-5, latency=7e-4,
    )  # fmt: skip
    runs = [
        steps_like(f"{' '.join(calibration.TINY)} {words}", ranks, Play(
            2, 22, 14 if name == "short" else 60, environment_seconds=0.0, sharing=1.1,
        ), Machine(hardware, true))
        for name, (ranks, words) in calibration.FITTED.items()
    ]  # fmt: skip
    found = calibration.with_host(Machine(hardware, usual), runs)
    before, after = [], []
    for ranks, words in calibration.CONFIGURATIONS.values():
        play = Play(1, 25, 40, environment_seconds=0.0, sharing=3.0)
        judged = steps_like(words, ranks, play, Machine(hardware, true))
        wanted = sum(judged.measured.values())
        for errors, machine in ((before, Machine(hardware, usual)), (after, found)):
            errors.append(abs(sum(judged.predicted(machine).values()) / wanted - 1))
    assert max(after) < 0.03 and min(before) > 0.3


def test_a_processor_works_at_what_a_gpu_only_waits_for() -> None:
    gpu = Machine(HARDWARE["H100"], replace(Constants(), micro=0.01))
    processor = replace(gpu, hardware=replace(gpu.hardware, cores=2))
    sizes = Sizes.of(shape_of("Qwen2.5-0.5B"))
    common = {"tokens": 65536, "length": 2048, "micros": 3}
    waits, works = (passes(one, sizes, TrainingLayout(), **common) for one in (gpu, processor))
    assert waits["launches"] == 0  # hidden by the work of large microbatches
    assert works["launches"] == pytest.approx(3 * 24 * 3 * gpu.constants.launch)
    assert works["microbatches"] == waits["microbatches"] == pytest.approx(3 * 3 * 0.01)
    assert processor.shared_by(2) is processor and gpu.shared_by(64) is gpu
    once, twice = (
        sum(passes(machine, sizes, TrainingLayout(), **common).values())
        for machine in (processor, processor.shared_by(4))
    )
    assert twice == pytest.approx(2 * once)


def test_engines_prefill_what_is_not_shared() -> None:
    sizes = Sizes.of(shape_of("Qwen2.5-0.5B"))
    machine = replace(H100, constants=replace(H100.constants, turn=1e-3))
    whole = dict(rollout(machine, sizes, Play(2, 500, 50), sessions=8))
    shared = dict(rollout(machine, sizes, Play(2, 500, 50, prefilled=0.25), sessions=8))
    assert shared["prompts"] == pytest.approx(whole["prompts"] / 4)
    assert whole["turns"] == shared["turns"] == pytest.approx(16e-3)


def test_one_command_says_what_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "cost.json", tmp_path / "step.svg"
    words = ("--model", "Qwen2.5-14B", "--num-gpus", "16", "--dollars-per-gpu-hour", "2")
    code, said = run_plan(capsys, *words, "--json", str(out), "--plot", str(plot))
    cost = json.loads(out.read_text())["cost"]
    total = sum(sum(terms.values()) for terms in cost["phases_seconds"].values())
    assert code == 0 and cost["seconds"] == pytest.approx(total)
    assert cost["dollars"] == pytest.approx(100 * total * 16 / 3600 * 2)
    (low, high), (least, most, basis) = cost["interval_seconds"], cost["interval"]
    assert (low, high) == (pytest.approx(least * total), pytest.approx(most * total))
    assert f"between {least:.2g} and {most:.2g} times, {basis}" in said
    spent = {phase: sum(terms.values()) for phase, terms in cost["phases_seconds"].items()}
    assert cost["bound_by"]["phase"] == max(spent, key=spent.get)
    assert re.search(r"^100 steps cost \d+\.\d H100 hours, \d+ \$ at 2\.00 \$", said, re.M)
    assert "bound by: " in said and "what would help next: " in said
    assert "of 5 turns and 2600 tokens, 1000 of them sampled: 332800 tokens a step" in said
    assert (
        "top_fraction keeps 32 trajectories, trained on once (gae) in bfloat16 with matrix" in said
    )
    assert cost["workload"]["tokens"] == 8 * 16 * 5 * (320 + 200)
    assert plot.read_text().count("rollout") >= 1
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
        (("--validate", "--bf16"), "--validate .*no flags of training: --bf16"),
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
    """Transformer Engine gets every trajectory's keys and values, which take memory of their own:
    a GPU with room for the advice without them alone.
    """
    shape = shape_of("Qwen2.5-1.5B")
    config = parse(["--bf16", "--rollout-engine", "sglang", "--recompute", "full"])
    better = replace(config, parallel=replace(config.parallel, recompute="none"))

    def peak(sharing: float) -> float:
        phases = plan(shape, Setting.from_config(better, 1, sharing=sharing))
        return max(sum(terms.values()) for terms in phases.values()) / GIB

    def advised(capacity: float) -> list[str]:
        play = default_play(config, 32, sharing=4.0)  # updates take most of the step
        return [name for name, _ in cost.advice(H100, shape, config, 1, capacity, play)]

    assert "--recompute none" in advised(peak(4.0))
    assert peak(1.0) < peak(4.0) and "--recompute none" not in advised(peak(1.0))


def test_utilisation_counts_what_is_computed() -> None:
    """Tokens that are shared need no operations, and no GPU exceeds what
    its products reach.
    """
    shape, sizes = shape_of("Qwen2.5-14B"), Sizes.of(shape_of("Qwen2.5-14B"))
    flags = "--bf16 --filter-strategy none --num-groups 64 --minibatch-size 1024".split()
    config = parse(flags)
    for sharing in (1.0, 8.0):
        play = default_play(config, sharing=sharing)
        told = cost.cost(H100, shape, config, 8, play, 1.0, (1.0, 1.0, ""))
        layers = 6 * sizes.active + 6 * sizes.num_layers * sizes.num_heads * 128 * play.length
        head = 6 * sizes.head * play.sampled
        flops = 1024 * (layers * play.length / sharing + head)
        seconds = sum(told["phases_seconds"]["update actor"].values())
        assert told["update_mfu"] == pytest.approx(flops / seconds / 8 / 989.4e12)
        assert told["update_mfu"] < H100.constants.product
    in_fp8 = replace(config, parallel=replace(config.parallel, fp8="hybrid"))
    for one, name, peak in ((config, "bfloat16", 989.4e12), (in_fp8, "FP8", 1978.9e12)):
        told = cost.cost(H100, shape, one, 8, play, 1.0, (1.0, 1.0, ""))
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
    ("flag", "file", "said"),
    [
        ("--calibrate", "nowhere/machine.json", "existing folder"),
        ("--calibrate", "machine", "must end in .json"),
        ("--plot", "nowhere/step.svg", "existing folder"),
    ],
)
def test_nothing_is_measured_for_a_file_that_cannot_be_used(
    flag: str,
    file: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "measured_machine", lambda: pytest.fail("minutes are lost"))
    code, text = run_plan(capsys, "--model", "Qwen2.5-0.5B", flag, str(tmp_path / file))
    assert code == 2 and said in text and text.count("\n") == 1


def test_rows_of_others_judge_and_bad_ones_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(validation.ROWS.read_text())
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(content | {"training": content["training"][:2], "rl": []}))
    result = validation.report(path)
    assert {row["use"] for row in result["rows"]} == {"judge"}
    assert {*result["medians"]} == {"training", "decode"}
    assert all(one["fitted"] is None for one in result["medians"].values())
    assert {*result["classes"]} >= {"training, dense, bfloat16", "decode, dense"}
    of_class = [row["error"] for row in result["rows"] if row["class"] == "decode, mixture"]
    signed = result["classes"]["decode, mixture"]["signed"]
    assert signed == pytest.approx(statistics.median(of_class))
    assert f"| decode, mixture | {result['classes']['decode, mixture']['judged']:.0%} of" in (
        validation.markdown(result)
    )
    code, text = run_plan(capsys, "--validate", str(tmp_path / "nowhere.json"))
    assert code == 2 and "--validate" in text and "nowhere.json" in text and "name" in text
    assert "Errno" not in text and text.count("\n") == 1
    row = content["training"][0]
    nameless = {name: value for name, value in row.items() if name != "id"}
    for wrong, said in (
        (json.dumps(content | {"training": [nameless]}), "row 1 of training has not"),
        (json.dumps(content | {"decode": [nameless | {"unpredicted": "why"}]}), "and lacks id"),
        (
            json.dumps(content | {"models": {"A": {"layers": 2}}}),
            "model A has not",
        ),
        ('{"models": ', "Expecting value"),
    ):
        path.write_text(wrong)
        code, text = run_plan(capsys, "--validate", str(path))
        assert code == 2 and f"{path} must have the form of" in text and said in text
        assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cut": {"dp": 8}}, "cut.dp .* drop it"),
        ({"cut": {"sp": 1}}, "cut must have no entry but"),
        ({"cut": {"tp": 5}}, r"gpus \(16\) must be a multiple of"),
        ({"cut": {"tp": 0}}, "cut.tp must be .*, not 0"),
        ({"cut": {"fp8": 1}}, "cut.fp8 must be .*, not 1"),
        ({"cut": {"recompute": "selectve"}}, "cut.recompute must be one of none"),
        ({"tunned": False}, "row must have no entry but"),
        ({"batch": 1000}, "62.5 microbatches"),
        ({"gpus": "16"}, "gpus must be .*, not '16'"),
        ({"model": "none"}, "model must be one of Llama"),
        ({"hardware": "H9000"}, "--hardware must be one of A100"),
        ({"measured": [1]}, r"measured must be .*, not \[1\]"),
        ({"measured": {"tflop": 3}}, "measured must have no entry but"),
        ({"measured": {"tflops": math.nan}}, "measured.tflops .* finite"),
        ({"measured": {"tflops": -3}}, "measured.tflops .* positive .*, not -3"),
        ({"rollout_gpus": 8}, "row must have no entry but"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_named(change: dict, said: str, tmp_path: Path) -> None:
    content, path = json.loads(validation.ROWS.read_text()), tmp_path / "rows.json"
    row = content["training"][0] | change
    path.write_text(json.dumps(content | {"training": [row]}))
    with pytest.raises(ValueError, match="row 1 of training ") as error:
        validation.read_points(path)
    assert re.search(said, str(error.value)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rollout_gpus": 0}, "rollout_gpus must be .*, not 0"),
        ({"rollout_gpus": 16}, r"without rollout_gpus \(16\) .*multiple of the 2"),
        ({"rollout_gpus": 7}, r"without rollout_gpus \(7\) .*multiple of the 2"),
        ({"staleness": 1}, "staleness .* rollout_gpus; give both"),
        ({"engine_fp8": 1}, "engine_fp8 must be .*, not 1"),
        ({"engine_ep": 2}, "engine_ep must divide"),
        ({"padding": -0.5}, "padding must be .*, not -0.5"),
        ({"placement": "separate"}, "row must have no entry but"),
    ],
)
def test_a_split_that_cannot_be_is_named(change: dict, said: str, tmp_path: Path) -> None:
    content, path = json.loads(validation.ROWS.read_text()), tmp_path / "rows.json"
    path.write_text(json.dumps(content | {"rl": [content["rl"][0] | change]}))
    with pytest.raises(ValueError, match="row 16a of rl ") as error:
        validation.read_points(path)
    assert re.search(said, str(error.value)) and "\n" not in str(error.value)


def test_a_row_may_name_a_file_of_hardware(tmp_path: Path) -> None:
    """Without constants of its own it is predicted under the published ones."""
    content, path = json.loads(validation.ROWS.read_text()), tmp_path / "rows.json"
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps({"hardware": asdict(HARDWARE["B200"])}))
    for hardware in (str(machine), "B200"):
        row = content["decode"][0] | {"hardware": hardware}
        path.write_text(json.dumps({"models": {}, "decode": [row]}))
        (point,) = validation.read_points(path)
        context = row["prompt_tokens"] + row["output_tokens"] / 2
        b200, sizes = Machine(HARDWARE["B200"]), Sizes.of(shape_of(row["model"]))
        step = sum(decode_step(b200, sizes, tp=row["tp"], batch=row["batch"], context=context))
        # a step of eight reads the prompts of seven others besides
        read = 7 * 300 / row["output_tokens"] * 2 * sizes.active
        read /= b200.constants.product * b200.hardware.bf16
        assert validation.predicted(point, Constants()) == pytest.approx(8 / (step + read))


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
    path.write_text(json.dumps({"hardware": values, "constants": asdict(Constants())}))
    code, said = run_plan(capsys, "--model", "Qwen2.5-0.5B", "--hardware", str(path))
    assert code == 2 and f"{next(iter(change))} of hardware H100" in said
    assert said.count("\n") == 1


def test_constants_out_of_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match="constant product must be .*, not 2"):
        Constants(product=2.0)
