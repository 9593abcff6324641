"""Writes a model tensor by tensor in Megatron's format: the pieces that the ranks of a layout would
write for an actor.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor

from ragen_mega.config import ParallelConfig
from ragen_mega.megatron.checkpoint import BACKEND
from ragen_mega.megatron.checkpoint import VERSION as BACKEND_VERSION
from ragen_mega.models.layout import Slot, model_slots
from ragen_mega.models.shape import ModelShape, stage_layers
from ragen_mega.storage.integrity import describe_file, write_manifest
from ragen_mega.storage.model_readers import FORMAT, ROLE, VERSION
from ragen_mega.storage.model_writers import Kind, TensorFile
from ragen_mega.storage.shard_files import HEADER, file_name


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
        self._ahead: dict[str, list[tuple[int, str, tuple[slice, ...]]]] = {}
        for slot in model_slots(shape):
            if len(kinds := {dtypes[name] for name in slot.names}) > 1:
                raise ValueError(
                    f"{', '.join(slot.names)} are one tensor in megatron format and must"
                    f" have one type, not {', '.join(sorted(map(str, kinds)))}; add --dtype"
                )
            cut, tp = slot.weight.cut, parallel.tensor_model_parallel_size
            boxes = self._ahead[slot.parameter] = []
            for tp_rank, box in cut.boxes(slot.whole, tp):
                rank = self._first_rank(slot) + tp_rank
                name = f"{len(held[rank]):05d}"
                boxes.append((rank, name, box))
                size = tuple(part.stop - part.start for part in box)
                held[rank][name] = (dtypes[slot.names[0]], (1,) * len(slot.index) + size)
                headers[rank][name] = {
                    "key": ROLE + slot.key,
                    "offset": slot.index + tuple(part.start for part in box),
                    "global_shape": slot.stack + cut.padded(slot.whole, tp),
                }
        self._files = [
            TensorFile(directory / file_name(rank), tensors, {HEADER: json.dumps(headers[rank])})
            for rank, tensors in enumerate(held)
        ]

    def write(self, slot: Slot, tensors: Sequence[Tensor]) -> None:
        """Write a slot from its Hugging Face tensors."""
        whole = slot.shard(tensors, 0, 1)
        for rank, name, box in self._ahead.pop(slot.parameter):
            self._files[rank].write(name, whole[box][(None,) * len(slot.index)])

    def close(self) -> None:
        """Finish the files and write the manifest of everything then in the directory."""
        for file in self._files:
            file.close()
        # These files make it a checkpoint for megatron-core's dist_checkpointing too.
        save_config(CheckpointingConfig(BACKEND, BACKEND_VERSION), str(self._directory))
        torch.save({}, self._directory / "common.pt")
        files = {path.name: describe_file(path) for path in sorted(self._directory.iterdir())}
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        layout = {name: getattr(self._parallel, name) for name in names}
        facts = {"format": FORMAT, "version": VERSION, "layout": layout}
        write_manifest(self._directory, facts, files)

    def _first_rank(self, slot: Slot) -> int:
        """Return the first rank of the pipeline stage that holds a parameter; rank numbers run over
        tensor-parallel ranks first.
        """
        stages = stage_layers(slot.shape.num_layers, self._parallel.pipeline_model_parallel_size)
        stage = 0 if slot.key.startswith("embedding.") else len(stages) - 1
        if slot.layer is not None:
            (stage,) = (s for s, (layers,) in enumerate(stages) if slot.layer in layers)
        return stage * self._parallel.tensor_model_parallel_size
