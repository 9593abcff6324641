"""Prediction of the seconds of a step: the bytes and operations of its parts, over the machine's
rates.

No torch, no ranks. FLOPs, the pipeline's bubble and its chunks: arXiv:2104.04473; traffic of tensor
parallelism: arXiv:2205.05198, of sharded optimizers: arXiv:1910.02054, of experts: section 3.2.2 of
arXiv:2412.19437; backward of fused attention: arXiv:2205.14135. A step of decoding is a constant
plus what its sequences add; a rollout is played event by event. The assumptions are in
docs/predictor.md, their errors against published steps in docs/benchmarks/predictor.md.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import NormalDist

from ragen_mega.config import StarPOConfig
from ragen_mega.data.balance import Cost
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.hardware import Machine
from ragen_mega.planning.memory import MOMENTS, Setting, device_state, state_of

BF16, FP32 = 2, 4
ADAM_BYTES = 34
"""Bytes per element: gradient, float32 weight and two moments read, three of them written, a copy
in bfloat16, and the gradient's norm.
"""
CONNECTION = 1e9
"""Assumed: bytes a second of weights from ranks that train to ranks that only sample, over one
connection between processes, with its copies (docs/benchmarks/placement.md).
"""
SPREAD = 0.5
"""Assumed standard deviation of the logarithm of the tokens per turn."""
Terms = dict[str, float]
"""Term -> seconds."""
PHASES = {
    "rollout": ("rollout",),
    "sync": ("sync",),
    "advantages": ("old log-probabilities", "reference", "values"),
    "update": ("update critic", "update actor"),
}
"""Timers of a run -> phases of the predictor."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide the time of a transformer with gated feed-forward layers, dense or a
    mixture of experts.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of a feed-forward part; of one expert in a mixture."""
    vocab_size: int
    is_tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    attention_layers: int = 0
    """Layers that attend to all tokens and hold their keys and values (0: every layer)."""

    @classmethod
    def of(cls, shape: ModelShape) -> Sizes:
        """Read the sizes of a model that the trainer knows."""
        return cls(
            shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads,
            shape.head_dim, shape.ffn_size, shape.vocab_size, shape.is_tied, shape.num_experts,
            dict(shape.further).get("moe_router_topk", 0),
        )  # fmt: skip

    @property
    def attention_weights(self) -> int:
        """Count the elements of a layer's matrices around attention."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def attending(self) -> int:
        """Count the layers with keys and values."""
        return self.attention_layers or self.num_layers

    @property
    def expert_weights(self) -> int:
        """Count the elements of one feed-forward part."""
        return 3 * self.hidden_size * self.ffn_size

    @property
    def active(self) -> int:
        """Count the elements of all layers' matrices that a token passes through."""
        used = self.experts_per_token or 1
        return self.num_layers * (self.attention_weights + used * self.expert_weights)

    @property
    def head(self) -> int:
        """Count the elements of the LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def total(self) -> int:
        """Count the elements of all matrices."""
        layer = self.attention_weights + (self.num_experts or 1) * self.expert_weights
        return self.num_layers * layer + self.head * (1 if self.is_tied else 2)

    @property
    def cost(self) -> Cost:
        """Count the FLOPs, forward and backward, of a token, of its attention to one token, and of
        the LM head for it.
        """
        channels = self.attending * self.num_heads * self.head_dim
        return Cost.of_model(self.active, channels, self.head)

    def flops(self, length: float, labels: float = 1.0) -> float:
        """Count the FLOPs per token, forward and backward, in trajectories of `length` (causal
        attention), of whose tokens a share are labels.
        """
        cost = self.cost
        return cost.per_token + labels * cost.per_label + cost.per_pair * length / 2


@dataclass(frozen=True)
class TrainingLayout:
    """A layout of training, and its precision."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vp: int = 1
    """Chunks of layers of a pipeline stage (interleaved schedule)."""
    sequence_parallel: bool = True
    overlaps: bool = False
    """Collectives of tensor and expert parallelism overlap with matrix products."""
    copies: bool = False
    """A token is sent once for every expert that it needs (Megatron's all-to-all), not once to each
    node and rank.
    """
    is_fsdp: bool = False
    shards_optimizer: bool = True
    parks_optimizer: bool = False
    """Adam's state stays in host memory, and an update brings it to the device and back."""
    fp8: bool = False
    graphs: bool = False
    """A whole step is one CUDA graph, which needs no host, and an exchange of tokens sorts them."""
    recompute: str = "none"
    """Part that is computed again: none, attention (Megatron's selective), selective (the
    feed-forward part) or full.
    """
    itemsize: int = BF16

    @property
    def num_gpus(self) -> int:
        """Count the GPUs of the job."""
        return self.tp * self.pp * self.dp * self.cp


def product(
    machine: Machine, rows: float, inner: float, columns: float, cut: TrainingLayout
) -> float:
    """Compute the seconds of [rows, inner] x [inner, columns]: its operations, those that fill and
    empty the pipeline of each tile, and its operands once.
    """
    hardware, reached = machine.hardware, machine.constants
    peak = hardware.peak(cut.itemsize, fp8=cut.fp8)
    peak *= reached.product_fp8 if cut.fp8 else reached.product
    size = 1 if cut.fp8 else cut.itemsize
    moved = size * (rows * inner + inner * columns) + cut.itemsize * rows * columns
    if cut.fp8:  # what is multiplied is read, and written in FP8 as it is and transposed
        moved += (cut.itemsize + 2) * rows * inner
    return 2 * rows * (inner + reached.tile) * columns / peak + moved / (
        reached.memory * hardware.memory
    )


def width_factor(head_dim: int) -> float:
    """Return the operations a second of attention, relative to heads of 128: the exponentials of a
    narrow head take as long (figures 5 and 6 of arXiv:2407.08608).
    """
    return 1.5 * head_dim / (head_dim + 64)


def layer(
    machine: Machine, sizes: Sizes, cut: TrainingLayout, tokens: float, length: float
) -> Terms:
    """Compute the seconds of a layer's forward pass over `tokens` positions in trajectories of
    `length`.
    """
    hardware, reached = machine.hardware, machine.constants
    tokens, h, tp = tokens / cut.cp, sizes.hidden_size, cut.tp
    heads, keys = (n * sizes.head_dim / tp for n in (sizes.num_heads, sizes.num_kv_heads))
    # tokens of all ranks meet at the experts, each of which is whole
    split, experts = (1, sizes.num_experts / cut.ep) if sizes.num_experts else (tp, 1.0)
    used, ffn = sizes.experts_per_token or 1, sizes.ffn_size / split
    routed = tokens * used * split / tp
    matrices = (
        (1.0, tokens, h, heads + 2 * keys),
        (1.0, tokens, heads, h),
        (experts, routed / experts, h, 2 * ffn),
        (experts, routed / experts, ffn, h),
    )
    # two norms and two additions; split and rotated queries and keys; the gate; experts permute
    passes = 10 * tokens * h / (tp if cut.sequence_parallel else 1) + 4 * tokens * (heads + keys)
    permuted = (2.0 if cut.graphs else reached.permute) * bool(sizes.num_experts)
    passes += routed * (3 * ffn + permuted * h)
    attended = reached.attention * width_factor(sizes.head_dim) * hardware.peak(cut.itemsize)
    share = sizes.attending / sizes.num_layers  # on average over the layers
    # Megatron deals early and late blocks to each rank; who has the last of even blocks is late
    attended /= share * (2 - 1 / cut.cp if cut.is_fsdp else 1)
    terms = {
        "matrix products": sum(
            number * product(machine, rows, inner, columns, cut)
            for number, rows, inner, columns in matrices
        ),
        "attention": 2 * tokens * length * heads / attended,
        "element-wise": cut.itemsize * passes / (reached.memory * hardware.memory),
    }
    cuts = 2 if sizes.num_experts else 4  # experts are whole
    shared = cuts * (tp - 1) / tp * tokens * h * cut.itemsize / machine.link(tp)
    visible = reached.exposed if cut.overlaps else 1.0
    terms["tensor parallelism"] = visible * shared + 4 * reached.latency * (tp > 1)
    # a token goes to each node that it needs once, and another there to each rank meanwhile; an
    # exchange has a round for each node
    nodes, local = math.ceil(cut.ep / hardware.node), min(cut.ep, hardware.node)
    to_nodes, to_ranks = (
        used if cut.copies else distinct(places, used) for places in (nodes, cut.ep)
    )
    sent = max(
        to_ranks * (local - 1) / local / machine.link(local),
        to_nodes * (nodes - 1) / nodes / machine.link(cut.num_gpus),
    )
    sent = 2 * (visible * tokens / tp * sent * h * cut.itemsize + nodes * reached.latency)
    terms["expert parallelism"] = sent * (cut.ep > 1)
    ring = 2 * keys * tokens * cut.itemsize * (cut.cp - 1) / machine.link(tp * cut.cp)
    seen = max(reached.exposed * ring, ring - terms["attention"] / share)
    terms["context parallelism"] = share * (seen + (cut.cp - 1) * reached.latency)
    return terms


def distinct(places: int, drawn: float) -> float:
    """Return how many of `places` as many even draws reach, on average."""
    return places * (1 - (1 - 1 / places) ** drawn)


def head(machine: Machine, sizes: Sizes, cut: TrainingLayout, tokens: float) -> float:
    """Compute the seconds of the forward pass of LM head and loss of so many labels: a read and a
    write of logits as they are and 3.5 passes in float32, a third of what Megatron's loss takes
    there and back.
    """
    tokens, vocab = tokens / cut.cp, sizes.vocab_size / cut.tp
    moved = tokens * vocab * (2 * cut.itemsize + 3.5 * FP32)
    seconds = product(machine, tokens, sizes.hidden_size, vocab, replace(cut, fp8=False))
    return seconds + moved / (machine.constants.memory * machine.hardware.memory)


def passes(
    machine: Machine,
    sizes: Sizes,
    cut: TrainingLayout,
    *,
    tokens: float,
    length: float,
    micros: float,
    backward: float = 2.0,
    labels: float = 1.0,
) -> Terms:
    """Compute the seconds of `micros` microbatches of `tokens` positions through the pipeline.
    `backward` is the cost of a product's backward pass in forward passes: 0 for log-probabilities,
    1 if the weights have no gradients. The LM head computes `labels` times as many tokens, 0 of a
    critic.
    """
    single = layer(machine, sizes, cut, tokens, length)
    mlp = sizes.expert_weights * (sizes.experts_per_token or 1)
    share = mlp / (mlp + sizes.attention_weights)
    whole = sum(single.values())
    around = share * (whole - single["attention"])
    parts = {"none": 0.0, "attention": single["attention"], "selective": around, "full": whole}
    again = parts[cut.recompute] / whole * bool(backward)
    layers = sizes.num_layers / cut.pp * micros  # on average: stages may differ by some
    factors = dict.fromkeys(single, 1 + backward)
    factors["attention"] = 1 + 2.5 * bool(backward)
    factors["element-wise"] = 1 + 2.0 * bool(backward)
    for name in ("tensor parallelism", "expert parallelism"):
        factors[name] = 2.0 if backward else 1.0
    terms = {name: layers * factors[name] * seconds for name, seconds in single.items()}
    terms["recomputation"] = layers * again * whole
    # adapters, whose weights alone have gradients, are as many products again
    started = machine.constants.launch * (2 if backward == 1 else 1)
    started += machine.constants.route * bool(sizes.num_experts)
    started += 4 * machine.constants.collective * (cut.tp > 1)
    passed = layers * (1 + (2 + again) * bool(backward)) * (not cut.graphs)
    hidden = 0.0 if machine.hardware.cores else sum(terms.values())
    terms["launches"] = max(0.0, passed * started - hidden)
    terms["launches"] += passed * machine.constants.adapter * (backward == 1 and cut.is_fsdp)
    terms["microbatches"] = micros * machine.constants.micro * (1 + 2 * bool(backward))
    body = sum(terms.values())
    last = micros * (1 + backward) * head(machine, sizes, cut, labels * tokens)
    # where layers do not divide evenly, the first and the last stage have those fewer, as published
    # layouts do; the trainer's own stages have one fewer each
    most = math.ceil(sizes.num_layers / cut.pp)
    fewer = math.ceil((most * cut.pp - sizes.num_layers) / 2)
    slowest = max(most * body, (most - fewer) * body + last * sizes.num_layers / cut.pp)
    slowest *= cut.pp / sizes.num_layers
    sent = (1 + bool(backward)) * tokens / cut.cp * sizes.hidden_size * cut.itemsize
    sent /= cut.tp if cut.sequence_parallel else 1
    hop = sent / machine.link(cut.num_gpus) + machine.constants.latency
    hop *= machine.constants.exposed if cut.vp > 1 else 1.0  # chunks compute meanwhile
    bubble = (cut.pp - 1) / cut.vp * (body + last / cut.pp) / micros
    return terms | {
        "LM head": last / cut.pp,
        "stage imbalance": slowest - body - last / cut.pp,
        "pipeline bubble": bubble * idle_share(machine.hardware.cores, cut),
        "pipeline transfers": (micros + cut.pp - 1) * cut.vp * hop * (cut.pp > 1),
    }


def idle_share(cores: int, cut: TrainingLayout) -> float:
    """Return the share of a pipeline's bubble in which nothing computes: where ranks share `cores`,
    ranks that have work compute faster while others wait for theirs.
    """
    stage = cut.num_gpus / cut.pp
    if not cores or cut.pp == 1 or cut.num_gpus <= cores:
        return 1.0
    return max(0.0, (cores - stage) / (cut.num_gpus - stage))


def gradients(machine: Machine, sizes: Sizes, cut: TrainingLayout, hidden: float) -> Terms:
    """Compute the seconds of an optimizer step besides the passes: the reduction of gradients over
    data-parallel ranks beside the last backward pass and, where each rank updates its share, the
    gathering of parameters beside the first forward pass, as far as these passes, of `hidden`
    seconds together, do not hide them; and Adam.
    """
    reached = machine.constants
    dense = sizes.num_layers * sizes.attention_weights / (cut.tp * cut.pp)
    experts = sizes.num_layers * sizes.expert_weights / cut.pp
    experts *= sizes.num_experts / cut.ep if sizes.num_experts else 1 / cut.tp
    outer = sizes.head * (1 if sizes.is_tied and cut.pp == 1 else 2) / (cut.tp * min(2, cut.pp))
    held, ranks = dense + experts + outer, cut.dp * cut.cp
    ring = (ranks - 1) / ranks * held / machine.link(cut.num_gpus // cut.pp, cut.tp)
    reduced = ring * FP32 * (1 if cut.shards_optimizer else 2)
    gathered = ring * cut.itemsize * cut.shards_optimizer
    seen = sum(
        max(reached.exposed * moved, moved - share * hidden)
        for moved, share in ((reduced, 2 / 3), (gathered, 1 / 3))
    )
    sharers = max(1.0, ranks / cut.ep) if sizes.num_experts else ranks
    updated = (dense + outer) / ranks + experts / sharers if cut.shards_optimizer else held
    seconds = ADAM_BYTES * updated / (reached.memory * machine.hardware.memory)
    if cut.parks_optimizer:
        seconds += 2 * (MOMENTS + FP32) * updated / (reached.link * machine.hardware.host_link)
    return {"data parallelism": seen if ranks > 1 else 0.0, "optimizer": seconds}


def training(
    machine: Machine,
    sizes: Sizes,
    cut: TrainingLayout,
    *,
    tokens: float,
    length: float,
    micros: float,
    backward: float = 2.0,
    trained: float = 1.0,
    labels: float = 1.0,
) -> Terms:
    """Compute the seconds of one optimizer step on `micros` microbatches of every data-parallel
    rank; `trained` is the share of the weights that have gradients.
    """
    common = {"tokens": tokens, "length": length, "micros": micros, "backward": backward}
    terms = passes(machine, sizes, cut, **common, labels=labels)
    compute = sum(terms.values())
    if cut.is_fsdp:  # weights are gathered for both passes, gradients scattered, every microbatch
        ranks = cut.dp * cut.cp
        experts = sizes.num_layers * sizes.num_experts * sizes.expert_weights
        lacking = (sizes.total - experts) / cut.tp * (ranks - 1) / ranks
        lacking += experts / cut.ep * (1 - cut.ep * cut.pp / cut.num_gpus)
        # a stage of a pipeline keeps its weights until its last microbatch
        rounds = micros * (2 + trained) if cut.pp == 1 else 1 + trained
        traffic = rounds * cut.itemsize * lacking / cut.pp
        traffic /= machine.link(cut.num_gpus, cut.tp * cut.cp)
        exposed = machine.constants.exposed
        terms["data parallelism"] = max(exposed * traffic, traffic - compute)
    # with chunks the gradients of one are reduced while the last microbatches pass the others
    last = min(cut.pp, micros) if cut.vp > 1 else 1
    behind = gradients(machine, sizes, cut, compute / micros * last)
    started = machine.constants.update_layer * sizes.num_layers / cut.pp
    terms["optimizer"] = trained * behind["optimizer"] + machine.constants.update + started
    terms.setdefault("data parallelism", trained * behind["data parallelism"])
    return terms


def untuned(machine: Machine, terms: Terms) -> Terms:
    """Add to `terms` of training the loss of a layout that nobody has tuned: steps of reinforcement
    learning differ in lengths and routing, and are not tuned as benchmarks of training are.
    """
    return terms | {"untuned layout": (machine.constants.untuned - 1) * sum(terms.values())}


def decode_step(
    machine: Machine,
    sizes: Sizes,
    *,
    tp: int,
    batch: float,
    context: float,
    fp8: bool = False,
    itemsize: int = BF16,
    ep: int = 1,
) -> tuple[float, float, float, float]:
    """Compute the seconds in which an engine samples a token for each of `batch` sequences of
    `context` tokens on average: (weights and the fixed cost of a step, keys and values, cost of the
    sequences, two all-reduces a layer). With `ep` experts lie whole on as many of its `tp` GPUs,
    and all wait for the GPU that most tokens go to.
    """
    hardware, reached = machine.hardware, machine.constants
    bandwidth = reached.decode_memory * hardware.memory
    experts, most = sizes.expert_weights, 1.0
    if sizes.num_experts:  # experts that no token chose are not read
        met = 1 - (1 - sizes.experts_per_token / sizes.num_experts) ** batch**reached.routing
        above = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25))  # deviations, of the largest of ep
        read = met + above * math.sqrt(met * (1 - met) * ep / sizes.num_experts)
        experts *= min(1.0, read) * sizes.num_experts / reached.decode_expert
        most += above / math.sqrt(batch * sizes.experts_per_token / ep)
    layers = sizes.num_layers * (sizes.attention_weights + experts)
    weights = (layers * (1 if fp8 else itemsize) + sizes.head * itemsize) / tp
    width = max(1.0, sizes.num_kv_heads / tp) * sizes.head_dim
    cache = 2 * sizes.attending * width * itemsize * context
    peak = hardware.peak(itemsize, fp8=fp8)
    routed = sizes.num_layers * sizes.experts_per_token * sizes.expert_weights
    dense = (sizes.active - routed + sizes.head) / reached.decode_product
    products = 2 / tp / peak * (dense + most * routed / reached.decode_routed)
    fixed = weights / bandwidth + reached.decode_host + sizes.num_layers * reached.decode_layer
    reduced = 2 * (tp - 1) / tp * batch * sizes.hidden_size * itemsize / machine.link(tp)
    # small ones wait for a round within the node, or for one within, between and within nodes
    reduced += reached.decode_reduce * (1 if tp <= hardware.node else 3)
    return (
        fixed,
        batch * cache / bandwidth,
        batch * (reached.decode_sequence + products),
        2 * sizes.num_layers * reduced * (tp > 1),
    )


def prompt_token(
    machine: Machine, sizes: Sizes, *, tp: int, fp8: bool = False, itemsize: int = BF16
) -> float:
    """Compute the seconds in which an engine reads a token of a prompt."""
    peak = machine.constants.product * machine.hardware.peak(itemsize, fp8=fp8)
    return 2 * sizes.active / tp / peak


@dataclass(frozen=True)
class Play:
    """The trajectories of a step, as far as its seconds depend on them."""

    turns: int = 1
    prompt_tokens: float = 128.0
    """Tokens of the environment before each turn."""
    response_tokens: float = 512.0
    """Tokens sampled per turn, on average."""
    max_response: float = math.inf
    spread: float = SPREAD
    environment_seconds: float = 0.01
    """Seconds of the environment per turn."""
    sharing: float = 1.0
    """Tokens of the trajectories of a pass per token that it computes."""
    prefilled: float = 1.0
    """Share of the tokens that an engine reads that it computes; trajectories share the others."""
    window: int = 0
    """Turns that the policy sees at a time (0: all). When one leaves the window, the turns that are
    left are a new prompt and a text of their own; each holds the task as the first one does.
    """

    @property
    def sampled(self) -> float:
        """Count the tokens of a whole trajectory that the policy samples, on average."""
        return self.turns * min(self.response_tokens, self.max_response)

    @property
    def seen(self) -> int:
        """Count the turns of a text: of the whole trajectory, or of a window."""
        return min(self.turns, self.window or self.turns)

    @property
    def texts(self) -> int:
        """Count the texts of a trajectory, each of which is trained on by itself."""
        return self.turns - self.seen + 1

    @property
    def text_length(self) -> float:
        """Count the tokens of a text, on average; its last token attends to all of them."""
        return self.seen * (self.prompt_tokens + self.sampled / self.turns)

    @property
    def length(self) -> float:
        """Count the tokens of all texts of a trajectory, on average."""
        return self.texts * self.text_length

    @property
    def read(self) -> float:
        """Count the tokens of a trajectory that an engine reads: the new ones, and every new window
        whole but for its last answer.
        """
        answer = self.sampled / self.turns
        return self.seen * self.prompt_tokens + (self.texts - 1) * (self.text_length - answer)

    @property
    def asked(self) -> float:
        """Count the tokens of the prompts of a trajectory, each as the policy sees it."""
        answer = self.sampled / self.turns
        first = (self.seen + 1) / 2 * self.text_length - self.seen * answer
        return first + (self.texts - 1) * (self.text_length - answer)


@lru_cache(maxsize=256)  # a fit of constants asks for the same ones a thousand times
def turn_lengths(play: Play, count: int) -> tuple[float, ...]:
    """Draw the tokens of `count` turns with the mean of `play`: even quantiles of a log-normal
    distribution cut at the limit, in an order that mixes them.
    """
    if play.response_tokens >= play.max_response or play.spread == 0:
        return (min(play.response_tokens, play.max_response),) * count
    quantiles = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    shape = [math.exp(play.spread * q) for q in quantiles]
    low, high = 0.0, 64 * play.max_response if play.max_response < math.inf else 1e6
    for _ in range(50):
        scale = (low + high) / 2
        mean = sum(min(scale * s, play.max_response) for s in shape) / count
        low, high = (scale, high) if mean < play.response_tokens else (low, scale)
    stride = next(n for n in range(int(0.618 * count) or 1, 2 * count) if math.gcd(n, count) == 1)
    return tuple(
        max(1.0, min(scale * shape[i * stride % count], play.max_response)) for i in range(count)
    )


@lru_cache(maxsize=4096)
def rollout(
    machine: Machine,
    sizes: Sizes,
    play: Play,
    *,
    sessions: int,
    tp: int = 1,
    fp8: bool = False,
    itemsize: int = BF16,
    cached: bool = True,
    room: float = math.inf,
    ep: int = 1,
) -> tuple[tuple[str, float], ...]:
    """Simulate the seconds in which one engine plays `sessions` trajectories at their own pace,
    from event to event: a turn ends, an environment has answered. As many play at once as `room`,
    the tokens whose keys and values it can hold, has room for on average; the next one begins when
    one ends. The terms are those of `decode_step`, the time of prompts (all that the policy sees
    again each turn unless the radix cache is `cached`, which does not help once a window slides),
    and the time in which every trajectory waits for its environment.
    """
    reached = machine.constants
    per_token = prompt_token(machine, sizes, tp=tp, fp8=fp8, itemsize=itemsize)
    lengths = iter(turn_lengths(play, sessions * play.turns))
    turns = [[next(lengths) for _ in range(play.turns)] for _ in range(sessions)]
    names = ("weights", "key-value cache", "sequences", "tensor parallelism")
    terms = dict.fromkeys((*names, "prompts", "environment", "turns"), 0.0)
    now, steps, held = 0.0, 0.0, 0.0  # held: tokens of all decoding trajectories
    later = deque(range(sessions))
    at_once = int(max(1, min(sessions, room / play.text_length)))
    waiting = [(0.0, later.popleft(), 0) for _ in range(at_once)]
    contexts = [0.0] * sessions
    running: list[tuple[float, int, int]] = []  # (step at which the turn ends, session, turn)
    while waiting or running:
        if not running and waiting[0][0] > now:
            terms["environment"] += waiting[0][0] - now
            now = waiting[0][0]
        if machine.hardware.cores and waiting and waiting[0][0] <= now:
            alone = decode_step(machine, sizes, tp=tp, batch=1, context=0, itemsize=itemsize)[0]
            terms["prompts"] += alone  # prompts are a pass of their own
            now += alone
        while waiting and waiting[0][0] <= now:
            _, session, turn = heapq.heappop(waiting)
            if play.window and turn >= play.window:  # a turn has left it
                answers = turns[session][turn + 1 - play.window : turn]
                read = contexts[session] = play.window * play.prompt_tokens + sum(answers)
            else:
                read = play.prompt_tokens + (0.0 if cached else contexts[session])
                contexts[session] += play.prompt_tokens
            terms["prompts"] += play.prefilled * read * per_token
            terms["turns"] += reached.turn
            now += play.prefilled * read * per_token + reached.turn
            held += contexts[session]
            heapq.heappush(running, (steps + turns[session][turn], session, turn))
        batch = len(running)
        context = held / batch
        if machine.hardware.cores:  # the embedded engine attends to as many places for all
            context = max(contexts[s] + turns[s][t] - (end - steps) for end, s, t in running)
        step = partial(
            decode_step, machine, sizes, batch=batch, tp=tp, ep=ep, fp8=fp8, itemsize=itemsize
        )
        ahead = running[0][0] - steps
        if waiting:
            first = sum(step(context=context))
            ahead = min(ahead, max(1.0, math.ceil((waiting[0][0] - now) / first)))
        parts = step(context=context + ahead / 2)  # a token longer after each step
        for name, seconds in zip(names, parts):
            terms[name] += ahead * seconds
        now += ahead * sum(parts)
        steps += ahead
        held += ahead * batch
        while running and running[0][0] <= steps + 1e-9:
            _, session, turn = heapq.heappop(running)
            contexts[session] += turns[session][turn]
            held -= contexts[session]
            if turn + 1 < play.turns:
                heapq.heappush(waiting, (now + play.environment_seconds, session, turn + 1))
            elif later:
                heapq.heappush(waiting, (now, later.popleft(), 0))
    return tuple(terms.items())


def cut_of(config: StarPOConfig, setting: Setting) -> TrainingLayout:
    """Read the layout and precision in which a run trains."""
    layout = config.parallel
    return TrainingLayout(
        **layout.cut._asdict(),
        dp=setting.dp,
        copies=True,
        sequence_parallel=layout.sequence_parallel,
        shards_optimizer=layout.use_distributed_optimizer,
        parks_optimizer=layout.optimizer_cpu_offload,
        fp8=layout.fp8 != "none",
        recompute=layout.recomputation,
        itemsize=setting.itemsize,
    )


def hand_over(
    machine: Machine, shape: ModelShape, setting: Setting, num_samplers: int
) -> tuple[Terms, Terms]:
    """Compute the seconds in which as many ranks that only sample get the weights (0: all ranks do
    both): seconds of ranks that train, and seconds of ranks that sample.
    """
    reached, cut = machine.constants, setting.parallel.cut
    weights = shape.engine_weights(setting.itemsize, setting.engine_tp, fp8=setting.engine_fp8)
    taken = {"weights into engine": weights / reached.sync}
    if not num_samplers:
        is_local = cut.pp == 1 and (  # of a mixture nearly all bytes are experts'
            setting.engine_ep == cut.ep if shape.num_experts else setting.engine_tp == cut.tp
        )
        moved = 0.0 if is_local else weights / machine.link(cut.pp * max(cut.tp, cut.ep))
        return {"weights between ranks": moved}, taken
    whole, ranks = shape.engine_weights(setting.itemsize, 1), cut.tp * cut.pp
    # the first sampler passes them on to the others
    taken["weights to samplers"] = min(2, num_samplers) * whole / CONNECTION
    return {
        "weights between ranks": whole / machine.link(ranks) if ranks > 1 else 0.0,
        "weights to host": whole / (reached.link * machine.hardware.host_link),
    }, taken


def waited(phases: Mapping[str, Terms], staleness: int) -> Terms:
    """Compute the part of "rollout" that ranks which train wait for, where others play it and get
    the weights for it: rollout t begins when it has those of step t - `staleness`, and step t when
    it has rollout t.
    """
    played = sum(phases["rollout"].values())
    own = sum(sum(terms.values()) for terms in phases.values()) - played
    arriving = phases["rollout"]["weights to samplers"]  # while they play the rollout before
    step = max(own, played - arriving, (own + played) / (1 + staleness))
    return {name: (step - own) / played * time for name, time in phases["rollout"].items()}


def offloaded(shape: ModelShape, setting: Setting) -> int:
    """Count the bytes that a rank moves to the host in a step, and back."""
    layout, roles = setting.parallel, range(1 + setting.has_critic)
    states = [device_state(shape, setting, 0, is_critic=bool(role)) for role in roles]
    moved = sum(state.parameters + state.optimizer for state in states)
    moved *= not layout.rollout_ranks  # which have devices of their own
    return moved + (layout.offload == "turns") * (states[0].parameters + states[0].optimizer)


def computed_length(config: StarPOConfig, play: Play) -> float:
    """Return the tokens of a trajectory that a pass of the trainer computes, on average."""
    return play.length / (play.sharing if config.shares_prefixes else 1.0)


def step_seconds(
    machine: Machine, shape: ModelShape, config: StarPOConfig, num_gpus: int, play: Play
) -> dict[str, Terms]:
    """Predict phase -> term -> seconds of a step of StarPO, in the order in which they happen. The
    filter is assumed to keep the share that it names, all groups if it names none.

    With placement separate these are the seconds of ranks that train: of a rollout that others play
    meanwhile only those that they wait for. Raises ValueError for a split that cannot be.
    """
    machine = machine.shared_by(num_gpus)
    trainers = config.parallel.num_trainers(num_gpus)
    samplers = config.parallel.rollout_ranks or trainers
    setting, sizes = Setting.from_config(config, trainers), Sizes.of(shape)
    cut, rolled = cut_of(config, setting), config.rollout
    reached, hardware = machine.constants, machine.hardware
    if (cut.fp8 or setting.engine_fp8) and not hardware.fp8:
        raise ValueError(
            f"--fp8 and --rollout-fp8 need a GPU that computes in FP8, and --hardware"
            f" {hardware.name} does not; drop them or take another"
        )
    given, taken = hand_over(machine, shape, setting, config.parallel.rollout_ranks)
    is_apart = config.parallel.placement == "separate"
    phases = {"sync": given if is_apart else taken | given}
    engines = rolled.num_engines(samplers, min(samplers, hardware.node))
    sessions = rolled.sessions_per_engine(engines)
    phases["rollout"] = dict(
        rollout(
            machine, sizes, play, sessions=sessions, room=rolled.kv_cache_size(sessions),
            tp=setting.engine_tp, ep=setting.engine_ep, fp8=setting.engine_fp8,
            itemsize=setting.itemsize,
        )
    )  # fmt: skip
    trained = (config.filter.num_kept(rolled.num_groups) or rolled.num_groups) * rolled.group_size
    count = max(1, round(trained / config.train.minibatch_size))
    minibatch = trained / count  # as `data.packing.minibatch_ids` divides them
    updates = count * config.train.updates_per_rollout

    def micros(trajectories: float) -> dict[str, float]:
        of_rank = max(1.0, trajectories / cut.dp)
        computed = of_rank * computed_length(config, play)
        least = min(4 * cut.pp, of_rank * play.texts) * (cut.pp > 1)
        count = math.ceil(max(1.0, computed / setting.max_tokens, least))
        return {
            "tokens": computed / count,
            "length": play.text_length,
            "micros": count,
            "labels": of_rank * play.sampled / computed,
        }

    def scored(**changes: float) -> Terms:
        terms = passes(machine, sizes, cut, backward=0.0, **(micros(trained) | changes))
        return untuned(machine, terms | {"batch": reached.start})

    if config.old_logprobs_from(updates) == "pass":
        phases["old log-probabilities"] = scored()
    if setting.has_reference:  # it takes the place of the actor's parameters, which come back
        moved = 3 * state_of(shape, setting, 0, is_critic=False).parameters
        phases["reference"] = scored() | {"host link": moved / reached.link / hardware.host_link}
    update = training(machine, sizes, cut, **micros(minibatch))
    if setting.has_critic:
        phases["values"] = scored(labels=0.0)
        learned = passes(machine, sizes, cut, **(micros(minibatch) | {"labels": 0.0}))
        critic = {name: update[name] for name in ("data parallelism", "optimizer")} | learned
        phases["update critic"] = {
            name: updates * time for name, time in untuned(machine, critic).items()
        }
    phases["update actor"] = {
        name: updates * time for name, time in untuned(machine, update).items()
    }

    if config.parallel.offload != "none":
        moved = offloaded(shape, setting)
        phases["offload"] = {"host link": 2 * moved / (reached.link * hardware.host_link)}
    tokens = rolled.num_groups * rolled.group_size * play.length
    phases["other"] = {"overhead": reached.overhead * tokens}
    if is_apart:
        phases["rollout"] |= taken
        phases["rollout"] = waited(phases, rolled.max_staleness)
    return phases


def by_timer(phases: Mapping[str, Terms]) -> Terms:
    """Sum predicted seconds under the timers of a run (keys of PHASES)."""
    return {
        timer: sum(sum(phases.get(part, {}).values()) for part in parts)
        for timer, parts in PHASES.items()
    }


def default_play(config: StarPOConfig, response: float | None = None, **changes: float) -> Play:
    """Assume the trajectories of a run: `response` tokens per turn, or half of its limit;
    observations fill the longest trajectory, or the longest window of it. A trajectory ends when
    its context is full. Raises ValueError for a response above the limit.
    """
    turns, limit = config.environment.expected_turns, config.environment.expected_response_length
    window, room = config.rollout.context_window, config.rollout.max_context_length
    if response and response > limit:
        raise ValueError(
            f"--response-tokens ({response:g}) must not be above --max-response-length ({limit}),"
            " which a turn cannot exceed; lower it or raise --max-response-length"
        )
    seen, response = min(turns, window or turns), response or limit / 2
    prompt = max(32.0, room / seen - limit)
    held = max(1, math.floor(room / (prompt + response) + 1e-9))  # turns
    return Play(
        turns=turns if held >= seen else held,
        prompt_tokens=prompt,
        response_tokens=response,
        max_response=limit,
        window=window,
        **changes,
    )
