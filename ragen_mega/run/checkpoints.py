"""The checkpoints of a run: their content, when they are due, and the return to one."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save

from ragen_mega.config import StarPOConfig
from ragen_mega.megatron import checkpoint
from ragen_mega.megatron.trainer import Trainer
from ragen_mega.ranks.collectives import on_main
from ragen_mega.run.guards import CollapseGuard
from ragen_mega.run.separate import Samplers
from ragen_mega.run.timers import Timers
from ragen_mega.storage.checkpoints import CHECKPOINTS, Checkpoint, CheckpointWriter
from ragen_mega.storage.integrity import write_whole
from ragen_mega.storage.rollouts import oldest_kept


@dataclass(frozen=True)
class Attribute:
    """A plain value of an object, with the two methods of an entry of the table."""

    owner: Any
    name: str

    def state_dict(self) -> Any:
        return getattr(self.owner, self.name)

    def load_state_dict(self, state: Any) -> None:
        setattr(self.owner, self.name, state)


class RunCheckpoints(CheckpointWriter):
    """The checkpoints of a run: its trainers, the weights that samplers still need, and a table of
    everything else that a resumed run needs: name -> object with `state_dict` and
    `load_state_dict`.
    """

    def __init__(
        self,
        directory: Path,
        config: StarPOConfig,
        table: Mapping[str, Any],
        *,
        models: Mapping[str, str],
        trainers: Mapping[str, Trainer],
        samplers: Samplers | None,
        guard: CollapseGuard,
        timers: Timers,
    ) -> None:
        self._config, self._timers = config.checkpoint, timers
        self._trainers, self._samplers, self._guard = trainers, samplers, guard
        self.best_success: float | None = None
        self._best_before: float | None = None  # the newest checkpoint
        self._started = time.monotonic()
        self._table = {
            **table,
            "collapse_guard": guard,
            "totals": timers,
            "seconds": Attribute(self, "seconds"),
        }
        super().__init__(
            directory / CHECKPOINTS,
            config.to_dict(),
            models=models,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
        )

    @property
    def seconds(self) -> float:
        """Seconds since the run began, without those between its processes."""
        return time.monotonic() - self._started

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self._started = time.monotonic() - seconds

    def save_run(self, step: int, success: float | None = None) -> None:
        """Write a checkpoint in the background; `success` is the success of an evaluation at this
        step. Collective.
        """
        self.wait()
        self._best_before = self.best_success
        if self._samplers:
            self._samplers.flush()
        state = {name: part.state_dict() for name, part in self._table.items()}
        with self._timers.timed("checkpoint"):
            self.save(step, self._stage, state, success, self._guard.pinned)
        if self._is_best(success):
            self.best_success = success

    def wait(self) -> None:
        """Wait as the writer does; a success whose checkpoint is not there is not the best one."""
        with self._timers.timed("checkpoint"):
            super().wait()
        if self._failure is not None:
            self.best_success = self._best_before

    def _stage(self, directory: Path) -> Callable[[], list[Path]]:
        """Copy the state of a checkpoint and return the function that writes it: trainers, and the
        samples that are still to come under earlier weights.
        """
        write = checkpoint.stage(directory, trainers=self._trainers)
        ahead = self._samplers.staged() if self._samplers else {}

        def write_all() -> list[Path]:
            for name, content in ahead.items():
                write_whole(directory / name, save(content))
            return [*write(), *(directory / name for name in ahead)]

        return write_all

    def restore(self, saved: Checkpoint) -> None:
        """Load a checkpoint of any layout. Collective. Raises ValueError if that cannot be."""
        checkpoint.load(saved.directory, self._trainers)
        self.saved_step = saved.step
        for name, part in self._table.items():
            if name in saved.state:
                part.load_state_dict(saved.state[name])
        self.best_success = on_main(lambda: self.best_score(saved.step))
        if not {*self._guard.pinned}.issubset(on_main(self.steps)):  # the guard only warned then
            self._guard.task_changed()
            self._guard.good_step = None
        for trainer in self._trainers.values():
            trainer.set_lr_factor(self._guard.lr_factor)
        if self._samplers:
            self._samplers.read_staged(saved.directory)

    def restore_weights(self, saved: Checkpoint) -> None:
        """Load what a checkpoint holds of the trainers, except for the time on their schedules,
        with the guard's learning rate. The engine gets the weights with the next rollout.
        """
        with self._timers.timed("rollback"):
            times = {name: trainer.schedule.num_steps for name, trainer in self._trainers.items()}
            checkpoint.load(saved.directory, self._trainers)
            for name, trainer in self._trainers.items():
                trainer.schedule.num_steps = times[name]
                trainer.set_lr_factor(self._guard.lr_factor)

    def is_due(self, step: int, success: float | None) -> bool:
        """Return whether a checkpoint is due after so many steps, of which the last one was
        evaluated with this success. Collective.
        """
        interval = self._config.save_interval
        is_regular = bool(interval) and step % interval == 0
        if is_regular or success is None or not self._config.keep_best:
            return is_regular
        self.wait()  # the best one before may not have been written
        return self._is_best(success)

    def _is_best(self, success: float | None) -> bool:
        return success is not None and (self.best_success is None or success > self.best_success)

    def oldest_rollout(self, step: int) -> int:
        """Return the first step whose stored rollout is still needed; on the first rank."""
        saved = self.steps()
        # The checkpoint to go back to may be old; the steps after it are not repeated.
        saved = [each for each in saved if each not in self._guard.pinned] or saved
        oldest = oldest_kept(step, self._config.keep_rollouts, saved)
        if self._samplers:  # checkpoints lack weights of rollouts that were on the disk
            oldest = min(each for each in (oldest, *saved, self.saved_step) if each is not None)
        return oldest
