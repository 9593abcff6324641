"""The one loader of model directories: tensors by Hugging Face name, from either format, checked
against config.json before the first is read.

reader.names()         of all tensors that are weights
reader.describe(name)  type and shape, without reading the tensor
reader.read(name)      the tensor, which may be a view of a mapped file
reader(name)           the same, None if there is no such tensor
reader.release()       unmap what was read, so that going tensor by tensor needs little memory
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.config import LoraConfig
from ragen_mega.models.family import VALUE_HEAD
from ragen_mega.models.huggingface import fp8_block, load_config
from ragen_mega.models.layout import (
    Place,
    Slot,
    expected_tensors,
    fused_places,
    model_slots,
)
from ragen_mega.models.lora import adapter_slots
from ragen_mega.models.rounding import spread_bits
from ragen_mega.models.shape import ModelShape, check_config
from ragen_mega.ranks import collectives
from ragen_mega.storage.integrity import check_files, read_manifest
from ragen_mega.storage.shard_files import DTYPES, PATTERN, MappedFiles, PieceReader
from ragen_mega.system.json_lines import distinct

ROLE = "actor."
FORMAT = "ragen_mega megatron model"
VERSION = 1
_BYTES_AT_ONCE = 2**22
_FP8, _SCALE = "F8_E4M3", "_scale_inv"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_WRAPPERS = re.compile(
    r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|base_model\.model|base_layer)\."
)
"""Parts of names that DistributedDataParallel, torch.compile, FSDP and PEFT put in."""
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Buffers in old checkpoints that follow from config.json."""


def open_model(
    directory: Path,
    hf: PretrainedConfig | None = None,
    *,
    is_critic: bool = False,
    verify: bool | None = None,
) -> ModelReader:
    """Return the model in a directory of Hugging Face's format, or of the one that ragen-mega
    convert writes.

    Raises ValueError unless everything that its config.json asks for is supported, its tensors
    are exactly those that this config (and `hf`, if given) describes, and it is undamaged. A critic
    may be made from a policy. `verify`, by default on rank 0 alone: also check what takes time,
    checksums and the LM head that a tied model should not have.
    """
    own = load_config(str(directory))
    check_config(own)
    shape = ModelShape.of(own)
    if hf is not None and shape != ModelShape.of(hf):
        raise ValueError(
            f"{directory} must hold a model of the policy's shape {ModelShape.of(hf)}, not"
            f" {shape}; give another directory"
        )
    verify = collectives.is_main() if verify is None else verify
    if MegatronReader.is_for(directory):
        if verify:
            _verify_manifest(directory)
        reader: ModelReader = MegatronReader(directory, shape)
    else:
        dtype = own.dtype if isinstance(own.dtype, torch.dtype) else torch.bfloat16
        reader = HuggingFaceReader(directory, dtype, shape)
    check_tensors(reader, shape, str(directory), is_critic=is_critic, verify=verify)
    return reader


def check_tensors(
    reader: ModelReader, shape: ModelShape, where: str, *, is_critic: bool = False, verify: bool
) -> None:
    """Raise ValueError unless a reader has exactly the tensors of a model of this shape."""
    expected = expected_tensors(shape)
    optional = {_HEAD: expected[_EMBEDDING]} if is_critic or shape.is_tied else {}
    if is_critic:
        optional[VALUE_HEAD] = (1, shape.hidden_size)
    allowed = expected | optional
    names = set(reader.names())
    if missing := [name for name in expected if name not in names and name not in optional]:
        raise ValueError(
            f"{where} lacks {missing[0]}{_and_more(missing)}; {_near_miss(missing, names)}is it a"
            f" complete {shape.model_type} checkpoint?"
        )
    if unknown := sorted(names - allowed.keys()):
        raise ValueError(
            f"{where} holds {unknown[0]}{_and_more(unknown)}, for which a {shape.model_type}"
            f" {'critic' if is_critic else 'policy'} has no place; is config.json of another model?"
        )
    for name, wanted in allowed.items():
        if name in names and (found := reader.describe(name)[1]) != wanted:
            raise ValueError(
                f"{name} has shape {list(found)} in {where} and config.json asks for"
                f" {list(wanted)}; is config.json of another model?"
            )
    is_doubled = _HEAD in names and shape.is_tied and not is_critic
    if verify and is_doubled and not torch.equal(reader.read(_HEAD), reader.read(_EMBEDDING)):
        raise ValueError(
            f"config.json ties {_HEAD} to the embedding, and the two differ; set"
            " tie_word_embeddings to false in config.json to keep both"
        )
    reader.release()


def _near_miss(missing: Sequence[str], names: Set[str]) -> str:
    """Return a note on tensors that have a missing name but for what a program has put before it,
    or has left out; nothing if there are none.
    """
    for name in sorted(names):
        wrapped, remedy = _WRAPPERS.search(name), "save the model in it, not the wrapper"
        plain = _WRAPPERS.sub("", name)
        others = {plain, f"model.{plain}", f"model.{plain.partition('.')[2]}"}
        alike = [known for known in missing if known in others or plain.endswith(f".{known}")]
        if not alike:
            continue
        if wrapped is None:
            remedy = "save AutoModelForCausalLM, and neither a part of it nor a larger model"
        elif wrapped[1].startswith("base_"):
            remedy = "save what PEFT's merge_and_unload() returns"
        return (
            f"it holds {name}, which is {alike[0]} under another name: rename the tensors, or"
            f" {remedy}, by save_pretrained(...); "
        )
    return ""


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError if a weight holds NaN or infinity."""
    if not tensor.isfinite().all():
        raise ValueError(
            f"{name} holds NaN or infinite numbers; the checkpoint is damaged or its training"
            " diverged, use an earlier one"
        )


class HuggingFaceReader:
    """A Hugging Face checkpoint directory: `model.safetensors`, or shards and their index.

    Block-quantised FP8 weights are dequantised as transformers does it, in float32. A tensor of all
    experts of a layer is read as the tensors of single experts.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, shape: ModelShape) -> None:
        """`dtype` is the type that is reported for quantised weights."""
        self._dtype = dtype
        self._places = fused_places(shape)
        self._handles = MappedFiles()
        self._block = fp8_block(json.loads((directory / "config.json").read_text()))
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        if index.exists() and single.exists():
            raise ValueError(
                f"{directory} holds {single.name} and {index.name}, of which one is of another"
                " export; delete one of them"
            )
        if index.exists():
            try:
                self._files = {
                    name: directory / file
                    for name, file in json.loads(index.read_text(), object_pairs_hook=distinct)[
                        "weight_map"
                    ].items()
                }
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"cannot read {index} ({type(error).__name__}: {error}); the file is damaged,"
                    " copy it again"
                ) from None
        elif single.exists():
            self._files = dict.fromkeys(self._handles[single].keys(), single)
        else:
            raise ValueError(
                f"no model.safetensors or model.safetensors.index.json in {directory}; give a"
                " Hugging Face checkpoint directory or one that ragen-mega convert wrote"
            )

    @staticmethod
    def is_for(directory: Path) -> bool:
        """Return whether the directory holds weights in this format."""
        return any(
            (directory / name).exists()
            for name in ("model.safetensors", "model.safetensors.index.json")
        )

    def names(self) -> list[str]:
        split = [name for name, place in self._places.items() if place.fused in self._files]
        fused = {self._places[name].fused for name in split}
        plain = [
            name
            for name in self._files
            if not (name in fused or self._is_scale(name) or _DERIVED.fullmatch(name))
        ]
        if doubled := sorted(set(plain).intersection(split)):
            raise ValueError(
                f"{self._files[doubled[0]]} holds {doubled[0]}{_and_more(doubled)}, and"
                f" {self._places[doubled[0]].fused} holds the same expert; delete one of them"
            )
        return plain + split

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        if (place := self._fused(name)) is not None:
            dtype, shape = self.describe(place.fused)
            if shape != place.shape:
                raise ValueError(
                    f"{place.fused} has shape {list(shape)} in {self._files[place.fused]} and"
                    f" config.json asks for {list(place.shape)}; is config.json of another model?"
                )
            return dtype, (place.rows.stop - place.rows.start, *shape[2:])
        kind, shape = self._header(name)
        if (block := self._block_of(name)) is not None:
            self._check_scale(name, kind, shape, block)
            return self._dtype, shape
        if kind not in DTYPES:
            raise ValueError(
                f"{name} is {kind} in {self._files[name]}; only {', '.join(DTYPES)} can be read, or"
                f" {_FP8} with {_SCALE[1:]} and the quantization_config of Qwen"
            )
        return DTYPES[kind], shape

    def __call__(self, name: str) -> Tensor | None:
        return self.read(name) if name in self._files or self._fused(name) else None

    def read(self, name: str) -> Tensor:
        if (place := self._fused(name)) is not None:
            return place.of(self.read(place.fused))
        tensor = self._handles[self._files[name]].get_tensor(name)
        if (block := self._block_of(name)) is None:
            return tensor
        scale = self._handles[self._files[name + _SCALE]].get_tensor(name + _SCALE).float()
        blocks = tensor.float().reshape(scale.shape[0], block[0], scale.shape[1], -1)
        return (blocks * scale[:, None, :, None]).reshape(tensor.shape)

    def _fused(self, name: str) -> Place | None:
        """Return the place of an expert's tensor in a tensor of all experts, None if it is a
        separate tensor.
        """
        place = None if name in self._files else self._places.get(name)
        return place if place is not None and place.fused in self._files else None

    def _block_of(self, name: str) -> tuple[int, int] | None:
        """Return the size of the blocks of a quantised weight, None for any other tensor."""
        return self._block if {name, name + _SCALE} <= self._files.keys() else None

    def _is_scale(self, name: str) -> bool:
        return name.endswith(_SCALE) and self._block_of(name.removesuffix(_SCALE)) is not None

    def _check_scale(
        self, name: str, kind: str, shape: tuple[int, ...], block: tuple[int, int]
    ) -> None:
        scale_kind, grid = self._header(name + _SCALE)
        covered = tuple(size * width for size, width in zip(grid, block))
        if kind != _FP8 or scale_kind not in DTYPES or covered != shape:
            raise ValueError(
                f"{name} must be {_FP8} with a scale for every block of {list(block)}, not"
                f" {kind} {list(shape)} with {scale_kind} {list(grid)}; load the model without"
                " quantisation"
            )

    def _header(self, name: str) -> tuple[str, tuple[int, ...]]:
        path = self._files[name]
        try:
            stored = self._handles[path].get_slice(name)
        except SafetensorError as error:
            raise ValueError(
                f"cannot read {name} of {path}: {error}; the file is damaged, copy it again"
            ) from None
        return stored.get_dtype(), tuple(stored.get_shape())

    def release(self) -> None:
        self._handles.clear()


class MegatronReader:
    """The actor in pieces: a checkpoint of a run, or a directory that ragen-mega convert
    wrote.
    """

    def __init__(self, directory: Path, shape: ModelShape, lora: LoraConfig | None = None) -> None:
        """With `lora` the adapters of the actor are read, and not its weights."""
        self._pieces = PieceReader(directory)
        self._slots: dict[str, tuple[Slot, int]] = {}
        known = set()
        for slot in model_slots(shape) if lora is None else adapter_slots(shape, lora):
            known.add(key := ROLE + slot.key)
            if (found := self._pieces.global_shapes.get(key)) is None:
                continue
            expected = slot.stack + slot.whole
            is_padded = slot.weight.cut.is_padded and found[0] >= expected[0]
            if found != expected and not (is_padded and found[1:] == expected[1:]):
                raise ValueError(
                    f"{slot.key} has shape {list(found)} in {directory} and config.json asks"
                    f" for {list(expected)}; is config.json of another model?"
                )
            self._slots |= {name: (slot, index) for index, name in enumerate(slot.names)}
        self._unknown = [
            key
            for key in self._pieces.global_shapes
            if key.startswith(ROLE) and not key.startswith(f"{ROLE}optimizer.") and key not in known
        ]
        # q, k and v are asked for one after the other
        self._last: tuple[Slot, list[Tensor]] | None = None

    @staticmethod
    def is_for(directory: Path) -> bool:
        """Return whether the directory is a self-contained model in this format (a checkpoint of a
        run has no model's config).
        """
        return (directory / "config.json").exists() and any(directory.glob(PATTERN))

    def names(self) -> list[str]:
        return [*self._slots, *self._unknown]

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        slot, index = self._slots[name]
        return self._pieces.dtype(ROLE + slot.key), slot.shapes[index]

    def __call__(self, name: str) -> Tensor | None:
        return self.read(name) if name in self._slots else None

    def read(self, name: str) -> Tensor:
        slot, index = self._slots[name]
        if self._last is None or self._last[0] != slot:
            self._last = None  # before the next one is read
            whole = self._read(slot)
            self._last = (slot, slot.unshard([whole]) if len(slot.names) > 1 else [whole])
        return self._last[1][index]

    def release(self) -> None:
        self._last = None
        self._pieces.release()

    def _read(self, slot: Slot) -> Tensor:
        """Return one parameter in Megatron's layout, a few rows at a time: the pieces are mapped
        files and count as memory.
        """
        key, shape = ROLE + slot.key, slot.whole
        lead = slot.index
        whole = torch.empty(shape, dtype=self._pieces.dtype(key))
        rows = max(1, _BYTES_AT_ONCE * shape[0] // whole.nbytes)
        for start in range(0, shape[0], rows):
            count = min(rows, shape[0] - start)
            box = self._pieces.read(
                key,
                (*lead, start, *(0 for _ in shape[1:])),
                (*(1 for _ in lead), count, *shape[1:]),
                dtype=whole.dtype,
                global_shape=slot.stack + shape,
                allow_padding=slot.weight.cut.is_padded,
            )
            whole[start : start + count] = box.reshape(count, *shape[1:])
            self._pieces.release()
        return whole


class MergedReader:
    """A model with an adapter added to its weights, in float32 at least; weights in bfloat16 are
    spread between their neighbours before, so that a small adapter arrives.
    """

    def __init__(
        self, base: ModelReader, adapter: Callable[[str], Tensor | None], scale: float
    ) -> None:
        self._base, self._adapter, self._scale = base, adapter, scale

    def names(self) -> list[str]:
        return self._base.names()

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._base.describe(name)

    def release(self) -> None:
        self._base.release()

    def __call__(self, name: str) -> Tensor | None:
        return self.read(name) if name in self.names() else None

    def read(self, name: str) -> Tensor:
        weight = self._base.read(name)
        down, up = (
            self._adapter(name.replace(".weight", f".{part}.weight"))
            for part in ("lora_A", "lora_B")
        )
        if down is None or up is None:
            return weight
        base = spread_bits(weight, name)
        wide = torch.promote_types(base.dtype, torch.float32)
        product = (up.to(wide) @ down.to(wide)).mul_(self._scale)
        return product.add_(base).to(weight.dtype)


ModelReader: TypeAlias = HuggingFaceReader | MegatronReader | MergedReader
"""Reader of a model; the docstring of this module describes the interface."""


def _verify_manifest(directory: Path) -> None:
    """Raise ValueError if a file of a directory in Megatron format has changed."""
    try:
        manifest = read_manifest(directory, format=FORMAT, version=VERSION)
        check_files(directory, manifest["files"], PATTERN)
    except ValueError as error:
        raise ValueError(
            f"{directory} is damaged or no {FORMAT!r} of version {VERSION}: {error}; copy the"
            " directory again or convert it with the program that wrote it"
        ) from None


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
