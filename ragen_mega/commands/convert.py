"""Convert a model between Hugging Face's format and Megatron's, tensor by tensor, in one process
and without a GPU.

    ragen-mega convert --from runs/NAME --to my-model --format huggingface
    ragen-mega convert --from runs/NAME/checkpoints/step_00000050 --to my-model \\
        --format huggingface
    ragen-mega convert --from runs/NAME/adapter --base Qwen2.5-7B-Instruct --to my-model \\
        --format huggingface
    ragen-mega convert --from Qwen2.5-7B-Instruct --to qwen-megatron \\
        --format megatron --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2

--from is a Hugging Face directory, a GGUF file, a run (its newest valid checkpoint), one checkpoint
of a run, a directory that this tool wrote in megatron format, or an adapter in PEFT's format; the
tool detects and reports which. The tool takes the actor of a run, in the type of its parameters,
and merges adapters into their model in float32. Other values are copied bit by bit unless --dtype
asks for another type; config.json then names that type. Tokenizer, chat template and generation
config are carried along.

`huggingface` is what transformers and SGLang load: model.safetensors, or shards of --max-shard-size
with an index. `megatron` is what a run's checkpoint holds of the actor, in pieces as the ranks of
the given layout would write them, with checksums; --load of training and evaluation takes it, under
any layout. `peft` is the adapter alone of a run with --lora-rank. The target appears whole or not
at all.
"""

import argparse
import re
import signal
import sys
from pathlib import Path

from ragen_mega.commands.command_line import command, flag

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of e.g. 500MB, 5GB or 2GiB."""
    match = re.fullmatch(r"(\d+)\s*([KMG]I?|)B?", text.upper())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write e.g. 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2]]


@command(
    __doc__,
    flag("--from", "what to convert, see above", dest="source", type=Path, required=True),
    flag("--to", "a new directory", dest="target", type=Path, required=True),
    flag(
        "--format", "of the new model", choices=("huggingface", "megatron", "peft"), required=True
    ),
    flag("--base", "model of an adapter", type=Path),
    flag(
        "--tensor-model-parallel-size",
        "megatron: cut every matrix in so many (default: 1)",
        type=int,
    ),
    flag(
        "--pipeline-model-parallel-size",
        "megatron: cut the layers in so many (default: 1)",
        type=int,
    ),
    flag(
        "--dtype",
        "of the weights (default: as they are stored, unrounded)",
        choices=("bfloat16", "float32"),
    ),
    flag(
        "--max-shard-size",
        "huggingface: largest file, e.g. 500MB (default: 5GB)",
        type=parse_size,
    ),
)
def main(arguments: argparse.Namespace) -> None:
    # Only here, for they bring torch, which takes seconds.
    from ragen_mega.commands.convert_checkpoint import convert
    from ragen_mega.report.console import Console

    # a signal is an exit, so that nothing half written stays
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    convert(arguments, Console(is_writer=True, num_steps=0))
