"""Compile the loops of the program for this processor, by a short run: `python -m
tests.support.compile`. Ranks and workers that start together would each compile them, for 15
seconds of a core.
"""

from tempfile import TemporaryDirectory

from ragen_mega.train import main
from tests.support.faulty_runs import FLAGS

WARM_START = """
    --warm-start-first-turn-steps 2 --warm-start-steps 2 --warm-start-trajectories 4
    --num-steps 1 --name compile
""".split()

if __name__ == "__main__":
    with TemporaryDirectory() as output:
        main([*FLAGS, *WARM_START, "--output", output])
