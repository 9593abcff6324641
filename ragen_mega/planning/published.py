"""Configurations of published models by their names, without their weights."""

import json
from importlib.resources import files
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from ragen_mega.models.directory import find_gguf
from ragen_mega.storage.gguf_files import read_config

SHAPES = json.loads(files(__package__).joinpath("model_shapes.json").read_text())
"""Model -> the entries of its config.json that decide its size."""


def model_config(model: str, **changes: int) -> PretrainedConfig:
    """Read the configuration of a GGUF file, of a directory with a config.json, or of a name in
    SHAPES, in any letter case or as on the hub, e.g. Qwen/Qwen2.5-7B-Instruct-1M. Raises ValueError
    for anything else.
    """
    if file := find_gguf(Path(model)):
        hf = read_config(file)
        hf.update(changes)
        return hf
    if (Path(model) / "config.json").is_file():
        return AutoConfig.from_pretrained(model, trust_remote_code=False, **changes)
    shapes = {name.lower(): shape for name, shape in SHAPES.items()}
    name = model.rpartition("/")[2].lower().partition("-instruct")[0]
    if name not in shapes:
        raise ValueError(
            f"the size of {model or 'the model'} is not known; give --load a directory with a"
            f" config.json or a .gguf file, or --model one of {', '.join(SHAPES)}"
        )
    return AutoConfig.for_model(**shapes[name] | changes)
