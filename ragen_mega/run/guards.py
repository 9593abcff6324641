"""Work that taught nothing: updates skipped for a non-finite loss or gradient, and steps of which
the filter kept no group. Each is reported and counted; too many in a row end the run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ragen_mega.config import StarPOConfig
from ragen_mega.data.distributed import on_main
from ragen_mega.data.types import TokenBatch, TrajectoryGroup
from ragen_mega.rollout.summary import environment_errors
from ragen_mega.storage.sealed_files import write_sealed

FAULTS = "faults"
MAX_FILES = 20
"""Bad batches that are kept; later ones are only counted."""


class UpdateGuard:
    """Checks the result of every update. The trainer has already skipped a bad one, on all ranks
    alike.
    """

    def __init__(
        self, directory: Path | None, *, max_consecutive: int, report: Callable[[str], None]
    ) -> None:
        self.directory = directory
        """Where bad batches go; None keeps none."""
        self.max_consecutive = max_consecutive
        self.consecutive: dict[str, int] = {}
        """Model -> bad updates since its last good one."""
        self.count = 0
        """Bad updates of this step so far."""
        self._report = report

    def check(
        self, step: int, model: str, minibatch: TokenBatch, result: Mapping[str, float]
    ) -> dict[str, float]:
        """The finite numbers of an update's result; a bad update is reported and its batch kept.
        Collective.

        Raises OSError on all ranks if the batch cannot be written and FloatingPointError after too
        many bad updates.
        """
        if not result["skipped"]:
            self.consecutive[model] = 0
            return dict(result)
        self.consecutive[model] = self.consecutive.get(model, 0) + 1
        self.count += 1
        kept = on_main(lambda: self._keep(step, model, minibatch, result))
        self._report(
            f"step {step}: update of the {model} skipped, its loss ({result['loss']:g}) or gradient"
            f" ({result['grad_norm']:g}) is not finite" + (f"; batch in {kept}" if kept else "")
        )
        if self.consecutive[model] >= self.max_consecutive:
            raise FloatingPointError(
                f"{self.consecutive[model]} updates of the {model} in a row had a non-finite loss"
                f" or gradient (step {step})"
            )
        return {name: value for name, value in result.items() if math.isfinite(value)}

    def take_count(self) -> int:
        """Bad updates since the last call."""
        count, self.count = self.count, 0
        return count

    def _keep(
        self, step: int, model: str, minibatch: TokenBatch, result: Mapping[str, float]
    ) -> Path | None:
        if self.directory is None or (
            self.directory.is_dir() and len(list(self.directory.iterdir())) >= MAX_FILES
        ):
            return None
        self.directory.mkdir(mode=0o700, exist_ok=True)
        path = self.directory / f"step_{step:08d}_{model}_{self.count}.safetensors"
        write_sealed(
            path, dict(minibatch.tensors()), {"step": step, "model": model, "result": dict(result)}
        )
        return path


def nothing_to_learn(groups: Sequence[TrajectoryGroup], config: StarPOConfig) -> str:
    """Why the filter kept none of a step's groups, and the remedy."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    returns = sorted({round(trajectory.total_reward, 6) for trajectory in trajectories})
    cut = sum(turn.info.get("finish_reason") == "length" for turn in turns)
    malformed = sum(not turn.info.get("is_format_valid") for turn in turns)
    failed = len(environment_errors(groups))
    earned = f"{returns[0]:g}" if len(returns) == 1 else f"{returns[0]:g} to {returns[-1]:g}"
    limit = config.rollout.expected_response_length
    for is_so, why in (
        (
            failed == len(trajectories),
            "the environment ended every trajectory by an error; mend it, or raise"
            " --environment-timeout",
        ),
        (
            cut == len(turns),
            f"all {cut} answers were cut at --max-response-length {limit}; raise it, or"
            " --max-context-length",
        ),
        (
            malformed == len(turns),
            f"none of {malformed} answers has the form that the prompt asks for ({cut} were cut at"
            f" --max-response-length {limit}); start from a model that follows it, or warm-start"
            " longer",
        ),
        (
            all(trajectory.success for trajectory in trajectories),
            "every trajectory succeeds with the same return: the task is solved; make it harder by"
            " --environment-options, or stop here",
        ),
        (
            all(len(set(group.total_rewards)) == 1 for group in groups),
            f"within each group all returns are equal (returns {earned}); raise --group-size or"
            " --temperature, or make the task easier",
        ),
    ):
        if is_so:
            return why
    return (
        f"--filter-strategy {config.filter.filter_strategy} kept none of {len(groups)} groups"
        f" (returns {earned}); loosen --filter-value or name another"
    )
