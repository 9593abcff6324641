"""Prediction of the seconds of a step: the bytes and operations of its parts, over the machine's
rates.

No torch, no ranks. FLOPs and the pipeline's bubble: arXiv:2104.04473; traffic of tensor
parallelism: arXiv:2205.05198, of sharded optimizers: arXiv:1910.02054; backward of fused attention:
arXiv:2205.14135. docs/predictor.md says in words what is counted and how far published steps are
from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from ragen_mega.config import StarPOConfig
from ragen_mega.models.lora import expected_adapters
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.hardware import Machine
from ragen_mega.planning.memory import (
    MOMENTS,
    ON_DEVICE,
    AdapterSizes,
    Setting,
    adapter_sizes,
    device_state,
    state_of,
)
from ragen_mega.ranks.waits import Cause
from ragen_mega.run.idleness import Usage, usage

BF16, FP32 = 2, 4
TILE = 256
"""Assumed: inner elements in whose time a tile of a matrix product starts and finishes."""
ATTENTION = 0.5
"""Assumed: share of the peak that attention reaches with heads of 128 channels."""
ADAM_BYTES = 34
"""Bytes per element: gradient, float32 weight and two moments read, three of them written, a copy
in bfloat16, and the gradient's norm.
"""
CONNECTION = 1e9
"""Assumed: bytes a second of weights from ranks that train to ranks that only sample, over one
connection between processes, with its copies (docs/benchmarks/placement.md).
"""
BROADCAST = 20e9
"""Assumed: bytes a second of the same weights over NCCL from each rank that sends, as SGLang's
servers get them; other projects reach 14 to 44 GB/s (docs/asynchrony.md).
"""
SPREAD = 0.5
"""Assumed standard deviation of the logarithm of the tokens per turn."""
ALL_REDUCE = 1e-5
"""Assumed: seconds of a small all-reduce in a decode step, which a graph starts."""
EXPOSED = 0.3
"""Assumed: share of overlapped communication that is waited for all the same."""
LAUNCHES_OF_ADAPTERS = 2.0
"""Assumed: kernels of a layer with adapters over the kernels of one without."""
PREFILL_WITH_ADAPTERS = 0.55
"""Speed at which SGLang reads prompts with adapters, over its speed without: published as 40 to 50%
slower (github.com/sgl-project/sglang/issues/25095).
"""
_STAGES = {"rollout": "rollout", "sync": "sync", "offload": "handover", "other": "other"}
"""Phase -> stage of the trainer's loop; every other phase is a part of an update."""
BUCKETS = 32
"""Lengths of trajectories that a rollout distinguishes."""
Terms = dict[str, float]
"""Term -> seconds."""


@dataclass(frozen=True)
class TrainingLayout:
    """A layout of training, and its precision."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    vp: int = 1
    """Chunks of layers of a pipeline stage (interleaved schedule)."""
    cp: int = 1
    """Ranks of the `dp` that share the tokens of a microbatch."""
    overlaps: bool = False
    """Collectives of tensor and expert parallelism overlap with matrix products."""
    parks_optimizer: bool = False
    """Adam's state stays in host memory, and an update brings it to the device and back."""
    fp8: bool = False
    recompute: str = "none"
    """Part that is computed again: none, selective (the feed-forward part) or full."""
    itemsize: int = BF16
    adapters: tuple[AdapterSizes, ...] = ()
    """Adapters beside a layer's frozen weights, which alone train; empty: all weights train."""

    @property
    def num_gpus(self) -> int:
        """Count the GPUs of the job."""
        return self.tp * self.pp * self.dp


def product(
    machine: Machine, rows: float, inner: float, columns: float, cut: TrainingLayout
) -> float:
    """Compute the seconds of [rows, inner] x [inner, columns]: its operations, and its operands
    once. In FP8 what is multiplied is also written, as it is and transposed.
    """
    reached = machine.constants
    share = reached.product_fp8 if cut.fp8 else reached.product
    peak = share * machine.hardware.peak(cut.itemsize, fp8=cut.fp8)
    size, quantised = (1, cut.itemsize + 2) if cut.fp8 else (cut.itemsize, 0)
    moved = size * (rows * inner + inner * columns) + cut.itemsize * rows * columns
    moved += quantised * rows * inner
    return 2 * rows * (inner + TILE) * columns / peak + moved / machine.memory


def layer(
    machine: Machine, shape: ModelShape, cut: TrainingLayout, tokens: float, length: float
) -> Terms:
    """Compute the seconds of a layer's forward pass over `tokens` positions in trajectories of
    `length`.
    """
    h, tp, itemsize = shape.hidden_size, cut.tp, cut.itemsize
    heads, keys = (n * shape.head_dim / tp for n in (shape.num_heads, shape.num_kv_heads))
    # an expert is whole, and each rank sends its own tokens to it
    used, experts = shape.experts_per_token or 1, shape.num_experts / cut.ep or 1
    ffn = shape.ffn_size if shape.num_experts else shape.ffn_size / tp
    routed = tokens * used / tp if shape.num_experts else tokens
    products = (
        (1.0, tokens, h, heads + 2 * keys),
        (1.0, tokens, heads, h),
        (experts, routed / experts, h, 2 * ffn),
        (experts, routed / experts, ffn, h),
    )
    # two norms and two additions; split and rotated queries and keys; the gate; sorted tokens
    passes = 10 * tokens * h / tp + 4 * tokens * (heads + keys) + 3 * routed * ffn
    passes += machine.constants.permute * routed * h * bool(shape.num_experts)
    # the exponentials of a narrow head take as long (figures 5 and 6 of arXiv:2407.08608)
    attended = ATTENTION * 1.5 * shape.head_dim / (shape.head_dim + 64)
    attended *= machine.hardware.peak(itemsize)
    added = 0.0
    for inner, width, columns, _, number in cut.adapters:
        rows = routed / number if number else tokens
        low = product(machine, rows, inner, width, replace(cut, fp8=False))
        low += product(machine, rows, width, columns, replace(cut, fp8=False))
        added += (number or 1) * (low + rows * columns * itemsize / machine.memory)  # the sum
    waited = EXPOSED if cut.overlaps else 1.0
    gathered = (2 if shape.num_experts else 4) * (tp - 1) / tp * tokens * h * itemsize
    sent = 2 * routed * (cut.ep - 1) / cut.ep * h * itemsize  # there and back
    received = (cut.cp - 1) / cut.cp * length * 2 * keys * itemsize  # by the last of one text
    return {
        "matrix products": sum(
            number * product(machine, rows, inner, columns, cut)
            for number, rows, inner, columns in products
        ),
        "adapters": added,
        "attention": 2 * tokens * length * heads / attended,
        "element-wise": itemsize * passes / machine.memory,
        "tensor parallelism": waited * gathered / machine.link(tp),
        "expert parallelism": waited * sent / machine.link(cut.ep * tp),
        "context parallelism": received / machine.link(cut.cp * tp),
    }


def head(machine: Machine, shape: ModelShape, cut: TrainingLayout, tokens: float) -> float:
    """Compute the seconds of the forward pass of LM head and loss of so many labels, whose logits
    are read and written, with 3.5 passes in float32.
    """
    vocab, in_bf16 = shape.vocab_size / cut.tp, replace(cut, fp8=False)
    moved = tokens * vocab * (2 * cut.itemsize + 3.5 * FP32)
    seconds = product(machine, tokens, shape.hidden_size, vocab, in_bf16)
    return seconds + moved / machine.memory


def passes(
    machine: Machine,
    shape: ModelShape,
    cut: TrainingLayout,
    *,
    tokens: float,
    length: float,
    micros: float,
    is_trained: bool = True,
    labels: float = 1.0,
) -> Terms:
    """Compute the seconds of `micros` microbatches of `tokens` positions through the pipeline,
    forward and, if they are trained on, backward. The LM head computes `labels` times as many
    tokens, 0 of a critic.
    """
    single, layers = layer(machine, shape, cut, tokens, length), shape.num_layers / cut.pp
    whole = sum(single.values())
    mlp = shape.expert_size * (shape.experts_per_token or 1)
    beside = whole - single["attention"] - single["context parallelism"]
    around = mlp / (mlp + shape.attention_size) * beside
    again = {"none": 0.0, "selective": around, "full": whole}[cut.recompute] * is_trained
    frozen = bool(cut.adapters)  # whose gradients nobody computes
    backward = dict.fromkeys(single, 2.0) | {"attention": 2.5, "matrix products": 2.0 - frozen}
    backward |= dict.fromkeys(("tensor parallelism", "expert parallelism"), 1.0)
    # keys are received again, unless the whole layer is computed again
    backward["context parallelism"] = 1.0 if cut.recompute == "full" else 2.0
    terms = {
        name: micros * layers * seconds * (1 + backward[name] * is_trained)
        for name, seconds in single.items()
    }
    terms["recomputation"] = micros * layers * again
    launches = machine.constants.launch * (LAUNCHES_OF_ADAPTERS if frozen else 1.0)
    started = micros * layers * (1 + (2 + again / whole) * is_trained) * launches
    terms["launches"] = max(0.0, started - sum(terms.values()))  # the host runs ahead of the GPU
    body = sum(terms.values())
    last = micros * (1 + (2 - frozen) * is_trained) * head(machine, shape, cut, labels * tokens)
    most = math.ceil(layers)  # of a stage; the last one has those that are left, and the LM head
    left = shape.num_layers - most * (cut.pp - 1)
    slowest = max(most * body, left * body + last * layers) / layers
    hop = tokens * shape.hidden_size * cut.itemsize / cut.tp / machine.link(cut.num_gpus)
    hops = (micros + cut.pp - 1) * (1 + is_trained) * (cut.pp > 1)
    return terms | {
        "LM head": last / cut.pp,
        "stage imbalance": slowest - body - last / cut.pp,
        "pipeline bubble": (cut.pp - 1) / cut.vp * (body + last / cut.pp) / micros,
        "pipeline transfers": hops * hop,
    }


def training(
    machine: Machine,
    shape: ModelShape,
    cut: TrainingLayout,
    *,
    tokens: float,
    length: float,
    micros: float,
    labels: float = 1.0,
) -> Terms:
    """Compute the seconds of one optimizer step on `micros` microbatches of every data-parallel
    rank. Gradients are reduced and parameters gathered beside the passes of one microbatch, as far
    as these hide it.
    """
    terms = passes(machine, shape, cut, tokens=tokens, length=length, micros=micros, labels=labels)
    layers = shape.num_layers * sum(shape.layer_sizes(cut.tp, cut.ep, matrices=True))
    held = (layers + shape.head_size * (2 - shape.is_tied) / cut.tp) / cut.pp
    updated, itemsize = shape.num_parameters / cut.num_gpus, cut.itemsize
    if cut.adapters:  # which are float32
        held = shape.num_layers / cut.pp * sum(adapter.elements for adapter in cut.adapters)
        updated, itemsize = held / cut.dp, FP32
    ring = (cut.dp - 1) / cut.dp * held * (FP32 + itemsize)
    ring /= machine.link(cut.num_gpus // cut.pp, cut.tp)
    hidden = sum(terms.values()) / micros
    terms["data parallelism"] = max(EXPOSED * ring, ring - hidden)
    terms["optimizer"] = ADAM_BYTES * updated / machine.memory + machine.constants.update
    if cut.parks_optimizer:
        terms["optimizer"] += 2 * (MOMENTS + FP32) * updated / machine.host_link
    return terms


def decode_step(
    machine: Machine,
    shape: ModelShape,
    *,
    tp: int,
    batch: float,
    context: float,
    fp8: bool = False,
    itemsize: int = BF16,
) -> Terms:
    """Compute the seconds in which an engine samples a token for each of `batch` sequences of
    `context` tokens on average.
    """
    hardware, reached = machine.hardware, machine.constants
    bandwidth, used = reached.decode_memory * hardware.memory, shape.experts_per_token
    read = 1.0
    if shape.num_experts:  # experts that no token chose are not read; texts on a subject agree
        met = 1 - (1 - used / shape.num_experts) ** batch**reached.routing
        read = met * shape.num_experts / reached.decode_expert
    layers = shape.num_layers * (shape.attention_size + read * shape.expert_size)
    weights = (layers * (1 if fp8 else itemsize) + shape.head_size * itemsize) / tp
    width = max(1.0, shape.num_kv_heads / tp) * shape.head_dim
    cache = 2 * shape.num_layers * width * itemsize * context
    peak = reached.product * hardware.peak(itemsize, fp8=fp8)
    flops = 2 * (shape.num_layers * shape.active_size + shape.head_size) / tp
    reduced = 2 * (tp - 1) / tp * batch * shape.hidden_size * itemsize / machine.link(tp)
    return {
        "reading weights": weights / bandwidth,
        "reading keys and values": batch * cache / bandwidth,
        "products": batch * flops / peak,
        "host": shape.num_layers * reached.decode_layer + batch * reached.decode_sequence,
        "tensor parallelism": 2 * shape.num_layers * (reduced + ALL_REDUCE) * (tp > 1),
    }


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
    window: int = 0
    """Turns that the policy sees at a time (0: all). When one leaves the window, the turns that are
    left are a new prompt and a separate text; each holds the task as the first one does.
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
        """Count the tokens of a text, on average; its last token attends to all the others."""
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


def sampled_lengths(play: Play, count: int) -> list[float]:
    """Return the sampled tokens of `count` trajectories, the shortest first: quantiles of a
    log-normal distribution, whose turns are independent, cut at the limit, with the mean of `play`.
    """
    normal, most = NormalDist(sigma=play.spread / math.sqrt(play.turns) or 1e-9), play.max_response
    drawn = [math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    lengths, scale = drawn, 1.0
    for _ in range(30):  # what the limit cuts off, the others make up for
        scale *= play.sampled * count / sum(lengths)
        lengths = [min(scale * length, play.turns * most) for length in drawn]
    return lengths


@lru_cache(maxsize=4096)  # a search asks for the same ones under many layouts of training
def rollout(
    machine: Machine,
    shape: ModelShape,
    play: Play,
    *,
    sessions: int,
    tp: int = 1,
    fp8: bool = False,
    itemsize: int = BF16,
    room: float = math.inf,
) -> Mapping[str, float]:
    """Compute the terms of the seconds in which one engine plays `sessions` trajectories. As many
    decode at once as `room`, the tokens whose keys and values it can hold, has room for; the
    longest are left for the end, few at a time. Each waits for its environment between two turns.
    """
    at_once = max(1.0, min(sessions, room / play.text_length))
    context = (play.text_length + play.prompt_tokens) / 2  # on average over an answer
    peak = machine.constants.product * machine.hardware.peak(itemsize, fp8=fp8)
    terms = {
        "prompts": sessions * play.read * 2 * shape.num_layers * shape.active_size / tp / peak,
        "environment": (play.turns - 1) * play.environment_seconds * math.ceil(sessions / at_once),
    }
    lengths = sampled_lengths(play, min(sessions, BUCKETS))
    for position, (shorter, length) in enumerate(zip([0.0, *lengths], lengths)):
        running = sessions * (1 - position / len(lengths))
        batch = min(running, at_once)
        step = decode_step(
            machine, shape, batch=batch, context=context, tp=tp, fp8=fp8, itemsize=itemsize
        )
        for name, seconds in step.items():
            spent = (length - shorter) * running / batch * seconds
            terms[name] = terms.get(name, 0.0) + spent
    return terms


def cut_of(config: StarPOConfig, shape: ModelShape, setting: Setting) -> TrainingLayout:
    """Read the layout and precision in which a run trains."""
    layout = config.parallel
    return TrainingLayout(
        **layout.cut._asdict(),
        dp=setting.dp,
        cp=layout.context_parallel_size,
        parks_optimizer=layout.optimizer_cpu_offload,
        fp8=layout.fp8 != "none",
        recompute=layout.recomputation,
        itemsize=setting.itemsize,
        adapters=tuple(adapter_sizes(shape, setting)),
    )


def hand_over(machine: Machine, shape: ModelShape, setting: Setting) -> Terms:
    """Compute the seconds in which engines get the weights of ranks that train beside them."""
    cut, reached = setting.parallel.cut, machine.constants
    weights = shape.engine_weights(setting.itemsize, setting.engine_tp, fp8=setting.engine_fp8)
    if setting.lora.lora_sync == "adapter":  # every rank of an engine takes the whole adapter
        sizes = expected_adapters(shape, setting.lora).values()
        weights = FP32 * sum(map(math.prod, sizes))
    is_local = cut.pp == 1 and (  # of a mixture nearly all bytes are experts'
        setting.engine_ep == cut.ep if shape.num_experts else setting.engine_tp == cut.tp
    )
    moved = 0.0 if is_local else weights / machine.link(cut.pp * max(cut.tp, cut.ep))
    return {"weights into engine": weights / reached.sync, "weights between ranks": moved}


def offloaded(shape: ModelShape, setting: Setting) -> int:
    """Count the bytes that a rank moves to the host in a step, and back."""
    layout, roles = setting.parallel, range(1 + setting.has_critic)
    states = [device_state(shape, setting, 0, is_critic=bool(role)) for role in roles]
    moved = sum(state.parameters + state.optimizer for state in states)
    moved *= not layout.rollout_ranks  # which have their own devices
    return moved + (layout.offload == "turns") * (states[0].parameters + states[0].optimizer)


def computed_length(config: StarPOConfig, play: Play) -> float:
    """Return the tokens of a trajectory that a pass of the trainer computes, on average."""
    return play.length / (play.sharing if config.shares_prefixes else 1.0)


def total(phases: Mapping[str, Mapping[str, float]]) -> float:
    """Sum the seconds of a step."""
    return sum(sum(terms.values()) for terms in phases.values())


def updating(phases: Mapping[str, Mapping[str, float]]) -> float:
    """Sum the seconds of a step in which models compute what was sampled."""
    return total({name: terms for name, terms in phases.items() if name not in _STAGES})


def sampling(
    machine: Machine, shape: ModelShape, config: StarPOConfig, num_gpus: int, play: Play
) -> Terms:
    """Predict term -> seconds of a rollout on the ranks that sample."""
    trainers = config.parallel.num_trainers(num_gpus)
    samplers = config.parallel.rollout_ranks or trainers
    setting, rolled = Setting.from_config(config, trainers), config.rollout
    sessions = rolled.sessions_per_engine(
        rolled.num_engines(samplers, min(samplers, machine.hardware.node))
    )
    terms = dict(
        rollout(
            machine, shape, play, sessions=sessions, room=rolled.kv_cache_size(sessions),
            tp=setting.engine_tp, fp8=setting.engine_fp8, itemsize=setting.itemsize,
        )
    )  # fmt: skip
    if setting.lora.lora_sync == "adapter":
        terms["prompts"] /= PREFILL_WITH_ADAPTERS
    if config.parallel.rollout_ranks:
        whole = shape.engine_weights(setting.itemsize, 1)
        # all of them fetch whole weights, or the first passes them on to the others
        if setting.senders:
            cards = min(samplers, machine.hardware.node)  # of a node, whose ranks share what comes
            comes = cards * machine.constants.link * machine.hardware.network
            passed = whole / min(setting.senders * BROADCAST, comes)
        else:
            passed = whole / CONNECTION * (samplers > 1)
        weights = shape.engine_weights(setting.itemsize, setting.engine_tp, fp8=setting.engine_fp8)
        terms["weights into engine"] = passed + weights / machine.constants.sync
    return terms


def ranks_usage(
    phases: Mapping[str, Terms], sampled: Terms, config: StarPOConfig, num_gpus: int
) -> list[Usage]:
    """Predict how each rank spends a step of these phases, those that train first: what the log
    measures as share/*. Waits of equal ranks for each other are not predicted.
    """
    samplers, step, played = config.parallel.rollout_ranks, total(phases), sum(sampled.values())
    stages = dict.fromkeys((*_STAGES.values(), "update"), 0.0)
    for phase, terms in phases.items():
        stages[_STAGES.get(phase, "update")] += sum(terms.values())
    waits: dict[tuple[str, Cause], float] = {}
    if samplers:
        waits["rollout", "samples"] = stages["rollout"]
    trains = usage(stages, waits, step)
    samples = usage({"rollout": played}, {("start", "weights"): step - played}, step)
    return [trains] * (num_gpus - samplers) + [samples] * samplers


def step_seconds(
    machine: Machine, shape: ModelShape, config: StarPOConfig, num_gpus: int, play: Play
) -> dict[str, Terms]:
    """Predict phase -> term -> seconds of a step of StarPO, in the order in which they happen. The
    filter is assumed to keep the share that it names, all groups if it names none.

    With placement separate these are the seconds of ranks that train: of a rollout that others play
    meanwhile only those that they wait for. Raises ValueError for a split that cannot be.
    """
    trainers = config.parallel.num_trainers(num_gpus)
    setting, rolled = Setting.from_config(config, trainers), config.rollout
    cut = cut_of(config, shape, setting)
    if (cut.fp8 or setting.engine_fp8) and not machine.hardware.fp8:
        raise ValueError(
            f"--fp8 and --rollout-fp8 need a GPU that computes in FP8, and --hardware"
            f" {machine.hardware.name} does not; drop them or take another"
        )
    whole = shape.engine_weights(setting.itemsize, 1)
    phases = {"sync": hand_over(machine, shape, setting)}
    if config.parallel.rollout_ranks:  # they leave from the copy, beside the next step
        part = whole // (setting.senders or 1)
        stays = min(part, ON_DEVICE) if setting.senders else 0
        phases["sync"] = {
            "copy on the device": 2 * stays / machine.hardware.memory,
            "copy to the host": (part - stays) / machine.host_link,
        }
    phases["rollout"] = sampling(machine, shape, config, num_gpus, play)
    trained = (config.filter.num_kept(rolled.num_groups) or rolled.num_groups) * rolled.group_size
    count = max(1, round(trained / config.train.minibatch_size))
    minibatch = trained / count  # as `data.packing.minibatch_ids` divides them
    updates = count * config.train.updates_per_rollout

    def micros(trajectories: float) -> dict[str, float]:
        of_rank = max(1.0, trajectories * cut.cp / cut.dp) / cut.cp
        computed = of_rank * computed_length(config, play)
        least = min(4 * cut.pp, of_rank * cut.cp * play.texts) * (cut.pp > 1)
        count = math.ceil(max(1.0, computed / setting.max_tokens, least))
        return {
            "tokens": computed / count,
            "length": play.text_length,
            "micros": count,
            "labels": of_rank * play.sampled / computed,
        }

    def scored(**changes: float) -> Terms:
        return passes(machine, shape, cut, is_trained=False, **(micros(trained) | changes))

    def updated(**changes: float) -> Terms:
        terms = training(machine, shape, cut, **(micros(minibatch) | changes))
        return {name: updates * seconds for name, seconds in terms.items()}

    if config.old_logprobs_from(updates) == "pass":
        phases["old log-probabilities"] = scored()
    if setting.has_reference:  # it takes the place of the actor's parameters, which come back
        moved = 3 * state_of(shape, setting, 0, is_critic=False).parameters
        moved *= not setting.lora.rank  # the base is there
        phases["reference"] = scored() | {"host link": moved / machine.host_link}
    for number, (teacher, share) in enumerate(setting.teachers, 1):
        phases[f"teacher {number}" if number > 1 else "teacher"] = passes(
            machine, teacher, cut, is_trained=False, **micros(share * trained)
        )
    if setting.has_critic:
        phases["values"] = scored(labels=0.0)
        phases["update critic"] = updated(labels=0.0)
    phases["update actor"] = updated()
    if config.parallel.offload != "none":
        phases["offload"] = {"host link": 2 * offloaded(shape, setting) / machine.host_link}
    tokens = rolled.num_groups * rolled.group_size * play.length
    phases["other"] = {"overhead": machine.constants.overhead * tokens}
    if config.parallel.placement == "separate":
        played = sum(phases.pop("rollout").values())
        own, sent = total(phases), 0.0 if setting.senders else whole / CONNECTION
        step = max(own, played, sent, (own + sent + played) / (1 + rolled.max_staleness))
        phases["rollout"] = {"waiting for the ranks that sample": step - own}
    return phases


def default_play(config: StarPOConfig, response: float | None = None, **changes: float) -> Play:
    """Assume the trajectories of a run: `response` tokens per turn, or half of its limit;
    observations fill the longest trajectory, or its longest window. A trajectory ends when its
    context is full. Raises ValueError for a response above the limit.
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
