"""The rollout of every step, wherever it comes from: engines of these ranks, ranks that only
sample, or the disk, where an earlier process has left it.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor

from ragen_mega.config import StarPOConfig
from ragen_mega.data.checksums import checksum_each
from ragen_mega.data.exchange import read_on_main
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.ranks import collectives
from ragen_mega.ranks.collectives import on_main
from ragen_mega.run.log import StepLog
from ragen_mega.run.sampling import Origin, Sampling, Tasks, origin_of
from ragen_mega.run.separate import Role, Samplers
from ragen_mega.run.timers import Timers
from ragen_mega.storage.rollouts import RolloutStore


class Rollouts:
    """Recall, sample or receive the groups of one step after another, and store them. Methods are
    collective.
    """

    def __init__(
        self,
        config: StarPOConfig,
        policy: MegatronPolicy,
        sampling: Sampling,
        role: Role,
        files: RolloutStore,
        timers: Timers,
        *,
        oldest_needed: Callable[[], int],
        stop_if_asked: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """`oldest_needed` names the first step whose stored rollout must stay."""
        self.files = files
        self.sampling = sampling
        self._config, self._policy = config, policy
        self._engine, self._timers = sampling.engine, timers
        self._oldest_needed, self._say = oldest_needed, say
        self._due: tuple[Tasks, Origin]  # for the step that was recalled last
        self.samplers: Samplers | None = None
        self._sends_adapter = config.lora.lora_sync == "adapter"
        if config.parallel.placement == "separate":
            self.samplers = Samplers(
                config,
                role,
                sampling.tasks,
                recall=self._read,
                keep=self._write,
                stop_if_asked=stop_if_asked,
                say=say,
                base=partial(policy.export_weights, is_merged=False)
                if self._sends_adapter
                else None,
            )

    @property
    def are_remote(self) -> bool:
        """Whether ranks that only sample play them."""
        return self.samplers is not None

    def request(self, step: int) -> None:
        """Send the present weights, those after `step` steps, to the ranks that only sample, so
        that they play the rollout of step `step + max_staleness`. Does not wait for them, and does
        nothing where there are none.
        """
        if self.samplers:
            with self._timers.timed("sync"):
                digest = fingerprint(self._policy.local_weights())
                export = self._policy.export_weights
                stream = self._policy.export_adapter() if self._sends_adapter else export()
                self.samplers.order(step, digest, stream)

    def go_back(self, step: int) -> None:
        """Have `request(step)` order the rollouts from `step` on anew: the weights that others have
        sampled or would sample them under have collapsed, and the policy has left them.
        """
        if self.samplers:
            self.samplers.go_back(step)

    def recall(self, step: int) -> list[TrajectoryGroup] | None:
        """Read the groups that an earlier process has sampled for this step under the same weights,
        tasks and settings; None if there are none.
        """
        if self.samplers:  # they have looked when the rollout was requested
            return None
        with self._timers.timed("rollout_files"):
            tasks = self.sampling.tasks.sample(step)
            weights = fingerprint(self._policy.local_weights())
            origin = origin_of(self._config, tasks, weights, self._engine.weight_version + 1)
            groups = read_on_main(lambda: self._read(step, origin))
        self._due = tasks, origin
        if groups is not None:
            self._engine.weight_version += 1  # the version that sampled them
            self.sampling.tasks.sample_again(step, len(groups))
        return groups

    def sample(self, step: int, log: StepLog) -> list[TrajectoryGroup]:
        """Play the tasks of the step that was recalled last with an engine that has the policy's
        weights. Raises as `Sampling.sample` does.
        """
        tasks, _ = self._due
        groups = self.sampling.sample(step, tasks)
        self._timers.sampled_tokens = count_sampled(groups)
        log.add("time", self._policy.traffic.metrics())
        return groups

    def receive(self, step: int, log: StepLog) -> list[TrajectoryGroup]:
        """Wait for the rollout that other ranks sample. Raises as `Samplers.take` does."""
        assert self.samplers is not None  # they `are_remote`
        with self._timers.timed("rollout"):
            groups, seconds = self.samplers.take(step, log)
        if seconds:
            self._timers.sampled_tokens = count_sampled(groups)
            self._timers.sampling_seconds = seconds
        return groups

    def store(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Write the rollout that was sampled to disk and delete those that nobody needs any more.

        Raises OSError on all ranks if the disk is full.
        """
        _, origin = self._due
        with self._timers.timed("rollout_files"):
            on_main(lambda: self._write(step, origin, groups))

    def _read(self, step: int, origin: Origin) -> list[TrajectoryGroup] | None:
        """Read the stored rollout of a step on the first rank."""
        groups = self.files.recall(step, origin, self._say)
        if groups is not None:
            self._say(f"step {step}: repeated from the rollout in {self.files.directory}")
        return groups

    def _write(self, step: int, origin: Origin, groups: Sequence[TrajectoryGroup]) -> None:
        """Write the rollout on the first rank; with samplers, in their writer's thread."""
        self.files.write(step, groups, origin)
        self.files.prune(self._oldest_needed())


def count_sampled(groups: Sequence[TrajectoryGroup]) -> int:
    """Return tokens that the policy sampled."""
    return sum(t.num_sampled_tokens for group in groups for t in group.trajectories)


def fingerprint(parameters: Iterable[Tensor]) -> str:
    """Return a digest of the parameters of all ranks, in one pass over them. Collective."""
    local = hashlib.sha256(repr(checksum_each([*parameters])).encode()).hexdigest()
    return hashlib.sha256(repr(collectives.gather_objects(local)).encode()).hexdigest()
