"""The few facts that differ between a GPU and the CPU, on which Triton's interpreter runs the same
kernels; and which arguments of a launch may start anywhere.
"""

import torch
from torch import Tensor

PER_TOKEN = (
    "LABELS", "OLD", "ADVANTAGES", "WEIGHTS", "REF", "ROLLOUT", "OUT", "LSE", "MEAN", "TARGET",
    "LOGPROBS", "ENTROPY", "D_LOGPROBS", "D_ENTROPY", "D_OTHERS", "REWARDS", "VALUES", "MASK",
    "TURN_ENDS", "OFFSETS", "RETURNS",
)  # fmt: skip
"""Pointers to one or a few numbers per token or trajectory. They are slices of a batch or rows of a
buffer, so their alignment to 16 bytes depends on lengths; compiling a kernel for each combination
would stall training for seconds.
"""
CHUNK_BYTES = {"cuda": 600 << 20, "cpu": 4 << 20}
"""Bytes of one chunk of logits over the whole vocabulary. On a GPU 2048 bf16 rows of 151936: with
fewer, re-reading the LM head starts to show. On a CPU, what stays in a core's cache over the passes
of the softmax.
"""
INTERPRETER_PROGRAMS = 3


def num_persistent_programs(device: torch.device) -> int:
    """Return one program per multiprocessor: the rows in flight then fit into L2, where the second
    pass finds them.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return INTERPRETER_PROGRAMS


def logits_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of logits: on a processor bfloat16 operands have float32 logits, since the
    rounding of logits to 8 bits is the largest error of a log-probability.
    """
    is_widened = hidden.dtype == torch.bfloat16 and hidden.device.type == "cpu"
    return torch.float32 if is_widened else hidden.dtype


def put_logits(out: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """out [C, V/tp] <- hidden [C, H] @ weight^T, in the dtype of `out`."""
    if out.dtype == hidden.dtype:
        torch.mm(hidden, weight.T, out=out)
        return
    # torch has no such product for processors: a second one, which sums in float32 too, returns
    # the bits that rounding took from the first.
    rounded = hidden @ weight.T
    out.copy_(rounded).add_(rounded.addmm_(hidden, weight.T, beta=-1))


def accumulate_matmul(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out += a @ b in the dtype of `out`, inside the GEMM."""
    if out.dtype == a.dtype:
        return out.addmm_(a, b)
    if a.device.type == "cuda":
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return out.add_(a @ b)
