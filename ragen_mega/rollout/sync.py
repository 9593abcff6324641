"""The weight sync: the one way by which the policy's weights get into a rollout engine."""

import enum
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ragen_mega.ranks.collectives import gather_objects
from ragen_mega.rollout.all_ranks import on_all_ranks
from ragen_mega.rollout.engine import EngineShard, RolloutEngine


class Phase(enum.Enum):
    """The holder of the device, see `run/placement.py`."""

    TRAIN = "train"
    SYNC = "sync"
    ROLLOUT = "rollout"


class WeightSync:
    """Fills an engine with weights. Methods are collective over the ranks that share it."""

    def __init__(
        self,
        engine: RolloutEngine,
        export: Callable[[EngineShard | None], Iterable[tuple[str, Tensor]]],
        enter: Callable[[Phase], None] = lambda phase: None,
        adapter: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        """`export(shard)` streams the weights as the engine takes them; `enter` moves the memory of
        the trainer, where there is one. With `adapter`, which streams a policy's adapter, these are
        the weights of its base, which are sent where an engine of the job has them not yet.
        """
        self._engine, self._export, self._enter, self._adapter = engine, export, enter, adapter

    def send(self, *, again: bool = False) -> None:
        """Send the weights to the awake engine, hand the device over and let it sample. `again`:
        the engine had the same weights and has lost them; sessions continue. What then fails on one
        rank raises on all, each time before they meet next.
        """
        together: Callable[[], AbstractContextManager[object]]
        together = on_all_ranks if again else nullcontext
        has_base = self._adapter is not None and all(gather_objects(self._engine.has_base))
        if not has_base:
            with together():
                self._engine.load_weights(self._export(self._engine.shard), again=again)
        if self._adapter is not None:
            with together():
                self._engine.load_adapter(self._adapter(), again=again or not has_base)
        with together():
            self._enter(Phase.ROLLOUT)
        with together():
            self._engine.start()

    def send_again(self) -> None:
        """Repeat the transfer in the middle of a rollout, after an engine has lost its weights.
        Collective over all ranks, and raises on all or on none, see `on_all_ranks`.
        """
        with on_all_ranks():
            self._engine.pause()
            self._enter(Phase.SYNC)
        self.send(again=True)
