"""Peaks of GPUs and their links, from data sheets, and the shares that programs reach."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

NODE = 8
"""GPUs that NVLink joins, where a machine does not say otherwise."""


@dataclass(frozen=True)
class Hardware:
    """Peaks of one GPU and its links, in operations, bytes and seconds."""

    name: str
    bf16: float
    """Dense operations a second; half of what data sheets give with sparsity."""
    fp8: float
    """The same in FP8; 0 where the GPU has none."""
    fp32: float
    """The same in float32, outside of the units that multiply narrower numbers."""
    memory: float
    """Bytes a second of its own memory."""
    gpu_gib: float
    nvlink: float
    """Bytes a second in one direction to the other GPUs of the node."""
    network: float
    """Bytes a second in one direction to other nodes: a network card for every GPU."""
    host_link: float
    """Bytes a second to or from host memory."""
    dollars: float
    """Price of an hour of one GPU, on demand; a default, prices differ by a factor of three."""
    source: str
    node: int = NODE

    def __post_init__(self) -> None:
        """Raise ValueError for an impossible number."""
        for entry in fields(self):
            value, may_be_none = getattr(self, entry.name), entry.name == "fp8"
            if entry.type == "str":
                continue
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if not is_number or value < 0 or not (value or may_be_none):
                raise ValueError(
                    f"{entry.name} of hardware {self.name} must be a positive number, not {value!r}"
                )

    def peak(self, itemsize: int, *, fp8: bool = False) -> float:
        """Return the operations a second of products of numbers of so many bytes, or in FP8."""
        if fp8:
            return self.fp8
        return self.bf16 if itemsize == 2 else self.fp32


_TB, _GB, _T = 1e12, 1e9, 1e12
_PRICE = "price: middle of specialised clouds in May 2026, mercatus-ai.com/blog/cloud-gpu-pricing"
_OWN_PRICE = "price: a guess, no list was found"
_TABLE = (
    Hardware(
        "A100",
        312 * _T,
        0,
        19.5 * _T,
        2.039 * _TB,
        80,
        300 * _GB,
        25 * _GB,
        25 * _GB,
        1.30,
        f"NVIDIA A100 80GB SXM data sheet; PCIe 4, HDR InfiniBand (DGX A100); {_PRICE}",
    ),
    Hardware(
        "H100",
        989.4 * _T,
        1978.9 * _T,
        67 * _T,
        3.35 * _TB,
        80,
        450 * _GB,
        50 * _GB,
        50 * _GB,
        3.00,
        f"NVIDIA H100 SXM data sheet; PCIe 5, NDR InfiniBand (DGX H100); {_PRICE}",
    ),
    Hardware(
        "H100-HBM2e",
        886 * _T,
        1773 * _T,
        67 * _T,
        2.4 * _TB,
        96,
        450 * _GB,
        50 * _GB,
        50 * _GB,
        3.00,
        "as H100 with the memory of torchtitan's benchmarks/llama3_h100_202412; peaks at its 500 W"
        f" between the data sheets of 400 W (NVL) and 700 W (SXM), by their watts; {_PRICE}",
    ),
    Hardware(
        "H200",
        989.4 * _T,
        1978.9 * _T,
        67 * _T,
        4.8 * _TB,
        141,
        450 * _GB,
        50 * _GB,
        50 * _GB,
        4.00,
        f"NVIDIA H200 SXM data sheet; PCIe 5, NDR InfiniBand (DGX H200); {_PRICE}",
    ),
    Hardware(
        "B200",
        2250 * _T,
        4500 * _T,
        75 * _T,
        8.0 * _TB,
        180,
        900 * _GB,
        50 * _GB,
        50 * _GB,
        5.00,
        f"NVIDIA DGX B200 data sheet (dense); PCIe 5, NDR InfiniBand; {_OWN_PRICE}",
    ),
    Hardware(
        "GB200",
        2500 * _T,
        5000 * _T,
        80 * _T,
        8.0 * _TB,
        186,
        900 * _GB,
        50 * _GB,
        225 * _GB,
        6.00,
        f"NVIDIA GB200 NVL72 data sheet (dense), a 72nd of it; NVLink-C2C; {_OWN_PRICE}",
        node=72,
    ),
    Hardware(
        "B300",
        2250 * _T,
        4500 * _T,
        75 * _T,
        8.0 * _TB,
        270,
        900 * _GB,
        100 * _GB,
        50 * _GB,
        6.00,
        f"NVIDIA DGX B300 data sheet (dense), ConnectX-8; {_OWN_PRICE}",
    ),
    Hardware(
        "GB300",
        2500 * _T,
        5000 * _T,
        80 * _T,
        8.0 * _TB,
        279,
        900 * _GB,
        100 * _GB,
        225 * _GB,
        7.00,
        f"NVIDIA GB300 NVL72 data sheet (dense), a 72nd of it; ConnectX-8; {_OWN_PRICE}",
        node=72,
    ),
    Hardware(
        "H800",
        989.4 * _T,
        1978.9 * _T,
        67 * _T,
        3.35 * _TB,
        80,
        200 * _GB,
        50 * _GB,
        50 * _GB,
        3.00,
        f"as H100 with NVLink at 400 GB/s both ways together; {_OWN_PRICE}",
    ),
    Hardware(
        "H20",
        148 * _T,
        296 * _T,
        44 * _T,
        4.0 * _TB,
        96,
        450 * _GB,
        50 * _GB,
        50 * _GB,
        1.50,
        f"H20 as vendors' manuals state it; {_OWN_PRICE}",
    ),
)
HARDWARE: Mapping[str, Hardware] = MappingProxyType({row.name: row for row in _TABLE})


@dataclass(frozen=True)
class Constants:
    """The shares of the peaks that programs reach, and the seconds that they lose besides, fitted
    to published steps (docs/benchmarks/predictor.md).
    """

    product: float = 0.64
    """Share of the peak in a large matrix product, its reads and writes not included."""
    product_fp8: float = 0.67
    """The same of the FP8 peak."""
    memory: float = 0.74
    """Share of the memory's speed in passes over activations and optimizer state."""
    link: float = 0.95
    """Share of the links' speed in collectives."""
    launch: float = 0.0016
    """Seconds in which the host starts the kernels of a layer's forward pass; of a backward pass
    twice that. The GPU waits if its work takes less.
    """
    update: float = 0.059
    """Seconds of an optimizer step on the host: data, waiting for norms, logging."""
    permute: float = 11.0
    """Reads and writes of a routed token's hidden state in a mixture's forward pass, besides the
    reads and writes of the products: sorted by expert, packed for the exchange and back.
    """
    decode_memory: float = 0.95
    """Share of the memory's speed at which a decode step reads weights and keys and values."""
    decode_layer: float = 7.4e-05
    """Further seconds of a layer in a decode step: small kernels."""
    decode_sequence: float = 3.9e-05
    """Seconds of a decode step for each sequence: sampling, scheduling, output."""
    decode_expert: float = 0.51
    """Speed of reading the weights of experts, relative to dense ones."""
    routing: float = 0.78
    """Texts whose choices of experts are independent, as an exponent of the texts of a step: texts
    on one subject choose alike.
    """
    sync: float = 2.6e9
    """Bytes a second at which a GPU's engine takes over weights, in buckets with their checks."""
    overhead: float = 3.7e-06
    """Seconds of a step of reinforcement learning outside its phases, for each of its tokens: the
    host's data, rewards, logs.
    """


INTERVAL = (0.964, 2.90)
"""Published seconds of a step of reinforcement learning over the predicted ones: the range of four
of five numbers on which no constant was fitted.
"""


@dataclass(frozen=True)
class Machine:
    """A kind of GPU and the shares of its peaks that programs reach."""

    hardware: Hardware
    constants: Constants = Constants()

    @property
    def memory(self) -> float:
        """Return the bytes a second of passes over its own memory."""
        return self.constants.memory * self.hardware.memory

    @property
    def host_link(self) -> float:
        """Return the bytes a second to or from host memory."""
        return self.constants.link * self.hardware.host_link

    def link(self, num_ranks: int, stride: int = 0) -> float:
        """Return the bytes a second of a collective among ranks that lie `num_ranks` apart at most.
        If every `stride`-th rank takes part, the ranks of a node share what comes in through their
        network cards; without a stride each has its own bytes to exchange.
        """
        hardware = self.hardware
        if num_ranks <= hardware.node:
            return self.constants.link * hardware.nvlink
        cards = max(1, hardware.node // stride) if stride else 1
        return self.constants.link * min(hardware.nvlink, cards * hardware.network)


def find_machine(name: str) -> Machine:
    """Find a row of the table, in any letter case, or read a .json file with the fields of
    `Hardware`. Raises ValueError for neither.
    """
    rows = {known.lower(): row for known, row in HARDWARE.items()}
    if (hardware := rows.get(name.lower())) is None:
        if not name.endswith(".json"):
            raise ValueError(
                f"--hardware must be one of {', '.join(HARDWARE)} or a .json file, not {name!r};"
                " take the nearest, or write the fields of another one to a file"
            )
        try:
            hardware = Hardware(**json.loads(Path(name).read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(
                f"--hardware {name} must be an object with the fields"
                f" {', '.join(entry.name for entry in fields(Hardware))} ({error}); correct it"
            ) from None
    return Machine(hardware)
