"""Turns at the device: TRAIN -> SYNC -> ROLLOUT -> TRAIN. The loop names the phase; memory is moved
and recorded here.

TRAIN    the trainer's models compute; the engine sleeps.
SYNC     the policy's weights are sent to the engine, which has allocated memory for them; the
         rest of the trainer is offloaded.
ROLLOUT  the engine has the weights, so the trainer offloads its own; then the engine allocates
         its key-value cache.

If an engine loses its weights in the middle of a rollout, SYNC and ROLLOUT are repeated. With
placement `separate` (`separate.py`) ranks that train play evaluations only, in the same phases.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import psutil
import torch

from ragen_mega.config import OffloadMode
from ragen_mega.megatron.offload import Kind, Offloadable
from ragen_mega.ranks import collectives
from ragen_mega.ranks.launcher import control_groups
from ragen_mega.report.metrics import Max
from ragen_mega.rollout.engine import EngineError, RolloutEngine
from ragen_mega.rollout.sync import Phase

GIB = 2**30
ACTOR, CRITIC, TEACHER = "actor", "critic", "teacher"
_MAX_REASON = 600
_SIGNS = (
    "out of memory",
    "outofmemory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
)
"""Texts by which torch, CUDA, SGLang and the operating system report that memory has run out."""


_LEGAL = {
    Phase.TRAIN: (Phase.SYNC,),
    Phase.SYNC: (Phase.ROLLOUT, Phase.TRAIN),  # the latter on an error
    Phase.ROLLOUT: (Phase.TRAIN, Phase.SYNC),
}


class OutOfMemory(EngineError):
    """Trainer and engine do not fit on the device together."""


class Colocated:
    """Engines and trainer share the devices, in turns: models move between device and host as
    `mode` says.

    `none`: nothing moves. `rollout`: all are offloaded for rollouts. `turns`: in addition, actor
    and critic are on the device one at a time, each brought back by its next use.
    """

    def __init__(
        self,
        mode: OffloadMode = "none",
        timed: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`timed(name)` measures the time of its block."""
        self.phase = Phase.TRAIN
        self.mode = mode
        self._timed = timed
        self._models: dict[str, Offloadable] = {}
        self._ledger: dict[str, float] = {}

    def add(self, name: str, memory: Offloadable) -> None:
        """Manage a model's memory. With `turns` it is offloaded at once, to make room for
        building the next one.
        """
        memory.name = name
        self._models[name] = memory
        if self.mode == "turns":
            memory.bring_back = partial(self._take_turn, name)
            memory.offload()

    @contextmanager
    def lend_device(self, engine: RolloutEngine | None = None) -> Iterator[None]:
        """SYNC inside, with the engine awake, TRAIN afterwards; `enter(Phase.ROLLOUT)` once the
        weights are sent.

        Raises OutOfMemory, in one line, if the engine or the trainer finds too little memory.
        """
        if self.phase is not Phase.TRAIN:
            raise RuntimeError(
                f"the device is lent already (phase {self.phase.name}); leave the first"
                " lend_device()"
            )
        self.enter(Phase.SYNC)
        is_full = False
        try:
            with self._explained(), engine.awake() if engine else nullcontext():
                yield
        except OutOfMemory:
            is_full = True  # the run ends: nothing has to come back, and nothing could
            raise
        finally:
            if not is_full:
                self.enter(Phase.TRAIN)

    def enter(self, phase: Phase) -> None:
        """Go to the next phase. Raises RuntimeError if it is not the next one."""
        if phase not in _LEGAL[self.phase]:
            legal = " or ".join(after.name for after in _LEGAL[self.phase])
            raise RuntimeError(
                f"after {self.phase.name} comes {legal}, not {phase.name}; see `lend_device`"
            )
        with self._timed("handover"), self._explained():
            self._record(f"{self.phase.value}_end")
            self.phase = phase
            if self.mode != "none":
                self._move()
            if phase is not Phase.TRAIN and torch.cuda.is_available():
                torch.cuda.empty_cache()  # the engine needs what torch has cached
            self._record(phase.value)

    def take_ledger(self) -> dict[str, Max]:
        """Return the memory since the last call, in GiB, of the rank that is worst off:
        `<phase>_<what>` after the phase was entered, `<phase>_end_<what>` before it was left.
        Collective.
        """
        ledgers = collectives.gather_objects(self._ledger)
        self._ledger = {}
        worst = {}
        for key in ledgers[0]:
            values = [ledger[key] for ledger in ledgers if key in ledger]
            worst[key] = Max(min(values) if key.endswith("_free_gib") else max(values))
        return worst

    def _move(self) -> None:
        """Offload and restore what the phase just entered requires."""
        if self.phase is Phase.SYNC:
            for name, memory in self._models.items():
                memory.offload(*(("gradients", "optimizer") if name == ACTOR else ()))
            self._models[ACTOR].restore("parameters")
        elif self.phase is Phase.ROLLOUT:
            self._models[ACTOR].offload()
        elif self.mode == "rollout":
            for memory in self._models.values():
                memory.restore()

    def _take_turn(self, name: str, *kinds: Kind) -> None:
        """Restore `kinds` of a model, after offloading the others."""
        if self.phase is not Phase.TRAIN:
            raise RuntimeError(
                f"{' and '.join(kinds)} of the {name} are away in phase {self.phase.name}; use them"
                " in TRAIN"
            )
        with self._timed("handover"), self._explained():
            for other, memory in self._models.items():
                if other != name:
                    memory.offload()
            self._models[name].restore(*kinds)

    def _record(self, when: str) -> None:
        """Add the current memory to the ledger; the tightest of a kind counts."""
        values = {f"{name}_gib": size / GIB for name, size in device_memory().items()}
        values["offloaded_gib"] = (
            sum(sum(memory.away().values()) for memory in self._models.values()) / GIB
        )
        for name, value in values.items():
            key, choose = f"{when}_{name}", min if name == "free_gib" else max
            self._ledger[key] = choose(value, self._ledger.get(key, value))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn any error of the block that means that memory has run out into an OutOfMemory."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            is_news = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
                not isinstance(error, OutOfMemory)
                and any(sign in str(error).lower() for sign in _SIGNS)
            )
            if not is_news:
                raise
            held = ", ".join(
                f"{name} {_gib(sum(memory.on_device().values()))}"
                for name, memory in self._models.items()
            )
            device = ", ".join(f"{name} {_gib(size)}" for name, size in device_memory().items())
            remedy = "set --offload rollout, or " if self.mode == "none" else ""
            raise OutOfMemory(
                f"out of memory in phase {self.phase.name} (rank {collectives.rank()}: {device}; of"
                f" it models: {held or 'none'}); {remedy}lower --kv-cache-tokens,"
                " --max-context-length or --num-groups, and see ragen-mega plan for what fits; the"
                f" error was: {' '.join(str(error).split())[-_MAX_REASON:]}"
            ) from error


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def device_memory() -> dict[str, int]:
    """Return the bytes on this rank's device: the bytes of torch's allocator, its peak since the
    last call, and the free bytes.

    On a CPU the resident memory of this process.
    """
    if not torch.cuda.is_available():
        return {"resident": psutil.Process().memory_info().rss}
    free, _ = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": peak,
        "free": free,
    }


def device_capacity() -> int:
    """Return the bytes of this rank's device, or its part of a device that ranks share; on a CPU an
    equal part of the machine's memory, or of what the control groups of this process allow, for
    each rank on it.
    """
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1] // collectives.ranks_per_device()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", collectives.world_size()))
    return host_memory() // ranks


def host_memory(system: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the machine's, or the least that its
    control groups (v1 or v2) or those above them allow. A file without a number sets no limit.
    """
    limits = [psutil.virtual_memory().total]
    for folder in control_groups("memory", system):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # not there, or "max"
                limits.append(int((folder / name).read_text()))
    return min(limits)
