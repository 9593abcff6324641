"""Trainers <-> checkpoint files through megatron-core's sharded state dicts: written on any layout,
read on any other.

megatron-core says which box of which global tensor every rank holds and checks that all boxes
together are the whole; the boxes go to safetensors files (`shard_files`). The files of a trainer
hold its parameters, Adam's moments in the shape of the parameters, the float32 master copies of
bfloat16 parameters, and the step counts of optimizer and schedule. Everything else in an optimizer
follows from the configuration, so the same files work with and without the distributed optimizer.
Of a model with adapters they hold the adapters, and a critic's head: the base is the run's model.

megatron-core's own state dict of the distributed optimizer is not used: with torch's AdamW (0.16.1)
it fails an assertion before the first step, its loader fails on the entry `step`, and afterwards
all parameters share one step tensor, which then advances once per parameter. Here the moments are
read and written in place instead.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.utils import (
    add_prefix_for_sharding,
    extract_sharded_tensors_and_factories,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from ragen_mega.megatron.adam import MAIN
from ragen_mega.megatron.trainer import Trainer
from ragen_mega.megatron.weights import trained
from ragen_mega.models.layout import Slot
from ragen_mega.ranks import collectives
from ragen_mega.storage.shard_files import Piece, PieceReader, file_name, write_pieces

BACKEND, VERSION = "ragen_mega_safetensors", 1
_MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = "steps.json"
"""File of a checkpoint: role -> how often its optimizer and its schedule have stepped."""


def stage(directory: Path, trainers: Mapping[str, Trainer]) -> Callable[[], list[Path]]:
    """Copy the trainers' state to host memory. The returned function writes it to `directory`, from
    any thread, and returns the path of this rank's file in a list.

    Collective; the returned function is not. The trainers may go on afterwards: what is written is
    their state at this call.
    """
    state = {
        role: _sharded_state(role, trainer, placeholders=False)
        for role, trainer in trainers.items()
    }
    # The same number on every rank, even on one that holds no parameter of a trainer's optimizer.
    steps = {
        role: {"optimizer": _count_steps(trainer), "schedule": trainer.schedule.num_steps}
        for role, trainer in trainers.items()
    }
    held, _ = save_preprocess(state)  # megatron-core checks that all pieces together are the whole
    pieces = [
        Piece(
            part.key,
            tuple(part.global_offset),
            tuple(part.global_shape),
            part.data.contiguous().reshape(_box(part)),
        )
        for part in nested_values(held)
        if is_main_replica(part.replica_id)
    ]

    def write() -> list[Path]:
        if collectives.is_main():
            save_config(CheckpointingConfig(BACKEND, VERSION), str(directory))
            (directory / STEPS).write_text(json.dumps(steps))
        path = directory / file_name(collectives.rank())
        write_pieces(path, pieces)
        return [path]

    return write


def load(directory: Path, trainers: Mapping[str, Trainer]) -> None:
    """Give the trainers the state that `stage` wrote, under any layout, with or without the
    distributed optimizer.

    Collective. Raises ValueError if the files do not fit these trainers: another model, estimator
    or precision.
    """
    try:
        counts = json.loads((directory / STEPS).read_text())
        steps = {
            role: (int(counts[role]["optimizer"]), int(counts[role]["schedule"]))
            for role in trainers
        }
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{directory / STEPS} must have the step counts of {', '.join(trainers)}"
            f" ({type(error).__name__}: {error}); resume with the estimator of the run, or from"
            " another checkpoint"
        ) from None
    state = {
        role: _sharded_state(role, trainer, placeholders=True) for role, trainer in trainers.items()
    }
    try:
        loaded = dist_checkpointing.load(
            state,
            str(directory),
            sharded_strategy=_Read(),
            common_strategy=_NothingInCommon(),
            strict=StrictHandling.RAISE_ALL,
        )
    except CheckpointingException as error:
        raise ValueError(
            f"the checkpoint {directory} is of another model or estimator"
            f" ({str(error).strip().splitlines()[0][:200]}); resume with the flags it was written"
            " with"
        ) from None
    for role, trainer in trainers.items():
        num_updates, num_scheduled = steps[role]
        trainer.memory.require("parameters", "optimizer")
        parameters = _sharded_parameters(trainer)
        with torch.no_grad():
            for name, sharded in parameters.items():
                sharded.data.copy_(loaded[role]["model"][name])
            for name, sharded in parameters.items():
                values = loaded[role]["optimizer"][name]
                _write_adam(trainer, sharded.data, values, num_updates)
        trainer.schedule.num_steps = num_scheduled
        trainer.schedule.step(0)


def _sharded_parameters(trainer: Trainer) -> dict[str, ShardedBase]:
    """Name, after the number of the chunk -> this rank's part of a parameter that is trained;
    `.data` is the parameter itself. The layers' extra state is left out.
    """
    if trainer.chunks[0].lora.rank:
        shards = ((slot, parameter) for slot, parameter in trained(trainer.chunks))
        return {slot.parameter: _shard(slot, item, trainer) for slot, item in shards}
    state = {str(number): c.sharded_state_dict() for number, c in enumerate(trainer.chunks)}
    nested, _ = extract_sharded_tensors_and_factories(state)
    sharded = {f"{chunk}.{name}": part for chunk in nested for name, part in nested[chunk].items()}
    assert {id(part.data) for part in sharded.values()} == {
        id(parameter) for parameter in trainer.chunks.parameters()
    }
    return sharded


def _shard(slot: Slot, parameter: nn.Parameter, trainer: Trainer) -> ShardedBase:
    """Return a rank's part of a parameter that megatron-core does not know, as its slot is cut."""
    groups, cut, ahead = trainer.groups, slot.weight.cut, len(slot.index)
    stacks = [*enumerate(zip(slot.index, slot.stack, strict=True))]
    above = [(axis, number, length) for axis, (number, length) in stacks]
    rank, size = (0, 1) if slot.group == "expert" else (groups.tp.rank(), groups.tp.size())
    is_whole, axis = slot.group == "dense" and cut.axis is None, cut.axis or 0
    copies = groups.expt_dp if slot.group == "expert" else groups.dp_cp
    replica = (0, rank if is_whole else 0, copies.rank())

    def block(data: Tensor, number: int, num_blocks: int) -> ShardedTensor:
        place = [] if is_whole else [(axis + ahead, number * size + rank, num_blocks * size)]
        return ShardedTensor.from_rank_offsets(
            slot.key, data, *above, *place, prepend_axis_num=ahead, replica_id=replica
        )

    if is_whole or size == 1 or cut.num_blocks == 1:
        return block(parameter, 0, 1)

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        parts = data.chunk(cut.num_blocks, axis)
        found = [block(part, number, cut.num_blocks) for number, part in enumerate(parts)]
        return [replace(part, key=key) for part in found]

    return ShardedTensorFactory(
        slot.key, parameter, build, lambda parts: torch.cat(parts, axis), replica
    )


def _sharded_state(role: str, trainer: Trainer, *, placeholders: bool) -> dict[str, dict]:
    """Return the parameters and Adam's tensors of a trainer, as megatron-core's sharded tensors
    under keys `<role>.`.

    They are placeholders, or copies in host memory, since the next trainer may push this one's
    tensors off the device. Only the replica that is written is copied.
    """
    trainer.memory.require("parameters", "optimizer")
    parameters, optimizer = _sharded_parameters(trainer), {}
    for name, sharded in parameters.items():
        empty = torch.empty(sharded.data.shape, dtype=torch.float32, device="meta")
        place = "cpu" if not placeholders and is_main_replica(sharded.replica_id) else "meta"
        values = (
            dict.fromkeys(_kinds(sharded.data), empty)
            if placeholders
            else _read_adam(trainer, sharded.data, place)
        )
        optimizer[name] = {
            kind: make_sharded_optimizer_tensor(sharded, value, prefix=f"optimizer.state.{kind}")
            for kind, value in values.items()
        }
        sharded.data = sharded.data.detach().to(place, copy=True)
    state = {"model": parameters, "optimizer": optimizer}
    add_prefix_for_sharding(state, f"{role}.")
    return state


def _read_adam(trainer: Trainer, parameter: nn.Parameter, place: str) -> dict[str, Tensor]:
    """Return Adam's tensors of a parameter: kind -> tensor of its shape, in host memory or (meta)
    without data. With the distributed optimizer a collective over its ranks.
    """
    item, values = trainer.updated[parameter], {}
    with trainer.memory.borrowed("optimizer", item.tensors):
        held = item.state | {MAIN: item.main}
        for kind in _kinds(parameter):
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if (tensor := held.get(kind)) is not None:  # Adam holds nothing before the first step
                whole[item.part] = tensor.detach().flatten()
            if isinstance(item.optimizer, DistributedOptimizer):
                # Every element is zero on all ranks but one; as integers their sum is exact to the
                # bit (-0.0 too).
                dist.all_reduce(whole.view(torch.int32), group=item.optimizer.data_parallel_group)
            # never more than one of them is on the device
            values[kind] = whole.reshape(parameter.shape).to(place)
    return values


def _write_adam(
    trainer: Trainer, parameter: nn.Parameter, values: Mapping[str, Tensor], step: int
) -> None:
    """Load tensors of the parameter's shape, as `_read_adam` returned them after `step` steps."""
    item = trainer.updated[parameter]
    if (main := item.main) is None:
        return
    local = {
        kind: value.flatten()[item.part].reshape(main.shape).to(main.device)
        for kind, value in values.items()
    }
    inner = item.optimizer.optimizer
    with trainer.memory.borrowed("optimizer", item.tensors):
        if MAIN in local:
            main.copy_(local.pop(MAIN))
        inner.state[main] = {kind: value.clone() for kind, value in local.items()}
    if isinstance(inner, torch.optim.Adam):  # AdamW too; a tensor of its own for each parameter
        inner.state[main]["step"] = torch.tensor(float(step))
    else:  # fused implementations count once per group
        for group in inner.param_groups:
            group["step"] = step


def _count_steps(trainer: Trainer) -> int:
    """Count the optimizer steps that were taken. This call is collective."""
    counts = [
        int(counter["step"])
        for optimizer in trainer.optimizers
        for counter in (*optimizer.optimizer.state.values(), *optimizer.optimizer.param_groups)
        if "step" in counter
    ]
    return max(collectives.gather_objects(max(counts, default=0)))


def _kinds(parameter: nn.Parameter) -> tuple[str, ...]:
    return _MOMENTS if parameter.dtype == torch.float32 else (*_MOMENTS, MAIN)


def _box(part: ShardedTensor) -> tuple[int, ...]:
    """Return the shape of a part among all dimensions of its global tensor."""
    return (1,) * part.prepend_axis_num + tuple(part.local_shape)


class _NothingInCommon(TorchCommonLoadStrategy):
    """Stands for megatron-core's pickle of what all ranks share, which no checkpoint has here."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return {}


class _Read(LoadShardedStrategy):
    """Reads the pieces of `stage`, cut as the present sharded state dict asks."""

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise ValueError(
                f"checkpoints of this program have the backend {BACKEND}, not {loaded_backend};"
                " convert it first"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != VERSION:
            raise ValueError(
                f"this program reads checkpoint version {VERSION}, not {loaded_version}; use its"
                " writer"
            )

    def load(self, sharded_state_dict: dict, checkpoint_dir: str | Path) -> dict[str, Any]:
        reader = PieceReader(Path(checkpoint_dir))

        def read(part: ShardedTensor) -> Tensor:
            data = reader.read(
                part.key,
                part.global_offset,
                _box(part),
                dtype=part.dtype,
                global_shape=part.global_shape,
                # rows that only pad the vocabulary for tensor-parallel ranks
                allow_padding=part.allow_shape_mismatch,
            )
            return data.reshape(part.local_shape)

        return dict_list_map_outplace(read, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
        reader = PieceReader(Path(checkpoint_dir))
        return {
            key: (
                ShardedTensor.from_rank_offsets(
                    key, torch.empty(shape, dtype=reader.dtype(key), device="meta")
                ).without_data()
            )
            for key, shape in reader.global_shapes.items()
        }
