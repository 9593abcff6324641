"""Products of bfloat16 on a processor without instructions for them, where torch's own take eight
times as long as products of float32 (AVX2, torch 2.13).
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PRODUCTS = (
    *("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_"),
    *("mm.out", "bmm.out", "addmm.out", "baddbmm.out"),
)
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def lacks_bfloat16() -> bool:
    """Return whether this process computes on an x86 processor that multiplies no bfloat16."""
    processor = torch.cpu.get_capabilities()
    multiplies = processor.get("avx512_bf16") or processor.get("amx_bf16")
    return not (torch.cuda.is_available() or multiplies) and bool(processor.get("avx2"))


@functools.cache
def multiply_in_float32() -> torch.library.Library:
    """Have torch multiply float32 copies of bfloat16 operands, for the life of this process. Sums
    are in float32 and results are rounded to bfloat16 once, as where there are instructions.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # of torch, that a kernel is replaced
        warnings.simplefilter("ignore")
        for name in _PRODUCTS:
            library.impl(name, _product(name), "CPU", allow_override=True)
    return library


def _product(name: str) -> Callable[..., Tensor]:
    """Return the kernel of an operation: its old one but for bfloat16."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    function = getattr(torch, name.removesuffix(".out").removesuffix("_"))

    def product(*operands: Tensor, **options: Any) -> Tensor:
        if operands[0].dtype != torch.bfloat16:
            return kernel.call_boxed(_CPU, *operands, **options)
        place = operands[0] if name.endswith("_") else options.pop("out", None)
        result = function(*(operand.float() for operand in operands), **options)
        return result.bfloat16() if place is None else place.copy_(result)

    return product
