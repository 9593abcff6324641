"""The meter of idleness: parts of a rank's time by hand, the sentence about the largest wait."""

import threading
import time

import pytest

from ragen_mega.config import StarPOConfig, parse
from ragen_mega.ranks.waits import Position
from ragen_mega.run.idleness import WAITS, WORK, Usage, sentence, shares, summed, usage

SEPARATE = "--environments bandit --placement separate --importance-cap 2".split()


def config(samplers: int, staleness: int) -> StarPOConfig:
    return parse([*SEPARATE, "--rollout-ranks", str(samplers), "--max-staleness", str(staleness)])


def rank(uneven: str = "other", **seconds: float) -> Usage:
    """The usage of a rank, whose waits for ranks were in the part `uneven`."""
    waited = {uneven: seconds.get("waiting_ranks", 0.0)}
    return Usage(dict.fromkeys((*WORK, *WAITS), 0.0) | seconds, dict.fromkeys(WORK, 0.0) | waited)


def test_the_parts_of_a_step_by_hand() -> None:
    """Of 20 s the stages took 17, and 3 were in none; one wait of 1 s was in none either."""
    stages = {"rollout": 8.0, "handover": 1.0, "sync": 2.0, "update": 4.0, "rollout_files": 2.0}
    waits = {
        ("rollout", "ranks"): 3.0,
        ("update", "ranks"): 0.5,
        ("rollout", "samples"): 4.0,
        ("rollout_files", "ranks"): 1.5,
        ("start", "ranks"): 1.0,
    }
    found = usage(stages, waits, 20.0)
    assert found.seconds == {
        "rollout": 1.0,
        "sync": 3.0,
        "update": 3.5,
        "other": 2.5,
        "waiting_samples": 4.0,
        "waiting_weights": 0.0,
        "waiting_ranks": 6.0,
    }
    assert sum(found.seconds.values()) == 20.0
    assert found.uneven == {"rollout": 3.0, "sync": 0.0, "update": 0.5, "other": 2.5}
    twice = summed([found, found])
    assert twice.seconds["rollout"] == 2.0 and found.seconds["rollout"] == 1.0
    assert shares([found, rank(update=20.0)])["update"] == pytest.approx(23.5 / 40)


@pytest.mark.parametrize(
    ("ranks", "samplers", "staleness", "says"),
    [
        (
            [rank(update=9.8, waiting_ranks=0.2), rank(update=9.0, waiting_ranks=0.3)],
            0,
            0,
            "ranks wait 3% of their time; the largest part is update, 97%",
        ),
        (
            [rank("rollout", rollout=2.0, waiting_ranks=8.0), rank(rollout=10.0)],
            0,
            0,
            "40% of their time for other ranks, most in rollout and least on rank 1; --placement",
        ),
        ([rank(update=5, waiting_samples=5), rank(rollout=10)], 1, 0, "samples; --max-staleness 1"),
        ([rank(update=5, waiting_samples=5), rank(rollout=10)], 1, 1, "samples; --rollout-ranks 2"),
        (
            [rank(update=9), rank(rollout=3, waiting_weights=6), rank(rollout=9)],
            2,
            1,
            "22% of their time for weights; --rollout-ranks 1 moves it",
        ),
        (
            [rank(update=9), rank(rollout=3, waiting_weights=6)],
            1,
            1,
            "for weights; more ranks that train moves it",
        ),
        (  # only ranks that sample wait for each other
            [rank(update=9), rank("rollout", rollout=1, waiting_ranks=8), rank(rollout=9)],
            2,
            1,
            "most in rollout and least on rank 2; --carry-over 0.25",
        ),
    ],
)
def test_the_sentence_names_the_largest_wait_and_the_flag(
    ranks: list[Usage], samplers: int, staleness: int, says: str
) -> None:
    settings = config(samplers, staleness) if samplers else parse(["--environments", "bandit"])
    assert says in sentence(ranks, settings)


def test_of_nested_waits_the_outer_counts_and_other_threads_do_not() -> None:
    place = Position()

    def elsewhere() -> None:
        with place.waiting("ranks", "nothing"):
            assert place.awaited == "rollout 3"

    with place.in_stage("rollout"), place.waiting("samples", "rollout 3", polls=True):
        with place.waiting("ranks", "a word of every rank"):
            assert (place.awaited, place.is_polling) == ("rollout 3", True)
            time.sleep(0.002)
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
    assert [*place.seconds] == [("rollout", "samples")]
    assert place.seconds["rollout", "samples"] >= 0.002
    assert [name for name, _, _ in place.spans] == ["waiting for samples"]
    assert (place.stage, place.awaited, place.is_polling) == ("start", None, False)
