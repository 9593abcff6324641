"""Start megatron-core: model-parallel groups and random states on the ranks of this job."""

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from ragen_mega.config import ParallelConfig
from ragen_mega.megatron import cpu, precision
from ragen_mega.megatron.cpu import products
from ragen_mega.ranks import collectives, watch

_groups_are_for: tuple[dist.ProcessGroup | None, int, int, int, int] | None = None
"""The job and the layout that megatron-core's groups were built for."""


def initialize(parallel: ParallelConfig, seed: int = 0) -> ProcessGroupCollection:
    """Build the tensor-, pipeline-, expert-, context- and data-parallel groups of this job.

    Groups of the same layout are reused: each set has its own threads, which poll for the life of
    the process. Raises ValueError when the layout does not fit the number of ranks, or this machine
    does not support the precision.
    """
    collectives.start()
    parallel.check_world(collectives.world_size())
    precision.choose_implementation(parallel, precision.Device.here())
    cpu.install()
    if parallel.bf16 and products.lacks_bfloat16():
        products.multiply_in_float32()
    global _groups_are_for
    wanted = (
        dist.group.WORLD,
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.context_parallel_size,
    )
    if not parallel_state.model_parallel_is_initialized() or _groups_are_for != wanted:
        parallel_state.destroy_model_parallel()
        with cpu.sharing_groups():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor_model_parallel_size,
                pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
                expert_model_parallel_size=parallel.expert_model_parallel_size,
                context_parallel_size=parallel.context_parallel_size,
                expert_tensor_parallel_size=1,  # experts are whole, see models/cuts.py
                create_gloo_process_groups=False,
            )
        _groups_are_for = wanted
    # what the last layout of this process has set would stay
    chunks = parallel.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 1)
    return ProcessGroupCollection.use_mpu_process_groups()


def shutdown() -> None:
    """Leave the job. A process that is to be forked must have left it: gloo's threads do not
    survive a fork.
    """
    global _groups_are_for
    _groups_are_for = None
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):  # megatron-core forgets some
            setattr(parallel_state, name, None)
    watch.end()
    collectives.stop()
