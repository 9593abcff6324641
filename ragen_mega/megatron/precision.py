"""Implementation and precision of the layers: Transformer Engine or local, FP8 recipes, their
padding and requirements.

Requirements and alignments come from Transformer Engine 2.11 (`pytorch/quantization.py`,
`pytorch/utils.py`) and from megatron-core 0.16 (`fp8_utils.py`); they are checked before anything
is built, against a `Device` that is passed in.

Only the matrix products inside the layers are in FP8. Parameters stay bfloat16; their float32
master copies, Adam's moments and gradient sums are float32 (the optimizer of megatron-core with
`bf16`). megatron-core enters the FP8 context in `TransformerBlock.forward` and leaves it there, so
the LM head (a fused kernel or megatron-core's own linear layer) and the critic's value head
(float32) never see it; attention stays in bfloat16 too.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_te_version
from packaging.version import Version

from ragen_mega.config import ParallelConfig
from ragen_mega.config.sections.parallel import FP8Recipe
from ragen_mega.megatron import cpu

Implementation = Literal["local", "transformer_engine"]

MIN_TRANSFORMER_ENGINE = "2.9"
"""Version that megatron-core 0.16.1 requires; 2.11.0 is the version whose source was read."""
_INSTALL = "pip install --no-build-isolation 'ragen-mega[h100]'"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Requirements of an FP8 recipe on shapes and on the machine."""

    alignment: int
    """Rows and columns of every matrix are multiples of this, since each is an operand in a layer's
    three products.
    """
    gathered_alignment: int
    """The same for a slice of the tokens that sequence parallelism quantises before it is gathered.
    """
    min_capability: tuple[int, int]
    below_capability: tuple[int, int] | None
    min_cuda: tuple[int, int]


RECIPES: dict[FP8Recipe, Recipe] = {
    "delayed": Recipe(16, 16, (8, 9), None, (12, 1)),
    "tensorwise": Recipe(16, 16, (8, 9), None, (12, 1)),
    "blockwise": Recipe(16, 128, (9, 0), None, (12, 9)),
    "mxfp8": Recipe(32, 32, (10, 0), (12, 0), (12, 1)),
}


@dataclass(frozen=True, slots=True)
class Device:
    """Hardware and libraries that this process computes with."""

    capability: tuple[int, int] | None
    """Compute capability of the CUDA device, None without one."""
    cuda: tuple[int, int] | None
    """CUDA version of torch."""
    transformer_engine: str | None
    """Version, None if it is not installed."""
    flash_attention: bool = False
    """Whether flash-attn is installed."""

    @classmethod
    def here(cls) -> Device:
        """Return the device and the libraries of this process."""
        has_cuda = not cpu.is_active()
        version = (torch.version.cuda or "").split(".")
        return cls(
            capability=torch.cuda.get_device_capability() if has_cuda else None,
            cuda=(int(version[0]), int(version[1])) if has_cuda else None,
            transformer_engine=str(get_te_version()) if HAVE_TE else None,
            # not by the module: flash-attn-4, which SGLang needs, is in a folder of that name, and
            # Transformer Engine does not use it
            flash_attention=any(importlib.metadata.distributions(name="flash-attn")),
        )


def choose_implementation(parallel: ParallelConfig, machine: Device) -> Implementation:
    """Return the layers that `parallel` asks for on this machine. `auto` takes Transformer Engine
    where it can compute.

    Raises ValueError if what was asked for by name cannot work here.
    """
    if parallel.transformer_impl == "local":
        return "local"
    flags = {
        f"--transformer-impl {parallel.transformer_impl}": parallel.transformer_impl != "auto",
        f"--fp8 {parallel.fp8}": parallel.fp8 != "none",
    }
    asked = [flag for flag, is_asked in flags.items() if is_asked]
    if obstacle := _obstacle_to_layers(parallel, machine):
        if not asked:
            return "local"
        lacking, remedy = obstacle
        raise ValueError(f"{' and '.join(asked)} {lacking}; {remedy}")
    if parallel.fp8 != "none" and (fault := obstacle_to_recipe(parallel.recipe, machine)):
        raise ValueError(f"--fp8-recipe {parallel.recipe} {fault}; {_remedy(machine)}")
    return "transformer_engine"


def _obstacle_to_layers(parallel: ParallelConfig, machine: Device) -> tuple[str, str] | None:
    """(why Transformer Engine's layers cannot compute, what to do), None if they can."""
    drop = "drop --fp8" if parallel.fp8 != "none" else "set --transformer-impl local"
    if machine.capability is None:
        return "needs a CUDA device, and torch sees none", drop
    if machine.transformer_engine is None:
        return "needs Transformer Engine, which is not installed", f"{_INSTALL}, or {drop}"
    if Version(machine.transformer_engine).release < Version(MIN_TRANSFORMER_ENGINE).release:
        needed = (
            f"needs Transformer Engine {MIN_TRANSFORMER_ENGINE} or newer, not"
            f" {machine.transformer_engine}"
        )
        return needed, f"{_INSTALL}, or {drop}"
    if machine.capability < (8, 0):
        return f"needs bfloat16, so compute capability 8.0, not {_dotted(machine.capability)}", drop
    if machine.capability < (9, 0) and not machine.flash_attention:
        needed = (
            "needs fused attention for packed trajectories, which cuDNN has from compute capability"
            f" 9.0 on, not {_dotted(machine.capability)}; its other attention holds all scores"
        )
        return needed, f"install flash-attn, or {drop}"
    if not parallel.bf16:
        return "needs bfloat16: there is no fused attention in float32", f"add --bf16, or {drop}"
    return None


def obstacle_to_recipe(recipe: FP8Recipe, machine: Device) -> str | None:
    """Return why an FP8 recipe cannot run on the machine, None if it can."""
    rule = RECIPES[recipe]
    if machine.capability is None or machine.cuda is None:
        return "needs a CUDA device, and torch sees none"
    if machine.capability < rule.min_capability:
        return (
            f"needs compute capability {_dotted(rule.min_capability)}, not"
            f" {_dotted(machine.capability)}"
        )
    if rule.below_capability and machine.capability >= rule.below_capability:
        return (
            f"needs a compute capability below {_dotted(rule.below_capability)}, not"
            f" {_dotted(machine.capability)}"
        )
    if machine.cuda < rule.min_cuda:
        return f"needs CUDA {_dotted(rule.min_cuda)}, not {_dotted(machine.cuda)}"
    return None


def _remedy(machine: Device) -> str:
    possible = [name for name in RECIPES if obstacle_to_recipe(name, machine) is None]
    return (
        f"set --fp8-recipe {' or '.join(possible)}"
        if possible
        else "no recipe works here: drop --fp8"
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def layer_fields(parallel: ParallelConfig, implementation: Implementation) -> dict[str, Any]:
    """Return the fields of TransformerConfig (megatron-core) that set layers and precision."""
    fields: dict[str, Any] = dict(transformer_impl=implementation)
    if parallel.fp8 == "none":
        return fields
    fields |= dict(
        fp8=parallel.fp8,
        fp8_recipe=parallel.recipe,
        # Data-parallel ranks run different numbers of microbatches, so a collective in each
        # microbatch must not span those ranks.
        tp_only_amax_red=True,
    )
    # Transformer Engine's defaults; megatron-core's remember only one pass
    if parallel.recipe == "delayed":
        fields |= dict(fp8_amax_history_len=1024, fp8_amax_compute_algo="max")
    return fields


def token_alignment(parallel: ParallelConfig) -> int:
    """Return the multiple to which the tokens of a microbatch are padded.

    FP8 products need it of every slice that sequence parallelism cuts; without FP8 the slices need
    only be equal.
    """
    num_slices = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    if parallel.fp8 == "none":
        return num_slices
    rule = RECIPES[parallel.recipe]
    return num_slices * (rule.alignment if num_slices == 1 else rule.gathered_alignment)


def check_widths(widths: Mapping[str, int], parallel: ParallelConfig) -> None:
    """Raise ValueError unless FP8 products allow these widths (name -> rows or columns on one
    rank).
    """
    if parallel.fp8 == "none":
        return
    rule = RECIPES[parallel.recipe]
    for name, width in widths.items():
        # Only the hidden states are gathered quantised.
        multiple = (
            rule.gathered_alignment
            if parallel.sequence_parallel and name == "hidden size"
            else rule.alignment
        )
        if width % multiple:
            raise ValueError(
                f"--fp8-recipe {parallel.recipe} needs the {name} of a rank ({width}) to be a"
                f" multiple of {multiple}; drop --fp8 or change the model or"
                " --tensor-model-parallel-size"
            )


def scales_from_history(config: TransformerConfig) -> bool:
    """Return whether the scales of a pass come from the passes before it (delayed scaling); the
    first then has none.
    """
    return config.fp8 is not None and config.fp8_recipe == "delayed"


def describe(config: TransformerConfig) -> str:
    """Return the implementation and precision, in one line to print."""
    layers = (
        f"Transformer Engine {get_te_version()}"
        if config.transformer_impl == "transformer_engine"
        else "local"
    )
    numbers = str(config.params_dtype).removeprefix("torch.")
    text = f"{layers} layers in {numbers}"
    if config.fp8:
        text += f", FP8 {config.fp8} with {config.fp8_recipe} scaling"
    return text
