"""Start megatron-core: model-parallel groups and random states on the ranks of this job."""

from __future__ import annotations

from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from ragen_mega import distributed
from ragen_mega.config import ParallelConfig
from ragen_mega.megatron import cpu, precision


def initialize(parallel: ParallelConfig, seed: int = 0) -> ProcessGroupCollection:
    """Build the tensor-, pipeline- and data-parallel groups of this job and return them.

    Raises ValueError when the layout does not fit the number of ranks, or the precision this machine.
    """
    distributed.start()
    parallel.check_world(distributed.world_size())
    precision.choose_implementation(parallel, precision.Machine.here())
    cpu.install()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 1)
    return ProcessGroupCollection.use_mpu_process_groups()


def shutdown() -> None:
    """Leave the job. A process that is to be forked must have left it: gloo's threads do not survive a fork."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    distributed.stop()
