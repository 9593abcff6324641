"""Writes a model tensor by tensor in Megatron's format: the pieces that the ranks of a layout would
write for an actor.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor

from ragen_mega.config import ParallelConfig
from ragen_mega.megatron.checkpoint import BACKEND
from ragen_mega.megatron.checkpoint import VERSION as BACKEND_VERSION
from ragen_mega.models.layout import Slot, model_slots, shard
from ragen_mega.models.shape import ModelShape, trainer_vocab_size
from ragen_mega.storage.integrity import describe_file, write_manifest
from ragen_mega.storage.model_readers import FORMAT, ROLE, VERSION
from ragen_mega.storage.model_writers import Kind, TensorFile
from ragen_mega.storage.shard_files import HEADER, file_name


@dataclass(frozen=True, slots=True)
class Cut:
    """A box of a parameter, without the layer dimension, and the rank that holds it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class MegatronWriter:
    """The pieces that the ranks of a layout would write for an actor, with megatron-core's keys,
    and a manifest.
    """

    def __init__(
        self,
        directory: Path,
        shape: ModelShape,
        dtypes: Mapping[str, torch.dtype],
        parallel: ParallelConfig,
    ) -> None:
        self._directory, self._parallel = directory, parallel
        num_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        held: list[dict[str, Kind]] = [{} for _ in range(num_ranks)]
        headers: list[dict[str, dict]] = [{} for _ in range(num_ranks)]
        self._ahead: dict[str, list[tuple[Cut, str]]] = {}
        for slot in model_slots(shape):
            if len(kinds := {dtypes[name] for name in slot.names}) > 1:
                raise ValueError(
                    f"{', '.join(slot.names)} are one tensor in megatron format and must"
                    f" have one type, not {', '.join(sorted(map(str, kinds)))}; add --dtype"
                )
            lead, stack = ((), ()) if slot.layer is None else ((slot.layer,), (shape.num_layers,))
            cuts = self._ahead[slot.parameter] = []
            for cut in self._cuts(slot):
                name = f"{len(held[cut.rank]):05d}"
                cuts.append((cut, name))
                held[cut.rank][name] = (dtypes[slot.names[0]], (1,) * len(lead) + cut.shape)
                headers[cut.rank][name] = {
                    "key": ROLE + slot.key,
                    "offset": lead + cut.offset,
                    "global_shape": stack + self._padded(slot),
                }
        self._files = [
            TensorFile(directory / file_name(rank), tensors, {HEADER: json.dumps(headers[rank])})
            for rank, tensors in enumerate(held)
        ]

    def write(self, slot: Slot, tensors: Sequence[Tensor]) -> None:
        """Write a slot from its Hugging Face tensors."""
        whole = shard(slot, tensors, 0, 1)
        for cut, name in self._ahead.pop(slot.parameter):
            box = whole[
                tuple(slice(start, start + size) for start, size in zip(cut.offset, cut.shape))
            ]
            self._files[cut.rank].write(name, box if slot.layer is None else box[None])

    def close(self) -> None:
        """Finish the files and write the manifest of everything then in the directory."""
        for file in self._files:
            file.close()
        # These files make it a checkpoint for megatron-core's dist_checkpointing too.
        save_config(CheckpointingConfig(BACKEND, BACKEND_VERSION), str(self._directory))
        torch.save({}, self._directory / "common.pt")
        files = {path.name: describe_file(path) for path in sorted(self._directory.iterdir())}
        layout = {
            name: size
            for name, size in asdict(self._parallel).items()
            if name.endswith("model_parallel_size")
        }
        facts = {"format": FORMAT, "version": VERSION, "layout": layout}
        write_manifest(self._directory, facts, files)

    def _padded(self, slot: Slot) -> tuple[int, ...]:
        """Shape under the key, without the layer dimension."""
        if slot.weight.cut != "vocab":
            return slot.whole
        tp = self._parallel.tensor_model_parallel_size
        return trainer_vocab_size(slot.shape.vocab_size, tp), *slot.whole[1:]

    def _cuts(self, slot: Slot) -> Iterator[Cut]:
        """How the ranks of the layout share a parameter; rank numbers run over tensor-parallel
        ranks first.
        """
        shape, num_parts = self._padded(slot), self._parallel.tensor_model_parallel_size
        num_stages = self._parallel.pipeline_model_parallel_size
        stage = 0 if slot.key.startswith("embedding.") else num_stages - 1
        if slot.layer is not None:
            stage = slot.layer * num_stages // slot.shape.num_layers
        first = stage * num_parts
        if slot.weight.cut == "replicated":
            yield Cut(first, (0,) * len(shape), shape)
            return
        axis, num_blocks = int(slot.weight.cut == "row"), 2 if slot.weight.cut == "gate_up" else 1
        size = shape[axis] // (num_blocks * num_parts)
        for block in range(num_blocks * num_parts):
            offset, local = [0] * len(shape), list(shape)
            offset[axis], local[axis] = block * size, size
            yield Cut(first + block % num_parts, tuple(offset), tuple(local))
