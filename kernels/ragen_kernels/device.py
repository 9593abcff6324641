"""The few facts that differ between a GPU and the CPU, on which Triton's interpreter runs the same
kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

INTERPRETER_PROGRAMS = 3


def num_persistent_programs(device: torch.device) -> int:
    """One program per multiprocessor: the rows in flight then fit into L2, where the second pass
    finds them.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return INTERPRETER_PROGRAMS


def matmul_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out = a @ b; a float32 `out` receives the unrounded accumulators of a narrow GEMM."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def accumulate_matmul(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out += a @ b in the dtype of `out`, inside the GEMM."""
    if out.dtype == a.dtype:
        return out.addmm_(a, b)
    if a.device.type == "cuda":
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return out.addmm_(a.to(out.dtype), b.to(out.dtype))
