"""Work of `ragen-mega convert`: find out what its source is, and write it in another format."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from ragen_mega.config import LoraConfig, ParallelConfig
from ragen_mega.config.recorded import beside, known_config
from ragen_mega.megatron.model_writer import MegatronWriter
from ragen_mega.models.directory import content_digest, find_gguf
from ragen_mega.models.families import find_family
from ragen_mega.models.huggingface import load_config
from ragen_mega.models.layout import model_slots
from ragen_mega.models.shape import ModelShape, check_config, cut_error
from ragen_mega.report.console import Console
from ragen_mega.storage.adapter_files import CONFIG as ADAPTER_CONFIG
from ragen_mega.storage.adapter_files import AdapterReader, save_adapter
from ragen_mega.storage.checkpoints import (
    BASE_MODEL,
    CHECKPOINTS,
    STATE,
    Checkpoint,
    find_latest,
    read_checkpoint,
)
from ragen_mega.storage.gguf_files import dequantised
from ragen_mega.storage.integrity import MANIFEST, atomic_directory
from ragen_mega.storage.model_readers import (
    HuggingFaceReader,
    MegatronReader,
    MergedReader,
    ModelReader,
    check_tensors,
    open_model,
)
from ragen_mega.storage.model_sources import local_directory
from ragen_mega.storage.model_writers import MAX_SHARD_SIZE, HuggingFaceWriter, num_bytes, of_type
from ragen_mega.storage.run_directory import WARM_START

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CARRIED = (".json", ".txt", ".jinja", ".model", ".tiktoken")
"""Suffixes of the files beside the weights that are copied: configs, tokenizer, chat template."""
NOT_CARRIED = (
    "config.json",
    MANIFEST,
    "metadata.json",
    "trainer_state.json",
    "hf_quant_config.json",
    "quantize_config.json",
)
"""Written anew, or useless beside other weights, as are indices of weights."""

Say = Callable[[str], None]


def open_source(path: Path, say: Say, base: Path | None = None) -> tuple[str, ModelReader, Path]:
    """Find out what `path` is; returns its description, its reader and the directory with
    config.json and the tokenizer. `base`: model of an adapter. Raises ValueError if it cannot be
    converted or is damaged.
    """
    if (path / ADAPTER_CONFIG).exists():
        if base is None:
            raise ValueError(f"--from {path} is an adapter; name its model by --base")
        base = dequantised(file) if (file := find_gguf(base)) else base
        adapter = AdapterReader(path, ModelShape.of(load_config(str(base))))
        adapter.check(adapter.lora, content_digest(base))
        merged = MergedReader(open_model(base), adapter, adapter.lora.scale)
        return f"adapter {path} beside {base}", merged, base
    if base is not None:
        raise ValueError(f"--base is the model of an adapter, and --from {path} is none; drop it")
    if file := find_gguf(path):
        path = dequantised(file)
    if not path.is_dir():
        raise ValueError(
            f"--from {path} is neither a directory nor a GGUF file; give a model, a run or a"
            f" checkpoint{beside(path)}"
        )
    if (path / MANIFEST).exists() and (path / STATE).exists():
        try:
            return _open_checkpoint(read_checkpoint(path), say)
        except ValueError as error:
            raise ValueError(f"checkpoint {path} cannot be used: {error}") from None
    if HuggingFaceReader.is_for(path) or MegatronReader.is_for(path):
        kind = "megatron" if MegatronReader.is_for(path) else "Hugging Face"
        return f"{kind} directory {path}", open_model(path), path
    if (path / CHECKPOINTS).is_dir():
        checkpoint = find_latest(path / CHECKPOINTS, say)
        if checkpoint is None:
            raise ValueError(
                f"run {path} has no valid checkpoint; give --from another run or a Hugging Face"
                " directory"
            )
        return _open_checkpoint(checkpoint, say)
    raise ValueError(
        f"--from {path} holds neither a model (*.safetensors and config.json) nor {CHECKPOINTS}/ of"
        " a run; give a Hugging Face directory, a run or a checkpoint"
    )


def _open_checkpoint(checkpoint: Checkpoint, say: Say) -> tuple[str, ModelReader, Path]:
    files = _model_of_run(checkpoint, say)
    hf = load_config(str(files))
    check_config(hf)
    reader: ModelReader = MegatronReader(checkpoint.directory, ModelShape.of(hf))
    if (found := _adapter_of_run(checkpoint, files)) is not None:
        adapter, lora, files = found
        reader = MergedReader(open_model(files), adapter, lora.scale)
    check_tensors(reader, ModelShape.of(hf), "its actor", verify=True)
    description = (
        f"checkpoint {checkpoint.directory} (actor after {checkpoint.step} steps), tokenizer of"
        f" {files}"
    )
    return description, reader, files


def _adapter_of_run(
    checkpoint: Checkpoint, files: Path
) -> tuple[MegatronReader, LoraConfig, Path] | None:
    """Return the adapter of the actor, its settings and the directory of its model, None if all
    weights were trained. Raises ValueError if another model is there.
    """
    lora = known_config(checkpoint.config).lora
    if not lora.rank:
        return None
    cloned = checkpoint.directory.absolute().parents[1] / WARM_START
    base = cloned if cloned.exists() else files
    if content_digest(base) != checkpoint.models.get(BASE_MODEL):
        raise ValueError(
            f"the adapters in {checkpoint.directory} belong to another model than {base}; convert"
            " where the model of the run is"
        )
    shape = ModelShape.of(load_config(str(base)))
    return MegatronReader(checkpoint.directory, shape, lora), lora, base


def extract(source: Path, target: Path, say: Say) -> None:
    """Write the adapter of a checkpoint in PEFT's format. Raises ValueError if it has none."""
    is_checkpoint = (source / STATE).exists()
    checkpoint = (
        read_checkpoint(source) if is_checkpoint else find_latest(source / CHECKPOINTS, say)
    )
    found = checkpoint and _adapter_of_run(checkpoint, _model_of_run(checkpoint, say))
    if not checkpoint or not found:
        raise ValueError(f"--from {source} has no adapter; give a run with --lora-rank")
    adapter, lora, base = found
    tensors = ((name, adapter.read(name)) for name in adapter.names() if ".lora_" in name)
    digest = checkpoint.models[BASE_MODEL]
    with atomic_directory(target) as directory:
        save_adapter(directory, tensors, lora, model=str(base), base=digest)
    say(f"to {target}: the adapter of {checkpoint.directory} beside {base}")


def _model_of_run(checkpoint: Checkpoint, say: Say) -> Path:
    """Return the directory with the model configuration and the tokenizer that the run of a
    checkpoint started from.
    """
    run, load = checkpoint.directory.absolute().parents[1], checkpoint.config["model"]["load"]
    places = [
        path for path in (run / "base", run / "huggingface") if (path / "config.json").exists()
    ]
    obstacle = f"its run's model directory {run / 'base'} is missing; convert it where the run is"
    if load is not None:
        try:
            return local_directory(load)
        except ValueError as error:
            obstacle = (
                f"its run started from {load}, which is needed for config.json and tokenizer:"
                f" {error}"
            )
    if not places:
        raise ValueError(obstacle)
    if load is not None:
        say(
            f"{load} is not here any more: config and tokenizer are those of {places[0]}, without"
            " generation config"
        )
    return places[0]


def copy_other_files(source: Path, directory: Path, dtypes: set[torch.dtype]) -> None:
    """Copy the files beside the weights, byte by byte.

    In config.json the type becomes the type of the weights, a missing architecture is added, and a
    quantisation that reading has undone is removed.
    """
    for path in sorted(source.iterdir()):
        is_anew = path.name in NOT_CARRIED or path.name.endswith(".index.json")
        if path.is_file() and path.suffix in CARRIED and not is_anew:
            shutil.copyfile(path, directory / path.name)
    config = json.loads((source / "config.json").read_text())
    dtype = None if len(dtypes) > 1 else str(next(iter(dtypes))).removeprefix("torch.")
    complete = of_type(config, dtype)
    if not {"dtype", "torch_dtype"} & complete.keys():
        complete["dtype"] = dtype
    complete["architectures"] = [find_family(config["model_type"]).architecture]
    if config.get("num_key_value_heads") is None:  # transformers has another default than old files
        complete["num_key_value_heads"] = ModelShape.from_config(config).num_kv_heads
    if config == complete:
        shutil.copyfile(source / "config.json", directory / "config.json")
    else:
        (directory / "config.json").write_text(json.dumps(complete, indent=2) + "\n")


def convert(arguments: argparse.Namespace, console: Console) -> None:
    """Convert as the flags say. Raises ValueError or OSError, and then leaves no target."""
    is_megatron = arguments.format == "megatron"
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    without_effect = {
        "megatron": ("max_shard_size",),
        "huggingface": sizes,
        "peft": ("base", "dtype", "max_shard_size", *sizes),
    }
    for name in without_effect[arguments.format]:
        if name in given:
            raise ValueError(
                f"--{name.replace('_', '-')} means nothing with --format {arguments.format}; drop"
                " it"
            )
    if arguments.format == "peft":
        extract(arguments.source, arguments.target, console.say)
        return
    parallel = ParallelConfig(**{name: given[name] for name in sizes if name in given})
    with atomic_directory(arguments.target) as directory:
        description, reader, files = open_source(arguments.source, console.say, arguments.base)
        console.say(f"from {description}")
        shape = ModelShape.of(load_config(str(files)))
        if error := cut_error(shape, parallel.cut):
            raise ValueError(error)
        slots = list(model_slots(shape))
        described = {name: reader.describe(name) for slot in slots for name in slot.names}
        kinds = {
            name: (DTYPES.get(arguments.dtype, dtype), shape)
            for name, (dtype, shape) in described.items()
        }
        dtypes = {name: dtype for name, (dtype, _) in kinds.items()}
        copy_other_files(files, directory, set(dtypes.values()))
        writer = (
            MegatronWriter(directory, shape, dtypes, parallel)
            if is_megatron
            else HuggingFaceWriter(directory, kinds, arguments.max_shard_size or MAX_SHARD_SIZE)
        )
        with console.progress("convert", len(slots)) as progress:
            for slot in slots:
                tensors = [reader.read(name) for name in slot.names]
                if isinstance(writer, MegatronWriter):
                    writer.write(slot, tensors)
                else:
                    for name, tensor in zip(slot.names, tensors, strict=True):
                        writer.write(name, tensor)
                reader.release()
                progress.advance(note=slot.names[0])
        writer.close()
    total = sum(map(num_bytes, kinds.values()))
    console.say(
        f"to {arguments.target}: {len(kinds)} tensors, {total / 1e9:.3g} GB,"
        f" {', '.join(sorted(map(str, set(dtypes.values()))))}"
    )
