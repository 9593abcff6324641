"""Predict the seconds, the money and the memory of a training step, phase by phase, before anything
is rented or built.

    ragen-mega plan --model Qwen2.5-14B --num-gpus 16 --hardware H100
    ragen-mega plan --recipe qwen2.5_7b --hardware H200
    ragen-mega plan --model Qwen3-14B --num-gpus 16 --search
    ragen-mega plan --model Qwen2.5-7B --num-gpus 8 --bf16 --tensor-model-parallel-size 4 \\
        --rollout-engine sglang

All other flags are flags of training. They come after the flags of --recipe, which is planned as it
is, or of the model's own recipe (for a directory, of the recipe whose model is nearest in size).
The layout of the model's own recipe is searched, except for the sizes that flags give. The seconds
are estimates: docs/predictor.md says how far published steps are from them. GB are GiB. Exit code 0
if every phase fits, 1 with remedies if one does not, 2 for bad input.
"""

import argparse
import math

from ragen_mega.commands.command_line import JSON, command, flag, name_or_path
from ragen_mega.config.cli import read_words
from ragen_mega.planning.hardware import HARDWARE
from ragen_mega.report.metrics import write_json
from ragen_mega.system.outputs import waiting

FLAGS = (
    flag(
        "--model",
        "a name of ragen_mega/planning/model_shapes.json (default: what --load names)",
        type=name_or_path,
    ),
    flag(
        "--recipe",
        "a recipe as it is, whose flags come before the others, or none (default: that of --model,"
        " under the layout that is fastest)",
    ),
    flag("--num-gpus", "GPUs of the job (default: of the recipe, else 8)", type=int),
    flag(
        "--hardware",
        f"kind of GPU: {', '.join(HARDWARE)}; or a .json file with the fields of"
        " ragen_mega.planning.hardware.Hardware",
        "H100",
        type=name_or_path,
    ),
    flag("--gpu-memory-gb", "GiB of one GPU (default: of --hardware)", type=float),
    flag("--host-memory-gb", "GiB of a node (default: 200 for each of its GPUs)", type=float),
    flag(
        "--dollars-per-gpu-hour",
        "price (default: of --hardware, see ragen_mega/planning/hardware.py)",
        type=float,
    ),
    flag(
        "--response-tokens",
        "sampled in a turn, on average (default: half of --max-response-length)",
        type=float,
    ),
    flag("--environment-seconds", "of an environment for a turn", 0.01),
    flag("--sharing", "tokens of trajectories per token computed: 1 / actor/computed_share", 1.0),
    flag(
        "--search",
        "list the layouts of these GPUs that fit, the fastest by prediction first",
        False,
    ),
    JSON,
)


NUMBERS = {
    "sharing": (1, "at least 1, where every token of every trajectory is computed,"),
    "environment_seconds": (0, "at least 0"),
} | dict.fromkeys(
    ("num_gpus", "gpu_memory_gb", "host_memory_gb", "dollars_per_gpu_hour", "response_tokens"),
    (math.ulp(0.0), "positive"),
)
"""Flag -> its least value and its rule."""


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an impossible number."""
    for name, (least, rule) in NUMBERS.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value < math.inf:
            flag_name = name.replace("_", "-")
            raise ValueError(f"--{flag_name} must be {rule} and finite, not {value:g}; correct it")


@command(__doc__, *FLAGS, takes_others=True)
def main(arguments: argparse.Namespace) -> int:
    check_flags(arguments)
    # A wrong flag is said before the imports below.
    load = read_words(arguments.others).get("model", {}).get("load")
    if arguments.model and load not in (None, arguments.model):
        raise ValueError(
            f"--model {arguments.model} and --load {load} both say which model is planned; drop one"
        )
    with waiting("predicting the layouts"):
        from ragen_mega.planning.answer import answer  # with torch, which takes seconds

        result, text = answer(arguments)
    print(text)
    if arguments.json:
        write_json(arguments.json, result)
    return 0 if result["fits"] else 1
